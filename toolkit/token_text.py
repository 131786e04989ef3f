"""The tokens of a divergence as text, each coloured by how far its logprob moved; shown by Jupyter, or saved as HTML."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING

from toolkit.checks import check_whole

if TYPE_CHECKING:
    from toolkit.divergence_report import DivergenceReport

# Okabe and Ito's blue and vermilion, see-through: the page's own text colour stays readable on both themes.
_LOWER, _HIGHER = (0, 114, 178), (213, 94, 0)
_STRONGEST = 0.55  # opacity of the largest |delta|


class TokenText:
    """Sequences of tokens on a background whose strength is |delta| and whose hue is its sign."""

    def __init__(self, report: DivergenceReport, max_sequences: int) -> None:
        check_whole("max_sequences", max_sequences)
        self.report = report
        worst = report.tokens.assign(size=report.tokens["delta_nats"].abs()).groupby("sequence")["size"].max()
        self.sequences: list[int] = worst.sort_values(ascending=False, kind="stable").index[:max_sequences].tolist()
        self.largest_nats = float(report.tokens["delta_nats"].abs().max())

    def __repr__(self) -> str:
        return f"TokenText: {len(self.sequences)} sequences, darkest at {self.largest_nats:.1e} nats; shown in a notebook"

    def _repr_html_(self) -> str:
        report, rows = self.report, []
        for sequence in self.sequences:
            tokens = report.tokens[report.tokens["sequence"] == sequence]
            mean = float(tokens["delta_nats"].abs().mean())
            spans = "".join(self._span(row) for row in tokens.itertuples())
            rows.append(
                f"<tr><td style='text-align:right;vertical-align:top;opacity:.75'>{sequence}</td>"
                f"<td style='text-align:right;vertical-align:top;opacity:.75'>{mean:.1e}</td>"
                f"<td style='text-align:left;white-space:pre-wrap;font-family:monospace;line-height:1.7'>{spans}</td></tr>"
            )
        key = "".join(_swatch(f, self.largest_nats) for f in (-1.0, -0.5, 0.0, 0.5, 1.0))
        shown = f"{len(self.sequences)} of {report.tokens['sequence'].nunique()} sequences, the most moved first"
        return (
            f"<div><b>{html.escape(self._finding())}</b><br>{shown}; delta = {html.escape(report.b)} − "
            f"{html.escape(report.a)}, in nats: {key}<table style='color:inherit'><tr><th>sequence</th><th>mean |delta|</th>"
            f"<th style='text-align:left'>scored tokens (hover for both logprobs)</th></tr>{''.join(rows)}</table></div>"
        )

    def _finding(self) -> str:
        if not self.largest_nats:
            return f"{self.report.a} and {self.report.b}: no token moved"
        worst = self.report.tokens.iloc[int(self.report.tokens["delta_nats"].abs().to_numpy().argmax())]
        return (
            f"{self.report.a} against {self.report.b}: the token moved most is {worst['text']!r} of sequence "
            f"{worst['sequence']}, by {worst['delta_nats']:+.1e} nats"
        )

    def _span(self, row: object) -> str:
        delta: float = row.delta_nats  # type: ignore[attr-defined]
        hover = (
            f"{row.text!r} (id {row.token}, position {row.position})\n"  # type: ignore[attr-defined]
            f"logprob {row.logprob_a:.6g} and {row.logprob_b:.6g}, delta {delta:+.2e} nats\n"  # type: ignore[attr-defined]
            f"ratio {row.ratio:.6g}, rank {row.rank_a} and {row.rank_b}"  # type: ignore[attr-defined]
        )
        text = html.escape(row.text) or "∅"  # type: ignore[attr-defined]
        # A line break keeps its place and shows that it is a token.
        shown = text.replace("\n", "↵\n")
        style = _background(delta / self.largest_nats if self.largest_nats else 0.0)
        return f'<span title="{html.escape(hover)}" style="{style}">{shown}</span>'


def _background(fraction: float) -> str:
    """The square root lifts small deltas into view; sign is the hue, and a dotted line below tells it without colour."""
    red, green, blue = _HIGHER if fraction > 0 else _LOWER
    strength = _STRONGEST * math.sqrt(abs(fraction))
    line = ";border-bottom:2px dotted" if fraction < 0 else ""
    return f"background-color:rgba({red},{green},{blue},{strength:.3f}){line};border-radius:2px"


def _swatch(fraction: float, largest_nats: float) -> str:
    return f'<span style="{_background(fraction)};padding:0 .4em;margin-right:.2em">{fraction * largest_nats:+.1e}</span>'
