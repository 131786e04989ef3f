"""The pictures of a divergence say its finding and carry its own numbers, worked by hand on a made-up report."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
import pytest

import toolkit as tk
from toolkit import divergence_figures as figures
from toolkit.divergence_report import DivergenceReport


@pytest.fixture
def report() -> DivergenceReport:
    """Four tokens of two sequences: one unmoved, one halved, one raised, one that is a tag."""
    probs = [(0.95, 0.95), (0.4, 0.2), (0.05, 0.06), (5e-4, 5e-4 * 1.01)]
    rows = [
        {
            "sequence": i // 2, "position": 3 + i % 2, "token": i, "text": text, "logprob_a": math.log(a),
            "logprob_b": math.log(b), "delta_nats": math.log(b / a), "prob_a": a, "prob_b": b, "ratio": b / a,
            "rank_a": 1 + i, "rank_b": 2 + i,
        }
        for i, ((a, b), text) in enumerate(zip(probs, ("9", " x", "<b>&\"", "\n"), strict=True))
    ]  # fmt: skip
    delta = np.array([row["delta_nats"] for row in rows])
    metrics = {
        "mean_abs_nats": float(np.abs(delta).mean()), "max_abs_nats": math.log(2), "fraction_bit_identical": 0.25,
        "token_mult_prob_error": 1.2, "gen_kl_error": 1e-4, "policy_kl_error": 2e-3, "k3": 1e-4,
        "fraction_outside_clip": 0.25, "gradient_relative_error": 0.1, "gradient_cosine": 0.9,
        "update_relative_error": 0.2, "update_cosine": 0.8,
    }  # fmt: skip
    gradients = pd.DataFrame(
        {
            "group": ["embed", "head"], "num_parameters": [6, 4], "gradient_relative_error": [0.1, 0.3],
            "gradient_cosine": [0.9, 0.8], "update_relative_error": [0.2, 0.4], "update_cosine": [0.7, 0.6],
        }
    )  # fmt: skip
    units = {"(root)": 0.0, "model.layers.3": 0.2}
    return DivergenceReport("A", "B", pd.DataFrame(rows), metrics, units, "Cause: planted.", 0.2, 0.2, {}, gradients)


def test_bins_of_probability_by_hand(report: DivergenceReport) -> None:
    found = figures.binned(report.tokens)
    assert found["bin"].tolist() == ["≤0.001", "≤0.1", "≤0.5", "≤1"]
    assert found["tokens"].tolist() == [1, 1, 1, 1]
    assert found["mean"].tolist() == pytest.approx([math.log(1.01), math.log(1.2), math.log(2), 0.0])


def test_errors_by_position_by_hand(report: DivergenceReport) -> None:
    found = figures.by_position(report.tokens)
    assert found["position"].tolist() == [3, 4]
    assert found["tokens"].tolist() == [2, 2]
    assert found["mean"].tolist() == pytest.approx([math.log(1.2) / 2, (math.log(2) + math.log(1.01)) / 2])
    assert found["max"].tolist() == pytest.approx([math.log(1.2), math.log(2)])


def test_certain_and_impossible_tokens_have_a_bin(report: DivergenceReport) -> None:
    tokens = report.tokens.assign(prob_a=[1.0 + 1e-7, 0.0, 1.0, 0.9])
    assert figures.binned(tokens)["tokens"].sum() == 4


def test_the_figure_draws_every_token_the_clip_range_and_the_fields_limits(report: DivergenceReport) -> None:
    figure = report.figure()
    assert figure.layout.title.text == "A against B: |delta| 2.2e-01 nats mean, 6.9e-01 max"
    scatter = figure.data[0]
    assert (list(scatter.x), list(scatter.y)) == (report.tokens["prob_a"].tolist(), report.tokens["prob_b"].tolist())
    assert figure.layout.xaxis.type == figure.layout.yaxis.type == "log"
    lines = {round(shape.x0, 6) for shape in figure.layout.shapes if shape.x0 == shape.x1}
    assert lines == {round(math.log(ratio), 6) for ratio in (0.8, 1.2, 1.25)}
    levels = {round(shape.y0, 6) for shape in figure.layout.shapes if shape.y0 == shape.y1}
    assert levels == {round(math.log(1.05), 6)}
    histogram = next(trace for trace in figure.data if trace.type == "histogram")
    assert list(histogram.x) == report.tokens["delta_nats"].tolist()


def test_limits_are_multiples_of_what_the_field_allows(report: DivergenceReport) -> None:
    figure = figures.thresholds_figure(report)
    assert "over the limit: token_mult_prob_error, policy_kl_error" in figure.layout.title.text
    (bars,) = figure.data
    assert list(bars.x) == pytest.approx([0.2 / 0.05, 0.1, 2.0, 1e-4 / 0.015])


def test_units_and_gradients_say_what_they_found(report: DivergenceReport) -> None:
    units = figures.units_figure(report)
    assert units.layout.title.text.endswith("model.layers.3 makes 2.0e-01 nats")
    assert dict(zip(units.data[0].x, units.data[0].y, strict=True)) == report.units
    gradients = figures.gradients_figure(report)
    assert "differ by 1.0e-01, their AdamW steps by 2.0e-01" in gradients.layout.title.text
    assert [list(trace.x) for trace in gradients.data] == [[0.1, 0.3], [0.2, 0.4]]
    report.gradients, report.units = None, {}
    with pytest.raises(ValueError, match="no gradients"):
        figures.gradients_figure(report)
    assert "nothing to switch" in figures.units_figure(report).layout.title.text


def test_the_text_is_coloured_by_delta_and_tells_all_on_hover(report: DivergenceReport) -> None:
    page = report.text()._repr_html_()
    spans = re.findall(
        r'<span title="([^"]*)" style="background-color:rgba\((\d+),(\d+),(\d+),([\d.]+)\)[^"]*">(.*?)</span>', page, re.S
    )
    assert [span[-1] for span in spans] == [
        "9",
        " x",
        "&lt;b&gt;&amp;&quot;",
        "↵\n",
    ]  # escaped, the most moved sequence first
    strength = [float(span[4]) for span in spans]
    assert strength == pytest.approx([0.55 * math.sqrt(abs(d) / math.log(2)) for d in report.tokens["delta_nats"]], abs=1e-3)
    assert [span[1] for span in spans[1:3]] == ["0", "213"]  # lower is blue, higher vermilion
    assert "logprob -0.916291 and -1.60944, delta -6.93e-01 nats" in spans[1][0]
    assert "ratio 0.5, rank 2 and 3" in spans[1][0]
    assert "the token moved most is &#x27; x&#x27; of sequence 0, by -6.9e-01 nats" in page
    assert report.text(max_sequences=1)._repr_html_().count("<span title") == 2


def test_a_live_report_can_be_drawn_in_every_way(one_rank: tk.Session) -> None:
    live = one_rank.divergence()
    assert len(live.figure().data[0].x) == len(live.tokens)
    for draw in (figures.thresholds_figure, figures.units_figure, figures.gradients_figure):
        assert draw(live).layout.title.text
    assert live.text()._repr_html_().count("<span title") > 8
    same = one_rank.divergence("float32", "float32")
    assert "bit-identical" in same.figure().layout.title.text
    assert "no token moved" in same.text()._repr_html_()
