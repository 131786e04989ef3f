"""The README's fault table, from the tests that cause each fault. `python -m tests.faults` prints it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

_MODULES = ("test_session", "test_step", "test_ranks", "test_checkpoint", "test_kernels", "test_cluster")
_rows: dict[str, tuple[str, str]] = {}


def fault(happens: str, seen: str, survives: str) -> Callable[[Any], Any]:
    """Mark a test as the proof of a row."""

    def keep(test: Any) -> Any:
        _rows[happens] = (seen, survives)
        return test

    return keep


def table() -> list[str]:
    """The table's lines."""
    for module in _MODULES:
        importlib.import_module(f"tests.{module}")
    rows = [f"| {happens} | {seen} | {survives} |" for happens, (seen, survives) in _rows.items()]
    return ["| what happens | what you see | what survives |", "|---|---|---|", *rows]


if __name__ == "__main__":
    from tests.faults import table as whole_table  # this file is also a module that the tests import

    print("\n".join(whole_table()))
