"""One tile of logits, and what is done with it: made in float32, folded into running sums, turned into a gradient.

Shapes: _N rows (tokens) of a tile, _V columns (vocabulary) of a tile, _H hidden. Everything between two matrix products
works in place on one float32 buffer, which stays in the processor's cache; only a vector per row outlives a tile.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

#: In nats: e to this is 0 in float32, and so is its product with anything a gradient holds. Stands in for -inf where
#: 0 * -inf would make a NaN.
_NO_PROBABILITY = -1e4


@dataclass(frozen=True, slots=True)
class Readout:
    """How logits become log-probabilities: `z = softcap * tanh(z / softcap)`, then `z / temperature`, both in float32."""

    temperature: float
    softcap: float | None
    float32_logits: bool  # False rounds logits to the operands' dtype first, as a plain 16-bit head does


@contextlib.contextmanager
def exact_products(operands: torch.dtype, device_type: str) -> Iterator[None]:
    """Matrix products as the tiles need them: out of autocast, and on a CPU with bfloat16 multipliers of float32 tensors.

    A CPU has no bfloat16 product with a float32 result. The same operation, bit for bit in its operands, is a product of
    float32 copies in oneDNN's bfloat16 mode: the copies lose nothing in that mode, and the sums are float32. (Processors
    without AMX tiles run it in plain float32.) The mode is global to the process, so it is put back; forward and backward
    set it alike, or the gradient's probabilities would not sum to 1.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    with torch.autocast(device_type, enabled=False):
        if device_type != "cpu" or operands == torch.float32:
            yield
            return
        matmul.fp32_precision = "bf16" if operands == torch.bfloat16 else "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before


class TileMaker:
    """Makes tiles of logits one after the other in the same buffers."""

    def __init__(self, hidden_NH: torch.Tensor, rows: int, columns: int, readout: Readout) -> None:
        self._dtype, self._readout = hidden_NH.dtype, readout
        # Float16 has too few exponents for products of gradients, and no fast kernel on CPUs.
        self._widen = hidden_NH.dtype != torch.float32 and hidden_NH.device.type == "cpu" and readout.float32_logits
        self._tile = torch.empty(rows * columns, dtype=torch.float32, device=hidden_NH.device)
        self._weight_VH = torch.empty(0)

    def columns(self, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> None:
        """Go to another part of the vocabulary."""
        self._weight_VH = weight_VH.float() if self._widen else weight_VH
        self._bias_V = None if bias_V is None else bias_V.float()

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """`hidden @ weight.T + bias` [N, V] float32, in the shared buffer: it is overwritten by the next call."""
        num_rows, num_columns = hidden_NH.shape[0], self._weight_VH.shape[0]
        tile_NV = self._tile[: num_rows * num_columns].view(num_rows, num_columns)
        if self._widen:
            torch.mm(hidden_NH.float(), self._weight_VH.t(), out=tile_NV)
        elif self._dtype == torch.float32:
            torch.mm(hidden_NH, self._weight_VH.t(), out=tile_NV)
        elif self._readout.float32_logits:
            tile_NV = torch.mm(hidden_NH, self._weight_VH.t(), out_dtype=torch.float32)
        else:
            tile_NV.copy_(torch.mm(hidden_NH, self._weight_VH.t()))
        return tile_NV if self._bias_V is None else tile_NV.add_(self._bias_V)


class RunningSums:
    """Log-sum-exp, entropy and target logit of rows whose logits come a tile at a time.

    With the largest scaled logit so far m: s = sum e^(z-m) and x = sum e^(z-m) (z-m). When m rises by d to m', each term
    loses d: x' = (x - s d) e^-d, s' = s e^-d. The first moment is taken about m, so that large |z| cancel nothing.
    """

    def __init__(self, num_rows: int, device: torch.device, *, with_entropy: bool) -> None:
        self.with_entropy = with_entropy
        self.top_N = torch.full((num_rows,), -math.inf, device=device)
        self.sums_3N = torch.zeros(3, num_rows, device=device)  # s, x, target's logit: one tensor, one all-reduce

    def add(self, rows: slice, tile_NV: torch.Tensor, column_N: torch.Tensor, readout: Readout) -> None:
        """Fold a tile in, overwriting it.

        Args:
            column_N: int64, each row's target counted from this tile's first column; anything outside lies elsewhere.
        """
        if readout.softcap is not None:
            tile_NV.div_(readout.softcap).tanh_().mul_(readout.softcap)
        inverse = 1.0 / readout.temperature
        top_N, (s_N, x_N, target_N) = self.top_N[rows], self.sums_3N[:, rows]
        column_N, here_N = local_columns(column_N, tile_NV.shape[1])
        target_N += torch.where(here_N, tile_NV.gather(1, column_N[:, None])[:, 0] * inverse, 0.0)
        highest_N = torch.maximum(top_N, tile_NV.amax(1) * inverse)
        origin_N = finite_or_zero(highest_N)
        torch.add(-origin_N[:, None], tile_NV, alpha=inverse, out=tile_NV)
        fall_N = torch.where(top_N == -math.inf, 0.0, top_N - origin_N)
        if self.with_entropy:
            weights_NV = tile_NV.exp()
            x_N += s_N * fall_N
            x_N *= fall_N.exp()
            x_N += tile_NV.clamp_(min=_NO_PROBABILITY).mul_(weights_NV).sum(1)
            tile_NV = weights_NV
        else:
            tile_NV.exp_()
        s_N *= fall_N.exp()
        s_N += tile_NV.sum(1)
        top_N.copy_(highest_N)

    def rebase(self, top_N: torch.Tensor) -> None:
        """Express the sums about another maximum, that of all shards."""
        fall_N = torch.where(self.top_N == -math.inf, 0.0, self.top_N - finite_or_zero(top_N))
        self.sums_3N[1] += self.sums_3N[0] * fall_N
        self.sums_3N[:2] *= fall_N.exp()
        self.top_N = top_N

    def results(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-sum-exp, target logprob and entropy in nats, each [N] float32."""
        s_N, x_N, target_N = self.sums_3N
        lse_N = self.top_N + s_N.log()
        return lse_N, target_N - lse_N, s_N.log() - x_N / s_N


@dataclass(frozen=True, slots=True)
class RowGradient:
    """What each row's logits' gradient depends on beside the tile: [N] float32 each."""

    lse: torch.Tensor
    entropy: torch.Tensor
    grad_logprob: torch.Tensor  # of the loss by the target's logprob, over the temperature
    grad_entropy: torch.Tensor | None  # of the loss by the entropy, over the temperature
    at_target: torch.Tensor  # gradient of the target's own logit

    @staticmethod
    def of(
        lse_N: torch.Tensor,
        logprob_N: torch.Tensor,
        entropy_N: torch.Tensor,
        grad_logprob_N: torch.Tensor,
        grad_entropy_N: torch.Tensor | None,
        readout: Readout,
    ) -> RowGradient:
        """Divide by the temperature, and work out the target's own entry: 1 - p is -expm1(log p), exact near p = 1."""
        g_N = grad_logprob_N / readout.temperature
        at_target_N = -torch.expm1(logprob_N) * g_N
        e_N = None if grad_entropy_N is None else grad_entropy_N / readout.temperature
        if e_N is not None:
            at_target_N -= e_N * logprob_N.exp() * (logprob_N.clamp(min=_NO_PROBABILITY) + entropy_N)
        if readout.softcap is not None:
            capped_N = (logprob_N + lse_N) * readout.temperature
            at_target_N *= 1 - (capped_N / readout.softcap).square()
        return RowGradient(lse_N, entropy_N, g_N, e_N, at_target_N)

    def rows(self, rows: slice) -> RowGradient:
        """Those of some rows."""
        e_N = self.grad_entropy
        return RowGradient(
            self.lse[rows],
            self.entropy[rows],
            self.grad_logprob[rows],
            None if e_N is None else e_N[rows],
            self.at_target[rows],
        )

    def write(self, tile_NV: torch.Tensor, column_N: torch.Tensor, readout: Readout, out_NV: torch.Tensor) -> None:
        """Gradient of a tile's logits, into `out_NV` in its dtype; the tile is overwritten.

        For z = logit / T: d logprob / d z = onehot - p, and d entropy / d z = -p (log p + entropy).
        """
        slope_NV = None
        if readout.softcap is not None:
            tile_NV.div_(readout.softcap).tanh_()
            slope_NV = 1 - tile_NV.square()
            tile_NV.mul_(readout.softcap)
        torch.add(-self.lse[:, None], tile_NV, alpha=1.0 / readout.temperature, out=tile_NV)
        if self.grad_entropy is None:
            tile_NV.exp_()
            if slope_NV is not None:
                tile_NV.mul_(slope_NV)
            torch.mul(tile_NV, -self.grad_logprob[:, None], out=out_NV)
        else:
            probs_NV = tile_NV.exp()
            if slope_NV is not None:
                probs_NV.mul_(slope_NV)
            e_N = self.grad_entropy
            tile_NV.clamp_(min=_NO_PROBABILITY).mul_(-e_N[:, None]).sub_((self.grad_logprob + e_N * self.entropy)[:, None])
            torch.mul(tile_NV, probs_NV, out=out_NV)
        column_N, here_N = local_columns(column_N, tile_NV.shape[1])
        index_N1 = column_N[:, None]
        kept_N = out_NV.gather(1, index_N1)[:, 0]
        out_NV.scatter_(1, index_N1, torch.where(here_N, self.at_target.to(out_NV.dtype), kept_N)[:, None])


def finite_or_zero(top_N: torch.Tensor) -> torch.Tensor:
    """The maximum to subtract: 0 where every logit so far is -inf, since -inf - -inf is not a number."""
    return torch.where(top_N == -math.inf, 0.0, top_N)


def local_columns(column_N: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target in this part of the vocabulary (0 if it lies in another), and whether it lies here."""
    here_N = (column_N >= 0) & (column_N < width)
    return torch.where(here_N, column_N, 0), here_N
