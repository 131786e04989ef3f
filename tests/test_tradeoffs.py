"""The grid of settings: what is measured, what is predicted and says so, the Pareto front, the verdict, the exports."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit.errors import SpecError
from toolkit.launching import twin_of
from toolkit.tradeoff_figures import numbered
from toolkit.tradeoff_report import TradeoffRow, grid_verdict, pareto_front

SIZES = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_new_tokens": 4}


def row(peak: int | None, nats: float | None, error: float | None = 1.0, **fields: Any) -> TradeoffRow:
    given = {"output_dtype": "float32", "activation_checkpointing": False, "logprob_mode": "materialized", **fields}
    return TradeoffRow(
        **given, tensor_parallel_size=1, peak_bytes=peak, peak_phase="loss", logit_peak_bytes=0, boundary_bytes=0,
        memory_source="measured", mean_abs_nats=nats, max_abs_nats=nats, token_mult_prob_error=error,
        gradient_relative_error=0.0, divergence_source="measured",
    )  # fmt: skip


def test_the_front_by_hand() -> None:
    rows = [row(100, 0.0), row(90, 0.1), row(95, 0.2), row(90, 0.05), row(None, 0.0), row(10, None), row(100, 0.0)]
    assert [r.pareto for r in pareto_front(rows)] == [True, False, False, True, None, None, True]


def test_the_verdict_takes_the_smallest_peak_within_the_fields_limits() -> None:
    axes = ("output_dtype", "logprob_mode")
    rows = [
        row(1000, 0.0), row(900, 0.01, 1.01, logprob_mode="chunked"), row(800, 0.3, 1.4, output_dtype="float16"),
    ]  # fmt: skip
    words = grid_verdict(pareto_front(rows), axes)
    assert words.startswith(
        "Of the whole grid: use float32 outputs, chunked logprobs; its peak of 900 B (measured) is 10.0% below"
    )
    assert words.endswith("1.0e-02 nats from the reference.")
    twin = dataclasses.replace(rows[1], divergence_source="measured in a twin, from its own float32 outputs")
    assert grid_verdict(pareto_front([rows[0], twin]), axes).endswith("1.0e-02 nats from its own build's reference.")
    nearer = [dataclasses.replace(r, from_float64_nats=x) for r, x in zip(rows, (0.02, 0.001, 0.2), strict=True)]
    assert grid_verdict(pareto_front(nearer), axes).endswith(
        "Nearest to a float64 run is float32 outputs, chunked logprobs: 1.0e-03 nats; the reference is 2.0e-02 away."
    )
    level = [dataclasses.replace(r, from_float64_nats=x) for r, x in zip(rows, (7e-7, 6e-7, 0.2), strict=True)]
    assert "Nearest" not in grid_verdict(pareto_front(level), axes)
    assert "keep float32 outputs, materialized logprobs" in grid_verdict(pareto_front(rows[:1] + rows[2:]), axes)
    assert "the reference itself cannot be used" in grid_verdict(pareto_front([row(None, None), row(5, 0.1)]), axes)


def test_dtypes_and_modes_are_measured_in_the_session_itself(one_rank: tk.Session) -> None:
    report = one_rank.tradeoffs(("float32", "bfloat16"), logprob_modes=("materialized", "chunked"))
    frame = report.to_frame()
    assert len(frame) == 4
    assert set(frame["memory_source"]) == set(frame["divergence_source"]) - {"the reference"} == {"measured"}
    assert frame.loc[0, "mean_abs_nats"] == 0.0
    by = frame.set_index(["output_dtype", "logprob_mode"])
    assert 0 < by.loc[("bfloat16", "materialized"), "mean_abs_nats"] < 0.05
    assert (by["from_float64_nats"] > 1e-3).all()
    assert by.loc[("float32", "chunked"), "mean_abs_nats"] < 1e-5
    one_rank.set_live(logprob_mode="chunked")
    direct = one_rank.memory(output_dtype="bfloat16")
    one_rank.set_live(logprob_mode="materialized")
    assert by.loc[("bfloat16", "chunked"), "peak_bytes"] == direct.peak_bytes
    assert report.varied == ("output_dtype", "logprob_mode")
    points = report.figure().data[1:]
    assert [point.name for point in points][1] == "2: float32 outputs, chunked logprobs"
    assert sorted(", ".join(point.text[0] for point in points if point.text[0]).split(", ")) == ["1", "2", "3", "4"]
    assert "Of the whole grid: " in report.verdict
    assert one_rank.spec.logprob_mode == "materialized"


def test_points_that_fall_together_share_a_label() -> None:
    assert numbered([(0.0, 5.0), (0.5, 5.0), (0.01, 5.01), (0.0, 6.0), (0.52, 5.02)]) == ["1, 3", "2, 5", "", "4", ""]


def test_what_needs_another_build_is_predicted_and_says_so(two_ranks: tk.Session) -> None:
    report = two_ranks.tradeoffs(("float32", "bfloat16"), checkpointing=(False, "hf"), tensor_parallel_sizes=(1, 2))
    frame = report.to_frame().set_index(["output_dtype", "activation_checkpointing", "tensor_parallel_size"])
    assert len(frame) == 8
    assert frame.loc[("float32", False, 1), "memory_source"] == "measured"
    predicted = frame[frame["memory_source"] == "predicted"]
    assert len(predicted) == 6
    repeated = frame.loc[("bfloat16", "hf", 1)]
    assert repeated["mean_abs_nats"] == frame.loc[("bfloat16", False, 1), "mean_abs_nats"] > 0
    assert "repeats the same forward" in repeated["divergence_source"]
    other = frame.loc[("bfloat16", False, 2)]
    assert other.isna()["mean_abs_nats"]
    assert "needs a twin" in other["divergence_source"]
    assert other["peak_bytes"] > 0
    assert other["pareto"] is None
    assert {trace.marker.symbol.endswith("-open") for trace in report.figure().data[1:]} == {True, False}


def test_a_prediction_beside_the_measured_is_of_the_same_tokens() -> None:
    """What a twin measures at that size and what was predicted agree."""
    with tk.launch(model=tk.tiny_policy(), **SIZES) as session:
        predicted = session.tradeoffs(("float32", "bfloat16"), checkpointing=(False, "hf"))
        shape = {name: predicted.sizes[name] for name in ("num_sequences", "sequence_length")}
    with tk.launch(model=tk.tiny_policy(), activation_checkpointing="hf", **SIZES) as session:
        measured = session.memory(output_dtype="bfloat16", **shape)
    frame = predicted.to_frame().set_index(["output_dtype", "activation_checkpointing"])
    assert frame.loc[("bfloat16", "hf"), "peak_bytes"] == pytest.approx(measured.peak_bytes, rel=0.02)


def test_twins_measure_with_the_sessions_own_weights_and_leave_no_trace(tmp_path: Path) -> None:
    with tk.launch(model=tk.tiny_policy(), learning_rate=1e-3, **SIZES) as session:
        session.grpo_step()
        session.save(tmp_path / "mine")
        report = session.tradeoffs(("float32", "bfloat16"), checkpointing=(False, "hf"), twins=True)
        frame = report.to_frame().set_index(["output_dtype", "activation_checkpointing"])
        assert frame.loc[("bfloat16", "hf"), "memory_source"] == "measured in a twin"
        assert "a twin" in frame.loc[("bfloat16", "hf"), "divergence_source"]
        # The same weights and tokens, and checkpointing repeats the same forward.
        assert frame.loc[("bfloat16", "hf"), "mean_abs_nats"] == frame.loc[("bfloat16", False), "mean_abs_nats"] > 0
        assert frame.loc[("float32", "hf"), "boundary_bytes"] > frame.loc[("float32", False), "boundary_bytes"]
        assert "mine" in session.restart()
        session.grpo_step()


@pytest.mark.slow
def test_a_tensor_parallel_twin_is_measured_on_both_ranks() -> None:
    """Its rows are what sessions of that very layout measure, and what is reported of the session itself stays its own."""
    fields = {"precision": "float32", "learning_rate": 1e-3, **SIZES}
    dtypes = ("float32", "bfloat16")
    with tk.launch(model=tk.tiny_policy(), ranks=2, **fields) as session:
        session.grpo_step()
        report = session.tradeoffs(dtypes, tensor_parallel_sizes=(1, 2), twins=True)
        frame = report.to_frame().set_index(["output_dtype", "tensor_parallel_size"])
        with twin_of(session, tensor_parallel_size=2) as twin:
            assert twin.spec.tensor_parallel_size == 2
            peaks = {dtype: twin.memory(output_dtype=dtype) for dtype in dtypes}
            apart = twin.divergence("float32", "bfloat16")
        own = session.divergence("float32", "bfloat16")
        session.grpo_step()
    assert set(frame["failure"]) == {""}
    for dtype, memory in peaks.items():
        row = frame.loc[(dtype, 2)]
        assert row["memory_source"] == "measured in a twin"
        assert row["peak_bytes"] == pytest.approx(memory.peak_bytes, rel=0.02)  # gloo lets go of a tensor when it gets to it
        assert row["logit_peak_bytes"] == memory.logit_peak_bytes
    for parallel, divergence in ((1, own), (2, apart)):
        row = frame.loc[("bfloat16", parallel)]
        assert row["mean_abs_nats"] == divergence.metrics["mean_abs_nats"] > 1e-4
        assert row["gradient_relative_error"] == divergence.metrics["gradient_relative_error"]
        assert row["from_float64_nats"] == divergence.truth["b_from_float64_nats"]
    assert frame.loc[("bfloat16", 2), "divergence_source"] == "measured in a twin, from its own float32 outputs"
    assert frame.loc[("float32", 2), "divergence_source"] == "the reference of its twin"
    assert frame.loc[("float32", 2), "mean_abs_nats"] == 0.0
    assert "below float32 outputs, TP 1, itself the reference of its build." in report.verdict


def test_float16_that_overflows_is_a_row_with_its_failure() -> None:
    def overflow(policy: Any) -> None:
        policy.model.model.layers[3].mlp.down_proj.weight.data.mul_(3e5)

    with tk.launch(model=tk.tiny_policy(), **SIZES) as session:
        session.run(overflow)
        report = session.tradeoffs(logprob_modes=("materialized", "chunked"))
        failed = report.to_frame().query("output_dtype == 'float16'")
        assert failed["failure"].str.contains("model.layers.3").all()
        assert failed["peak_bytes"].isna().all()
        assert "float16 outputs cannot be used" in report.verdict
        assert session.spec.logprob_mode == "materialized"


def test_without_a_session_the_grid_is_predicted() -> None:
    report = tk.tradeoffs(tk.PolicySpec(model=tk.tiny_policy()), dtypes=("float32", "bfloat16"), checkpointing=(False, "hf"))
    frame = report.to_frame()
    assert len(frame) == 4
    assert set(frame["memory_source"]) == {"predicted"}
    assert frame["mean_abs_nats"].isna().all()
    assert report.sizes == {"num_sequences": 1, "sequence_length": 256, "ranks": 1}
    assert "no divergence was measured" in report.verdict
    single = tk.predict_memory(tk.tiny_policy(), ranks=1, sequence_length=256, output_dtype="bfloat16")
    assert frame.query("output_dtype == 'bfloat16'").iloc[0]["peak_bytes"] == single.peak_bytes
    assert len(report.figure().data[0].x) == 4


def test_the_exports_stand_alone(one_rank: tk.Session, tmp_path: Path) -> None:
    report = one_rank.tradeoffs(("float32", "bfloat16"))
    page = report.to_html(tmp_path / "tradeoffs.html").read_text(encoding="utf-8")
    assert report.verdict.split(".")[0] in page
    assert "Plotly.newPlot" in page
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']https?:", page)
    parsed = json.loads(report.to_json())
    assert [r["output_dtype"] for r in parsed["rows"]] == ["float32", "bfloat16"]
    assert parsed["memory"]["float32"]["peak_bytes"] == report.memory["float32"].peak_bytes
    assert "<table>" in report._repr_html_()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"dtypes": "float32"}, r"dtypes='float32': give a list of values"),
    ({"dtypes": ("float32", "float8")}, "dtypes='float8'"),
    ({"dtypes": ("float32",)}, "two or more different settings"),
    ({"checkpointing": ("sometimes",)}, "activation_checkpointing='sometimes'"),
    ({"tensor_parallel_sizes": (1, 3)}, "tensor_parallel_size=3|not divisible"),
    ({"logprob_modes": ("lazy",)}, "logprob_mode='lazy'"),
    ({"twins": 1}, "twins=1 must be True or False"),
]


@pytest.mark.parametrize(("options", "reason"), BAD)
def test_bad_grids_are_named_and_the_session_goes_on(options: dict[str, Any], reason: str, two_ranks: tk.Session) -> None:
    with pytest.raises(SpecError, match=reason):
        two_ranks.tradeoffs(**options)
    assert two_ranks.is_open
    assert set(two_ranks.units()["output_dtype"]) == {"float32"}
