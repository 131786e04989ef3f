"""Work in a thread: stopped like Ctrl-C does, heard through a callback, and alone in the kernel while it computes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import toolkit as tk
from toolkit.background import Background, current, uninterrupted_imports
from toolkit.engines import LocalRanks

FIELDS: dict[str, Any] = {
    "model": tk.tiny_policy(), "num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_new_tokens": 5,
    "learning_rate": 1e-4, "train_micro_batch_size": 2,
}  # fmt: skip


def started(
    task: Callable[[], Any], stop_at: str | None = None, before_stop: Callable[[], None] | None = None
) -> tuple[Background, Future[Any], list[str]]:
    """Run a task in a thread; ask it to stop, from here, as soon as it reports progress on `stop_at`."""
    heard: list[str] = []
    reached = threading.Event()

    def on_progress(description: str, done: int, total: int) -> None:
        heard.append(description)
        if stop_at is not None and description.startswith(stop_at) and not reached.is_set():
            reached.set()
            stopped.wait(10)

    stopped = threading.Event()
    work = Background(on_progress)

    def run() -> Any:
        with work:
            return task()

    pool = ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    if stop_at is not None:
        assert reached.wait(60)
        if before_stop is not None:
            before_stop()
        work.stop()
        work.stop()  # again is not "kill them"
        stopped.set()
    return work, future, heard


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_stopped_in_the_middle_leaves_the_next_as_undisturbed(ranks: int, capfd: pytest.CaptureFixture[str]) -> None:
    with tk.launch(ranks=ranks, **FIELDS) as session:
        straight = [session.grpo_step().metrics for _ in range(2)]
    capfd.readouterr()
    with tk.launch(ranks=ranks, **FIELDS) as session:
        for phase in ("sampling", "logprobs", "training"):
            _, future, heard = started(lambda: session.grpo_step(50), stop_at=phase)
            with pytest.raises(KeyboardInterrupt, match="stopped after 0 of 50 steps"):
                future.result(60)
            assert phase in heard
            assert len(session.history) == 0
            if phase == "sampling" and ranks == 1:
                assert "training" not in heard  # at the next boundary, not at the end of the step
        _, future, _ = started(lambda: session.grpo_step(2))
        assert [record.metrics for record in future.result(60)] == straight
    _out, err = capfd.readouterr()
    assert "interrupt:" not in err  # whoever pressed the button says himself that it was heard


def test_a_stop_before_the_first_call_keeps_it_from_beginning(one_rank: tk.Session) -> None:
    work = Background()
    steps = len(one_rank.history)

    def task() -> None:
        with work:
            assert current() is work
            one_rank.grpo_step()

    work.stop()
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(KeyboardInterrupt, match="stopped after 0 of 1 steps"):
            pool.submit(task).result(60)
        pool.submit(task).result(60)  # it was asked once
    assert len(one_rank.history) == steps + 1
    assert current() is None


def test_a_launch_stopped_while_ranks_start_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    gangs: list[LocalRanks] = []
    begin = LocalRanks.__init__
    monkeypatch.setattr(LocalRanks, "__init__", lambda self, n: (gangs.append(self), begin(self, n))[1])
    for phase in ("starting 2 ranks", "loading the model"):
        _, future, _ = started(lambda: tk.launch(ranks=2, **FIELDS), stop_at=phase)
        with pytest.raises(KeyboardInterrupt):
            future.result(60)
    assert len(gangs) == 2
    for gang in gangs:
        assert not any(process.is_alive() for process in gang._processes)


def test_a_prediction_can_be_stopped() -> None:
    def task() -> Any:
        return tk.predict_memory("Qwen3-8B", ranks=8, sequence_length=512)

    _, future, _ = started(task, stop_at="predicting")
    with pytest.raises(KeyboardInterrupt):
        future.result(60)


def test_of_two_sessions_in_the_kernel_the_one_asked_stops() -> None:
    with tk.launch(**FIELDS) as session:
        straight = session.grpo_step().metrics
    with tk.launch(**FIELDS) as a, tk.launch(**FIELDS) as b:
        others: list[Future[Any]] = []

        def begin_another() -> None:
            others.append(started(b.grpo_step)[1])
            time.sleep(0.5)  # without the kernel's lock, it would be the call that runs now

        _, future, _ = started(a.grpo_step, stop_at="sampling", before_stop=begin_another)
        with pytest.raises(KeyboardInterrupt):
            future.result(60)
        assert others[0].result(60).metrics == straight
        assert a.grpo_step().metrics == straight


def test_ctrl_c_that_an_import_swallows_is_heard_when_it_is_done() -> None:
    def imported(presses: int, reached: list[int]) -> None:
        with uninterrupted_imports():
            for press in range(presses):
                with contextlib.suppress(KeyboardInterrupt if press == 0 else ()):  # so do libraries, importing
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.2)
                    reached.append(press)

    reached: list[int] = []
    with pytest.raises(KeyboardInterrupt, match="after the imports"):
        imported(1, reached)
    assert reached == [0]
    with pytest.raises(KeyboardInterrupt):
        imported(2, reached)
    assert reached == [0, 0]  # the second is at once
    imported(0, reached)
