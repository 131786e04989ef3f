"""The live view of a run: figures redrawn at most once a second, what is going on in words, and the buttons.

It holds no session: whoever owns it (workbenches.py) says what happened and what may be pressed, and hears what was pressed.
"""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.checks import check_whole
from toolkit.errors import SpecError
from toolkit.widgets import ERROR_COLOUR, dtype_picker, text_widget

if TYPE_CHECKING:
    from toolkit.memory_report import MemoryReport
    from toolkit.records import StepRecord

#: The page falls behind, and buttons act late, when plotly figures are redrawn more often.
REDRAW_SECONDS = 1.0
#: When a step is measured under the memory ledger, which takes about as long as the step.
MEASURE = {"at each output dtype": "dtype", "before every step": "step", "never": "never"}
_BUTTONS = {
    "step": ("Step", "take one GRPO step"),
    "run": ("Run", "take as many steps as it says beside"),
    "pause": ("Pause", "after the step under way; again to go on"),
    "stop": ("Stop", "at the next boundary; a step under way is dropped"),
    "restart": ("Restart", "bring lost ranks back, from the last save"),
    "close": ("Close session", "end the ranks; figures stay"),
}


class LiveFigure:
    """An output whose content is replaced in place, from any thread, at most once every `REDRAW_SECONDS`."""

    def __init__(self) -> None:
        import ipywidgets

        self.output = ipywidgets.Output()
        self._lock = threading.Lock()
        self._drawn, self._due = float("-inf"), False
        self._make: Callable[[], dict[str, Any]] | None = None

    def show(self, make: Callable[[], dict[str, Any]]) -> None:
        """Show the bundle that `make` returns: now, or, if it was just drawn, the newest one a bit later."""
        with self._lock:
            self._make = make
            wait = self._drawn + REDRAW_SECONDS - time.monotonic()
            if wait <= 0:
                self._draw()
            elif not self._due:
                self._due = True
                timer = threading.Timer(wait, self._draw_later)
                timer.daemon = True
                timer.start()

    def _draw_later(self) -> None:
        with self._lock:
            self._draw()

    def _draw(self) -> None:
        assert self._make is not None, "drawn only after show"
        self._drawn, self._due = time.monotonic(), False
        self.output.outputs = (self._make(),)


class Dashboard:
    """Buttons, output dtype, status and figures. `widget` shows it."""

    def __init__(self, on_press: Mapping[str, Callable[[], None]], on_dtype: Callable[[str], None]) -> None:
        """Make the view.

        Args:
            on_press: called when a button is pressed: step, run, pause, stop, restart, close.
            on_dtype: called with an output dtype that the user picked.
        """
        import ipywidgets

        self.buttons = {
            name: ipywidgets.Button(description=label, tooltip=help_text, disabled=True, layout={"width": "auto"})
            for name, (label, help_text) in _BUTTONS.items()
        }
        for name, button in self.buttons.items():
            # A second click of a double one may come before the page has seen the button disabled.
            button.on_click(lambda button, name=name: None if button.disabled else on_press[name]())
        self.steps = text_widget("10")
        self.steps.description, self.steps.layout.width = "Steps", "130px"
        self.steps.style = {"description_width": "initial"}
        self.steps.observe(lambda _: self._check_steps(), names="value")
        self._told = False  # the picker follows the session; nobody picked
        self.picker = dtype_picker()
        self.picker.observe(lambda change: on_dtype(change["new"]) if not self._told else None, names="value")
        self.measure = ipywidgets.Dropdown(options=list(MEASURE.items()), description="Measure memory", value="dtype")
        self.measure.style = {"description_width": "initial"}
        self._running = False
        self._error = ipywidgets.HTML()
        self._status = ipywidgets.HTML()
        self.figures = {"run": LiveFigure(), "memory": LiveFigure()}
        row = {"flex_flow": "row wrap", "align_items": "center"}
        first = ipywidgets.Box(
            [self.buttons["step"], self.steps, *(self.buttons[b] for b in list(_BUTTONS)[1:])], layout=row
        )
        second = ipywidgets.Box([self.picker, self.measure], layout=row)
        figures = [figure.output for figure in self.figures.values()]
        self.controls = ipywidgets.VBox([first, second])
        self.status = ipywidgets.VBox([self._status, self._error])
        self.widget = ipywidgets.VBox([self.controls, *figures])

    # ---- what may be pressed

    def enable(self, *names: str) -> None:
        """Enable these buttons and disable the others; the output dtype can be picked whenever there is a session."""
        for name, button in self.buttons.items():
            button.disabled = name not in names
        self._running = "run" not in names
        self.picker.disabled = self.measure.disabled = not {"stop", "step"} & set(names)
        self._check_steps()

    def _check_steps(self) -> None:
        number = self.number_of_steps()
        self.buttons["run"].disabled = self._running or isinstance(number, str)
        if isinstance(number, str):
            self.say_error(number)
        elif self.error.startswith("steps="):
            self.say_error("")

    def number_of_steps(self) -> int | str:
        """How many steps Run takes; or what is wrong with what was typed."""
        text = self.steps.value.strip()
        try:
            return check_whole("steps", int(text) if text.lstrip("+-").isdecimal() else text)
        except SpecError as error:
            return str(error)

    def show_dtype(self, dtype: str) -> None:
        """Let the picker show what the session runs with."""
        self._told = True
        self.picker.value = dtype
        self._told = False

    # ---- what is going on

    def say(self, text: str) -> None:
        """Show a line of status."""
        self.text = text
        self._status.value = f"<div role='status' style='line-height:1.4'>{html.escape(text)}</div>"

    def say_error(self, text: str) -> None:
        """Show what went wrong, below the status; "" takes it away."""
        self.error = text
        self._error.value = f"<div role='alert' style='{ERROR_COLOUR}'>⚠ {html.escape(text)}</div>" if text else ""

    text = error = ""

    def draw(self, records: Sequence[StepRecord], memory: Mapping[int, MemoryReport]) -> None:
        """Show these records and, measured before so many steps, these reports."""
        from toolkit.dashboard_figures import bundle, run_figure, run_table

        if records:
            taken, measured = list(records), dict(memory)  # as they are now, whenever it is drawn

            def run() -> dict[str, Any]:
                return bundle(run_figure(taken, measured), run_table(taken, measured), taken[-1].headline)

            self.figures["run"].show(run)
        if memory:
            report = list(memory.values())[-1]
            self.figures["memory"].show(lambda: bundle(report.figure(), report._repr_html_(), report.headline))
