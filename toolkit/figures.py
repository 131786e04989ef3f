"""Figures of the records: pure functions, one template.

Colours are Okabe and Ito's that keep 3:1 contrast on white and on near-black, with dash and marker differences beside
them; backgrounds are transparent and text is a grey readable on both, because the kernel cannot know the page's theme.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from toolkit.ledger import CATEGORIES
from toolkit.mismatch import THRESHOLDS
from toolkit.records import format_bytes

if TYPE_CHECKING:
    from toolkit.divergence import DivergenceReport
    from toolkit.memory import MemoryReport
    from toolkit.records import EvaluationRecord
    from toolkit.tradeoffs import TradeoffReport

BLUE, VERMILION, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GREY = "#767676"
_GRID = "rgba(127,127,127,0.25)"
_DTYPE_STYLE = {
    "float32": (BLUE, "circle", ""),
    "bfloat16": (VERMILION, "square", "/"),
    "float16": (GREEN, "diamond", "x"),
}
_CATEGORY_STYLE = {
    "parameters": (BLUE, ""),
    "optimizer": (BLUE, "/"),
    "gradients": (GREEN, ""),
    "unsharded_parameters": (GREEN, "/"),
    "inputs": (GREY, ""),
    "activations": (VERMILION, ""),
    "logits": (PURPLE, ""),
    "temporaries": (GREY, "/"),
}
_MIB = 2**20


def template() -> go.layout.Template:
    """The look all figures share."""
    axis = {"gridcolor": _GRID, "zerolinecolor": _GRID, "linecolor": GREY, "ticks": "outside", "tickcolor": GREY}
    axis |= {"exponentformat": "power"}
    return go.layout.Template(
        layout={
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": GREY, "size": 13},
            "colorway": [BLUE, VERMILION, GREEN, PURPLE],
            "title": {"x": 0, "xref": "paper", "font": {"size": 15}},
            "xaxis": axis,
            "yaxis": axis,
            "margin": {"l": 70, "r": 20, "t": 80, "b": 60},
            "legend": {"bgcolor": "rgba(0,0,0,0)"},
            "hoverlabel": {"font": {"size": 12}},
            "height": 420,
        }
    )


def _figure(title: str, rows: int = 1, cols: int = 1, **subplots: object) -> go.Figure:
    figure = make_subplots(rows=rows, cols=cols, **subplots) if rows * cols > 1 else go.Figure()
    figure.update_layout(template=template(), title_text=title)
    for annotation in figure.layout.annotations:  # subplot titles
        annotation.font = {"size": 13, "color": GREY}
    return figure


def memory_figure(report: MemoryReport) -> go.Figure:
    """Live bytes over one training step, stacked by category, phases marked and the peak annotated."""
    line = report.timeline
    figure = _figure(
        f"Peak {format_bytes(report.peak_bytes)} in {report.peak_phase} ({report.output_dtype} outputs, "
        f"{report.num_sequences} × {report.sequence_length} tokens a rank)"
    )
    for name in CATEGORIES:
        colour, pattern = _CATEGORY_STYLE[name]
        figure.add_scatter(
            x=line["event"],
            y=np.array(line[name]) / _MIB,
            name=name.replace("_", " "),
            stackgroup="bytes",
            line={"width": 0.5, "color": colour, "shape": "hv"},
            fillcolor=colour if not pattern else None,
            fillpattern={"shape": pattern, "fgcolor": colour, "bgcolor": "rgba(127,127,127,0.15)"},
            hovertemplate="%{y:.3f} MiB",
        )
    totals = [sum(line[name][i] for name in CATEGORIES) for i in range(len(line["event"]))]
    at = int(np.argmax(totals))
    figure.add_annotation(
        x=line["event"][at],
        y=totals[at] / _MIB,
        text=f"peak {format_bytes(report.peak_bytes)}",
        showarrow=True,
        arrowcolor=GREY,
        ay=-30,
    )
    _mark_phases(figure, line["event"], line["phase"])
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title_text="allocations and frees, in order")
    figure.update_yaxes(title_text="MiB", range=[0, max(totals) / _MIB * 1.15])
    return figure


def _mark_phases(figure: go.Figure, events: list[int], phases: list[str]) -> None:
    """A line where each phase begins; its name at the first of each, raised where there is no room beside the next."""
    starts = [i for i in range(len(phases)) if i == 0 or phases[i] != phases[i - 1]]
    width = events[-1] - events[0]
    named: set[str] = set()
    for place, start in enumerate(starts):
        figure.add_vline(x=events[start], line={"color": GREY, "dash": "dot", "width": 1})
        if phases[start] in named:
            continue
        named.add(phases[start])
        end = events[starts[place + 1]] if place + 1 < len(starts) else events[-1]
        narrow = end - events[start] < 0.08 * width
        figure.add_annotation(
            x=events[start], y=1, yref="paper", text=phases[start], showarrow=False, xanchor="left", yanchor="bottom",
            yshift=14 if narrow else 0,
        )  # fmt: skip


def memory_comparison_figure(reports: dict[str, MemoryReport]) -> go.Figure:
    """Bytes at the peak by category, a group of bars per setting."""
    names = list(reports)
    first, last = reports[names[0]], reports[names[-1]]
    change = last.peak_bytes - first.peak_bytes
    figure = _figure(
        f"{names[-1]} against {names[0]}: peak {'+' if change >= 0 else ''}{format_bytes(change)} "
        f"({change / first.peak_bytes:+.1%})"
    )
    for name, report in reports.items():
        colour, _, pattern = _DTYPE_STYLE.get(report.output_dtype, (GREY, "", "."))
        figure.add_bar(
            x=[category.replace("_", "<br>") for category in report.categories],
            y=np.array(list(report.categories.values())) / _MIB,
            name=f"{name}: {format_bytes(report.peak_bytes)}",
            marker={"color": colour, "pattern": {"shape": pattern}},
            hovertemplate="%{x}: %{y:.3f} MiB",
        )
    figure.update_layout(barmode="group")
    figure.update_xaxes(tickangle=0, tickfont={"size": 11})
    figure.update_yaxes(title_text="MiB at the peak")
    return figure


def logits_figure(reports: dict[str, MemoryReport]) -> go.Figure:
    """Every logit-sized buffer of the step by stage, a group of bars per setting, in bytes per logit element."""
    peaks = {name: r.logit_peak_bytes / r.logit_elements for name, r in reports.items()}
    figure = _figure(
        "Logit buffers alive at once: " + ", ".join(f"{name} {value:.1f} B" for name, value in peaks.items()) + " per logit"
    )
    longest_first = sorted(reports.values(), key=lambda r: -len(r.logit_buffers))  # has every stage, in order
    stages = list(dict.fromkeys(_stage(buffer) for r in longest_first for buffer in r.logit_buffers))
    order = {phase: place for place, phase in enumerate(("forward", "loss", "backward"))}
    stages.sort(key=lambda stage: order[stage.split("<br>")[0]])
    for name, report in reports.items():
        colour, _, pattern = _DTYPE_STYLE.get(report.output_dtype, (GREY, "", "."))
        buffers = report.logit_buffers
        figure.add_bar(
            x=[_stage(b) for b in buffers],
            y=[b["bytes"] / report.logit_elements for b in buffers],
            name=name,
            marker={
                "color": colour,
                "pattern": {"shape": pattern},
                "line": {"color": colour, "width": 1},
                "opacity": [1.0 if b["alive_at_logit_peak"] else 0.4 for b in buffers],
            },
            customdata=[[str(b["shape"]), b["dtype"], format_bytes(b["bytes"])] for b in buffers],
            hovertemplate="%{x}<br>%{customdata[0]} %{customdata[1]}, %{customdata[2]}",
        )
    figure.update_xaxes(categoryorder="array", categoryarray=stages, tickangle=0, tickfont={"size": 10})
    for bytes_each, dtype in ((2, "one 16-bit copy, 2NV"), (4, "one float32 copy, 4NV")):
        figure.add_hline(
            y=bytes_each,
            line={"color": GREY, "dash": "dash", "width": 1},
            annotation_text=dtype,
            annotation_position="top right",
        )
    figure.update_layout(barmode="group", height=460)
    figure.update_yaxes(title_text="bytes per logit element")
    figure.add_annotation(
        text="faint: not alive when logits take most",
        x=1,
        y=1,
        xref="paper",
        yref="paper",
        showarrow=False,
        yanchor="bottom",
    )
    return figure


def _stage(buffer: dict[str, Any]) -> str:
    words = f"{buffer['stage']}".split()
    half = (len(words) + 1) // 2
    return "<br>".join([buffer["phase"], " ".join(words[:half]), " ".join(words[half:])])


def divergence_figure(report: DivergenceReport) -> go.Figure:
    """Probability of each token under both settings, and how their ratio is distributed."""
    tokens, m = report.tokens, report.metrics
    identical = m["fraction_bit_identical"] == 1.0
    found = "bit-identical" if identical else f"|delta| {m['mean_abs_nats']:.1e} nats mean, {m['max_abs_nats']:.1e} max"
    figure = _figure(
        f"{report.a} against {report.b}: {found}",
        cols=2,
        subplot_titles=("Probability of each token", "Ratio of probabilities"),
        column_widths=[0.5, 0.5],
        horizontal_spacing=0.12,
    )
    figure.add_scattergl(
        x=tokens["prob_a"],
        y=tokens["prob_b"],
        mode="markers",
        marker={"size": 5, "color": BLUE, "opacity": 0.6},
        customdata=np.stack(
            [tokens["text"].map(repr), tokens["delta_nats"], tokens["sequence"], tokens["position"]], axis=-1
        ),
        hovertemplate="%{customdata[0]}<br>a %{x:.4g}, b %{y:.4g}<br>delta %{customdata[1]:.2e} nats"
        "<br>sequence %{customdata[2]}, position %{customdata[3]}",
        showlegend=False,
        row=1,
        col=1,
    )
    low = float(min(tokens["prob_a"].min(), tokens["prob_b"].min()))
    figure.add_scatter(
        x=[low, 1],
        y=[low, 1],
        mode="lines",
        line={"color": GREY, "dash": "dot"},
        showlegend=False,
        hoverinfo="skip",
        row=1,
        col=1,
    )
    figure.add_histogram(x=tokens["ratio"], nbinsx=60, marker={"color": BLUE}, showlegend=False, row=1, col=2)
    for edge in (1 - report.ratio_clip_min, 1 + report.ratio_clip_max):
        figure.add_vline(x=edge, line={"color": VERMILION, "dash": "dash"}, row=1, col=2)
    figure.add_annotation(
        text=f"clip range ({m['fraction_outside_clip']:.1%} outside)",
        x=1 + report.ratio_clip_max,
        y=1,
        xref="x2",
        yref="y2 domain",
        showarrow=False,
        xanchor="right",
        font={"color": VERMILION},
    )
    powers = {
        "type": "log",
        "dtick": 1,
    }
    figure.update_xaxes(title_text=f"probability, {report.a}", **powers, row=1, col=1)
    figure.update_yaxes(title_text=f"probability, {report.b}", **powers, row=1, col=1)
    figure.update_xaxes(title_text=f"{report.b} / {report.a}", row=1, col=2)
    figure.update_yaxes(title_text="tokens", **powers, row=1, col=2)
    return figure


def units_figure(report: DivergenceReport) -> go.Figure:
    """Which FSDP unit's output dtype makes the divergence: each switched alone."""
    units = report.units
    figure = _figure(f"Switching one FSDP unit at a time, {report.a} to {report.b}")
    figure.add_bar(x=list(units), y=list(units.values()), marker={"color": VERMILION}, hovertemplate="%{x}: %{y:.2e} nats")
    figure.update_yaxes(title_text="mean |delta| in nats")
    return figure


def steps_figure(frame: pd.DataFrame) -> go.Figure:
    """Reward and sampler/trainer mismatch by step; the marker shows the output dtype of each."""
    first, last = frame["reward"].iloc[0], frame["reward"].iloc[-1]
    figure = _figure(
        f"Reward {first:.2f} → {last:.2f} in {len(frame)} steps",
        rows=2,
        shared_xaxes=True,
        vertical_spacing=0.08,
        row_heights=[0.65, 0.35],
    )
    for dtype, rows in frame.groupby("output_dtype", sort=False):
        colour, symbol, _ = _DTYPE_STYLE[str(dtype)]
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
    figure.update_layout(height=460)
    return figure


def rewards_figure(record: EvaluationRecord) -> go.Figure:
    """How many held-out problems got which reward."""
    figure = _figure(record.headline[0].upper() + record.headline[1:])
    figure.add_histogram(x=record.rewards, marker={"color": BLUE}, hovertemplate="reward %{x}: %{y} problems<extra></extra>")
    figure.update_xaxes(title_text="reward")
    figure.update_yaxes(title_text="problems")
    return figure


def tradeoffs_figure(report: TradeoffReport) -> go.Figure:
    """Peak memory against divergence from the reference dtype, a point per dtype."""
    frame = report.to_frame()
    reference = frame["output_dtype"].iloc[0]
    figure = _figure(f"What each output dtype saves and costs, against {reference}")
    for row in frame.to_dict("records"):
        colour, symbol, _ = _DTYPE_STYLE[row["output_dtype"]]
        figure.add_scatter(
            x=[row["mean_abs_nats"]],
            y=[row["peak_bytes"] / _MIB],
            mode="markers+text",
            text=[row["output_dtype"]],
            textposition="top center",
            marker={"color": colour, "symbol": symbol, "size": 13},
            showlegend=False,
            hovertemplate="%{x:.2e} nats, %{y:.3f} MiB",
        )
    low, high = frame["peak_bytes"].min() / _MIB, frame["peak_bytes"].max() / _MIB
    room = max(high - low, 0.01 * high)
    most = max(frame["mean_abs_nats"].max(), 1e-6)
    figure.update_xaxes(title_text=f"mean |delta| in nats from {reference} outputs", range=[-0.08 * most, 1.12 * most])
    figure.update_yaxes(title_text="peak MiB", range=[low - 0.4 * room, high + 0.4 * room])
    return figure
