"""Tasks and tokens: where prompts come from, how they become token ids, and the one place that knows padding.

Shapes: _P prompts, _G completions of each, _B = P*G sequences, _T tokens. Prompts are padded on the left, so that every
completion starts in the same column; completions are padded on the right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from toolkit.errors import SpecError

Reward = Callable[[str, str, str], float]


class Plain(str):
    """A prompt that goes to the model as it is, without the tokenizer's chat template."""

    __slots__ = ()


@dataclass(frozen=True)
class Task:
    """Prompts with answers, and how a completion is graded.

    Attributes:
        name: shown in records.
        problems: (prompt, answer) pairs to train on.
        held_out: pairs never trained on, for `Session.evaluate`.
        reward: `reward(prompt, completion, answer) -> float`; None grades by `rewards.exact_match`.
        chat_template: put prompts into the tokenizer's chat template, if it has one. Chat models need it; few-shot prompts
            don't.
    """

    name: str
    problems: list[tuple[str, str]]
    held_out: list[tuple[str, str]] = field(default_factory=list)
    reward: Reward | None = None
    chat_template: bool = True

    def __post_init__(self) -> None:
        for name in ("problems", "held_out"):
            pairs = _pairs(name, getattr(self, name))
            object.__setattr__(self, name, pairs if self.chat_template else [(Plain(p), a) for p, a in pairs])
        if not self.problems:
            raise SpecError(f"task {self.name!r} has no problems; give at least one (prompt, answer) pair.")
        if self.reward is not None and not callable(self.reward):
            raise SpecError(f"reward={self.reward!r} must be a function reward(prompt, completion, answer) -> number.")

    def __repr__(self) -> str:
        return f"Task({self.name}: {len(self.problems)} problems, {len(self.held_out)} held out)"


@functools.cache
def arithmetic() -> Task:
    """All sums of two numbers below 100: `12+7=` -> `19`; about one in ten is held out.

    Held-out sums are picked by a multiplicative hash. (A linear rule such as `(7a + 13b) % 10` hides whole digit pairs
    from training, and the held-out accuracy then measures something else.)
    """
    train: list[tuple[str, str]] = []
    held_out: list[tuple[str, str]] = []
    for a in range(100):
        for b in range(100):
            hashed = ((100 * a + b) * 2654435761) % 2**32  # Knuth's multiplier
            (held_out if hashed < 2**32 // 10 else train).append((f"{a}+{b}=", str(a + b)))
    return Task("arithmetic", train, held_out)


def _pairs(field: str, items: Any) -> list[tuple[str, str]]:
    if not isinstance(items, Iterable) or isinstance(items, str):
        raise SpecError(f"{field}={items!r} must be (prompt, answer) pairs.")
    pairs = []
    for index, item in enumerate(items):
        if not (isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(s, str) for s in item)):
            raise SpecError(f"{field}[{index}] is {item!r}; each must be a (prompt, answer) pair of strings.")
        if not item[0]:
            raise SpecError(f"{field}[{index}] has an empty prompt; the first token would have nothing to follow.")
        pairs.append((item[0], item[1]))
    return pairs


def draw_problems(problems: list[tuple[str, str]], count: int, seed: int, step: int) -> list[tuple[str, str]]:
    """Draw the problems of a step: the same on every rank, on any number of ranks, and after a resume.

    As a shuffled data loader draws them (NeMo-RL's and TRL's do): each comes once before any comes again, but for those at
    the end of an epoch that do not fill a step. Drawn anew at each step, half of a small set would not come up in as many
    steps as an epoch has, and is learned later.
    """
    steps_per_epoch = len(problems) // count
    epoch, place = divmod(step, max(1, steps_per_epoch))
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    rounds = -(-count // len(problems))  # more than one where a step is longer than an epoch
    shuffled = torch.cat([torch.randperm(len(problems), generator=generator) for _ in range(rounds)])
    return [problems[i] for i in shuffled[place * count : (place + 1) * count].tolist()]


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: list[str], vocab_size: int) -> list[list[int]]:
    """Turn prompts into token ids, through the tokenizer's chat template if it has one.

    Encoding a chat model's prompt without its template moves it off its own distribution and inflates every divergence.

    Raises:
        SpecError: the tokenizer does not know a character of a prompt, makes nothing of it, or is not this model's.
    """
    rows = _encode(tokenizer, prompts)
    for prompt, ids in zip(prompts, rows, strict=True):
        if not ids:
            raise SpecError(f"the tokenizer makes no token of the prompt {prompt!r}.")
        if max(ids) >= vocab_size:
            raise SpecError(
                f"the tokenizer gives id {max(ids)} for the prompt {prompt!r}, but the model's vocabulary is "
                f"[0, {vocab_size}): the tokenizer is not this model's."
            )
        if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            raise SpecError(
                f"the tokenizer does not know all of the prompt {prompt!r}: it becomes "
                f"{tokenizer.decode(ids)!r}, and the model would never see the difference."
            )
    return rows


def _encode(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[list[int]]:
    if tokenizer.chat_template is None or all(isinstance(text, Plain) for text in prompts):
        return [tokenizer(str(text), add_special_tokens=True)["input_ids"] for text in prompts]
    chats = [[{"role": "user", "content": text}] for text in prompts]
    encoded: Any = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)
    rows: list[list[int]] = encoded["input_ids"]
    return rows


@dataclass(slots=True)
class Batch:
    """Padded sequences. All tensors are [B, T] on one device."""

    ids_BT: torch.Tensor  # int64
    mask_BT: torch.Tensor  # int64, 1 where a real token is
    positions_BT: torch.Tensor  # int64, 0 at the first real token; 1 at pads, which are masked (HF's convention)
    token_mask_BT: torch.Tensor  # float32, 1 at completion tokens (the end-of-sequence token included), 0 elsewhere

    def rows(self, start: int, stop: int, stride: int = 1) -> Batch:
        """Every `stride`-th sequence from `start` up to `stop`."""
        return Batch(*(getattr(self, name)[start:stop:stride] for name in self.__slots__))

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(*(getattr(self, name).to(device) for name in self.__slots__))

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.ids_BT.shape[0]


def make_batch(
    sequences: list[list[int]],
    prompt_lengths: list[int],
    pad_id: int,
    *,
    side: str = "prompt",
    width: int | None = None,
) -> Batch:
    """Pad sequences to one width.

    Args:
        sequences: token ids of prompt and completion together.
        prompt_lengths: how many of them are prompt.
        side: "prompt" aligns the ends of the prompts (pads left of them, and right of the completions); "left" and
            "right" put all pads on that side.
        width: at least this many columns.
    """
    widest_prompt = max(prompt_lengths)
    starts = []
    for ids, prompt in zip(sequences, prompt_lengths, strict=True):
        starts.append({"prompt": widest_prompt - prompt, "left": -len(ids), "right": 0}[side])
    if side == "left":
        total = max(max(map(len, sequences)), width or 0)
        starts = [total + s for s in starts]
    total = max(max(s + len(ids) for s, ids in zip(starts, sequences, strict=True)), width or 0)
    ids_BT = torch.full((len(sequences), total), pad_id, dtype=torch.int64)
    mask_BT = torch.zeros_like(ids_BT)
    token_mask_BT = torch.zeros(ids_BT.shape, dtype=torch.float32)
    for row, (ids, prompt, start) in enumerate(zip(sequences, prompt_lengths, starts, strict=True)):
        ids_BT[row, start : start + len(ids)] = torch.tensor(ids)
        mask_BT[row, start : start + len(ids)] = 1
        token_mask_BT[row, start + prompt : start + len(ids)] = 1
    return Batch(ids_BT, mask_BT, positions_of(mask_BT), token_mask_BT)


def pack(batch: Batch) -> tuple[Batch, torch.Tensor]:
    """Put a batch's sequences end to end into one row without pads.

    Returns:
        The row, [1, N], whose positions start at 0 with each sequence (that is how models tell them apart), and [B, T]
        bool, where its tokens came from, for `unpack`.
    """
    real_BT = batch.mask_BT > 0
    return Batch(*(getattr(batch, name)[real_BT].unsqueeze(0) for name in Batch.__slots__)), real_BT


def unpack(logprobs_1N: torch.Tensor, real_BT: torch.Tensor) -> torch.Tensor:
    """The packed row's logprobs [1, N-1] of tokens 1.. back at the places [B, T-1] of their tokens, 0 at pads.

    A sequence's first token gets the one that the end of the sequence before it gives; it means nothing.
    """
    logprobs_BT = logprobs_1N.new_zeros(real_BT.shape)
    logprobs_BT[real_BT] = torch.cat([logprobs_1N.new_zeros(1), logprobs_1N[0]])
    return logprobs_BT[:, 1:]


def positions_of(mask_BT: torch.Tensor) -> torch.Tensor:
    """Position ids [B, T] that count real tokens only, so that learned positions are right under left padding."""
    return (mask_BT.cumsum(-1) - 1).masked_fill(mask_BT == 0, 1)
