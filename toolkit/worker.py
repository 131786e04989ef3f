"""What a session calls on its ranks. Policies live here, in the rank's process, by the session's key."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from toolkit import fsdp
from toolkit.build import build
from toolkit.checkpoint import export as export
from toolkit.checkpoint import load as load
from toolkit.checkpoint import save as save
from toolkit.collect import grade_together, sample_step
from toolkit.policy import LIVE_FIELDS as LIVE_FIELDS
from toolkit.policy import Policy, switch
from toolkit.products import float32_products
from toolkit.prompts import Plain, Reward, encode_prompts, make_batch
from toolkit.prompts import draw_problems as draw_problems
from toolkit.reference import keep_reference as keep_reference
from toolkit.rollouts import sample
from toolkit.sources import show_lines
from toolkit.spec import GRPOConfig, PolicySpec
from toolkit.step import score
from toolkit.tasks import resolve_task as resolve_task

_policies: dict[str, Policy] = {}
_variables: dict[str, dict[str, Any]] = {}  # of the cells run on this rank


def start(key: str, spec: PolicySpec, device: str, keeps_reference: bool) -> list[fsdp.Unit]:
    """Build this rank's part of the policy; returns what each FSDP unit is set to."""
    _policies[key] = build(spec, device)
    if keeps_reference:
        keep_reference(_policies[key])
    return fsdp.inspect_units(_policies[key].model)


def gpu() -> dict[str, Any]:
    """Name and memory of this rank's GPU, before anything of ours is on it."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    context_bytes = 512 * 2**20  # about what CUDA itself takes for being asked
    used_bytes = max(0, total_bytes - free_bytes - context_bytes)
    return {"name": torch.cuda.get_device_name(), "total_bytes": total_bytes, "used_bytes": used_bytes}


def on_policy(key: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `fn(policy, *args, **kwargs)`; whatever it raises, the policy can be used again afterwards."""
    policy = _policies[key]
    try:
        with float32_products():
            result = fn(policy, *args, **kwargs)
    except BaseException:
        fsdp.recover(policy.model)
        raise
    fsdp.reshard(policy.model)  # a forward of the user's own leaves copies, stale after the next optimizer step
    return result


def drop(key: str) -> None:
    """Free this rank's part of the policy (of a session in the kernel; others end with their process)."""
    _policies.pop(key, None)
    _variables.pop(key, None)


def run_cell(policy: Policy, key: str, source: str, as_text: bool) -> Any:
    """Run a cell's code on this rank; its variables are there again in the session's next cell.

    Returns:
        The value of its last expression (its repr if `as_text`, so that it need not travel), None if it ends otherwise.
    """
    variables = _variables.setdefault(key, {"__name__": "ranks", "torch": torch, "dist": dist})
    variables |= {"policy": policy, "model": policy.model, "rank": dist.get_rank()}
    name = f"<%%ranks {hash(source):x}>"
    show_lines(name, source)
    body = ast.parse(source, name)
    last = body.body[-1] if body.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(body, name, "exec"), variables)
        return None
    exec(compile(ast.Module(body.body[:-1], []), name, "exec"), variables)
    value = eval(compile(ast.Expression(last.value), name, "eval"), variables)
    return repr(value) if as_text and value is not None else value


def units(policy: Policy) -> list[fsdp.Unit]:
    """What each FSDP unit is set to now."""
    return fsdp.inspect_units(policy.model)


def set_live(policy: Policy, settings: dict[str, Any]) -> list[fsdp.Unit]:
    """Change live settings."""
    return switch(policy, **settings)


def rollout(
    policy: Policy, config: GRPOConfig, problems: list[tuple[str, str]], reward: Reward | None, step: int
) -> list[dict[str, Any]]:
    """Sample and grade without training; a row per completion of this rank's share."""
    rollouts = sample_step(policy, config, problems, step)
    rewards_B = grade_together(policy, rollouts, reward)
    if policy.mesh["tp"].get_local_rank() > 0:
        return []  # the same completions as its first tensor-parallel peer
    lengths_B = rollouts.batch.token_mask_BT.sum(-1).int().tolist()
    mean_B = rollouts.generation_logprobs_BT.sum(-1) / rollouts.batch.token_mask_BT.sum(-1)
    return [
        {
            "prompt": rollouts.prompts[b],
            "completion": rollouts.completions[b],
            "answer": rollouts.answers[b],
            "reward": float(rewards_B[b]),
            "tokens": lengths_B[b],
            "stopped": bool(rollouts.stopped_B[b]),
            "mean_logprob": float(mean_B[b]),
        }
        for b in range(len(rollouts.prompts))
    ]


def evaluate(
    policy: Policy, problems: list[tuple[str, str]], reward: Reward | None, max_new_tokens: int
) -> list[dict[str, Any]]:
    """Grade greedy completions; a row per problem of this rank's share."""
    padded = problems + problems[:1] * (-len(problems) % policy.data_size)
    rollouts = sample(policy, padded, num_generations=1, max_new_tokens=max_new_tokens, temperature=1.0, greedy=True)
    rewards_B = grade_together(policy, rollouts, reward)
    if policy.mesh["tp"].get_local_rank() > 0:
        return []  # the same as its first tensor-parallel peer
    first = policy.data_rank * len(rollouts.prompts)
    mine = range(min(len(rollouts.prompts), len(problems) - first))  # what fills up the last share is not counted
    return [
        {
            "prompt": rollouts.prompts[b],
            "completion": rollouts.completions[b],
            "answer": rollouts.answers[b],
            "reward": float(rewards_B[b]),
        }
        for b in mine
    ]


def encode(policy: Policy, texts: list[str]) -> list[list[int]]:
    """Token ids of texts as they are, without a chat template."""
    return encode_prompts(policy.tokenizer, [Plain(text) for text in texts], policy.vocab_size)


def logprobs(policy: Policy, rows: list[list[int]], temperature: float) -> np.ndarray[Any, Any]:
    """Logprobs [B, T-1] float32 of this rank's share of the rows, NaN where a row has no token."""
    share = len(rows) // policy.data_size
    mine = rows[policy.data_rank * share : (policy.data_rank + 1) * share]
    width = max(map(len, rows))
    batch = make_batch(mine, [1] * share, policy.tokenizer.pad_token_id, side="right", width=width).to(policy.device)
    logprobs_BT = score(policy, batch, temperature)
    result = torch.where(batch.token_mask_BT[:, 1:] > 0, logprobs_BT, torch.nan)
    return result.cpu().numpy()
