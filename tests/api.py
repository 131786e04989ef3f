"""The API reference, from signatures and docstrings.

python -m tests.api                            # the README's table of public calls
python -m tests.api --full > toolkit/API.md    # every public name in full
"""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import textwrap
from typing import Any

import toolkit as tk

_WIDE = 6  # parameters shown; the rest are behind `...`
BY_HAND = (tk.PolicySpec, tk.GRPOConfig, tk.Task)  # classes that users make; other records are given to them


def calls() -> dict[str, Any]:
    """Every public function and class by the name users type, then the methods and properties of a session."""
    public = {f"tk.{name}": getattr(tk, name) for name in tk.__all__ if not name.endswith("ipython_extension")}
    members = {f"session.{name}": item for name, item in inspect.getmembers(tk.Session) if not name.startswith("_")}
    return {**dict(sorted(public.items(), key=lambda item: item[0].casefold())), **members}


def parameters(item: Any) -> list[inspect.Parameter]:
    """Parameters a user passes; none for properties, errors, and records, which are not made by hand."""
    if not (inspect.isfunction(item) or item in BY_HAND):
        return []
    return [p for p in inspect.signature(item).parameters.values() if p.name != "self"]


def is_shown(item: Any) -> bool:
    return inspect.isfunction(item) or isinstance(item, property) or item in BY_HAND


def row(name: str, item: Any) -> str:
    given = parameters(item)
    names = [str(p.replace(annotation=p.empty, default=p.empty)) for p in given]
    if len(names) > _WIDE:
        names = [*names[: _WIDE - 1], "..."]
    call = name if isinstance(item, property) else f"{name}({', '.join(names)})"
    return f"| `{call}` | {inspect.getdoc(item).splitlines()[0]} |"  # type: ignore[union-attr]


def table() -> list[str]:
    """The table's lines."""
    return ["| call | what it does |", "|---|---|", *(row(name, item) for name, item in calls().items() if is_shown(item))]


def reference() -> str:
    """Every public name in full: its signature, its docstring, and the members of classes."""
    public = {name: item for name, item in calls().items() if name.startswith("tk.")}
    parts = [
        "# API reference",
        "Written from the code by `python -m tests.api --full`; `tk` is `import toolkit as tk`. Suffixes name shapes: `_B`"
        " sequences, `_T` tokens, `_V` vocabulary, `_H` hidden, `_P` prompts, `_G` group.",
    ]
    for name, item in public.items():
        parts += [f"## {name}", *_described(name, item)]
        if inspect.isclass(item):
            for member, what in _members(item):
                parts += [f"### {name.removeprefix('tk.')}.{member}", *_described(member, what)]
    return "\n\n".join(parts) + "\n"


def undocumented() -> list[str]:
    """Parameters that their docstring never names."""
    texts = {name: inspect.getdoc(item) or "" for name, item in calls().items()}
    return [f"{name}: {p.name}" for name, item in calls().items() for p in parameters(item)
            if not re.search(rf"\b{p.name}\b", texts[name])]  # fmt: skip


def _members(cls: type) -> list[tuple[str, Any]]:
    found = [(name, item) for name, item in inspect.getmembers(cls) if not name.startswith("_")]
    kinds = (property, functools.cached_property)
    ours = [(n, i) for n, i in found if isinstance(i, kinds) or getattr(i, "__module__", "").startswith("toolkit")]
    return [(name, item) for name, item in ours if inspect.getdoc(item)]


class _Bare(str):
    """An annotation, whose signature shows it without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _described(name: str, item: Any) -> list[str]:
    parts = []
    if inspect.isfunction(item) or item in BY_HAND:
        signature = inspect.signature(item)
        given = [p.replace(annotation=_Bare(p.annotation)) for p in signature.parameters.values() if p.name != "self"]
        shown = signature.replace(parameters=given, return_annotation=_Bare(signature.return_annotation))
        call = textwrap.fill(f"{name}{shown}", 110, subsequent_indent="    ", break_long_words=False)
        parts.append(f"```python\n{call}\n```")
    return [*parts, f"```text\n{inspect.getdoc(item)}\n```"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the API reference.")
    parser.add_argument("--full", action="store_true", help="every public name in full")
    print(reference() if parser.parse_args().full else "\n".join(table()), end="")
