"""Checks of single values; each refusal names what was typed and what is allowed."""

from __future__ import annotations

import math
import numbers
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolkit.errors import SpecError


def check_one_of(field: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise a SpecError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise SpecError(f"{field}={value!r} is not allowed; choose one of {', '.join(map(repr, allowed))}.")


def check_flag(field: str, value: Any) -> None:
    """Raise a SpecError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise SpecError(f"{field}={value!r} must be True or False.")


def check_whole(field: str, value: Any, minimum: int = 1, maximum: float = math.inf) -> int:
    """Return `value` as an int; raise a SpecError unless it is a whole number from `minimum` to `maximum`."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)  # numpy's whole numbers too
    if not whole or not minimum <= int(value) <= maximum:
        bound = f" and at most {maximum:.0f}" if maximum < math.inf else ""
        raise SpecError(f"{field}={value!r} must be a whole number of at least {minimum}{bound}.")
    return int(value)


def is_power_of_two(value: float) -> bool:
    """Whether dividing by `value` only changes exponents, so that no bit of any floating dtype is lost."""
    return math.frexp(value)[0] == 0.5


def check_temperature(value: Any) -> float:
    """Return a temperature as a float; raise a SpecError outside of [1e-3, 1e3].

    Beyond these z/T loses every digit or leaves float32; at 0 it does not exist.
    """
    if value == 0:
        raise SpecError("temperature=0: logits are divided by it; give one from 0.001 to 1000.")
    return check_number("temperature", value, 1e-3, 1e3)


def check_number(field: str, value: Any, low: float, high: float = math.inf, *, open_low: bool = False) -> float:
    """Return `value` as a float; raise a SpecError unless it is a finite number from `low` (or above it) to `high`."""
    is_number = not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value)
    if not is_number or not low <= value <= high or (open_low and value == low):
        bound = f"above {low}" if open_low else f"of at least {low}"
        raise SpecError(
            f"{field}={value!r} must be a finite number {bound}" + (f" and at most {high}." if high < math.inf else ".")
        )
    return float(value)


def check_path(call: str, value: Any) -> Path:
    """Return the absolute path of a file or folder; raise a SpecError for what cannot be one.

    Args:
        call: what it was given to: a function's name, or "field=".
    """
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise SpecError(f"{_given(call, value)}: give a path, as text or a pathlib.Path.")
    try:
        path = Path(value).expanduser().absolute()
        path.exists()
    except (OSError, RuntimeError) as error:  # too long a name; a ~user that is not there
        raise SpecError(f"{_given(call, str(value))}: no such path can be ({error}).") from None
    return path


def check_folder(call: str, value: Any) -> Path:
    """Return the absolute path of a folder that can be made and written to; raise a SpecError if it cannot.

    It is tried: permission bits do not tell for root, read-only mounts and network folders.
    """
    folder = check_path(call, value)
    there = folder
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        what = "that is a file" if there == folder else f"{str(there)!r} is a file"
        raise SpecError(f"{_given(call, str(folder))}: {what}, and a folder is needed; take another path.")
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".toolkit-"):
            pass
    except OSError as error:
        why = f"nothing can be written there ({error.strerror}); take another path."
        raise SpecError(f"{_given(call, str(folder))}: {why}") from None
    return folder


def check_file(call: str, value: Any) -> Path:
    """Return the absolute path of a file that can be written, over an old one if there is one; raise a SpecError if not."""
    path = check_path(call, value)
    if path.is_dir():
        raise SpecError(f"{_given(call, str(path))}: that is a folder; give the path of a file.")
    if not path.parent.exists():
        raise SpecError(f"{_given(call, str(path))}: there is no folder {str(path.parent)!r}; make it first.")
    check_folder(call, path.parent)
    return path


def _given(call: str, value: Any) -> str:
    return f"{call}{value!r}" if call.endswith("=") else f"{call}({value!r})"


def check_list(field: str, values: Any) -> list[Any]:
    """Return several values as a list; raise a SpecError for one value that stands alone."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise SpecError(f"{field}={values!r}: give a list of values, e.g. [{values!r}].")
    return list(values)


def check_texts(value: Any) -> list[str]:
    """Return one text, or several, as a list; raise a SpecError for anything else and for empty ones."""
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []
    if not texts or not all(isinstance(one, str) and one for one in texts):
        raise SpecError(f"text={value!r}: give a text, or a list of texts, none of them empty.")
    return texts


def check_source(value: Any) -> str:
    """Return Python source; raise a SpecError for what is no text."""
    if not isinstance(value, str):
        raise SpecError(f"{_given('run_cell', value)}: give the cell's code, as text.")
    return value


def check_function(call: str, value: Any) -> None:
    """Raise a SpecError for what cannot be called."""
    if not callable(value):
        raise SpecError(f"{_given(call, value)}: give a function.")


def is_widget(value: Any) -> bool:
    """Whether a value is a widget; asked without importing ipywidgets."""
    widgets = sys.modules.get("ipywidgets")  # not imported: then nobody can have made one
    return widgets is not None and isinstance(value, widgets.Widget)


def check_rows(token_ids: Any) -> list[list[int]]:
    """Sequences of token ids (lists, arrays, tensors) as plain lists; raise a SpecError for what are none."""
    return [_plain_row(index, row) for index, row in enumerate(_plain(token_ids))]


def _plain(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    to_list = getattr(value, "tolist", None)  # numpy arrays, torch tensors
    listed = to_list() if callable(to_list) else value
    if not isinstance(listed, list):
        raise SpecError(f"token_ids={value!r}: give a list of sequences of token ids; for text, encode it first.")
    return listed


def _plain_row(index: int, row: Any) -> list[int]:
    if not isinstance(row, list | tuple) and not hasattr(row, "tolist"):
        raise SpecError(f"token_ids[{index}] is {row!r}; each must be a sequence of token ids.")
    ids = _plain(row)
    wrong = [token for token in ids if isinstance(token, bool) or not isinstance(token, numbers.Integral)]
    if wrong:
        raise SpecError(f"token_ids[{index}] has {wrong[0]!r}; token ids are whole numbers.")
    return [int(token) for token in ids]
