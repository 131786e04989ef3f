"""The magics in a live IPython shell: registered once, helped, friendly, and they return and store."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import InteractiveShell

import toolkit as tk
from toolkit.magic_lines import ToolkitError

NAMES = (
    "close",
    "divergence",
    "evaluate",
    "grpo",
    "launch",
    "memory",
    "output_dtype",
    "precision_edges",
    "predict_memory",
    "resume",
    "save_session",
    "self_check",
    "tradeoffs",
    "units",
)  # the line magics


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def ip(shell: InteractiveShell, one_rank: tk.Session) -> Iterator[InteractiveShell]:
    shell.run_line_magic("load_ext", "toolkit")
    one_rank.output_dtype = "float32"
    shell.user_ns["session"] = one_rank
    yield shell
    for name in ("session", "other", "kept"):
        shell.user_ns.pop(name, None)


def test_loading_twice_and_reloading_is_the_same_as_once(ip: InteractiveShell) -> None:
    def ours() -> list[str]:
        return [type(c).__name__ for c in ip.configurables if type(c).__name__ == "ToolkitMagics"]

    assert ours() == ["ToolkitMagics"]
    ip.run_line_magic("load_ext", "toolkit")
    ip.run_line_magic("reload_ext", "toolkit")
    ip.run_line_magic("reload_ext", "toolkit")
    assert ours() == ["ToolkitMagics"]
    assert ip.run_line_magic("output_dtype", "") == "float32"


def test_ipythons_own_magics_are_left_alone(ip: InteractiveShell) -> None:
    ours = set(ip.magics_manager.magics["line"]) & set(NAMES)
    ip.run_line_magic("unload_ext", "toolkit")
    assert not ours & set(ip.magics_manager.magics["line"])
    assert not set(NAMES) & {name for kind in ip.magics_manager.magics.values() for name in kind}
    assert ip.find_line_magic("save").__doc__.lstrip().startswith("Save a set of lines")
    ip.run_line_magic("load_ext", "toolkit")
    assert ip.find_line_magic("save").__doc__.lstrip().startswith("Save a set of lines")


def test_unloading_removes_them(ip: InteractiveShell) -> None:
    ip.run_line_magic("unload_ext", "toolkit")
    assert not set(NAMES) & set(ip.magics_manager.magics["line"])
    assert "ranks" not in ip.magics_manager.magics["cell"]
    ip.run_line_magic("load_ext", "toolkit")
    assert set(NAMES) <= set(ip.magics_manager.magics["line"])


@pytest.mark.parametrize("name", NAMES)
def test_each_has_help_with_its_arguments_and_an_example(name: str, ip: InteractiveShell) -> None:
    text = ip.find_line_magic(name).__doc__
    assert f"%{name}" in text
    assert "Example:" in text
    assert "--session" in text or "--out" in text


def test_output_dtype_shows_and_switches(ip: InteractiveShell, one_rank: tk.Session) -> None:
    assert ip.run_line_magic("output_dtype", "bfloat16") == "bfloat16"
    assert one_rank.output_dtype == "bfloat16"
    assert set(one_rank.units()["output_dtype"]) == {"bfloat16"}
    assert ip.run_line_magic("output_dtype", "") == "bfloat16"


def test_results_are_returned_or_stored(ip: InteractiveShell, one_rank: tk.Session) -> None:
    steps = len(one_rank.history)
    record = ip.run_line_magic("grpo", "")
    assert record.step == steps + 1
    assert ip.run_line_magic("grpo", "2 -o kept") is None
    assert [r.step for r in ip.user_ns["kept"]] == [steps + 2, steps + 3]
    assert ip.run_line_magic("memory", "bfloat16").output_dtype == "bfloat16"
    report = ip.run_line_magic("divergence", "float32 float16 -t 0.7")
    assert (report.a, report.b) == ("float32 outputs", "float16 outputs")
    assert ip.run_cell("r = %memory\nassert r.peak_bytes > 0").success


BAD = [
    ("output_dtype", "float8", "output_dtype='float8' is not a dtype"),
    ("output_dtype", "--nope", "unrecognized arguments"),
    ("grpo", "many", "n='many' must be a whole number"),
    ("grpo", "0", "n=0 must be a whole number of at least 1"),
    ("memory", "int4", "output_dtype='int4'"),
    ("divergence", "float32 bfloat16 -t warm", "temperature='warm' must be a finite number"),
    ("divergence", "float32 bfloat16 --temperature-order early", "temperature_order='early'"),
    ("memory", "-s nobody", "'nobody' is no session"),
    ("grpo", "1 -o session", "holds a live session"),
    ("grpo", "1 -o 3x", "no name a variable can have"),
    ("grpo", "1 -o class", "no name a variable can have"),
]


@pytest.mark.parametrize(("magic", "line", "message"), BAD)
def test_bad_arguments_are_one_friendly_message_that_fails_the_cell(
    magic: str, line: str, message: str, ip: InteractiveShell
) -> None:
    with pytest.raises(ToolkitError, match=message) as error:
        ip.run_line_magic(magic, line)
    assert error.value._render_traceback_() == [str(error.value)]  # what a notebook shows
    result = ip.run_cell(f"%{magic} {line}", silent=True)
    assert isinstance(result.error_in_exec, ToolkitError)  # an IPython UsageError would leave the cell "ok"


def test_which_session_is_meant(ip: InteractiveShell, one_rank: tk.Session) -> None:
    ip.user_ns["alias"] = one_rank  # two names, one session: no question
    assert ip.run_line_magic("output_dtype", "") == "float32"
    del ip.user_ns["alias"]
    with tk.launch(model=tk.tiny_policy(), output_dtype="float16") as other:
        ip.user_ns["other"] = other
        with pytest.raises(ToolkitError, match="several sessions: say which with --session session or other"):
            ip.run_line_magic("output_dtype", "")
        assert ip.run_line_magic("output_dtype", "-s other") == "float16"
    assert ip.run_line_magic("output_dtype", "") == "float32"  # a closed session is no candidate
    del ip.user_ns["session"], ip.user_ns["other"]
    with pytest.raises(ToolkitError, match="there is no open session"):
        ip.run_line_magic("grpo", "")


COMPLETIONS: list[tuple[str, list[str]]] = [
    ("%output_dtype bf", ["bfloat16"]),
    ("%output_dtype ", ["float32", "bfloat16", "float16", "picker", "--session"]),
    ("r = %output_dtype fl", ["float32", "float16"]),
    ("x = 1\n%divergence float32 b", ["bfloat16"]),
    ("%divergence --temp", ["--temperature", "--temperature-order"]),
    ("%divergence --temperature-order ", ["after_upcast", "before_upcast"]),
    ("%launch --output-dtype=bf", ["bfloat16"]),
    ("%launch --output-dtype pi", ["picker"]),
    ("%launch --activation-checkpointing ", ["full", "hf", "selective", "True", "False"]),
    ("%launch --logprob-mode ch", ["chunked"]),
    ("%launch --model ", ["tiny_policy", "smollm2"]),
    ("%launch --model tiny_policy --ran", ["--ranks"]),
    ("%launch --ranks 2 --ran", []),
    ("%launch --task ", ["arithmetic", "one_digit_sums", "gsm8k"]),
    ("%launch --reference-policy-kl-type k", ["k1", "k2", "k3"]),
    ("%predict_memory Qwen3-8", ["Qwen3-8B"]),
    ("%predict_memory tiny", ["tiny_policy"]),
    ("%predict_memory --ranks 8 Qwen3-8", ["Qwen3-8B"]),
    ("%predict_memory Qwen3-8B --precision f", ["float32", "float16"]),
    ("%tradeoffs float32 b", ["bfloat16"]),
    ("%tradeoffs --logprob-modes chunked l", ["linear"]),
    ("%tradeoffs --model Qwen3-8", ["Qwen3-8B"]),
    ("%grpo 3 --session ", ["session"]),
    ("%grpo 3 -s ", ["session"]),
    ("%%ranks -", ["--session", "--out"]),
    ("%close -s se", ["session"]),
]


@pytest.mark.parametrize("jedi", [False, True])
@pytest.mark.parametrize(("text", "expected"), COMPLETIONS)
def test_tab_offers_options_and_values(text: str, expected: list[str], jedi: bool, ip: InteractiveShell) -> None:
    ip.user_ns["picker"] = tk.dtype_picker()
    completer: Any = ip.Completer
    before, completer.use_jedi = completer.use_jedi, jedi
    try:
        with provisionalcompleter():  # what a kernel's complete_request goes through
            offered = [completion.text for completion in completer.completions(text, len(text))]
        if "\n" not in text:
            _, in_terminal = ip.complete(None, text, len(text))
            assert [word for word in in_terminal if word in offered] == in_terminal or not expected
    finally:
        completer.use_jedi = before
        del ip.user_ns["picker"]
    if expected:
        assert sorted(offered) == sorted(expected)
    else:  # nothing of ours: whatever IPython itself offers
        assert "--ranks" not in offered


def test_tab_leaves_other_lines_and_closed_sessions_alone(ip: InteractiveShell) -> None:
    assert "bfloat16" not in ip.complete(None, "%timeit bf", 10)[1]
    assert "bfloat16" not in ip.complete(None, "output_dtype = bf", 17)[1]
    with tk.launch(model=tk.tiny_policy()) as ip.user_ns["other"]:
        assert ip.complete(None, "%grpo -s ", 9)[1] == ["session", "other"]
    assert ip.complete(None, "%grpo -s ", 9)[1] == ["session"]


def test_ranks_runs_a_cell_on_every_rank(
    ip: InteractiveShell, two_ranks: tk.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    ip.user_ns["other"] = two_ranks
    ip.run_cell_magic("ranks", "-s other", "held = torch.tensor([rank + 1.0])\nprint('here', rank)\n")
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] here 0", "[rank 1] here 1"]
    ip.run_cell_magic("ranks", "-s other", "dist.all_reduce(held)\nheld")  # the variable is still there
    assert capsys.readouterr().out == "[rank 0] tensor([3.])\n[rank 1] tensor([3.])\n"
    ip.run_cell_magic("ranks", "-s other -o kept", "sum(p.to_local().numel() for p in model.parameters())")
    total = ip.user_ns["kept"]
    assert sum(total) == sum(unit.num_parameters for unit in two_ranks.run(units_of)[0])
    assert capsys.readouterr().out == ""


def units_of(policy: Any) -> Any:
    from toolkit import fsdp

    return fsdp.inspect_units(policy.model)


def test_a_failing_rank_cell_shows_its_line_and_rank(ip: InteractiveShell, two_ranks: tk.Session) -> None:
    ip.user_ns["other"] = two_ranks
    with pytest.raises(ZeroDivisionError) as error:
        ip.run_cell_magic("ranks", "-s other", "x = 1\nx / (rank - 1)\n")
    assert error.value.rank == 1  # type: ignore[attr-defined]
    assert "x / (rank - 1)" in error.value.__notes__[0]
    shown = "\n".join(error.value._render_traceback_())  # type: ignore[attr-defined]
    assert shown.startswith('raised on rank 1:\n  File "<%%ranks ')
    assert shown.endswith("ZeroDivisionError: division by zero")
    assert "worker.py" not in shown
    with pytest.raises(ToolkitError) as refused:  # without frames of ours
        ip.run_cell_magic("ranks", "-s other", "x = 2\nx = = 1")
    assert str(refused.value).splitlines()[0] == '  File "<%%ranks>", line 2'
    assert str(refused.value).splitlines()[-1] == "SyntaxError: invalid syntax"
    with pytest.raises(SyntaxError, match="invalid syntax"):
        two_ranks.run_cell("x = = 1")
    ip.run_cell_magic("ranks", "-s other -o kept", "x")
    assert ip.user_ns["kept"] == [1, 1]


def test_after_ranks_were_lost_magics_say_how_to_get_them_back(ip: InteractiveShell) -> None:
    with tk.launch(model=tk.tiny_policy(), ranks=2) as lost:
        ip.user_ns.pop("session")
        ip.user_ns["other"] = lost
        lost._ranks.grace_seconds = 0.5
        cell = "if rank == 1:\n    raise ValueError('one')\ndist.barrier()\n"
        with pytest.raises(ToolkitError, match=r"rank 1 raised ValueError: one, and rank 0 did not return.*session.restart"):
            ip.run_cell_magic("ranks", "", cell)
        with pytest.raises(ToolkitError, match=r"rank 1 raised ValueError: one.*session.restart"):
            ip.run_line_magic("grpo", "")
        assert "nothing was lost" in lost.restart()
        ip.run_line_magic("grpo", "1 -s other -o kept")


@pytest.mark.parametrize("name", ["get_ipython", "print", "tk"])
def test_results_do_not_replace_what_the_notebook_runs_on(name: str, ip: InteractiveShell, one_rank: tk.Session) -> None:
    ip.user_ns["tk"] = tk
    steps = len(one_rank.history)
    with pytest.raises(ToolkitError, match=f"^-o {name}: {name} is IPython's, Python's or a module"):
        ip.run_line_magic("grpo", f"1 -o {name}")
    assert len(one_rank.history) == steps
    assert ip.user_ns["tk"] is tk


def test_options_cut_short_are_refused(ip: InteractiveShell) -> None:
    with pytest.raises(ToolkitError, match="unrecognized arguments: --gradient"):
        ip.run_line_magic("divergence", "--gradient False")
    report = ip.run_line_magic("divergence", "--gradients False --truth False")
    assert report.gradients is None
    assert report.truth == {}
