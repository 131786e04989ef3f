"""A magic's line becomes values: the notebook's variables, words, declared arguments.

IPython would turn `$name` and `{expression}` into text before a magic sees them. Here one that stands alone stays the object
it is, so that a widget, a task or a list of problems can be given; within other text it is expanded as IPython does.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import cell_magic, line_magic, needs_local_scope, no_var_expand
from IPython.core.magic_arguments import argument
from IPython.utils.text import DollarFormatter

from toolkit.arguments import Option
from toolkit.checks import is_widget
from toolkit.errors import FRIENDLY

SESSION = Option(("-s", "--session"), "variable that holds the session, if there are several", metavar="NAME")
OUT = Option(("-o", "--out"), "store the result in this variable and show nothing", metavar="NAME")
#: `$name`, `$name.attribute` or `{expression}` as a whole argument.
_WHOLE = re.compile(r"(?<![^\s=])(?:\$([A-Za-z_][\w.]*)|\{([^{}]+)\})(?!\S)")
_MARK = re.compile("\ue000(\\d+)\ue001")  # stands for an object while the line is split into words


class ToolkitError(Exception):
    """A magic failed for a reason the user can fix; the message is all there is to see."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Friendly:
    """Turn errors that are the user's to fix into their messages."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        if isinstance(error, FRIENDLY):
            raise ToolkitError(str(error)) from None
        if isinstance(error, SyntaxError):  # of a cell's own code: the line and a caret, as IPython has it
            raise ToolkitError("".join(traceback.format_exception_only(error)).rstrip()) from None


@contextlib.contextmanager
def from_the_cell() -> Iterator[None]:
    """Let IPython show an error of a cell that ran on ranks from that cell's own lines on: frames before them are ours."""
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        start = text.find('  File "<%%ranks ')  # not the name of a cell that is no Python
        if start >= 0:
            lines = [f"raised on rank {vars(error)['rank']}:", text[start:].rstrip()]
            error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
        raise


def takes(*options: Option) -> Callable[[Any], Any]:
    """Declare a magic's arguments; they stay with it for completion. Goes below `@magic_arguments()`."""

    def declare(magic: Any) -> Any:
        for option in reversed(options):
            magic = option.declare(argument)(magic)
        magic.options = options
        return magic

    return declare


def of_a_line(magic: Any) -> Any:
    """Mark a method as a line magic that expands variables itself."""
    return line_magic(no_var_expand(needs_local_scope(magic)))


def of_a_cell(magic: Any) -> Any:
    """Mark a method as a cell magic that expands variables itself."""
    return cell_magic(no_var_expand(needs_local_scope(magic)))


def read_line(magic: Any, line: str, names: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments given in a magic's line, by name, as values.

    Args:
        magic: the decorated method.
        names: the notebook's variables.

    Raises:
        ToolkitError: what cannot be read, naming it.
    """
    line, objects = _with_objects(line, names)
    magic.parser.allow_abbrev = False  # a name cut short is a slip of the pen, and may mean another option some day
    try:
        parsed = vars(magic.parser.parse_args(shlex.split(line)))
    except UsageError as error:  # a UsageError leaves the cell "ok" for nbval; a failed magic must fail its cell
        message = _MARK.sub(lambda mark: str(objects[int(mark[1])]), str(error))
        raise ToolkitError(f"%{magic.__name__}: {message} (%{magic.__name__}? shows what it takes)") from None
    except ValueError as error:
        raise ToolkitError(f"%{magic.__name__} {line}: {error}; put text with quotes or spaces in quotes.") from None
    given = {}
    for option in magic.options:
        found = parsed[option.name]
        if found is not None and found != []:
            found = [_restored(one, objects) for one in found] if isinstance(found, list) else _restored(found, objects)
            given[option.name] = option.value(_widget(found, names) if option not in (OUT, SESSION) else found)
    return given


def _with_objects(line: str, names: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The line with variables expanded, those that stand alone as marks of the objects returned beside it."""
    objects: list[Any] = []

    def hold(found: re.Match[str]) -> str:
        try:
            objects.append(eval(found[1] or found[2], dict(names)))
        except SyntaxError:  # braces that are no expression: text
            return found[0]
        except Exception as error:
            raise ToolkitError(f"{found[0]}: {type(error).__name__}: {error}") from None
        return f"\ue000{len(objects) - 1}\ue001"

    line = _WHOLE.sub(hold, line)
    try:
        return DollarFormatter().vformat(line, (), dict(names)), objects
    except Exception:  # as IPython: braces and dollars that name nothing are text
        return line, objects


def _restored(word: str, objects: list[Any]) -> Any:
    whole = _MARK.fullmatch(word)
    return objects[int(whole[1])] if whole else _MARK.sub(lambda mark: str(objects[int(mark[1])]), word)


def _widget(value: Any, names: Mapping[str, Any]) -> Any:
    """The widget that a bare name stands for; any other value as it is."""
    return names[value] if isinstance(value, str) and is_widget(names.get(value)) else value
