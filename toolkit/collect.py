"""Rollouts of a step, graded: in one batch, or by dynamic sampling until enough groups tell good from bad.

Shapes: _P prompts, _G completions of each, _B = P*G sequences of this rank, _T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from toolkit.advantages import shape_rewards
from toolkit.errors import SpecError
from toolkit.policy import Policy
from toolkit.prompts import Reward, make_batch
from toolkit.rewards import exact_match, grade
from toolkit.rollouts import Rollouts, sample
from toolkit.spec import GRPOConfig


@dataclass(slots=True)
class Graded:
    """This rank's rollouts with what they earned."""

    rollouts: Rollouts
    rewards_B: torch.Tensor  # float32, as the reward function gave them
    shaped_B: torch.Tensor  # float32, after penalties on length; what advantages are made of
    counts: dict[str, float]  # of dynamic sampling, over all ranks


def collect(
    policy: Policy,
    config: GRPOConfig,
    problems: list[tuple[str, str]],
    reward: Reward | None,
    step: int,
    lap: Callable[[str], None],
) -> Graded:
    """Sample and grade a step's completions on this rank; all ranks together.

    Args:
        problems: those of the step; with dynamic sampling, of every batch it may need, one after the other.
        lap: told the name of each phase when it ends.

    Raises:
        SpecError: dynamic sampling found too few groups with different rewards.
    """
    if not config.use_dynamic_sampling:
        rollouts = sample_step(policy, config, problems, step)
        lap("sampling")
        rewards_B = grade_together(policy, rollouts, reward)
        lap("grading")
        return Graded(rollouts, rewards_B, _shaped(config, rollouts, rewards_B), {})
    size, most = config.num_prompts_per_step, config.dynamic_sampling_max_gen_batches
    kept: list[_Group] = []
    for number in range(most):
        rollouts = sample_step(policy, config, problems[number * size : (number + 1) * size], step, number)
        lap("sampling")
        rewards_B = grade_together(policy, rollouts, reward)
        lap("grading")
        groups = _gather(policy, _groups(rollouts, rewards_B, _shaped(config, rollouts, rewards_B)))
        kept += [group for group in groups if max(group.shaped) > min(group.shaped)]
        if len(kept) >= size:
            counts = {
                "dynamic_sampling_num_gen_batches": float(number + 1),
                "dynamic_sampling_num_discarded_valid_samples": float(
                    (len(kept) - size) * config.num_generations_per_prompt
                ),
            }
            return _joined(policy, kept[:size], counts)
    raise SpecError(
        f"dynamic sampling found {len(kept)} of {size} prompts whose completions differ in reward, in {most} batches: the "
        "policy solves the others always or never. Choose a task it sometimes solves, raise num_generations_per_prompt or "
        "dynamic_sampling_max_gen_batches, or set use_dynamic_sampling=False."
    )


def sample_step(
    policy: Policy, config: GRPOConfig, problems: list[tuple[str, str]], step: int, batch_number: int = 0
) -> Rollouts:
    """Sample this rank's completions of a step, or of one of its batches under dynamic sampling."""
    return sample(
        policy,
        problems,
        num_generations=config.num_generations_per_prompt,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=policy.spec.seed * 1_000_003 + step + batch_number * 179_424_673,
    )


def grade_together(policy: Policy, rollouts: Rollouts, reward: Reward | None) -> torch.Tensor:
    """Rewards [B] float32; if the reward function raises on any rank, all ranks leave the step."""
    with policy.failing_together():
        rewards = grade(reward or exact_match, rollouts.prompts, rollouts.completions, rollouts.answers)
    return torch.tensor(rewards, dtype=torch.float32)


def _shaped(config: GRPOConfig, rollouts: Rollouts, rewards_B: torch.Tensor) -> torch.Tensor:
    return shape_rewards(rewards_B, rollouts.batch.token_mask_BT.sum(-1), rollouts.stopped_B, config)


# ---- groups between ranks: plain Python values, whatever the padding of the rank they come from


@dataclass(slots=True)
class _Group:
    prompt: str
    answer: str
    completions: list[str]
    sequences: list[list[int]]  # prompt and completion ids, without pads
    prompt_length: int
    logprobs: list[list[float]]  # of the completion's tokens
    stopped: list[bool]
    rewards: list[float]
    shaped: list[float]


def _groups(rollouts: Rollouts, rewards_B: torch.Tensor, shaped_B: torch.Tensor) -> list[_Group]:
    batch, size = rollouts.batch, rollouts.num_generations
    real_BT, made_BT = batch.mask_BT > 0, batch.token_mask_BT > 0
    groups = []
    for start in range(0, batch.num_sequences, size):
        members = range(start, start + size)
        groups.append(
            _Group(
                prompt=rollouts.prompts[start],
                answer=rollouts.answers[start],
                completions=[rollouts.completions[b] for b in members],
                sequences=[batch.ids_BT[b][real_BT[b]].tolist() for b in members],
                prompt_length=int(real_BT[start].sum() - made_BT[start].sum()),
                logprobs=[rollouts.generation_logprobs_BT[b][made_BT[b]].tolist() for b in members],
                stopped=[bool(rollouts.stopped_B[b]) for b in members],
                rewards=[float(rewards_B[b]) for b in members],
                shaped=[float(shaped_B[b]) for b in members],
            )
        )
    return groups


def _gather(policy: Policy, mine: list[_Group]) -> list[_Group]:
    """The groups of all ranks in the order of their prompts; tensor-parallel peers' copies count once."""
    per_rank: list[tuple[int, list[_Group]]] = [(0, [])] * dist.get_world_size()
    dist.all_gather_object(per_rank, (policy.data_rank, mine))
    return [group for _, groups in sorted(dict(per_rank).items()) for group in groups]


def _joined(policy: Policy, groups: list[_Group], counts: dict[str, float]) -> Graded:
    """This rank's share of the groups as one padded batch."""
    share = len(groups) // policy.data_size
    mine = groups[policy.data_rank * share : (policy.data_rank + 1) * share]
    size = len(mine[0].sequences)
    lengths = [group.prompt_length for group in mine for _ in range(size)]
    batch = make_batch([ids for group in mine for ids in group.sequences], lengths, policy.tokenizer.pad_token_id)
    logprobs_BT = torch.zeros(batch.ids_BT.shape, dtype=torch.float32)
    logprobs_BT[batch.token_mask_BT > 0] = torch.tensor([x for group in mine for row in group.logprobs for x in row])
    rollouts = Rollouts(
        prompts=[group.prompt for group in mine for _ in range(size)],
        completions=[text for group in mine for text in group.completions],
        answers=[group.answer for group in mine for _ in range(size)],
        batch=batch,
        generation_logprobs_BT=logprobs_BT,
        stopped_B=torch.tensor([stopped for group in mine for stopped in group.stopped]),
        num_generations=size,
    )
    rewards_B = torch.tensor([value for group in mine for value in group.rewards])
    shaped_B = torch.tensor([value for group in mine for value in group.shaped])
    return Graded(rollouts, rewards_B, shaped_B, counts)
