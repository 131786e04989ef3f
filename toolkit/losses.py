"""The clipped policy-gradient loss.

Shapes: _B sequences, _T tokens (columns 1..T-1: a logprob belongs to the token it scores).
"""

from __future__ import annotations

import torch

from toolkit.spec import GRPOConfig


def clipped_policy_gradient(
    current_BT: torch.Tensor,
    previous_BT: torch.Tensor,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    config: GRPOConfig,
    *,
    num_tokens: float,
    num_sequences: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    """PPO's clipped surrogate (arXiv 1707.06347) with asymmetric (DAPO, arXiv 2503.14476) and dual clip (1912.09729).

    With ratio = exp(current - previous), per token `max(-A * ratio, -A * clip(ratio, 1 - min, 1 + max))`; where A < 0 and
    a dual clip c is set, at most `-A * c`.

    Args:
        current_BT: [B, T] float32, logprobs with gradient.
        previous_BT: [B, T] float32, logprobs before the update.
        advantages_B: [B] float32.
        mask_BT: [B, T] float32, 1 at the tokens that count.
        num_tokens, num_sequences: of the whole step over all ranks and micro-batches, so that parts add up to the
            whole whatever the split.

    Returns:
        The loss, a float32 scalar to sum over micro-batches and ranks, and sums and extremes for the metrics.
    """
    log_ratio_BT = (current_BT - previous_BT) * mask_BT
    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)
    advantages_B1 = advantages_B.unsqueeze(-1)
    loss_BT = torch.maximum(-advantages_B1 * ratio_BT, -advantages_B1 * clipped_BT)
    if config.ratio_clip_c is not None:
        bounded_BT = torch.minimum(loss_BT, -advantages_B1 * config.ratio_clip_c)
        loss_BT = torch.where(advantages_B1 < 0, bounded_BT, loss_BT)
    if config.token_level_loss:
        loss = (loss_BT * mask_BT).sum() / num_tokens
    else:
        means_B = (loss_BT * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)
        loss = means_B.sum() / num_sequences
    with torch.no_grad():
        counted = ratio_BT[mask_BT > 0]
        sums = {
            "probs_ratio": float((ratio_BT * mask_BT).sum()),
            "probs_ratio_clamped": float((clipped_BT * mask_BT).sum()),
            "clip_fraction": float(((ratio_BT != clipped_BT) * mask_BT).sum()),
            "probs_ratio_min": float(counted.min()) if counted.numel() else float("inf"),
            "probs_ratio_max": float(counted.max()) if counted.numel() else float("-inf"),
        }
    return loss, sums
