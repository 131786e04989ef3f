"""Declared arguments: each field of the specs as an option under its own name, and text as its value.

Magics and the command line declare theirs here, so both have the same names, help and conversions. Text that cannot be
converted is passed on as it is: the field's own check then says what was typed and what is allowed.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import SpecError
from toolkit.grpo_config import TASKS
from toolkit.models import known_models, smollm2, tiny_policy
from toolkit.spec import DTYPES, GRPOConfig, PolicySpec

#: Models that come with the toolkit or beside it, by the name of the function that gives their folder.
SHIPPED = ("tiny_policy", "smollm2")
#: Fields of PolicySpec whose values are dtypes.
_DTYPE_FIELDS = ("output_dtype", "precision", "reduce_dtype", "lm_head_precision")
_VALUES = {"task": TASKS, "model": SHIPPED, "attn_implementation": ("eager", "sdpa", "flash_attention_2")}


@dataclass(frozen=True, slots=True)
class Option:
    """One declared argument.

    Attributes:
        flags: "--output-dtype" and its like, or one name without dashes for a positional.
        help: what it is.
        hint: the type of its value, as annotated.
        values: what completion offers, or a function that lists it.
        nargs: argparse's.
        metavar: what stands for the value in help.
    """

    flags: tuple[str, ...]
    help: str
    hint: Any = str
    values: tuple[str, ...] | Callable[[], tuple[str, ...]] = ()
    nargs: str | None = None
    metavar: str | None = None

    @property
    def name(self) -> str:
        """The name of the argument in Python."""
        return max(self.flags, key=len).lstrip("-").replace("-", "_")

    @property
    def is_positional(self) -> bool:
        """Whether it has no flag."""
        return not self.flags[0].startswith("-")

    @property
    def is_switch(self) -> bool:
        """Whether the flag alone means True."""
        return self.nargs == "?" and not self.is_positional

    def declare(self, add: Callable[..., Any]) -> Any:
        """Call argparse's `add_argument`, or the magics' `argument`, with this option."""
        settings: dict[str, Any] = {"help": self.help.replace("%", "%%"), "nargs": self.nargs}
        if not self.is_positional or self.metavar is not None:
            settings["metavar"] = self.metavar or "VALUE"
        if self.is_switch:
            settings["const"] = "True"
        return add(*self.flags, **settings)

    def value(self, text: Any) -> Any:
        """The value that text stands for; what is no text (a notebook's object) is its own."""
        return [convert(one, self.hint) for one in text] if isinstance(text, list) else convert(text, self.hint)


def convert(text: Any, hint: Any) -> Any:
    """Text as a value of an annotated type: None, True, False, numbers where the type has them, else the text itself."""
    if not isinstance(text, str):
        return text
    kinds = _kinds(hint)
    if type(None) in kinds and text.lower() == "none":
        return None
    if (bool in kinds or False in kinds) and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                continue
    return text


def field_options(*classes: type, only: Iterable[str] | None = None, without: Iterable[str] = ()) -> list[Option]:
    """An option for each field of dataclasses, under the field's name in kebab-case; help is that of their docstrings."""
    options = []
    for cls in classes:
        hints, texts = typing.get_type_hints(cls), _attribute_texts(cls)
        for field in dataclasses.fields(cls):
            if field.name in without or (only is not None and field.name not in only):
                continue
            kinds = _kinds(hints[field.name])
            default = "" if field.default is dataclasses.MISSING else f" Default: {field.default}."
            options.append(
                Option(
                    (f"--{field.name.replace('_', '-')}",),
                    texts[field.name] + default,
                    hints[field.name],
                    _values(field.name, kinds),
                    "?" if kinds == {bool} else None,
                )
            )
    return options


def given_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the given arguments that are fields of PolicySpec or GRPOConfig; a shipped model's name as its folder."""
    names = {field.name for cls in (PolicySpec, GRPOConfig) for field in dataclasses.fields(cls)}
    fields = {name: value for name, value in given.items() if name in names}
    return {**fields, **({"model": model_of(fields["model"])} if "model" in fields else {})}


def model_of(value: Any) -> Any:
    """The folder of a shipped model given by name; anything else as it is.

    Raises:
        SpecError: the model is not installed; says how to.
    """
    if value not in SHIPPED or Path(value).is_dir():
        return value
    try:
        return tiny_policy() if value == "tiny_policy" else smollm2()
    except ModuleNotFoundError as error:
        raise SpecError(f"model={value!r}: {error}") from error


def predictable_models() -> tuple[str, ...]:
    """Names that `predict_memory` takes, beside folders and hub ids."""
    return (*SHIPPED, *known_models())


def _kinds(hint: Any) -> set[Any]:
    """The types of a union, and the values of its literals."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*(_kinds(part) for part in typing.get_args(hint)))
    return set(typing.get_args(hint)) if typing.get_origin(hint) is Literal else {hint}


def _values(name: str, kinds: set[Any]) -> tuple[str, ...]:
    if name in _DTYPE_FIELDS:
        values = tuple(DTYPES)
    else:
        words = tuple(sorted(kind for kind in kinds if isinstance(kind, str)))
        values = (*_VALUES.get(name, words), *(("True", "False") if bool in kinds else ()))
    return (*values, *(("None",) if type(None) in kinds else ()))


def _attribute_texts(cls: type) -> dict[str, str]:
    """What a class's docstring says of each attribute."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    texts: dict[str, str] = {}
    for names, text in re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return texts
