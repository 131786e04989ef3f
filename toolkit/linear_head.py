"""Token logprobs from hidden states and the head's weight, without ever holding [N, V] logits.

Shapes: _N rows (tokens), _V vocabulary (of this shard), _H hidden, leading dimensions written as `...`.

The vocabulary is walked tile by tile, and each tile's logits are folded into a running log-sum-exp (the online softmax of
arXiv 1805.02867). Backward makes each tile again and turns it into its gradient at once. Vocabulary outside and tokens
inside: the rows of the weight's gradient are then finished tile by tile, and only hidden's gradient needs a float32
accumulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from toolkit.checks import check_number, check_temperature, check_whole
from toolkit.errors import SpecError
from toolkit.logit_tiles import Readout, RowGradient, RunningSums, TileMaker, exact_products

IGNORED = -100  # torch's own mark for positions that do not count

#: Rows and columns of a tile. 512 x 1024 float32 logits are 2 MiB, a core's share of cache; larger tiles are no faster.
#: A small vocabulary is cut too, into quarters of 32 columns or more.
_TILE_ROWS, _TILE_COLUMNS, _FEWEST_COLUMNS = 512, 1024, 32
#: Rows whose gradient by logits is kept beside each other, so that one product finishes the weight's part of it.
_BLOCK_ROWS = 4096
#: A float32 accumulator of this size is not worth making the logits a third time to avoid it.
_SMALL_BYTES = 32 * 2**20

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NO_DTENSOR = (
    "{name} is a DTensor, and only this rank's part of it is here. Its full_tensor() would give a gradient that is wrong "
    "without a sign of it: each rank would keep the slice of its own, and none would be summed. Under FSDP2 call this "
    "inside the forward of the unit that owns the weight, where it is gathered (logprob_mode='linear' does); under tensor "
    "parallelism pass {name}.to_local() with group=."
)


def linear_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
    with_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
    float32_logits: bool = True,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target under `softmax(cap(hidden @ weight.T + bias) / temperature)`.

    16-bit operands are multiplied exactly and summed and kept in float32, so the result is some four orders closer to the
    exact one than that of 16-bit logits. Gradients flow to hidden, weight and bias; they are summed in float32 and rounded
    once to the operand's dtype.

    Args:
        hidden: [..., H] float32, bfloat16 or float16.
        weight: [V, H], hidden's dtype and device; a plain tensor (under FSDP2, the gathered one, inside the unit's forward).
            Leave padding rows of the vocabulary out by slicing, or give them a bias of -inf.
        targets: [...] int64 in [0, V), or -100 for a position that does not count: its logprob and entropy are 0, it takes
            part in no product, and no gradient reaches it.
        bias: [V], any floating dtype.
        temperature: above 0.
        chunk_tokens: rows of a tile; None takes 512. Memory is 4 bytes times this times 1024.
        softcap: c of `c * tanh(z / c)` (Gemma 2), before the temperature.
        with_entropy: return the entropy of each row's distribution too, with gradient.
        group: ranks that hold the rest of the vocabulary, in order. Weight and bias are this rank's rows (their number may
            differ between ranks, and be 0); targets count over the whole vocabulary; hidden and targets are the same on
            every rank. Two small all-reduces in forward, and one of hidden's gradient in backward.
        float32_logits: False rounds logits to the operands' dtype, as a plain 16-bit head does; faster on CPUs, and no
            more exact than that.

    Returns:
        [...] float32 logprobs in nats, or with_entropy (logprobs, entropy).

    Raises:
        SpecError: temperature outside of [1e-3, 1e3], a softcap or chunk that is not positive, a DTensor, or shapes,
            dtypes, devices or targets that do not fit.
    """
    cap = None if softcap is None else check_number("softcap", softcap, 0, open_low=True)
    readout = Readout(check_temperature(temperature), cap, float32_logits)
    rows = _TILE_ROWS if chunk_tokens is None else check_whole("chunk_tokens", chunk_tokens)
    _check_tensors(hidden, weight, targets, bias)
    start, total = _place_in_vocabulary(weight, group)
    _check_targets(targets, total)
    columns = min(_TILE_COLUMNS, max(_FEWEST_COLUMNS, total // 4))
    plan = _Plan(readout, min(rows, _BLOCK_ROWS), columns, total, with_entropy, group)
    hidden_NH, targets_N = hidden.reshape(-1, hidden.shape[-1]), targets.flatten()
    counted_N = targets_N != IGNORED
    all_count = bool(counted_N.all())
    if not all_count:
        hidden_NH, targets_N = hidden_NH[counted_N], targets_N[counted_N]
    found = cast("tuple[torch.Tensor, ...]", _Linear.apply(hidden_NH, weight, bias, targets_N - start, plan))
    if not all_count:
        found = tuple(torch.zeros_like(counted_N, dtype=torch.float32).masked_scatter(counted_N, f) for f in found)
    logprobs, entropy = (f.view(targets.shape) for f in found)
    return (logprobs, entropy) if with_entropy else logprobs


@dataclass(frozen=True, slots=True)
class _Plan:
    readout: Readout
    tile_rows: int
    tile_columns: int
    vocab_size: int  # of all shards
    with_entropy: bool
    group: dist.ProcessGroup | None


class _Linear(torch.autograd.Function):
    """Saves its inputs and a few numbers per row; double backward is not supported.

    Inputs go through `save_for_backward`, so that an edit in place between forward and backward raises, and so that FSDP2
    can gather the weight again into the same storage.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        plan: _Plan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sums = RunningSums(len(targets_N), hidden_NH.device, with_entropy=plan.with_entropy)
        with exact_products(hidden_NH.dtype, hidden_NH.device.type):
            make = TileMaker(hidden_NH, min(plan.tile_rows, len(targets_N)), plan.tile_columns, plan.readout)
            for columns in _pieces(len(weight_VH), plan.tile_columns):
                make.columns(weight_VH[columns], None if bias_V is None else bias_V[columns])
                for rows in _pieces(len(targets_N), plan.tile_rows):
                    tile_NV = make.logits(hidden_NH[rows])
                    sums.add(rows, tile_NV, targets_N[rows] - columns.start, plan.readout)
        if plan.group is not None:
            top_N = sums.top_N.clone()
            dist.all_reduce(top_N, op=dist.ReduceOp.MAX, group=plan.group)
            sums.rebase(top_N)
            dist.all_reduce(sums.sums_3N, group=plan.group)
        lse_N, logprobs_N, entropy_N = sums.results()
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, lse_N, logprobs_N, entropy_N)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        if not plan.with_entropy:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs: torch.Tensor | None, grad_entropy: torch.Tensor | None) -> tuple[Any, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, lse_N, logprobs_N, entropy_N = ctx.saved_tensors
        grad_N = torch.zeros_like(lse_N) if grad_logprobs is None else grad_logprobs
        readout = ctx.plan.readout
        by_row = RowGradient.of(lse_N, logprobs_N, entropy_N, grad_N, grad_entropy, readout)
        with exact_products(hidden_NH.dtype, hidden_NH.device.type):
            back = _Backward(hidden_NH, weight_VH, bias_V, targets_N, by_row, ctx.plan)
            grads = back.run(*ctx.needs_input_grad[:3])
        return *grads, None, None


class _Backward:
    """The gradients of one backward."""

    def __init__(
        self,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        by_row: RowGradient,
        plan: _Plan,
    ) -> None:
        self.hidden_NH, self.weight_VH, self.bias_V, self.targets_N = hidden_NH, weight_VH, bias_V, targets_N
        self.by_row, self.plan = by_row, plan
        num_rows = len(targets_N)
        self.make = TileMaker(hidden_NH, min(plan.tile_rows, num_rows), plan.tile_columns, plan.readout)
        # Float16 would flush most of a gradient's entries to zero: p / T over a large vocabulary is below its range.
        self.dtype = torch.bfloat16 if hidden_NH.dtype == torch.bfloat16 else torch.float32
        self.block = torch.empty(min(num_rows, _BLOCK_ROWS) * plan.tile_columns, dtype=self.dtype, device=hidden_NH.device)

    def run(self, for_hidden: bool, for_weight: bool, for_bias: bool) -> tuple[torch.Tensor | None, ...]:
        """Gradients of hidden, weight and bias, None for those not asked for."""
        hidden_NH = self.hidden_NH
        every_row = slice(0, len(hidden_NH))
        grad_NH = torch.empty_like(hidden_NH, memory_format=torch.contiguous_format) if for_hidden else None
        grad_VH = torch.empty_like(self.weight_VH, memory_format=torch.contiguous_format) if for_weight else None
        grad_V = torch.zeros_like(self.bias_V, dtype=torch.float32) if for_bias and self.bias_V is not None else None
        if grad_NH is None:
            self._sweep(every_row, None, grad_VH, grad_V)
        elif self._one_sweep():
            self._hidden_sweep(every_row, grad_NH, grad_VH, grad_V)
        else:
            for rows in _pieces(len(hidden_NH), _BLOCK_ROWS):
                self._hidden_sweep(rows, grad_NH, None, None)
            if grad_VH is not None or grad_V is not None:
                self._sweep(every_row, None, grad_VH, grad_V)
        return grad_NH, grad_VH, grad_V

    def _one_sweep(self) -> bool:
        """Whether hidden's gradient, in float32 for all rows, is small: then logits are made once more, else twice more.

        Every rank of a group has to decide alike, so this looks at sizes that all of them share.
        """
        if self.hidden_NH.dtype == torch.float32:
            return True  # the accumulator is the result
        of_whole_weight = self.plan.vocab_size * self.hidden_NH.shape[1] * self.weight_VH.element_size()
        return 4 * self.hidden_NH.numel() <= max(_SMALL_BYTES, of_whole_weight // 4)

    def _hidden_sweep(
        self, rows: slice, grad_NH: torch.Tensor, grad_VH: torch.Tensor | None, grad_V: torch.Tensor | None
    ) -> None:
        into_NH = grad_NH[rows]
        sums_NH = into_NH if into_NH.dtype == torch.float32 else torch.empty_like(into_NH, dtype=torch.float32)
        self._sweep(rows, sums_NH.zero_(), grad_VH, grad_V)
        if self.plan.group is not None:
            dist.all_reduce(sums_NH, group=self.plan.group)
        if sums_NH is not into_NH:
            into_NH.copy_(sums_NH)

    def _sweep(
        self, rows: slice, sums_NH: torch.Tensor | None, grad_VH: torch.Tensor | None, grad_V: torch.Tensor | None
    ) -> None:
        """Walk the vocabulary once for some rows, adding to `sums_NH` (those rows, float32) and writing the others."""
        blocks = [slice(rows.start + b.start, rows.start + b.stop) for b in _pieces(rows.stop - rows.start, _BLOCK_ROWS)]
        if not blocks and grad_VH is not None:
            grad_VH.zero_()
        for columns in _pieces(len(self.weight_VH) if blocks else 0, self.plan.tile_columns):
            weight_VH = self.weight_VH[columns]
            self.make.columns(weight_VH, None if self.bias_V is None else self.bias_V[columns])
            part_VH = None if grad_VH is None or len(blocks) == 1 else torch.zeros_like(weight_VH, dtype=torch.float32)
            for block in blocks:
                grad_NV = self._gradient_of_logits(block, columns)
                if sums_NH is not None:
                    here = slice(block.start - rows.start, block.stop - rows.start)
                    _add_product(sums_NH[here], grad_NV, weight_VH.to(self.dtype))
                if grad_VH is not None:
                    hidden_NH = self.hidden_NH[block].to(self.dtype)
                    if part_VH is not None:
                        _add_product(part_VH, grad_NV.t(), hidden_NH)
                    else:
                        grad_VH[columns] = torch.mm(grad_NV.t(), hidden_NH)
                if grad_V is not None:
                    grad_V[columns] += grad_NV.sum(0, dtype=torch.float32)
            if grad_VH is not None and part_VH is not None:
                grad_VH[columns] = part_VH

    def _gradient_of_logits(self, block: slice, columns: slice) -> torch.Tensor:
        num_rows, num_columns = block.stop - block.start, columns.stop - columns.start
        grad_NV = self.block[: num_rows * num_columns].view(num_rows, num_columns)
        for piece in _pieces(num_rows, self.plan.tile_rows):
            rows = slice(block.start + piece.start, block.start + piece.stop)
            tile_NV = self.make.logits(self.hidden_NH[rows])
            column_N = self.targets_N[rows] - columns.start
            self.by_row.rows(rows).write(tile_NV, column_N, self.plan.readout, grad_NV[piece])
        return grad_NV


def _add_product(sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Add a matrix product to float32 sums."""
    if a.dtype == torch.float32:
        sums.addmm_(a, b)
    elif a.device.type == "cpu":
        sums.add_(torch.mm(a, b))  # its 16-bit result is rounded once; a CPU has no such product with a float32 result
    else:
        sums.add_(torch.mm(a, b, out_dtype=torch.float32))


def _pieces(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _place_in_vocabulary(weight: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Id of this shard's first token, and the size of the whole vocabulary."""
    if group is None:
        return 0, len(weight)
    mine = torch.tensor([len(weight)], device=weight.device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    sizes = torch.cat(every).tolist()
    return sum(sizes[: dist.get_rank(group)]), sum(sizes)


def _check_tensors(hidden: Any, weight: Any, targets: Any, bias: Any) -> None:
    named = {"hidden": hidden, "weight": weight, "targets": targets} | ({} if bias is None else {"bias": bias})
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise SpecError(f"{name} is a {type(value).__name__}; it must be a torch tensor.")
        if isinstance(value, DTensor):
            raise SpecError(_NO_DTENSOR.format(name=name))
        if value.device != hidden.device:
            raise SpecError(f"{name} is on {value.device} and hidden on {hidden.device}; they must be on one device.")
    if hidden.dtype not in _DTYPES:
        raise SpecError(f"hidden has dtype {hidden.dtype}; it must be float32, bfloat16 or float16.")
    if weight.dtype != hidden.dtype:
        raise SpecError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}; a matrix product needs one dtype. Cast one of them: "
            "hidden.to(weight.dtype) is what a mixed-precision head does."
        )
    if hidden.dim() == 0 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise SpecError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be [..., H] and [V, H].")
    if targets.shape != hidden.shape[:-1]:
        raise SpecError(f"targets {tuple(targets.shape)} must have hidden's leading shape {tuple(hidden.shape[:-1])}.")
    if targets.dtype != torch.int64:
        raise SpecError(f"targets have dtype {targets.dtype}; they must be int64 token ids.")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        raise SpecError(f"bias {tuple(bias.shape)} {bias.dtype} must be [{len(weight)}], one float for each row of weight.")


def _check_targets(targets: torch.Tensor, vocab_size: int) -> None:
    counted = targets[targets != IGNORED]
    if not counted.numel():
        return
    low, high = (int(v) for v in torch.stack(counted.aminmax()).tolist())
    if low < 0 or high >= vocab_size:
        raise SpecError(
            f"targets lie in [{low}, {high}], outside the vocabulary [0, {vocab_size}); {IGNORED} marks positions to ignore."
        )
