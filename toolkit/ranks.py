"""Ranks: start them, call a function on all of them, stream what they say, interrupt and stop them.

`Ranks.call` holds all the semantics; an engine (engines.py) only moves bytes.

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
import io
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import cloudpickle

from toolkit.background import Interrupts, count_interrupts
from toolkit.errors import PeerFailed, RanksLost, SessionClosed, SpecError
from toolkit.progress import Bars
from toolkit.sources import functions_in, show_source, source_of

# What a rank sends: a kind, then its data.  "out": stream, text.  "progress": description, done, total.
# "ok": packed result.  "err": pickled exception or None, traceback text.  "dead": why (made up by the engine).
Message = tuple[Any, ...]

# Calls on this rank are numbered as they begin, and a request to stop names the call it is for: sent in time, it may arrive
# before the call does, or after its end.
_current = 0
_stop_at: int | None = None
_emit: Callable[[Message], None] | None = None


def set_stop(call: int | None = None) -> None:
    """Ask a call on this rank to stop at its next boundary: the `call`-th of all, or None for the one that runs."""
    global _stop_at
    _stop_at = _current if call is None else call


@contextlib.contextmanager
def emitting_to(emit: Callable[[Message], None]) -> Iterator[None]:
    """Run a call on this rank: its messages go to `emit`."""
    global _emit, _current
    _current += 1
    _emit = emit
    try:
        yield
    finally:
        _emit = None


def stop_requested() -> bool:
    """Whether Ctrl-C was pressed during this call. Long loops on a rank ask at boundaries where stopping is safe."""
    return _stop_at == _current


def report_progress(description: str, done: int, total: int) -> None:
    """Show progress in the calling cell. Call it on one rank only."""
    if _emit is not None:
        _emit(("progress", description, done, total))


# ---- on a rank ------------------------------------------------------------------------------------------------------


class _Stream(io.TextIOBase):
    def __init__(self, emit: Callable[[Message], None], name: str) -> None:
        self._emit, self._name, self._held = emit, name, ""

    def write(self, text: str) -> int:
        whole, newline, rest = (self._held + text).rpartition("\n")  # print writes in pieces: ranks must not mix in a line
        if newline:
            self._emit(("out", self._name, whole + newline))
        self._held = rest
        return len(text)

    def flush(self) -> None:
        if self._held:
            self._emit(("out", self._name, self._held))
        self._held = ""


def _pack(value: Any) -> bytes:
    packed: bytes = cloudpickle.dumps(value, protocol=5)
    return packed


def execute(blob: bytes, emit: Callable[[Message], None], pack: Callable[[Any], Any] = _pack) -> None:
    """Run one call on this rank and emit its answer, whatever happens. `pack` is undone by the engine's `_unpack`."""
    out, err = _Stream(emit, "stdout"), _Stream(emit, "stderr")
    try:
        with emitting_to(emit), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            fn, args, sources = pickle.loads(blob)
            for function, source in zip(functions_in((fn, args)), sources, strict=True):
                show_source(function, source)
            answer: Message = ("ok", pack(fn(*args)))
    except BaseException as error:  # KeyboardInterrupt and SystemExit too: the rank must outlive what it runs
        text = "".join(traceback.format_exception(type(error), error, _skip(error.__traceback__)))
        answer = ("err", _dump_error(error), text)
    out.flush()
    err.flush()
    emit(answer)


def _dump_error(error: BaseException) -> bytes | None:
    """An exception as its class, arguments and attributes: many classes' own __init__ cannot be called with `args`."""
    try:
        blob: bytes = cloudpickle.dumps((type(error), error.args, error.__dict__))
        pickle.loads(blob)
        return blob
    except Exception:  # whatever it holds, its text arrives
        return None


def _skip(tb: TracebackType | None) -> TracebackType | None:
    return tb.tb_next if tb is not None and tb.tb_next is not None else tb


# ---- in the kernel --------------------------------------------------------------------------------------------------


class Ranks:
    """A gang of ranks. `call` runs a function on each; `close` ends them."""

    n: int
    #: Seconds the peers of a rank that raised have to return before the gang is killed.
    grace_seconds = 5.0
    #: Seconds ranks have to reach a boundary after Ctrl-C before the gang is killed.
    interrupt_grace_seconds = 60.0
    #: Seconds after the first rank was done until the ones still busy are named.
    patience_seconds = 10.0

    def __init__(self) -> None:
        self.lost: RuntimeError | None = None
        #: Ctrl-C came when the work of the last call was already done.
        self.interrupted_late = False
        self._lock = threading.RLock()
        self._num_calls = 0

    # An engine supplies these, and its own `_unpack` if its ranks pack results otherwise.
    def _send(self, rank: int, blob: bytes) -> None:
        raise NotImplementedError

    def _next(self, pending: set[int], timeout: float) -> tuple[int, Message] | None:
        raise NotImplementedError

    def _ask_to_stop(self, call: int) -> None:
        raise NotImplementedError

    def _kill(self) -> None:
        raise NotImplementedError

    @staticmethod
    def _unpack(data: Any) -> Any:
        return pickle.loads(data)

    def connect(self, device: str) -> None:
        """Form the process group over all ranks."""
        raise NotImplementedError

    def raise_if_lost(self) -> None:
        """Raise what ended the ranks, if they are gone."""
        if self.lost is not None:
            raise self.lost

    def exclusively(self) -> contextlib.AbstractContextManager[bool]:
        """Hold the ranks over several calls; other threads wait."""
        return self._lock

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
            KeyboardInterrupt: after Ctrl-C, once every rank has stopped at a boundary. If the work was done by then, the
                results are returned and `raise_late_interrupt` raises it.
            Exception: whatever `fn` raised, with `.rank` and the rank's traceback as a note.
        """
        with self._lock:
            self.raise_if_lost()
            sources = [source_of(function) for function in functions_in((fn, args))]
            try:
                blob = cloudpickle.dumps((fn, args, sources), protocol=5)
            except (TypeError, pickle.PicklingError) as error:
                raise SpecError(
                    f"what was given cannot be sent to the ranks ({error}). A function for them must not hold the session, "
                    "an open file, a lock or the like; it gets the policy as its first argument."
                ) from None
            with Bars() as bars, count_interrupts() as interrupts:
                ok, errors = self._drain(blob, bars, interrupts)
        if any(isinstance(_load_error(e), KeyboardInterrupt) for e in errors.values()):
            raise KeyboardInterrupt("stopped at a boundary; what was under way was dropped, and nothing is half done")
        if errors:
            raise _first_error(errors)
        self.interrupted_late |= interrupts.count > 0
        return [ok[r] for r in range(self.n)]

    def raise_late_interrupt(self) -> None:
        """Raise the KeyboardInterrupt that came after the last boundary of a call, once its results are safe."""
        if self.interrupted_late:
            self.interrupted_late = False
            raise KeyboardInterrupt("the call had just finished when Ctrl-C came")

    def _drain(self, blob: bytes, bars: Bars, interrupts: Interrupts) -> tuple[dict[int, Any], dict[int, Message]]:
        ok: dict[int, Any] = {}
        errors: dict[int, Message] = {}
        pending = set(range(self.n))
        deadline, hint_at, seen = float("inf"), float("inf"), 0
        self._num_calls += 1
        for rank in range(self.n):
            self._send(rank, blob)
        while pending:
            if interrupts.count > seen:
                seen = interrupts.count
                if seen > 1:
                    self._abort(f"Ctrl-C was pressed twice while rank {_list(pending)} was busy", errors)
                if not interrupts.quiet:
                    sys.stderr.write("interrupt: waiting for the ranks' next boundary (again: kill them)\n")
                deadline = time.monotonic() + self.interrupt_grace_seconds
                self._ask_to_stop(self._num_calls)
            if time.monotonic() > deadline:
                self._abort(
                    f"{_failure(errors)}rank {_list(pending)} did not return after {'Ctrl-C' if seen else 'it'}", errors
                )
            if time.monotonic() > hint_at and not errors:
                hint_at = float("inf")
                sys.stderr.write(
                    f"rank {_list(pending)} is still busy, {self.patience_seconds:g} seconds after the first was done. If "
                    "it waits in a collective (an all_reduce, a forward), nobody will join it: Ctrl-C twice ends them all.\n"
                )
            item = self._next(pending, 0.1)
            if item is None:
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
                    if not ok:
                        hint_at = time.monotonic() + self.patience_seconds
                    ok[rank] = self._unpack(data[0])
                else:
                    errors[rank] = tuple(data)
                    deadline = min(deadline, time.monotonic() + self.grace_seconds)
        return ok, errors

    def _abort(self, why: str, errors: dict[int, Message], rank: int | None = None) -> None:
        if isinstance(self.lost, SessionClosed):  # closed from another thread; that is why they are gone
            raise self.lost
        message = f"{why}; all ranks were stopped and their state is lost. session.restart() goes back to the last save."
        self.lost = RanksLost(message, rank)
        self._kill()
        cause = _first_error(errors) if errors else None
        raise self.lost from cause

    def close(self) -> None:
        """End the ranks and free what they hold. Calling it again does nothing."""
        if self.lost is None or not isinstance(self.lost, SessionClosed):
            self.lost = SessionClosed("this session is closed; launch a new one.")
            self._kill()


def _load_error(data: Message) -> BaseException:
    blob, text = data
    if blob is None:
        return RuntimeError(f"a rank raised an error that cannot travel:\n{text}")
    kind, args, attributes = pickle.loads(blob)
    error = kind.__new__(kind, *args)
    assert isinstance(error, BaseException)
    error.__dict__.update(attributes)
    return error


def _first_error(errors: dict[int, Message]) -> BaseException:
    """The error of the lowest rank that failed on its own account."""
    loaded = {rank: _load_error(data) for rank, data in sorted(errors.items())}
    rank = next((r for r, e in loaded.items() if not isinstance(e, PeerFailed)), min(loaded))
    error = loaded[rank]
    error.rank = rank  # type: ignore[attr-defined]
    error.add_note(f"raised on rank {rank}:\n{errors[rank][1]}")
    return error


def _failure(errors: dict[int, Message]) -> str:
    """Who raised what, to begin a sentence with; nothing if nobody did."""
    if not errors:
        return ""
    error = _first_error(errors)
    return f"rank {error.rank} raised {type(error).__name__}: {error}, and "  # type: ignore[attr-defined]


def _list(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


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
