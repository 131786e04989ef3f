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


def test_predicted_memory_of_an_8b_model() -> None:
    shown = {(row[0], row[1]): row[2:] for row in rows("| logprobs | activation checkpointing |")}
    from toolkit.memory_predict import predict_settings

    settings = {
        ("TP=1, all at once", "none"): {},
        ("", "inside the units (AutoModel)"): {"activation_checkpointing": "full"},
        ("TP=2, linear", "inside"): {
            "activation_checkpointing": "full",
            "tensor_parallel_size": 2,
            "logprob_mode": "linear",
        },
    }
    both = {
        f"{i} {dtype}": {**fields, "output_dtype": dtype}
        for i, fields in enumerate(settings.values())
        for dtype in ("float32", "bfloat16")
    }
    common = {"model": "Qwen3-8B", "ranks": 8, "sequence_length": 4096, "micro_batch_size": 2, "device": "cuda"}
    found = predict_settings(both, **common)
    for i, row in enumerate(settings):
        for dtype, shown_GiB in zip(("float32", "bfloat16"), shown[row], strict=False):
            assert f"{found[f'{i} {dtype}'].peak_bytes / 2**30:.2f}" == shown_GiB, (row, dtype)


@pytest.fixture(scope="module")
def edges() -> dict[str, tuple[float, float]]:
    with tk.launch(model=tk.tiny_policy()) as session:
        report = session.precision_edges()
    frame = report.to_frame()
    worst = frame.sort_values("error").groupby("edge").last()
    return {str(edge): (float(row.error), float(row.error_with_cure)) for edge, row in worst.iterrows()}
