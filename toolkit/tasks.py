"""The tasks that come by name, and problems from files."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from toolkit.errors import SpecError
from toolkit.grpo_config import TASKS
from toolkit.models import data_folder
from toolkit.prompts import Task, arithmetic
from toolkit.rewards import math_answer

_EXAMPLES = "3+4=7\n6+2=8\n"


@functools.cache
def one_digit_sums() -> Task:
    """The 100 sums of two digits, with two examples before each and no chat template; for small pretrained models.

    All of them are trained on and evaluated on: it shows that a model learns, not that it generalises.
    """
    problems = [(f"{_EXAMPLES}{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]
    return Task("one_digit_sums", problems, problems, reward=first_number, chat_template=False)


def first_number(prompt: str, completion: str, answer: str) -> float:
    """1.0 when the first whole number of the completion is the answer, whatever follows, else 0.0."""
    found = re.search(r"-?\d+", completion)
    return float(found is not None and found.group() == answer)


def gsm8k() -> Task:
    """Two hundred problems of GSM8K's test split, 160 to train on and 40 held out; graded by math-verify."""
    whole = load_jsonl(data_folder() / "gsm8k_test_200.jsonl")
    return Task("gsm8k", whole.problems[:160], whole.problems[160:], reward=math_answer)


def load_jsonl(path: str | Path) -> Task:
    """A task from a JSONL file of GSM8K's form: `question`, and `answer`, whose part after `####` counts if there is one.

    Graded by math-verify, so "18", "$18.00" and "the answer is 18" are the same.

    Raises:
        FileNotFoundError: no such file.
        SpecError: a line that is no JSON object with these two strings; names the line.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"task={str(path)!r}: there is no such file.")
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            problems.append(_problem(line, f"{path}, line {number}"))
    return Task(path.stem, problems, reward=math_answer)


def _problem(line: str, where: str) -> tuple[str, str]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise SpecError(f"{where} is not JSON ({error}).") from None
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in ("question", "answer")):
        raise SpecError(f"{where} has no strings 'question' and 'answer'.")
    answer = row["answer"].rsplit("####", 1)[-1].strip()
    if not answer:
        raise SpecError(f"{where} has an empty answer; it could never be matched.")
    return row["question"], answer


_NAMED: dict[str, Callable[[], Task]] = dict(zip(TASKS, (arithmetic, one_digit_sums, gsm8k), strict=True))


def resolve_task(task: Any) -> Task:
    """Make a `Task` of what a user gave: the name of one, a JSONL file, a `Task`, or `(prompt, answer)` pairs.

    Raises:
        SpecError: an unknown name, no problems, or an item that is no pair of strings; names the item.
    """
    if isinstance(task, Task):
        return task
    if isinstance(task, Path) or (isinstance(task, str) and task.endswith(".jsonl")):
        return load_jsonl(task)
    named = ", ".join(map(repr, _NAMED))
    if isinstance(task, str):
        if task in _NAMED:
            return _NAMED[task]()
        raise SpecError(
            f"task={task!r} is not known; use {named}, a .jsonl file, a toolkit Task, or (prompt, answer) pairs."
        )
    if not isinstance(task, Iterable):
        raise SpecError(f"task={task!r} must be {named}, a .jsonl file, a Task, or (prompt, answer) pairs.")
    return Task("custom", list(task))
