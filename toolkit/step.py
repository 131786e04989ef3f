"""One GRPO step: sample, grade, compare with the group, score, and take one clipped, gradient-clipped AdamW step.

Shapes: _P prompts, _G completions of each, _B = P*G sequences of this rank, _T tokens.

Losses are sums divided by token (or sequence) counts of the whole step over all ranks, so micro-batching, gradient
accumulation and the number of ranks change nothing but rounding. FSDP2 averages gradients over data-parallel ranks; the
loss is multiplied by their number beforehand to undo that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from toolkit import fsdp
from toolkit.advantages import group_advantages
from toolkit.collect import Graded, collect
from toolkit.gradients import clip_gradients, set_optimizer
from toolkit.logprobs import Phase, forward_logprobs, no_phase
from toolkit.losses import clipped_policy_gradient
from toolkit.mismatch import mismatch_sums
from toolkit.policy import Policy, check_finite
from toolkit.prompts import Batch, Reward
from toolkit.records import StepRecord
from toolkit.reference import reference_weights
from toolkit.rollouts import Rollouts
from toolkit.spec import GRPOConfig


@dataclass(slots=True)
class TrainingBatch:
    """What the update needs, on the policy's device."""

    batch: Batch
    advantages_B: torch.Tensor  # float32
    previous_BT: torch.Tensor | None  # [B, T-1] float32, logprobs before the update; None takes the current ones
    num_tokens: float  # that count in the whole update, over all ranks
    num_sequences: float
    generation_BT: torch.Tensor | None = None  # [B, T-1] float32, the sampler's, if the loss corrects for them
    reference_BT: torch.Tensor | None = None  # [B, T-1] float32, the frozen reference's, if there is a penalty

    @property
    def logprobs(self) -> list[torch.Tensor]:
        """The logprobs that are there."""
        return [t for t in (self.previous_BT, self.generation_BT, self.reference_BT) if t is not None]

    def rows(self, start: int, stop: int, stride: int = 1) -> TrainingBatch:
        """Every `stride`-th sequence from `start` up to `stop`, counted as before."""
        optional = (self.previous_BT, self.generation_BT, self.reference_BT)
        previous, generation, reference = (None if t is None else t[start:stop:stride] for t in optional)
        return TrainingBatch(
            self.batch.rows(start, stop, stride),
            self.advantages_B[start:stop:stride],
            previous,
            self.num_tokens,
            self.num_sequences,
            generation,
            reference,
        )

    def micro_batches(self, size: int | None) -> Iterator[TrainingBatch]:
        """Pieces of at most `size` sequences, None for all at once."""
        total = self.batch.num_sequences
        for start in range(0, total, size or total):
            yield self.rows(start, start + (size or total))


def grpo_step(
    policy: Policy, config: GRPOConfig, problems: list[tuple[str, str]], reward: Reward | None, step: int
) -> StepRecord:
    """Run one step on this rank (all ranks together); `step` counts from 0.

    Interrupted or failed before the first optimizer update, it leaves parameters, moments and counters as they were, and the
    next call draws the same prompts and random numbers. After it, nothing stops the step's other updates.
    """
    clock = _Clock()
    graded = collect(policy, config, problems, reward, step, clock.lap)
    training = training_batch(policy, config, graded.rollouts, graded.shaped_B)
    clock.lap("logprobs")
    lr = set_optimizer(policy, config, step)
    losses, norms, seen = [], [], list[torch.Tensor]()
    totals: dict[str, float] = {}
    updates = split_updates(policy, training, config.num_updates)
    for number, update in enumerate(updates):
        with _named_update(number, len(updates)):
            loss, sums = forward_backward(policy, config, update, can_stop=number == 0, seen=seen)
            norms.append(clip_gradients(policy, config.max_grad_norm))
        if number == 0:
            policy.stop_if_asked()
        policy.optimizer.step()
        policy.optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
        _accumulate(totals, sums)
    clock.lap("training")

    metrics = {"reward": 0.0, "loss": sum(losses) / len(losses), "grad_norm": sum(norms) / len(norms), "lr": lr}
    previous_BT = torch.cat(seen) if training.previous_BT is None else training.previous_BT
    metrics |= _reduce_metrics(policy, config, graded, training, previous_BT.cpu(), totals) | graded.counts
    rollouts = graded.rollouts
    shown = zip(rollouts.prompts[:4], rollouts.completions, rollouts.answers, graded.rewards_B.tolist(), strict=False)
    return StepRecord(step + 1, policy.spec.output_dtype, metrics, clock.seconds, list(shown))


def training_batch(policy: Policy, config: GRPOConfig, rollouts: Rollouts, rewards_B: torch.Tensor) -> TrainingBatch:
    """Advantages, global counts, and previous and reference logprobs of graded rollouts."""
    advantages_PG = group_advantages(
        rewards_B.view(-1, rollouts.num_generations),
        normalize_rewards=config.normalize_rewards,
        use_leave_one_out_baseline=config.use_leave_one_out_baseline,
        clip_low=config.advantage_clip_low,
        clip_high=config.advantage_clip_high,
    )
    batch = rollouts.batch
    if config.overlong_filtering:
        kept_B1 = rollouts.stopped_B.unsqueeze(-1).float()
        batch = dataclasses.replace(batch, token_mask_BT=batch.token_mask_BT * kept_B1)
    batch = batch.to(policy.device)
    size, temperature = config.train_micro_batch_size, config.temperature
    reference_BT = None
    if config.reference_policy_kl_penalty:
        with reference_weights(policy):
            reference_BT = score(policy, batch, temperature, size)
    generation_BT = None
    if config.use_importance_sampling_correction:
        generation_BT = rollouts.generation_logprobs_BT[:, 1:].to(policy.device)
    num_tokens, num_sequences = _counts(policy, batch)
    return TrainingBatch(
        batch,
        advantages_PG.flatten().to(policy.device),
        None if config.force_on_policy_ratio else score(policy, batch, temperature, size),
        num_tokens,
        num_sequences,
        generation_BT=generation_BT,
        reference_BT=reference_BT,
    )


def _counts(policy: Policy, batch: Batch) -> tuple[float, float]:
    """Tokens and sequences that count, over all ranks; at least 1, so that a batch of none has loss 0."""
    mask_BT = batch.token_mask_BT
    mine = torch.tensor([float(mask_BT.sum()), float((mask_BT.sum(-1) > 0).sum())], dtype=torch.float64)
    tokens, sequences = policy.sum_over_data(mine).tolist()
    return max(tokens, 1.0), max(sequences, 1.0)


def split_updates(policy: Policy, training: TrainingBatch, num_updates: int) -> list[TrainingBatch]:
    """The step's sequences in as many updates, each counted over its own tokens.

    Update u takes every `num_updates`-th sequence from the u-th on: the same ones on any number of ranks.
    """
    if num_updates == 1:
        return [training]
    parts = [training.rows(first, training.batch.num_sequences, num_updates) for first in range(num_updates)]
    for part in parts:
        part.num_tokens, part.num_sequences = _counts(policy, part.batch)
    return parts


@contextlib.contextmanager
def _named_update(number: int, num_updates: int) -> Iterator[None]:
    """Say which of a step's updates failed, and that those before it were taken."""
    try:
        yield
    except FloatingPointError as error:
        if number > 0:
            error.add_note(f"This was update {number + 1} of {num_updates} of the step; those before it were taken.")
        raise


@torch.no_grad()
def score(policy: Policy, batch: Batch, temperature: float, micro_batch_size: int | None = None) -> torch.Tensor:
    """Logprobs [B, T-1] of a batch's tokens, exactly as the training forward computes them, without gradient."""
    policy.model.train()  # dropout is off; checkpointing layers check this flag, so both forwards take the same path
    parts = []
    size = micro_batch_size or batch.num_sequences
    for start in range(0, batch.num_sequences, size):
        policy.stop_if_asked()
        parts.append(forward_logprobs(policy, batch.rows(start, start + size), temperature))
        policy.progress("logprobs", min(start + size, batch.num_sequences), batch.num_sequences)
    fsdp.reshard(policy.model)
    logprobs_BT = torch.cat(parts)
    check_finite(policy, logprobs_BT, batch, "scoring")
    return logprobs_BT


def forward_backward(
    policy: Policy,
    config: GRPOConfig,
    training: TrainingBatch,
    *,
    phase: Phase = no_phase,
    can_stop: bool = True,
    seen: list[torch.Tensor] | None = None,
) -> tuple[float, dict[str, float]]:
    """Accumulate the gradient of the step's loss over micro-batches.

    Args:
        phase: opened around forward, loss and backward, for the memory ledger.
        can_stop: leave between micro-batches when Ctrl-C was pressed.
        seen: gets the current logprobs [B, T-1] of each micro-batch, detached.

    Returns:
        The loss over all ranks, and this rank's sums for the metrics.
    """
    policy.model.train()
    loss_sum, totals, done = 0.0, dict[str, float](), 0
    for part in training.micro_batches(config.train_micro_batch_size):
        if can_stop:
            policy.stop_if_asked()
        with policy.autocast():
            current_BT = forward_logprobs(policy, part.batch, config.temperature, phase)
            with phase("loss"):
                loss, sums = clipped_policy_gradient(
                    current_BT,
                    part.previous_BT,
                    part.advantages_B,
                    part.batch.token_mask_BT[:, 1:],
                    config,
                    num_tokens=part.num_tokens,
                    num_sequences=part.num_sequences,
                    generation_BT=part.generation_BT,
                    reference_BT=part.reference_BT,
                )
            with phase("backward"):
                (loss * policy.data_size).backward()
        loss_sum += float(loss.detach())
        if seen is not None:
            seen.append(current_BT.detach())
        _accumulate(totals, sums)
        done += part.batch.num_sequences
        policy.progress("training", done, training.batch.num_sequences)
    fsdp.synchronize_gradients(policy.model, policy.mesh)
    return float(policy.sum_over_data(torch.tensor([loss_sum], dtype=torch.float64))), totals


def _reduce_metrics(
    policy: Policy,
    config: GRPOConfig,
    graded: Graded,
    training: TrainingBatch,
    previous_BT: torch.Tensor,
    sums: dict[str, float],
) -> dict[str, float]:
    """Metrics over all ranks from each rank's sums and extremes."""
    rollouts = graded.rollouts
    mask_BT = training.batch.token_mask_BT[:, 1:].cpu() > 0
    g, p = rollouts.generation_logprobs_BT[:, 1:][mask_BT], previous_BT[mask_BT]
    additive = mismatch_sums(g, p)
    additive["approx_entropy"] = float(-((p - g).exp() * p).sum())  # NeMo-RL's: importance-weighted -log p
    compared = list(additive)
    additive |= {name: value for name, value in sums.items() if not name.endswith(("_min", "_max"))}
    per_sequence = {
        "reward": float(graded.rewards_B.sum()),
        "mean_gen_tokens_per_sample": float(rollouts.batch.token_mask_BT.sum()),
        "truncation_rate": float((~rollouts.stopped_B).sum()),
    }
    if config.shapes_rewards:
        per_sequence["shaped_reward"] = float(graded.shaped_B.sum())
    mine = [*additive.values(), *per_sequence.values(), float(mask_BT.sum())]
    *values, num_tokens = policy.sum_over_data(torch.tensor(mine, dtype=torch.float64)).tolist()
    num_sampled = float(rollouts.batch.num_sequences * policy.data_size)
    counts = [training.num_tokens] * len(additive) + [num_sampled] * len(per_sequence)
    names = [*additive, *per_sequence]
    metrics = {n: v / c for n, v, c in zip(names, values, counts, strict=True)}
    if num_tokens == 0:  # every completion was filtered out: there is nothing to compare
        metrics |= dict.fromkeys(compared, math.nan)
    extremes = torch.tensor([-sums["probs_ratio_min"], sums["probs_ratio_max"]], dtype=torch.float64)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    low, high = extremes.tolist()
    metrics |= {"probs_ratio_min": -low, "probs_ratio_max": high}
    num_sequences = training.num_sequences if num_tokens else 0.0
    return metrics | {"global_valid_toks": num_tokens, "global_valid_seqs": num_sequences}


def _accumulate(totals: dict[str, float], sums: dict[str, float]) -> None:
    for name, value in sums.items():
        if name.endswith("_min"):
            totals[name] = min(totals.get(name, math.inf), value)
        elif name.endswith("_max"):
            totals[name] = max(totals.get(name, -math.inf), value)
        else:
            totals[name] = totals.get(name, 0.0) + value


class _Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now
