"""Figures say their finding, carry the record's own numbers, and can be read on white and on black."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import toolkit as tk
from toolkit import figures, memory_figures
from toolkit.ledger import CATEGORIES
from toolkit.memory import MemoryReport
from toolkit.records import format_bytes


@pytest.fixture(scope="module")
def reports(one_rank: tk.Session) -> dict[str, MemoryReport]:
    one_rank.output_dtype = "float32"
    shape = {"num_sequences": 4, "sequence_length": 33}
    return {dtype: one_rank.memory(output_dtype=dtype, **shape) for dtype in ("float32", "bfloat16")}


def contrast(colour: str, background: tuple[int, int, int]) -> float:
    """WCAG contrast ratio."""

    def luminance(rgb: tuple[int, ...]) -> float:
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
        return float(np.dot([0.2126, 0.7152, 0.0722], linear))

    values = [luminance(tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))), luminance(background)]
    return (max(values) + 0.05) / (min(values) + 0.05)


@pytest.mark.parametrize("colour", [figures.BLUE, figures.VERMILION, figures.GREEN, figures.PURPLE, figures.GREY])
def test_colours_keep_contrast_on_light_and_dark(colour: str) -> None:
    assert contrast(colour, (255, 255, 255)) >= 2.9  # purple, the palest, has 2.97
    assert contrast(colour, (17, 17, 17)) >= 3.0
    assert contrast(figures.GREY, (255, 255, 255)) >= 4.5  # text


def test_the_memory_figure_stacks_to_the_peak_and_marks_it(reports: dict[str, MemoryReport]) -> None:
    report = reports["float32"]
    figure = report.figure()
    assert format_bytes(report.peak_bytes) in figure.layout.title.text
    assert report.peak_phase in figure.layout.title.text
    assert [trace.name for trace in figure.data] == [name.replace("_", " ") for name in CATEGORIES]
    total = np.sum([trace.y for trace in figure.data], axis=0)
    assert total.max() * 2**20 == pytest.approx(report.peak_bytes)
    texts = [a.text for a in figure.layout.annotations]
    assert {"forward", "loss", "backward", "optimizer", f"peak {format_bytes(report.peak_bytes)}"} <= set(texts)
    assert figure.layout.paper_bgcolor is None
    assert figure.layout.template.layout.paper_bgcolor == "rgba(0,0,0,0)"


def test_the_comparison_says_the_difference(reports: dict[str, MemoryReport]) -> None:
    figure = memory_figures.memory_comparison_figure(reports)
    change = reports["bfloat16"].peak_bytes - reports["float32"].peak_bytes
    assert figure.layout.title.text.startswith("bfloat16 against float32: peak ")
    assert format_bytes(change) in figure.layout.title.text
    for categories, phases, report in zip(figure.data[::2], figure.data[1::2], reports.values(), strict=True):
        assert np.sum(categories.y) * 2**20 == pytest.approx(report.peak_bytes)
        assert list(phases.y * 2**20) == pytest.approx(list(report.phase_peaks.values()))
    narrow, wide = reports["bfloat16"].phase_peaks, reports["float32"].phase_peaks
    written = {annotation.text for annotation in figure.layout.annotations}
    assert f"{(narrow['forward'] - wide['forward']) / 2**20:+.2f} MiB" in written


def test_a_report_compares_itself_and_names_what_differs(reports: dict[str, MemoryReport]) -> None:
    figure = reports["float32"].compare(reports["bfloat16"])
    assert figure.layout.title.text.startswith("output_dtype=bfloat16 against output_dtype=float32: peak ")
    same = reports["float32"].compare(reports["float32"])
    assert "(second) against output_dtype=float32 (first): peak +0 B" in same.layout.title.text


def test_the_boundary_figure_counts_what_is_retained(reports: dict[str, MemoryReport]) -> None:
    figure = memory_figures.boundaries_figure(reports)
    assert "float32 1 (" in figure.layout.title.text
    assert "bfloat16 " in figure.layout.title.text
    for trace, report in zip(figure.data, reports.values(), strict=True):
        kept = sum(y for y, opacity in zip(trace.y, trace.marker.opacity, strict=True) if opacity == 1.0)
        assert kept * 2**20 == pytest.approx(report.boundary_bytes)
        assert trace.customdata[0][0] == str(report.boundaries[0]["shape"])


def test_large_reports_are_drawn_in_gib() -> None:
    assert memory_figures.unit_of(2**30) == ("GiB", 2**30)
    assert memory_figures.unit_of(2**30 - 1) == ("MiB", 2**20)


def test_the_logit_figure_shows_each_buffer_in_bytes_per_logit(reports: dict[str, MemoryReport]) -> None:
    figure = memory_figures.logits_figure(reports)
    for trace, alive_trace, report in zip(figure.data[::2], figure.data[1::2], reports.values(), strict=True):
        assert max(alive_trace.y) * report.logit_elements == pytest.approx(report.logit_peak_bytes)
        assert list(trace.y) == pytest.approx([b["bytes"] / report.logit_elements for b in report.logit_buffers])
        alive = sum(y for y, opacity in zip(trace.y, trace.marker.opacity, strict=True) if opacity == 1.0)
        assert alive * report.logit_elements == pytest.approx(report.logit_peak_bytes)
        assert f"{alive:.1f} B" in figure.layout.title.text
    heads = {name: trace.y[0] for name, trace in zip(reports, figure.data[::2], strict=True)}
    assert heads == {"float32": 2.0, "bfloat16": 2.0}  # a bfloat16 head in both; the float32 output is a copy of it


def test_steps_and_tradeoffs(one_rank: tk.Session) -> None:
    records: Any = one_rank.grpo_step(2)
    figure = records.figure()
    assert list(figure.data[0].y) == list(records.to_frame()["reward"])
    report = one_rank.tradeoffs(("float32", "float16"))
    points = {trace.text[0]: trace.y[0] * 2**20 for trace in report.figure().data if trace.text is not None}
    assert points == pytest.approx({d: m.peak_bytes for d, m in report.memory.items()})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (-1536, "-1.50 KiB"),
        (86.47 * 2**30, "86.47 GiB"),
        (2**45, "32768.00 GiB"),
    ],
)
def test_bytes_are_written_in_binary_units(value: float, text: str) -> None:
    assert format_bytes(value) == text
