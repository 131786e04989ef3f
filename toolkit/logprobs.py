"""Token logprobs: the one place that computes them, for the sampler, the trainer and the divergence report alike.

Shapes: _N rows (tokens), _V vocabulary, leading dimensions written as `...`.

Memory, in bytes per logit element beyond the logits themselves: "materialized" holds a float32 copy (none when the
logits are float32 already), its log-softmax (float32, saved for backward) and, in backward, one gradient of each.
"chunked" holds `chunk_rows` rows of float32 at a time, forward and backward, saves nothing but the logits, and its
gradient has the logits' dtype. "linear" has no logits (`linear_head.linear_logprobs`, run inside the model's forward).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from toolkit.checks import check_temperature, check_whole
from toolkit.errors import SpecError
from toolkit.linear_forward import linear_forward
from toolkit.linear_head import IGNORED
from toolkit.policy import Policy
from toolkit.prompts import Batch, pack, unpack
from toolkit.shared_prompts import SharedRows, share_prompts
from toolkit.spec import PolicySpec, TemperatureOrder

Phase = Callable[[str], contextlib.AbstractContextManager[None]]


def no_phase(name: str) -> contextlib.AbstractContextManager[None]:
    """Phases that nobody watches."""
    return contextlib.nullcontext()


def forward_logprobs(policy: Policy, batch: Batch, temperature: float, phase: Phase = no_phase) -> torch.Tensor:
    """Run the model over a batch: logprobs [B, T-1] of its tokens in the spec's mode, with gradient if enabled.

    Those of prompt and pad tokens mean nothing; linear mode leaves them at 0.
    """
    if policy.spec.sequence_packing:
        row, real_BT = pack(batch)
        return unpack(_forward(policy, row, None, temperature, phase), real_BT)
    if policy.spec.share_prompt_prefix:
        rows = share_prompts(batch)
        return rows.spread(_forward_shared(policy, rows, temperature, phase))
    return _forward(policy, batch, batch.mask_BT, temperature, phase)


def _forward(policy: Policy, batch: Batch, mask_BT: torch.Tensor | None, temperature: float, phase: Phase) -> torch.Tensor:
    with policy.autocast():
        if policy.spec.logprob_mode == "linear":
            with phase("forward"):
                return policy.forward_logprobs(batch, mask_BT, temperature)
        with phase("forward"):
            logits_BTV = policy.forward(batch.ids_BT, mask_BT, batch.positions_BT).logits
        with phase("loss"):
            return next_token_logprobs(logits_BTV, batch.ids_BT, policy.spec, temperature)


def _forward_shared(policy: Policy, rows: SharedRows, temperature: float, phase: Phase) -> torch.Tensor:
    """Logprobs [R, K] of completion tokens; the head runs on nothing else."""
    with policy.autocast():
        if policy.spec.logprob_mode == "linear":
            targets_RK = rows.targets_RK.masked_fill(rows.counted_RK == 0, IGNORED)
            with phase("forward"):
                return linear_forward(
                    policy.model, rows.ids_RL, rows.mask_R1LL, rows.positions_RL, targets_RK, temperature,
                    columns_K=rows.columns_K,
                )  # fmt: skip
        with phase("forward"):
            logits_RKV = policy.forward(rows.ids_RL, rows.mask_R1LL, rows.positions_RL, logits_to_keep=rows.columns_K).logits
        with phase("loss"):
            return token_logprobs(
                logits_RKV, rows.targets_RK, temperature=temperature,
                temperature_order=policy.spec.temperature_order, chunk_rows=policy.spec.chunk_rows,
            )  # fmt: skip


def token_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    temperature_order: str = "after_upcast",
    chunk_rows: int | None = None,
) -> torch.Tensor:
    """Log-probability of each target: `z[y]/T - log sum_v exp(z[v]/T)`, computed in float32 whatever the logits' dtype.

    The logits are upcast first and divided by the temperature second. The other order rounds `z/T` to the logits' dtype:
    about 2.7 % mean probability error for bfloat16 logits ~ N(0, 5²) over 128256 tokens at T=0.7, and none where T is a
    power of two.

    Args:
        logits: [..., V], any floating dtype; a DTensor sharded over V (tensor parallel) works too.
        targets: [...], int64, each in [0, V).
        temperature: above 0.
        temperature_order: "before_upcast" reproduces NeMo-RL (`logits.div_(T)` in the logits' dtype), out of place.
        chunk_rows: None upcasts all rows at once; a number never upcasts more than that many.

    Returns:
        [...], float32.

    Raises:
        SpecError: temperature outside of [1e-3, 1e3], an unknown order, fewer than one row a chunk, or shapes, dtypes or
            targets that do not fit.
    """
    temperature = _check(logits, targets, temperature, temperature_order, chunk_rows)
    if temperature != 1.0 and temperature_order == "before_upcast":
        logits, temperature = logits / temperature, 1.0
    if isinstance(logits, DTensor):
        local, vocab_start, group = _vocab_shard(logits)
        return cast(
            torch.Tensor, _Chunked.apply(local, targets, temperature, chunk_rows or targets.numel(), vocab_start, group)
        )
    if chunk_rows is not None:
        return cast(torch.Tensor, _Chunked.apply(logits, targets, temperature, chunk_rows, 0, None))
    scaled = logits.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    return torch.log_softmax(scaled, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def next_token_logprobs(
    logits_BTV: torch.Tensor, ids_BT: torch.Tensor, spec: PolicySpec, temperature: float
) -> torch.Tensor:
    """Logprobs [B, T-1] of tokens 1..T-1, each given those before it, in the spec's mode and temperature order."""
    order, chunk_rows = spec.temperature_order, spec.chunk_rows
    if chunk_rows is None and not isinstance(logits_BTV, DTensor):
        # All of it is upcast first and shifted second, as NeMo-RL does: this mode is there to show what that costs. (The
        # shifted rows are not contiguous for two or more sequences, so the softmax copies them once more.)
        if temperature != 1.0 and order == "before_upcast":
            logits_BTV, temperature = logits_BTV / temperature, 1.0
        return token_logprobs(logits_BTV.float()[:, :-1], ids_BT[:, 1:], temperature=temperature)
    # Cutting off the last column would make the rows non-contiguous and cost a copy of all logits just to chunk them:
    # score the last column too, against any token, and drop its result.
    targets_BT = ids_BT.roll(-1, dims=1)
    logprobs_BT = token_logprobs(
        logits_BTV, targets_BT, temperature=temperature, temperature_order=order, chunk_rows=chunk_rows
    )
    return logprobs_BT[:, :-1]


def _check(logits: Any, targets: Any, temperature: Any, temperature_order: Any, chunk_rows: Any) -> float:
    for name, value in (("logits", logits), ("targets", targets)):
        if not isinstance(value, torch.Tensor):
            raise SpecError(f"{name} is a {type(value).__name__}; it must be a torch tensor.")
    if temperature_order not in get_args(TemperatureOrder):
        raise SpecError(f"temperature_order={temperature_order!r} must be 'after_upcast' or 'before_upcast'.")
    if chunk_rows is not None:
        check_whole("chunk_rows", chunk_rows)
    if logits.dim() == 0:
        raise SpecError("logits have no dimension; they must be [..., V].")
    if not logits.is_floating_point():
        raise SpecError(f"logits have dtype {logits.dtype}; they must be floating point.")
    if logits.shape[:-1] != targets.shape:
        raise SpecError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)} differ in their leading shape.")
    if targets.dtype != torch.int64:
        raise SpecError(f"targets have dtype {targets.dtype}; they must be int64 token ids.")
    if targets.device.type == "cpu" and targets.numel():  # reading a CUDA tensor here would stall every step
        low, high = targets.min().item(), targets.max().item()
        if low < 0 or high >= logits.shape[-1]:
            raise SpecError(f"targets lie in [{low}, {high}], outside the vocabulary [0, {logits.shape[-1]}).")
    return check_temperature(temperature)


def _vocab_shard(logits: DTensor) -> tuple[torch.Tensor, int, dist.ProcessGroup]:
    """This rank's columns of vocab-parallel logits: the local tensor, its first token id, the group that has the rest."""
    (placement,) = logits.placements
    vocab_dim = logits.dim() - 1
    if not isinstance(placement, Shard) or placement.dim % logits.dim() != vocab_dim:
        raise SpecError(f"logits are a DTensor placed {placement}; only logits sharded over the vocabulary are supported.")
    mesh = logits.device_mesh
    vocab, size = logits.shape[-1], mesh.size()
    if vocab % size:
        raise SpecError(f"a vocabulary of {vocab} does not divide over {size} tensor-parallel ranks.")
    return logits.to_local(), mesh.get_local_rank() * (vocab // size), mesh.get_group()


class _Chunked(torch.autograd.Function):
    """Logprobs from logits chunk by chunk; backward computes each chunk's softmax again instead of keeping it.

    A plain loop over chunks would not do: autograd would keep every chunk's float32 softmax, as much as without chunks.
    With a group, the vocabulary is spread over it: two small all-reduces per chunk, of the maximum and of the sums.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        chunk_rows: int,
        vocab_start: int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        rows_NV, targets_N = logits.flatten(0, -2), targets.flatten() - vocab_start
        lse_N = torch.empty(targets_N.shape, dtype=torch.float32, device=logits.device)
        logprobs_N = torch.empty_like(lse_N)
        for chunk in _chunks(len(targets_N), chunk_rows):
            lse_N[chunk], logprobs_N[chunk] = _logprobs_of_rows(rows_NV[chunk], targets_N[chunk], temperature, group)
        ctx.save_for_backward(logits, targets, lse_N)
        ctx.temperature, ctx.chunk_rows, ctx.vocab_start = temperature, chunk_rows, vocab_start
        return logprobs_N.view(targets.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        logits, targets, lse_N = ctx.saved_tensors
        rows_NV, targets_N, grad_N = logits.flatten(0, -2), targets.flatten() - ctx.vocab_start, grad.flatten()
        grad_NV = torch.empty_like(rows_NV, memory_format=torch.contiguous_format)
        for chunk in _chunks(len(targets_N), ctx.chunk_rows):
            # d logp / d z = (onehot(y) - softmax(z / T)) / T, in float32, rounded once to the logits' dtype.
            scale = (grad_N[chunk] / ctx.temperature).unsqueeze(-1)
            rows = rows_NV[chunk].to(torch.float32, copy=True)  # never in place on the caller's logits
            rows.div_(ctx.temperature).sub_(lse_N[chunk].unsqueeze(-1)).exp_().mul_(-scale)
            column, here = _local_columns(targets_N[chunk], rows.shape[-1])
            rows.scatter_add_(-1, column.unsqueeze(-1), scale * here.unsqueeze(-1))
            grad_NV[chunk] = rows
        return grad_NV.view(logits.shape), None, None, None, None, None


def _logprobs_of_rows(
    rows_NV: torch.Tensor, targets_N: torch.Tensor, temperature: float, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp and target logprob of each row, both float32 [N]; targets count from this shard's first token."""
    scaled = rows_NV.float()
    if temperature != 1.0:
        scaled = scaled / temperature
    top_N = scaled.amax(-1)
    if group is not None:
        dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=group)
    column, here = _local_columns(targets_N, scaled.shape[-1])
    target_N = scaled.gather(-1, column.unsqueeze(-1)).squeeze(-1)
    sums_2N = torch.stack([(scaled - top_N.unsqueeze(-1)).exp_().sum(-1), torch.where(here, target_N, 0.0)])
    if group is not None:
        dist.all_reduce(sums_2N, group=group)
    lse_N = top_N + sums_2N[0].log()
    return lse_N, sums_2N[1] - lse_N


def _local_columns(targets_N: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target in this shard (0 if it lies in another), and whether it lies here."""
    here = (targets_N >= 0) & (targets_N < width)
    return torch.where(here, targets_N, 0), here


def _chunks(num_rows: int, chunk_rows: int) -> list[slice]:
    return [slice(start, start + chunk_rows) for start in range(0, num_rows, chunk_rows)]
