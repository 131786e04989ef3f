"""`%load_ext toolkit`: the session's methods as magics.

They act on the session given by `--session NAME`, else on the one session among the notebook's variables.
"""

from __future__ import annotations

import keyword
import sys
from typing import Any, cast

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from toolkit.engines import local_ranks_warm_up
from toolkit.errors import RanksLost, SessionClosed, SpecError
from toolkit.models import smollm2
from toolkit.session import Session
from toolkit.spec import DTYPES

_SESSION = argument("-s", "--session", metavar="NAME", help="variable that holds the session, if there are several")
_OUT = argument("-o", "--out", metavar="NAME", help="store the result in this variable and show nothing")
#: Errors that are the user's to fix: shown as their message alone.
_FRIENDLY = (SpecError, SessionClosed, RanksLost, FileNotFoundError)


class ToolkitError(Exception):
    """A magic failed for a reason the user can fix; the message is all there is to see."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@magics_class
class ToolkitMagics(Magics):  # type: ignore[misc]
    """The magics of the toolkit."""

    @magic_arguments()
    @argument("dtype", nargs="?", help=f"one of {', '.join(DTYPES)}; without it, show the current one")
    @_SESSION
    @line_magic
    def output_dtype(self, line: str) -> Any:
        """Show or switch the FSDP output dtype of the live session.

        Example: %output_dtype bfloat16
        """
        args = self._arguments(self.output_dtype, line)
        session = self._session(args.session)
        if args.dtype is not None:
            with _Friendly():
                session.output_dtype = args.dtype
        return session.output_dtype

    @magic_arguments()
    @argument("n", nargs="?", default="1", help="number of steps (default 1)")
    @_SESSION
    @_OUT
    @line_magic
    def grpo(self, line: str) -> Any:
        """Take GRPO steps and return their records.

        Example: %grpo 5 -o steps
        """
        args = self._arguments(self.grpo, line)
        session = self._session(args.session)
        return self._store(args.out, lambda: session.grpo_step(self._whole(args.n)))

    @magic_arguments()
    @argument("dtype", nargs="?", help="measure with this output dtype instead of the session's")
    @_SESSION
    @_OUT
    @line_magic
    def memory(self, line: str) -> Any:
        """Measure where every byte of a training step's peak goes.

        Example: %memory bfloat16 -o report
        """
        args = self._arguments(self.memory, line)
        session = self._session(args.session)
        return self._store(args.out, lambda: session.memory(output_dtype=args.dtype))

    @magic_arguments()
    @argument("a", nargs="?", default="float32", help="output dtype of one side (default float32)")
    @argument("b", nargs="?", default="bfloat16", help="output dtype of the other (default bfloat16)")
    @argument("-t", "--temperature", help="temperature of both sides (default: the config's)")
    @argument("--temperature-order", help="after_upcast or before_upcast, both sides")
    @_SESSION
    @_OUT
    @line_magic
    def divergence(self, line: str) -> Any:
        """Compare each token's logprob under two output dtypes.

        Example: %divergence float32 bfloat16 -t 0.7 --temperature-order before_upcast
        """
        args = self._arguments(self.divergence, line)
        session = self._session(args.session)
        common: dict[str, Any] = {}
        if args.temperature is not None:
            try:
                common["temperature"] = float(args.temperature)
            except ValueError:
                raise ToolkitError(f"%divergence: temperature {args.temperature!r} is not a number.") from None
        if args.temperature_order is not None:
            common["temperature_order"] = args.temperature_order
        return self._store(args.out, lambda: session.divergence(args.a, args.b, **common))

    @magic_arguments()
    @_SESSION
    @_OUT
    @cell_magic
    def ranks(self, line: str, cell: str) -> None:
        """Run the cell on every rank, where `policy`, `model`, `rank`, `torch` and `dist` are known.

        What it prints, and the value of its last expression, is shown by rank; `-o NAME` stores the values instead, a list
        in rank order. Variables stay on the ranks for later cells; those of the notebook are not there.

        Example: %%ranks -o norms
        """
        args = self._arguments(self.ranks, line)
        session = self._session(args.session)
        if args.out is not None:
            self._store(args.out, lambda: session.run_cell(cell))
            return
        with _Friendly():
            texts = session.run_cell(cell, as_text=True)
        for rank, text in enumerate(texts):
            if text is not None:
                sys.stdout.write(f"[rank {rank}] {text}\n")

    @magic_arguments()
    @argument("what", choices=("smollm2",), help="what the notebook needs")
    @line_magic
    def needs(self, line: str) -> None:
        """Make sure that SmolLM2 is there, or say how to install it and skip the notebook's other cells.

        Each skipped cell says so. Once it is installed, run the cell with %needs again.

        Example: %needs smollm2
        """
        self._arguments(self.needs, line)
        _stop_skipping(self.shell)
        try:
            smollm2()
        except ModuleNotFoundError as error:
            sys.stdout.write(f"{error}\nThe other cells of this notebook are skipped.\n")
            self.shell.input_transformers_cleanup.insert(0, _skipped)

    # ---- helpers

    def _arguments(self, magic: Any, line: str) -> Any:
        try:
            return parse_argstring(magic, line)
        except UsageError as error:  # a UsageError leaves the cell "ok" for nbval; a failed magic must fail its cell
            raise ToolkitError(f"%{magic.__name__}: {error}") from None

    def _session(self, name: str | None) -> Session:
        names = self.shell.user_ns
        if name is not None:
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
            raise ToolkitError("there is no open session; make one with session = tk.launch(model=tk.tiny_policy()).")
        raise ToolkitError(
            f"there are several sessions: say which with --session {' or '.join(k for k, _ in found.values())}."
        )

    def _store(self, name: str | None, make: Any) -> Any:
        if name is not None:
            if not name.isidentifier() or keyword.iskeyword(name):
                raise ToolkitError(f"-o {name}: that is no name a variable can have.")
            held = self.shell.user_ns.get(name)
            if isinstance(held, Session) and held.is_open:
                raise ToolkitError(
                    f"-o {name}: {name} holds a live session, and its model would be lost; take another name."
                )
        with _Friendly():
            result = make()
        if name is None:
            return result
        self.shell.user_ns[name] = result
        return None

    def _whole(self, text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise ToolkitError(f"%grpo: {text!r} is not a whole number of steps.") from None


def _skipped(lines: list[str]) -> list[str]:
    """What is run instead of a cell while something is missing."""
    asks_again = any(line.lstrip().startswith("%needs") for line in lines)
    return lines if asks_again else ["print('skipped: see the cell with %needs')\n"]


def _stop_skipping(shell: Any) -> None:
    shell.input_transformers_cleanup[:] = [step for step in shell.input_transformers_cleanup if step is not _skipped]


class _Friendly:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        if isinstance(error, _FRIENDLY):
            raise ToolkitError(str(error)) from None


_LINE_MAGICS = ("output_dtype", "grpo", "memory", "divergence", "needs")


def load(ipython: Any) -> None:
    """Register the magics; loading again replaces them."""
    ipython.register_magics(ToolkitMagics(ipython))
    for name, values in {"output_dtype": DTYPES, "memory": DTYPES, "divergence": DTYPES}.items():
        ipython.set_hook("complete_command", lambda _, __, values=values: list(values), str_key=f"%{name}")
    local_ranks_warm_up()


def unload(ipython: Any) -> None:
    """Remove the magics."""
    _stop_skipping(ipython)
    for name in _LINE_MAGICS:
        ipython.magics_manager.magics["line"].pop(name, None)
    ipython.magics_manager.magics["cell"].pop("ranks", None)
    ipython.configurables[:] = [c for c in ipython.configurables if type(c).__name__ != "ToolkitMagics"]
