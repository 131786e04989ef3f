"""Figures of the records: pure functions, one template.

Colours are Okabe and Ito's that keep 3:1 contrast on white and on near-black, with dash and marker differences beside
them; backgrounds are transparent and text is a grey readable on both, because the kernel cannot know the page's theme.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from toolkit.mismatch import THRESHOLDS

if TYPE_CHECKING:
    from toolkit.records import EvaluationRecord

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GREY = "#767676"
_GRID = "rgba(127,127,127,0.25)"
DTYPE_STYLE = {
    "float32": (BLUE, "circle", ""),
    "bfloat16": (VERMILION, "square", "/"),
    "float16": (GREEN, "diamond", "x"),
}


def template() -> go.layout.Template:
    """The look all figures share."""
    axis: dict[str, object] = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": GREY}
    axis |= {"ticks": "outside", "tickcolor": GREY}
    axis |= {"exponentformat": "power", "automargin": True, "title": {"font": {"size": 13}, "standoff": 8}}
    return go.layout.Template(
        layout={
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": GREY, "size": 13},
            "colorway": [BLUE, VERMILION, GREEN, PURPLE],
            "title": {"x": 0.02, "xref": "container", "font": {"size": 15}},
            "xaxis": axis,
            "yaxis": axis,
            "margin": {"l": 70, "r": 20, "t": 80, "b": 60},
            "legend": {"bgcolor": "rgba(0,0,0,0)"},
            "hoverlabel": {"font": {"size": 12}},
            "height": 420,
        }
    )


def wrapped(text: str, width: int = 100) -> str:
    """Text in lines of at most so many characters; 100 fit a title on the width of a notebook."""
    return "<br>".join(textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False))


def new_figure(title: str, rows: int = 1, cols: int = 1, **subplots: object) -> go.Figure:
    """An empty figure in our look."""
    figure = make_subplots(rows=rows, cols=cols, **subplots) if rows * cols > 1 else go.Figure()
    text = wrapped(title)
    figure.update_layout(template=template(), title_text=text)
    if "<br>" in text:
        figure.update_layout(margin_t=80 + 18 * text.count("<br>"))
    for annotation in figure.layout.annotations:  # subplot titles
        annotation.font = {"size": 13, "color": GREY}
    return figure


def steps_figure(frame: pd.DataFrame) -> go.Figure:
    """Reward and sampler/trainer mismatch by step; the marker shows the output dtype of each."""
    if frame.empty:
        return new_figure("No step was taken yet")
    first, last = frame["reward"].iloc[0], frame["reward"].iloc[-1]
    change = f"→ {last:.2f} in {len(frame)} steps" if len(frame) > 1 else f"in step {frame['step'].iloc[0]}"
    figure = new_figure(
        f"Reward {first:.2f} {change}",
        rows=2,
        shared_xaxes=True,
        vertical_spacing=0.08,
        row_heights=[0.65, 0.35],
    )
    for dtype, rows in frame.groupby("output_dtype", sort=False):
        colour, symbol, _ = DTYPE_STYLE[str(dtype)]
        look = {
            "mode": "lines+markers",
            "marker": {"color": colour, "symbol": symbol, "size": 6},
            "line": {"color": colour},
        }
        figure.add_scatter(x=rows["step"], y=rows["reward"], name=f"{dtype} outputs", **look, row=1, col=1)
        figure.add_scatter(x=rows["step"], y=rows["token_mult_prob_error"], showlegend=False, **look, row=2, col=1)
    limit = THRESHOLDS["token_mult_prob_error"]
    figure.add_hline(
        y=limit, line={"color": GREY, "dash": "dash"}, annotation_text=f"look for a cause above {limit}", row=2, col=1
    )
    figure.update_yaxes(title_text="mean reward", row=1, col=1)
    figure.update_yaxes(title_text="token_mult_<br>prob_error", row=2, col=1)
    figure.update_xaxes(title_text="step", row=2, col=1)
    figure.update_layout(height=460, margin={"l": 95})  # the axis name takes two lines
    return figure


def table_figure(frame: pd.DataFrame, title: str) -> go.Figure:
    """A frame as a table that is readable on both themes."""
    look = {"align": "left", "font": {"color": GREY}, "line": {"color": _GRID}}
    figure = new_figure(title)
    figure.add_table(
        header={"values": [f"<b>{name}</b>" for name in frame], "fill": {"color": _GRID}, **look},
        cells={"values": [frame[name].astype(str) for name in frame], "fill": {"color": "rgba(0,0,0,0)"}, **look},
    )
    return figure


def rewards_figure(record: EvaluationRecord) -> go.Figure:
    """How many held-out problems got which reward."""
    figure = new_figure(record.headline[0].upper() + record.headline[1:])
    figure.add_histogram(x=record.rewards, marker={"color": BLUE}, hovertemplate="reward %{x}: %{y} problems<extra></extra>")
    figure.update_xaxes(title_text="reward")
    figure.update_yaxes(title_text="problems")
    return figure
