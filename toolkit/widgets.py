"""Widgets. Each is labelled for screen readers, takes its colours from the page's theme, and needs no network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit.spec import DTYPES, dtype_name

if TYPE_CHECKING:
    import ipywidgets

#: Of messages, readable on JupyterLab's light and dark pages and elsewhere.
ERROR_COLOUR = "color:var(--jp-error-color1, #d32f2f);line-height:1.4"
_LABEL = {"description_width": "170px"}
_WIDE = "390px"


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


def text_widget(value: str, offered: list[str] | None = None) -> ipywidgets.Text:
    """A line of text that reports every key; with `offered`, a list to pick from that takes other texts too."""
    import ipywidgets

    if offered is not None:
        return ipywidgets.Combobox(value=value, options=offered, ensure_option=False, continuous_update=True)
    return ipywidgets.Text(value=value, continuous_update=True)


def field_with_message(control: ipywidgets.Widget, message: ipywidgets.HTML) -> ipywidgets.VBox:
    """A control of a form with the place of its message right below."""
    import ipywidgets

    control.style, control.layout = _LABEL, {"width": _WIDE}
    message.layout = {"width": _WIDE, "margin": "0 0 0 4px"}
    return ipywidgets.VBox([control, message], layout={"width": "405px", "overflow": "visible"})
