"""Where every byte of a training step's peak goes.

`measure` runs one training step (forward, loss, backward, optimizer) of the live policy under the ledger and puts
parameters and optimizer state back, so measuring changes nothing. What counts is tensor storage of the step: parameters,
optimizer state, inputs, and everything the step makes. Not counted: Python, the sampler's KV cache, other sessions.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from toolkit import fsdp
from toolkit.ledger import CATEGORIES, Ledger
from toolkit.logprobs import Phase, no_phase
from toolkit.policy import Policy, set_optimizer
from toolkit.prompts import Reward, make_batch
from toolkit.records import Report, format_bytes
from toolkit.spec import GRPOConfig, dtype_name
from toolkit.step import (
    TrainingBatch,
    clip_gradients,
    forward_backward,
    grade_together,
    sample_step,
    training_batch,
)

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


@dataclass(repr=False, eq=False)
class MemoryReport(Report):
    """Live tensor storage over one training step, on the rank with the highest peak.

    Attributes:
        peak_bytes: most bytes alive at once.
        categories: bytes by category at that moment; they sum to `peak_bytes` exactly.
        phase_peaks: most bytes alive in each phase.
        saved_by_dtype: bytes kept from forward to backward, other than logits, parameters and inputs, by dtype.
        boundary_bytes: of these, outputs of FSDP units in the output dtype: what the output dtype itself retains.
        boundaries: each unit's output: unit, dtype, bytes, and whether it is retained for backward.
        logit_buffers: each [.., V] tensor: stage (the operation), shape, dtype, bytes, phase, alive at the logit peak.
        timeline: "event", "phase" and bytes by category, in columns.
        source: "cpu" or "cuda".
        output_dtype: the FSDP output dtype measured.
        checkpointing: which activation checkpointing is active, and on which side of the FSDP units.
        num_sequences, sequence_length: of one micro-batch on a rank.
        logit_elements: elements of one micro-batch's logits on a rank.
        per_rank_peak_bytes: the peak of every rank.
    """

    peak_bytes: int
    peak_phase: str
    categories: dict[str, int]
    phase_peaks: dict[str, int]
    saved_by_dtype: dict[str, int]
    boundary_bytes: int
    boundaries: list[dict[str, Any]]
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

    @property
    def logit_peak_bytes(self) -> int:
        """Most bytes of logits alive at once."""
        return max(self.timeline["logits"], default=0)

    @property
    def summary(self) -> dict[str, Any]:
        return {
            "output_dtype": self.output_dtype,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
            **{f"{name}_bytes": nbytes for name, nbytes in self.categories.items()},
            "logit_peak_bytes": self.logit_peak_bytes,
            "boundary_bytes": self.boundary_bytes,
            "sequences": self.num_sequences,
            "tokens_per_sequence": self.sequence_length,
            "checkpointing": self.checkpointing,
            "source": self.source,
        }

    @property
    def headline(self) -> str:
        largest = max(self.categories, key=lambda name: self.categories[name])
        share = self.categories[largest] / self.peak_bytes
        return (
            f"peak {format_bytes(self.peak_bytes)} in {self.peak_phase} with {self.output_dtype} outputs; "
            f"{share:.0%} of it {largest.replace('_', ' ')}"
        )

    def to_frame(self) -> pd.DataFrame:
        """A row per category: bytes at the peak."""
        import pandas as pd

        return pd.DataFrame({"category": list(self.categories), "peak_bytes": list(self.categories.values())})

    def figure(self) -> go.Figure:
        """The step over time, stacked by category, with the peak marked."""
        from toolkit.figures import memory_figure

        return memory_figure(self)


def measure(
    policy: Policy,
    config: GRPOConfig,
    problems: list[tuple[str, str]],
    reward: Reward | None,
    *,
    step: int,
    output_dtype: str | None = None,
    shape: tuple[int, int] | None = None,
) -> MemoryReport:
    """Measure one training step on this rank (all ranks together).

    Args:
        output_dtype: measure with this one and put the session's back; None takes the session's.
        shape: (sequences on each rank, tokens of each) to measure made-up tokens of that size; None samples a step.
    """
    settings = {} if output_dtype is None else {"output_dtype": dtype_name(output_dtype, "output_dtype")}
    with policy.temporarily(**settings):
        training = _made_up(policy, config, *shape) if shape else _sampled(policy, config, problems, reward, step)
        with _put_back(policy):
            _train(policy, config, training, step)  # creates optimizer state and FSDP2's lazy parts beforehand
            ledger = _record(policy, config, training, step)
        return _report(policy, config, training, ledger)


def _sampled(
    policy: Policy, config: GRPOConfig, problems: list[tuple[str, str]], reward: Reward | None, step: int
) -> TrainingBatch:
    rollouts = sample_step(policy, config, problems, step)
    return training_batch(policy, config, rollouts, grade_together(policy, rollouts, reward))


def _made_up(policy: Policy, config: GRPOConfig, num_sequences: int, sequence_length: int) -> TrainingBatch:
    """Random tokens: their values do not matter to memory. The first token is the prompt."""
    generator = torch.Generator().manual_seed(0)
    vocab = policy.vocab_size
    rows = torch.randint(vocab, (num_sequences, sequence_length), generator=generator).tolist()
    batch = make_batch(rows, [1] * num_sequences, policy.tokenizer.pad_token_id or 0).to(policy.device)
    total = float(num_sequences * policy.data_size)

    def logprobs_if(wanted: bool) -> torch.Tensor | None:
        return torch.zeros(num_sequences, sequence_length - 1, device=policy.device) if wanted else None

    return TrainingBatch(
        batch,
        advantages_B=torch.ones(num_sequences, device=policy.device),
        previous_BT=logprobs_if(not config.force_on_policy_ratio),
        num_tokens=total * (sequence_length - 1),
        num_sequences=total,
        generation_BT=logprobs_if(config.use_importance_sampling_correction),
        reference_BT=logprobs_if(config.reference_policy_kl_penalty > 0),
    )


def _train(policy: Policy, config: GRPOConfig, training: TrainingBatch, step: int, phase: Phase = no_phase) -> None:
    """The update of `step.grpo_step`, phase by phase."""
    set_optimizer(policy, config, step)
    forward_backward(policy, config, training, phase=phase)
    with phase("optimizer"):
        clip_gradients(policy, config.max_grad_norm)
        policy.optimizer.step()
        policy.optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def _put_back(policy: Policy) -> Iterator[None]:
    """Restore parameters and optimizer state afterwards, bit for bit; the copies live outside the ledger, on the CPU."""
    params = [(p, _local(p).cpu().clone()) for p in policy.model.parameters()]
    state = {p: {k: _local(v).cpu().clone() for k, v in s.items()} for p, s in policy.optimizer.state.items()}
    try:
        yield
    finally:
        policy.optimizer.zero_grad(set_to_none=True)
        fsdp.reshard(policy.model)
        with torch.no_grad():
            for param, value in params:
                _local(param).copy_(value)
            for key, before in state.items():
                for name, value in before.items():
                    _local(policy.optimizer.state[key][name]).copy_(value)
        if not state:
            policy.optimizer.state.clear()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach()
    return data.to_local() if isinstance(data, DTensor) else data


def _record(policy: Policy, config: GRPOConfig, training: TrainingBatch, step: int) -> Ledger:
    ledger = Ledger(policy.model, {policy.vocab_size, policy.vocab_size // policy.tensor_size})
    with ledger:
        ledger.label(map(_local, policy.model.parameters()), "parameter")
        ledger.label(policy.model.buffers(), "parameter")
        ledger.label((_local(v) for s in policy.optimizer.state.values() for v in s.values()), "optimizer")
        batch = training.batch
        inputs = [batch.ids_BT, batch.mask_BT, batch.positions_BT, batch.token_mask_BT]
        ledger.label([*inputs, training.advantages_B, *training.logprobs], "input")
        ledger.label(policy.reference or [], "parameter")
        _train(policy, config, training, step, ledger.phase)
    return ledger


def _report(policy: Policy, config: GRPOConfig, training: TrainingBatch, ledger: Ledger) -> MemoryReport:
    timeline, phase_peaks, peak = _timeline(ledger)
    peak_time, peak_bytes, peak_phase, categories = peak
    assert sum(categories.values()) == peak_bytes == sum(ledger.alive_at(peak_time).values())
    backward = next(time for time, name in ledger.phases if name == "backward")
    retained = ledger.alive_at(backward - 1)
    boundaries: list[dict[str, Any]] = [
        {"unit": unit, "dtype": ledger.blocks[i].dtype, "bytes": ledger.blocks[i].nbytes, "retained": i in retained}
        for unit, blocks in ledger.unit_outputs.items()
        for i in dict.fromkeys(blocks)
        if not ledger.blocks[i].is_logits
    ]
    saved = Counter[str]()
    for index, nbytes in retained.items():
        if ledger.blocks[index].category == "activations":
            saved[ledger.blocks[index].dtype] += nbytes
    micro = next(training.micro_batches(config.train_micro_batch_size)).batch.ids_BT
    peaks: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(peaks, peak_bytes)
    return MemoryReport(
        peak_bytes=peak_bytes,
        peak_phase=peak_phase,
        categories=categories,
        phase_peaks=phase_peaks,
        saved_by_dtype=dict(saved),
        boundary_bytes=sum(int(b["bytes"]) for b in boundaries if b["retained"]),
        boundaries=boundaries,
        logit_buffers=_logit_buffers(ledger),
        timeline=timeline,
        source=policy.device.type,
        output_dtype=policy.spec.output_dtype,
        checkpointing=_ORDERS[policy.spec.activation_checkpointing],
        num_sequences=micro.shape[0],
        sequence_length=micro.shape[1],
        logit_elements=micro.numel() * (policy.vocab_size // policy.tensor_size),
        rank=dist.get_rank(),
        per_rank_peak_bytes=peaks,
    )


def _timeline(ledger: Ledger) -> tuple[dict[str, list[Any]], dict[str, int], tuple[int, int, str, dict[str, int]]]:
    """Columns of the stored timeline, the peak of each phase, and the peak of all: time, bytes, phase, categories."""
    start = next(time for time, name in ledger.phases if name == "forward")
    stride = max(1, (len(ledger.events) - start) // _TIMELINE_POINTS)
    phase_peaks = dict.fromkeys(PHASES, 0)
    peak: tuple[int, int, str, dict[str, int]] = (0, -1, "", {})
    bins: dict[tuple[str, int], tuple[int, int, dict[str, int]]] = {}
    phase_seen = "forward"
    for time, phase, live in ledger.walk():
        if time < start:
            continue
        phase_seen = phase if phase in PHASES else phase_seen
        total = sum(live.values())
        phase_peaks[phase_seen] = max(phase_peaks[phase_seen], total)
        key = (phase_seen, time // stride)
        if total > bins.get(key, (0, -1, {}))[1]:
            bins[key] = (time, total, dict(live))
        if total > peak[1]:
            peak = (time, total, phase_seen, {name: live[name] for name in CATEGORIES})
    points = sorted((time, phase, live) for (phase, _), (time, _, live) in bins.items())
    timeline: dict[str, list[Any]] = {"event": [p[0] for p in points], "phase": [p[1] for p in points]}
    for name in CATEGORIES:
        timeline[name] = [p[2].get(name, 0) for p in points]
    return timeline, phase_peaks, peak


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
