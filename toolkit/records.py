"""The face all reports share: a one-line text, an HTML table with units, a frame, a figure, JSON."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_UNITS = {"bytes": "B", "seconds": "s", "nats": "nats"}


class Report:
    """Base of the records a session returns; each is a dataclass.

    Subclasses give `summary` and `to_frame`, and say in `headline` what was found, in words.
    """

    @property
    def summary(self) -> dict[str, Any]:
        """The scalar results by name."""
        raise NotImplementedError

    @property
    def headline(self) -> str:
        """The finding in one sentence."""
        raise NotImplementedError

    def to_frame(self) -> pd.DataFrame:
        """The detailed results, a row each."""
        raise NotImplementedError

    def figure(self) -> go.Figure:
        """The results as a plotly figure."""
        raise NotImplementedError

    def to_json(self) -> str:
        """The whole record as JSON; NaN and infinities as null, as JSON has none."""
        assert dataclasses.is_dataclass(self)
        return json.dumps(_plain({"type": type(self).__name__, "summary": self.summary, **dataclasses.asdict(self)}))

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.headline}"

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{html.escape(name)}</td><td>{html.escape(format_value(name, value))}</td></tr>"
            for name, value in self.summary.items()
        )
        return f"<div><b>{html.escape(self.headline)}</b><table>{rows}</table></div>"


def format_value(name: str, value: Any) -> str:
    """A value as text with the unit its name carries; sizes in KiB, MiB or GiB."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("bytes"):
        return format_bytes(value)
    text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    return f"{text} {unit}".rstrip()


def format_bytes(value: float) -> str:
    """Bytes in the largest binary unit that leaves at least 1, e.g. `86.5 GiB`."""
    size, sign = abs(value), "-" if value < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{sign}{size:.0f} {unit}" if unit == "B" else f"{sign}{size:.2f} {unit}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float | bool):
        return value
    to_dict = getattr(value, "to_dict", None)  # a DataFrame inside a record
    return _plain(to_dict("list")) if to_dict is not None else str(value)
