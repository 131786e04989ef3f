"""The clipped policy-gradient loss with NeMo-RL's options.

Shapes: _B sequences, _T tokens (columns 1..T-1: a logprob belongs to the token it scores). With c the current, p the
previous, g the sampler's and r the reference's logprobs, A the advantage, m the mask:

    ratio     rho = exp(c - p), for GSPO exp of its masked mean over the sequence
    clipped   max(-A rho, -A clip(rho, 1 - min, 1 + max)), where A < 0 at most -A * ratio_clip_c
    CISPO     -A sg(clip(rho)) c;  REINFORCE  -A c
    weight    exp(p - g), for GSPO exp of its masked sum, bounded as the truncation type says
    KL        k1 = c - r, k2 = (c - r)^2 / 2, k3 = exp(r - c) - 1 - (r - c)

Sources: PPO arXiv 1707.06347, dual clip 1912.09729, DAPO 2503.14476, GSPO 2507.18071, CISPO 2506.13585, estimators of KL by
Schulman (2020); reductions and bounds are those of NeMo-RL's `ClippedPGLossFn`.
"""

from __future__ import annotations

import torch

from toolkit.grpo_config import GRPOConfig, KLType

# NeMo-RL's defaults: the log ratio of the KL estimators is kept within +-20, and the estimate within +-10.
_KL_INPUT_BOUND, _KL_OUTPUT_BOUND = 20.0, 10.0


def clipped_policy_gradient(
    current_BT: torch.Tensor,
    previous_BT: torch.Tensor | None,
    advantages_B: torch.Tensor,
    mask_BT: torch.Tensor,
    config: GRPOConfig,
    *,
    num_tokens: float,
    num_sequences: float,
    generation_BT: torch.Tensor | None = None,
    reference_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of these sequences, see above.

    Args:
        current_BT: [B, T] float32, logprobs with gradient.
        previous_BT: [B, T] float32, logprobs before the update; None takes the current ones, detached.
        advantages_B: [B] float32.
        mask_BT: [B, T] float32, 1 at the tokens that count.
        num_tokens, num_sequences: that count in the whole update, over all ranks and micro-batches, so that parts add up
            to the whole whatever the split.
        generation_BT: [B, T] float32, the sampler's logprobs; for the importance-sampling correction.
        reference_BT: [B, T] float32, the frozen reference's logprobs; for the KL penalty.

    Returns:
        The loss, a scalar to sum over micro-batches and ranks, and sums (over tokens) and extremes for the metrics.
    """
    previous_BT = current_BT.detach() if previous_BT is None else previous_BT
    ratio_BT, clipped_BT = _ratios(current_BT, previous_BT, mask_BT, config)
    loss_BT = _surrogate(current_BT, ratio_BT, clipped_BT, advantages_B.unsqueeze(-1), config)
    sums: dict[str, float] = {}
    if config.use_importance_sampling_correction:
        assert generation_BT is not None
        weight_BT, dropped_BT = importance_weights(previous_BT.detach(), generation_BT, mask_BT, config)
        loss_BT = loss_BT * weight_BT
        sums["is_oob_ratio"] = float((dropped_BT * mask_BT).sum())
    if config.reference_policy_kl_penalty:
        assert reference_BT is not None
        kl_BT = kl_estimate(current_BT, reference_BT, config.reference_policy_kl_type)
        # Its value is 1; its gradient makes the estimate's expectation, not just its samples, fall.
        kl_BT = (kl_BT * (current_BT - current_BT.detach()).exp()).clamp(-_KL_OUTPUT_BOUND, _KL_OUTPUT_BOUND)
        loss_BT = loss_BT + config.reference_policy_kl_penalty * kl_BT
        sums["kl_penalty"] = float((kl_BT.detach() * mask_BT).sum())
    if config.token_level_loss:
        loss = (loss_BT * mask_BT).sum() / num_tokens
    else:
        loss = masked_mean(loss_BT, mask_BT).sum() / num_sequences
    return loss, sums | _ratio_sums(ratio_BT.detach(), clipped_BT.detach(), mask_BT)


def _ratios(
    current_BT: torch.Tensor, previous_BT: torch.Tensor, mask_BT: torch.Tensor, config: GRPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    log_ratio_BT = (current_BT - previous_BT) * mask_BT
    if config.sequence_level_importance_ratios:
        log_ratio_BT = masked_mean(log_ratio_BT, mask_BT).unsqueeze(-1).expand_as(mask_BT)
    ratio_BT = log_ratio_BT.exp()
    return ratio_BT, ratio_BT.clamp(1 - config.ratio_clip_min, 1 + config.ratio_clip_max)


def _surrogate(
    current_BT: torch.Tensor,
    ratio_BT: torch.Tensor,
    clipped_BT: torch.Tensor,
    advantages_B1: torch.Tensor,
    config: GRPOConfig,
) -> torch.Tensor:
    if config.disable_ppo_ratio:
        return -advantages_B1 * current_BT
    if config.use_cispo:
        return -advantages_B1 * clipped_BT.detach() * current_BT
    loss_BT = torch.maximum(-advantages_B1 * ratio_BT, -advantages_B1 * clipped_BT)
    if config.ratio_clip_c is not None:
        bounded_BT = torch.minimum(loss_BT, -advantages_B1 * config.ratio_clip_c)
        loss_BT = torch.where(advantages_B1 < 0, bounded_BT, loss_BT)
    return loss_BT


def importance_weights(
    previous_BT: torch.Tensor, generation_BT: torch.Tensor, mask_BT: torch.Tensor, config: GRPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [B, T] of the trainer's over the sampler's probability, and which tokens [B, T] were out of bounds.

    Truncated importance sampling (TIS), IcePop and sequence masking as in NeMo-RL. A weight that is not finite becomes 0.
    """
    difference_BT = (previous_BT - generation_BT) * mask_BT
    if config.sequence_level_importance_ratios:
        weight_BT = difference_BT.sum(-1, keepdim=True).exp().expand_as(mask_BT)
    else:
        weight_BT = difference_BT.exp()
    weight_BT = torch.nan_to_num(weight_BT, nan=0.0, posinf=0.0)
    high, low = config.truncated_importance_sampling_ratio, config.truncated_importance_sampling_ratio_min or 0.0
    if high is None:
        return weight_BT, torch.zeros_like(weight_BT, dtype=torch.bool)
    judged_BT = weight_BT
    if config.truncated_importance_sampling_type == "seq-mask-tis":
        judged_BT = masked_mean(difference_BT, mask_BT).exp().unsqueeze(-1).expand_as(mask_BT)
    outside_BT = (judged_BT < low) | (judged_BT > high)
    if config.truncated_importance_sampling_type == "tis":
        return weight_BT.clamp(low, high), outside_BT
    return weight_BT.masked_fill(outside_BT, 0.0), outside_BT


def kl_estimate(current_BT: torch.Tensor, reference_BT: torch.Tensor, kind: KLType) -> torch.Tensor:
    """Schulman's estimate [B, T] of KL(current || reference) from samples of the current policy."""
    log_ratio_BT = (reference_BT - current_BT).clamp(-_KL_INPUT_BOUND, _KL_INPUT_BOUND)
    if kind == "k1":
        return -log_ratio_BT
    if kind == "k2":
        return log_ratio_BT.square() / 2
    return log_ratio_BT.expm1() - log_ratio_BT


def masked_mean(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """Mean [B] over the tokens of each sequence that count; 0 where none does."""
    return (values_BT * mask_BT).sum(-1) / mask_BT.sum(-1).clamp(min=1)


def _ratio_sums(ratio_BT: torch.Tensor, clipped_BT: torch.Tensor, mask_BT: torch.Tensor) -> dict[str, float]:
    counted = ratio_BT[mask_BT > 0]
    return {
        "probs_ratio": float((ratio_BT * mask_BT).sum()),
        "probs_ratio_clamped": float((clipped_BT * mask_BT).sum()),
        "clip_fraction": float(((ratio_BT != clipped_BT) * mask_BT).sum()),
        "probs_ratio_min": float(counted.min()) if counted.numel() else float("inf"),
        "probs_ratio_max": float(counted.max()) if counted.numel() else float("-inf"),
    }
