"""A loss of the user's own on raw logits: its rounding is named as the cause where it is one, and only there."""

from __future__ import annotations

import math
import os
import signal
from typing import Any

import pytest
import torch

import toolkit as tk
from toolkit.errors import SpecError
from toolkit.policy import Policy

ROWS = [[1, 5, 14, 6, 40, 7, 8, 2], [1, 7, 14, 13, 5, 40, 11, 2], [1, 20, 30, 2, 9, 9, 40, 2], [1, 6, 14, 9, 40, 11, 5, 2]]


def preference(logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Bradley-Terry on pairs of sequences, scored by the end token's last logit, in the logits' own dtype."""
    score_B = logits_BTV[:, -1, 2]
    return -torch.nn.functional.logsigmoid(score_B[0::2] - score_B[1::2]).mean()


def upcast_preference(logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return preference(logits_BTV.float(), token_ids_BT, mask_BT)


def cross_entropy(logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean over tokens that count, written out, so that it runs in the logits' own dtype and knows all three arguments."""
    logprobs_BTV = logits_BTV[:, :-1] - logits_BTV[:, :-1].exp().sum(-1, keepdim=True).log()
    own_BT = logprobs_BTV.gather(-1, token_ids_BT[:, 1:, None]).squeeze(-1)
    return -(own_BT * mask_BT[:, 1:]).sum() / mask_BT[:, 1:].sum()


@pytest.mark.usefixtures("final_norm_unit")  # so that there is no difference before the loss
@pytest.mark.parametrize("planted", [preference, cross_entropy])
def test_a_loss_that_rounds_is_named_where_every_logprob_is_identical(planted: Any) -> None:
    with tk.launch(model=tk.tiny_policy()) as session:
        report = session.divergence("float32", "bfloat16", token_ids=ROWS, loss=planted)
        found = report.metrics
        assert found["mean_abs_nats"] == 0.0
        assert found["loss_relative_error"] == abs(found["loss_b"] - found["loss_a"]) / abs(found["loss_a"]) > 1e-4
        if planted is preference:  # bfloat16 scores as near as these have an exact difference: only its loss is rounded
            assert found["gradient_relative_error"] == 0.0
        else:
            assert 1e-3 < found["gradient_relative_error"] < 0.1
        assert (found["loss_relative_error_upcast"], found["gradient_relative_error_upcast"]) == (0.0, 0.0)
        assert (found["loss_rounding_a"], found["gradient_rounding_a"]) == (0.0, 0.0)
        assert found["loss_rounding_b"] == found["loss_relative_error"]
        assert found["gradient_rounding_b"] == pytest.approx(found["gradient_relative_error"], rel=1e-12)
        assert "Cause in the loss: it computes on raw logits in their own 16 bits" in report.cause
        assert "on side b its value by" in report.cause
        assert "on side a" not in report.cause
        assert "Between the sides the forward makes nothing." in report.cause
        assert "backward rounds too" not in report.cause
        assert report.gradients is not None
        assert len(report.gradients) > 3

        cured = session.divergence("float32", "bfloat16", token_ids=ROWS, loss=upcast_preference, truth=False)
        assert (cured.metrics["loss_relative_error"], cured.metrics["gradient_relative_error"]) == (0.0, 0.0)
        assert "the same bit for bit on both sides, and with upcast logits too" in cured.cause
        assert "Cause in the loss" not in cured.cause


def test_what_the_forward_does_is_not_blamed_on_the_loss(one_rank: tk.Session) -> None:
    report = one_rank.divergence("float32", "bfloat16", token_ids=ROWS, loss=upcast_preference, truth=False)
    found = report.metrics
    assert found["loss_relative_error"] == found["loss_relative_error_upcast"] > 0
    assert found["gradient_relative_error"] == pytest.approx(found["gradient_relative_error_upcast"], rel=1e-12)
    assert found["gradient_relative_error"] > 0
    assert [found[f"{what}_rounding_{side}"] for what in ("loss", "gradient") for side in "ab"] == [0.0] * 4
    assert "The loss itself rounds nothing: upcast logits give the same bits on each side." in report.cause
    assert "the final norm belongs to the root unit" in report.cause


def early(logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """The temperature in the logits' dtype and in place, the rest in float32."""
    return cross_entropy(logits_BTV.div_(0.7).float(), token_ids_BT, mask_BT)


@pytest.mark.parametrize("loss", [cross_entropy, early])
def test_its_own_rounding_is_that_of_the_very_logits_however_much_the_forward_adds(loss: Any, one_rank: tk.Session) -> None:
    """Against the loss of logits taken from the model by hand; where the forward's share may be larger, or cancel it."""

    def by_hand(policy: Policy) -> tuple[float, float]:
        with policy.temporarily(output_dtype="bfloat16"), torch.no_grad(), policy.autocast():
            policy.model.train()
            ids_BT = torch.tensor(ROWS)
            positions_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
            logits_BTV = policy.forward(ids_BT, torch.ones_like(ids_BT), positions_BT).logits
            assert logits_BTV.dtype == torch.bfloat16
            mask_BT = torch.ones(ids_BT.shape)
            mask_BT[:, 0] = 0
            return float(loss(logits_BTV.clone(), ids_BT, mask_BT)), float(loss(logits_BTV.float(), ids_BT, mask_BT))

    ((rounded, upcast),) = one_rank.run(by_hand)
    report = one_rank.divergence("float32", "bfloat16", token_ids=ROWS, loss=loss, truth=False)
    assert report.metrics["loss_rounding_b"] == pytest.approx(abs(rounded - upcast) / upcast, rel=1e-6)
    assert report.metrics["loss_rounding_b"] > 1e-5
    assert report.metrics["loss_rounding_a"] == 0.0
    assert "Cause in the loss" in report.cause


def test_value_and_gradient_are_a_float64_runs_on_any_number_of_ranks() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tk.tiny_policy(), dtype=torch.float64)
    ids_BT = torch.tensor(ROWS)
    mask_BT = torch.ones_like(ids_BT)
    values, gradients = [], []
    for divisor in (1.0, 2.0):
        model.zero_grad()
        value = cross_entropy(model(ids_BT).logits / divisor, ids_BT, mask_BT)
        value.backward()
        values.append(float(value.detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert abs(values[1] - values[0]) > 0.1 * values[0]
    wanted = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())

    def tempered(logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """Another function on side b (whose logits are 16-bit), so that the gradients differ by a known lot."""
        divisor = 2.0 if logits_BTV.dtype == torch.bfloat16 else 1.0
        return cross_entropy(logits_BTV.float() / divisor, token_ids_BT, mask_BT)

    for layout in ({}, {"ranks": 2}, {"ranks": 2, "tensor_parallel_size": 2}):
        with tk.launch(model=tk.tiny_policy(), precision="float32", **layout) as session:
            report = session.divergence("float32", "bfloat16", token_ids=ROWS, loss=tempered, truth=False)
        found = report.metrics
        assert found["loss_a"] == pytest.approx(values[0], rel=1e-5)
        assert found["loss_b"] == pytest.approx(values[1], rel=0.02)
        assert found["gradient_relative_error"] == pytest.approx(wanted, rel=0.05)
        assert found["gradient_rounding_b"] == pytest.approx(wanted, rel=0.05)  # upcast, b's logits get a's function
        assert found["loss_rounding_b"] == pytest.approx(abs(values[1] - values[0]) / values[0], rel=0.02)
        assert found["gradient_rounding_a"] == found["loss_rounding_a"] == 0.0


def test_sampled_completions_are_scored_too_and_nothing_is_left_behind(two_ranks: tk.Session) -> None:
    before = two_ranks.divergence("float32", "bfloat16", token_ids=ROWS)
    report = two_ranks.divergence("float32", "bfloat16", loss=cross_entropy)
    assert math.isfinite(report.metrics["loss_a"])
    assert two_ranks.divergence("float32", "bfloat16", token_ids=ROWS).metrics == before.metrics


def fails_on_one_rank(logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    if int(token_ids_BT[0, 1]) == ROWS[2][1]:
        raise KeyError("no such score")
    return preference(logits_BTV, token_ids_BT, mask_BT)


BAD: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (5, {}, SpecError, "loss=5: give a function"),
    (lambda logits, ids, mask: 1.0, {}, SpecError, "loss= gave 1.0, a float; it must return a scalar tensor"),
    (lambda logits, ids, mask: logits.sum(-1), {}, SpecError, r"loss= gave a tensor of shape \(2, 8\)"),
    (lambda logits, ids, mask: logits.detach().sum(), {}, SpecError, "does not depend on the logits"),
    (lambda logits, ids, mask: torch.tensor(1.0, requires_grad=True), {}, SpecError, "does not depend on the logits"),
    (
        lambda logits, ids, mask: logits.sum() * math.nan,
        {},
        FloatingPointError,
        "nan of float32 logits that are finite",
    ),
    (lambda logits, ids, mask: (torch.rand_like(logits) * logits).sum(), {}, SpecError, "of the very same logits .* Seed"),
    (lambda logits: logits.sum(), {}, TypeError, "positional argument"),
    (fails_on_one_rank, {}, KeyError, "no such score"),
    (preference, {"gradients": False}, SpecError, "leave gradients=False out"),
    (preference, {"batch_size": 1}, SpecError, "batch_size=1 splits a forward"),
    (preference, {"logprobs": "sampler"}, SpecError, "logprobs='sampler' makes none to train on"),
    (preference, {"logprob_mode": "linear"}, SpecError, "logprob_mode='linear' makes no logits"),
    (preference, {"a": {"temperature": 0.5}, "b": {"temperature": 2.0}}, SpecError, "temperature plays no part in it"),
    (preference, {"token_ids": ROWS[:3]}, SpecError, "3 cannot be shared by 2; give a multiple of 2"),
]


@pytest.mark.parametrize(("loss", "options", "kind", "reason"), BAD)
def test_bad_losses_are_named_and_the_session_goes_on(
    loss: Any, options: dict[str, Any], kind: type[Exception], reason: str, two_ranks: tk.Session
) -> None:
    before = two_ranks.logprobs(ROWS)
    with pytest.raises(kind, match=reason):
        two_ranks.divergence(**{"token_ids": ROWS, "loss": loss, "truth": False, **options})
    assert (two_ranks.logprobs(ROWS) == before).all()
    assert two_ranks.divergence("float32", "bfloat16", token_ids=ROWS, loss=preference, truth=False).metrics["loss_a"] > 0


def test_ctrl_c_stops_between_its_forwards(one_rank: tk.Session) -> None:
    calls: list[int] = []

    def slow(logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        if not calls:
            os.kill(os.getpid(), signal.SIGINT)
        calls.append(1)
        return preference(logits_BTV, token_ids_BT, mask_BT)

    with pytest.raises(KeyboardInterrupt):
        one_rank.divergence(token_ids=ROWS, loss=slow, truth=False)
    assert len(calls) == 2  # before and in the first of four
    assert one_rank.divergence(token_ids=ROWS, loss=preference, truth=False).metrics["loss_a"] > 0
