"""One GRPO step: sample, grade, compare with the group, score, and take one clipped, gradient-clipped AdamW step.

Shapes: _P prompts, _G completions of each, _B = P*G sequences of this rank, _T tokens.

Losses are sums divided by token (or sequence) counts of the whole step over all ranks, so micro-batching, gradient
accumulation and the number of ranks change nothing but rounding. FSDP2 averages gradients over data-parallel ranks; the
loss is multiplied by their number beforehand to undo that.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from toolkit import fsdp
from toolkit.advantages import group_advantages
from toolkit.logprobs import next_token_logprobs
from toolkit.losses import clipped_policy_gradient
from toolkit.mismatch import mismatch_sums
from toolkit.policy import Policy, by_mesh, check_finite, set_optimizer
from toolkit.prompts import Batch, Reward
from toolkit.records import StepRecord
from toolkit.rewards import exact_match, grade
from toolkit.rollouts import Rollouts, sample
from toolkit.spec import GRPOConfig


@dataclass(slots=True)
class TrainingBatch:
    """What the update needs, on the policy's device."""

    batch: Batch
    advantages_B: torch.Tensor  # float32
    previous_BT: torch.Tensor  # [B, T-1] float32, logprobs before the update
    num_tokens: float  # of the whole step, over all ranks
    num_sequences: float

    def micro_batches(self, size: int | None) -> Iterator[TrainingBatch]:
        """Pieces of at most `size` sequences, None for all at once."""
        total = self.batch.num_sequences
        for start in range(0, total, size or total):
            stop = start + (size or total)
            yield TrainingBatch(
                self.batch.rows(start, stop),
                self.advantages_B[start:stop],
                self.previous_BT[start:stop],
                self.num_tokens,
                self.num_sequences,
            )


def grpo_step(
    policy: Policy, config: GRPOConfig, problems: list[tuple[str, str]], reward: Reward | None, step: int
) -> StepRecord:
    """Run one step on this rank (all ranks together); `step` counts from 0.

    Interrupted or failed before the optimizer, it leaves parameters, moments and counters as they were, and the next call
    draws the same prompts and random numbers.
    """
    clock = _Clock()
    rollouts = sample_step(policy, config, problems, step)
    clock.lap("sampling")
    rewards_B = grade_together(policy, rollouts, reward)
    clock.lap("grading")
    training = training_batch(policy, config, rollouts, rewards_B)
    clock.lap("logprobs")
    lr = set_optimizer(policy, config, step)
    loss, sums = forward_backward(policy, config, training)
    grad_norm = clip_gradients(policy, config.max_grad_norm)
    policy.stop_if_asked()
    policy.optimizer.step()
    policy.optimizer.zero_grad(set_to_none=True)
    clock.lap("training")

    metrics = {"reward": 0.0, "loss": loss, "grad_norm": grad_norm, "lr": lr}
    metrics |= _reduce_metrics(policy, rollouts, training, rewards_B, sums)
    shown = zip(rollouts.prompts[:4], rollouts.completions, rollouts.answers, rewards_B.tolist(), strict=False)
    return StepRecord(step + 1, policy.spec.output_dtype, metrics, clock.seconds, list(shown))


def sample_step(policy: Policy, config: GRPOConfig, problems: list[tuple[str, str]], step: int) -> Rollouts:
    """Sample this rank's completions of a step."""
    return sample(
        policy,
        problems,
        num_generations=config.num_generations_per_prompt,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=policy.spec.seed * 1_000_003 + step,
    )


def grade_together(policy: Policy, rollouts: Rollouts, reward: Reward | None) -> torch.Tensor:
    """Rewards [B] float32; if the reward function raises on any rank, all ranks leave the step."""
    with policy.failing_together():
        rewards = grade(reward or exact_match, rollouts.prompts, rollouts.completions, rollouts.answers)
    return torch.tensor(rewards, dtype=torch.float32)


def training_batch(policy: Policy, config: GRPOConfig, rollouts: Rollouts, rewards_B: torch.Tensor) -> TrainingBatch:
    """Advantages, global counts and previous logprobs of graded rollouts."""
    advantages_PG = group_advantages(
        rewards_B.view(-1, rollouts.num_generations),
        normalize_rewards=config.normalize_rewards,
        use_leave_one_out_baseline=config.use_leave_one_out_baseline,
    )
    batch = rollouts.batch.to(policy.device)
    counts = torch.tensor([rollouts.batch.token_mask_BT.sum(), batch.num_sequences], dtype=torch.float64)
    num_tokens, num_sequences = policy.sum_over_data(counts).tolist()
    previous_BT = score(policy, batch, config.temperature, config.train_micro_batch_size)
    return TrainingBatch(batch, advantages_PG.flatten().to(policy.device), previous_BT, num_tokens, num_sequences)


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


Phase = Callable[[str], contextlib.AbstractContextManager[None]]


def no_phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Nobody is recording."""
    return contextlib.nullcontext()


def forward_logprobs(policy: Policy, batch: Batch, temperature: float, phase: Phase = no_phase) -> torch.Tensor:
    """One forward and the logprobs [B, T-1] of its tokens, with gradient if enabled."""
    with policy.autocast():
        with phase("forward"):
            logits_BTV = policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT).logits
        with phase("loss"):
            return next_token_logprobs(logits_BTV, batch.ids_BT, policy.spec, temperature)


def forward_backward(
    policy: Policy, config: GRPOConfig, training: TrainingBatch, *, phase: Phase = no_phase
) -> tuple[float, dict[str, float]]:
    """Accumulate the gradient of the step's loss over micro-batches.

    Args:
        phase: opened around forward, loss and backward, for the memory ledger.

    Returns:
        The loss over all ranks, and this rank's sums for the metrics.
    """
    policy.model.train()
    loss_sum, totals, done = 0.0, dict[str, float](), 0
    for part in training.micro_batches(config.train_micro_batch_size):
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
                )
            with phase("backward"):
                (loss * policy.data_size).backward()
        loss_sum += float(loss.detach())
        _accumulate(totals, sums)
        done += part.batch.num_sequences
        policy.progress("training", done, training.batch.num_sequences)
    fsdp.synchronize_gradients(policy.model, policy.mesh)
    return float(policy.sum_over_data(torch.tensor([loss_sum], dtype=torch.float64))), totals


def clip_gradients(policy: Policy, max_norm: float | None) -> float:
    """Scale gradients to a total norm of at most `max_norm`; returns the norm before.

    Raises:
        FloatingPointError: the norm is not finite; the optimizer was not touched.
    """
    params = [p for p in policy.model.parameters() if p.grad is not None]
    squares = torch.stack([_owned_square(p.grad) for p in params if p.grad is not None]).sum().cpu()
    dist.all_reduce(squares)
    total = squares.sqrt()
    if not torch.isfinite(total):
        bad = next(n for n, p in policy.model.named_parameters() if p.grad is not None and _not_finite(p.grad))
        raise FloatingPointError(
            f"the gradient norm is {float(total)}, first seen in {bad}; the step was dropped and no weight has changed. "
            f"At precision={policy.spec.precision!r} and output_dtype={policy.spec.output_dtype!r} a value left the range "
            "of the dtype (bfloat16 has the range of float32), or the reward is too large."
        )
    if max_norm is not None:
        for group in by_mesh(params):
            torch.nn.utils.clip_grads_with_norm_(group, max_norm, total.to(policy.device, torch.float32))
    return float(total)


def _owned_square(grad: torch.Tensor) -> torch.Tensor:
    """Squared norm of this rank's shard, divided by the number of ranks that hold the same shard.

    One all-reduce of the sum then gives the norm of everything; torch's own norm of DTensors needs one per mesh axis and
    parameter group.
    """
    shard, copies = shard_and_copies(grad)
    return shard.double().square().sum() / copies


def shard_and_copies(grad: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's part of a gradient, and the number of ranks that hold the same part."""
    if not isinstance(grad, DTensor):
        return grad, dist.get_world_size()
    copies = dist.get_world_size() // grad.device_mesh.size()
    for axis, placement in enumerate(grad.placements):
        assert not placement.is_partial()
        copies *= grad.device_mesh.size(axis) if placement.is_replicate() else 1
    return grad.to_local(), copies


def _not_finite(grad: torch.Tensor) -> bool:
    whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return not bool(torch.isfinite(whole).all())


def _reduce_metrics(
    policy: Policy, rollouts: Rollouts, training: TrainingBatch, rewards_B: torch.Tensor, sums: dict[str, float]
) -> dict[str, float]:
    """Metrics over all ranks from each rank's sums and extremes."""
    mask_BT = rollouts.batch.token_mask_BT[:, 1:] > 0
    g = rollouts.generation_logprobs_BT[:, 1:][mask_BT]
    p = training.previous_BT.cpu()[mask_BT]
    additive = mismatch_sums(g, p)
    additive["approx_entropy"] = float(-((p - g).exp() * p).sum())  # NeMo-RL's: importance-weighted -log p
    additive |= {name: sums[name] for name in ("probs_ratio", "probs_ratio_clamped", "clip_fraction")}
    per_sequence = {
        "reward": float(rewards_B.sum()),
        "mean_gen_tokens_per_sample": float(rollouts.batch.token_mask_BT.sum()),
        "truncation_rate": float((~rollouts.stopped_B).sum()),
    }
    values = policy.sum_over_data(torch.tensor([*additive.values(), *per_sequence.values()], dtype=torch.float64))
    counts = [training.num_tokens] * len(additive) + [training.num_sequences] * len(per_sequence)
    names = [*additive, *per_sequence]
    metrics = {n: v / c for n, v, c in zip(names, values.tolist(), counts, strict=True)}
    extremes = torch.tensor([-sums["probs_ratio_min"], sums["probs_ratio_max"]], dtype=torch.float64)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    low, high = extremes.tolist()
    metrics |= {"probs_ratio_min": -low, "probs_ratio_max": high}
    return metrics | {"global_valid_toks": training.num_tokens, "global_valid_seqs": training.num_sequences}


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
        self.seconds[phase] = now - self._last
        self._last = now
