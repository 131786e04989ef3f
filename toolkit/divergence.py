"""Two settings of the same weights on the same tokens: how far is each token's logprob apart, and why.

Both sides run on the very same sharded model, or one on a second model of its weights (`settings.Setting` says what may
differ). Shapes: _B sequences, _T tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit.cause import by_unit, explain
from toolkit.collect import grade_together, sample_step
from toolkit.divergence_report import DivergenceReport
from toolkit.errors import SpecError
from toolkit.gradient_effects import Shards, compare_gradients, take_gradients
from toolkit.mismatch import mismatch_sums
from toolkit.policy import Policy
from toolkit.prompts import Batch, Reward, make_batch
from toolkit.raw_logits import RawLoss, check_loss, compare_losses
from toolkit.replay import Scored, score_tokens
from toolkit.settings import Setting, policy_for, resolve_settings, without_idle_batch_sizes
from toolkit.spec import GRPOConfig
from toolkit.step import TrainingBatch, forward_backward, training_batch
from toolkit.truth import CHEAP_PARAMETERS, exact_logprobs

if TYPE_CHECKING:
    import pandas as pd


def compare(
    policy: Policy,
    config: GRPOConfig,
    a: str | Mapping[str, Any],
    b: str | Mapping[str, Any],
    common: Mapping[str, Any],
    *,
    problems: list[tuple[str, str]] | None,
    token_ids: list[list[int]] | None,
    reward: Reward | None,
    step: int,
    truth: bool | None = None,
    gradients: bool = True,
    loss: RawLoss | None = None,
) -> DivergenceReport:
    """Compare two settings on this rank (all ranks together).

    Args:
        problems: sample completions of these and score them; or
        token_ids: score these sequences (all but their first token).
        truth: also measure both sides' distance to all-float32 and float64 runs; None where it is cheap.
        gradients: also compare gradients.
        loss: of raw logits, to compare the gradients of instead of GRPO's.
    """
    side_a, side_b = resolve_settings(policy, a, b, common, config.temperature)
    built_a = policy_for(policy, side_a)
    built_b = built_a if side_a.built == side_b.built else policy_for(policy, side_b)
    for side, built in ((side_a, built_a), (side_b, built_b)):  # refuse either before anything runs
        with side.applied(built):
            pass
    if loss is not None:
        check_loss(policy, (side_a, side_b), None if token_ids is None else len(token_ids))
    training = _tokens(policy, config, problems, token_ids, reward, step)
    (side_a, side_b), idle = without_idle_batch_sizes((side_a, side_b), training.batch.num_sequences)
    if token_ids is not None:
        config = _of_given_tokens(config)
    score_a, score_b = (
        _score(built, config, training, side, gradients and loss is None)
        for built, side in ((built_a, side_a), (built_b, side_b))
    )
    exact, no_truth = _truth(policy, training.batch, {side_a.temperature, side_b.temperature}, truth)
    table, metrics = _per_token(policy, config, training, score_a, score_b)
    distances = _distances(policy, training, (score_a, score_b), (side_a, side_b), exact)
    frame, in_loss = None, ""
    metrics |= dict.fromkeys(GRADIENT_METRICS, math.nan)
    if score_a.gradients and score_b.gradients:
        frame, found = compare_gradients(policy, config, score_a.gradients, score_b.gradients)
        metrics |= found
    units = by_unit(built_a, training, side_a, side_b, score_a.tokens.logprobs_BT) if metrics["mean_abs_nats"] else {}
    cause = explain(built_a, side_a, side_b, metrics, units, score_a.gradient if frame is not None else "")
    if loss is not None:
        policies, sides = (built_a, built_b), (side_a, side_b)
        frame, found, in_loss = compare_losses(policy, policies, config, training.batch, sides, loss)
        metrics |= found
    elif gradients and frame is None:
        cause += " (The sampler makes no gradients, so none are compared.)"
    return DivergenceReport(
        side_a.describe(side_b),
        side_b.describe(side_a),
        table,
        metrics,
        units,
        f"{cause}{idle}{in_loss}{no_truth}",
        config.ratio_clip_min,
        config.ratio_clip_max,
        distances,
        frame,
    )


def _of_given_tokens(config: GRPOConfig) -> GRPOConfig:
    """The settings that have a meaning for tokens nobody sampled: their loss has nothing to correct or to penalise."""
    return GRPOConfig(
        train_micro_batch_size=config.train_micro_batch_size,
        ratio_clip_min=config.ratio_clip_min,
        ratio_clip_max=config.ratio_clip_max,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
    )


GRADIENT_METRICS = ("gradient_relative_error", "gradient_cosine", "update_relative_error", "update_cosine")


def _tokens(
    policy: Policy,
    config: GRPOConfig,
    problems: list[tuple[str, str]] | None,
    token_ids: list[list[int]] | None,
    reward: Reward | None,
    step: int,
) -> TrainingBatch:
    """This rank's sequences. Those that only fill up the last rank's share have no token that counts, anywhere."""
    if token_ids is None:
        assert problems is not None
        rollouts = sample_step(policy, config, problems, step)
        return training_batch(policy, config, rollouts, grade_together(policy, rollouts, reward))
    padded = token_ids + token_ids[:1] * (-len(token_ids) % policy.data_size)
    share = len(padded) // policy.data_size
    first = policy.data_rank * share
    rows = padded[first : first + share]
    width = max(map(len, token_ids))
    batch = make_batch(rows, [1] * share, policy.tokenizer.pad_token_id, width=width).to(policy.device)
    batch.token_mask_BT[max(0, len(token_ids) - first) :] = 0
    num_tokens = float(sum(len(ids) - 1 for ids in token_ids))
    previous_BT = torch.zeros(batch.ids_BT[:, 1:].shape, device=policy.device)
    return TrainingBatch(batch, torch.zeros(share, device=policy.device), previous_BT, num_tokens, float(len(token_ids)))


@dataclass(slots=True)
class _Score:
    tokens: Scored
    gradient: str  # of what: "GRPO loss" or "mean logprob"
    gradients: Shards  # float32; empty where the route has no backward


def _score(policy: Policy, config: GRPOConfig, training: TrainingBatch, side: Setting, gradients: bool) -> _Score:
    size = side.batch_size or config.train_micro_batch_size
    config = dataclasses.replace(config, temperature=side.temperature, train_micro_batch_size=size)
    policy.stop_if_asked()
    with side.applied(policy):
        tokens = score_tokens(policy, training.batch, side)
        if side.logprobs == "sampler" or not gradients:
            return _Score(tokens, "", [])
        advantages_B, of = training.advantages_B, "GRPO loss"
        any_signal = policy.sum_over_data(advantages_B.abs().sum().cpu().double().reshape(1))
        if not any_signal.item():  # all rewards equal (or given tokens): that gradient is zero whatever the dtype
            advantages_B, of = torch.ones_like(advantages_B), "mean logprob"
        previous_BT = tokens.logprobs_BT.to(policy.device)
        scored = dataclasses.replace(training, advantages_B=advantages_B, previous_BT=previous_BT)
        forward_backward(policy, config, scored)
        return _Score(tokens, of, take_gradients(policy))


Exact = dict[tuple[str, float], torch.Tensor]


def _truth(policy: Policy, batch: Batch, temperatures: set[float], wanted: bool | None) -> tuple[Exact, str]:
    """The exact logprobs, or none and what to say about it."""
    if wanted is False or (wanted is None and sum(p.numel() for p in policy.model.parameters()) > CHEAP_PARAMETERS):
        return {}, ""
    try:
        return exact_logprobs(policy, batch, temperatures), ""
    except SpecError as error:
        if wanted:
            raise
        return {}, f" (No distance to the truth: {error})"


def _distances(
    policy: Policy, training: TrainingBatch, scores: tuple[_Score, _Score], sides: tuple[Setting, Setting], exact: Exact
) -> dict[str, float]:
    """Mean |logprob - truth| of each side, and of the float32 run itself."""
    if not exact:
        return {}
    mask_BT = training.batch.token_mask_BT[:, 1:].cpu() > 0
    found: dict[str, torch.Tensor] = {}
    for name, score, side in zip("ab", scores, sides, strict=True):
        for dtype in ("float32", "float64"):
            found[f"{name}_from_{dtype}_nats"] = score.tokens.logprobs_BT.double() - exact[dtype, side.temperature]
    at = sides[0].temperature
    found["float32_from_float64_nats"] = exact["float32", at] - exact["float64", at]
    sums = [float(x[mask_BT].abs().sum()) for x in found.values()]
    *totals, count = policy.sum_over_data(torch.tensor([*sums, float(mask_BT.sum())], dtype=torch.float64)).tolist()
    return {name: total / count for name, total in zip(found, totals, strict=True)}


def _per_token(
    policy: Policy, config: GRPOConfig, training: TrainingBatch, a: _Score, b: _Score
) -> tuple[pd.DataFrame, dict[str, float]]:
    """The table of all ranks' tokens, and the metrics over them."""
    import pandas as pd

    batch = training.batch.to(torch.device("cpu"))
    mask_BT = batch.token_mask_BT[:, 1:] > 0
    rows = _token_rows(policy, batch, mask_BT, a.tokens, b.tokens)
    flips = int((a.tokens.argmax_BT != b.tokens.argmax_BT)[mask_BT].sum())
    gathered: list[Any] = [None] * dist.get_world_size()
    is_copy = policy.mesh["tp"].get_local_rank() > 0  # tensor-parallel peers hold the same sequences
    dist.all_gather_object(gathered, ([], 0) if is_copy else (rows, flips))
    frame = pd.DataFrame([row for part, _ in gathered for row in part])
    frame["sequence"] = frame.groupby("sequence", sort=False).ngroup()
    g, p = (torch.tensor(frame[c].to_numpy(), dtype=torch.float64) for c in ("logprob_a", "logprob_b"))
    metrics = _metrics(g, p, config)
    metrics["argmax_flips"] = sum(n for _, n in gathered) / len(frame)
    return frame, metrics


def _token_rows(
    policy: Policy, batch: Batch, mask_BT: torch.Tensor, scored_a: Scored, scored_b: Scored
) -> list[dict[str, Any]]:
    first_real_B = batch.mask_BT.argmax(-1)
    base = policy.data_rank * batch.num_sequences
    rows = []
    for b, t in mask_BT.nonzero().tolist():
        token = int(batch.ids_BT[b, t + 1])
        logprob_a, logprob_b = float(scored_a.logprobs_BT[b, t]), float(scored_b.logprobs_BT[b, t])
        rows.append(
            {
                "sequence": base + b,
                "position": t + 1 - int(first_real_B[b]),
                "token": token,
                "text": policy.tokenizer.decode([token]),
                "logprob_a": logprob_a,
                "logprob_b": logprob_b,
                "delta_nats": logprob_b - logprob_a,
                "prob_a": math.exp(logprob_a),
                "prob_b": math.exp(logprob_b),
                "ratio": math.exp(logprob_b - logprob_a),
                "rank_a": int(scored_a.rank_BT[b, t]),
                "rank_b": int(scored_b.rank_BT[b, t]),
            }
        )
    return rows


def _metrics(g: torch.Tensor, p: torch.Tensor, config: GRPOConfig) -> dict[str, float]:
    """Metrics of logprobs [N] under a (g) and b (p)."""
    count = len(g)
    means = {name: value / count for name, value in mismatch_sums(g, p).items()}
    delta, ratio = p - g, (p - g).exp()
    probs = torch.stack([g.exp(), p.exp()])
    outside = (ratio < 1 - config.ratio_clip_min) | (ratio > 1 + config.ratio_clip_max)
    return {
        "mean_abs_nats": float(delta.abs().mean()),
        "max_abs_nats": float(delta.abs().max()),
        "fraction_bit_identical": float((delta == 0).double().mean()),
        **means,
        "k3": means["gen_kl_error"],
        "pearson": float(torch.corrcoef(probs)[0, 1]) if count > 1 and float(probs.std(-1).min()) > 0 else 1.0,
        "fraction_outside_clip": float(outside.double().mean()),
    }
