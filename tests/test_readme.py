"""The README's measured tables, measured again. Bytes and rounding errors are the same on every run; times are not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import toolkit as tk

README = (Path(__file__).resolve().parents[1] / "README.md").read_text().splitlines()
pytestmark = pytest.mark.slow


def rows(header: str) -> list[list[str]]:
    """The cells of the table whose first line starts so, without markup."""
    first = next(i for i, line in enumerate(README) if line.startswith(header))
    found = []
    for line in README[first + 2 :]:
        if not line.startswith("|"):
            return found
        found.append([cell.strip().strip("`") for cell in line.replace("**", "").strip("|").split("|")])
    return found


@pytest.fixture(params=rows("| activation checkpointing |"), ids=lambda row: row[0].strip("`"))
def memory_row(request: pytest.FixtureRequest) -> Iterator[tuple[list[str], tk.Session]]:
    name = re.match(r"\w+", request.param[0].replace('"', "").replace("`", ""))
    assert name is not None
    checkpointing = False if name[0] == "none" else name[0]
    with tk.launch(model=tk.tiny_policy(), activation_checkpointing=checkpointing) as session:
        yield request.param, session


def test_memory_by_activation_checkpointing(memory_row: tuple[list[str], tk.Session]) -> None:
    (_, *peaks, retained), session = memory_row
    reports = [session.memory(output_dtype=d, num_sequences=16, sequence_length=256) for d in ("float32", "bfloat16")]
    assert [f"{report.peak_bytes / 2**20:.1f}" for report in reports] == peaks
    one_hidden_bytes = 16 * 256 * 128 * 4
    assert reports[0].boundary_bytes == int(retained) * one_hidden_bytes


#: The README's rows: an edge and a part of the setting; the largest error is shown. The row of the experts has its own test.
EDGES = [
    ("preference loss in bfloat16", ""),
    ("reward ties in bfloat16", ""),
    ("reward accuracy in bfloat16", ""),
    ("value MSE in bfloat16", "float32 returns"),
    ("value MSE in bfloat16", "bfloat16 returns"),
    ("temperature before the upcast", ""),
    ("temperature before the upcast, made-up logits", "T=0.7"),
    ("temperature held in bfloat16", ""),
    ("float32 head under a bfloat16 root", ""),
    None,
    ("float16 range", ""),
]


def test_precision_edges_of_the_tiny_policy() -> None:
    """To a factor of 1.5 (what is sampled differs between processors), float32 rounding to 10, and a zero to nothing."""
    shown = rows("| edge | as it is |")
    assert len(shown) == len(EDGES)
    with tk.launch(model=tk.tiny_policy()) as session:
        frame = session.precision_edges().to_frame()
    for row, asked in zip(shown, EDGES, strict=True):
        if asked is None:
            continue
        edge, setting = asked
        found = frame[(frame["edge"] == edge) & frame["setting"].str.contains(setting, regex=False)]
        worst = found.sort_values("error").iloc[-1]
        for text, value in zip(row[1:3], (worst["error"], worst["error_with_cure"]), strict=True):
            if float(text) == 0:
                assert value == 0, row
            else:
                factor = 1.5 if float(text) > 1e-4 else 10
                assert float(text) / factor < value < float(text) * factor, (row, value)
