"""What a newcomer types by mistake: a SpecError that names it and says the way out, and the session goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit.checks import check_file
from toolkit.errors import SpecError

PATHS: list[tuple[Any, str]] = [
    (None, r"\(None\): give a path"),
    (5, r"\(5\): give a path"),
    ("", r"\(''\): give a path"),
    ("a\0b", r"give a path"),
    ("a" * 300, r"no such path can be \(.*name too long"),
    ("~nobody-here/x", r"no such path can be"),
    ("FILE", r"file'\): that is a file, and a folder is needed"),
    ("FILE/below", r"file' is a file, and a folder is needed"),
    ("/proc/nothing", r"nothing can be written there"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("kept")
    return tmp_path / "file"


@pytest.mark.parametrize("call", ["save", "export"])
@pytest.mark.parametrize(("path", "message"), PATHS)
def test_paths_to_write_to(call: str, path: Any, message: str, file: Path, one_rank: tk.Session) -> None:
    path = path.replace("FILE", str(file)) if isinstance(path, str) else path
    with pytest.raises(SpecError, match=f"^{call}.*{message}"):
        getattr(one_rank, call)(path)
    assert [entry.name for entry in file.parent.iterdir()] == ["file"]
    assert file.read_text() == "kept"
    assert one_rank.is_open


@pytest.mark.parametrize(("path", "message"), [p for p in PATHS if p[0] is not None])
def test_checkpoint_folders_are_tried_before_anything_is_launched(path: Any, message: str, file: Path) -> None:
    path = path.replace("FILE", str(file)) if isinstance(path, str) else path
    # "save(5): ..." is "checkpoint_dir=5: ..." here
    as_field = re.sub(r"^\\\((.*?)\\\)|'\\\)", lambda call: call[1] or "'", message)
    with pytest.raises(SpecError, match=f"^checkpoint_dir=.*{as_field}"):
        tk.launch(model=tk.tiny_policy(), checkpoint_dir=path)
    assert [entry.name for entry in file.parent.iterdir()] == ["file"]


def test_files_to_write(tmp_path: Path) -> None:
    assert check_file("to_html", tmp_path / "new.html") == tmp_path / "new.html"
    with pytest.raises(SpecError, match="that is a folder; give the path of a file"):
        check_file("to_html", tmp_path)
    with pytest.raises(SpecError, match="there is no folder"):
        check_file("to_html", tmp_path / "no" / "x.html")
    assert list(tmp_path.iterdir()) == []


CALLS: list[tuple[Callable[[tk.Session], Any], str]] = [
    (lambda s: tk.resume(None), r"resume\(None\): give a path"),  # type: ignore[arg-type]
    (lambda s: tk.load_recipe(None), r"load_recipe\(None\): give a path"),  # type: ignore[arg-type]
    (lambda s: tk.load_recipe("x.yaml", 5), r"overrides=5: give a list"),  # type: ignore[arg-type]
    (lambda s: s.to_recipe().to_yaml(5), r"to_yaml\(5\): give a path"),  # type: ignore[arg-type]
    (lambda s: s.divergence(text=5), r"text=5: give a text, or a list of texts"),  # type: ignore[arg-type]
    (lambda s: s.divergence(text=[]), r"text=\[\]: give a text"),
    (lambda s: s.divergence(text=["1+1=2", None]), r"text=\['1\+1=2', None\]: give a text"),  # type: ignore[list-item]
    (lambda s: s.tradeoffs(5.0), r"dtypes=5.0: give a list of values, e.g. \[5.0\]"),  # type: ignore[arg-type]
    (lambda s: s.tradeoffs(checkpointing="hf"), r"checkpointing='hf': give a list of values, e.g. \['hf'\]"),
    (lambda s: s.memory(num_sequences=2), r"num_sequences=2, sequence_length=None: give both"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_values_of_a_wrong_kind(call: Callable[[tk.Session], Any], message: str, one_rank: tk.Session) -> None:
    with pytest.raises(SpecError, match=message):
        call(one_rank)
    assert one_rank.is_open
    assert len(one_rank.rollout(1)) == one_rank.config.num_generations_per_prompt


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("float64", None),
        ("int16x", None),
        ("bfloat61", None),
        ("bfloat", "bfloat16"),
        ("blfoat16", "bfloat16"),
        ("flaot32", "float32"),
    ],
)
def test_a_dtype_is_suggested_only_where_a_slip_is_likely(typed: str, hint: str | None) -> None:
    with pytest.raises(SpecError, match="choose one of float32, bfloat16, float16") as error:
        tk.PolicySpec(model="x", output_dtype=typed)
    assert str(error.value).endswith(f"Did you mean {hint!r}?" if hint else "float32, bfloat16, float16.")


def test_temperature_0_is_about_greedy_sampling_only_where_something_is_sampled(one_rank: tk.Session) -> None:
    for call in (one_rank.divergence, one_rank.self_check, lambda **t: one_rank.logprobs([[1, 2]], **t)):
        with pytest.raises(SpecError, match="temperature=0: logits are divided by it; give one from 0.001 to 1000") as error:
            call(temperature=0)
        assert "greedy" not in str(error.value)
    with pytest.raises(SpecError, match=r"temperature=0: greedy completions .* Use session.evaluate\(\)"):
        tk.GRPOConfig(temperature=0)


def test_what_has_to_be_called_is_checked_when_it_is_given(one_rank: tk.Session) -> None:
    for call in (one_rank.on_change, one_rank.on_close, one_rank.run):
        with pytest.raises(SpecError, match=rf"^{call.__name__}\(5\): give a function"):
            call(5)
    with pytest.raises(SpecError, match=r"^run_cell\(b'1'\): give the cell's code, as text"):
        one_rank.run_cell(b"1")  # type: ignore[arg-type]
    dtype = one_rank.output_dtype
    one_rank.output_dtype = "bfloat16" if dtype == "float32" else "float32"  # no listener was kept
    one_rank.output_dtype = dtype
