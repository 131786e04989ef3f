"""Tasks, their split, padding and positions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

import toolkit as tk
from toolkit.errors import SpecError
from toolkit.prompts import Task, arithmetic, draw_problems, encode_prompts, make_batch, pack, unpack
from toolkit.rewards import exact_match, grade
from toolkit.tasks import resolve_task


def test_the_arithmetic_split_covers_all_sums_once_and_hides_no_digit_pair() -> None:
    task = arithmetic()
    prompts = [p for p, _ in task.problems + task.held_out]
    assert len(set(prompts)) == len(prompts) == 10_000
    assert len(task.held_out) == 1001  # what data/tiny_policy/training.json reports its accuracy on
    assert all(eval(p[:-1]) == int(a) for p, a in task.held_out)
    last_digits = {(p.split("+")[0][-1], p[:-1].split("+")[1][-1]) for p, _ in task.problems}
    assert len(last_digits) == 100


def test_a_step_draws_the_same_problems_whoever_asks_and_others_next_time() -> None:
    task = arithmetic()
    task = task.problems
    assert draw_problems(task, 8, seed=0, step=3) == draw_problems(task, 8, seed=0, step=3)
    assert draw_problems(task, 8, seed=0, step=3) != draw_problems(task, 8, seed=0, step=4)
    assert draw_problems(task, 8, seed=0, step=3) != draw_problems(task, 8, seed=1, step=3)
    assert len(set(draw_problems(task, 8, seed=0, step=0))) == 8


def test_every_problem_comes_once_before_any_comes_again() -> None:
    problems = [(f"{a}+{b}=", str(a + b)) for a in range(10) for b in range(10)]
    epochs = [[p for step in range(12) for p in draw_problems(problems, 8, 3, 12 * e + step)] for e in range(2)]
    assert [len(set(epoch)) for epoch in epochs] == [96, 96]  # 4 of the 100 do not fill a step
    assert epochs[0] != epochs[1]
    assert {frozenset(draw_problems(problems, 100, 0, step)) for step in range(3)} == {frozenset(problems)}
    few = [("1+1=", "2"), ("1+2=", "3")]
    for step in range(20):
        drawn = draw_problems(few, 5, seed=0, step=step)
        assert sorted(map(drawn.count, few)) == [2, 3]
    assert len({tuple(draw_problems(few, 5, 0, step)) for step in range(20)}) > 1


BAD_TASKS = [
    ("algebra", "task='algebra' is not known"),
    ([], "has no problems"),
    ([("1+1=", "2"), "3+3="], r"problems\[1\] is '3\+3='"),
    ([("1+1=", 2)], r"problems\[0\] is"),
    ([("", "2")], "empty prompt"),
    (7, "must be 'arithmetic'"),
    (pd.DataFrame({"prompt": ["1+1="], "answer": ["2"]}), r"problems\[0\] is 'prompt'"),
]


def test_a_task_checks_itself() -> None:
    assert Task("t", (("a", "b") for _ in range(2))).problems == [("a", "b")] * 2
    for bad in ({"problems": None}, {"problems": [("a", "b")], "held_out": None}, {"problems": [("a", "b")], "reward": 3}):
        with pytest.raises(SpecError, match=r"=(None|3) must be"):
            Task("t", **bad)


@pytest.mark.parametrize(("task", "reason"), BAD_TASKS)
def test_bad_tasks_are_named(task: object, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        resolve_task(task)


def test_any_iterable_of_pairs_is_a_task() -> None:
    assert resolve_task((f"{i}+0=", str(i)) for i in range(3)).problems[2] == ("2+0=", "2")


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=5),
    st.sampled_from(["prompt", "left", "right"]),
    st.integers(0, 15),
)
def test_padding_keeps_every_token_its_position_and_its_role(lengths: list[tuple[int, int]], side: str, width: int) -> None:
    sequences = [list(range(10, 10 + p + c)) for p, c in lengths]
    batch = make_batch(sequences, [p for p, _ in lengths], 0, side=side, width=width)
    assert batch.ids_BT.shape[1] >= width
    for row, (ids, (prompt, completion)) in enumerate(zip(sequences, lengths, strict=True)):
        real = batch.mask_BT[row] == 1
        assert batch.ids_BT[row][real].tolist() == ids
        assert batch.positions_BT[row][real].tolist() == list(range(len(ids)))
        assert batch.token_mask_BT[row][real].tolist() == [0.0] * prompt + [1.0] * completion
        assert (batch.ids_BT[row][~real] == 0).all()
        assert (batch.token_mask_BT[row][~real] == 0).all()
    if side == "prompt":  # every completion starts in one column
        starts = {int(batch.token_mask_BT[r].argmax()) for r, (_, c) in enumerate(lengths) if c}
        assert len(starts) <= 1


def test_prompts_go_through_a_chat_template_if_there_is_one() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tk.tiny_policy())
    plain = encode_prompts(tokenizer, ["1+2=", "34+5="], 96)
    assert [tokenizer.decode(ids) for ids in plain] == ["<bos>1+2=", "<bos>34+5="]
    tokenizer.chat_template = "{% for m in messages %}U:{{ m['content'] }}\nA:{% endfor %}"
    assert tokenizer.decode(encode_prompts(tokenizer, ["1+2="], 96)[0]).endswith("U:1+2=\nA:")


def test_prompts_the_tokenizer_cannot_say_are_refused() -> None:
    tokenizer = AutoTokenizer.from_pretrained(tk.tiny_policy())
    with pytest.raises(SpecError, match="does not know all of the prompt 'x😀'.*<unk>"):
        encode_prompts(tokenizer, ["1+2=", "x😀"], 96)
    with pytest.raises(SpecError, match=r"gives id 47 .* vocabulary is \[0, 20\)"):
        encode_prompts(tokenizer, ["ha"], 20)


def test_rewards() -> None:
    assert [exact_match("12+7=", c, "19") for c in ("19", " 19\n", "190", "", "19.", "x")] == [1, 1, 0, 0, 0, 0]
    assert grade(lambda p, c, a: len(c), ["p"] * 2, ["ab", ""], ["a"] * 2) == [2.0, 0.0]
    for good in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5), Fraction(1, 2)):
        assert grade(lambda p, c, a, good=good: good, ["p"], ["c"], ["a"]) == [0.5]
    assert grade(lambda p, c, a: np.bool_(True), ["p"], ["c"], ["a"]) == [1.0]
    for bad in (float("nan"), float("inf"), None, "1", 1e300, [1], torch.ones(2)):
        with pytest.raises(SpecError, match="the reward function returned .* for prompt 'p' and completion 'c'"):
            grade(lambda p, c, a, bad=bad: bad, ["p"], ["c"], ["a"])


def test_padding_side_changes_no_logprob(one_rank: tk.Session) -> None:
    def scored(policy, side):
        from toolkit.step import score

        rows = [[1, 5, 6, 7], [1, 8, 9, 4, 10, 11], [1, 3]]
        batch = make_batch(rows, [1, 2, 1], 0, side=side)
        logprobs_BT = score(policy, batch, 1.0)
        return [logprobs_BT[b][batch.mask_BT[b, 1:].bool() & batch.mask_BT[b, :-1].bool()] for b in range(3)]

    # float32 noise is 3e-6 nats (the GEMMs see other row counts); an unmasked pad moves them by 0.1 or more.
    with tk.launch(model=tk.tiny_policy(), precision="float32") as session:
        left, right, prompt = (session.run(scored, side)[0] for side in ("left", "right", "prompt"))
    for a, b, c in zip(left, right, prompt, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        torch.testing.assert_close(a, c, atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", ["prompt", "left", "right"])
def test_packing_leaves_no_pad_and_unpacking_puts_every_token_back(side: str) -> None:
    rows = [[1, 5, 6, 7, 2], [1, 8, 2], [1, 9, 9, 4]]
    batch = make_batch(rows, [3, 1, 2], pad_id=0, side=side, width=9)
    row, real_BT = pack(batch)
    assert row.ids_BT.tolist() == [[1, 5, 6, 7, 2, 1, 8, 2, 1, 9, 9, 4]]
    assert row.positions_BT.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]]
    assert row.token_mask_BT.tolist() == [[0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 1]]
    back = unpack(row.ids_BT[:, 1:].float(), real_BT)
    assert back.shape == (3, batch.ids_BT.shape[1] - 1)
    later = batch.token_mask_BT[:, 1:] > 0
    assert torch.equal(back[later].long(), batch.ids_BT[:, 1:][later])
    assert not back[~real_BT[:, 1:]].any()
