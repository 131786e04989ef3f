"""What a comparison of two settings found: token by token, in the field's metrics, by unit, by group of parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.records import Report

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from toolkit.token_text import TokenText


@dataclass(repr=False, eq=False)
class DivergenceReport(Report):
    """Per-token logprobs under two settings, the field's metrics of their distance, and the cause in words.

    Attributes:
        a, b: the settings compared, as text. `a` plays the sampler (NeMo-RL's "generation"), `b` the trainer.
        tokens: a row per scored token: sequence, position, token, text, logprob_a, logprob_b, delta_nats (b - a), prob_a,
            prob_b, ratio (prob_b / prob_a), rank_a, rank_b (1: the most likely token there).
        metrics: see `summary`.
        units: mean |delta| in nats when only this FSDP unit is switched from a's output dtype to b's; empty when output
            dtype is not what differs.
        cause: why the divergence is what it is, in words; a zero says why it is zero.
        ratio_clip_min, ratio_clip_max: of the clip range drawn, 1 - min to 1 + max.
        truth: mean |difference| in nats of each side from an all-float32 and a float64 run of the same weights on the same
            tokens without FSDP, and of these two from each other; empty where it was not measured.
        gradients: a row per group of parameters: relative error and cosine of the two gradients, and of the AdamW steps
            they would make; None for the sampler's logprobs, which have no gradient.
    """

    a: str
    b: str
    tokens: pd.DataFrame
    metrics: dict[str, float]
    units: dict[str, float]
    cause: str
    ratio_clip_min: float
    ratio_clip_max: float
    truth: dict[str, float] = field(default_factory=dict)
    gradients: pd.DataFrame | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """NeMo-RL's metrics and ours.

        mean_abs_nats, max_abs_nats: of |delta|. fraction_bit_identical: tokens with exactly the same logprob. k1, k3:
        estimators of KL(a || b). pearson: of the probabilities. fraction_outside_clip: tokens whose ratio the clip range
        would cut. argmax_flips: fraction of positions whose most likely token differs. gradient_relative_error:
        |grad_b - grad_a| / |grad_a|; gradient_cosine: of their angle; update_*: the same of one AdamW step. `truth` follows.
        """
        return {"a": self.a, "b": self.b, **self.metrics, **self.truth}

    @property
    def headline(self) -> str:
        m = self.metrics
        if m["fraction_bit_identical"] == 1.0:
            same = f"every one of {len(self.tokens)} token logprobs is bit-identical"
            return f"{self.a} and {self.b}: {same}. {self.cause}{self._from_truth}"
        return (
            f"{self.a} against {self.b}: |delta| {m['mean_abs_nats']:.2e} nats mean, {m['max_abs_nats']:.2e} max over "
            f"{len(self.tokens)} tokens. {self.cause}{self._from_truth}"
        )

    @property
    def _from_truth(self) -> str:
        if not self.truth:
            return ""
        a, b = (self.truth[f"{side}_from_float64_nats"] for side in "ab")
        return f" From a float64 run of these weights, a is {a:.1e} nats away and b {b:.1e}."

    def to_frame(self) -> pd.DataFrame:
        """The per-token table."""
        return self.tokens

    def figure(self) -> go.Figure:
        """Probability against probability, delta with the clip band, error by probability and by position."""
        from toolkit.divergence_figures import divergence_figure

        return divergence_figure(self)

    def text(self, max_sequences: int = 8) -> TokenText:
        """The tokens themselves, coloured by delta; hovering shows both logprobs, ratio and rank.

        Args:
            max_sequences: how many to show, those with the largest |delta| first.
        """
        from toolkit.token_text import TokenText

        return TokenText(self, max_sequences)
