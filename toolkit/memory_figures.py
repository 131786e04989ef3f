"""Figures of memory reports: a step over time, two settings side by side, logit buffers, and what units retain."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from toolkit.figures import BLUE, DTYPE_STYLE, GREEN, GREY, PURPLE, VERMILION, new_figure
from toolkit.ledger import CATEGORIES
from toolkit.records import format_bytes

if TYPE_CHECKING:
    from toolkit.memory_report import MemoryReport

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


def unit_of(nbytes: float) -> tuple[str, int]:
    """The binary unit an axis up to this many bytes is drawn in, and its bytes."""
    return ("GiB", 2**30) if nbytes >= 2**30 else ("MiB", 2**20)


def memory_figure(report: MemoryReport) -> go.Figure:
    """Live bytes over one training step, stacked by category, phases marked and the peak annotated."""
    line = report.timeline
    unit, size = unit_of(report.peak_bytes)
    word = "Predicted peak" if report.source == "predicted" else "Peak"
    figure = new_figure(
        f"{word} {format_bytes(report.peak_bytes)} in {report.peak_phase} ({report.output_dtype} outputs, "
        f"{report.num_sequences} × {report.sequence_length} tokens a rank)"
    )
    for name in CATEGORIES:
        colour, pattern = _CATEGORY_STYLE[name]
        figure.add_scatter(
            x=line["event"],
            y=np.array(line[name]) / size,
            name=name.replace("_", " "),
            stackgroup="bytes",
            line={"width": 0.5, "color": colour, "shape": "hv"},
            fillcolor=colour if not pattern else None,
            fillpattern={"shape": pattern, "fgcolor": colour, "bgcolor": "rgba(127,127,127,0.15)"},
            hovertemplate=f"%{{y:.3f}} {unit}",
        )
    totals = [sum(line[name][i] for name in CATEGORIES) for i in range(len(line["event"]))]
    at = int(np.argmax(totals))
    figure.add_annotation(
        x=line["event"][at],
        y=totals[at] / size,
        text=f"peak {format_bytes(report.peak_bytes)}",
        showarrow=True,
        arrowcolor=GREY,
        ay=-30,
    )
    _mark_phases(figure, line["event"], line["phase"])
    figure.update_layout(hovermode="x unified")
    figure.update_xaxes(title_text="allocations and frees, in order")
    figure.update_yaxes(title_text=unit, range=[0, max(totals) / size * 1.3])
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
    """Bytes at the peak by category and the peak of each phase, a group of bars per setting, the difference written above.

    Phases are shown too because a single peak hides opposite moves: a 16-bit output may lower forward and raise the loss.
    """
    names = list(reports)
    first, last = reports[names[0]], reports[names[-1]]
    change = last.peak_bytes - first.peak_bytes
    unit, size = unit_of(max(report.peak_bytes for report in reports.values()))
    figure = new_figure(
        f"{names[-1]} against {names[0]}: peak {_signed(change)} ({change / first.peak_bytes:+.1%})",
        cols=2,
        subplot_titles=("by category, at the peak", "highest in each phase"),
        column_widths=[0.62, 0.38],
        horizontal_spacing=0.1,
    )
    for name, report in reports.items():
        colour, _, pattern = DTYPE_STYLE.get(report.output_dtype, (GREY, "", "."))
        for col, values in ((1, report.categories), (2, report.phase_peaks)):
            figure.add_bar(
                x=[key.replace("_", "<br>") for key in values],
                y=np.array(list(values.values())) / size,
                name=f"{name}: {format_bytes(report.peak_bytes)}",
                marker={"color": colour, "pattern": {"shape": pattern}},
                hovertemplate=f"%{{x}}: %{{y:.3f}} {unit}",
                showlegend=col == 1,
                row=1,
                col=col,
            )
    for col, before, after in ((1, first.categories, last.categories), (2, first.phase_peaks, last.phase_peaks)):
        for key in before:
            difference = (after[key] - before[key]) / size
            if abs(difference) >= 0.005 * last.peak_bytes / size:
                figure.add_annotation(
                    x=key.replace("_", "<br>"), y=max(before[key], after[key]) / size, text=f"{difference:+.2f} {unit}",
                    showarrow=False, yanchor="bottom", row=1, col=col,
                )  # fmt: skip
    figure.update_layout(barmode="group", legend={"orientation": "h", "y": -0.35})
    figure.update_xaxes(tickangle=-35, tickfont={"size": 10})
    figure.update_yaxes(title_text=unit, col=1)
    return figure


def logits_figure(reports: dict[str, MemoryReport]) -> go.Figure:
    """Logit-sized buffers in bytes per logit element: each by stage, and how much of them is alive at once in each phase.

    The dashed lines are the algebra: N tokens of a vocabulary V take 2NV bytes in 16 bits, 4NV in float32, 6NV in both.
    """
    peaks = {name: r.logit_peak_bytes / r.logit_elements for name, r in reports.items()}
    figure = new_figure(
        "Logit buffers alive at once: " + ", ".join(f"{name} {value:.1f} B" for name, value in peaks.items()) + " per logit",
        cols=2,
        subplot_titles=("each buffer (faint: not alive when logits take most)", "alive at once"),
        column_widths=[0.72, 0.28],
        horizontal_spacing=0.07,
    )
    longest_first = sorted(reports.values(), key=lambda r: -len(r.logit_buffers))  # has every stage, in order
    stages = list(dict.fromkeys(_stage(buffer) for r in longest_first for buffer in r.logit_buffers))
    order = {phase: place for place, phase in enumerate(("forward", "loss", "backward"))}
    stages.sort(key=lambda stage: order[stage.split("<br>")[0]])
    for name, report in reports.items():
        colour, _, pattern = DTYPE_STYLE.get(report.output_dtype, (GREY, "", "."))
        look = {"color": colour, "pattern": {"shape": pattern}, "line": {"color": colour, "width": 1}}
        buffers = report.logit_buffers
        figure.add_bar(
            x=[_stage(b) for b in buffers],
            y=[b["bytes"] / report.logit_elements for b in buffers],
            name=name,
            marker=look | {"opacity": [1.0 if b["alive_at_logit_peak"] else 0.4 for b in buffers]},
            customdata=[[str(b["shape"]), b["dtype"], format_bytes(b["bytes"])] for b in buffers],
            hovertemplate="%{x}<br>%{customdata[0]} %{customdata[1]}, %{customdata[2]}",
            row=1,
            col=1,
        )
        alive = {phase: report.logit_phase_peaks[phase] for phase in order}
        figure.add_bar(
            x=list(alive),
            y=[nbytes / report.logit_elements for nbytes in alive.values()],
            customdata=[format_bytes(nbytes) for nbytes in alive.values()],
            hovertemplate="%{x}: %{y:.2f} B per logit, %{customdata}",
            name=name,
            marker=look,
            showlegend=False,
            row=1,
            col=2,
        )
    figure.update_xaxes(categoryorder="array", categoryarray=stages, tickangle=0, tickfont={"size": 9}, row=1, col=1)
    for bytes_each in (2, 4, 6):
        line = {"color": GREY, "dash": "dash", "width": 1}
        figure.add_hline(y=bytes_each, line=line, annotation_text=f"{bytes_each}NV", annotation_position="top left", col=1)
        figure.add_hline(y=bytes_each, line=line, col=2)
    figure.update_layout(barmode="group", height=460, legend={"orientation": "h", "y": -0.3})
    figure.update_yaxes(title_text="bytes per logit element", col=1)
    return figure


def _stage(buffer: dict[str, Any]) -> str:
    return "<br>".join([buffer["phase"], *textwrap.wrap(buffer["stage"], 11)])


def boundaries_figure(reports: dict[str, MemoryReport]) -> go.Figure:
    """The output of each FSDP unit, in the order of forward: solid where it is retained for backward, faint where not."""
    kept = {name: [b for b in report.boundaries if b["retained"]] for name, report in reports.items()}
    figure = new_figure(
        "Unit outputs retained for backward: "
        + ", ".join(f"{name} {len(k)} ({format_bytes(sum(b['bytes'] for b in k))})" for name, k in kept.items())
    )
    unit, size = unit_of(max(b["bytes"] for report in reports.values() for b in report.boundaries))
    for name, report in reports.items():
        colour, _, pattern = DTYPE_STYLE.get(report.output_dtype, (GREY, "", "."))
        figure.add_bar(
            x=[b["unit"].removeprefix("model.") for b in report.boundaries],
            y=[b["bytes"] / size for b in report.boundaries],
            name=name,
            marker={
                "color": colour,
                "pattern": {"shape": pattern},
                "line": {"color": colour, "width": 1},
                "opacity": [1.0 if b["retained"] else 0.25 for b in report.boundaries],
            },
            customdata=[[str(b["shape"]), b["dtype"], "retained" if b["retained"] else "freed"] for b in report.boundaries],
            hovertemplate=f"%{{x}}: %{{customdata[0]}} %{{customdata[1]}}, %{{y:.3f}} {unit}, %{{customdata[2]}}",
        )
    above = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 1, "xanchor": "right"}  # below are the units' names
    figure.update_layout(barmode="group", showlegend=True, legend=above)
    figure.update_xaxes(title_text="FSDP unit (faint: freed before backward)", tickfont={"size": 10})
    figure.update_yaxes(title_text=f"{unit} of its output")
    return figure


def _signed(nbytes: int) -> str:
    return f"{'+' if nbytes >= 0 else ''}{format_bytes(nbytes)}"
