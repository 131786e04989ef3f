"""The face of every record: a short text, an HTML table with units, a figure in the one look, a frame, JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbconvert import HTMLExporter

import toolkit as tk
from toolkit import figures
from toolkit.edge_report import Edge, EdgeReport, unmeasured
from toolkit.records import StepRecords, format_bytes, model_name

KINDS = ("step", "steps", "evaluation", "memory", "divergence", "same", "edges", "tradeoffs", "check", "recipe")
MEASURED = Edge("preference loss", "all pairs", 2e-3, "relative", "upcast the scores first", 1e-8, "rounded to 8 bits")
OURS = {figures.BLUE, figures.VERMILION, figures.GREEN, figures.PURPLE, figures.GREY}


@pytest.fixture(scope="module")
def records(one_rank: tk.Session) -> dict[str, Any]:
    one_rank.output_dtype = "float32"
    return {
        "step": one_rank.grpo_step(),
        "steps": one_rank.grpo_step(2),
        "evaluation": one_rank.evaluate(20),
        "memory": one_rank.memory(num_sequences=2, sequence_length=16),
        "divergence": one_rank.divergence(),
        "same": one_rank.divergence("float32", "float32", truth=False),
        "edges": EdgeReport(str(tk.tiny_policy()), 5, [MEASURED, unmeasured("experts", "this model is dense")]),
        "tradeoffs": one_rank.tradeoffs(("float32", "bfloat16")),
        "check": one_rank.self_check(),
        "recipe": one_rank.to_recipe(),
    }


def titles(record: Any) -> str:
    return str(record.figure().layout.title.text)


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_one_deterministic_line_without_paths(kind: str, records: dict[str, Any]) -> None:
    text = repr(records[kind])
    assert text == repr(records[kind]) == f"{type(records[kind]).__name__}: {records[kind].headline}"
    assert "\n" not in text
    assert len(text) <= 600
    assert "0x" not in text
    assert str(Path(str(tk.tiny_policy())).parent) not in text


@pytest.mark.parametrize("kind", KINDS)
def test_figures_share_one_look_and_say_something_found(kind: str, records: dict[str, Any]) -> None:
    figure = records[kind].figure()
    assert figure.layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"
    assert figure.layout.template.layout.font.color == figures.GREY
    assert any(letter.isdigit() for letter in titles(records[kind]))
    used = {colour for trace in figure.data for colour in _colours(trace.to_plotly_json())}
    assert used <= OURS, used - OURS


def _colours(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for part in value.values():
            yield from _colours(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _colours(part)
    elif isinstance(value, str) and len(value) == 7 and value.startswith("#"):
        yield value


def test_titles_carry_the_records_numbers(records: dict[str, Any]) -> None:
    step, check, recipe = (records[kind] for kind in ("step", "check", "recipe"))
    assert titles(step) == f"Reward {step.metrics['reward']:.2f} in step {step.step}"
    rewards = [record.metrics["reward"] for record in records["steps"]]
    assert titles(records["steps"]) == f"Reward {rewards[0]:.2f} → {rewards[1]:.2f} in 2 steps"
    worst = {row["mode"]: row["max_abs_nats"] for row in check.modes}
    assert titles(check) == f"linear is nearest to float64, {worst['linear']:.1e} nats at most; all within their bounds"
    statuses = [row.status for row in recipe.keys]
    counts = [statuses.count(status) for status in ("mapped", "used", "ignored")]
    assert titles(recipe) == f"{counts[0]} keys of recipe are mapped, {counts[1]} used, {counts[2]} ignored"
    cells = recipe.figure().data[0].cells
    assert list(cells["values"][0]) == list(recipe.to_frame()["key"])


@pytest.mark.parametrize("kind", KINDS)
def test_json_and_frame_hold_the_summary_and_the_rows(kind: str, records: dict[str, Any]) -> None:
    record = records[kind]
    parsed = json.loads(record.to_json())
    if kind == "steps":
        assert [one["summary"]["reward"] for one in parsed] == [one.metrics["reward"] for one in record]
    else:
        assert parsed["type"] == type(record).__name__
        for name, value in record.summary.items():
            if isinstance(value, int | float) and value == value:
                assert parsed["summary"][name] == value
    rows = {
        "step": 1, "steps": 2, "evaluation": 20, "memory": 8, "edges": len(getattr(record, "edges", [])), "tradeoffs": 2,
        "check": 3, "recipe": len(getattr(record, "keys", [])),
    }  # fmt: skip
    tokens = getattr(record, "tokens", None)
    assert len(record.to_frame()) == (rows[kind] if kind in rows else len(tokens))


UNITS = {
    "step": lambda r: f"{sum(r.seconds.values()):.4g} s",
    "memory": lambda r: format_bytes(r.peak_bytes),
    "divergence": lambda r: f"{r.metrics['mean_abs_nats']:.4g} nats",
    "tradeoffs": lambda r: f"{r.rows[1].mean_abs_nats:.2e} nats",
    "check": lambda r: f"{r.modes[0]['max_abs_nats']:.4g} nats",
    "edges": lambda r: f"{r.biting[0].error:.2e}",
    "evaluation": lambda r: f"{r.accuracy:.4g}",
    "steps": lambda r: f"{r[0].metrics['reward']:.4g}",
    "same": lambda r: "0 nats",
    "recipe": lambda r: r.keys[0].key,
}


@pytest.mark.parametrize("kind", KINDS)
def test_exported_notebooks_show_the_table_with_units_offline(kind: str, records: dict[str, Any]) -> None:
    shell = InteractiveShell.instance()
    try:
        data, metadata = shell.display_formatter.format(records[kind])
    finally:
        InteractiveShell.clear_instance()
    assert {"text/plain", "text/html"} <= set(data)
    output = nbformat.v4.new_output("execute_result", data, metadata=metadata, execution_count=1)
    cell = nbformat.v4.new_code_cell("record", outputs=[output], execution_count=1)
    page, _ = HTMLExporter(exclude_input=True).from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    shown = page[page.index("jp-OutputArea-output") :]
    assert "<table" in shown
    assert f">{UNITS[kind](records[kind])}<" in shown
    assert "<script" not in records[kind]._repr_html_()


def test_no_steps_are_shown_as_such() -> None:
    none = StepRecords()
    assert repr(none) == "StepRecords: no steps"
    assert none.summary == {"steps": 0}
    assert none.figure().layout.title.text == "No step was taken yet"
    assert json.loads(none.to_json()) == []
    assert len(none.to_frame()) == 0


def test_models_are_named_without_the_path_to_them() -> None:
    assert model_name("/somewhere/tiny_policy") == "tiny_policy"
    assert model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
