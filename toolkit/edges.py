"""The known precision edges, each measured on the live model with and without its cure.

Shapes: _B sequences, _T tokens, _N scored tokens, _H hidden, _V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from toolkit import fsdp
from toolkit.collect import sample_step
from toolkit.dtensors import whole
from toolkit.edge_report import Edge, EdgeReport, unmeasured
from toolkit.edge_rows import NAMES, HeadRows, head_edges, raw_loss_edges, temperature_edges
from toolkit.errors import SpecError
from toolkit.expert_edges import expert_head_edges
from toolkit.logprobs import forward_logprobs
from toolkit.policy import Policy, check_finite
from toolkit.prompts import Batch
from toolkit.spec import DTYPES, GRPOConfig

#: Scored tokens whose logits are looked at, over all ranks: in float64, rows of a large vocabulary are megabytes each.
MAX_ROWS = 64
_RANGE = "float16 range"


def measure_edges(policy: Policy, config: GRPOConfig, problems: list[tuple[str, str]], step: int) -> EdgeReport | None:
    """Measure every edge (all ranks together) on completions sampled for it; the report is rank 0's, None on others.

    The model runs once with bfloat16 outputs; all edges but float16's and the experts' are arithmetic on what its head was
    given and what came out, on rank 0. Costs a rollout, four forwards (a mixture of experts: eight more), the head's weight
    gathered in float32 on each rank, and seconds of arithmetic.
    """
    batch = sample_step(policy, config, problems, step).batch.to(policy.device)
    range_edge = _float16_edge(policy, batch, config.temperature)
    policy.progress("edges: experts", 0, 4)
    after = [*expert_head_edges(policy, batch), range_edge]
    try:
        rows = _head_rows(policy, batch)
    except (SpecError, FloatingPointError) as error:
        edges = [unmeasured(name, str(error)) for name in NAMES]
        return EdgeReport(str(policy.spec.model), 0, [*edges, *after]) if policy.is_first else None
    if not policy.is_first:
        return None
    text: Any = policy.model.config.get_text_config()  # type: ignore[operator, union-attr]
    groups: list[tuple[str, Callable[[], Iterable[Edge]]]] = [
        ("raw-logit losses", lambda: raw_loss_edges(rows, policy.eos_ids[0])),
        ("temperature", lambda: temperature_edges(rows, config.temperature)),
        ("float32 head", lambda: head_edges(rows, tied=bool(text.tie_word_embeddings))),
    ]
    edges = []
    for done, (name, measure) in enumerate(groups, 1):
        policy.progress(f"edges: {name}", done, 1 + len(groups))
        edges += measure()
    policy.progress("edges", 1 + len(groups), 1 + len(groups))
    return EdgeReport(str(policy.spec.model), len(rows.targets_N), [*edges, *after])


@torch.no_grad()
def _head_rows(policy: Policy, batch: Batch) -> HeadRows:
    """Run the model with bfloat16 outputs; what its head was given and what came out, of all ranks.

    Raises:
        SpecError: this session cannot emit bfloat16.
        FloatingPointError: the logits are not finite.
    """
    head: Any = policy.model.get_output_embeddings()  # type: ignore[operator]
    seen: dict[str, torch.Tensor] = {}

    def keep(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen["hidden"], seen["output"] = whole(args[0]), whole(output)

    policy.model.eval()
    with policy.temporarily(output_dtype="bfloat16"):
        handle = head.register_forward_hook(keep)
        try:
            with policy.autocast():
                logits_BTV = whole(policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT).logits)
        finally:
            handle.remove()
        fsdp.reshard(policy.model)
        check_finite(policy, logits_BTV.float().logsumexp(-1), batch, "measuring the edges")
    weight_VH = whole(head.weight.detach()).float().cpu()
    bias_V = None if head.bias is None else whole(head.bias.detach()).float().cpu()
    share = -(-MAX_ROWS // policy.data_size)
    places = batch.token_mask_BT[:, 1:].nonzero()[:share]
    at = (places[:, 0], places[:, 1])
    mine = tuple(t.cpu() for t in (seen["hidden"][at], logits_BTV[at].bfloat16(), seen["output"][at].bfloat16()))
    mine = (*mine, batch.ids_BT[:, 1:][at].cpu())
    gathered: list[Any] = [None] * dist.get_world_size()
    is_copy = policy.mesh["tp"].get_local_rank() > 0  # tensor-parallel peers hold the same sequences
    dist.all_gather_object(gathered, None if is_copy else mine)
    parts = zip(*(part for part in gathered if part is not None), strict=True)
    hidden_NH, logits_NV, output_NV, targets_N = (torch.cat(part) for part in parts)
    return HeadRows(hidden_NH, logits_NV, weight_VH, bias_V, targets_N, transformed=not torch.equal(output_NV, logits_NV))


@torch.no_grad()
def _float16_edge(policy: Policy, batch: Batch, temperature: float) -> Edge:
    """Run with float16 outputs: what that moves, or which unit leaves its range."""
    mask_BT = batch.token_mask_BT[:, 1:].cpu() > 0
    found: dict[str, torch.Tensor] = {}
    largest: dict[str, float] = {}
    policy.model.eval()
    for dtype in ("float32", "bfloat16", "float16"):
        try:
            with policy.temporarily(output_dtype=dtype):
                if dtype == "float32":  # what would have to fit
                    with policy.autocast():
                        largest = fsdp.largest_outputs(
                            policy.model, lambda: policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT)
                        )
                logprobs_BT = forward_logprobs(policy, batch, temperature)
                fsdp.reshard(policy.model)
                check_finite(policy, logprobs_BT, batch, f"{dtype} outputs")
        except SpecError as error:
            return unmeasured(_RANGE, str(error))
        except FloatingPointError as error:
            cure = "bfloat16 or float32 outputs" if dtype == "float16" else "other weights"
            return Edge(_RANGE, f"{dtype} outputs", math.inf, "nats", cure, None, str(error))
        found[dtype] = logprobs_BT.cpu()[mask_BT].double()
    error_nats, cured_nats = (_mean(policy, (found[d] - found["float32"]).abs()) for d in ("float16", "bfloat16"))
    worst, unit = _largest(largest)
    return Edge(
        _RANGE, "float16 outputs", 0.0, "share of outputs out of range", "bfloat16 outputs (the range of float32)", 0.0,
        f"finite: the largest output, {worst:.3g} of {unit}, is {worst / DTYPES['float16'].max_value:.2%} of 65504; range "
        f"is no reason against float16 here (rounding moves logprobs by {error_nats:.1e} nats from float32 outputs, "
        f"bfloat16's by {cured_nats:.1e})",
    )  # fmt: skip


def _largest(mine: dict[str, float]) -> tuple[float, str]:
    """The largest output of any unit on any rank, and whose it is."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, max((value, name) for name, value in mine.items()))
    value, name = max(everyone)
    return float(value), str(name)


def _mean(policy: Policy, values_N: torch.Tensor) -> float:
    sums = policy.sum_over_data(torch.tensor([float(values_N.sum()), len(values_N)], dtype=torch.float64))
    return float(sums[0] / sums[1])
