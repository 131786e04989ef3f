"""Figures of a run under way: pure functions of its records; and the bundle that shows one wherever the page is opened."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.figures import BLUE, DTYPE_STYLE, GREY, PURPLE, VERMILION, new_figure
from toolkit.memory_figures import unit_of
from toolkit.mismatch import THRESHOLDS
from toolkit.records import format_bytes

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from toolkit.memory_report import MemoryReport
    from toolkit.records import StepRecord

_KL = {
    "gen_kl_error": (BLUE, "solid", "circle"),
    "policy_kl_error": (VERMILION, "dash", "square"),
    "js_divergence_error": (PURPLE, "dot", "diamond"),
}
#: What a logarithmic axis shows in place of 0.
_FLOOR = 1e-9
_LEAST_WIDTH = 5  # steps on the axis, so that the first few do not jump about
_TABLE = ("step", "output_dtype", "reward", "loss", "token_mult_prob_error", "gen_kl_error", "tokens_per_second")
_TABLE_ROWS = 6


def tokens_per_second(record: StepRecord) -> float:
    """Completion tokens that a step trained on, by its wall time on rank 0."""
    return record.metrics["global_valid_toks"] / sum(record.seconds.values())


def switches(records: Sequence[StepRecord]) -> list[tuple[float, str]]:
    """Where the output dtype changed: half a step before the first with the new one, and that dtype."""
    pairs = itertools.pairwise(records)
    return [(now.step - 0.5, now.output_dtype) for before, now in pairs if now.output_dtype != before.output_dtype]


def run_figure(records: Sequence[StepRecord], memory: Mapping[int, MemoryReport]) -> go.Figure:
    """Reward, loss, mismatch, speed and peak memory by step; switches of the output dtype are marked.

    Args:
        records: at least one.
        memory: measured reports by the number of steps taken before.
    """
    last = records[-1]
    error, limit = last.metrics["token_mult_prob_error"], THRESHOLDS["token_mult_prob_error"]
    peak = f"peak {format_bytes(list(memory.values())[-1].peak_bytes)}" if memory else "peak: not measured"
    within = (
        "not measured: no token counted" if math.isnan(error) else f"{'within' if error <= limit else 'above'} its limit"
    )
    figure = new_figure(
        f"{_progress(records)}; mismatch {within}",
        rows=3,
        cols=2,
        shared_xaxes=True,
        vertical_spacing=0.09,
        horizontal_spacing=0.11,
        subplot_titles=(
            f"mean reward: {last.metrics['reward']:.3f}",
            f"loss: {last.metrics['loss']:.2g}",
            f"token_mult_prob_error: {error:.4f}",
            "KL of sampler and trainer, nats",
            f"tokens per second: {tokens_per_second(last):,.0f}",
            f"memory of a step, per rank: {peak}",
        ),
    )
    steps = [record.step for record in records]
    for row, col, values in (
        (1, 1, [record.metrics["reward"] for record in records]),
        (1, 2, [record.metrics["loss"] for record in records]),
        (2, 1, [record.metrics["token_mult_prob_error"] for record in records]),
        (3, 1, [tokens_per_second(record) for record in records]),
    ):
        _by_dtype(figure, steps, values, [record.output_dtype for record in records], row, col)
    _kl_panel(figure, records)
    if memory:
        unit, size = unit_of(max(report.peak_bytes for report in memory.values()))
        taken = [report.peak_bytes / size for report in memory.values()]
        _by_dtype(figure, [step + 1 for step in memory], taken, [report.output_dtype for report in memory.values()], 3, 2)
        figure.update_yaxes(title={"text": unit, "font": {"size": 13}}, rangemode="tozero", row=3, col=2)
    else:
        figure.update_yaxes(visible=False, row=3, col=2)
    _limit(figure, limit, row=2, col=1)
    for place, dtype in switches(records):
        figure.add_vline(x=place, line={"color": GREY, "dash": "dot", "width": 1.5})
        figure.add_annotation(
            x=place, y=1, yref="y domain", text=f"→ {dtype}", showarrow=False, xanchor="left", yanchor="top",
            font={"size": 11}, xshift=3,
        )  # fmt: skip
    first, end = steps[0] - 0.5, max(steps[-1], steps[0] + _LEAST_WIDTH) + 0.5
    every = max(1, round((end - first) / 8))
    figure.update_xaxes(range=[first, end], tick0=0, dtick=every, showticklabels=True)
    figure.update_xaxes(title={"text": "step", "font": {"size": 13}, "standoff": 4}, row=3)
    figure.update_yaxes(rangemode="tozero", col=1, row=1)
    figure.update_yaxes(rangemode="tozero", col=1, row=3)
    figure.update_layout(height=700, legend={"orientation": "h", "y": -0.12, "yanchor": "top"}, margin={"t": 75, "b": 90})
    return figure


def _progress(records: Sequence[StepRecord]) -> str:
    first, last = records[0].metrics["reward"], records[-1].metrics["reward"]
    return f"Reward {first:.2f}" if len(records) == 1 else f"Reward {first:.2f} → {last:.2f} in {len(records)} steps"


def _by_dtype(
    figure: go.Figure, steps: Sequence[int], values: Sequence[float], dtypes: Sequence[str], row: int, col: int
) -> None:
    """One line through all steps, and a marker on each in the look of its output dtype."""
    at = {"row": row, "col": col}
    figure.add_scatter(
        x=steps, y=values, mode="lines", line={"color": GREY, "width": 1}, hoverinfo="skip", showlegend=False, **at
    )
    for dtype in dict.fromkeys(dtypes):
        colour, symbol, _ = DTYPE_STYLE[dtype]
        mine = [place for place, name in enumerate(dtypes) if name == dtype]
        figure.add_scatter(
            x=[steps[place] for place in mine],
            y=[values[place] for place in mine],
            mode="markers",
            marker={"color": colour, "symbol": symbol, "size": 7},
            name=f"{dtype} outputs",
            legendgroup=dtype,
            showlegend=(row, col) == (1, 1),
            hovertemplate=f"step %{{x}}: %{{y:.4g}} ({dtype})<extra></extra>",
            **at,
        )


def _kl_panel(figure: go.Figure, records: Sequence[StepRecord]) -> None:
    for name, (colour, dash, symbol) in _KL.items():
        values = [record.metrics[name] for record in records]
        figure.add_scatter(
            x=[record.step for record in records],
            y=[max(value, _FLOOR) for value in values],
            customdata=values,
            mode="lines+markers",
            line={"color": colour, "dash": dash},
            marker={"color": colour, "symbol": symbol, "size": 5},
            name=name,
            hovertemplate=f"step %{{x}}: %{{customdata:.3g}} ({name})<extra></extra>",
            row=2,
            col=2,
        )
    limit = THRESHOLDS["gen_kl_error"]
    _limit(figure, limit, row=2, col=2, log=True)
    highest = max([limit, *(record.metrics[name] for record in records for name in _KL)])
    lowest = min([limit, *(max(record.metrics[name], _FLOOR) for record in records for name in _KL)])
    figure.update_yaxes(type="log", range=[math.log10(lowest) - 0.5, math.log10(highest) + 0.9], nticks=5, row=2, col=2)
    figure.update_yaxes(tickfont={"size": 11}, row=2, col=2)


def _limit(figure: go.Figure, limit: float, *, row: int, col: int, log: bool = False) -> None:
    figure.add_hline(y=limit, line={"color": GREY, "dash": "dash"}, row=row, col=col)
    where = {"xref": "x domain", "x": 1, "y": math.log10(limit) if log else limit, "xanchor": "right", "yanchor": "bottom"}
    text = f"look for a cause above {limit:g}"
    figure.add_annotation(text=text, showarrow=False, font={"size": 11}, row=row, col=col, **where)


def run_table(records: Sequence[StepRecord], memory: Mapping[int, MemoryReport]) -> str:
    """The last steps as an HTML table, and the peaks measured: what shows where no figure does."""
    rows = []
    for record in records[-_TABLE_ROWS:]:
        values = {**record.summary, "tokens_per_second": tokens_per_second(record)}
        texts = (f"{values[name]:.4g}" if isinstance(values[name], float) else str(values[name]) for name in _TABLE)
        rows.append("<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in texts) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in _TABLE)
    peaks = "".join(f"<div>{html.escape(report.headline)}</div>" for report in memory.values())
    return f"<div><table><tr>{head}</tr>{''.join(rows)}</table>{peaks}</div>"


def bundle(figure: go.Figure, table: str, text: str) -> dict[str, Any]:
    """A figure as an output that is never blank: plotly's format, a table where nothing renders that, text elsewhere."""
    data = {"application/vnd.plotly.v1+json": json.loads(figure.to_json()), "text/html": table, "text/plain": text}
    return {"output_type": "display_data", "data": data, "metadata": {}}
