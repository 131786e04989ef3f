"""The gang rules, each caused for real: errors cross ranks, deaths are named, Ctrl-C loses nothing, nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import toolkit as tk
from toolkit.engines import KernelRanks, LocalRanks
from toolkit.errors import RanksLost, SessionClosed, SpecError
from toolkit.ranks import report_progress, stop_requested

from .faults import fault


class OddError(Exception):
    """An error of a user's, with state."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@pytest.fixture
def gang() -> Iterator[LocalRanks]:
    ranks = LocalRanks(2)
    ranks.connect("cpu")
    yield ranks
    ranks.close()


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _alive(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_results_come_in_rank_order_and_cells_functions_travel(gang: LocalRanks) -> None:
    def where(offset: int) -> tuple[int, int, np.ndarray[Any, Any]]:
        return dist.get_rank() + offset, os.getpid(), np.arange(3)

    results = gang.call(where, 10)
    assert [r[0] for r in results] == [10, 11]
    assert [r[1] for r in results] == gang.pids
    assert os.getpid() not in gang.pids
    np.testing.assert_array_equal(results[1][2], [0, 1, 2])


def test_state_and_thread_persist_between_calls(gang: LocalRanks) -> None:
    def remember() -> int:
        sys.kept = threading.get_ident()  # type: ignore[attr-defined]
        return torch.get_num_threads()

    assert gang.call(remember) == [max(1, len(os.sched_getaffinity(0)) // 2)] * 2
    assert gang.call(lambda: sys.kept == threading.get_ident()) == [True, True]  # type: ignore[attr-defined]


@fault(
    "a rank raises",
    "that exception, with `.rank` and the rank's traceback",
    "the session",
)
def test_an_error_arrives_as_it_was_raised_with_its_rank(gang: LocalRanks) -> None:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise OddError(7)

    with pytest.raises(OddError) as error:
        gang.call(fail)
    assert error.value.code == 7
    assert error.value.rank == 1  # type: ignore[attr-defined]
    (note,) = error.value.__notes__
    assert note.startswith("raised on rank 1:")
    assert "raise OddError(7)" in note
    assert gang.call(dist.get_rank) == [0, 1]  # and the gang goes on


def test_an_error_whose_init_takes_other_arguments_arrives_as_itself(gang: LocalRanks) -> None:
    class TwoArguments(Exception):
        def __init__(self, what: str, where: int) -> None:
            super().__init__(f"{what} at {where}")
            self.where = where

    def fail() -> None:
        raise TwoArguments("lost", 4)

    with pytest.raises(Exception, match="lost at 4") as error:
        gang.call(fail)
    assert type(error.value).__name__ == "TwoArguments"
    assert error.value.where == 4  # type: ignore[attr-defined]


def test_what_cannot_be_sent_is_said_before_anything_is(gang: LocalRanks) -> None:
    lock = threading.Lock()
    with pytest.raises(SpecError, match="cannot be sent to the ranks.*must not hold the session"):
        gang.call(lambda: lock)
    assert gang.call(dist.get_rank) == [0, 1]


def test_an_error_that_cannot_be_pickled_still_arrives_in_words(gang: LocalRanks) -> None:
    def fail() -> None:
        error = RuntimeError("held a lock")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    with pytest.raises(RuntimeError, match="held a lock"):
        gang.call(fail)


@fault(
    "a rank raises while its peers wait for it in a collective",
    "after 5 s `RanksLost`, caused by that exception",
    "the notebook; `session.restart()`",
)
def test_a_failure_beside_a_waiting_peer_ends_the_gang_and_says_what_was_lost(gang: LocalRanks) -> None:
    def fail_beside_a_collective() -> None:
        if dist.get_rank() == 0:
            raise OddError(3)
        dist.all_reduce(torch.ones(1))

    gang.grace_seconds = 1.0
    started = time.monotonic()
    with pytest.raises(
        RanksLost,
        match=r"rank 0 raised OddError: 3, and rank 1 did not return after it.*session.restart\(\)",
    ) as error:
        gang.call(fail_beside_a_collective)
    assert time.monotonic() - started < 5
    assert isinstance(error.value.__cause__, OddError)
    with pytest.raises(RanksLost):  # every later call says so at once
        gang.call(dist.get_rank)
    assert gone(gang.pids)


@fault(
    "a rank is killed (out of memory, say), even in mid-collective",
    "within 2 s `RanksLost`, naming rank and signal",
    "the notebook; `session.restart()`",
)
def test_a_killed_rank_is_named_at_once_even_in_mid_collective(gang: LocalRanks) -> None:
    def die_in_a_collective() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    started = time.monotonic()
    with pytest.raises(RanksLost, match=r"rank 1 died \(killed by SIGKILL\)") as error:
        gang.call(die_in_a_collective)
    assert time.monotonic() - started < 2
    assert error.value.rank == 1
    assert gone(gang.pids)


def test_closing_from_another_thread_in_mid_call_says_closed(gang: LocalRanks) -> None:
    threading.Timer(0.5, gang.close).start()
    with pytest.raises(SessionClosed):
        gang.call(time.sleep, 30)
    assert gone(gang.pids)


def test_close_twice_and_call_after(gang: LocalRanks) -> None:
    pids = gang.pids
    gang.close()
    gang.close()
    assert gone(pids)
    with pytest.raises(SessionClosed, match="closed"):
        gang.call(dist.get_rank)


def test_a_dropped_gang_ends_its_processes() -> None:
    ranks = LocalRanks(2)
    pids = ranks.pids
    del ranks
    assert gone(pids)


def test_what_ranks_print_arrives_during_the_call_and_names_the_rank(
    gang: LocalRanks, capsys: pytest.CaptureFixture[str]
) -> None:
    def speak() -> None:
        print("hello from", dist.get_rank())
        print("trouble", file=sys.stderr)

    gang.call(speak)
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
    assert sorted(err.splitlines()) == ["[rank 0] trouble", "[rank 1] trouble"]


def test_a_rank_that_waits_alone_is_named_once(
    gang: LocalRanks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def alone() -> None:
        if dist.get_rank() == 1:
            time.sleep(1.5)

    monkeypatch.setattr(gang, "patience_seconds", 0.25)
    gang.call(alone)
    said = capsys.readouterr().err
    assert said.count("rank 1 is still busy, 0.25 seconds after the first was done.") == 1
    assert "nobody will join it: Ctrl-C twice ends them all" in said
    gang.call(dist.get_rank)
    assert capsys.readouterr().err == ""


def test_progress_reaches_the_caller_only_if_it_lasts(gang: LocalRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    from toolkit.progress import Bars

    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Bars, "update", lambda self, *a: seen.append(a))

    def work() -> None:
        for done in range(3):
            if dist.get_rank() == 0:
                report_progress("work", done, 2)

    gang.call(work)
    KernelRanks().call(lambda: report_progress("here", 1, 1))
    assert seen == [("work", 0, 2), ("work", 1, 2), ("work", 2, 2), ("here", 1, 1)]


def interrupt_later(seconds: float) -> None:
    threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("engine", [KernelRanks, lambda: LocalRanks(2)], ids=["kernel", "local"])
def test_ctrl_c_stops_at_the_next_boundary_and_keeps_the_gang(engine: Any) -> None:
    def loop() -> int:
        for _ in range(600):
            time.sleep(0.05)
            if stop_requested():
                raise KeyboardInterrupt
        return 1

    ranks = engine()
    try:
        interrupt_later(0.5)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            ranks.call(loop)
        assert time.monotonic() - started < 5
        assert ranks.call(lambda: 1) == [1] * ranks.n
        assert ranks.call(stop_requested) == [False] * ranks.n  # the request does not outlive its call
    finally:
        ranks.close()


@fault(
    "Ctrl-C twice",
    "`RanksLost`, naming the busy ranks",
    "the notebook; `session.restart()`",
)
def test_a_request_to_stop_reaches_the_call_it_was_for_and_no_other(gang: LocalRanks) -> None:
    def until_stopped() -> int:
        for _ in range(400):
            if stop_requested():
                return 1
            time.sleep(0.05)
        return 0

    assert gang.call(stop_requested) == [False, False]
    gang._ask_to_stop(gang._num_calls + 1)  # overtakes the call it is for
    time.sleep(0.3)
    assert gang.call(until_stopped) == [1, 1]
    gang._ask_to_stop(gang._num_calls)  # comes after its end
    time.sleep(0.3)
    assert gang.call(stop_requested) == [False, False]
    with pytest.raises(ZeroDivisionError):
        gang.call(lambda: 1 / 0)
    gang._ask_to_stop(gang._num_calls + 1)  # a call that failed counted too
    assert gang.call(until_stopped) == [1, 1]


def test_a_late_ctrl_c_outlives_the_save_after_the_step(tmp_path: Path) -> None:
    def reward(prompt: str, completion: str, answer: str) -> float:
        session._ranks.interrupted_late = True  # as if it came after the step's last boundary
        return float(len(completion))

    task = tk.Task("mine", [("1+1=", "2"), ("2+2=", "4")], reward=reward)
    fields = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_new_tokens": 2}
    with tk.launch(model=tk.tiny_policy(), task=task, checkpoint_dir=tmp_path / "auto", **fields) as session:
        with pytest.raises(KeyboardInterrupt, match="stopped after 1 of 9 steps"):
            session.grpo_step(9)
        assert len(session.history) == 1
        assert "saved after step 1; no step was lost" in session.restart()


def test_a_second_ctrl_c_kills_ranks_that_do_not_listen() -> None:
    ranks = LocalRanks(2)
    interrupt_later(0.5)
    interrupt_later(1.0)
    with pytest.raises(RanksLost, match="Ctrl-C was pressed twice while rank 0, 1 was busy"):
        ranks.call(time.sleep, 60)
    assert gone(ranks.pids)


@fault(
    "Ctrl-C",
    "`KeyboardInterrupt` at the next boundary",
    "the session; the next step is the undisturbed one",
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ctrl_c_in_mid_step_leaves_the_next_step_as_undisturbed(ranks: int) -> None:
    fields: dict[str, Any] = {
        "num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_new_tokens": 5, "learning_rate": 1e-4,
        "train_micro_batch_size": 1,
    }  # fmt: skip
    with tk.launch(model=tk.tiny_policy(), ranks=ranks, **fields) as session:
        straight = [session.grpo_step().metrics for _ in range(3)]
    with tk.launch(model=tk.tiny_policy(), ranks=ranks, **fields) as session:
        session.grpo_step()
        seconds = sum(session._records[0].seconds.values())
        for fraction in (0.1, 0.2, 0.4, 0.9):  # in sampling, scoring, training, and at the end: never half a step
            taken = len(session.history)
            interrupt_later(0.05 + fraction * seconds * 0.6)
            with pytest.raises(KeyboardInterrupt) as stopped:
                session.grpo_step(100)
            now = len(session.history) - taken
            assert str(stopped.value) == f"stopped after {now} of 100 steps; they are in session.history"
        session.grpo_step(3)
        # A step that was done when Ctrl-C came is in the history, one that was not will be taken again.
        assert [record.metrics for record in session._records[:3]] == straight


SCRIPT = """
    import os, sys, time
    import toolkit as tk
    session = tk.launch(model=tk.tiny_policy(), ranks=2)
    print(*session._ranks.pids, flush=True)
    {then}
"""


@pytest.mark.parametrize("then", ["time.sleep(60)", "session.run(lambda policy: time.sleep(60))"], ids=["idle", "busy"])
def test_ranks_die_with_a_killed_kernel(then: str) -> None:
    """Also shows that a plain script needs no `if __name__ == '__main__'` guard."""
    code = textwrap.dedent(SCRIPT.format(then=then))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(p) for p in process.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(_alive, pids))
        time.sleep(0.5)
        process.kill()
    assert gone(pids)


def test_a_script_file_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(then="print('end', session.evaluate(8).num_problems, flush=True)")))
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True).stdout
    assert out.count("end 8") == 1
    assert gone([int(p) for p in out.splitlines()[0].split()])


def listening_sockets(pids: list[int]) -> list[str]:
    """Local addresses of TCP sockets these processes listen on."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].split(":")[0])
    return found


def test_ranks_listen_on_loopback_only(gang: LocalRanks) -> None:
    addresses = listening_sockets(gang.pids)
    assert addresses  # gloo does listen
    assert set(addresses) <= {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


ENDS_WITHOUT_CLOSE = """
import toolkit as tk
from toolkit.errors import RanksLost
def bar(policy):
    from tqdm.auto import tqdm
    return sum(tqdm(range(3), disable=True))  # tqdm's lock is a semaphore
session = tk.launch(model=tk.tiny_policy(), ranks=2)
assert session.run(bar) == [3, 3]
session.restart()
assert session.run(bar) == [3, 3]
"""


@pytest.mark.slow
def test_nothing_is_said_to_leak_after_a_restart_without_close() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS_WITHOUT_CLOSE], capture_output=True, text=True, check=True)
    assert "leak" not in ended.stderr
    assert "Traceback" not in ended.stderr
