"""The figure of a grid of settings: what each saves and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go

from toolkit.figures import DTYPE_STYLE, GREY, new_figure
from toolkit.records import format_bytes
from toolkit.tradeoff_report import TradeoffRow

if TYPE_CHECKING:
    from toolkit.tradeoff_report import TradeoffReport


def tradeoffs_figure(report: TradeoffReport) -> go.Figure:
    """Peak memory against mean |delta|, a point per setting: filled where measured, open where predicted.

    The dashed line is the Pareto front. Without a divergence (a prediction alone) the peaks are bars.
    """
    rows = [row for row in report.rows if row.peak_bytes is not None]
    largest = max((row.peak_bytes or 0 for row in rows), default=0)
    unit, size = next(
        (u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1)) if largest >= s or s == 1
    )
    plotted = [row for row in rows if row.mean_abs_nats is not None]
    if not plotted:
        return _bars(report, rows, unit, size)
    front = sorted((r for r in plotted if r.pareto), key=lambda r: r.mean_abs_nats or 0.0)
    reference = report.rows[0]
    figure = new_figure(_title(report, rows))
    figure.add_scatter(
        x=[r.mean_abs_nats for r in front], y=[(r.peak_bytes or 0) / size for r in front], mode="lines", name="Pareto front",
        line={"color": GREY, "dash": "dash", "shape": "hv", "width": 1}, hoverinfo="skip", showlegend=len(front) > 1,
    )  # fmt: skip
    most = max(max(r.mean_abs_nats or 0.0 for r in plotted), 1e-6)
    low, high = (f((r.peak_bytes or 0) / size for r in rows) for f in (min, max))
    room = max(high - low, 0.01 * high)
    alone = len(report.varied) == 1  # then a dtype says all; else numbers, and the legend says what they are
    places = [((r.mean_abs_nats or 0.0) / most, (r.peak_bytes or 0) / size / room) for r in plotted]
    numbers = [r.output_dtype for r in plotted] if alone else numbered(places)
    for number, (label, row) in enumerate(zip(numbers, plotted, strict=True), 1):
        colour, symbol, _ = DTYPE_STYLE[row.output_dtype]
        predicted = row.memory_source == "predicted"
        figure.add_scatter(
            x=[row.mean_abs_nats], y=[(row.peak_bytes or 0) / size], text=[label], mode="markers+text",
            name=f"{number}: {_label(report, row)}", textposition="bottom right", showlegend=not alone,
            marker={"color": colour, "symbol": f"{symbol}-open" if predicted else symbol, "size": 12},
            customdata=[[row.memory_source, row.divergence_source, format_bytes(row.peak_bytes or 0)]],
            hovertemplate=f"{_label(report, row)}<br>"
            "%{x:.2e} nats (%{customdata[1]})<br>%{customdata[2]} (%{customdata[0]})",
        )  # fmt: skip
    figure.update_xaxes(
        title_text=f"mean |delta| in nats from {reference.describe(report.varied)}", range=[-0.08 * most, 1.5 * most]
    )
    figure.update_yaxes(title_text=f"peak {unit}", range=[low - 0.4 * room, high + 0.4 * room])
    if any(row.memory_source == "predicted" for row in plotted):
        figure.add_annotation(
            text="open: predicted", x=1, y=1, xref="paper", yref="paper", showarrow=False, yanchor="bottom"
        )
    key = 0 if alone else 19 * len(plotted)
    figure.update_layout(height=480 + key, margin={"t": 100, "b": 110 + key})
    figure.update_layout(legend={"orientation": "h" if alone else "v", "x": 0, "y": -75 / 270, "yanchor": "top"})
    return figure


def numbered(places: list[tuple[float, float]]) -> list[str]:
    """Numbers from 1 for points on axes of about unit length; those that fall together are said at the first of them."""
    labels: list[list[str]] = []
    for number, (x, y) in enumerate(places, 1):
        near = (i for i, (u, v) in enumerate(places[: number - 1]) if abs(u - x) < 0.04 and abs(v - y) < 0.05 and labels[i])
        first = next(near, None)
        labels.append([] if first is not None else [str(number)])
        if first is not None:
            labels[first].append(str(number))
    return [", ".join(label) for label in labels]


def _label(report: TradeoffReport, row: TradeoffRow) -> str:
    """The output dtype alone where nothing else varies."""
    return row.output_dtype if len(report.varied) == 1 else row.describe(report.varied)


def _title(report: TradeoffReport, rows: list[TradeoffRow]) -> str:
    reference, best = report.rows[0], min(rows, key=lambda row: row.peak_bytes or 0)
    if reference.peak_bytes is None or best.peak_bytes == reference.peak_bytes:
        return f"No setting has a lower peak than {reference.describe(report.varied)}"
    change = (best.peak_bytes or 0) / reference.peak_bytes - 1
    return f"{_label(report, best)}: peak {change:+.1%}<br>against {_label(report, reference)}"


def _bars(report: TradeoffReport, rows: list[TradeoffRow], unit: str, size: int) -> go.Figure:
    figure = new_figure(f"{_title(report, rows)} (predicted)")
    figure.add_bar(
        y=[_label(report, row) for row in rows],
        x=[(row.peak_bytes or 0) / size for row in rows],
        orientation="h",
        marker={"color": [DTYPE_STYLE[row.output_dtype][0] for row in rows]},
        hovertemplate=f"%{{y}}: %{{x:.2f}} {unit}<extra></extra>",
    )
    figure.update_xaxes(title_text=f"peak {unit}")
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(height=150 + 26 * len(rows), title={"xref": "container", "x": 0.02})
    return figure
