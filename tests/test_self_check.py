"""The session's check of itself against float64: its numbers, its bounds, and that it catches an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit as tk
from toolkit import self_check as module
from toolkit.self_check import SelfCheckReport

from .conftest import SMALL

IDS = [[1, 5, 6, 7, 2], [1, 8, 9, 4, 10, 11, 2], [1, 3, 3, 2]]  # an odd number of sequences for two ranks


def by_mode(report: SelfCheckReport) -> dict[str, dict[str, Any]]:
    return {row["mode"]: row for row in report.modes}


@pytest.mark.parametrize("layout", [{}, {"ranks": 2}, {"ranks": 2, "tensor_parallel_size": 2}], ids=str)
def test_linear_mode_is_orders_closer_to_float64_than_a_16_bit_head(layout: dict[str, int]) -> None:
    with tk.launch(model=tk.tiny_policy(), output_dtype="bfloat16", **layout, **SMALL) as session:
        report = session.self_check(token_ids=IDS, temperature=0.7)
        assert report.passed
        assert report.num_tokens >= sum(len(row) - 1 for row in IDS)
        modes = by_mode(report)
        assert list(modes) == ["materialized", "chunked", "linear"]
        assert modes["linear"]["max_abs_nats"] < 2e-5
        assert modes["materialized"]["max_abs_nats"] > 100 * modes["linear"]["max_abs_nats"]
        assert modes["materialized"]["max_abs_nats"] > 0.02 * modes["materialized"]["bound_nats"]  # no idle bound
        assert session.self_check().passed  # on sampled completions
        assert session.spec.logprob_mode == "materialized"


def test_in_float32_every_mode_is_exact() -> None:
    with tk.launch(model=tk.tiny_policy(), precision="float32", logprob_mode="linear", **SMALL) as session:
        report = session.self_check(token_ids=IDS)
        assert report.passed
        assert max(row["max_abs_nats"] for row in report.modes) < 2e-5
        assert session.spec.logprob_mode == "linear"


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature_order": "before_upcast", "logprob_mode": "chunked", "logprob_chunk_size": 3, "temperature": 0.7},
        {"lm_head_precision": "float32", "output_dtype": "bfloat16"},
        {"output_dtype": "float16"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_bounds_hold_under_other_settings(fields: dict[str, Any]) -> None:
    with tk.launch(model=tk.tiny_policy(), **fields, **SMALL) as session:
        before = session.spec
        assert session.self_check(token_ids=IDS).passed
        assert session.spec == before


def test_a_tied_head_is_checked_too(tied_model: Path) -> None:
    with tk.launch(model=tied_model, **SMALL) as session:
        assert session.self_check(token_ids=IDS).passed


@pytest.mark.parametrize(("added", "mode"), [(3e-4, "linear"), (0.5, "materialized"), (float("nan"), "chunked")])
def test_an_error_is_caught(added: float, mode: str, one_rank: tk.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    right = module.forward_logprobs

    def wrong(policy: Any, *args: Any) -> torch.Tensor:
        off = added if policy.spec.logprob_mode == mode else 0.0
        return right(policy, *args) + off

    monkeypatch.setattr(module, "forward_logprobs", wrong)
    report = one_rank.self_check(token_ids=IDS)
    assert not report.passed
    assert [row["mode"] for row in report.modes if not row["within_bound"]] == [mode]
    assert f"{mode} OUTSIDE" in repr(report)


def test_the_report_shows_itself(one_rank: tk.Session) -> None:
    report = one_rank.self_check(token_ids=IDS)
    assert repr(report).startswith("SelfCheckReport: largest error in nats against float64 over 13 tokens: materialized ")
    assert "all within their bounds" in report._repr_html_()
    assert json.loads(report.to_json())["summary"]["passed"] is True
    assert list(report.to_frame().columns) == ["mode", "mean_abs_nats", "max_abs_nats", "bound_nats", "within_bound"]
    assert [bar.name for bar in report.figure().data] == ["largest error", "bound"]
    assert list(report.figure().data[0].y) == [row["max_abs_nats"] for row in report.modes]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"token_ids": [[1]]}, "two or more"),
        ({"token_ids": [[1, 999]]}, "outside the vocabulary"),
        ({"temperature": 0}, "logits are divided by it"),
    ],
)
def test_bad_requests_are_named(options: dict[str, Any], reason: str, one_rank: tk.Session) -> None:
    with pytest.raises(tk.SpecError, match=reason):
        one_rank.self_check(**options)
