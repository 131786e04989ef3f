"""The workbench: the launcher's form and the live view of what it launched, over one thread that does the work.

Buttons only leave word: the thread takes one job at a time (a launch, a step, a switch), and each step asks for the next.
So the page never waits, a switch of the output dtype comes between two steps, and Stop reaches into the one under way.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.background import Background
from toolkit.dashboard import Dashboard
from toolkit.errors import FRIENDLY, RanksLost
from toolkit.launcher import Launcher

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from toolkit.memory_report import MemoryReport
    from toolkit.records import StepRecords
    from toolkit.session import Session
    from toolkit.spec import PolicySpec

#: Between two updates of the status line by the progress of one job.
_STATUS_SECONDS = 0.25


def workbench(**fields: Any) -> Workbench:
    """A form that launches a session and a live view of its GRPO steps, in the notebook: make it a cell's last line.

    Args:
        **fields: arguments of `launch`, to begin with; those that the form does not show are passed on as they are.

    Raises:
        SpecError: a field that does not exist, or a value that the form would refuse by itself.
    """
    return Workbench(fields)


class Workbench:
    """Made by `workbench`. `session` is what was launched, `records` its steps; `close()` ends both.

    Everything it does is one line of Python as well: `launch`, `session.grpo_step(n)`, `session.output_dtype = ...`.
    """

    def __init__(self, fields: dict[str, Any]) -> None:
        import ipywidgets

        #: What was launched; None before and after.
        self.session: Session | None = None
        #: Memory reports by the number of steps taken before each was measured.
        self.memory: dict[int, MemoryReport] = {}
        #: The last exception of a job, as it was raised.
        self.error: BaseException | None = None
        self.launcher = Launcher(fields, self._launch, self.stop)
        pressed = {"step": lambda: self._run(1), "run": self._run_many, "pause": self._pause, "stop": self.stop}
        self.dashboard = Dashboard({**pressed, "restart": self._restart, "close": self._close_session}, self._switch)
        self._lock = threading.RLock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="workbench")
        self._jobs: list[Background] = []  # the one under way and those that wait for it
        self._idle = threading.Event()
        self._idle.set()
        self._left = 0  # steps still to take
        self._paused = False
        self._closed = False
        self._past: StepRecords | None = None  # of a session that was closed
        self._farewell = ""  # what to say when the job is done whose session a cell has closed
        self._said = 0.0
        self._title = ipywidgets.HTML("<b>Workbench</b>")
        parts = [self._title, self.launcher.widget, self.dashboard.status, self.dashboard.widget]
        self.widget = ipywidgets.VBox(parts, layout={"padding": "4px", "overflow": "visible"})
        self.widget.add_class("toolkit-workbench")
        self._enable()

    # ---- for Python

    @property
    def records(self) -> StepRecords:
        """The records of the steps taken, in the last session if there is none."""
        from toolkit.records import StepRecords

        if self.session is not None:
            return StepRecords(self.session._records)
        return self._past if self._past is not None else StepRecords()

    def figure(self) -> go.Figure:
        """The run as it is now, as one plotly figure.

        Raises:
            ValueError: no step was taken.
        """
        from toolkit.dashboard_figures import run_figure

        if not self.records:
            raise ValueError("there is nothing to draw: no step was taken.")
        return run_figure(self.records, self.memory)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is under way; whether that came within `timeout` seconds. For scripts: it blocks the page."""
        return self._idle.wait(timeout)

    def stop(self) -> None:
        """Stop the launch or step under way at its next boundary, as Ctrl-C does, and take no more."""
        with self._lock:
            self._left, self._paused = 0, False
            for work in self._jobs[:1]:  # what waits behind it is a dtype picked before Stop, and still wanted
                self.dashboard.say("Stopping at the next boundary…")
                work.stop()
            if not self._jobs and self.session is not None:  # paused
                self.dashboard.say("Stopped.")
                self._enable()

    def close(self) -> None:
        """Stop what runs, end the ranks, and take no more input. Figures stay. Calling it again does nothing."""
        self.stop()
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._pool.shutdown(wait=True)
        self.launcher.close()
        self._end_session()
        self._enable()
        self.dashboard.say("Closed. tk.workbench() makes another one.")

    def __repr__(self) -> str:
        state = "closed" if self._closed else "nothing launched" if self.session is None else repr(self.session)
        return f"Workbench({state})"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        table = ""
        if self.records:
            from toolkit.dashboard_figures import run_table  # imports torch: a form is shown at once, without it

            table = run_table(self.records, self.memory)
        data = dict(self.widget._repr_mimebundle_())
        return {**data, "text/plain": repr(self), "text/html": f"<div><b>{html.escape(repr(self))}</b>{table}</div>"}

    # ---- what was pressed

    def _launch(self, arguments: dict[str, Any]) -> None:
        def job() -> str:
            from toolkit.launching import launch

            session = launch(**arguments)
            session.on_change(self._changed)
            session.on_close(self._closed_elsewhere)
            self.session, self.memory, self._past = session, {}, None
            self.dashboard.show_dtype(session.output_dtype)
            self._show_session()
            return f"Launched {session!r}."

        self._begin("Launching", job)

    def _run_many(self) -> None:
        number = self.dashboard.number_of_steps()
        if isinstance(number, int):
            self._run(number)

    def _run(self, number: int) -> None:
        with self._lock:
            if self._left == 0:
                self._left, self._paused = number, False
                self._begin_step()

    def _pause(self) -> None:
        with self._lock:
            self._paused = not self._paused
            if self._paused:
                self.dashboard.say("Pausing after this step…")
            elif not self._jobs:
                self._begin_step()
            self._enable()

    def _switch(self, dtype: str) -> None:
        session = self.session
        if session is None:
            return

        def job() -> str:
            try:
                session.set_live(output_dtype=dtype)
            finally:
                self.dashboard.show_dtype(session.output_dtype)
            return f"{dtype} outputs from the next step on."

        self._begin("Switching", job)

    def _restart(self) -> None:
        session = self.session
        if session is None:
            return

        def job() -> str:
            said = session.restart()
            taken = len(session._records)
            self.memory = {before: report for before, report in self.memory.items() if before <= taken}
            self.dashboard.draw(session._records, self.memory)
            return _sentence(said)

        self._begin("Restarting", job)

    def _close_session(self) -> None:
        def job() -> str:
            self._end_session()
            self._show_session()
            return "The session is closed. Launch another one, also with other settings."

        self._begin("Closing", job)

    def _closed_elsewhere(self) -> None:
        """Return to the form when a cell has closed the session."""
        with self._lock:
            if self.session is not None:
                dropped = f" with {self._left} steps to go" if self._left else ""
                said = f"The session was closed{dropped}. Launch another one, also with other settings."
                self._farewell = said if self._jobs else ""
                self._left, self._past, self.session = 0, self.records, None
                self._show_session()
                self.dashboard.say(said)
                self._enable()

    def _changed(self, spec: PolicySpec) -> None:
        self.dashboard.show_dtype(spec.output_dtype)

    # ---- jobs

    def _begin(self, doing: str, job: Callable[[], str]) -> None:
        """Do a job in the thread; what it returns is the status afterwards."""
        with self._lock:
            if self._closed:
                return
            work = Background(lambda *progress: self._progress(work, doing, *progress))
            self._jobs.append(work)
            self._idle.clear()
            self._enable()
            self._pool.submit(self._perform, doing, job, work)

    def _progress(self, work: Background, doing: str, description: str, done: int, total: int) -> None:
        if time.monotonic() - self._said > _STATUS_SECONDS and not work.stopped:
            self._said = time.monotonic()
            self.dashboard.say(f"{doing}: {description}, {done} of {total}")

    def _perform(self, doing: str, job: Callable[[], str], work: Background) -> None:
        self.error = None
        self.dashboard.say_error("")
        self.dashboard.say(f"{doing}…")
        try:
            with work:
                said = job()
        except KeyboardInterrupt:
            said = f"{doing}: stopped; nothing of it was kept."
        except BaseException as error:  # whatever it is, the user must see it
            self.error, self._left, said = error, 0, f"{doing} failed."
            text = str(error) if isinstance(error, FRIENDLY) else f"{type(error).__name__}: {error}"
            self.dashboard.say_error(text + (" Or press Restart." if isinstance(error, RanksLost) else ""))
        with self._lock:
            self._jobs.remove(work)
            if self.session is None and self._farewell:  # closed by a cell in the middle of this job
                said, self._farewell = self._farewell, ""
            if self._left and self._paused:
                said = f"Paused, {self._left} steps left. {said}"
            self.dashboard.say(said)
            if self._left and not self._paused and not self._jobs:
                self._begin_step()
            self._enable()
            if not self._jobs:
                self._idle.set()

    def _begin_step(self) -> None:
        session = self.session
        assert session is not None, "Run and Step are enabled only while there is a session"
        number = len(session._records) + 1
        if self._is_due(session):
            self._begin(f"Measuring the memory of step {number}", lambda: self._measure(session))
        else:
            self._begin(f"Step {number}", lambda: self._step(session))

    def _measure(self, session: Session) -> str:
        report = self.memory[len(session._records)] = session.memory()
        self.dashboard.draw(session._records, self.memory)
        return _sentence(report.headline)

    def _step(self, session: Session) -> str:
        taken = len(session._records)
        try:
            session.grpo_step()
        except KeyboardInterrupt:
            if len(session._records) == taken:  # else the step was done already when Stop was heard
                raise
        self.dashboard.draw(session._records, self.memory)
        with self._lock:
            self._left = max(0, self._left - 1)
        return _sentence(session._records[-1].headline)

    def _is_due(self, session: Session) -> bool:
        when, last = self.dashboard.measure.value, next(reversed(self.memory), None)
        if when == "step":
            return last != len(session._records)
        return when == "dtype" and (last is None or self.memory[last].output_dtype != session.output_dtype)

    # ---- what there is

    def _enable(self) -> None:
        """Enable the buttons that make sense now."""
        session = self.session
        if self._closed or session is None:
            names = []
        elif self._left or self._jobs:
            names = ["pause", "stop"] if self._left else ["stop"]
        elif not session.is_open:
            names = ["restart", "close"]
        else:
            names = ["step", "run", "close"]
        self.dashboard.enable(*names)
        self.dashboard.buttons["pause"].description = f"Resume ({self._left} left)" if self._paused else "Pause"
        self.launcher.hold(bool(self._jobs) or session is not None, launching=bool(self._jobs) and session is None)
        self.dashboard.controls.layout.display = "none" if session is None else ""

    def _show_session(self) -> None:
        """The form while there is no session, its settings in a line while there is one."""
        session = self.session
        self.launcher.widget.layout.display = "none" if session is not None else ""
        about = ""
        if session is not None:
            spec, ranks = session.spec, "1 rank" if session.num_ranks == 1 else f"{session.num_ranks} ranks"
            about = f": {Path(str(spec.model)).name}, {ranks}, {spec.precision} compute, {spec.logprob_mode} logprobs"
        self._title.value = f"<b>Workbench</b>{html.escape(about)}"

    def _end_session(self) -> None:
        if self.session is not None:
            self._past, session, self.session = self.records, self.session, None
            session.close()


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]
