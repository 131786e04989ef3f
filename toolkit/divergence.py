"""Two settings of the same weights on the same tokens: how far is each token's logprob apart, and why.

Settings are live ones (`policy.LIVE_FIELDS`) plus the temperature, so both sides run on the very same sharded model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from toolkit import fsdp
from toolkit.cause import Setting, by_unit, explain, resolve_settings
from toolkit.logprobs import forward_logprobs
from toolkit.mismatch import mismatch_sums
from toolkit.policy import Policy, check_finite
from toolkit.prompts import Batch, Reward, make_batch
from toolkit.records import Report
from toolkit.spec import GRPOConfig
from toolkit.step import (
    TrainingBatch,
    forward_backward,
    grade_together,
    sample_step,
    shard_and_copies,
    training_batch,
)

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go


@dataclass(repr=False, eq=False)
class DivergenceReport(Report):
    """Per-token logprobs under two settings, the field's metrics of their distance, and the cause in words.

    Attributes:
        a, b: the settings compared, as text. `a` plays the sampler (NeMo-RL's "generation"), `b` the trainer.
        tokens: a row per scored token: sequence, position, token, text, logprob_a, logprob_b, delta_nats (b - a), prob_a,
            prob_b, ratio (prob_b / prob_a).
        metrics: see `summary`.
        units: mean |delta| in nats when only this FSDP unit is switched from a's output dtype to b's; empty when output
            dtype is not what differs.
        cause: why the divergence is what it is, in words; a zero says why it is zero.
    """

    a: str
    b: str
    tokens: pd.DataFrame
    metrics: dict[str, float]
    units: dict[str, float]
    cause: str
    ratio_clip_min: float
    ratio_clip_max: float

    @property
    def summary(self) -> dict[str, Any]:
        """NeMo-RL's metrics and ours.

        mean_abs_nats, max_abs_nats: of |delta|. fraction_bit_identical: tokens with exactly the same logprob. k1, k3:
        estimators of KL(a || b). pearson: of the probabilities. fraction_outside_clip: tokens whose ratio the clip range
        would cut. argmax_flips: fraction of positions whose most likely token differs. gradient_relative_error:
        |grad_b - grad_a| / |grad_a|; gradient_cosine: of their angle.
        """
        return {"a": self.a, "b": self.b, **self.metrics}

    @property
    def headline(self) -> str:
        m = self.metrics
        if m["fraction_bit_identical"] == 1.0:
            return f"{self.a} and {self.b}: every one of {len(self.tokens)} token logprobs is bit-identical. {self.cause}"
        return (
            f"{self.a} against {self.b}: |delta| {m['mean_abs_nats']:.2e} nats mean, {m['max_abs_nats']:.2e} max over "
            f"{len(self.tokens)} tokens. {self.cause}"
        )

    def to_frame(self) -> pd.DataFrame:
        """The per-token table."""
        return self.tokens

    def figure(self) -> go.Figure:
        """Probability against probability, and the distribution of the ratio with the clip band."""
        from toolkit.figures import divergence_figure

        return divergence_figure(self)


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
) -> DivergenceReport:
    """Compare two settings on this rank (all ranks together).

    Args:
        problems: sample completions of these and score them; or
        token_ids: score these sequences (all but their first token).
    """
    side_a, side_b = resolve_settings(policy, a, b, common, config.temperature)
    for side in (side_a, side_b):  # refuse either before anything runs
        with policy.temporarily(**side.live):
            pass
    training = _tokens(policy, config, problems, token_ids, reward, step)
    if token_ids is not None:  # nobody sampled them, so the loss has nothing to correct or to penalise
        config = GRPOConfig(
            train_micro_batch_size=config.train_micro_batch_size,
            ratio_clip_min=config.ratio_clip_min,
            ratio_clip_max=config.ratio_clip_max,
        )
    score_a, score_b = (_score(policy, config, training, side) for side in (side_a, side_b))
    table, metrics = _per_token(policy, config, training, score_a, score_b)
    units = by_unit(policy, training, side_a, side_b, score_a.logprobs_BT) if metrics["mean_abs_nats"] else {}
    name_a, name_b = side_a.describe(side_b), side_b.describe(side_a)
    cause = explain(policy, side_a, side_b, metrics, units, score_a.gradient)
    return DivergenceReport(name_a, name_b, table, metrics, units, cause, config.ratio_clip_min, config.ratio_clip_max)


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
    batch = make_batch(rows, [1] * share, policy.tokenizer.pad_token_id).to(policy.device)
    batch.token_mask_BT[max(0, len(token_ids) - first) :] = 0
    num_tokens = float(sum(len(ids) - 1 for ids in token_ids))
    previous_BT = torch.zeros(batch.ids_BT[:, 1:].shape, device=policy.device)
    return TrainingBatch(batch, torch.zeros(share, device=policy.device), previous_BT, num_tokens, float(len(token_ids)))


@dataclass(slots=True)
class _Score:
    logprobs_BT: torch.Tensor  # [B, T-1] float32, CPU
    argmax_BT: torch.Tensor  # [B, T-1] int64, CPU
    gradient: str  # of what: "GRPO loss" or "mean logprob"
    gradients: list[tuple[torch.Tensor, int]]  # this rank's shards, float32, and how many ranks hold the same one


def _score(policy: Policy, config: GRPOConfig, training: TrainingBatch, side: Setting) -> _Score:
    config = dataclasses.replace(config, temperature=side.temperature)
    with policy.temporarily(**side.live):
        policy.model.train()
        with torch.no_grad(), policy.autocast():
            batch = training.batch
            logits = policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT).logits
            whole = logits.full_tensor() if isinstance(logits, torch.distributed.tensor.DTensor) else logits
            argmax_BT = whole[:, :-1].argmax(-1).cpu()
            del logits, whole
        with torch.no_grad():
            logprobs_BT = forward_logprobs(policy, training.batch, side.temperature)
        fsdp.reshard(policy.model)
        check_finite(policy, logprobs_BT, training.batch, "the divergence")
        advantages_B, of = training.advantages_B, "GRPO loss"
        any_signal = policy.sum_over_data(advantages_B.abs().sum().cpu().double().reshape(1))
        if not any_signal.item():  # all rewards equal (or given tokens): that gradient is zero whatever the dtype
            advantages_B, of = torch.ones_like(advantages_B), "mean logprob"
        scored = dataclasses.replace(training, advantages_B=advantages_B, previous_BT=logprobs_BT)
        forward_backward(policy, config, scored)
        held = [shard_and_copies(p.grad) for p in policy.model.parameters() if p.grad is not None]
        grads = [(shard.detach().clone(), copies) for shard, copies in held]
        policy.model.zero_grad(set_to_none=True)
    return _Score(logprobs_BT.cpu(), argmax_BT, of, grads)


def _per_token(
    policy: Policy, config: GRPOConfig, training: TrainingBatch, a: _Score, b: _Score
) -> tuple[pd.DataFrame, dict[str, float]]:
    """The table of all ranks' tokens, and the metrics over them."""
    import pandas as pd

    batch = training.batch.to(torch.device("cpu"))
    mask_BT = batch.token_mask_BT[:, 1:] > 0
    rows = _token_rows(policy, batch, mask_BT, a.logprobs_BT, b.logprobs_BT)
    flips = int((a.argmax_BT != b.argmax_BT)[mask_BT].sum())
    squares = torch.zeros(4, dtype=torch.float64)
    for (x, copies), (y, _) in zip(a.gradients, b.gradients, strict=True):
        squares += _products(x, y) / copies
    dist.all_reduce(squares)
    gathered: list[Any] = [None] * dist.get_world_size()
    is_copy = policy.mesh["tp"].get_local_rank() > 0  # tensor-parallel peers hold the same sequences
    dist.all_gather_object(gathered, ([], 0) if is_copy else (rows, flips))
    frame = pd.DataFrame([row for part, _ in gathered for row in part])
    frame["sequence"] = frame.groupby("sequence", sort=False).ngroup()
    g, p = (torch.tensor(frame[c].to_numpy(), dtype=torch.float64) for c in ("logprob_a", "logprob_b"))
    metrics = _metrics(g, p, config)
    metrics["argmax_flips"] = sum(n for _, n in gathered) / len(frame)
    aa, bb, ab, dd = squares.tolist()
    metrics["gradient_relative_error"] = math.sqrt(dd / aa) if aa else 0.0
    metrics["gradient_cosine"] = ab / math.sqrt(aa * bb) if aa and bb else 1.0
    return frame, metrics


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sums over elements of a², b², ab and (b - a)², float64 [4] on the CPU."""
    a, b = a.double(), b.double()
    return torch.stack([a.square().sum(), b.square().sum(), (a * b).sum(), (b - a).square().sum()]).cpu()


def _token_rows(
    policy: Policy, batch: Batch, mask_BT: torch.Tensor, a_BT: torch.Tensor, b_BT: torch.Tensor
) -> list[dict[str, Any]]:
    first_real_B = batch.mask_BT.argmax(-1)
    base = policy.data_rank * batch.num_sequences
    rows = []
    for b, t in mask_BT.nonzero().tolist():
        token = int(batch.ids_BT[b, t + 1])
        logprob_a, logprob_b = float(a_BT[b, t]), float(b_BT[b, t])
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
