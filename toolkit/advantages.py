"""Advantages: how much better a completion is than the others of its prompt.

Shapes: _P prompts, _G completions of each.
"""

from __future__ import annotations

import torch

#: Keeps the division finite where a group's rewards hardly differ (NeMo-RL's value).
_EPSILON = 1e-6


def group_advantages(rewards_PG: torch.Tensor, *, normalize_rewards: bool, use_leave_one_out_baseline: bool) -> torch.Tensor:
    """Reward minus the group's baseline, optionally in units of the group's standard deviation (GRPO, arXiv 2402.03300).

    The standard deviation is always over the whole group, with Bessel's correction. NeMo-RL takes it over the same
    leave-one-out set as the baseline: the only success of a group then has a deviation of 0 and stays un-normalised (its
    advantage is 1.0 where its failures get -0.58), which is a quirk, not a wish.

    Args:
        rewards_PG: [P, G] float32, G at least 2.

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
    return torch.where(equal_P1, 0.0, advantages_PG)
