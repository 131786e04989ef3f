"""Graders: `reward(prompt, completion, answer) -> float`. Any Python function of that form is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from toolkit.errors import SpecError


def exact_match(prompt: str, completion: str, answer: str) -> float:
    """1.0 when the completion is the answer, surrounding white space aside, else 0.0."""
    return float(completion.strip() == answer.strip())


def grade(
    reward: Callable[[str, str, str], float], prompts: list[str], completions: list[str], answers: list[str]
) -> list[float]:
    """Grade completions one by one.

    Raises:
        SpecError: a reward is not a finite number; names the prompt and completion. One NaN would turn the baseline of
            its group, every gradient and then every weight into NaN.
    """
    rewards = []
    for prompt, completion, answer in zip(prompts, completions, answers, strict=True):
        value: Any = reward(prompt, completion, answer)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise SpecError(
                f"the reward function returned {value!r} for prompt {prompt!r} and completion {completion!r}; it must be "
                "a finite number."
            )
        rewards.append(float(value))
    return rewards
