"""The logprobs of given tokens by either route: the training forward, or the sampler's, token by token with a KV cache.

Shapes: _B sequences, _T tokens, _V vocabulary. Column t of a result belongs to token t + 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from toolkit import fsdp
from toolkit.dtensors import whole
from toolkit.logprobs import forward_logprobs, token_logprobs
from toolkit.policy import Policy, check_finite
from toolkit.prompts import Batch
from toolkit.settings import Setting


@dataclass(slots=True)
class Scored:
    """What a setting makes of a batch's tokens; on the CPU."""

    logprobs_BT: torch.Tensor  # [B, T-1] float32
    argmax_BT: torch.Tensor  # [B, T-1] int64, the most likely token
    rank_BT: torch.Tensor  # [B, T-1] int64, 1 for the most likely


@torch.no_grad()
def score_tokens(policy: Policy, batch: Batch, side: Setting, *, ranks: bool = True) -> Scored:
    """Logprobs, most likely tokens and ranks under a setting that is already applied.

    Args:
        ranks: also find the most likely tokens and ranks, which takes the training route a forward more; else zeros.

    Raises:
        FloatingPointError: something is not finite; names the unit.
    """
    size = side.batch_size or batch.num_sequences
    parts = [batch.rows(start, start + size) for start in range(0, batch.num_sequences, size)]
    if side.logprobs == "sampler":
        policy.model.eval()
        with fsdp.kept_unsharded(policy.model):
            scored = [_decode(policy, part, side.temperature) for part in parts]
    else:
        policy.model.train()  # dropout is off; checkpointing layers check this flag
        scored = [_prefill(policy, part, side.temperature, ranks) for part in parts]
    fsdp.reshard(policy.model)
    logprobs_BT, argmax_BT, rank_BT = (torch.cat(column) for column in zip(*scored, strict=True))
    check_finite(policy, logprobs_BT, batch, "the divergence")
    return Scored(logprobs_BT.cpu(), argmax_BT.cpu(), rank_BT.cpu())


def _prefill(
    policy: Policy, batch: Batch, temperature: float, ranks: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    argmax_BT, rank_BT = torch.zeros_like(batch.ids_BT[:, 1:]), torch.zeros_like(batch.ids_BT[:, 1:])
    if ranks:
        with policy.autocast():
            logits_BTV = whole(policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT).logits)
        for row, (logits_TV, ids_T) in enumerate(zip(logits_BTV, batch.ids_BT, strict=True)):  # [T, V] of flags at a time
            argmax_BT[row], rank_BT[row] = _places(logits_TV[:-1], ids_T[1:])
        del logits_BTV
    return forward_logprobs(policy, batch, temperature), argmax_BT, rank_BT


def _decode(policy: Policy, batch: Batch, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `rollouts.sample` computes them: the prompts at once, then a token at a time; zeros at prompt tokens."""
    logprobs_BT = torch.zeros(batch.ids_BT[:, 1:].shape, device=policy.device)
    argmax_BT, rank_BT = torch.zeros_like(batch.ids_BT[:, 1:]), torch.zeros_like(batch.ids_BT[:, 1:])
    for column, logits_BV in _decoded_logits(policy, batch):
        targets_B = batch.ids_BT[:, column]
        logprobs_BT[:, column - 1] = token_logprobs(logits_BV, targets_B, temperature=temperature)
        argmax_BT[:, column - 1], rank_BT[:, column - 1] = _places(logits_BV, targets_B)
    return logprobs_BT, argmax_BT, rank_BT


def _decoded_logits(policy: Policy, batch: Batch) -> Iterator[tuple[int, torch.Tensor]]:
    """Each completion column and the logits [B, V] that predict it."""
    width = batch.ids_BT.shape[1]
    first = max(1, int((batch.token_mask_BT.sum(0) > 0).int().argmax()))
    cache, start = None, 0
    for column in range(first, width):
        policy.progress("decoding", column - first, width - first)
        with policy.autocast():
            output = policy.forward(
                batch.ids_BT[:, start:column], batch.mask_BT[:, :column], batch.positions_BT[:, start:column],
                use_cache=True, past_key_values=cache, logits_to_keep=1,
            )  # fmt: skip
        cache, start = output.past_key_values, column
        yield column, whole(output.logits[:, -1])
    policy.progress("decoding", width - first, width - first)


def _places(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row, and the rank of its target."""
    own_N1 = logits_NV.gather(-1, targets_N.unsqueeze(-1))
    return logits_NV.argmax(-1), 1 + (logits_NV > own_N1).sum(-1)
