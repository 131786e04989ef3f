"""What the Tab key offers within a magic's line: its options, and the values of the argument at the cursor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from toolkit.arguments import Option
from toolkit.checks import is_widget
from toolkit.magic_lines import SESSION
from toolkit.session import Session
from toolkit.spec import DTYPES

_LINE = re.compile(r"^\s*(?:[\w.\[\], ]+=\s*)?%{1,2}(\w+)\s+(.*)$")


def matcher(magics: Mapping[str, Any], names: Mapping[str, Any]) -> Any:
    """A matcher for `IPCompleter.custom_matchers`: the one way that `ip.complete` and a kernel's complete_request share.

    Where it has an answer, it is the only one: Python names and jedi would be noise among a magic's arguments.

    Args:
        magics: methods with declared options, by the name of the magic.
        names: the notebook's variables.
    """

    @context_matcher()
    def toolkit_magics(context: CompletionContext) -> SimpleMatcherResult:
        found = _LINE.match(context.text_until_cursor)
        offered: Iterable[str] = ()
        if found is not None and found[1] in magics:
            offered = candidates(magics[found[1]].options, found[2], names)
        fitting = [text for text in offered if text.lower().startswith(context.token.lower())]
        return SimpleMatcherResult(
            completions=[SimpleCompletion(text, type="magic argument") for text in fitting], suppress=True, ordered=True
        )

    return toolkit_magics


def candidates(options: Iterable[Option], text: str, names: Mapping[str, Any]) -> list[str]:
    """All that may stand at the end of `text`, the arguments up to the cursor.

    Args:
        options: those the magic declares.
        names: the notebook's variables.
    """
    options = list(options)
    *before, current = re.split(r"\s+|(?<=\w)=", text)
    by_flag = {flag: option for option in options for flag in option.flags if not option.is_positional}
    unused = [o for o in options if not o.is_positional and not set(o.flags) & set(before)]
    flags = [max(option.flags, key=len) for option in unused]
    if current.startswith("-"):
        return flags
    places = [place for place, word in enumerate(before) if word in by_flag]
    option = by_flag[before[places[-1]]] if places else None
    since = len(before) - places[-1] - 1 if places else 0
    if option is not None and (option.nargs == "+" or since == 0):
        return [*_values(option, names), *(flags if option.is_switch or since else [])]
    return [*_positional(options, before, by_flag, names), *flags]


def _positional(
    options: list[Option], before: list[str], by_flag: Mapping[str, Option], names: Mapping[str, Any]
) -> list[str]:
    """Values of the positional argument that comes next."""
    taken, skip = 0, False
    for word in before:
        taken += not skip and word not in by_flag
        skip = word in by_flag
    positionals = [option for option in options if option.is_positional]
    many = [option for option in positionals if option.nargs == "*"]
    here = positionals[taken : taken + 1] or many
    return [value for option in here for value in _values(option, names)]


def _values(option: Option, names: Mapping[str, Any]) -> list[str]:
    if option.name == SESSION.name:
        return [name for name, v in names.items() if isinstance(v, Session) and v.is_open and not name.startswith("_")]
    values = option.values() if callable(option.values) else option.values
    widgets = [name for name, value in names.items() if is_widget(value) and not name.startswith("_")]
    return [*values, *(widgets if set(DTYPES) & set(values) else [])]
