"""Magics that launch, resume and predict; and bad input in every argument of every magic."""

from __future__ import annotations

import dataclasses
import multiprocessing
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import toolkit as tk
from toolkit import worker
from toolkit.arguments import Option, convert, field_options
from toolkit.magic_lines import ToolkitError
from toolkit.magics import ToolkitMagics
from toolkit.spec import Checkpointing

from .conftest import SMALL

SMALL_LINE = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SMALL.items())


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "toolkit")
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def ip(shell: InteractiveShell, one_rank: tk.Session) -> Iterator[InteractiveShell]:
    before = set(shell.user_ns)
    yield shell
    for name in set(shell.user_ns) - before:
        held = shell.user_ns.pop(name)
        if isinstance(held, tk.Session) and held is not one_rank:
            held.close()


@pytest.fixture(scope="module")
def saved(one_rank: tk.Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return one_rank.save(tmp_path_factory.mktemp("saved") / "run")


# ---- launch, resume, predict


def test_every_field_is_an_option_and_reaches_the_session(ip: InteractiveShell) -> None:
    declared = {option.name for option in ToolkitMagics.launch.options}
    fields = {f.name for cls in (tk.PolicySpec, tk.GRPOConfig) for f in dataclasses.fields(cls)}
    assert fields <= declared
    line = (
        f"--model tiny_policy {SMALL_LINE} --output-dtype bf16 --activation-checkpointing full --logprob-mode chunked "
        "--logprob-chunk-size 7 --sequence-packing --autocast False --temperature 0.7 --top-k None --learning-rate 1e-4 "
        "--max-grad-norm none --train-micro-batch-size 4 --task one_digit_sums --use-dynamic-sampling -o kept"
    )
    session = ip.run_line_magic("launch", line)
    assert session is ip.user_ns["kept"]
    assert session.spec == tk.PolicySpec(
        model=tk.tiny_policy(), output_dtype="bfloat16", activation_checkpointing="full", logprob_mode="chunked",
        logprob_chunk_size=7, sequence_packing=True, autocast=False,
    )  # fmt: skip
    assert session.config == tk.GRPOConfig(
        **SMALL, temperature=0.7, learning_rate=1e-4, max_grad_norm=None, train_micro_batch_size=4,
        task="one_digit_sums", use_dynamic_sampling=True,
    )  # fmt: skip
    ip.run_line_magic("close", "")
    assert not session.is_open


def test_launch_fills_session_and_never_replaces_a_live_one(ip: InteractiveShell) -> None:
    line = f"--model tiny_policy {SMALL_LINE}"
    first = ip.run_line_magic("launch", line)
    assert ip.user_ns["session"] is first
    policies = len(worker._policies)
    with pytest.raises(ToolkitError, match="-o session: session holds a live session"):
        ip.run_line_magic("launch", line)
    assert first.is_open
    assert len(worker._policies) == policies
    ip.run_line_magic("close", "")
    assert ip.run_line_magic("launch", line) is ip.user_ns["session"] is not first  # a closed one may be replaced


def test_a_picker_is_observed_however_it_is_named(ip: InteractiveShell) -> None:
    for given in ("$picker", "{picker}", "picker", "$held.one"):
        picker = tk.dtype_picker("float16")
        ip.user_ns |= {"picker": picker, "held": SimpleNamespace(one=picker)}
        ip.run_cell(f"%launch --model tiny_policy {SMALL_LINE} --output-dtype {given}", silent=True).raise_error()
        session = ip.user_ns["session"]
        assert session.output_dtype == "float16"
        picker.value = "bfloat16"
        assert session.output_dtype == "bfloat16"
        session.close()


def test_python_variables_and_expressions_are_expanded(ip: InteractiveShell, one_rank: tk.Session) -> None:
    ip.user_ns |= {
        "session": one_rank, "d": "bfloat16", "n": 2, "dtypes": ["float32", "float16"], "name": "kept",
        "text": "what's 1+1, 'x' or {y}?", "pairs": [("1+1=", "2"), ("2+2=", "4")],
    }  # fmt: skip
    run = ip.run_line_magic
    assert run("output_dtype", "$d") == "bfloat16"
    assert run("output_dtype", "{dtypes[0]}") == "float32"
    assert run("output_dtype", "bfl{'oat' + str(8 * n)}") == "bfloat16"  # within a word, as IPython does it
    assert len(run("grpo", "{n}")) == 2
    run("memory", "float32 --num-sequences=$n --sequence-length={n * 8} -o $name")
    assert ip.user_ns["kept"].num_sequences == 2
    assert ip.user_ns["kept"].sequence_length == 16
    report = run("divergence", "--text $text")  # quotes and braces of a value are no syntax
    assert "".join(report.tokens["text"]) in ip.user_ns["text"]
    ip.user_ns["tk"] = tk
    session = run("launch", f"--model {{tk.tiny_policy()}} {SMALL_LINE} --task $pairs -o mine")
    assert list(session.task.problems) == ip.user_ns["pairs"]
    for line, message in (("$nobody", "NameError"), ("{1/0}", "ZeroDivisionError"), ("{n}", "output_dtype=2")):
        with pytest.raises(ToolkitError, match=message):
            run("output_dtype", f"{line} -s session")


def test_a_functions_own_variables_are_seen(ip: InteractiveShell, one_rank: tk.Session) -> None:
    ip.user_ns["session"] = one_rank
    cell = "def switch(line):\n    return get_ipython().run_line_magic('output_dtype', '$line')\nr = switch('float16')"
    ip.run_cell(cell, silent=True).raise_error()
    assert ip.user_ns["r"] == "float16"


def test_resume_goes_on_from_save(ip: InteractiveShell, one_rank: tk.Session, tmp_path: Path) -> None:
    ip.user_ns["session"] = one_rank
    folder = ip.run_line_magic("save_session", f"'{tmp_path / 'a run'}'")
    assert folder == tmp_path / "a run"
    again = ip.run_line_magic("resume", f"'{folder}' -o again --output-dtype float16")
    assert len(again.history) == len(one_rank.history)
    assert again.output_dtype == "float16"


def test_launch_takes_a_recipe(ip: InteractiveShell) -> None:
    recipe = Path(__file__).parents[1] / "data" / "recipes" / "two_ranks.yaml"
    overrides = "policy.dtensor_cfg.fsdp_output_dtype=bfloat16 grpo.num_prompts_per_step=4"
    session = ip.run_line_magic("launch", f"--recipe {recipe} --override {overrides} --ranks 1 --seed 5")
    assert (session.num_ranks, session.output_dtype, session.spec.seed) == (1, "bfloat16", 5)
    assert session.config.num_prompts_per_step == 4


@pytest.mark.slow
def test_predictions_need_no_session(ip: InteractiveShell) -> None:
    line = "tiny_policy --ranks 2 --sequence-length 16 --micro-batch-size 2"
    report = ip.run_line_magic("predict_memory", line)
    assert (report.source, report.ranks, report.num_sequences, report.sequence_length) == ("predicted", 2, 2, 16)
    assert ip.run_line_magic("predict_memory", f"{line} --output-dtype bfloat16 -o kept") is None
    assert ip.user_ns["kept"].output_dtype == "bfloat16"
    grid = ip.run_line_magic("tradeoffs", f"float32 bfloat16 --model {line} --checkpointing False hf")
    assert [row.activation_checkpointing for row in grid.rows] == [False, "hf"] * 2
    assert grid.rows[0].peak_bytes == report.peak_bytes


def test_session_magics_give_the_sessions_reports(ip: InteractiveShell, one_rank: tk.Session) -> None:
    ip.user_ns["session"] = one_rank
    run = ip.run_line_magic
    assert run("self_check", "-t 0.5").temperature == 0.5
    assert run("evaluate", "8").num_problems == 8
    assert len(run("units", "")) == len(one_rank.units())
    report = run("divergence", "float32 float32 --logprob-mode chunked --batch-size 3")
    assert report.metrics["mean_abs_nats"] == 0.0


@pytest.mark.slow
def test_edges_and_tradeoffs_of_a_session(ip: InteractiveShell, one_rank: tk.Session) -> None:
    ip.user_ns["session"] = one_rank
    run = ip.run_line_magic
    assert type(run("precision_edges", "")).__name__ == "EdgeReport"
    grid = run("tradeoffs", "float32 bfloat16 --logprob-modes materialized chunked")
    assert [(row.output_dtype, row.logprob_mode) for row in grid.rows] == [
        (dtype, mode) for dtype in ("float32", "bfloat16") for mode in ("materialized", "chunked")
    ]


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("none", int | None, None),
        ("None", str, "None"),
        ("true", bool, True),
        ("FALSE", Checkpointing | bool, False),
        ("False", Checkpointing, "False"),
        ("7", int, 7),
        ("7", float, 7.0),
        ("7", str, "7"),
        ("7.5", int, "7.5"),
        ("1e-4", float | None, 1e-4),
        ("full", Checkpointing | bool, "full"),
        ("1", bool, "1"),
        (None, int, None),
    ],
)
def test_text_becomes_a_value_of_the_fields_type(text: Any, hint: Any, value: Any) -> None:
    found = convert(text, hint)
    assert found == value
    assert type(found) is type(value)


def test_options_carry_the_docstrings_words_and_the_defaults() -> None:
    options = {option.name: option for option in field_options(tk.PolicySpec, tk.GRPOConfig)}
    assert options["reduce_dtype"].help == "dtype in which gradients are summed over ranks. Default: float32."
    assert options["top_k"].help.startswith("keep the smallest set of tokens")
    assert options["model"].help == "a local folder in Hugging Face format, or a hub id."
    assert options["truncated_importance_sampling_type"].values == ("icepop", "seq-mask-tis", "tis")


# ---- bad input in every argument

#: What each magic needs beside the argument that is bad.
BESIDE: dict[Any, str] = {
    "launch": "--model tiny_policy",
    "resume": "SAVED -o again",
    "predict_memory": "tiny_policy --ranks 2 --sequence-length 16",
    "tradeoffs": "float32 bfloat16",
    "save_session": "somewhere",
    ("memory", "num_sequences"): "--sequence-length 16",
    ("memory", "sequence_length"): "--num-sequences 2",
}
#: Bad values of arguments to which any text is a value of the right type; and what the message must say of them.
BAD = {
    ("launch", "model"): ("no/such/folder", "no/such/folder"),
    ("launch", "checkpoint_dir"): (__file__, "checkpoint_dir="),
    ("launch", "save_period"): ("2", "save_period=2 does nothing"),
    ("launch", "cluster"): ("nowhere", "nowhere"),
    ("launch", "recipe"): ("nowhere.yaml", "nowhere.yaml"),
    ("launch", "override"): ("a.b=1", "--recipe"),
    ("resume", "checkpoint_dir"): (__file__, "checkpoint_dir="),
    ("resume", "save_period"): ("2", "save_period=2 does nothing"),
    ("divergence", "text"): ("''", "text=''"),
    ("tradeoffs", "ranks"): ("2", "--ranks is a setting of a prediction"),
    ("tradeoffs", "sequence_length"): ("16", "--sequence-length is a setting of a prediction"),
    ("tradeoffs", "micro_batch_size"): ("2", "--micro-batch-size is a setting of a prediction"),
    ("save_session", "folder"): (__file__, "save("),
}
ALL = [
    (name, option)
    for kind in ("line", "cell")
    for name, method in sorted(ToolkitMagics.magics[kind].items())
    for option in getattr(ToolkitMagics, method).options
]


@pytest.mark.parametrize(("magic", "option"), ALL, ids=[f"{name}-{option.name}" for name, option in ALL])
def test_bad_input_is_named_and_leaves_nothing_behind(
    magic: str, option: Option, ip: InteractiveShell, one_rank: tk.Session, saved: Path
) -> None:
    ip.user_ns["session"] = one_rank
    named = {"out": ("3x", "-o 3x"), "session": ("nobody", "'nobody' is no session")}
    value, said = BAD.get((magic, option.name), named.get(option.name, ("nonsense", "nonsense")))
    if option.is_positional and option.nargs not in ("?", "*"):
        line = value
    else:
        beside = BESIDE.get((magic, option.name), BESIDE.get(magic, "")).replace("SAVED", shlex.quote(str(saved)))
        if magic == "launch" and option.name != "out":
            beside += " -o fresh"
        positional_many = option.is_positional and option.nargs == "*"
        line = value if positional_many else f"{beside} {option.flags[-1]} {value}" if not option.is_positional else value
    if option.is_positional:
        line += {"resume": " -o again", "predict_memory": " --ranks 2 --sequence-length 16"}.get(magic, "")
    state = _state(ip, one_rank)
    call = (lambda: ip.run_cell_magic(magic, line, "1")) if magic == "ranks" else (lambda: ip.run_line_magic(magic, line))
    with pytest.raises(ToolkitError) as error:
        call()
    assert said in str(error.value)
    allowed = [kind for kind in typing.get_args(option.hint) if isinstance(kind, str)]
    assert all(word in str(error.value) for word in allowed)
    assert _state(ip, one_rank) == state


def _state(ip: InteractiveShell, session: tk.Session) -> Any:
    sessions = {name for name, value in ip.user_ns.items() if isinstance(value, tk.Session)}
    workers = {process.pid for process in multiprocessing.active_children()}
    return sessions, set(worker._policies), workers, session.spec, session.config, len(session.history), session.is_open


@pytest.mark.parametrize("line", ["--nope 1", "--output-dtype", "stray", "--model 'half"])
def test_lines_that_cannot_be_read(line: str, ip: InteractiveShell) -> None:
    with pytest.raises(ToolkitError, match=r"%launch"):
        ip.run_line_magic("launch", line)
    assert isinstance(ip.run_cell(f"%launch {line}", silent=True).error_in_exec, ToolkitError)
    assert "session" not in ip.user_ns


def test_a_loss_is_given_as_a_function(ip: InteractiveShell, one_rank: tk.Session) -> None:
    ip.user_ns |= {"session": one_rank, "squares": lambda logits_BTV, token_ids_BT, mask_BT: logits_BTV.square().mean()}
    with pytest.raises(ToolkitError, match=r"--loss squares: give the function itself, .*: --loss \$my_loss"):
        ip.run_line_magic("divergence", "--loss squares")
    report = ip.run_line_magic("divergence", "--loss $squares --truth False")
    assert report.metrics["loss_a"] > 0


def test_a_launch_without_a_model_says_so(ip: InteractiveShell) -> None:
    with pytest.raises(ToolkitError, match="needs a model"):
        ip.run_line_magic("launch", "--ranks 2")
    with pytest.raises(ToolkitError, match="needs --ranks"):
        ip.run_line_magic("predict_memory", "tiny_policy")
    with pytest.raises(ToolkitError, match="unrecognized arguments: --share-prompt-prefix"):  # could only be refused
        ip.run_line_magic("predict_memory", "tiny_policy --ranks 2 --sequence-length 16 --share-prompt-prefix")
    with pytest.raises(ToolkitError, match="--session 5: give the name of the variable"):
        ip.run_line_magic("grpo", "--session 5")
    with pytest.raises(ToolkitError, match="--twins is a setting of a session"):
        ip.run_line_magic("tradeoffs", "--model tiny_policy --twins")
