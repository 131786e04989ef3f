"""`python -m toolkit`: the tour as one HTML file, and predictions, without a notebook."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit.arguments import Option
from toolkit.checks import check_file, check_whole
from toolkit.commands import LAUNCH, PREDICT, launched, predicted
from toolkit.engines import end_fork_server
from toolkit.errors import FRIENDLY, SpecError
from toolkit.spec import DTYPES, dtype_name

_JSON = Option(("--json",), "also write the records there", metavar="FILE")
_OWN = (
    Option(("--dtypes",), f"output dtypes, the first is the reference (default {' '.join(DTYPES)})", nargs="+"),
    Option(("--steps",), "GRPO steps in each output dtype (default 3)", int),
    Option(("--evaluate",), "held-out problems to grade before and after them (default 200; 0: none)", int),
    Option(("--pictures",), "static pictures for readers without JavaScript (default: if kaleido is here)", bool, nargs="?"),
    Option(("--out",), "the HTML file to write, over an old one (default report.html)", metavar="FILE"),
    _JSON,
)
REPORT = (*(o for o in LAUNCH if o.name not in ("output_dtype", "checkpoint_dir", "save_period")), *_OWN)
PREDICTION = (*PREDICT, _JSON)
_COMMANDS = {
    "report": (REPORT, "--model MODEL [--ranks N] [--out FILE] ...", "the tour as one HTML file"),
    "predict-memory": (PREDICTION, "MODEL --ranks N --sequence-length N ...", "predict the peak of a training step"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, 1 after a failure, 2 for bad arguments, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser("python -m toolkit", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parsers = {name: _command(commands, name, *about) for name, about in _COMMANDS.items()}
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = vars(parser.parse_args(arguments))
    command = parsed.pop("command")
    options = _COMMANDS[command][0]
    given = {o.name: o.value(parsed[o.name]) for o in options if parsed[o.name] is not None}
    try:
        return _report(given, arguments) if command == "report" else _predict(given)
    except FRIENDLY as error:
        if isinstance(error, SpecError | FileNotFoundError):
            parsers[command].error(str(error))  # exits with 2
        _say(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        end_fork_server()
        _say("interrupted; no file was written and no rank is left")
        return 130


def _command(commands: Any, name: str, options: Iterable[Option], usage: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, usage=f"python -m toolkit {name} {usage}", allow_abbrev=False
    )
    for option in options:
        option.declare(parser.add_argument)
    return parser


def _report(given: dict[str, Any], arguments: list[str]) -> int:
    own = {option.name: given.pop(option.name) for option in _OWN if option.name in given}
    if "model" not in given and "recipe" not in given:
        raise SpecError("a report is of a model: --model tiny_policy (which comes with the toolkit), a folder, or a hub id.")
    out = check_file("out=", own.get("out", "report.html"))
    records = check_file("json=", own["json"]) if "json" in own else None
    if records == out:
        raise SpecError(f"json={str(records)!r} is the file that the page goes to; give another.")
    steps = check_whole("steps", own.get("steps", 3))
    evaluated = check_whole("evaluate", own.get("evaluate", 200), minimum=0)
    dtypes = tuple(dict.fromkeys(dtype_name(dtype, "dtypes") for dtype in own.get("dtypes", DTYPES)))
    if len(dtypes) < 2:
        raise SpecError(f"dtypes={dtypes[0]!r}: a report compares two or more output dtypes; the first is the reference.")
    pictures = own.get("pictures")
    if pictures not in (None, True, False):
        raise SpecError(f"pictures={pictures!r} must be True or False.")

    _say("launching")
    with launched({**given, "output_dtype": dtypes[0]}) as session:
        from toolkit.tour import sections, take

        tour = take(session, dtypes, steps, evaluated, _say)
    from toolkit.page import page

    parts = sections(tour)
    stills = _stills([figure for part in parts for figure in part.figures], pictures)
    title = f"What the FSDP output dtype does to {Path(tour.settings['model']).name}"
    footer = f"Made by python -m toolkit {shlex.join(arguments)}"
    text = page(title, tour.tradeoffs.verdict, parts, footer=footer, pictures=stills)
    if records is not None:
        _write(records, tour.to_json())
    _write(out, text)
    _say(f"wrote {out}" + (f" and {records}" if records else ""))
    sys.stdout.write(f"{tour.tradeoffs.verdict}\n")
    return 0


def _predict(given: dict[str, Any]) -> int:
    records = check_file("json=", given.pop("json")) if "json" in given else None
    report = predicted(given)
    if records is not None:
        _write(records, report.to_json())
    sys.stdout.write(f"{report.headline}\n{report.to_frame().to_string(index=False)}\n{report.checked_against}\n")
    return 0


def _stills(figures: list[Any], wanted: bool | None) -> list[str]:
    """A static picture of each figure, or none; says why if any were hoped for."""
    if wanted is False:
        return []
    from toolkit.page import draw

    _say("static pictures")
    try:
        return draw(figures)
    except Exception as error:  # kaleido, or the browser it found
        if wanted:
            raise SpecError(f"pictures=True: they cannot be drawn here: {error}") from error
        _say(f"no static pictures: {error}")
        return []


def _write(path: Path, text: str) -> None:
    """Write a file at once or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _say(text: str) -> None:
    sys.stderr.write(f"toolkit: {text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
