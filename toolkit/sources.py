"""Keep the source lines of functions that travel to the ranks by value, so that their tracebacks can be read."""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Iterator
from types import FunctionType
from typing import Any


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions in a call's arguments, in a fixed order."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from functions_in(item)
    elif isinstance(value, dict):
        yield from functions_in(list(value.values()))


def source_of(function: FunctionType) -> str | None:
    """The source of a function that travels by value (from a cell, or local to another), at its own line numbers."""
    if function.__module__ != "__main__" and "<locals>" not in function.__qualname__:
        return None
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):  # typed at a prompt, say
        return None
    return "\n" * (first - 1) + "".join(lines)


def show_source(function: FunctionType, source: str | None) -> None:
    """Let tracebacks show a function's lines: cloudpickle drops the name of its file."""
    if source is None:
        return
    name = f"<{function.__module__} {function.__qualname__} {hash(source):x}>"
    function.__code__ = function.__code__.replace(co_filename=name)
    show_lines(name, source)


def show_lines(name: str, source: str) -> None:
    """Let tracebacks show the lines of code compiled under a made-up file name."""
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
