"""Figures of a divergence: where it is, how large against the field's limits, by unit and by group of parameters."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from toolkit.figures import BLUE, GREEN, GREY, PURPLE, VERMILION, new_figure
from toolkit.mismatch import THRESHOLDS

if TYPE_CHECKING:
    from toolkit.divergence_report import DivergenceReport

#: Bins of probability: rare tokens move most, and a mean hides them.
BINS = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 1.0)
#: Ratios within which the field calls a token unmoved.
_BAND = (0.8, 1.25)
_LONGEST_ON_AXIS = 20  # characters
_LIMIT_NATS = math.log(THRESHOLDS["token_mult_prob_error"])


def divergence_figure(report: DivergenceReport) -> go.Figure:
    """Probability against probability, delta with the clip band, error by probability and by position."""
    m = report.metrics
    identical = m["fraction_bit_identical"] == 1.0
    found = (
        f"all {len(report.tokens)} tokens are bit-identical"
        if identical
        else f"|delta| {m['mean_abs_nats']:.1e} nats mean, {m['max_abs_nats']:.1e} max"
    )
    a, _ = names = _sides(report)
    figure = new_figure(
        f"{_title(report)}: {found}",
        rows=2,
        cols=2,
        subplot_titles=(
            "Probability of each token",
            f"delta in nats ({m['fraction_outside_clip']:.1%} outside the clip range)",
            f"|delta| by probability under {a}",
            "|delta| by position in the sequence",
        ),
        horizontal_spacing=0.13,
        vertical_spacing=0.17,
    )
    _scatter(figure, report, names)
    _histogram(figure, report, names)
    by_bin = binned(report.tokens)
    _errors(figure, 1, by_bin["bin"].tolist(), by_bin, [f"{n} tokens" for n in by_bin["tokens"]])
    by_place = by_position(report.tokens)
    _errors(figure, 2, by_place["position"].tolist(), by_place, [f"{n} tokens" for n in by_place["tokens"]])
    figure.update_xaxes(title_text="probability", row=2, col=1)
    figure.update_xaxes(title_text="position", row=2, col=2)
    figure.update_layout(height=720, bargap=0.15, legend={"orientation": "h", "x": 0, "y": -0.1})
    return figure


def _title(report: DivergenceReport) -> str:
    """Both sides; with letters where the axes take those."""
    if report.a == report.b:
        return f"{report.a} twice"
    a, b = _sides(report)
    return f"{report.a} against {report.b}" if a == report.a else f"{report.a} ({a}) against {report.b} ({b})"


def _sides(report: DivergenceReport) -> tuple[str, str]:
    """Both sides as the axes name them."""
    return (report.a, report.b) if max(len(report.a), len(report.b)) <= _LONGEST_ON_AXIS else ("a", "b")


def binned(tokens: pd.DataFrame) -> pd.DataFrame:
    """Mean and largest |delta| of the tokens by `prob_a`, a row for each of BINS that has any: bin, tokens, mean, max."""
    names = [f"≤{high:g}" for high in BINS[1:]]
    bins = pd.cut(tokens["prob_a"].clip(upper=1.0), BINS, labels=names, include_lowest=True)
    return _grouped(tokens, bins).rename(columns={"prob_a": "bin"}).astype({"bin": str})


def by_position(tokens: pd.DataFrame) -> pd.DataFrame:
    """Mean and largest |delta| of the tokens at each position: position, tokens, mean, max."""
    return _grouped(tokens, tokens["position"])


def _grouped(tokens: pd.DataFrame, keys: pd.Series[int]) -> pd.DataFrame:
    found = tokens["delta_nats"].abs().groupby(keys, observed=True).agg(["count", "mean", "max"])
    return found.rename(columns={"count": "tokens"}).reset_index()


def _scatter(figure: go.Figure, report: DivergenceReport, names: tuple[str, str]) -> None:
    tokens = report.tokens
    columns = [tokens["text"].map(repr), *(tokens[c] for c in ("delta_nats", "sequence", "position", "rank_a", "rank_b"))]
    figure.add_scattergl(
        x=tokens["prob_a"], y=tokens["prob_b"], mode="markers", showlegend=False,
        marker={"size": 5, "color": BLUE, "opacity": 0.6},
        customdata=np.stack(columns, axis=-1),
        hovertemplate="%{customdata[0]}<br>a %{x:.4g}, b %{y:.4g}<br>delta %{customdata[1]:.2e} nats"
        "<br>rank %{customdata[4]} and %{customdata[5]}<br>sequence %{customdata[2]}, position %{customdata[3]}",
        row=1, col=1,
    )  # fmt: skip
    low = max(float(min(tokens["prob_a"].min(), tokens["prob_b"].min())), 1e-30)
    for factor, dash in ((1.0, "dot"), (1 - report.ratio_clip_min, "dash"), (1 + report.ratio_clip_max, "dash")):
        figure.add_scatter(
            x=[low, 1], y=[low * factor, factor], mode="lines", hoverinfo="skip", showlegend=False,
            line={"color": GREY if factor == 1.0 else VERMILION, "dash": dash, "width": 1}, row=1, col=1,
        )  # fmt: skip
    span = [math.log10(low) - 0.1, 0.12]
    figure.update_xaxes(title_text=f"probability, {names[0]}", type="log", range=span, dtick=_decades(low), row=1, col=1)
    figure.update_yaxes(title_text=f"probability, {names[1]}", type="log", range=span, dtick=_decades(low), row=1, col=1)


def _decades(low: float) -> int:
    """Whole decades between ticks, so that there are at most six."""
    return max(1, math.ceil(-math.log10(low) / 6))


def _histogram(figure: go.Figure, report: DivergenceReport, names: tuple[str, str]) -> None:
    """Counts on a log axis; the band a ratio may have before it is clipped, and the field's [0.8, 1.25]."""
    reach = 1.05 * max(report.metrics["max_abs_nats"], -math.log(_BAND[0]))  # one bin in the middle holds the zeros
    bins = {"start": -reach, "end": reach, "size": 2 * reach / 61}
    delta = report.tokens["delta_nats"]
    figure.add_histogram(x=delta, xbins=bins, marker={"color": BLUE}, showlegend=False, row=1, col=2)
    clip = (1 - report.ratio_clip_min, 1 + report.ratio_clip_max)
    for name, band, colour, dash in (
        (f"clip range [{clip[0]:g}, {clip[1]:g}]", clip, VERMILION, "dash"),
        (f"ratio in [{_BAND[0]:g}, {_BAND[1]:g}]", _BAND, PURPLE, "dot"),
    ):
        for ratio in band:
            if ratio > 0:
                figure.add_vline(x=math.log(ratio), line={"color": colour, "dash": dash, "width": 1.5}, row=1, col=2)
        line = {"color": colour, "dash": dash}
        figure.add_scatter(x=[None], y=[None], mode="lines", name=name, line=line, row=1, col=2)
    figure.update_xaxes(title_text=f"logprob, {names[1]} − {names[0]}", row=1, col=2)
    figure.update_yaxes(title_text="tokens", type="log", dtick=1, row=1, col=2)


def _errors(figure: go.Figure, col: int, places: list[object], frame: pd.DataFrame, counts: list[str]) -> None:
    look = {"x": places, "customdata": counts, "showlegend": col == 1}
    hover = "%{x}: %{y:.2e} nats, %{customdata}"
    figure.add_bar(**look, y=frame["mean"], name="mean", marker={"color": BLUE}, hovertemplate=hover, row=2, col=col)
    figure.add_scatter(
        **look, y=frame["max"], name="largest", mode="markers", marker={"color": VERMILION, "symbol": "diamond", "size": 7},
        hovertemplate=hover, row=2, col=col,
    )  # fmt: skip
    figure.add_hline(
        y=_LIMIT_NATS, line={"color": GREY, "dash": "dash", "width": 1}, row=2, col=col,
        annotation_text="log 1.05" if col == 1 else "", annotation_position="top right",
    )  # fmt: skip
    figure.update_yaxes(title_text="nats", row=2, col=col, rangemode="tozero")


def thresholds_figure(report: DivergenceReport) -> go.Figure:
    """Each metric that the field has a limit for, as a multiple of its limit."""
    names = [name for name in THRESHOLDS if name in report.metrics]
    # The multiplicative error is 1 where nothing moved; the others are 0.
    floors = [1.0 if name == "token_mult_prob_error" else 0.0 for name in names]
    values = [report.metrics[name] for name in names]
    parts = [(v - f) / (THRESHOLDS[n] - f) for n, v, f in zip(names, values, floors, strict=True)]
    over = [name for name, part in zip(names, parts, strict=True) if part > 1]
    figure = new_figure(
        f"{_title(report)}: " + (f"over the limit: {', '.join(over)}" if over else "within the field's limits")
    )
    lowest = min([0.1, *(part for part in parts if part > 0)])
    span = [math.log10(lowest) - 0.5, math.log10(max([1.0, *parts])) + 1]
    figure.add_bar(
        x=[max(part, 10 ** (span[0] + 0.01)) for part in parts],
        y=[f"{n}<br>limit {THRESHOLDS[n]:g}" for n in names],
        orientation="h",
        text=[f"{v:.6g}" for v in values],
        textposition="outside",
        marker={"color": [VERMILION if part > 1 else GREEN for part in parts]},
        hovertemplate="%{text}, %{x:.2g} of its limit",
    )
    figure.add_vline(x=1, line={"color": GREY, "dash": "dash"})
    figure.update_xaxes(title_text="multiple of the limit", type="log", dtick=1, range=span)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(height=330, margin_l=190)
    return figure


def units_figure(report: DivergenceReport) -> go.Figure:
    """Which FSDP unit's output dtype makes the divergence: each switched alone."""
    units = report.units
    worst = max(units, key=lambda name: units[name], default=None)
    found = f": {worst} makes {units[worst]:.1e} nats" if worst is not None else ": there is nothing to switch"
    figure = new_figure(f"One FSDP unit at a time, {report.a} to {report.b}{found}")
    if worst is None:
        words = "They differ in more, or in something else, than a unit's output dtype."
        figure.add_annotation(text=words, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
        return figure.update_layout(xaxis_visible=False, yaxis_visible=False, height=200)
    figure.add_bar(x=list(units), y=list(units.values()), marker={"color": VERMILION}, hovertemplate="%{x}: %{y:.2e} nats")
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(title_text="mean |delta| in nats")
    return figure


def gradients_figure(report: DivergenceReport) -> go.Figure:
    """Relative error of the gradient of each group of parameters, and of the optimizer step it would make.

    Raises:
        ValueError: the report has no gradients: one side is the sampler, or none were asked for.
    """
    frame = report.gradients
    if frame is None:
        raise ValueError("this divergence has no gradients: the sampler's logprobs have none, or gradients=False.")
    m = report.metrics
    found = f"differ by {m['gradient_relative_error']:.1e}, their AdamW steps by {m['update_relative_error']:.1e}"
    figure = new_figure(f"Gradients {found if m['gradient_relative_error'] else 'and their AdamW steps are identical'}")
    columns = ["gradient_relative_error", "update_relative_error"]
    positive = frame[columns].to_numpy().ravel()
    positive = positive[(positive > 0) & np.isfinite(positive)]
    zero = positive.min() / 10 if len(positive) else 1e-9  # where an exact 0 is drawn: a log axis has none
    for name, column, colour, symbol in (
        ("gradient", "gradient_relative_error", BLUE, "circle"),
        ("AdamW step", "update_relative_error", VERMILION, "diamond"),
    ):
        figure.add_scatter(
            x=frame[column].clip(lower=zero), y=frame["group"], mode="markers+text", name=name,
            text=["0" if value == 0 else "" for value in frame[column]], textposition="middle right",
            marker={"color": colour, "symbol": symbol, "size": 9},
            customdata=frame[[column.replace("relative_error", "cosine"), "num_parameters", column]].to_numpy(),
            hovertemplate="%{y}: %{customdata[2]:.2e}, cosine %{customdata[0]:.6f}, %{customdata[1]:,} parameters",
        )  # fmt: skip
    figure.update_xaxes(title_text="relative error", type="log", dtick=1)
    figure.update_yaxes(autorange="reversed", tickfont={"size": 11})
    figure.update_layout(height=140 + 20 * len(frame), margin_l=260, legend={"orientation": "h", "x": 0, "y": -0.2})
    return figure
