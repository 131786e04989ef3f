"""Graders: `reward(prompt, completion, answer) -> float`. Any Python function of that form is one."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

from toolkit.errors import SpecError

#: Squares of rewards must stay finite in float32, or the standard deviation of a group would not be.
_LARGEST = 1e15


def exact_match(prompt: str, completion: str, answer: str) -> float:
    """1.0 when the completion is the answer, surrounding white space aside, else 0.0."""
    return float(completion.strip() == answer.strip())


def math_answer(prompt: str, completion: str, answer: str) -> float:
    """1.0 when the completion's final number or expression equals the answer (Hugging Face's math-verify), else 0.0."""
    from math_verify import parse, verify

    # Its time-outs are alarms, which only the main thread can set. Ranks run everything there.
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    given, found = (parse(text, parsing_timeout=seconds) for text in (answer, completion))
    return float(bool(found) and verify(given, found, timeout_seconds=seconds))


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
        number = _as_number(value)
        if number is None or abs(number) > _LARGEST:
            raise SpecError(
                f"the reward function returned {value!r} for prompt {prompt!r} and completion {completion!r}; it must "
                f"return a finite number of size at most {_LARGEST:g}."
            )
        rewards.append(number)
    return rewards


def _as_number(value: Any) -> float | None:
    """A Python, numpy or one-element torch number as a float; None if it is none, or not finite."""
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
