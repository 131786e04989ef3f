"""The figure of the precision edges, in the look of `figures.template`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from toolkit.edge_report import MADE_UP
from toolkit.edge_rows import ORDER, REFERENCE
from toolkit.figures import BLUE, GREEN, GREY, PURPLE, VERMILION, template, wrapped

if TYPE_CHECKING:
    from toolkit.edge_report import Edge, EdgeReport

#: Where an exact 0 is drawn, as there is none on a log axis: left of every error of a 32-bit float.
_ZERO = 1e-9


def edges_figure(report: EdgeReport) -> go.Figure:
    """Each edge's largest error with and without its cure (log scale), and the temperature's order by temperature."""
    worst = report.worst
    missing = f"; {len(report.not_measured)} not measured" if report.not_measured else ""
    figure = make_subplots(
        cols=2,
        column_widths=[0.56, 0.44],
        horizontal_spacing=0.14,
        subplot_titles=("Largest error of each edge", "Dividing by T before the upcast"),
    )
    lines = max((_label(edge).count("<br>") + 1 for edge in worst.values()), default=1)
    figure.update_layout(
        template=template(), height=144 + (18 + 12 * lines) * max(len(worst), 7),
        title_text=f"{len(report.biting)} of {len(worst)} precision edges bite here{missing}",
        margin={"l": 210, "b": 110}, legend={"orientation": "h", "x": -0.2, "y": -0.22},
    )  # fmt: skip
    for annotation in figure.layout.annotations:
        annotation.font = {"size": 13, "color": GREY}
    _bars(figure, report)
    _by_temperature(figure, report)
    return figure


def _label(edge: Edge) -> str:
    return f"{wrapped(edge.edge, 34)}<br><span style='font-size:11px'>{edge.unit}</span>"


def _bars(figure: go.Figure, report: EdgeReport) -> None:
    rows = [edge for edge in report.worst.values() if edge.error is not None]
    labels = [_label(edge) for edge in rows]
    for name, values, colour, symbol in (
        ("as it is", [edge.error for edge in rows], VERMILION, "square"),
        ("with the cure", [edge.error_with_cure for edge in rows], GREEN, "circle"),
    ):
        drawn = [None if v is None else max(v, _ZERO) if math.isfinite(v) else 10.0 for v in values]
        words = ["" if v is None or 0 < v < math.inf else "0" if v == 0 else "out of range" for v in values]
        figure.add_scatter(
            x=drawn, y=labels, mode="markers+text", text=words, textposition="middle right", name=name,
            marker={"color": colour, "symbol": symbol, "size": 11},
            customdata=[[edge.setting, edge.cure, edge.finding] for edge in rows],
            hovertemplate=f"{name}: %{{x:.2e}}<br>%{{customdata[0]}}<br>cure: %{{customdata[1]}}<br>%{{customdata[2]}}",
            row=1, col=1,
        )  # fmt: skip
    figure.update_xaxes(title_text="error", type="log", range=[-9.4, 1.5], dtick=2, row=1, col=1)
    figure.update_yaxes(autorange="reversed", tickfont={"size": 12}, row=1, col=1)


def _by_temperature(figure: go.Figure, report: EdgeReport) -> None:
    for edge_name, name, colour, dash in (
        (ORDER, "this model's logits", BLUE, "solid"),
        (f"{ORDER}{MADE_UP}", REFERENCE, PURPLE, "dash"),
    ):
        line = [edge for edge in report.edges if edge.edge == edge_name and edge.error is not None]
        figure.add_scatter(
            x=[edge.temperature for edge in line], y=[100 * (edge.error or 0.0) for edge in line], name=name,
            mode="lines+markers", line={"color": colour, "dash": dash}, marker={"size": 7},
            hovertemplate="T=%{x}: %{y:.3g} %", row=1, col=2,
        )  # fmt: skip
    figure.update_xaxes(title_text="temperature", row=1, col=2)
    figure.update_yaxes(title_text="probability error, % (vocabulary mean)", rangemode="tozero", row=1, col=2)
