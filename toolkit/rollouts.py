"""Sampling: batched decoding with a KV cache under FSDP2, all ranks in lockstep.

Shapes: _P prompts, _G completions of each, _B = P*G sequences of this rank, _T tokens, _N new tokens, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import TopKLogitsWarper, TopPLogitsWarper

from toolkit import fsdp
from toolkit.dtensors import whole
from toolkit.errors import SpecError
from toolkit.logprobs import token_logprobs
from toolkit.policy import Policy, check_finite
from toolkit.prompts import Batch, encode_prompts, make_batch, positions_of


@dataclass(slots=True)
class Rollouts:
    """Completions of one step on one rank, or of all ranks once gathered. Everything is on the CPU.

    Sequences of one prompt are adjacent: sequence b belongs to prompt b // G.
    """

    prompts: list[str]  # B
    completions: list[str]  # B; the end-of-sequence token is left out
    answers: list[str]  # B
    batch: Batch
    generation_logprobs_BT: torch.Tensor  # float32, what the sampler computed; 0 at prompt and pad tokens
    stopped_B: torch.Tensor  # bool, True if the completion ended itself, False if max_new_tokens cut it off
    num_generations: int  # G


@torch.no_grad()
def sample(
    policy: Policy,
    problems: Sequence[tuple[str, str]],
    *,
    num_generations: int,
    max_new_tokens: int,
    temperature: float,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    greedy: bool = False,
) -> Rollouts:
    """Sample completions of this rank's share of the problems.

    Each sequence draws one uniform number per token from a table that depends on the seed and its place among all
    sequences only, and picks the token by inverting the cumulative distribution. So one rank and many sample the same.

    Args:
        problems: of the whole step, the same on every rank; data-parallel rank r takes the r-th block.
        greedy: take the most likely token; temperature, top_p and top_k then play no part in the choice.

    Returns:
        Rollouts of this rank. `generation_logprobs_BT` are at the sampling temperature over the whole vocabulary (top_p
        and top_k do not renormalise them), which is what training compares with.
    """
    share = len(problems) // policy.data_size
    first_prompt = policy.data_rank * share
    distinct = problems[first_prompt : first_prompt + share]
    mine = [problem for problem in distinct for _ in range(num_generations)]
    with policy.failing_together():
        distinct_ids = encode_prompts(policy.tokenizer, [prompt for prompt, _ in distinct], policy.vocab_size)
        _check_lengths(policy, distinct, distinct_ids, max_new_tokens)
    prompt_ids = [ids for ids in distinct_ids for _ in range(num_generations)]
    pad_id = policy.tokenizer.pad_token_id
    prompt_batch = make_batch(distinct_ids, [len(ids) for ids in distinct_ids], pad_id).to(policy.device)
    generator = torch.Generator().manual_seed(seed)
    uniform_BN = torch.rand(
        len(problems) * num_generations, max_new_tokens, generator=generator, dtype=torch.float64
    ).narrow(0, first_prompt * num_generations, len(mine))

    policy.model.eval()
    with fsdp.kept_unsharded(policy.model):
        tokens_BN, logprobs_BN = _decode(
            policy, prompt_batch, uniform_BN, temperature=temperature, top_p=top_p, top_k=top_k, greedy=greedy
        )

    lengths, stopped = _completion_lengths(tokens_BN, policy.eos_ids)
    completions = [row[:n].tolist() for row, n in zip(tokens_BN, lengths, strict=True)]
    batch = make_batch(
        [p + c for p, c in zip(prompt_ids, completions, strict=True)],
        [len(p) for p in prompt_ids],
        pad_id,
        width=prompt_batch.ids_BT.shape[1] + max_new_tokens,
    )
    generation_logprobs_BT = torch.zeros(batch.ids_BT.shape, dtype=torch.float32)
    generation_logprobs_BT[:, prompt_batch.ids_BT.shape[1] :][:, : logprobs_BN.shape[1]] = logprobs_BN
    generation_logprobs_BT *= batch.token_mask_BT
    return Rollouts(
        prompts=[prompt for prompt, _ in mine],
        completions=[
            str(policy.tokenizer.decode([t for t in c if t not in policy.eos_ids], skip_special_tokens=True))
            for c in completions
        ],
        answers=[answer for _, answer in mine],
        batch=batch,
        generation_logprobs_BT=generation_logprobs_BT,
        stopped_B=stopped,
        num_generations=num_generations,
    )


def _decode(
    policy: Policy,
    prompts: Batch,
    uniform_BN: torch.Tensor,
    *,
    temperature: float,
    top_p: float,
    top_k: int | None,
    greedy: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode until every sequence of every rank has ended; returns tokens and logprobs [B, N'], N' at most N, on CPU.

    Each prompt is read once; its part of the cache is then copied for its completions.
    """
    warpers: list[Any] = [TopKLogitsWarper(top_k)] if top_k is not None else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1.0 else []
    eos_ids = torch.tensor(policy.eos_ids, device=policy.device)
    num_new = uniform_BN.shape[1]
    copies = len(uniform_BN) // prompts.num_sequences
    ids_BT, mask_BT = prompts.ids_BT, prompts.mask_BT
    ended_B = torch.zeros(len(uniform_BN), dtype=torch.bool, device=policy.device)
    tokens, logprobs, cache = [], [], None
    for step in range(num_new):
        policy.progress("sampling", step, num_new)
        positions_BT = positions_of(mask_BT)[:, -ids_BT.shape[1] :]
        with policy.autocast():
            output = policy.forward(ids_BT, mask_BT, positions_BT, use_cache=True, past_key_values=cache, logits_to_keep=1)
        cache = output.past_key_values
        logits_BV = whole(output.logits[:, -1])
        check_finite(policy, logits_BV.float().logsumexp(-1).view(prompts.num_sequences, -1), prompts, "sampling")
        if step == 0:
            cache.batch_repeat_interleave(copies)
            logits_BV, mask_BT = (t.repeat_interleave(copies, 0) for t in (logits_BV, mask_BT))
        scaled_BV = logits_BV.float() / temperature
        for warper in warpers:
            scaled_BV = warper(None, scaled_BV)
        token_B = logits_BV.argmax(-1) if greedy else _invert(scaled_BV, uniform_BN[:, step].to(policy.device))
        token_B = _agree(policy, token_B)
        logprobs.append(token_logprobs(logits_BV, token_B, temperature=temperature).cpu())
        tokens.append(token_B.cpu())
        ended_B |= torch.isin(token_B, eos_ids)
        ids_BT = token_B.unsqueeze(-1)
        mask_BT = torch.cat([mask_BT, torch.ones_like(ids_BT)], dim=1)
        if not _continue(policy, running=not bool(ended_B.all())):
            break
    policy.progress("sampling", num_new, num_new)
    return torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1)


def _continue(policy: Policy, *, running: bool) -> bool:
    """Whether any rank still has sequences to extend: one that stopped early would leave the others in an all-gather."""
    policy.stop_if_asked()
    flag = torch.tensor([running], dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


def _check_lengths(
    policy: Policy, problems: Sequence[tuple[str, str]], prompt_ids: list[list[int]], max_new_tokens: int
) -> None:
    limit = policy.max_positions
    for (prompt, _), ids in zip(problems, prompt_ids, strict=True):
        if limit is not None and len(ids) + max_new_tokens > limit:
            shown = prompt if len(prompt) < 60 else f"{prompt[:57]}..."
            raise SpecError(
                f"the prompt {shown!r} has {len(ids)} tokens; with max_new_tokens={max_new_tokens} that is more than the "
                f"{limit} positions this model is made for (max_position_embeddings of its config)."
            )


def _invert(scaled_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative distribution passes the uniform number; float64, so that no tail is lost."""
    cumulative_BV = torch.softmax(scaled_BV.double(), dim=-1).cumsum(-1)
    threshold_B = uniform_B * cumulative_BV[:, -1]
    return torch.searchsorted(cumulative_BV, threshold_B.unsqueeze(-1), right=True).squeeze(-1)


def _agree(policy: Policy, token_B: torch.Tensor) -> torch.Tensor:
    """Make tensor-parallel peers continue with the same tokens, whatever their last bits say."""
    if policy.tensor_size > 1:
        group = policy.mesh["tp"].get_group()
        dist.broadcast(token_B, src=dist.get_global_rank(group, 0), group=group)
    return token_B


def _completion_lengths(tokens_BN: torch.Tensor, eos_ids: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
    """Number of completion tokens up to and including the first end of sequence, and whether there is one, per row."""
    is_eos_BN = torch.isin(tokens_BN, torch.tensor(eos_ids))
    stopped_B = is_eos_BN.any(-1)
    first_B = torch.where(stopped_B, is_eos_BN.int().argmax(-1) + 1, tokens_BN.shape[1])
    return first_B.tolist(), stopped_B
