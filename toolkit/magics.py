"""`%load_ext toolkit`: what launches a session, the session's methods, and predictions, as magics.

Those of a session act on the one given by `--session NAME`, else on the one open session among the notebook's variables.
"""

from __future__ import annotations

import builtins
import keyword
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, cast

from IPython.core.magic import Magics, magics_class
from IPython.core.magic_arguments import magic_arguments

from toolkit.arguments import Option
from toolkit.commands import LAUNCH, LAUNCHED, PREDICT, RESUME, TRADEOFFS, launched, predicted, resumed, tradeoffs_of
from toolkit.engines import local_ranks_warm_up
from toolkit.errors import RanksLost
from toolkit.magic_completion import matcher
from toolkit.magic_lines import OUT, SESSION, Friendly, ToolkitError, from_the_cell, of_a_cell, of_a_line, read_line, takes
from toolkit.session import Session
from toolkit.spec import DTYPES

_SIDES = "settings of both sides, beside their output dtypes"


def _dtype(name: str, text: str) -> Option:
    return Option((name,), text, values=tuple(DTYPES), nargs="?")


@magics_class
class ToolkitMagics(Magics):  # type: ignore[misc]
    """The magics of the toolkit."""

    @magic_arguments()
    @takes(*LAUNCH, LAUNCHED)
    @of_a_line
    def launch(self, line: str, local_ns: Any = None) -> Session:
        """Shard a model over ranks and keep the live session in a variable.

        Every field of PolicySpec and GRPOConfig is an option. A value may be a variable of the notebook ($name or
        {expression}); a widget is observed: picking switches the live session.

        Example: %launch --model tiny_policy --ranks 2 --output-dtype bfloat16
        """
        return self._launched(self.launch, line, local_ns, launched)

    @magic_arguments()
    @takes(*RESUME, LAUNCHED)
    @of_a_line
    def resume(self, line: str, local_ns: Any = None) -> Session:
        """Go on with a session that %save_session or a checkpoint_dir wrote, on any number of ranks.

        Example: %resume runs/first --ranks 2
        """
        return self._launched(self.resume, line, local_ns, resumed)

    @magic_arguments()
    @takes(_dtype("dtype", f"one of {', '.join(DTYPES)}; without it, show the current one"), SESSION)
    @of_a_line
    def output_dtype(self, line: str, local_ns: Any = None) -> str:
        """Show or switch the FSDP output dtype of the live session.

        Example: %output_dtype bfloat16
        """
        given = self._given(self.output_dtype, line, local_ns)
        session = self._session(given)
        if "dtype" in given:
            with Friendly():
                session.output_dtype = given["dtype"]
        return session.output_dtype

    @magic_arguments()
    @takes(Option(("n",), "number of steps (default 1)", int, nargs="?"), SESSION, OUT)
    @of_a_line
    def grpo(self, line: str, local_ns: Any = None) -> Any:
        """Take GRPO steps and return their records.

        Example: %grpo 5 -o steps
        """
        return self._called(self.grpo, line, local_ns, lambda session, given: session.grpo_step(**given))

    @magic_arguments()
    @takes(Option(("n",), "number of held-out problems (default all)", int, nargs="?"), SESSION, OUT)
    @of_a_line
    def evaluate(self, line: str, local_ns: Any = None) -> Any:
        """Grade greedy completions of held-out problems.

        Example: %evaluate 200 -o before
        """
        return self._called(self.evaluate, line, local_ns, lambda session, given: session.evaluate(**given))

    @magic_arguments()
    @takes(
        _dtype("output_dtype", "measure with this output dtype instead of the session's"),
        Option(("--num-sequences",), "measure made-up tokens: this many sequences on each rank", int),
        Option(("--sequence-length",), "of this many tokens", int),
        SESSION,
        OUT,
    )
    @of_a_line
    def memory(self, line: str, local_ns: Any = None) -> Any:
        """Measure where every byte of a training step's peak goes.

        Example: %memory bfloat16 -o report
        """
        return self._called(self.memory, line, local_ns, lambda session, given: session.memory(**given))

    @magic_arguments()
    @takes(
        _dtype("a", "output dtype of one side (default float32)"),
        _dtype("b", "output dtype of the other (default bfloat16)"),
        Option(("-t", "--temperature"), "temperature of both sides (default: the config's)", float),
        Option(("--temperature-order",), _SIDES, values=("after_upcast", "before_upcast")),
        Option(("--logprob-mode",), _SIDES, values=("materialized", "chunked", "linear")),
        Option(("--cast-forward-inputs",), _SIDES, bool, ("True", "False"), "?"),
        Option(("--autocast",), _SIDES, bool, ("True", "False"), "?"),
        Option(("--attn-implementation",), _SIDES, values=("sdpa", "eager")),
        Option(("--batch-size",), "sequences in one forward of a rank, both sides", int),
        Option(("--text",), "score this text instead of completions sampled for it"),
        Option(("--gradients",), "compare gradients too (default True); False is much faster", bool, ("True", "False"), "?"),
        Option(("--loss",), "compare this loss on raw logits instead of GRPO's: $name of a function", metavar="$FUNCTION"),
        Option(("--truth",), "also run in float32 and float64 (default: if small)", bool, ("True", "False"), "?"),
        SESSION,
        OUT,
    )
    @of_a_line
    def divergence(self, line: str, local_ns: Any = None) -> Any:
        """Compare each token's logprob under two output dtypes.

        Example: %divergence float32 bfloat16 -t 0.7 --temperature-order before_upcast
        """

        def method(session: Session, given: dict[str, Any]) -> Any:
            if isinstance(given.get("loss"), str):
                raise ToolkitError(
                    f"--loss {given['loss']}: give the function itself, by its name with a dollar: --loss $my_loss"
                )
            return session.divergence(**given)

        return self._called(self.divergence, line, local_ns, method)

    @magic_arguments()
    @takes(SESSION, OUT)
    @of_a_line
    def precision_edges(self, line: str, local_ns: Any = None) -> Any:
        """Measure each known precision edge on this model, with and without its cure.

        Example: %precision_edges -o edges
        """
        return self._called(self.precision_edges, line, local_ns, lambda session, given: session.precision_edges())

    @magic_arguments()
    @takes(Option(("-t", "--temperature"), "of the logprobs (default: the config's)", float), SESSION, OUT)
    @of_a_line
    def self_check(self, line: str, local_ns: Any = None) -> Any:
        """Compare every logprob mode with float64 on this model.

        Example: %self_check -t 0.7
        """
        return self._called(self.self_check, line, local_ns, lambda session, given: session.self_check(**given))

    @magic_arguments()
    @takes(*TRADEOFFS, SESSION, OUT)
    @of_a_line
    def tradeoffs(self, line: str, local_ns: Any = None) -> Any:
        """Memory and divergence of a grid of settings, and a verdict in words; with --model, predicted without a session.

        Example: %tradeoffs float32 bfloat16 --logprob-modes materialized linear
        """
        given = self._given(self.tradeoffs, line, local_ns)
        find = None if "model" in given else self._session
        return self._stored(given, lambda: tradeoffs_of(given, find))

    @magic_arguments()
    @takes(*PREDICT, OUT)
    @of_a_line
    def predict_memory(self, line: str, local_ns: Any = None) -> Any:
        """Predict where every byte of a training step's peak goes, for a model that need not be here; no GPU needed.

        Example: %predict_memory Qwen3-8B --ranks 8 --sequence-length 4096 --output-dtype bfloat16
        """
        given = self._given(self.predict_memory, line, local_ns)
        return self._stored(given, lambda: predicted(given))

    @magic_arguments()
    @takes(SESSION, OUT)
    @of_a_line
    def units(self, line: str, local_ns: Any = None) -> Any:
        """What every FSDP unit of every rank is really set to, read back from FSDP2.

        Example: %units
        """
        return self._called(self.units, line, local_ns, lambda session, given: session.units())

    @magic_arguments()
    @takes(Option(("folder",), "where to save to"), SESSION)
    @of_a_line
    def save_session(self, line: str, local_ns: Any = None) -> Any:
        """Save weights, optimizer, settings and history, for %resume.

        Example: %save_session runs/first
        """
        return self._called(self.save_session, line, local_ns, lambda session, given: session.save(**given))

    @magic_arguments()
    @takes(SESSION)
    @of_a_line
    def close(self, line: str, local_ns: Any = None) -> None:
        """End the session's ranks and free its model.

        Example: %close
        """
        return self._called(self.close, line, local_ns, lambda session, given: session.close())  # type: ignore[no-any-return]

    @magic_arguments()
    @takes(SESSION, OUT)
    @of_a_cell
    def ranks(self, line: str, cell: str, local_ns: Any = None) -> None:
        """Run the cell on every rank, where `policy`, `model`, `rank`, `torch` and `dist` are known.

        What it prints, and the value of its last expression, is shown by rank; `-o NAME` stores the values instead, a list
        in rank order. Variables stay on the ranks for later cells; those of the notebook are not there.

        Example: %%ranks -o norms
        """
        given = self._given(self.ranks, line, local_ns)
        session = self._session(given)
        if "out" in given:
            with from_the_cell():
                self._stored(given, lambda: session.run_cell(cell))
            return
        with Friendly(), from_the_cell():
            texts = session.run_cell(cell, as_text=True)
        for rank, text in enumerate(texts):
            if text is not None:
                sys.stdout.write(f"[rank {rank}] {text}\n")

    # ---- helpers

    def _given(self, magic: Any, line: str, local_ns: Mapping[str, Any] | None) -> dict[str, Any]:
        """The arguments given, as values; a variable to store in is checked before anything is done."""
        given = read_line(magic, line, {**self.shell.user_ns, **(local_ns or {})})
        if "out" in given:
            self._check_name(given["out"])
        return given

    def _called(self, magic: Any, line: str, local_ns: Any, method: Callable[[Session, dict[str, Any]], Any]) -> Any:
        given = self._given(magic, line, local_ns)
        session = self._session(given)
        own = {name: value for name, value in given.items() if name not in ("session", "out")}
        return self._stored(given, lambda: method(session, own))

    def _launched(self, magic: Any, line: str, local_ns: Any, start: Callable[[dict[str, Any]], Session]) -> Session:
        given = {"out": "session"} | self._given(magic, line, local_ns)
        self._check_name(given["out"])
        with Friendly():
            session = start(given)
        self.shell.user_ns[given["out"]] = session
        return session

    def _session(self, given: Mapping[str, Any]) -> Session:
        names, name = self.shell.user_ns, given.get("session")
        if isinstance(name, Session):
            return name
        if name is not None:
            if not isinstance(name, str) or not name.isidentifier():
                raise ToolkitError(f"--session {name}: give the name of the variable that holds the session.")
            if not isinstance(names.get(name), Session):
                raise ToolkitError(f"{name!r} is no session; make one with {name} = tk.launch(...).")
            return cast(Session, names[name])
        found = {id(v): (k, v) for k, v in names.items() if isinstance(v, Session) and not k.startswith("_") and v.is_open}
        if len(found) == 1:
            return next(iter(found.values()))[1]
        lost = [v._ranks.lost for v in names.values() if isinstance(v, Session) and isinstance(v._ranks.lost, RanksLost)]
        if not found and lost:
            raise ToolkitError(str(lost[0]))
        if not found:
            raise ToolkitError("there is no open session; make one with %launch --model tiny_policy, or tk.launch(...).")
        raise ToolkitError(
            f"there are several sessions: say which with --session {' or '.join(k for k, _ in found.values())}."
        )

    def _check_name(self, name: Any) -> None:
        if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
            raise ToolkitError(f"-o {name}: that is no name a variable can have.")
        held = self.shell.user_ns.get(name)
        if name in self.shell.user_ns_hidden or name in vars(builtins) or isinstance(held, ModuleType):
            raise ToolkitError(f"-o {name}: {name} is IPython's, Python's or a module; take another name.")
        if isinstance(held, Session) and held.is_open:
            raise ToolkitError(
                f"-o {name}: {name} holds a live session (the default name is session), and its model would be lost; give "
                "another name with -o, or close that session first."
            )

    def _stored(self, given: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        with Friendly():
            result = make()
        if "out" not in given:
            return result
        self.shell.user_ns[given["out"]] = result
        return None


def load(ipython: Any) -> None:
    """Register the magics and what the Tab key offers for them; loading again replaces both."""
    unload(ipython)
    magics = ToolkitMagics(ipython)
    ipython.register_magics(magics)
    methods = {name: method for kind in magics.magics.values() for name, method in kind.items()}
    ipython.Completer.custom_matchers.append(matcher(methods, ipython.user_ns))
    local_ranks_warm_up()


def unload(ipython: Any) -> None:
    """Remove the magics."""
    for kind, names in ToolkitMagics.magics.items():
        for name in names:
            ipython.magics_manager.magics[kind].pop(name, None)
    matchers = ipython.Completer.custom_matchers
    matchers[:] = [one for one in matchers if getattr(one, "__name__", "") != "toolkit_magics"]
    ipython.configurables[:] = [c for c in ipython.configurables if type(c).__name__ != "ToolkitMagics"]
