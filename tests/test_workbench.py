"""The workbench without a page: what is typed is checked, what is launched runs, switches, stops and ends; for real."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import toolkit as tk
from toolkit import dashboard
from toolkit.dashboard_figures import bundle, run_figure, run_table, switches, tokens_per_second
from toolkit.form_checks import field_named, prediction_of
from toolkit.mismatch import THRESHOLDS

from .conftest import SMALL
from .test_ranks import gone

FIELDS: dict[str, Any] = {**SMALL, "sequence_length": 16}


def until(condition: Callable[[], Any], seconds: float = 180.0) -> None:
    """Wait for something the workbench's thread does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def form() -> Iterator[tk.Workbench]:
    """A workbench in which nothing is ever launched."""
    bench = tk.workbench(**FIELDS)
    until(lambda: bench.launcher._num_gpus is not None)  # what the checks need is imported
    yield bench
    bench.close()


# ---- the form


def policy(**fields: Any) -> tk.PolicySpec:
    return tk.PolicySpec(**{"model": "m", **fields})


WRONG: list[tuple[str, str, Callable[[], Any] | str]] = [
    ("model", "nowhere", "model='nowhere': there is no such folder. (A hub id looks like 'Qwen/Qwen3-0.6B'.)"),
    ("model", "", lambda: policy(model="")),
    ("model", str(tk.tiny_policy().parent), "the folder has no config.json"),
    ("ranks", "two", lambda: tk.launch(model=tk.tiny_policy(), ranks="two")),  # type: ignore[arg-type]
    ("ranks", "0", lambda: tk.launch(model=tk.tiny_policy(), ranks=0)),
    ("ranks", "", "ranks='' must be a whole number of at least 1."),
    ("tensor_parallel_size", "1.5", lambda: policy(tensor_parallel_size="1.5")),
    ("tensor_parallel_size", "0", lambda: policy(tensor_parallel_size=0)),
    ("task", "algebra", lambda: tk.launch(model=tk.tiny_policy(), task="algebra")),
    ("task", "missing.jsonl", "task='missing.jsonl': there is no such file."),
    ("learning_rate", "fast", lambda: tk.GRPOConfig(learning_rate="fast")),  # type: ignore[arg-type]
    ("learning_rate", "-1", lambda: tk.GRPOConfig(learning_rate=-1.0)),
    ("learning_rate", "nan", lambda: tk.GRPOConfig(learning_rate=float("nan"))),
    ("num_prompts_per_step", "none", lambda: tk.GRPOConfig(num_prompts_per_step="none")),  # type: ignore[arg-type]
    ("num_generations_per_prompt", "1", lambda: tk.GRPOConfig(num_generations_per_prompt=1)),
    ("max_new_tokens", "9999", lambda: tk.launch(model=tk.tiny_policy(), max_new_tokens=9999)),
    ("train_micro_batch_size", "0", lambda: tk.GRPOConfig(train_micro_batch_size=0)),
    ("sequence_length", "1", "sequence_length=1 must be a whole number of at least 2."),
    ("sequence_length", "9999", "sequence_length=9999 is more than the 256 positions"),
]


@pytest.mark.parametrize(("field", "typed", "cause"), WRONG)
def test_a_bad_value_has_the_checks_own_message_beside_it_and_is_not_launched(
    field: str, typed: str, cause: Callable[[], Any] | str, form: tk.Workbench
) -> None:
    launcher = form.launcher
    control, note = launcher.inputs[field], launcher._notes[field]
    before = control.value
    control.value = typed
    if isinstance(cause, str):
        assert cause in launcher.messages[field]
    else:
        with pytest.raises(tk.SpecError) as error:
            cause()
        assert launcher.messages == {field: str(error.value)}
    assert "role='alert'" in note.value
    assert launcher.button.disabled
    launcher.button.click()
    assert form.session is None
    assert form.wait(0)
    control.value = before
    assert launcher.messages == {}
    assert note.value == ""
    assert not launcher.button.disabled


def test_a_combination_is_shown_at_the_field_it_names(form: tk.Workbench) -> None:
    inputs = form.launcher.inputs
    inputs["ranks"].value = "3"
    assert "num_prompts_per_step=8 does not divide over 3" in form.launcher.messages["num_prompts_per_step"]
    inputs["tensor_parallel_size"].value = "2"
    with pytest.raises(tk.SpecError) as error:
        tk.launch(model=tk.tiny_policy(), ranks=3, tensor_parallel_size=2)
    assert form.launcher.messages == {"ranks": str(error.value)}
    inputs["learning_rate"].value, inputs["max_new_tokens"].value = "x", "0"
    assert set(form.launcher.messages) == {"learning_rate", "max_new_tokens"}  # each by itself, before combinations
    for name, value in {"ranks": "1", "tensor_parallel_size": "1", "learning_rate": "1e-4", "max_new_tokens": "5"}.items():
        inputs[name].value = value
    assert not form.launcher.button.disabled


def test_a_message_that_names_no_field_of_the_form_is_shown_too() -> None:
    bench = tk.workbench(**FIELDS, sequence_parallel=True)
    assert "sequence_parallel=True does nothing at tensor_parallel_size=1" in bench.launcher.messages["tensor_parallel_size"]
    bench.close()
    assert field_named("cpu_offload=True does nothing on device='cpu'", {"ranks": 1}) == ""


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 2}, "'rank' is no field"),
        ({"ranks": "many"}, "ranks='many' must be a whole number"),
        ({"output_dtype": "int8"}, "output_dtype='int8' is not a dtype"),
        ({"logprob_mode": "none"}, "logprob_mode='none' is not allowed"),
        ({"activation_checkpointing": "half"}, "activation_checkpointing='half' is not allowed"),
        ({"num_generations_per_prompt": 1}, "num_generations_per_prompt=1"),
    ],
)
def test_bad_fields_given_in_python_raise(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(tk.SpecError, match=message):
        tk.workbench(**fields)


def test_a_hub_id_is_looked_up_in_the_background(form: tk.Workbench) -> None:
    model = form.launcher.inputs["model"]
    model.value = "nobody/nothing"
    assert form.launcher._notes["model"].value == "looking it up…"
    assert form.launcher.button.disabled
    until(lambda: "model" in form.launcher.messages)
    assert "the hub gave no config for that id either" in form.launcher.messages["model"]
    model.value = "tiny policy"
    assert not form.launcher.button.disabled


def test_the_prediction_is_predict_memorys(form: tk.Workbench) -> None:
    form.launcher.inputs["activation_checkpointing"].value = "hf"
    assert "Predicting" in form.launcher.prediction.value
    assert form.launcher.predictions == {}
    until(lambda: form.launcher.predictions)
    shared: dict[str, Any] = {"ranks": 1, "sequence_length": 16, "micro_batch_size": 32, "activation_checkpointing": "hf"}
    assert list(form.launcher.predictions) == ["float32", "bfloat16"]
    report = tk.predict_memory(tk.tiny_policy(), output_dtype="bfloat16", **shared)
    assert form.launcher.predictions["bfloat16"].categories == report.categories
    assert f"{report.peak_bytes / 2**20:.2f} MiB" in form.launcher.prediction.value
    form.launcher.inputs["learning_rate"].value = "2e-4"  # plays no part in it
    assert form.launcher.predictions
    form.launcher.inputs["activation_checkpointing"].value = False
    assert form.launcher.predictions == {}  # never beside a form it is not of


def test_what_is_predicted_is_a_ranks_share_of_the_step() -> None:
    values = {"model": "m", "ranks": 4, "tensor_parallel_size": 2, "sequence_length": 100, "output_dtype": "float32"}
    values |= {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "train_micro_batch_size": None}
    whole = prediction_of(values, {})
    assert (whole["micro_batch_size"], whole["num_micro_batches"], whole["temperature"]) == (16, 1, 1.0)
    shared = prediction_of({**values, "train_micro_batch_size": 3}, {"temperature": 0.7})
    assert (shared["micro_batch_size"], shared["num_micro_batches"], shared["temperature"]) == (3, 2, 0.7)


# ---- a run


def test_launch_step_switch_stop_and_close_on_two_ranks() -> None:
    bench = tk.workbench(**FIELDS, ranks=2, train_micro_batch_size=2)
    view, buttons = bench.dashboard, bench.dashboard.buttons
    bench.launcher.button.click()
    assert bench.launcher.button.disabled  # not twice
    assert bench.wait(180)
    assert bench.session is not None
    assert bench.error is None
    pids = bench.session._ranks.pids  # type: ignore[attr-defined]
    view.steps.value = "2"
    buttons["run"].click()
    assert not buttons["stop"].disabled
    assert buttons["step"].disabled
    assert bench.wait(180)
    assert [record.step for record in bench.records] == [1, 2]
    assert bench.records[-1].headline[1:] in view.text

    view.picker.value = "bfloat16"
    assert bench.wait(180)
    assert bench.session.output_dtype == "bfloat16"
    assert set(bench.session.units()["output_dtype"]) == {"bfloat16"}
    buttons["step"].click()
    assert bench.wait(180)
    assert bench.records[-1].output_dtype == "bfloat16"
    assert {before: report.output_dtype for before, report in bench.memory.items()} == {0: "float32", 2: "bfloat16"}

    view.steps.value = "50"
    buttons["run"].click()
    until(lambda: "training" in view.text)
    buttons["stop"].click()
    assert bench.wait(180)
    taken = len(bench.records)
    assert taken < 50
    assert "Stopping" not in view.text
    buttons["step"].click()
    assert bench.wait(180)
    assert len(bench.records) == taken + 1  # the session lives on

    data = bench.dashboard.figures["run"].output.outputs[0]["data"]
    assert set(data) == {"application/vnd.plotly.v1+json", "text/html", "text/plain"}
    bench.session.close()  # from a cell
    assert bench.session is None
    assert view.text == "The session was closed. Launch another one, also with other settings."
    assert view.buttons["step"].disabled
    assert not bench.launcher.button.disabled
    bench.close()
    bench.close()
    assert gone(pids)
    assert repr(bench) == "Workbench(closed)"
    assert len(bench.records) == taken + 1  # and what it did can still be read and drawn
    assert bench.figure().data
    assert bench._repr_mimebundle_()["text/html"].count("<tr>") > 1
    bench.launcher.button.click()
    assert bench.session is None


class Held:
    """A reward that waits until it is let go, so that a test can press buttons in mid-step."""

    def __init__(self) -> None:
        self.reached, self.let_go, self.fails = threading.Event(), threading.Event(), False

    def __call__(self, prompt: str, completion: str, answer: str) -> float:
        self.reached.set()
        assert self.let_go.wait(60)
        if self.fails:
            raise ZeroDivisionError("a bug of the user's")
        return float(completion == answer)


@pytest.fixture
def held() -> Iterator[tuple[tk.Workbench, Held]]:
    reward = Held()
    bench = tk.workbench(**FIELDS, task=tk.Task("held", [("1+2=", "3"), ("3+4=", "7")], reward=reward))
    assert bench.launcher.inputs["task"].disabled
    bench.dashboard.measure.value = "never"
    bench.launcher.button.click()
    assert bench.wait(180), bench.dashboard.text
    yield bench, reward
    reward.let_go.set()
    bench.close()


def test_buttons_pressed_in_mid_step(held: tuple[tk.Workbench, Held]) -> None:
    bench, reward = held
    buttons, view = bench.dashboard.buttons, bench.dashboard
    view.steps.value = "3"
    buttons["run"].click()
    assert reward.reached.wait(60)
    buttons["pause"].click()
    view.picker.value = "float16"  # from the next step on
    reward.let_go.set()
    assert bench.wait(180)
    assert len(bench.records) == 1
    assert buttons["pause"].description == "Resume (2 left)"
    assert bench.session is not None
    assert bench.session.output_dtype == "float16"
    reward.reached.clear(), reward.let_go.clear()
    buttons["pause"].click()
    assert reward.reached.wait(60)
    view.picker.value = "bfloat16"  # picked before Stop, so it is wanted all the same
    buttons["stop"].click()
    assert view.text == "Stopping at the next boundary…"
    reward.let_go.set()
    assert bench.wait(180)
    assert view.text == "bfloat16 outputs from the next step on."
    assert bench.session.output_dtype == view.picker.value == "bfloat16"
    assert len(bench.records) == 1
    assert not buttons["step"].disabled
    buttons["step"].click()
    assert bench.wait(180)
    assert [(record.step, record.output_dtype) for record in bench.records] == [(1, "float32"), (2, "bfloat16")]


def test_a_session_that_a_cell_closes_in_mid_run_is_said_to_be(held: tuple[tk.Workbench, Held]) -> None:
    bench, reward = held
    buttons, view = bench.dashboard.buttons, bench.dashboard
    view.steps.value = "3"
    buttons["run"].click()
    assert reward.reached.wait(60)
    assert bench.session is not None
    closing = threading.Thread(target=bench.session.close)
    closing.start()
    reward.let_go.set()
    closing.join(60)
    assert bench.wait(60)
    assert view.text == "The session was closed with 3 steps to go. Launch another one, also with other settings."
    for name in ("step", "run", "pause", "stop", "restart", "close"):
        assert buttons[name].disabled
        buttons[name].click()  # as a double click's second, on its way when the button was disabled
    assert bench.wait(1)
    assert view.text.startswith("The session was closed with 3 steps to go.")
    bench.launcher.button.click()
    assert bench.wait(180)
    assert view.text.startswith("Launched ")
    assert not bench.records


def test_what_a_step_raises_is_shown_and_the_session_goes_on(held: tuple[tk.Workbench, Held]) -> None:
    bench, reward = held
    reward.let_go.set()
    reward.fails = True
    bench.dashboard.buttons["run"].click()
    assert bench.wait(180)
    assert "ZeroDivisionError: a bug of the user&#x27;s" in bench.dashboard._error.value
    assert isinstance(bench.error, ZeroDivisionError)
    assert bench.dashboard.text == "Step 1 failed."
    reward.fails = False
    bench.dashboard.buttons["step"].click()
    assert bench.wait(180)
    assert bench.dashboard._error.value == ""
    assert len(bench.records) == 1
    bench.dashboard.steps.value = "some"
    assert "steps=&#x27;some&#x27; must be a whole number" in bench.dashboard._error.value
    assert bench.dashboard.buttons["run"].disabled
    bench.dashboard.steps.value = "2"
    assert bench.dashboard._error.value == ""
    assert not bench.dashboard.buttons["run"].disabled


def test_a_refused_switch_is_shown_and_the_picker_goes_back(tied_model: Any) -> None:
    bench = tk.workbench(**FIELDS, precision="float32", model=str(tied_model))
    bench.launcher.button.click()
    assert bench.wait(180)
    bench.dashboard.picker.value = "bfloat16"
    assert bench.wait(180)
    assert "without autocast: the head belongs to the root FSDP unit" in bench.dashboard.error
    assert bench.dashboard.picker.value == "float32"
    bench.close()


def test_lost_ranks_are_named_and_restart_brings_them_back() -> None:
    bench = tk.workbench(**FIELDS, ranks=2)
    bench.dashboard.measure.value = "never"
    bench.launcher.button.click()
    assert bench.wait(180)
    assert bench.session is not None
    buttons = bench.dashboard.buttons
    buttons["step"].click()
    assert bench.wait(180)
    os.kill(bench.session._ranks.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
    buttons["step"].click()
    assert bench.wait(180)
    assert "rank 1 died (killed by SIGKILL)" in bench.dashboard.error
    assert "press Restart" in bench.dashboard.error
    assert buttons["step"].disabled
    assert not buttons["restart"].disabled
    buttons["restart"].click()
    buttons["restart"].click()  # a double click is one
    assert bench.wait(180)
    lost = "1 step(s) were lost: nothing had been saved."
    assert bench.dashboard.text == f"Restarted from the model's own weights; {lost}"
    buttons["step"].click()
    assert bench.wait(180)
    assert len(bench.records) == 1
    buttons["close"].click()
    assert bench.wait(180)
    assert bench.session is None
    assert not bench.launcher.button.disabled  # the form is back
    bench.close()


def test_a_launch_that_fails_says_why_and_leaves_the_form(tmp_path: Any) -> None:
    (tmp_path / "kept").write_text("mine")
    bench = tk.workbench(**FIELDS, checkpoint_dir=tmp_path)
    bench.launcher.button.click()
    assert bench.wait(180)
    assert "is not empty, and saving would replace what is in it" in bench.dashboard.error
    assert bench.session is None
    assert not bench.launcher.button.disabled
    bench.close()


@pytest.mark.parametrize("when", ["at once", "while it starts"])
def test_a_launch_can_be_stopped(when: str) -> None:
    bench = tk.workbench(**FIELDS, ranks=2)
    bench.launcher.button.click()
    assert not bench.launcher.stop_button.disabled
    if when == "while it starts":
        until(lambda: "of 3" in bench.dashboard.text or "of 1" in bench.dashboard.text)
    bench.launcher.stop_button.click()
    assert bench.wait(180)
    assert bench.dashboard.text == "Launching: stopped; nothing of it was kept."
    assert bench.session is None
    assert bench.launcher.stop_button.disabled
    assert not bench.launcher.button.disabled
    bench.close()


def test_two_side_by_side_do_not_mix() -> None:
    benches = [tk.workbench(**FIELDS, output_dtype=dtype) for dtype in ("float32", "bfloat16")]
    for bench in benches:
        bench.dashboard.measure.value = "never"
        bench.launcher.button.click()
    for bench in benches:
        bench.wait(180)
    for bench in benches:
        bench.dashboard.steps.value = "2"
        bench.dashboard.buttons["run"].click()
    for bench in benches:
        assert bench.wait(180)
        assert bench.error is None
    assert [[record.output_dtype for record in bench.records] for bench in benches] == [["float32"] * 2, ["bfloat16"] * 2]
    benches[0].close()
    benches[1].dashboard.buttons["step"].click()
    assert benches[1].wait(180)
    assert len(benches[1].records) == 3
    benches[1].close()


def test_every_control_has_a_label(form: tk.Workbench) -> None:
    controls = [*form.launcher.inputs.values(), *form.dashboard.buttons.values(), form.launcher.button]
    controls += [form.dashboard.picker, form.dashboard.steps, form.dashboard.measure, form.launcher.stop_button]
    assert all(control.description for control in controls)
    assert len({control.description for control in form.launcher.inputs.values()}) == len(form.launcher.inputs)


# ---- the figures


@pytest.fixture(scope="module")
def run(one_rank: tk.Session) -> tuple[list[Any], dict[int, Any]]:
    first = len(one_rank.history)
    one_rank.output_dtype = "float32"
    memory = {first: one_rank.memory()}
    one_rank.grpo_step(2)
    one_rank.output_dtype = "bfloat16"
    one_rank.grpo_step(1)
    one_rank.output_dtype = "float32"
    return one_rank._records[first:], memory


def test_the_run_figure_carries_the_records_and_marks_thresholds_and_switches(run: tuple[list[Any], dict[int, Any]]) -> None:
    records, memory = run
    figure = run_figure(records, memory)
    lines = [list(trace.y) for trace in figure.data if trace.mode == "lines"]
    assert lines[0] == [record.metrics["reward"] for record in records]
    assert lines[3] == [tokens_per_second(record) for record in records]
    kl = next(trace for trace in figure.data if trace.name == "gen_kl_error")
    assert list(kl.customdata) == [record.metrics["gen_kl_error"] for record in records]
    assert min(kl.y) >= 1e-9  # zero has no place on a logarithmic axis
    horizontal = {shape.y0 for shape in figure.layout.shapes if shape.y0 == shape.y1}
    assert {THRESHOLDS["token_mult_prob_error"], THRESHOLDS["gen_kl_error"]} <= horizontal
    assert switches(records) == [(records[2].step - 0.5, "bfloat16")]
    assert "→ bfloat16" in [annotation.text for annotation in figure.layout.annotations]
    assert any(shape.x0 == shape.x1 == records[2].step - 0.5 for shape in figure.layout.shapes)
    peak = next(iter(memory.values())).peak_bytes
    assert any(f"peak {peak / 2**20:.2f} MiB" in annotation.text for annotation in figure.layout.annotations)
    assert "not measured" in str(run_figure(records[:1], {}).layout.annotations)


def test_a_bundle_is_never_blank(run: tuple[list[Any], dict[int, Any]]) -> None:
    records, memory = run
    shown = bundle(run_figure(records, memory), run_table(records, memory), records[-1].headline)["data"]
    assert shown["application/vnd.plotly.v1+json"]["data"]
    assert f"<td>{records[-1].metrics['reward']:.4g}</td>" in shown["text/html"]
    assert next(iter(memory.values())).headline in shown["text/html"]
    assert shown["text/plain"] == records[-1].headline


def test_a_figure_is_redrawn_at_most_once_a_second_and_ends_with_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "REDRAW_SECONDS", 0.3)
    figure, drawn = dashboard.LiveFigure(), list[int]()

    def make(number: int) -> dict[str, Any]:
        drawn.append(number)
        return {"output_type": "display_data", "data": {"text/plain": str(number)}, "metadata": {}}

    for number in range(5):
        figure.show(lambda number=number: make(number))
    assert drawn == [0]
    until(lambda: len(drawn) == 2, 5)
    time.sleep(0.4)
    assert drawn == [0, 4]
    assert figure.output.outputs[0]["data"]["text/plain"] == "4"


def test_a_figure_of_no_steps_is_refused(form: tk.Workbench) -> None:
    with pytest.raises(ValueError, match="no step was taken"):
        form.figure()
    assert repr(form) == "Workbench(nothing launched)"
    assert "Workbench(nothing launched)" in form._repr_mimebundle_()["text/html"]
