"""Two gradients of the same weights compared by group of parameters, and what each would make of one optimizer step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from toolkit.dtensors import local_shard
from toolkit.gradients import shard_and_copies
from toolkit.policy import Policy
from toolkit.spec import GRPOConfig

if TYPE_CHECKING:
    import pandas as pd

Shards = list[tuple[torch.Tensor, int]]  # this rank's part of each parameter's gradient, and how many ranks hold the same


def take_gradients(policy: Policy) -> Shards:
    """This rank's gradients, all parameters', out of the model: zeros where there is none."""
    held = [shard_and_copies(torch.zeros_like(p) if p.grad is None else p.grad) for p in policy.model.parameters()]
    taken = [(shard.detach().clone(), copies) for shard, copies in held]
    policy.model.zero_grad(set_to_none=True)
    return taken


def compare_gradients(policy: Policy, config: GRPOConfig, a: Shards, b: Shards) -> tuple[pd.DataFrame, dict[str, float]]:
    """Relative error |b - a| / |a| and cosine of gradients and of the AdamW steps they make; all ranks together.

    The steps start from the optimizer's moments as they are (none before the first step, where AdamW takes little more
    than each gradient's sign), with the config's learning rate, weight decay and clipping. Nothing is changed.

    Returns:
        A row per group (a layer's attention, MLP and norms; embedding; final norm; head), and the metrics over all.
    """
    import pandas as pd

    named = [(name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in policy.model.named_parameters()]
    groups = list(dict.fromkeys(_group(name) for name, _ in named))
    sums = torch.zeros(len(groups), 2, 4, dtype=torch.float64)
    counts = torch.zeros(len(groups), dtype=torch.float64)
    for (name, _), (x, copies), (y, _) in zip(named, a, b, strict=True):
        place = groups.index(_group(name))
        sums[place, 0] += _products(x, y) / copies
        counts[place] += x.numel() / copies
    dist.all_reduce(sums)
    dist.all_reduce(counts)
    norms = [math.sqrt(float(sums[:, 0, i].sum())) for i in (0, 1)]
    bound = config.max_grad_norm
    scales = [1.0 if bound is None else min(1.0, bound / (norm + 1e-6)) for norm in norms]  # as clip_grads_with_norm_
    updates = torch.zeros_like(sums)
    for (name, param), (x, copies), (y, _) in zip(named, a, b, strict=True):
        change = [_change(policy, config, param, g * s) for g, s in zip((x, y), scales, strict=True)]
        updates[groups.index(_group(name)), 1] += _products(*change) / copies
    dist.all_reduce(updates)
    sums += updates
    frame = pd.DataFrame({"group": groups, "num_parameters": counts.round().long().tolist()})
    for kind, name in enumerate(("gradient", "update")):
        frame[f"{name}_relative_error"], frame[f"{name}_cosine"] = zip(*(_error(row[kind]) for row in sums), strict=True)
    metrics = {}
    for kind, name in enumerate(("gradient", "update")):
        metrics[f"{name}_relative_error"], metrics[f"{name}_cosine"] = _error(sums[:, kind].sum(0))
    return frame, metrics


def relative_error(a: Shards, b: Shards) -> float:
    """|b - a| / |a| over all parameters; all ranks together."""
    sums = torch.zeros(4, dtype=torch.float64)
    for (x, copies), (y, _) in zip(a, b, strict=True):
        sums += _products(x, y) / copies
    dist.all_reduce(sums)
    return _error(sums)[0]


def _group(name: str) -> str:
    """`model.layers.3.self_attn` of `model.layers.3.self_attn.q_proj.weight`; outside layers, the module."""
    parts = name.split(".")
    layer = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[:-1] if layer is None else parts[: layer + 2])


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Sums over elements of a², b², ab and (b - a)², float64 [4] on the CPU."""
    a, b = a.double(), b.double()
    return torch.stack([a.square().sum(), b.square().sum(), (a * b).sum(), (b - a).square().sum()]).cpu()


def _error(sums: torch.Tensor) -> tuple[float, float]:
    """Relative error and cosine; of two zeros, 0 and 1; infinite where only the first is zero."""
    aa, bb, ab, dd = sums.tolist()
    relative = math.sqrt(dd / aa) if aa else math.inf if bb else 0.0
    return relative, ab / math.sqrt(aa * bb) if aa and bb else 1.0


@torch.no_grad()
def _change(policy: Policy, config: GRPOConfig, param: torch.nn.Parameter, grad: torch.Tensor) -> torch.Tensor:
    """What one AdamW step with this gradient adds to this rank's shard."""
    before = local_shard(param.data)
    options = policy.optimizer.param_groups[0]
    state: dict[str, Any] = policy.optimizer.state.get(param, {})
    moments = [local_shard(state[k]).clone() if state else torch.zeros_like(before) for k in ("exp_avg", "exp_avg_sq")]
    step = state["step"].clone() if state else torch.zeros((), dtype=torch.float32)
    moved, (beta1, beta2) = before.clone(), options["betas"]
    adamw(
        [moved], [grad.to(before.dtype)], [moments[0]], [moments[1]], [], [step],
        amsgrad=False, beta1=beta1, beta2=beta2, lr=config.learning_rate, weight_decay=config.weight_decay,
        eps=options["eps"], maximize=False,
    )  # fmt: skip
    return moved - before
