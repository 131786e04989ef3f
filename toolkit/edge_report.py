"""The record of the precision edges: one row for each edge and setting, and what was found in words."""

from __future__ import annotations

import dataclasses
import html
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit.records import Report, model_name

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

#: Below this an edge is called absent: float32's own noise on logprobs and losses.
NOTABLE = 1e-6
#: Ends the name of an edge shown on made-up logits, which says nothing about the model at hand.
MADE_UP = ", made-up logits"


@dataclass(frozen=True, slots=True)
class Edge:
    """One edge under one setting.

    Attributes:
        edge, setting: what it is, and where it was measured.
        error: measured without the cure; None where this model or session cannot show it, infinity where values left
            their range.
        unit: of both errors.
        cure, error_with_cure: what to do, and what is left then.
        finding: what that means, or why it was not measured.
        temperature: of the setting, for edges that depend on it.
    """

    edge: str
    setting: str
    error: float | None
    unit: str
    cure: str
    error_with_cure: float | None
    finding: str
    temperature: float | None = None


def unmeasured(edge: str, reason: str) -> Edge:
    """A row for an edge that cannot be shown here."""
    return Edge(edge, "not measured", None, "", "", None, reason)


@dataclass(repr=False, eq=False)
class EdgeReport(Report):
    """Every known precision edge on this model, with and without its cure.

    Attributes:
        model: the model measured on.
        num_tokens: sampled tokens whose logits were used, over all ranks.
        edges: a row for each edge and setting.
    """

    model: str
    num_tokens: int
    edges: list[Edge]

    @property
    def worst(self) -> dict[str, Edge]:
        """The largest error of each edge measured on this model, over its settings."""
        found: dict[str, Edge] = {}
        for edge in self.edges:
            on_model = edge.error is not None and not edge.edge.endswith(MADE_UP)
            if on_model and (edge.edge not in found or _error(edge) > _error(found[edge.edge])):
                found[edge.edge] = edge
        return found

    @property
    def biting(self) -> list[Edge]:
        """Those of the worst that are more than float32's own noise."""
        return [edge for edge in self.worst.values() if _error(edge) > NOTABLE]

    @property
    def not_measured(self) -> dict[str, str]:
        """Edges that this model or session cannot show, and why."""
        return {edge.edge: edge.finding for edge in self.edges if edge.error is None}

    @property
    def summary(self) -> dict[str, Any]:
        """The largest error of each edge by name (infinity: out of range), and which edges were not measured."""
        errors: dict[str, Any] = {name: edge.error for name, edge in self.worst.items()}
        return {"model": self.model, "num_tokens": self.num_tokens, **errors, "not_measured": ", ".join(self.not_measured)}

    @property
    def headline(self) -> str:
        named = "; ".join(
            f"{e.edge} {_number(e.error)} {e.unit.split(',')[0]}, cured {_number(e.error_with_cure)}" for e in self.biting
        )
        return (
            f"{len(self.biting)} of {len(self.worst)} edges bite on {model_name(self.model)}: {named or 'none'}. "
            f"{len(self.not_measured)} could not be measured here."
        )

    def to_frame(self) -> pd.DataFrame:
        """A row for each edge and setting: edge, setting, error, unit, cure, error_with_cure, finding, temperature."""
        import pandas as pd

        return pd.DataFrame([dataclasses.asdict(edge) for edge in self.edges])

    def figure(self) -> go.Figure:
        """Each edge with and without its cure, and the temperature's by temperature."""
        from toolkit.edge_figures import edges_figure

        return edges_figure(self)

    def _repr_html_(self) -> str:
        names = ("edge", "setting", "error", "unit", "cure", "with cure", "finding")
        head = "".join(f"<th style='text-align:left'>{name}</th>" for name in names)
        body = []
        for edge in self.edges:
            values = (edge.edge, edge.setting, _number(edge.error), edge.unit, edge.cure, _number(edge.error_with_cure))
            cells = "".join(f"<td style='text-align:left'>{html.escape(v)}</td>" for v in (*values, edge.finding))
            body.append(f"<tr>{cells}</tr>")
        return f"<div><b>{html.escape(self.headline)}</b><table><tr>{head}</tr>{''.join(body)}</table></div>"


def _number(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return "out of range" if math.isinf(value) else "0" if value == 0 else f"{value:.2e}"


def _error(edge: Edge) -> float:
    return edge.error or 0.0
