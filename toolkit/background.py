"""Ctrl-C, counted instead of raised; and what stands for it, and for a cell's progress bars, in a thread of its own.

A notebook's widgets cannot wait for a step, so they run it in a thread, which Ctrl-C never reaches and whose bars would
show in some other cell. Wrapped in `Background`, the same calls can be stopped from any thread and say how far they are.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

_here = threading.local()


class Interrupts:
    """How often Ctrl-C was pressed, or whether `Background.stop` was called."""

    count = 0
    #: Asked by `Background.stop`, whose caller says himself what is going on.
    quiet = False


class Background:
    """A piece of work in a thread other than the main one. Enter it there; call `stop` from anywhere.

    Args:
        on_progress: called in the working thread with a task's description, parts done and parts in all, in place of bars.
    """

    def __init__(self, on_progress: Callable[[str, int, int], None] | None = None) -> None:
        self.on_progress = on_progress
        self._lock = threading.Lock()
        self._handlers: list[Callable[[], None]] = []
        self._asked = False
        #: Whether `stop` was called.
        self.stopped = False

    def __enter__(self) -> Self:
        assert threading.current_thread() is not threading.main_thread(), "Ctrl-C reaches the main thread by itself"
        _here.work = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        _here.work = None

    def stop(self) -> None:
        """Ask the work to stop at its next boundary, once, as Ctrl-C does: `KeyboardInterrupt` is raised in its thread."""
        with self._lock:
            self.stopped = True
            if self._handlers:
                self._handlers[-1]()
            else:  # between two calls, or before the first: the next one does not begin
                self._asked = True

    @contextlib.contextmanager
    def _heard_by(self, handler: Callable[[], None]) -> Iterator[None]:
        with self._lock:
            if self._asked:
                self._asked = False
                raise KeyboardInterrupt("stopped before it began")
            self._handlers.append(handler)
        try:
            yield
        finally:
            with self._lock:
                self._handlers.pop()


def current() -> Background | None:
    """The background work that this thread is in."""
    return getattr(_here, "work", None)


@contextlib.contextmanager
def uninterrupted_imports() -> Iterator[None]:
    """Hold Ctrl-C back until the imports inside are done, since libraries swallow it in theirs. A second one raises."""
    with count_interrupts(on_first=lambda: None) as interrupts:
        yield
    if interrupts.count:
        raise KeyboardInterrupt("stopped after the imports")


@contextlib.contextmanager
def count_interrupts(on_first: Callable[[], None] | None = None) -> Iterator[Interrupts]:
    """Count Ctrl-C instead of raising: raised between two sends it would leave the ranks out of step.

    With `on_first` (one rank, nobody to be out of step with) only the first is held back; the second raises.
    """
    interrupts = Interrupts()
    work = current()
    if work is not None:

        def heard() -> None:
            if interrupts.count == 0:  # a second press of a button is impatience, and not yet a wish to lose the session
                interrupts.count, interrupts.quiet = 1, True
                if on_first is not None:
                    on_first()

        with work._heard_by(heard):
            yield interrupts
        return
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def handler(*_: Any) -> None:
        interrupts.count += 1
        if on_first is not None:
            if interrupts.count > 1:
                raise KeyboardInterrupt
            sys.stderr.write("interrupt: stopping at the next boundary (again: at once)\n")
            on_first()

    previous = signal.signal(signal.SIGINT, handler)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, previous)
