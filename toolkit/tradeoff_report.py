"""The record of a grid of settings: what each costs in memory and in nats, which are worth having, and the verdict."""

from __future__ import annotations

import dataclasses
import html
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.checks import check_file
from toolkit.mismatch import THRESHOLDS
from toolkit.records import Report, format_bytes

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from toolkit.divergence_report import DivergenceReport
    from toolkit.memory_report import MemoryReport

#: A saving below this part of the peak is called little.
_WORTH_IT = 0.05
AXES = ("output_dtype", "activation_checkpointing", "logprob_mode", "tensor_parallel_size")


@dataclass(frozen=True, slots=True)
class TradeoffRow:
    """One setting of the grid.

    Attributes:
        peak_bytes, logit_peak_bytes, boundary_bytes, peak_phase: of its MemoryReport; None where it failed.
        memory_source: "measured", in this session or a twin of it, or "predicted".
        mean_abs_nats, max_abs_nats, token_mult_prob_error, gradient_relative_error: of its divergence from the reference;
            None where there is none.
        divergence_source: where that comes from, or why there is none.
        failure: why the setting cannot be used at all, else empty.
        pareto: whether no other setting has less of both peak and mean |delta|, or as much of one and less of the other;
            None without a divergence.
        from_float64_nats: mean |difference| from a float64 run of the same weights, where the divergence measured it. The
            reference is no truth: a setting that is far from it may be the more exact one.
    """

    output_dtype: str
    activation_checkpointing: str | bool
    logprob_mode: str
    tensor_parallel_size: int
    peak_bytes: int | None
    peak_phase: str
    logit_peak_bytes: int | None
    boundary_bytes: int | None
    memory_source: str
    mean_abs_nats: float | None
    max_abs_nats: float | None
    token_mult_prob_error: float | None
    gradient_relative_error: float | None
    divergence_source: str
    failure: str = ""
    pareto: bool | None = None
    from_float64_nats: float | None = None

    def describe(self, axes: tuple[str, ...] = AXES) -> str:
        """The settings of these axes, as text."""
        words = {
            "output_dtype": f"{self.output_dtype} outputs",
            "activation_checkpointing": f"checkpointing {self.activation_checkpointing or 'off'}",
            "logprob_mode": f"{self.logprob_mode} logprobs",
            "tensor_parallel_size": f"TP {self.tensor_parallel_size}",
        }
        return ", ".join(words[axis] for axis in axes)

    @property
    def over_limits(self) -> list[str]:
        """The field's limits that its divergence exceeds."""
        error = self.token_mult_prob_error
        limit = THRESHOLDS["token_mult_prob_error"]
        return [f"token_mult_prob_error {error:.4g} > {limit}"] if error is not None and error > limit else []


def pareto_front(rows: list[TradeoffRow]) -> list[TradeoffRow]:
    """The same rows, marked: on the front, or beaten in one and not better in the other."""
    points = [(r.peak_bytes, r.mean_abs_nats) for r in rows if r.peak_bytes is not None and r.mean_abs_nats is not None]

    def marked(row: TradeoffRow) -> bool | None:
        if row.peak_bytes is None or row.mean_abs_nats is None:
            return None
        mine = (row.peak_bytes, row.mean_abs_nats)
        return not any(p[0] <= mine[0] and p[1] <= mine[1] and p != mine for p in points)

    return [dataclasses.replace(row, pareto=marked(row)) for row in rows]


@dataclass(repr=False, eq=False)
class TradeoffReport(Report):
    """Peak memory of each setting, and its divergence from the first.

    Attributes:
        rows: one for each setting of the grid; the first is the reference.
        memory: a MemoryReport per output dtype at the reference's other settings, in the order asked for.
        divergence: a DivergenceReport of the first dtype against each other one; empty where nothing was run.
        failures: why a dtype cannot be used at all, for those that left their range.
        verdict: what to do, in words, from these records.
        sizes: sequences and tokens of one micro-batch on a rank, and number of ranks.
    """

    rows: list[TradeoffRow]
    memory: dict[str, MemoryReport]
    divergence: dict[str, DivergenceReport]
    failures: dict[str, str]
    verdict: str
    sizes: dict[str, int]

    @property
    def varied(self) -> tuple[str, ...]:
        """The axes on which the grid has more than one value; the output dtype always counts."""
        return tuple(a for a in AXES if a == AXES[0] or len({getattr(row, a) for row in self.rows}) > 1)

    @property
    def summary(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for dtype, report in self.memory.items():
            out[f"{dtype}_peak_bytes"] = report.peak_bytes
        for dtype, divergence in self.divergence.items():
            out[f"{dtype}_mean_abs_nats"] = divergence.metrics["mean_abs_nats"]
            out[f"{dtype}_token_mult_prob_error"] = divergence.metrics["token_mult_prob_error"]
        return out | {"settings": len(self.rows), "on_pareto_front": sum(row.pareto is True for row in self.rows)}

    @property
    def headline(self) -> str:
        return self.verdict

    def to_frame(self) -> pd.DataFrame:
        """A row per setting."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(row) for row in self.rows])

    def figure(self) -> go.Figure:
        """Peak memory against divergence, a point per setting, with the Pareto front."""
        from toolkit.tradeoff_figures import tradeoffs_figure

        return tradeoffs_figure(self)

    def to_html(self, path: str | Path) -> Path:
        """Write verdict, figure and table as one file that needs nothing else (plotly's script, 4.5 MB, is inside)."""
        from toolkit.page import Section, page

        path = check_file("to_html", path)
        found = Section("What each setting saves and costs", "session.tradeoffs()", self._table(), [self.figure()])
        path.write_text(page("Output dtype tradeoffs", self.verdict, [found]), encoding="utf-8")
        return path

    def _table(self) -> str:
        head = ("setting", "peak", "memory", "mean |delta|", "divergence", "from float64", "Pareto front", "failure")
        lines = []
        for row in self.rows:
            cells = (
                row.describe(),
                "–" if row.peak_bytes is None else format_bytes(row.peak_bytes),
                row.memory_source,
                "–" if row.mean_abs_nats is None else f"{row.mean_abs_nats:.2e} nats",
                row.divergence_source,
                "–" if row.from_float64_nats is None else f"{row.from_float64_nats:.2e} nats",
                {True: "on it", False: "", None: "–"}[row.pareto],
                row.failure,
            )
            lines.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
        return f"<table><tr>{''.join(f'<th>{h}</th>' for h in head)}</tr><tr>{'</tr><tr>'.join(lines)}</tr></table>"

    def _repr_html_(self) -> str:
        return f"<div><b>{html.escape(self.verdict)}</b>{self._table()}</div>"


def verdict(memory: dict[str, MemoryReport], divergence: dict[str, DivergenceReport], failures: dict[str, str]) -> str:
    """The answer on the output dtype in words. `memory`'s first dtype is the reference that `divergence` compares with."""
    reference, *others = memory
    sentences = [f"{dtype} outputs cannot be used: {why}" for dtype, why in failures.items()]
    for dtype in others:
        change = memory[dtype].peak_bytes - memory[reference].peak_bytes
        saves = f"{dtype} outputs {_saves(change, memory[reference].peak_bytes)}"
        if dtype not in divergence:
            sentences.append(f"{saves}; no divergence was measured (session.tradeoffs() does).")
            continue
        metrics = divergence[dtype].metrics
        mean, most = metrics["mean_abs_nats"], metrics["max_abs_nats"]
        sentences.append(
            f"{saves} and move the logprobs by {mean:.1e} nats on average ({most:.1e} at most): "
            f"{_judge(change / memory[reference].peak_bytes, metrics)}"
        )
    return " ".join(sentences)


def grid_verdict(rows: list[TradeoffRow], axes: tuple[str, ...]) -> str:
    """The setting to use: the smallest peak among those on the front that stay within the field's limits."""
    reference = rows[0]
    exact = [row for row in rows if row.from_float64_nats is not None]
    nearest = min(exact, key=lambda row: row.from_float64_nats or 0.0, default=reference)
    truth, far = "", reference.from_float64_nats
    if far is not None and (nearest.from_float64_nats or 0.0) < far / 2:  # closer than that is the noise of an order of sums
        truth = (
            f" Nearest to a float64 run is {nearest.describe(axes)}: {nearest.from_float64_nats:.1e} nats; the reference "
            f"is {far:.1e} away."
        )
    known = [row for row in rows if row.peak_bytes is not None]
    on_front = [row for row in known if row.pareto and not row.over_limits]
    if reference.peak_bytes is None or not known:
        return "Of the whole grid: the reference itself cannot be used."
    best = min(on_front or known, key=lambda row: (row.peak_bytes or 0, row.mean_abs_nats or 0.0))
    change = (best.peak_bytes or 0) - reference.peak_bytes
    if best is reference or change >= 0:
        return f"Of the whole grid: keep {reference.describe(axes)}; no other within the limits has a lower peak.{truth}"
    whose = "its own build's" if "twin" in best.divergence_source else "the"
    cost = "unmeasured in nats" if best.mean_abs_nats is None else f"{best.mean_abs_nats:.1e} nats from {whose} reference"
    if best.divergence_source.endswith("of its twin"):  # 0 by definition
        cost = "itself the reference of its build"
    return (
        f"Of the whole grid: use {best.describe(axes)}; its peak of {format_bytes(best.peak_bytes or 0)} "
        f"({best.memory_source}) is {abs(change) / reference.peak_bytes:.1%} below {reference.describe(axes)}, "
        f"{cost}.{truth}"
    )


def _saves(change: int, reference: int) -> str:
    if change == 0:
        return "leave the peak exactly as it is"
    word = "lower" if change < 0 else "raise"
    return f"{word} the peak by {format_bytes(abs(change))} ({abs(change) / reference:.1%})"


def _judge(change: float, metrics: dict[str, float]) -> str:
    over = [
        f"{name} {metrics[name]:.4g} > {limit}"
        for name, limit in THRESHOLDS.items()
        if not math.isnan(metrics[name]) and metrics[name] > limit and name != "k3"
    ]
    if over:
        return f"don't switch before finding the cause, {', '.join(over)}."
    within = f"within the field's bounds (token_mult_prob_error {metrics['token_mult_prob_error']:.4f} of at most 1.05)"
    if change <= -_WORTH_IT:
        return f"{within}, so you may switch."
    if change < 0:
        return f"{within}, so you may switch, but little is gained at this size."
    return f"{within}, but nothing is gained: keep the reference."
