"""Advantages, loss and mismatch metrics: worked by hand, and against float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.advantages import group_advantages
from toolkit.losses import clipped_policy_gradient
from toolkit.mismatch import mismatch_sums
from toolkit.spec import GRPOConfig

close = torch.testing.assert_close


def test_advantages_by_hand() -> None:
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])

    def advantages(normalize: bool, leave_one_out: bool) -> torch.Tensor:
        return group_advantages(rewards_PG, normalize_rewards=normalize, use_leave_one_out_baseline=leave_one_out)

    close(advantages(False, False), torch.tensor([[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]))
    third = 1 / 3  # leave-one-out: the others' mean is 0 for the success, 1/3 for a failure
    close(advantages(False, True), torch.tensor([[1.0, -third, -third, -third], [2 * third] * 2 + [-2 * third] * 2]))
    # Standard deviations with Bessel's correction: sqrt(0.75 / 3) = 0.5 and sqrt(1 / 3).
    close(
        advantages(True, False),
        torch.tensor([[1.5, -0.5, -0.5, -0.5], [3**0.5 / 2] * 2 + [-(3**0.5) / 2] * 2]),
        atol=1e-5,
        rtol=0,
    )
    # Leave-one-out over the deviation of the whole group: G / (G - 1) = 4/3 of the above.
    close(
        advantages(True, True),
        torch.tensor([[2.0, -2 * third, -2 * third, -2 * third], [2 / 3**0.5] * 2 + [-2 / 3**0.5] * 2]),
        atol=1e-5,
        rtol=0,
    )


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e8])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_equal_rewards_give_exactly_zero(reward: float, leave_one_out: bool) -> None:
    rewards_PG = torch.full((3, 7), reward)
    found = group_advantages(rewards_PG, normalize_rewards=True, use_leave_one_out_baseline=leave_one_out)
    assert torch.equal(found, torch.zeros(3, 7))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(2, 9), st.booleans(), st.integers(0, 1000))
def test_advantages_are_centred_and_blind_to_an_offset(prompts: int, group: int, leave_one_out: bool, seed: int) -> None:
    rewards_PG = torch.rand(prompts, group, generator=torch.Generator().manual_seed(seed))
    kwargs = {"normalize_rewards": True, "use_leave_one_out_baseline": leave_one_out}
    found = group_advantages(rewards_PG, **kwargs)
    close(found.sum(-1), torch.zeros(prompts), atol=1e-4, rtol=0)
    close(group_advantages(rewards_PG + 3, **kwargs), found, atol=2e-3, rtol=1e-3)


ONE = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("ratio", "advantage", "fields", "loss", "gradient"),
    [
        (1.0, 2.0, {}, -2.0, -2.0),
        (1.1, 2.0, {}, -2.2, -2.2),  # inside the clip range: -A * ratio, and d/dlogp is the same
        (1.5, 2.0, {}, -2.4, 0.0),  # gained enough: clipped at 1.2, no gradient
        (0.5, 2.0, {}, -1.0, -1.0),  # lost: never clipped away
        (0.5, -1.0, {}, 0.8, 0.0),
        (3.0, -1.0, {}, 3.0, 3.0),
        (3.0, -1.0, {"ratio_clip_c": 2.5}, 2.5, 0.0),  # dual clip bounds it
        (3.0, 1.0, {"ratio_clip_c": 2.5}, -1.2, 0.0),  # and leaves positive advantages alone
        (1.25, 1.0, {"ratio_clip_max": 0.28}, -1.25, -1.25),  # clip-higher
        (0.75, -1.0, {"ratio_clip_min": 0.3}, 0.75, 0.75),
    ],
)
def test_the_clipped_loss_of_one_token(ratio: float, advantage: float, fields: dict, loss: float, gradient: float) -> None:
    previous = torch.tensor([[-1.0]])
    current = (previous + math.log(ratio)).requires_grad_()
    found, sums = clipped_policy_gradient(
        current, previous, torch.tensor([advantage]), ONE, GRPOConfig(**fields), num_tokens=1, num_sequences=1
    )
    found.backward()
    assert current.grad is not None
    assert found.item() == pytest.approx(loss, rel=1e-6)
    assert current.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert sums["probs_ratio"] == pytest.approx(ratio, rel=1e-6)


def test_token_and_sequence_level_losses_weigh_tokens_differently() -> None:
    current = torch.zeros(2, 4)
    mask = torch.tensor([[1.0, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    advantages = torch.tensor([1.0, -1.0])
    by_token, _ = clipped_policy_gradient(current, current, advantages, mask, GRPOConfig(), num_tokens=5, num_sequences=2)
    config = GRPOConfig(token_level_loss=False)
    by_sequence, _ = clipped_policy_gradient(current, current, advantages, mask, config, num_tokens=5, num_sequences=2)
    assert by_token.item() == pytest.approx((-4 + 1) / 5)
    assert by_sequence.item() == pytest.approx((-1 + 1) / 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 8), st.booleans(), st.integers(0, 1000))
def test_parts_of_a_batch_add_up_to_the_whole(sequences: int, tokens: int, token_level: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    current, previous = torch.randn(2, sequences, tokens, generator=generator)
    mask = torch.randint(0, 2, (sequences, tokens), generator=generator).float()
    advantages = torch.randn(sequences, generator=generator)
    config = GRPOConfig(token_level_loss=token_level, ratio_clip_c=3.0)
    counts = {"num_tokens": max(1.0, float(mask.sum())), "num_sequences": float(sequences)}
    whole, _ = clipped_policy_gradient(current, previous, advantages, mask, config, **counts)
    parts = [
        clipped_policy_gradient(
            current[i : i + 1], previous[i : i + 1], advantages[i : i + 1], mask[i : i + 1], config, **counts
        )[0]
        for i in range(sequences)
    ]
    close(torch.stack(parts).sum(), whole, rtol=1e-5, atol=1e-6)


def test_what_masked_tokens_hold_does_not_matter() -> None:
    mask = torch.tensor([[1.0, 0.0]])
    kwargs = {"num_tokens": 1, "num_sequences": 1}
    clean = torch.tensor([[-0.5, -1.0]])
    wild = torch.tensor([[-0.5, -50.0]])
    losses = [
        clipped_policy_gradient(current, torch.tensor([[-0.6, 40.0]]), torch.ones(1), mask, GRPOConfig(), **kwargs)
        for current in (clean, wild)
    ]
    assert losses[0][0].item() == losses[1][0].item()
    assert losses[0][1] == losses[1][1]


def test_mismatch_metrics_by_hand() -> None:
    """g = log 0.5, p = log 0.25: the probability is off by a factor of 2."""
    g, p = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    found = mismatch_sums(g, p)
    mixture = 0.375
    want = {
        "token_mult_prob_error": 2.0,
        "gen_kl_error": 0.5 - 1 - math.log(0.5),  # e^(p-g) - 1 - (p-g)
        "policy_kl_error": 2.0 - 1 - math.log(2.0),
        "js_divergence_error": 0.5
        * (0.25 / mixture - 1 - math.log(0.25 / mixture) + 0.5 / mixture - 1 - math.log(0.5 / mixture)),
        "sampling_importance_ratio": 0.5,
        "k1": math.log(2.0),
    }
    assert found == pytest.approx(want, rel=1e-6)


def test_mismatch_metrics_of_equal_logprobs_are_exactly_nothing() -> None:
    g = torch.randn(50)
    found = mismatch_sums(g, g.clone())
    assert found["token_mult_prob_error"] == found["sampling_importance_ratio"] == 50.0
    assert found["gen_kl_error"] == found["policy_kl_error"] == found["k1"] == 0.0


def test_the_documented_asymmetry_of_policy_kl() -> None:
    """NeMo-RL's documentation: logprobs -5 against -15 give 9.0 one way and 22,015 the other."""
    found = mismatch_sums(torch.tensor([-5.0]), torch.tensor([-15.0]))
    assert found["gen_kl_error"] == pytest.approx(9.0, abs=1e-3)
    assert found["policy_kl_error"] == pytest.approx(22_015, abs=1)
