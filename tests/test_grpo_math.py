"""Advantages, loss and mismatch metrics: worked by hand, and against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.advantages import group_advantages, shape_rewards
from toolkit.errors import SpecError
from toolkit.losses import clipped_policy_gradient, importance_weights
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


# ---- NeMo-RL's options, against the formulas in plain Python floats (which are float64)


Rows = list[list[float]]


def loss_by_hand(c: Rows, p: Rows, g: Rows, r: Rows, a: list[float], m: Rows, config: GRPOConfig) -> float:
    """The loss of `losses.py`'s head, token by token."""
    num_tokens, total = sum(map(sum, m)), 0.0
    for C, P, G, R, A, M in zip(c, p, g, r, a, m, strict=True):
        on = [t for t, counts in enumerate(M) if counts]
        mean = sum(C[t] - P[t] for t in on) / max(1, len(on))
        mean_pg = sum(P[t] - G[t] for t in on) / max(1, len(on))
        sum_pg = sum(P[t] - G[t] for t in on)
        row = 0.0
        for t in on:
            gspo = config.sequence_level_importance_ratios
            rho = math.exp(mean if gspo else C[t] - P[t])
            clipped = min(max(rho, 1 - config.ratio_clip_min), 1 + config.ratio_clip_max)
            if config.disable_ppo_ratio:
                value = -A * C[t]
            elif config.use_cispo:
                value = -A * clipped * C[t]
            else:
                value = max(-A * rho, -A * clipped)
                if config.ratio_clip_c is not None and A < 0:
                    value = min(value, -A * config.ratio_clip_c)
            if config.use_importance_sampling_correction:
                w = math.exp(sum_pg if gspo else P[t] - G[t])
                low, high = (
                    config.truncated_importance_sampling_ratio_min or 0.0,
                    config.truncated_importance_sampling_ratio or math.inf,
                )
                kind = config.truncated_importance_sampling_type
                judged = math.exp(mean_pg) if kind == "seq-mask-tis" else w
                w = min(max(w, low), high) if kind == "tis" else w * (low <= judged <= high)
                value *= w
            x = R[t] - C[t]
            kl = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[config.reference_policy_kl_type]
            value += config.reference_policy_kl_penalty * min(max(kl, -10), 10)
            row += value
        total += row / num_tokens if config.token_level_loss else row / max(1, len(on)) / len(m)
    return total


OPTIONS: list[dict[str, Any]] = [
    {},
    {"ratio_clip_max": 0.28, "ratio_clip_min": 0.1},
    {"ratio_clip_c": 1.5},
    {"token_level_loss": False},
    {"token_level_loss": False, "sequence_level_importance_ratios": True},
    {"use_cispo": True},
    {"disable_ppo_ratio": True},
    {"use_importance_sampling_correction": True},
    {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": 1.2},
    {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_ratio": 1.2,
        "truncated_importance_sampling_ratio_min": 0.8,
        "truncated_importance_sampling_type": "icepop",
    },
    {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_ratio_min": 0.9,
        "truncated_importance_sampling_type": "seq-mask-tis",
    },
    {"use_importance_sampling_correction": True, "token_level_loss": False, "sequence_level_importance_ratios": True},
    {"reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k1"},
    {"reference_policy_kl_penalty": 0.5, "reference_policy_kl_type": "k2"},
    {"reference_policy_kl_penalty": 0.5},
]


def random_inputs(seed: int, sequences: int, tokens: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    previous = -2 * torch.rand(sequences, tokens, generator=generator, dtype=torch.float64)
    c, g, r = (previous + 0.3 * torch.randn(previous.shape, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = (torch.rand(previous.shape, generator=generator) < 0.7).double()
    mask[0, 0] = 1.0
    return c, previous, g, r, torch.randn(sequences, generator=generator, dtype=torch.float64), mask


def loss_of(c: Any, p: Any, g: Any, r: Any, a: Any, m: Any, config: GRPOConfig) -> tuple[torch.Tensor, dict[str, float]]:
    counts = {"num_tokens": float(m.sum()), "num_sequences": float(len(m))}
    return clipped_policy_gradient(c, p, a, m, config, **counts, generation_BT=g, reference_BT=r)


@pytest.mark.parametrize("fields", OPTIONS, ids=lambda f: "-".join(map(str, f.values())) or "defaults")
@pytest.mark.parametrize("seed", range(3))
def test_every_option_of_the_loss_equals_its_formula(fields: dict[str, Any], seed: int) -> None:
    config = GRPOConfig(**fields)
    inputs = random_inputs(seed, 5, 7)
    found, _ = loss_of(*inputs, config)
    assert found.item() == pytest.approx(loss_by_hand(*(x.tolist() for x in inputs), config), rel=1e-12)


@pytest.mark.parametrize("fields", OPTIONS, ids=lambda f: "-".join(map(str, f.values())) or "defaults")
def test_every_options_gradient_is_the_formulas(fields: dict[str, Any]) -> None:
    """Central differences, but for what is held constant: CISPO's ratio, and the score-function part of the KL."""
    config = GRPOConfig(**fields)
    c, *rest = random_inputs(7, 3, 4)
    current = c.clone().requires_grad_()
    loss_of(current, *rest, config)[0].backward()
    assert current.grad is not None

    def value(c: torch.Tensor) -> float:
        if config.use_cispo:  # as if the ratio were that of the unmoved logprobs
            p, a, m = rest[0], rest[3], rest[4]
            ratio = (original - p).exp().clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
            return float(((-a.unsqueeze(-1) * ratio * c) * m).sum() / m.sum())
        return loss_by_hand(c.tolist(), *(x.tolist() for x in rest), config)

    original = c.clone()
    step, mask = 1e-6, rest[4]
    for b, t in mask.nonzero().tolist():
        moved = [original.clone(), original.clone()]
        moved[0][b, t] += step
        moved[1][b, t] -= step
        want = (value(moved[0]) - value(moved[1])) / (2 * step)
        if config.reference_policy_kl_penalty:  # exp(c - sg(c)) adds the estimate itself to its gradient
            x = float(rest[2][b, t] - original[b, t])
            kl = {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[config.reference_policy_kl_type]
            want += config.reference_policy_kl_penalty * kl / float(mask.sum())
        assert current.grad[b, t].item() == pytest.approx(want, rel=1e-5, abs=1e-8)
    assert current.grad[mask == 0].abs().max().item() == 0.0


def test_no_previous_logprobs_means_the_current_ones() -> None:
    c, _, g, r, a, m = random_inputs(3, 4, 5)
    current = c.clone().requires_grad_()
    loss, sums = loss_of(current, None, g, r, a, m, GRPOConfig(force_on_policy_ratio=True))
    loss.backward()
    assert current.grad is not None
    assert loss.item() == pytest.approx(float(-(a.unsqueeze(-1) * m).sum() / m.sum()), rel=1e-12)
    close(current.grad, -a.unsqueeze(-1) * m / m.sum(), rtol=1e-12, atol=1e-15)
    assert sums["probs_ratio_min"] == sums["probs_ratio_max"] == 1.0


def test_out_of_bounds_tokens_are_counted() -> None:
    zero = torch.zeros(2, 2)
    g = torch.tensor([[0.0, math.log(2.0)], [-math.log(2.0), 0.0]])  # weights 1, 1/2; 2, 1
    bounds = {"truncated_importance_sampling_ratio": 1.5, "truncated_importance_sampling_ratio_min": 0.75}
    for kind, counted in (("tis", 2), ("icepop", 2), ("seq-mask-tis", 2)):  # mean ratios: sqrt(1/2) and sqrt(2)
        config = GRPOConfig(use_importance_sampling_correction=True, truncated_importance_sampling_type=kind, **bounds)
        _, sums = loss_of(zero, zero, g, zero, torch.ones(2), torch.ones(2, 2), config)
        assert sums["is_oob_ratio"] == counted, kind


def test_an_infinite_weight_counts_as_nothing() -> None:
    weights, _ = importance_weights(
        torch.zeros(1, 2), torch.tensor([[-1e4, 0.0]]), ONE.expand(1, 2), GRPOConfig(use_importance_sampling_correction=True)
    )
    assert weights.tolist() == [[0.0, 1.0]]


def test_rewards_of_long_and_cut_off_completions() -> None:
    config = GRPOConfig(
        max_new_tokens=10, overlong_buffer_length=4, overlong_buffer_penalty=0.5, stop_properly_penalty_coef=0.2
    )
    rewards = shape_rewards(
        torch.tensor([1.0, 1.0, 1.0, 1.0]),
        torch.tensor([6.0, 8.0, 10.0, 10.0]),
        torch.tensor([True, True, True, False]),
        config,
    )
    close(rewards, torch.tensor([1.0, 0.75, 0.5, -0.3]), rtol=1e-6, atol=1e-7)


def test_advantages_are_bounded_after_normalisation() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    kwargs = {"normalize_rewards": True, "use_leave_one_out_baseline": False}
    free = group_advantages(rewards, **kwargs)
    assert free.max() > 1.4
    bounded = group_advantages(rewards, **kwargs, clip_low=-0.25, clip_high=1.0)
    assert bounded.tolist() == [[1.0, -0.25, -0.25, -0.25]]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"sequence_level_importance_ratios": True}, "Set token_level_loss=False"),
    ({"use_cispo": True, "disable_ppo_ratio": True}, "each say what becomes of the ratio"),
    ({"use_cispo": True, "ratio_clip_c": 3.0}, "does nothing with use_cispo=True"),
    ({"force_on_policy_ratio": True, "train_global_batch_size": 64}, "takes 4 updates"),
    ({"truncated_importance_sampling_ratio": 2.0}, "Set use_importance_sampling_correction=True"),
    ({"truncated_importance_sampling_ratio_min": 0.5}, "do nothing without truncated_importance_sampling_ratio"),
    (
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_ratio": 2.0,
            "truncated_importance_sampling_type": "icepop",
        },
        "needs truncated_importance_sampling_ratio_min",
    ),
    (
        {
            "use_importance_sampling_correction": True,
            "truncated_importance_sampling_ratio": 2.0,
            "truncated_importance_sampling_ratio_min": 3.0,
        },
        "must be below",
    ),
    ({"truncated_importance_sampling_type": "trunc"}, "choose one of 'tis', 'icepop', 'seq-mask-tis'"),
    ({"reference_policy_kl_type": "k1"}, "does nothing at reference_policy_kl_penalty=0"),
    ({"reference_policy_kl_penalty": -0.1}, "reference_policy_kl_penalty=-0.1"),
    ({"dynamic_sampling_max_gen_batches": 3}, "does nothing without use_dynamic_sampling=True"),
    ({"overlong_buffer_penalty": 2.0}, "does nothing without overlong_buffer_length"),
    ({"overlong_buffer_length": 9}, "is more than max_new_tokens=8"),
    ({"train_global_batch_size": 100}, "does not divide the 256 sequences of a step"),
    ({"top_k": 1}, "makes all completions of a prompt the same"),
    ({"advantage_clip_low": 0.5}, "advantage_clip_low=0.5"),
    ({"stop_properly_penalty_coef": 2.0}, "stop_properly_penalty_coef=2.0"),
    ({"overlong_filtering": 1}, "overlong_filtering=1 must be True or False"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_options_that_would_do_nothing_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        GRPOConfig(**fields)
