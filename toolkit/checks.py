"""Checks of single values; each refusal names what was typed and what is allowed."""

from __future__ import annotations

import math
import numbers
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
        raise SpecError(
            "temperature=0: 1/T is infinite, and greedy completions of one prompt are all the same, so every "
            "advantage is 0. Use session.evaluate() for greedy accuracy; sample with a temperature above 0."
        )
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
