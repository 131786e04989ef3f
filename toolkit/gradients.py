"""The norm of a sharded gradient, clipping to it, and the learning rate of a step."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from toolkit.dtensors import whole
from toolkit.grpo_config import GRPOConfig
from toolkit.policy import Policy, by_mesh

_SQUARED_AT_A_TIME = 2**20  # elements; a float64 copy of a whole embedding would be the peak of the step


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
    parts = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in shard.flatten().split(_SQUARED_AT_A_TIME)]
    return torch.stack(parts).square().sum() / copies


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
    return not bool(torch.isfinite(whole(grad)).all())


def set_optimizer(policy: Policy, config: GRPOConfig, step: int) -> float:
    """Set weight decay and learning rate for a step (counted from 0, for the warm-up); returns the rate."""
    rate = config.learning_rate * warmup_factor(config, step)
    for group in policy.optimizer.param_groups:
        group["lr"] = rate
        group["weight_decay"] = config.weight_decay
    return rate


def warmup_factor(config: GRPOConfig, step: int) -> float:
    """Share of the learning rate at a step, counted from 0; with a start factor it is torch's `LinearLR`."""
    steps, start = config.warmup_steps, config.warmup_start_factor
    if step >= steps:
        return 1.0
    return (step + 1) / steps if start is None else start + (1 - start) * step / steps
