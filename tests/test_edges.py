"""Precision edges: worked values of each formula, and each edge measured on a live model against an oracle."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit as tk
from toolkit import edge_rows
from toolkit.edge_report import Edge, EdgeReport
from toolkit.edge_rows import HeadRows, float32_head, head_edges, raw_loss_edges, temperature_edges
from toolkit.edges import _head_rows
from toolkit.errors import SpecError
from toolkit.expert_edges import EXPERT_HEAD
from toolkit.policy import Policy
from toolkit.prompts import make_batch
from toolkit.raw_losses import preference_accuracy, preference_loss, value_loss
from toolkit.rounding import (
    normal_logits,
    rounded_temperature,
    temperature_order_error,
    temperature_rounding_error,
)

ROWS = [[1, 5, 14, 6, 40, 7, 8, 2], [1, 7, 14, 13, 5, 40, 11, 2], [1, 20, 30, 2]]


def bf16(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


# ---- losses on raw outputs


def test_preference_loss_by_hand() -> None:
    chosen, rejected = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, 2.0], [0.0, 2.0]))
    want = (math.log1p(math.exp(-1)) + math.log(2)) / 2
    assert float(preference_loss(chosen, rejected)) == pytest.approx(want, abs=1e-15)
    want = (math.log1p(math.exp(-0.5)) + math.log(2)) / 2
    assert float(preference_loss(chosen, rejected, beta=0.5)) == pytest.approx(want, abs=1e-15)


def test_the_preference_loss_in_bfloat16_rounds_the_difference_and_the_sigmoid() -> None:
    """3 - 0.0078125 needs 9 bits: 8 round it to 3. And log sigmoid(3) is rounded once more."""
    chosen, rejected = bf16(3.0), bf16(0.0078125)
    exact = math.log1p(math.exp(-(3 - 0.0078125)))
    upcast = preference_loss(chosen, rejected)
    assert upcast.dtype == torch.float32
    assert float(upcast) == pytest.approx(exact, rel=1e-6)
    plain = preference_loss(chosen, rejected, upcast=False)
    assert plain.dtype == torch.bfloat16
    rounded = float(torch.tensor(math.log1p(math.exp(-3)), dtype=torch.float64).bfloat16())
    assert float(plain) == rounded
    assert rounded / exact - 1 < -5e-3


def test_rewards_tie_in_bfloat16_and_a_tie_is_not_right() -> None:
    """Between 64 and 128 bfloat16 has every half; 100.1 and 100.2 are both 100."""
    chosen, rejected = torch.tensor([100.2, 101.0, 7.0, 1.0]), torch.tensor([100.1, 100.0, 6.0, 2.0])
    assert preference_accuracy(chosen, rejected) == (0.75, 0.0)
    assert preference_accuracy(chosen.bfloat16(), rejected.bfloat16()) == (0.5, 0.25)
    assert preference_accuracy(chosen.bfloat16().float(), rejected.bfloat16().float()) == (0.5, 0.25)


def test_value_loss_by_hand() -> None:
    values, returns, old = (torch.tensor(x, dtype=torch.float64) for x in ([1.0, 3.0], [2.0, 3.0], [1.0, 1.0]))
    assert float(value_loss(values, returns)) == 0.25
    # Clipped to old -+ 0.5 the second value is 1.5, whose square error 2.25 is the larger one.
    assert float(value_loss(values, returns, old_values_N=old, clip_range=0.5)) == pytest.approx((1 + 2.25) / 4)


def test_float32_returns_promote_the_value_loss() -> None:
    values, returns = bf16(1.0, 3.0), torch.tensor([2.001, 2.999])
    exact = float(value_loss(values.double(), returns.double()))
    assert value_loss(values, returns, upcast=False).dtype == torch.float32
    assert float(value_loss(values, returns, upcast=False)) == pytest.approx(exact, rel=1e-6)
    assert value_loss(values, returns.bfloat16(), upcast=False).dtype == torch.bfloat16


BAD_LOSSES: list[tuple[Callable[[], Any], str]] = [
    (lambda: preference_loss(bf16(1.0), bf16(1.0, 2.0)), r"chosen_N \(1,\), rejected_N \(2,\)"),
    (lambda: preference_loss(bf16(), bf16()), "chosen_N is empty"),
    (lambda: preference_loss(torch.tensor([1]), bf16(1.0)), "chosen_N is torch.int64"),
    (lambda: preference_loss(bf16(1.0), bf16(1.0), beta=0.0), "beta=0.0 must be above 0"),
    (lambda: value_loss(bf16(1.0), bf16(1.0), clip_range=0.2), "clip_range and old_values_N together"),
    (lambda: preference_accuracy(bf16(1.0), 3), "rejected_N is int"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "reason"), BAD_LOSSES)
def test_bad_losses_are_named(call: Callable[[], Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        call()


# ---- the temperature


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_temperature_error_by_hand() -> None:
    """Logits 1 and 0 at T=0.7: bfloat16 has 1.4296875 for 1/0.7 = 1.428571..."""
    exact, rounded = 1 / 0.7, 1.4296875
    right, wrong = (np.array([sigmoid(x), sigmoid(-x)]) for x in (exact, rounded))
    found = temperature_order_error(bf16(1.0, 0.0)[None], 0.7)
    assert found.tolist() == [pytest.approx(np.abs(wrong / right - 1).mean(), rel=1e-9)]
    right, wrong = (np.array([sigmoid(x), sigmoid(-x)]) for x in (exact, 1 / 0.69921875))
    found = temperature_rounding_error(bf16(1.0, 0.0)[None], 0.7, torch.bfloat16)
    assert found.tolist() == [pytest.approx(np.abs(wrong / right - 1).mean(), rel=1e-9)]
    assert rounded_temperature(0.7, torch.bfloat16) == 0.69921875


def test_the_reviewed_figure_is_reproduced() -> None:
    """2.71 % (sd 0.38 between batches of 24 rows) at T=0.7 for N(0, 5^2) over 128256; exactly 0 at T=0.5 and 1."""
    logits_NV = normal_logits(48, 128256, 5.0)
    assert 100 * float(temperature_order_error(logits_NV, 0.7).mean()) == pytest.approx(2.71, abs=0.38)
    for temperature in (0.5, 1.0):
        assert temperature_order_error(logits_NV[:2], temperature).tolist() == [0.0, 0.0]
    narrow = normal_logits(8, 128256, 3.0)  # it depends on the spread, and on an offset that no softmax sees
    assert 100 * float(temperature_order_error(narrow, 0.7).mean()) == pytest.approx(0.97, abs=0.2)
    shifted = normal_logits(8, 128256, 3.0, mean=20.0)
    assert 100 * float(temperature_order_error(shifted, 0.7).mean()) > 3


@settings(deadline=None, max_examples=30)
@given(st.integers(-6, 6), st.floats(0.1, 30), st.sampled_from([torch.bfloat16, torch.float16]))
def test_powers_of_two_divide_exactly(exponent: int, std: float, dtype: torch.dtype) -> None:
    logits_NV = normal_logits(2, 40, std).to(dtype)
    logits_NV[logits_NV.abs() < 0.02] = 0.0  # float16's subnormal numbers have no exponent left to change
    assert temperature_order_error(logits_NV, 2.0**exponent).tolist() == [0.0, 0.0]
    assert temperature_rounding_error(logits_NV, 2.0**exponent, dtype).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("logits", "temperature"), [(bf16(1.0), 0.7), (torch.ones(2, 3).long(), 0.7), (bf16(1.0)[None], 0.0)]
)
def test_bad_temperatures_and_logits_are_named(logits: torch.Tensor, temperature: float) -> None:
    with pytest.raises(SpecError, match=r"must be \[N, V\]|logits are divided by it"):
        temperature_order_error(logits, temperature)


# ---- edges of made-up rows, where the right answer is known


def rows_of(
    logits_NV: torch.Tensor, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, transformed: bool = False
) -> HeadRows:
    targets_N = logits_NV.float().argmax(-1)
    return HeadRows(hidden_NH, logits_NV.bfloat16(), weight_VH, None, targets_N, transformed)


def test_planted_ties_are_counted_and_cured() -> None:
    """Scores 100.1, 100.2 and 103: of three pairs one ties in bfloat16."""
    hidden_NH = torch.tensor([[100.1], [100.2], [103.0]])
    weight_VH = torch.tensor([[1.0], [0.5]])
    found = {e.edge: e for e in raw_loss_edges(rows_of(hidden_NH @ weight_VH.T, hidden_NH, weight_VH), token=0)}
    assert found[edge_rows.TIES].error == pytest.approx(1 / 3)
    assert found[edge_rows.ACCURACY].error == pytest.approx(1 / 3)
    assert found[edge_rows.TIES].error_with_cure == found[edge_rows.ACCURACY].error_with_cure == 0.0
    assert "upcasting afterwards leaves 33.33% tied" in found[edge_rows.TIES].finding


def test_exact_scores_have_no_edge() -> None:
    """Nothing to find: scores, differences and temperatures that bfloat16 has."""
    hidden_NH = torch.tensor([[4.0], [2.0], [1.0]])
    weight_VH = torch.tensor([[1.0], [0.5]])
    rows = rows_of(hidden_NH @ weight_VH.T, hidden_NH, weight_VH)
    found = {e.edge: e for e in raw_loss_edges(rows, token=0)}
    assert found[edge_rows.TIES].error == found[edge_rows.ACCURACY].error == 0.0
    (head, *_) = head_edges(rows, tied=False)
    assert head.error == pytest.approx(0.0, abs=1e-7)


def test_the_head_edge_is_what_rounding_its_logits_costs() -> None:
    torch.manual_seed(0)
    hidden_NH, weight_VH = torch.randn(5, 16), torch.randn(30, 16)
    logits_NV = hidden_NH @ weight_VH.T
    rows = rows_of(logits_NV, hidden_NH, weight_VH)
    (head, *_) = head_edges(rows, tied=False)
    exact, rounded = (
        torch.log_softmax(z.double(), -1).gather(-1, rows.targets_N[:, None]) for z in (logits_NV, logits_NV.bfloat16())
    )
    assert head.error == pytest.approx(float((rounded - exact).abs().mean()), abs=1e-6)
    assert head.error is not None
    assert head.error > 1e-3
    assert head.error_with_cure == pytest.approx(0.0, abs=1e-6)


def test_what_cannot_be_shown_is_listed_with_its_reason() -> None:
    rows = rows_of(torch.randn(3, 4), torch.randn(3, 2), torch.randn(4, 2), transformed=True)
    found = {e.edge: e for e in [*raw_loss_edges(rows, 0), *head_edges(rows, tied=False)]}
    for name in (edge_rows.TIES, edge_rows.ACCURACY, edge_rows.HEAD):
        assert found[name].error is None
        assert "soft-cap or a scale" in found[name].finding
    tied = {e.edge: e for e in head_edges(rows, tied=True)}
    assert all(e.error is None for e in tied.values())
    assert "cannot have two compute dtypes" in tied[edge_rows.HEAD].finding
    lonely = {e.edge: e for e in raw_loss_edges(rows_of(torch.ones(1, 4), torch.ones(1, 2), torch.ones(4, 2)), 0)}
    assert "fewer than two tokens" in lonely[edge_rows.PREFERENCE].finding


def test_the_temperature_in_use_is_the_one_whose_rounding_is_shown() -> None:
    rows = rows_of(torch.randn(3, 4), torch.randn(3, 2), torch.randn(4, 2))
    for own, shown in ((0.9, 0.9), (1.0, 0.7)):  # 1 is exact, so that it would show nothing
        (held,) = [e for e in temperature_edges(rows, own) if e.edge == edge_rows.HELD]
        assert held.temperature == shown


# ---- on live models


def check_report(report: EdgeReport) -> dict[str, Edge]:
    errors = {e.edge: e for e in report.worst.values()}
    assert {edge_rows.PREFERENCE, edge_rows.VALUE, edge_rows.ORDER, edge_rows.HELD, edge_rows.HEAD, "float16 range"} <= set(
        errors
    )
    for edge in report.edges:
        assert edge.finding
        if edge.error is not None and edge.edge != "float16 range":
            assert edge.error_with_cure is not None
            assert edge.error_with_cure <= max(edge.error, 1e-5), edge
    return errors


def test_every_edge_of_a_live_model(one_rank: tk.Session) -> None:
    report = one_rank.precision_edges()
    errors = check_report(report)
    assert 0 < report.num_tokens <= 64
    assert errors[edge_rows.ORDER].error > 1e-3  # type: ignore[operator]
    by_temperature = {e.temperature: e.error for e in report.edges if e.edge == edge_rows.ORDER}
    assert [t for t, error in by_temperature.items() if error == 0.0] == [0.5, 1.0, 2.0]
    assert set(report.not_measured) == {EXPERT_HEAD, f"{edge_rows.HEAD}, tied"}
    assert "dense" in report.not_measured[EXPERT_HEAD]
    assert repr(report).startswith(f"EdgeReport: {len(report.biting)} of {len(errors)} edges bite")
    parsed = json.loads(report.to_json())
    assert len(parsed["edges"]) == len(report.edges) == len(report.to_frame())
    assert report.summary["not_measured"].endswith(", expert parallel")
    assert "<table>" in report._repr_html_()
    assert one_rank.output_dtype == "float32"


def test_two_ranks_find_the_same_edges(two_ranks: tk.Session) -> None:
    report = two_ranks.precision_edges()
    check_report(report)
    assert report.num_tokens <= 64


def test_the_head_run_again_is_the_models_own_float32_head() -> None:
    """An oracle for `float32_head`: a session that was launched with one."""

    def both(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
        batch = make_batch(ROWS, [1] * 3, 0)
        rows = _head_rows(policy, batch)
        with torch.no_grad(), policy.autocast():
            logits_BTV = policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT).logits
        places = batch.token_mask_BT[:, 1:].nonzero()
        assert not rows.transformed
        return float32_head(rows), logits_BTV[places[:, 0], places[:, 1]]

    with tk.launch(model=tk.tiny_policy(), lm_head_precision="float32", output_dtype="bfloat16") as session:
        ((found, own),) = session.run(both)
    assert own.dtype == torch.float32
    torch.testing.assert_close(found, own, atol=1e-5, rtol=1e-6)
    assert not torch.equal(own, own.bfloat16().float())


def test_out_of_float16s_range_is_a_finding_that_names_the_unit() -> None:
    def overflow(policy: Policy) -> None:
        with torch.no_grad():
            policy.model.model.layers[3].mlp.down_proj.weight.mul_(3e5)

    fields = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_new_tokens": 3}
    with tk.launch(model=tk.tiny_policy(), ranks=2, **fields) as session:
        session.run(overflow)
        report = session.precision_edges()
        edge = report.worst["float16 range"]
        assert edge.error == math.inf
        assert "first in FSDP unit model.layers.3" in edge.finding
        assert "float16 range out of range" in report.headline
        assert json.loads(report.to_json())["summary"]["float16 range"] is None
        session.grpo_step()


def test_a_tied_head_is_listed_as_refused(tied_model: Path) -> None:
    with tk.launch(model=tied_model, num_prompts_per_step=4, num_generations_per_prompt=2, max_new_tokens=3) as session:
        report = session.precision_edges()
    assert "cannot have two compute dtypes" in report.not_measured[edge_rows.HEAD]
    assert edge_rows.ORDER in report.worst


def test_the_figure_draws_every_measured_edge_and_both_curves(one_rank: tk.Session) -> None:
    report = one_rank.precision_edges()
    figure = report.figure()
    assert figure.layout.title.text.startswith(f"{len(report.biting)} of {len(report.worst)} precision edges bite")
    plain, cured, model, made_up = figure.data
    assert list(plain.x) == pytest.approx([max(e.error or 0.0, 1e-9) for e in report.worst.values()])
    assert len(cured.x) == len(report.worst)
    assert list(model.x) == list(made_up.x) == list(edge_rows.TEMPERATURES)
    assert made_up.y[2] == pytest.approx(2.7, abs=0.4)
