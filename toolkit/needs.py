"""What a notebook cannot do without: say how to install it, and skip the cells that would fail."""

from __future__ import annotations

import sys
from typing import Any

from toolkit.models import smollm2


def need_smollm2() -> None:
    """Make sure that SmolLM2 is there; else say how to install it, and skip the notebook's other cells, each saying so.

    Once it is installed, run the cell with this call again. Outside of a notebook, `tk.smollm2()` is all there is to call.
    """
    shell = _shell()
    steps: list[Any] = shell.input_transformers_cleanup
    steps[:] = [step for step in steps if step is not _skipped]
    try:
        smollm2()
    except ModuleNotFoundError as error:
        sys.stdout.write(f"{error}\nThe other cells of this notebook are skipped.\n")
        steps.insert(0, _skipped)


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None
    return shell


def _skipped(lines: list[str]) -> list[str]:
    """What is run instead of a cell while something is missing."""
    asks_again = any("need_smollm2" in line for line in lines)
    return lines if asks_again else ["print('skipped: SmolLM2 is not installed')\n"]
