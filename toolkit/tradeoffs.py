"""The question itself: may I switch the output dtype? What does it save, what does it cost, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.errors import SpecError
from toolkit.mismatch import THRESHOLDS
from toolkit.records import Report, format_bytes
from toolkit.spec import dtype_name

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from toolkit.divergence_report import DivergenceReport
    from toolkit.memory import MemoryReport
    from toolkit.session import Session


#: A saving below this part of the peak is called little.
_WORTH_IT = 0.05


@dataclass(repr=False, eq=False)
class TradeoffReport(Report):
    """Peak memory under each output dtype, and the divergence of each from the first.

    Attributes:
        memory: a MemoryReport per dtype, in the order asked for.
        divergence: a DivergenceReport of the first dtype against each other one.
        failures: why a dtype cannot be used at all, for those that left their range.
        verdict: what to do, in words, from these records.
    """

    memory: dict[str, MemoryReport]
    divergence: dict[str, DivergenceReport]
    failures: dict[str, str]
    verdict: str

    @property
    def summary(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for dtype, report in self.memory.items():
            out[f"{dtype}_peak_bytes"] = report.peak_bytes
        for dtype, divergence in self.divergence.items():
            out[f"{dtype}_mean_abs_nats"] = divergence.metrics["mean_abs_nats"]
            out[f"{dtype}_token_mult_prob_error"] = divergence.metrics["token_mult_prob_error"]
        return out

    @property
    def headline(self) -> str:
        return self.verdict

    def to_frame(self) -> pd.DataFrame:
        """A row per output dtype."""
        import pandas as pd

        rows = []
        for dtype, report in self.memory.items():
            metrics = self.divergence[dtype].metrics if dtype in self.divergence else {}
            rows.append(
                {
                    "output_dtype": dtype,
                    "peak_bytes": report.peak_bytes,
                    "peak_phase": report.peak_phase,
                    "logit_peak_bytes": report.logit_peak_bytes,
                    "boundary_bytes": report.boundary_bytes,
                    "mean_abs_nats": metrics.get("mean_abs_nats", 0.0),
                    "max_abs_nats": metrics.get("max_abs_nats", 0.0),
                    "token_mult_prob_error": metrics.get("token_mult_prob_error", 1.0),
                    "gradient_relative_error": metrics.get("gradient_relative_error", 0.0),
                    "source": report.source,
                }
            )
        return pd.DataFrame(rows)

    def figure(self) -> go.Figure:
        """Peak memory against divergence, a point per dtype."""
        from toolkit.figures import tradeoffs_figure

        return tradeoffs_figure(self)


def tradeoffs(session: Session, dtypes: tuple[str, ...]) -> TradeoffReport:
    """Measure each output dtype on a live session.

    Raises:
        SpecError: fewer than two different dtypes.
    """
    names = list(dict.fromkeys(dtype_name(d, "dtypes") for d in dtypes))
    if len(names) < 2:
        raise SpecError(f"dtypes={dtypes!r}: a tradeoff needs two or more different dtypes; the first is the reference.")
    memory = {names[0]: session.memory(output_dtype=names[0])}
    divergence: dict[str, DivergenceReport] = {}
    failures: dict[str, str] = {}
    for name in names[1:]:
        try:
            measured, compared = session.memory(output_dtype=name), session.divergence(names[0], name)
        except FloatingPointError as error:  # float16 overflows on some models: that is its verdict
            failures[name] = str(error)
        else:
            memory[name], divergence[name] = measured, compared
    return TradeoffReport(memory, divergence, failures, verdict(memory, divergence, failures))


def verdict(memory: dict[str, MemoryReport], divergence: dict[str, DivergenceReport], failures: dict[str, str]) -> str:
    """The answer in words. `memory`'s first dtype is the reference that `divergence` compares with."""
    reference, *others = memory
    sentences = [f"{dtype} outputs cannot be used: {why}" for dtype, why in failures.items()]
    for dtype in others:
        change = memory[dtype].peak_bytes - memory[reference].peak_bytes
        metrics = divergence[dtype].metrics
        mean, most = metrics["mean_abs_nats"], metrics["max_abs_nats"]
        sentences.append(
            f"{dtype} outputs {_saves(change, memory[reference].peak_bytes)} and move the logprobs by {mean:.1e} nats on "
            f"average ({most:.1e} at most): {_judge(change / memory[reference].peak_bytes, metrics)}"
        )
    return " ".join(sentences)


def _saves(change: int, reference: int) -> str:
    if change == 0:
        return "leave the peak exactly as it is"
    word = "lower" if change < 0 else "raise"
    return f"{word} the peak by {format_bytes(abs(change))} ({abs(change) / reference:.1%})"


def _judge(change: float, metrics: dict[str, float]) -> str:
    over = [
        f"{name} {metrics[name]:.4g} > {limit}"
        for name, limit in THRESHOLDS.items()
        if metrics[name] > limit and name != "k3"
    ]
    if over:
        return f"don't switch before finding the cause, {', '.join(over)}."
    within = f"within the field's bounds (token_mult_prob_error {metrics['token_mult_prob_error']:.4f} of at most 1.05)"
    if change <= -_WORTH_IT:
        return f"{within}, so you may switch."
    if change < 0:
        return f"{within}, so you may switch, but little is gained at this size."
    return f"{within}, but nothing is gained: keep the reference."
