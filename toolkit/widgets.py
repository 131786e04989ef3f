"""Widgets. Each is labelled for screen readers and needs no network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.spec import DTYPES, dtype_name

if TYPE_CHECKING:
    import ipywidgets


def dtype_picker(value: str = "float32") -> ipywidgets.Dropdown:
    """A dropdown of FSDP output dtypes. Pass it to `launch(output_dtype=picker)`: picking switches the live session.

    Raises:
        SpecError: `value` is no dtype of the table.
    """
    import ipywidgets

    return ipywidgets.Dropdown(
        options=list(DTYPES),
        value=dtype_name(value, "value"),
        description="Output dtype",
        style={"description_width": "initial"},
    )
