"""Advantages: how much better a completion is than the others of its prompt.

Shapes: _P prompts, _G completions of each.
"""

from __future__ import annotations

import torch

from toolkit.grpo_config import GRPOConfig

#: Keeps the division finite where a group's rewards hardly differ (NeMo-RL's value).
_EPSILON = 1e-6


def group_advantages(
    rewards_PG: torch.Tensor,
    *,
    normalize_rewards: bool,
    use_leave_one_out_baseline: bool,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> torch.Tensor:
    """Reward minus the group's baseline, optionally in units of the group's standard deviation (GRPO, arXiv 2402.03300).

    The standard deviation is always over the whole group, with Bessel's correction. NeMo-RL takes it over the same
    leave-one-out set as the baseline: the only success of a group then has a deviation of 0 and stays un-normalised (its
    advantage is 1.0 where its failures get -0.58), which is a quirk, not a wish.

    Args:
        rewards_PG: [P, G] float32, G at least 2.
        clip_low, clip_high: bounds on the result.

    Returns:
        [P, G] float32; exactly 0 in a group whose rewards are all equal.
    """
    group = rewards_PG.shape[1]
    assert group >= 2
    mean_P1 = rewards_PG.mean(-1, keepdim=True)
    baseline_PG = (group * mean_P1 - rewards_PG) / (group - 1) if use_leave_one_out_baseline else mean_P1
    advantages_PG = rewards_PG - baseline_PG
    if normalize_rewards:
        advantages_PG = advantages_PG / (rewards_PG.std(-1, keepdim=True) + _EPSILON)
    # The mean of equal numbers can differ from them in its last bit; divided by epsilon that is no longer small.
    equal_P1 = (rewards_PG == rewards_PG[:, :1]).all(-1, keepdim=True)
    advantages_PG = torch.where(equal_P1, 0.0, advantages_PG)
    return advantages_PG.clamp(clip_low, clip_high) if (clip_low, clip_high) != (None, None) else advantages_PG


def shape_rewards(
    rewards_B: torch.Tensor, lengths_B: torch.Tensor, stopped_B: torch.Tensor, config: GRPOConfig
) -> torch.Tensor:
    """Make long and cut-off completions worth less (DAPO's soft overlong punishment, arXiv 2503.14476; NeMo-RL's names).

    Args:
        rewards_B: [B] float32.
        lengths_B: [B] completion tokens.
        stopped_B: [B] bool, whether the completion ended by itself.

    Returns:
        [B] float32. Within `overlong_buffer_length` of `max_new_tokens` the reward falls linearly by up to
        `overlong_buffer_penalty`; the rewards of cut-off completions are multiplied by `stop_properly_penalty_coef`.
    """
    if config.stop_properly_penalty_coef is not None:
        rewards_B = torch.where(stopped_B, rewards_B, config.stop_properly_penalty_coef * rewards_B)
    if config.overlong_buffer_length is not None:
        excess_B = lengths_B - (config.max_new_tokens - config.overlong_buffer_length)
        penalty_B = (-excess_B / config.overlong_buffer_length * config.overlong_buffer_penalty).clamp(max=0.0)
        rewards_B = rewards_B + penalty_B
    return rewards_B
