"""The tour of `notebooks/precision_tradeoffs.ipynb` without a notebook: the same calls, their records, a page of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.page import Section, paragraphs, table
from toolkit.records import format_value

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.divergence_report import DivergenceReport
    from toolkit.edge_report import EdgeReport
    from toolkit.memory_report import MemoryReport
    from toolkit.records import EvaluationRecord, StepRecords
    from toolkit.self_check import SelfCheckReport
    from toolkit.session import Session
    from toolkit.tradeoff_report import TradeoffReport


@dataclass
class Tour:
    """What a tour found.

    Attributes:
        settings: the session's, by name, those that are not the defaults first.
        units: what every FSDP unit is set to.
        evaluations: greedy accuracy before and after the steps; empty where the task holds nothing out.
        steps: those taken in each output dtype, in turn.
        history: a row for each of them.
        failures: why a dtype could not be stepped in.
        check: each logprob mode against float64.
        edges: the known precision edges.
        tradeoffs: memory and divergence of each dtype, and the verdict.
    """

    settings: dict[str, Any]
    units: pd.DataFrame
    tradeoffs: TradeoffReport
    check: SelfCheckReport
    edges: EdgeReport
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    steps: dict[str, StepRecords] = field(default_factory=dict)
    history: pd.DataFrame | None = None
    failures: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Every record as one JSON object, by the name of what made it."""
        records: dict[str, Any] = {name: getattr(self, name) for name in ("tradeoffs", "check", "edges")}
        out: dict[str, Any] = {name: json.loads(record.to_json()) for name, record in records.items()}
        out |= {"settings": self.settings, "units": json.loads(self.units.to_json(orient="records"))}
        out |= {"evaluations": [json.loads(record.to_json()) for record in self.evaluations], "failures": self.failures}
        out |= {"steps": {dtype: json.loads(records.to_json()) for dtype, records in self.steps.items()}}
        return json.dumps({"verdict": self.tradeoffs.verdict, **out}, indent=1)


def take(session: Session, dtypes: tuple[str, ...], num_steps: int, num_evaluated: int, say: Callable[[str], None]) -> Tour:
    """Make the calls of the tour, one after the other.

    Args:
        dtypes: output dtypes; the first is the reference.
        num_steps: GRPO steps in each.
        num_evaluated: held-out problems to grade before and after; 0 grades none.
        say: told what is done next.

    Raises:
        SpecError: a dtype, or another setting, that is refused.
    """
    graded = min(num_evaluated, len(session.task.held_out))
    evaluations = []
    if graded:
        say(f"greedy accuracy on {graded} held-out problems")
        evaluations.append(session.evaluate(graded))
    steps, failures = _steps(session, dtypes, num_steps, say)
    if graded:
        evaluations.append(session.evaluate(graded))
    session.output_dtype = dtypes[0]
    say("memory and divergence of each output dtype")
    tradeoffs = session.tradeoffs(dtypes)
    say("precision edges")
    edges = session.precision_edges()
    say("each logprob mode against float64")
    check = session.self_check()
    return Tour(_settings(session), session.units(), tradeoffs, check, edges, evaluations, steps, session.history, failures)


def sections(tour: Tour) -> list[Section]:
    """The page's parts, each under the command that makes its records."""
    from toolkit.divergence_figures import units_figure
    from toolkit.memory_figures import logits_figure, memory_comparison_figure

    memory, divergence = tour.tradeoffs.memory, tour.tradeoffs.divergence
    dtypes = tuple(row.output_dtype for row in tour.tradeoffs.rows)
    parts = [
        Section(
            "What ran",
            f"session = tk.launch({', '.join(f'{k}={v!r}' for k, v in tour.settings.items())})\nsession.units()",
            paragraphs(f"Read back from FSDP2 on the first rank, with {next(iter(memory))} outputs:")
            + table(tour.units[tour.units["rank"] == 0].drop(columns="rank")),
        ),
        _stepped(tour),
    ]
    if len(memory) > 1:
        pair = dict(list(memory.items())[:2])
        parts.append(
            Section(
                "Memory of one training step",
                f"found = session.tradeoffs({dtypes})\nfound.memory[{dtypes[0]!r}].figure()\n"
                "memory_comparison_figure(found.memory)",
                paragraphs(*(f"{report.headline}." for report in memory.values())) + table(_side_by_side(memory)),
                [next(iter(memory.values())).figure(), memory_comparison_figure(pair)],
            )
        )
        parts.append(
            Section(
                "Logit buffers",
                "logits_figure(found.memory)",
                paragraphs("Each bar is one tensor of the size of the logits; full bars are alive when logits take most."),
                [logits_figure(pair)] if all(report.logit_buffers for report in pair.values()) else [],
            )
        )
    parts += [_diverged(dtype, report, units_figure) for dtype, report in divergence.items()]
    return [
        *parts,
        Section(
            "Precision edges",
            "session.precision_edges()",
            tour.edges._repr_html_(),
            [tour.edges.figure()],
        ),
        Section(
            "Each logprob mode against float64",
            "session.self_check()",
            paragraphs(tour.check.headline) + table(tour.check.to_frame()),
            [tour.check.figure()],
        ),
        Section("The grid", f"session.tradeoffs({dtypes})", tour.tradeoffs._repr_html_(), [tour.tradeoffs.figure()]),
    ]


def _steps(
    session: Session, dtypes: tuple[str, ...], num_steps: int, say: Callable[[str], None]
) -> tuple[dict[str, StepRecords], dict[str, str]]:
    from toolkit.records import StepRecords

    steps: dict[str, StepRecords] = {}
    failures: dict[str, str] = {}
    for dtype in dtypes:
        say(f"{num_steps} GRPO step(s) with {dtype} outputs")
        session.output_dtype = dtype
        try:
            taken = session.grpo_step(num_steps)
        except FloatingPointError as error:  # float16 overflows on some models, which the page has to say
            failures[dtype] = str(error)
        else:
            steps[dtype] = taken if isinstance(taken, StepRecords) else StepRecords([taken])
    return steps, failures


def _stepped(tour: Tour) -> Section:
    from toolkit.figures import steps_figure

    lines = [f"{dtype} outputs: {records.headline}." for dtype, records in tour.steps.items()]
    lines += [f"{dtype} outputs failed: {why}" for dtype, why in tour.failures.items()]
    if tour.evaluations:
        before, after = tour.evaluations
        lines.append(f"Before the first step: {before.headline}. After the last: {after.headline}.")
    command = "".join(
        f"session.output_dtype = {dtype!r}; session.grpo_step({len(records)})\n" for dtype, records in tour.steps.items()
    )
    body = paragraphs(*lines) + "".join(records._repr_html_() for records in tour.steps.values())
    drawable = tour.history is not None and len(tour.history) > 0
    return Section(
        "GRPO steps in each output dtype",
        f"{command}steps_figure(session.history)",
        body,
        [steps_figure(tour.history)] if drawable else [],  # type: ignore[arg-type]
    )


def _side_by_side(memory: dict[str, MemoryReport]) -> pd.DataFrame:
    """The reports' summaries, a column each, with units."""
    import pandas as pd

    columns = {dtype: {k: format_value(k, v) for k, v in report.summary.items()} for dtype, report in memory.items()}
    return pd.DataFrame(columns).drop(index="output_dtype").rename_axis("").reset_index()


def _diverged(dtype: str, report: DivergenceReport, units_figure: Callable[..., Any]) -> Section:
    columns = ["token", "text", "position", "prob_a", "prob_b", "ratio", "delta_nats"]
    moved = report.tokens.sort_values("delta_nats", key=abs, ascending=False)[columns].head(8)
    body = report._repr_html_() + paragraphs("The tokens that moved most:") + table(moved)
    title = f"How far each token moves: {report.a} against {report.b}"
    figures = [report.figure(), *([units_figure(report)] if report.units else [])]
    return Section(title, f"report = found.divergence[{dtype!r}]\nreport.figure()\nunits_figure(report)", body, figures)


def _settings(session: Session) -> dict[str, Any]:
    """Fields of the session that are not the defaults, and its ranks."""
    found: dict[str, Any] = {"model": str(session.spec.model), "ranks": session.num_ranks}
    for part in (session.spec, session.config):
        for f in dataclasses.fields(part):
            value = getattr(part, f.name)
            if f.default is not dataclasses.MISSING and value != f.default:
                found[f.name] = value if isinstance(value, str | int | float | bool) else str(value)
    return found
