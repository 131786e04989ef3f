"""The memory report: where every byte of a step's peak goes, whatever the source (a CPU, a GPU, a prediction)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from toolkit.ledger import CATEGORIES, Ledger
from toolkit.policy import Policy
from toolkit.records import Report, format_bytes
from toolkit.step import TrainingBatch

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

PHASES = ("forward", "loss", "backward", "optimizer")
#: Points of the stored timeline; each keeps the highest moment of its stretch, so the peak is always among them.
_TIMELINE_POINTS = 400

_ORDERS = {
    False: "no activation checkpointing",
    "full": "activation checkpointing inside the FSDP units (AutoModel, whole layers)",
    "selective": "selective activation checkpointing inside the FSDP units (AutoModel)",
    "hf": "activation checkpointing outside the FSDP units (Hugging Face)",
}


#: The same for tables.
_SHORT = {
    _ORDERS[False]: "none",
    _ORDERS["full"]: "inside the units (AutoModel)",
    _ORDERS["selective"]: "inside, selective",
    _ORDERS["hf"]: "outside the units (HF)",
}


@dataclass(repr=False, eq=False)
class MemoryReport(Report):
    """Live tensor storage over one training step, on the rank with the highest peak.

    Attributes:
        peak_bytes: most bytes alive at once.
        categories: bytes by category at that moment; they sum to `peak_bytes` exactly.
        phase_peaks: most bytes alive in each phase.
        saved_by_dtype: bytes kept from forward to backward, other than logits, parameters and inputs, by dtype.
        boundary_bytes: of these, outputs of FSDP units in the output dtype: what the output dtype itself retains.
        boundaries: each unit's output: unit, shape, dtype, bytes, and whether it is retained for backward.
        logit_phase_peaks: most bytes of logits alive at once in each phase.
        logit_buffers: each [.., V] tensor: stage (the operation), shape, dtype, bytes, phase, alive at the logit peak.
        timeline: "event", "phase" and bytes by category, in columns.
        source: "cpu" or "cuda" (measured there), or "predicted" (fake tensors).
        checked_against: what the figures of this source have been compared with, and how well they agreed.
        model, ranks, tensor_parallel_size, logprobs: the setting, beside those below.
        output_dtype: the FSDP output dtype measured.
        checkpointing: which activation checkpointing is active, and on which side of the FSDP units.
        num_sequences, sequence_length: of one micro-batch on a rank.
        logit_elements: elements of one micro-batch's logits on a rank.
        rank: the rank this is about.
        allocator_peak_bytes: most bytes CUDA's allocator had given out at once during the step; None on a CPU and predicted.
        per_rank_peak_bytes: the peak of every rank; of a prediction that of rank 0, whose shards are the largest.
    """

    peak_bytes: int
    peak_phase: str
    categories: dict[str, int]
    phase_peaks: dict[str, int]
    saved_by_dtype: dict[str, int]
    boundary_bytes: int
    boundaries: list[dict[str, Any]]
    logit_phase_peaks: dict[str, int]
    logit_buffers: list[dict[str, Any]]
    timeline: dict[str, list[Any]]
    source: str
    output_dtype: str
    checkpointing: str
    num_sequences: int
    sequence_length: int
    logit_elements: int
    rank: int
    per_rank_peak_bytes: list[int]
    checked_against: str
    model: str
    ranks: int
    tensor_parallel_size: int
    logprobs: str
    allocator_peak_bytes: int | None = None

    @property
    def unexplained_bytes(self) -> int | None:
        """What CUDA's allocator held at its peak beyond the ledger's: kernels' scratch, rounding, tensors of others."""
        return None if self.allocator_peak_bytes is None else self.allocator_peak_bytes - self.peak_bytes

    @property
    def logit_peak_bytes(self) -> int:
        """Most bytes of logits alive at once."""
        return max(self.logit_phase_peaks.values())

    @property
    def summary(self) -> dict[str, Any]:
        allocator = {"allocator_peak_bytes": self.allocator_peak_bytes, "unexplained_bytes": self.unexplained_bytes}
        return {
            "output_dtype": self.output_dtype,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            **{name: nbytes for name, nbytes in allocator.items() if nbytes is not None},
            **{f"{name}_bytes": nbytes for name, nbytes in self.categories.items()},
            "logit_peak_bytes": self.logit_peak_bytes,
            "boundary_bytes": self.boundary_bytes,
            "sequences": self.num_sequences,
            "tokens_per_sequence": self.sequence_length,
            "checkpointing": self.checkpointing,
            "logprobs": self.logprobs,
            "model": self.model,
            "ranks": self.ranks,
            "tensor_parallel_size": self.tensor_parallel_size,
            "source": self.source,
            "checked_against": self.checked_against,
        }

    @property
    def headline(self) -> str:
        largest = max(self.categories, key=lambda name: self.categories[name])
        share = self.categories[largest] / self.peak_bytes
        word = "predicted peak" if self.source == "predicted" else "peak"
        return (
            f"{word} {format_bytes(self.peak_bytes)} in {self.peak_phase} with {self.output_dtype} outputs; "
            f"{share:.0%} of it {largest.replace('_', ' ')}"
        )

    def to_frame(self) -> pd.DataFrame:
        """A row per category: bytes at the peak."""
        import pandas as pd

        return pd.DataFrame({"category": list(self.categories), "peak_bytes": list(self.categories.values())})

    def figure(self) -> go.Figure:
        """The step over time, stacked by category, with the peak marked."""
        from toolkit.memory_figures import memory_figure

        return memory_figure(self)

    def compare(self, other: MemoryReport) -> go.Figure:
        """This setting beside another: bytes by category at the peak and by phase, with the difference of the other."""
        from toolkit.memory_figures import memory_comparison_figure

        mine, its = self._setting(), other._setting()
        differing = [name for name in mine if mine[name] != its[name]] or ["output_dtype"]
        labels = [", ".join(f"{name}={setting[name]}" for name in differing) for setting in (mine, its)]
        if labels[0] == labels[1]:
            labels = [f"{label} ({place})" for label, place in zip(labels, ("first", "second"), strict=True)]
        return memory_comparison_figure(dict(zip(labels, (self, other), strict=True)))

    def _setting(self) -> dict[str, Any]:
        names = (
            "output_dtype", "model", "ranks", "tensor_parallel_size", "logprobs", "checkpointing", "num_sequences",
            "sequence_length", "source",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


def peaks_table(reports: Iterable[MemoryReport]) -> pd.DataFrame:
    """Peaks in GiB: a row per setting, a column per output dtype, and the last dtype's difference from the first."""
    import pandas as pd

    frame = pd.DataFrame(
        {
            "tensor_parallel_size": report.tensor_parallel_size,
            "logprobs": report.logprobs,
            "checkpointing": _SHORT[report.checkpointing],
            "tokens": f"{report.num_sequences} × {report.sequence_length}",
            "output_dtype": report.output_dtype,
            "GiB": report.peak_bytes / 2**30,
            "phase": report.peak_phase,
        }
        for report in reports
    )
    keys = [name for name in frame.columns if name not in ("output_dtype", "GiB", "phase")]
    dtypes = list(frame["output_dtype"].unique())
    table = frame.pivot_table("GiB", keys, "output_dtype", sort=False)[dtypes]
    table.columns = pd.Index([f"{dtype}, GiB" for dtype in dtypes])
    table["difference, GiB"] = table.iloc[:, -1] - table.iloc[:, 0]
    phases = frame.pivot_table("phase", keys, "output_dtype", aggfunc="first", sort=False)[dtypes]
    table["peak in"] = [" → ".join(dict.fromkeys(row)) for row in phases.to_numpy()]  # both, where it moves
    return table.round(2)


def report_of(
    policy: Policy, micro_batch: TrainingBatch, ledger: Ledger, *, source: str, checked_against: str
) -> MemoryReport:
    """Read the ledger of one training step; `per_rank_peak_bytes` holds this rank's, until the caller adds the others'."""
    timeline, phase_peaks, logit_phase_peaks, peak = _timeline(ledger)
    peak_time, peak_bytes, peak_phase, categories = peak
    assert sum(categories.values()) == peak_bytes == sum(ledger.alive_at(peak_time).values())
    backward = next(time for time, name in ledger.phases if name == "backward")
    retained = ledger.alive_at(backward - 1)
    boundaries: list[dict[str, Any]] = [
        {"unit": unit, "retained": i in retained}
        | {"shape": ledger.blocks[i].shape, "dtype": ledger.blocks[i].dtype, "bytes": ledger.blocks[i].nbytes}
        for unit, blocks in ledger.unit_outputs.items()
        for i in dict.fromkeys(blocks)
        if not ledger.blocks[i].is_logits
    ]
    saved = Counter[str]()
    for index, nbytes in retained.items():
        if ledger.blocks[index].category == "activations":
            saved[ledger.blocks[index].dtype] += nbytes
    micro = micro_batch.batch.ids_BT
    return MemoryReport(
        peak_bytes=peak_bytes,
        peak_phase=peak_phase,
        categories=categories,
        phase_peaks=phase_peaks,
        saved_by_dtype=dict(saved),
        boundary_bytes=sum(int(b["bytes"]) for b in boundaries if b["retained"]),
        boundaries=boundaries,
        logit_phase_peaks=logit_phase_peaks,
        logit_buffers=_logit_buffers(ledger),
        timeline=timeline,
        source=source,
        output_dtype=policy.spec.output_dtype,
        checkpointing=_ORDERS[policy.spec.activation_checkpointing],
        num_sequences=micro.shape[0],
        sequence_length=micro.shape[1],
        logit_elements=micro.numel() * (policy.vocab_size // policy.tensor_size),
        rank=dist.get_rank(),
        per_rank_peak_bytes=[peak_bytes],
        checked_against=checked_against,
        model=str(policy.spec.model),
        ranks=dist.get_world_size(),
        tensor_parallel_size=policy.tensor_size,
        logprobs=policy.spec.logprob_mode + (f", {policy.spec.chunk_rows} rows at a time" if policy.spec.chunk_rows else ""),
    )


def _timeline(
    ledger: Ledger,
) -> tuple[dict[str, list[Any]], dict[str, int], dict[str, int], tuple[int, int, str, dict[str, int]]]:
    """Columns of the stored timeline, each phase's peak, of logits too, and the peak: time, bytes, phase, categories."""
    start = next(time for time, name in ledger.phases if name == "forward")
    stride = max(1, (len(ledger.events) - start) // _TIMELINE_POINTS)
    phase_peaks, logit_phase_peaks = dict.fromkeys(PHASES, 0), dict.fromkeys(PHASES, 0)
    peak: tuple[int, int, str, dict[str, int]] = (0, -1, "", {})
    bins: dict[tuple[str, int], tuple[int, int, dict[str, int]]] = {}
    phase_seen = "forward"
    for time, phase, live in ledger.walk():
        if time < start:
            continue
        phase_seen = phase if phase in PHASES else phase_seen
        total = sum(live.values())
        phase_peaks[phase_seen] = max(phase_peaks[phase_seen], total)
        logit_phase_peaks[phase_seen] = max(logit_phase_peaks[phase_seen], live["logits"])
        key = (phase_seen, time // stride)
        if total > bins.get(key, (0, -1, {}))[1]:
            bins[key] = (time, total, dict(live))
        if total > peak[1]:
            peak = (time, total, phase_seen, {name: live[name] for name in CATEGORIES})
    points = sorted((time, phase, live) for (phase, _), (time, _, live) in bins.items())
    timeline: dict[str, list[Any]] = {"event": [p[0] for p in points], "phase": [p[1] for p in points]}
    for name in CATEGORIES:
        timeline[name] = [p[2].get(name, 0) for p in points]
    return timeline, phase_peaks, logit_phase_peaks, peak


_STAGES = {
    "aten::mm": "head output",
    "aten::addmm": "head output",
    "aten::bmm": "head output",
    "aten::_to_copy": "dtype copy",
    "aten::div": "divided by temperature",
    "aten::_log_softmax": "log-softmax",
    "aten::_log_softmax_backward_data": "gradient of log-softmax",
    "aten::_log_softmax (inside)": "contiguous copy inside log-softmax",
    "aten::slice_backward": "gradient of the shift by one token",
    "aten::scatter_add": "gradient of gather",
    "aten::new_zeros": "gradient of gather",
    "aten::zeros": "gradient of gather",
}


def _logit_buffers(ledger: Ledger) -> list[dict[str, Any]]:
    """Every logit-sized tensor of the first micro-batch, in order, and whether it is alive when logits take most."""
    forwards = [time for time, name in ledger.phases if name == "forward"]
    end = forwards[1] if len(forwards) > 1 else len(ledger.events)
    live, most, at_peak = Counter[int](), 0, frozenset[int]()
    order: dict[int, None] = {}
    for index, change in ledger.events[:end]:
        if ledger.blocks[index].category != "logits":
            continue
        order[index] = None
        live[index] += change
        total = sum(live.values())
        if total > most:
            most, at_peak = total, frozenset(i for i, nbytes in live.items() if nbytes)
    buffers = []
    for index in order:
        block = ledger.blocks[index]
        buffers.append(
            {
                "stage": _STAGES.get(block.op, block.op.removeprefix("aten::")),
                "phase": block.phase,
                "shape": block.shape,
                "dtype": block.dtype,
                "bytes": block.nbytes,
                "alive_at_logit_peak": index in at_peak,
            }
        )
    return buffers
