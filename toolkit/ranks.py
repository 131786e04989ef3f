"""Ranks: start them, call a function on all of them, stream what they say, interrupt and stop them.

`Ranks.call` holds all the semantics; an engine only moves bytes. Two engines so far: `KernelRanks` (one rank, the
notebook kernel itself) and `LocalRanks` (processes on this machine, one pipe and one control pipe each).

The gang rules:
- A call runs on every rank; results come back in rank order.
- A rank raising raises that very exception here, with `.rank` and the rank's traceback as a note. If its peers do not
  return within a grace period (they wait for it in a collective), the gang is killed and `RanksLost` says so.
- A rank dying ends the gang at once: `RanksLost` names rank and exit code.
- Ctrl-C asks the ranks to stop at the next boundary (they poll `stop_requested`) and waits for them, because a signal
  in the middle of a collective leaves ranks out of step. A second Ctrl-C kills them.
- Ranks die with the kernel: each watches its control pipe and exits on end of file.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import linecache
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle

from toolkit.errors import PeerFailed, RanksLost, SessionClosed
from toolkit.progress import Bars

# What a rank sends: a kind, then its data.  "out": stream, text.  "progress": description, done, total.
# "ok": pickled result.  "err": pickled exception or None, traceback text.  "dead": why (made up by the engine).
Message = tuple[Any, ...]

# Imported once in the fork server, so that ranks start in a tenth of a second. Nothing here may touch CUDA.
_PRELOAD = ["toolkit.imports", "toolkit.worker", "toolkit.memory", "toolkit.divergence"]

_stop = threading.Event()
_emit: Callable[[Message], None] | None = None


def stop_requested() -> bool:
    """Whether Ctrl-C was pressed during this call. Long loops on a rank ask at boundaries where stopping is safe."""
    return _stop.is_set()


def report_progress(description: str, done: int, total: int) -> None:
    """Show progress in the calling cell. Call it on one rank only."""
    if _emit is not None:
        _emit(("progress", description, done, total))


# ---- on a rank ------------------------------------------------------------------------------------------------------


class _Stream(io.TextIOBase):
    def __init__(self, emit: Callable[[Message], None], name: str) -> None:
        self._emit, self._name = emit, name

    def write(self, text: str) -> int:
        if text:
            self._emit(("out", self._name, text))
        return len(text)


def _execute(blob: bytes, emit: Callable[[Message], None]) -> None:
    global _emit
    _stop.clear()
    _emit = emit
    try:
        fn, args, source = pickle.loads(blob)
        if source is not None:  # cloudpickle drops the file of a cell; give its traceback source lines again
            name = f"<cell {fn.__qualname__}>"
            fn.__code__ = fn.__code__.replace(co_filename=name)
            linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        with contextlib.redirect_stdout(_Stream(emit, "stdout")), contextlib.redirect_stderr(_Stream(emit, "stderr")):
            answer: Message = ("ok", cloudpickle.dumps(fn(*args), protocol=5))
    except BaseException as error:  # KeyboardInterrupt and SystemExit too: the rank must outlive what it runs
        text = "".join(traceback.format_exception(type(error), error, _skip(error.__traceback__)))
        try:
            blob_of_error = cloudpickle.dumps(error)
            pickle.loads(blob_of_error)
        except Exception:  # an exception class that cannot be pickled still has its text
            blob_of_error = None
        answer = ("err", blob_of_error, text)
    emit(answer)


def _skip(tb: TracebackType | None) -> TracebackType | None:
    return tb.tb_next if tb is not None and tb.tb_next is not None else tb


def _rank_main(rank: int, messages: Connection, control: Connection, env: dict[str, str], num_threads: int) -> None:
    os.setsid()  # the kernel interrupts its whole process group; ranks are asked over the control pipe instead
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(env)
    import torch

    torch.set_num_threads(num_threads)

    def watch() -> None:
        with contextlib.suppress(OSError):
            while control.poll(None):
                try:
                    control.recv_bytes()
                except EOFError:
                    break
                _stop.set()
        os.kill(os.getpid(), signal.SIGKILL)  # the kernel is gone, and so is everyone this rank could answer

    threading.Thread(target=watch, daemon=True).start()
    lock = threading.Lock()  # user code may print from threads

    def emit(message: Message) -> None:
        with lock:
            messages.send(message)

    while True:  # one persistent thread for all user code: OpenMP's settings and CUDA's context are per thread
        _execute(messages.recv_bytes(), emit)


def connect(rank: int, world_size: int, device: str, rendezvous: str | None) -> None:
    """Join the ranks' process group: gloo for CPU tensors, NCCL beside it for CUDA ones. Runs on each rank.

    Args:
        rendezvous: a file all ranks see (no port to guess or guard), or None for a single rank.

    Raises:
        RuntimeError: this process already belongs to a group of several processes.
    """
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(rank)
    if dist.is_initialized():
        if dist.get_world_size() != world_size:
            raise RuntimeError(
                f"this process already belongs to a process group of {dist.get_world_size()} (torchrun?); start the "
                "notebook kernel outside it."
            )
        return
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    store = dist.FileStore(rendezvous, world_size) if rendezvous else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(hours=12))


# ---- in the kernel --------------------------------------------------------------------------------------------------


class Ranks:
    """A gang of ranks. `call` runs a function on each; `close` ends them."""

    n: int
    #: Seconds the peers of a rank that raised have to return before the gang is killed.
    grace_seconds = 5.0
    #: Seconds ranks have to reach a boundary after Ctrl-C before the gang is killed.
    interrupt_grace_seconds = 60.0

    def __init__(self) -> None:
        self.lost: RuntimeError | None = None
        self._lock = threading.RLock()

    # An engine supplies these five.
    def _send(self, rank: int, blob: bytes) -> None:
        raise NotImplementedError

    def _next(self, pending: set[int], timeout: float) -> tuple[int, Message] | None:
        raise NotImplementedError

    def _ask_to_stop(self) -> None:
        raise NotImplementedError

    def _kill(self) -> None:
        raise NotImplementedError

    def connect(self, device: str) -> None:
        """Form the process group over all ranks."""
        raise NotImplementedError

    @property
    def busy(self) -> bool:
        """Whether another thread is in a call."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return False
        return True

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(*args)` on every rank; functions defined in a notebook cell work too.

        Returns:
            The results in rank order.

        Raises:
            RanksLost: a rank died or could not be brought back; nothing can be called any more.
            SessionClosed: `close` was called before.
            KeyboardInterrupt: after Ctrl-C, once every rank has stopped at a boundary.
            Exception: whatever `fn` raised, with `.rank` and the rank's traceback as a note.
        """
        with self._lock:
            if self.lost is not None:
                raise self.lost
            blob = cloudpickle.dumps((fn, args, _source_of_cell(fn)), protocol=5)
            with Bars() as bars, _count_interrupts() as interrupts:
                ok, errors = self._drain(blob, bars, interrupts)
        if interrupts.count or any(isinstance(_load_error(e), KeyboardInterrupt) for e in errors.values()):
            raise KeyboardInterrupt("stopped at a step boundary; the session is as it was before this call")
        if errors:
            raise _first_error(errors)
        return [ok[r] for r in range(self.n)]

    def _drain(self, blob: bytes, bars: Bars, interrupts: _Interrupts) -> tuple[dict[int, Any], dict[int, Message]]:
        ok: dict[int, Any] = {}
        errors: dict[int, Message] = {}
        pending = set(range(self.n))
        deadline, seen = float("inf"), 0
        for rank in range(self.n):
            self._send(rank, blob)
        while pending:
            if interrupts.count > seen:
                seen = interrupts.count
                if seen > 1:
                    self._abort("was interrupted twice", errors)
                print("interrupt: waiting for the ranks' next boundary (again: kill them)", file=sys.stderr)
                deadline = time.monotonic() + self.interrupt_grace_seconds
                self._ask_to_stop()
            item = self._next(pending, 0.1)
            if item is None:
                if time.monotonic() > deadline:
                    late = ", ".join(map(str, sorted(pending)))
                    self._abort(f"rank {late} did not return after {'Ctrl-C' if seen else 'a failure'}", errors)
                continue
            rank, (kind, *data) = item
            if kind == "out":
                _write(data[0], data[1], rank if self.n > 1 else None)
            elif kind == "progress":
                bars.update(*data)
            elif kind == "dead":
                self._abort(f"rank {rank} died ({data[0]})", errors, rank)
            else:
                pending.discard(rank)
                if kind == "ok":
                    ok[rank] = pickle.loads(data[0])
                else:
                    errors[rank] = tuple(data)
                    deadline = min(deadline, time.monotonic() + self.grace_seconds)
        return ok, errors

    def _abort(self, why: str, errors: dict[int, Message], rank: int | None = None) -> None:
        message = f"{why}; all ranks were stopped and their state is lost. Launch the session again."
        self.lost = RanksLost(message, rank)
        self._kill()
        cause = _first_error(errors) if errors else None
        raise self.lost from cause

    def close(self) -> None:
        """End the ranks and free what they hold. Calling it again does nothing."""
        if self.lost is None or not isinstance(self.lost, SessionClosed):
            self.lost = SessionClosed("this session is closed; launch a new one.")
            self._kill()


class KernelRanks(Ranks):
    """One rank: the kernel process itself, so that a debugger, `%timeit` and printed tensors just work."""

    n = 1

    def __init__(self) -> None:
        super().__init__()

    def call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        global _emit
        with self._lock:
            if self.lost is not None:
                raise self.lost
            _stop.clear()
            with Bars() as bars, _count_interrupts(on_first=_stop.set) as interrupts:
                _emit = lambda message: bars.update(*message[1:])  # noqa: E731
                try:
                    result = fn(*args)
                except Exception as error:
                    error.rank = 0  # type: ignore[attr-defined]
                    raise
                finally:
                    _emit = None
        if interrupts.count:  # Ctrl-C came after the last boundary: the work is done, but the cell was asked to end
            raise KeyboardInterrupt("stopped after this call had finished")
        return [result]

    def connect(self, device: str) -> None:
        self.call(connect, 0, 1, device, None)

    def _kill(self) -> None:
        pass


class LocalRanks(Ranks):
    """Processes on this machine, forked from a server that has torch, transformers and AutoModel imported."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        context = _fork_server()
        self._folder = Path(tempfile.mkdtemp(prefix="toolkit-ranks-"))
        self._messages: list[Connection] = []
        self._control: list[Connection] = []
        self._processes: list[BaseProcess] = []
        num_threads = max(1, len(os.sched_getaffinity(0)) // n)
        for rank in range(n):
            mine, theirs = context.Pipe()
            control_theirs, control_mine = context.Pipe(duplex=False)
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(n),
                "GLOO_SOCKET_IFNAME": "lo",  # nobody outside this machine may reach a rank
                "NCCL_SOCKET_IFNAME": "lo",
            }
            process = context.Process(
                target=_rank_main, args=(rank, theirs, control_theirs, env, num_threads), daemon=True, name=f"rank {rank}"
            )
            with _main_module_hidden():
                process.start()
            theirs.close()
            control_theirs.close()
            self._messages.append(mine)
            self._control.append(control_mine)
            self._processes.append(process)
        # A dropped session ends its ranks like a closed one.
        self._finalizer = weakref.finalize(
            self, _end, list(self._processes), [*self._messages, *self._control], str(self._folder)
        )

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [p.pid for p in self._processes if p.pid is not None]

    def connect(self, device: str) -> None:
        self.call(_connect_from_env, device, str(self._folder / "rendezvous"))

    def _send(self, rank: int, blob: bytes) -> None:
        with contextlib.suppress(OSError):  # dead: _next reports it
            self._messages[rank].send_bytes(blob)

    def _next(self, pending: set[int], timeout: float) -> tuple[int, Message] | None:
        by_pipe = {self._messages[rank]: rank for rank in pending}
        ready = wait([*by_pipe, *(p.sentinel for p in self._processes)], timeout)
        for handle in ready:  # what a rank still said before what became of it
            if isinstance(handle, Connection):
                rank = by_pipe[handle]
                try:
                    return rank, handle.recv()
                except (EOFError, OSError):
                    return rank, self._death(rank)
        for rank, process in enumerate(self._processes):
            if process.sentinel in ready:
                return rank, self._death(rank)
        return None

    def _death(self, rank: int) -> Message:
        process = self._processes[rank]
        process.join(2)
        code = process.exitcode
        name = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        return ("dead", name)

    def _ask_to_stop(self) -> None:
        for control in self._control:
            with contextlib.suppress(OSError):
                control.send_bytes(b"stop")

    def _kill(self) -> None:
        self._finalizer()


def local_ranks_warm_up() -> None:
    """Start importing torch and AutoModel in the fork server now, in the background, so that ranks start at once later."""
    from multiprocessing import forkserver

    _fork_server()
    with _main_module_hidden():
        forkserver.ensure_running()


def _fork_server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _connect_from_env(device: str, rendezvous: str) -> None:
    connect(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), device, rendezvous)


def _end(processes: list[BaseProcess], pipes: list[Connection], folder: str) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join(5)
    for pipe in pipes:
        pipe.close()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from importing the user's script in each rank: functions travel by value."""
    main = sys.modules["__main__"]
    saved = {name: main.__dict__.pop(name) for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__dict__["__spec__"] = None
    try:
        yield
    finally:
        del main.__dict__["__spec__"]
        main.__dict__.update(saved)


class _Interrupts:
    count = 0


@contextlib.contextmanager
def _count_interrupts(on_first: Callable[[], None] | None = None) -> Iterator[_Interrupts]:
    """Count Ctrl-C instead of raising: raised between two sends it would leave the ranks out of step.

    With `on_first` (one rank, nobody to be out of step with) only the first is held back; the second raises.
    """
    interrupts = _Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def handler(*_: Any) -> None:
        interrupts.count += 1
        if on_first is not None:
            if interrupts.count > 1:
                raise KeyboardInterrupt
            print("interrupt: stopping at the next boundary (again: at once)", file=sys.stderr)
            on_first()

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)


def _source_of_cell(fn: Callable[..., Any]) -> str | None:
    if getattr(fn, "__module__", "") != "__main__" or not inspect.isfunction(fn):
        return None
    try:
        return "\n" * (fn.__code__.co_firstlineno - 1) + inspect.getsource(fn)
    except (OSError, TypeError):
        return None


def _load_error(data: Message) -> BaseException:
    blob, text = data
    if blob is None:
        return RuntimeError(f"a rank raised an error that cannot be pickled:\n{text}")
    error = pickle.loads(blob)
    assert isinstance(error, BaseException)
    return error


def _first_error(errors: dict[int, Message]) -> BaseException:
    """The error of the lowest rank that failed on its own account."""
    loaded = {rank: _load_error(data) for rank, data in sorted(errors.items())}
    rank = next((r for r, e in loaded.items() if not isinstance(e, PeerFailed)), min(loaded))
    error = loaded[rank]
    error.rank = rank  # type: ignore[attr-defined]
    error.add_note(f"raised on rank {rank}:\n{errors[rank][1]}")
    return error


_at_line_start = {"stdout": True, "stderr": True}


def _write(stream: str, text: str, rank: int | None) -> None:
    target = getattr(sys, stream)
    if rank is None:
        target.write(text)
        return
    for line in text.splitlines(True):
        if _at_line_start[stream]:
            target.write(f"[rank {rank}] ")
        target.write(line)
        _at_line_start[stream] = line.endswith("\n")
