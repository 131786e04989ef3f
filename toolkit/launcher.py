"""The launcher's form: every field checked as it is typed, the peak predicted, and a button that launches nothing wrong.

Callbacks of widgets may run on the kernel's thread or another, and the page waits for them: they check what is cheap, and
leave imports, lookups and predictions to a thread of the form's own.
"""

from __future__ import annotations

import contextlib
import html
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from toolkit.background import Background
from toolkit.errors import SpecError
from toolkit.form_checks import DEFAULTS, Known, check_alone, check_form, prediction_of, split_given, value_of
from toolkit.grpo_config import TASKS
from toolkit.layout import ModelFacts, model_facts
from toolkit.models import smollm2, smollm2_is_installed, tiny_policy
from toolkit.records import format_bytes
from toolkit.spec import Checkpointing, LogprobMode, dtype_name
from toolkit.widgets import ERROR_COLOUR, dtype_picker, field_with_message, text_widget

if TYPE_CHECKING:
    import ipywidgets

    from toolkit.memory_report import MemoryReport

#: Models by the name they are picked by; other texts are folders and hub ids.
NAMED_MODELS: dict[str, Callable[[], Path]] = {"tiny policy": tiny_policy, "SmolLM2-135M-Instruct": smollm2}
_CHECKPOINTING = {
    "none": False,
    "full (inside FSDP)": "full",
    "selective (inside FSDP)": "selective",
    "hf (outside FSDP)": "hf",
}
assert set(_CHECKPOINTING.values()) == {False, *get_args(Checkpointing)}
_LABELS = {
    "model": ("Model", "a name of the list, a folder, or a hub id"),
    "ranks": ("Ranks", "1: this kernel; more: processes, one per GPU or on CPU"),
    "output_dtype": ("Output dtype", "what every FSDP unit casts its outputs to; can change while running"),
    "tensor_parallel_size": ("Tensor parallel size", "ranks that share one copy of each layer"),
    "activation_checkpointing": ("Checkpointing", "activation checkpointing, and on which side of the FSDP unit"),
    "logprob_mode": ("Logprob mode", "all logits at once, in chunks, or none at all"),
    "task": ("Task", "a name of the list, or a .jsonl file of questions and answers"),
    "learning_rate": ("Learning rate", "of AdamW"),
    "num_prompts_per_step": ("Prompts per step", "over all ranks"),
    "num_generations_per_prompt": ("Generations per prompt", "the group whose mean reward is the baseline"),
    "max_new_tokens": ("Max new tokens", "of each completion"),
    "train_micro_batch_size": ("Micro-batch size", "sequences in one forward of a rank; empty: all at once"),
    "sequence_length": ("Predict at length", "tokens of each sequence, prompt and completion, in the predicted step"),
}
#: Seconds without typing before a model is looked up and a peak predicted.
PAUSE_SECONDS = 0.6
_SHOWN = ("activations", "logits", "parameters", "gradients", "optimizer")


class _Wanted:
    """A prediction for the form as it is; equal to another of the same training step."""

    def __init__(self, values: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        self._dtypes = list(dict.fromkeys(["float32", "bfloat16", values["output_dtype"]]))
        self._common = prediction_of(values, others)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Wanted) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def predict(self) -> dict[str, MemoryReport]:
        from toolkit.memory_predict import predict_settings

        return predict_settings({dtype: {"output_dtype": dtype} for dtype in self._dtypes}, **self._common)


class Launcher:
    """The form; `widget` shows it."""

    def __init__(
        self, fields: Mapping[str, Any], on_launch: Callable[[dict[str, Any]], None], on_stop: Callable[[], None]
    ) -> None:
        """Make the form.

        Args:
            fields: arguments of `launch` to begin with; those without a control are passed on as they are.
            on_launch: called with all arguments of `launch` when the button is pressed and nothing is wrong.
            on_stop: called when a launch under way shall stop.

        Raises:
            SpecError: a field that does not exist, or a value that is refused by itself.
        """
        import ipywidgets

        own, self._others = split_given(fields)
        self._on_launch = on_launch
        self._lock = threading.RLock()
        self._looked_up: dict[str, tuple[str, ModelFacts] | str] = {}
        self._num_gpus: int | None = None
        self._resolve_task: Callable[[Any], Any] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="launcher")
        self._work: Background | None = None
        self._timer: threading.Timer | None = None
        self._wanted: _Wanted | None = None  # what is, or is being, predicted
        self._closed = self._held = False
        #: What was predicted for the form as it is, by output dtype.
        self.predictions: dict[str, MemoryReport] = {}
        #: What is wrong, by field.
        self.messages: dict[str, str] = {}
        self.inputs = _inputs({**DEFAULTS, **{name: _typed(name, value) for name, value in own.items()}})
        if "task" in self._others:
            self.inputs["task"].value, self.inputs["task"].disabled = "given in Python", True
        self._notes = {name: ipywidgets.HTML() for name in [*self.inputs, ""]}
        self.button = ipywidgets.Button(description="Launch", button_style="primary", tooltip="Start the ranks")
        self.button.on_click(lambda _: self._launch())
        self.stop_button = ipywidgets.Button(description="Stop launch", tooltip="Start no ranks", disabled=True)
        self.stop_button.on_click(lambda _: on_stop())
        self.prediction = ipywidgets.HTML()
        rows = [field_with_message(widget, self._notes[name]) for name, widget in self.inputs.items()]
        grid = ipywidgets.Box(rows, layout={"display": "flex", "flex_flow": "row wrap", "align_items": "flex-start"})
        buttons = ipywidgets.HBox([self.button, self.stop_button])
        self.widget = ipywidgets.VBox([grid, self._notes[""], self.prediction, buttons])
        for name, widget in self.inputs.items():
            if name in own and (why := check_alone(name, self.values()[name])) is not None:
                raise SpecError(why)
            widget.observe(lambda _: self.refresh(), names="value")
        self._later(self._import)
        self.refresh()

    # ---- what is typed

    def values(self) -> dict[str, Any]:
        """The values of all fields; the model as it is named in the form."""
        return {name: value_of(name, widget.value) for name, widget in self.inputs.items()}

    def _model(self, typed: str) -> tuple[str, ModelFacts] | str | None:
        """Folder or id, and facts; or what is wrong with it; None where finding out takes a moment."""
        if typed in self._looked_up:
            return self._looked_up[typed]
        return None if _takes_a_moment(typed) else _look_up(typed)

    def refresh(self) -> None:
        """Check everything, show what is wrong beside its field, and predict once typing pauses."""
        with self._lock:
            values = self.values()
            typed = values["model"]
            self._looked_up = {k: v for k, v in self._looked_up.items() if k == typed or not isinstance(v, str)}
            found = self._model(typed) if typed else ""
            facts = None
            if isinstance(found, tuple):
                values["model"], facts = found
            resolve_task = None if "task" in self._others else self._resolve_task
            self.messages = check_form(values, self._others, Known(facts, self._num_gpus, resolve_task))
            if found and isinstance(found, str):
                self.messages["model"] = found
            for name, note in self._notes.items():
                note.value = _message(self.messages[name]) if name in self.messages else ""
            if found is None and "model" not in self.messages:
                self._notes["model"].value = "looking it up…"
            self.button.disabled = self._held or bool(self.messages) or found is None
            if not self._closed:
                self._want(None if self.messages else _Wanted(values, self._others))

    def _want(self, wanted: _Wanted | None) -> None:
        if wanted is not None and wanted == self._wanted:
            return
        self._wanted, self.predictions = wanted, {}
        if self._timer is not None:
            self._timer.cancel()
        if self._work is not None:
            self._work.stop()
        self.prediction.value = "" if wanted is None else "Predicting the peak…"
        if wanted is not None:
            self._timer = threading.Timer(PAUSE_SECONDS, self._later, [self._look_up_and_predict])
            self._timer.daemon = True
            self._timer.start()

    def _launch(self) -> None:
        self.refresh()
        if not self.button.disabled:
            values = self.values()
            del values["sequence_length"]
            found = self._model(values["model"])
            assert isinstance(found, tuple), "the button is enabled for models that were found"
            self._on_launch({**values, "model": found[0], **self._others})

    # ---- in the form's thread

    def _later(self, task: Callable[[], None]) -> None:
        with self._lock:
            if not self._closed:
                with contextlib.suppress(RuntimeError):  # the interpreter is ending, and takes no more work
                    self._pool.submit(self._run, task)

    def _run(self, task: Callable[[], None]) -> None:
        with Background(self._show_progress) as work:
            self._work = work
            try:
                task()
            except KeyboardInterrupt:  # the form has changed
                pass
            except Exception as error:  # whatever keeps it from being predicted, the launch may still go well
                self.prediction.value = _message(f"No prediction: {error}")
            finally:
                self._work = None

    def _show_progress(self, description: str, done: int, total: int) -> None:
        if self._wanted is not None:
            doing = "" if description.startswith("predicting") else f"{description}, "
            self.prediction.value = html.escape(f"Predicting the peak… ({doing}{done} of {total})")

    def _import(self) -> None:
        """Import what the checks of devices and tasks need."""
        from toolkit import imports  # noqa: F401 (it comes first to keep the others quiet)
        from toolkit.tasks import resolve_task  # isort: skip
        import torch

        with self._lock:
            self._num_gpus, self._resolve_task = torch.cuda.device_count(), resolve_task
        self.refresh()

    def _look_up_and_predict(self) -> None:
        typed, wanted = self.values()["model"], self._wanted
        if wanted is None:
            return
        if self._model(typed) is None:
            found = _look_up(typed)
            with self._lock:
                self._looked_up[typed], self._wanted = found, None
            self.refresh()
            return
        reports = wanted.predict()
        with self._lock:
            if wanted == self._wanted:
                self.predictions, self.prediction.value = reports, prediction_table(reports)

    def hold(self, held: bool, *, launching: bool = False) -> None:
        """Take no input for now; or take it again."""
        with self._lock:
            self._held = held or self._closed
            for name, widget in self.inputs.items():
                widget.disabled = self._held or (name == "task" and "task" in self._others)
            self.stop_button.disabled = not launching
            self.refresh()

    def close(self) -> None:
        """Stop predicting, and take no more input."""
        with self._lock:
            self._closed = True
            self._want(None)
        self.hold(True)
        self._pool.shutdown(wait=False, cancel_futures=True)  # what it predicts stops by itself


def _inputs(values: Mapping[str, Any]) -> dict[str, ipywidgets.Widget]:
    """A labelled control for each field."""
    import ipywidgets

    models = [name for name in NAMED_MODELS if name != "SmolLM2-135M-Instruct" or smollm2_is_installed()]
    inputs: dict[str, ipywidgets.Widget] = {}
    for name, value in values.items():
        label, help_text = _LABELS[name]
        if name == "output_dtype":
            inputs[name] = dtype_picker(value)
        elif name == "activation_checkpointing":
            inputs[name] = ipywidgets.Dropdown(options=list(_CHECKPOINTING.items()), value=value)
        elif name == "logprob_mode":
            inputs[name] = ipywidgets.Dropdown(options=list(get_args(LogprobMode)), value=value)
        else:
            offered = {"model": models, "task": list(TASKS)}.get(name)
            inputs[name] = text_widget("" if value is None else str(value), offered)
        inputs[name].description, inputs[name].tooltip = label, help_text
    return inputs


def _typed(name: str, value: Any) -> Any:
    """A value given in Python as the form holds it; refused if its control cannot."""
    if name == "output_dtype":
        return dtype_name(value, name)
    if name == "activation_checkpointing":
        value = "full" if value is True else value
        allowed: tuple[Any, ...] = tuple(_CHECKPOINTING.values())
    elif name == "logprob_mode":
        allowed = get_args(LogprobMode)
    else:
        return value
    if value not in allowed:
        raise SpecError(f"{name}={value!r} is not allowed; choose one of {', '.join(map(repr, allowed))}.")
    return value


def _takes_a_moment(typed: str) -> bool:
    """Whether finding a model asks the hub, or converts it."""
    if typed in NAMED_MODELS:
        return typed != "tiny policy"
    return typed.count("/") == 1 and not typed.startswith((".", "~", "/")) and not Path(typed).exists()


def _look_up(typed: str) -> tuple[str, ModelFacts] | str:
    try:
        model = str(NAMED_MODELS[typed]()) if typed in NAMED_MODELS else typed
        return model, model_facts(model)
    except (SpecError, FileNotFoundError, ModuleNotFoundError) as error:
        return str(error)


def prediction_table(reports: Mapping[str, MemoryReport]) -> str:
    """The predicted peaks as HTML: how much, when, and where it goes."""
    first = next(iter(reports.values()))
    head = "".join(f"<th scope='col' style='{_CELL}'>{name}</th>" for name in ("outputs", "peak", "in", *_SHOWN, "other"))
    rows = []
    for dtype, report in reports.items():
        shown = [report.categories[name] for name in _SHOWN]
        cells = [format_bytes(report.peak_bytes), report.peak_phase, *map(format_bytes, shown)]
        cells.append(format_bytes(report.peak_bytes - sum(shown)))
        texts = "".join(f"<td style='{_CELL}'>{text}</td>" for text in cells)
        rows.append(f"<tr><th scope='row' style='{_CELL}'>{dtype}</th>{texts}</tr>")
    return (
        f"<b>Predicted peak of a training step</b> of {first.num_sequences} × {first.sequence_length} tokens, "
        f"per rank<table style='line-height:1.5'><tr>{head}</tr>{''.join(rows)}</table>"
    )


_CELL = "padding:0 12px 0 0;text-align:right;white-space:nowrap"


def _message(text: str) -> str:
    return f"<span role='alert' style='{ERROR_COLOUR}'>⚠ {html.escape(text)}</span>"
