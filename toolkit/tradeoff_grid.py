"""The question itself, over a grid: which output dtype, checkpointing, logprob mode and tensor parallelism, and why."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from toolkit.checks import check_list
from toolkit.errors import SpecError
from toolkit.grpo_config import MEMORY_FIELDS
from toolkit.layout import facts_of, read_config
from toolkit.spec import DTYPES, PolicySpec, dtype_name, split_fields
from toolkit.tradeoff_report import AXES, TradeoffReport, TradeoffRow, grid_verdict, pareto_front, verdict

if TYPE_CHECKING:
    from toolkit.divergence_report import DivergenceReport
    from toolkit.memory_report import MemoryReport
    from toolkit.session import Session

_LONGEST = 4096  # tokens, where nobody says a length
Cell = tuple[str, str | bool, str, int]  # in the order of AXES


def tradeoffs(
    spec: PolicySpec | str,
    *,
    ranks: int = 1,
    sequence_length: int | None = None,
    micro_batch_size: int = 1,
    dtypes: Iterable[str] = tuple(DTYPES),
    checkpointing: Iterable[str | bool] | None = None,
    logprob_modes: Iterable[str] | None = None,
    tensor_parallel_sizes: Iterable[int] | None = None,
    **fields: Any,
) -> TradeoffReport:
    """Predict the memory of a grid of settings without a session; nothing of the model but its config is read.

    The divergence needs weights: `session.tradeoffs()` measures it.

    Args:
        spec: the policy's settings, or a model as `predict_memory` takes it.
        ranks, sequence_length, micro_batch_size: as in `predict_memory`; None takes the model's positions, at most 4096.
        dtypes, checkpointing, logprob_modes, tensor_parallel_sizes: values of each axis; None keeps the spec's own.
        **fields: as in `predict_memory`, over those of the spec.

    Raises:
        SpecError: fewer than two settings, or one that is refused.
    """
    from toolkit.memory_predict import predict_settings

    policy_fields, config_fields = split_fields(fields)
    spec = (
        dataclasses.replace(spec, **policy_fields)
        if isinstance(spec, PolicySpec)
        else PolicySpec(model=spec, **policy_fields)
    )
    cells = _cells(spec, dtypes, checkpointing, logprob_modes, tensor_parallel_sizes)
    if sequence_length is None:
        sequence_length = min(_LONGEST, _positions(str(spec.model)))
    sizes = {"num_sequences": micro_batch_size, "sequence_length": sequence_length, "ranks": ranks}
    settings = {str(cell): _fields(spec, cell) for cell in cells}
    shape = {"ranks": ranks, "sequence_length": sequence_length, "micro_batch_size": micro_batch_size}
    reports = predict_settings(settings, model=str(spec.model), **shape, **config_fields)
    why = "none: a prediction has no weights"
    rows = [_row(cell, _Found(reports[str(cell)], "predicted", None, why)) for cell in cells]
    memory = {cell[0]: reports[str(cell)] for cell in cells if cell[1:] == cells[0][1:]}
    return _report(rows, memory, {}, {}, sizes)


def measure(
    session: Session,
    twin: Callable[..., AbstractContextManager[Session]],
    dtypes: Iterable[str],
    checkpointing: Iterable[str | bool] | None,
    logprob_modes: Iterable[str] | None,
    tensor_parallel_sizes: Iterable[int] | None,
    *,
    twins: bool,
) -> TradeoffReport:
    """Measure what a live session can show, its twins too if asked, and predict the rest.

    Args:
        twin: makes a session of the same weights with other fields.
        twins: launch one for each other checkpointing and tensor-parallel size; False predicts their memory.

    Raises:
        SpecError: fewer than two settings, or one that is refused.
    """
    cells = _cells(session.spec, dtypes, checkpointing, logprob_modes, tensor_parallel_sizes)
    built = (session.spec.activation_checkpointing, session.spec.tensor_parallel_size)
    groups: dict[tuple[str | bool, int], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell[1], cell[3]), []).append(cell)
    shape: dict[str, int] = {}
    if set(groups) != {built} and not twins:  # a prediction has no padding, so what is measured beside it has none either
        sampled = session.memory()
        shape = {"num_sequences": sampled.num_sequences, "sequence_length": sampled.sequence_length}
    found: dict[Cell, _Found] = {}
    for build, group in sorted(groups.items(), key=lambda item: item[0] != built):  # the session's own first
        reference = (cells[0][0], build[0], cells[0][2], build[1])
        if build == built:
            _measure_cells(session, group, reference, shape, found, "measured")
        elif twins:
            with twin(activation_checkpointing=build[0], tensor_parallel_size=build[1]) as live:
                _measure_cells(live, group, reference, shape, found, "measured in a twin")
        else:
            _predict_cells(session, group, shape, found)
    rows = [_row(cell, found[cell]) for cell in cells]
    plain = [cell for cell in cells if cell[1:] == cells[0][1:]]
    memory = {cell[0]: m for cell in plain if (m := found[cell].memory) is not None}
    one = next((f.memory for f in found.values() if f.memory is not None), None)
    sizes = {} if one is None else {"num_sequences": one.num_sequences, "sequence_length": one.sequence_length}
    return _report(
        rows,
        memory,
        {cell[0]: d for cell in plain[1:] if (d := found[cell].divergence) is not None},
        {cell[0]: found[cell].failure for cell in plain if found[cell].failure},
        {**sizes, "ranks": session.num_ranks},
    )


@dataclasses.dataclass(slots=True)
class _Found:
    memory: MemoryReport | None
    memory_source: str
    divergence: DivergenceReport | None
    divergence_source: str
    failure: str = ""
    is_reference: bool = False
    from_float64_nats: float | None = None


def _measure_cells(
    session: Session, cells: list[Cell], reference: Cell, shape: dict[str, int], found: dict[Cell, _Found], how: str
) -> None:
    """Memory of each cell, and its divergence from the reference, which shares its checkpointing and parallelism."""
    before = _mode(session.spec, session.spec.logprob_mode)
    origin = {"output_dtype": reference[0], **_mode(session.spec, reference[2])}
    source = how if how == "measured" else f"{how}, from its own {reference[0]} outputs"
    for cell in cells:
        mode = _mode(session.spec, cell[2])
        try:
            session.set_live(**mode)
            memory = session.memory(output_dtype=cell[0], **shape)  # type: ignore[arg-type]
            session.set_live(**before)
            if cell == reference:
                found[cell] = _Found(memory, how, None, f"the reference{'' if how == 'measured' else ' of its twin'}")
                found[cell].is_reference = True
                continue
            divergence = session.divergence(origin, {"output_dtype": cell[0], **mode})
        except (FloatingPointError, SpecError) as error:  # float16 overflows on some models: that is its verdict
            found[cell] = _Found(None, how, None, "none: it failed", str(error))
        else:
            exact = divergence.truth.get("b_from_float64_nats")
            found[cell] = _Found(memory, how, divergence, source, from_float64_nats=exact)
            if reference in found:
                found[reference].from_float64_nats = divergence.truth.get("a_from_float64_nats")
        finally:
            session.set_live(**before)


def _predict_cells(session: Session, cells: list[Cell], shape: dict[str, int], found: dict[Cell, _Found]) -> None:
    """Memory from fake tensors; the divergence of the same dtype and mode where parallelism is the session's own."""
    from toolkit.memory_predict import predict_settings

    config = {name: getattr(session.config, name) for name in MEMORY_FIELDS}
    reports = predict_settings(
        {str(cell): _fields(session.spec, cell) for cell in cells},
        model=str(session.spec.model), ranks=session.num_ranks, sequence_length=shape["sequence_length"],
        micro_batch_size=shape["num_sequences"], **config,
    )  # fmt: skip
    for cell in cells:
        same = next((f for c, f in found.items() if c[0] == cell[0] and c[2:] == cell[2:] and c != cell), None)
        if same is None or same.failure:
            why = "none: needs a twin (twins=True)" if same is None else "none: it failed without checkpointing too"
            found[cell] = _Found(reports[str(cell)], "predicted", None, why)
        else:
            why = "measured at the session's checkpointing, which repeats the same forward"
            found[cell] = dataclasses.replace(
                same, memory=reports[str(cell)], memory_source="predicted", divergence_source=why
            )


def _cells(
    spec: PolicySpec,
    dtypes: Iterable[str],
    checkpointing: Iterable[str | bool] | None,
    logprob_modes: Iterable[str] | None,
    tensor_parallel_sizes: Iterable[int] | None,
) -> list[Cell]:
    """All combinations, each checked as a spec."""
    given = {
        "dtypes": (dtypes, spec.output_dtype), "checkpointing": (checkpointing, spec.activation_checkpointing),
        "logprob_modes": (logprob_modes, spec.logprob_mode),
        "tensor_parallel_sizes": (tensor_parallel_sizes, spec.tensor_parallel_size),
    }  # fmt: skip
    axes = []
    for name, (values, own) in given.items():
        listed = [own] if values is None else check_list(name, values)
        if name == "dtypes":
            listed = [dtype_name(value, "dtypes") for value in listed]
        axes.append(list(dict.fromkeys("full" if value is True and name == "checkpointing" else value for value in listed)))
    cells: list[Cell] = list(itertools.product(*axes))  # type: ignore[arg-type]
    if len(cells) < 2:
        raise SpecError(f"dtypes={dtypes!r}: a tradeoff needs two or more different settings; the first is the reference.")
    for cell in cells:
        dataclasses.replace(spec, **_fields(spec, cell))
    return cells


def _fields(spec: PolicySpec, cell: Cell) -> dict[str, Any]:
    """The spec's fields with those of a cell, less the model."""
    own = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name != "model"}
    return {**own, **dict(zip(AXES, cell, strict=True)), **_mode(spec, cell[2])}


def _mode(spec: PolicySpec, mode: str) -> dict[str, Any]:
    """A logprob mode and the chunk size that goes with it: the spec's own only in its own mode."""
    return {"logprob_mode": mode, "logprob_chunk_size": spec.logprob_chunk_size if mode == spec.logprob_mode else None}


def _positions(model: str) -> int:
    try:
        return facts_of(model, read_config(model)).max_positions or _LONGEST
    except FileNotFoundError:  # a known model's name, which only predict_memory resolves; all of them have more
        return _LONGEST


def _row(cell: Cell, found: _Found) -> TradeoffRow:
    memory = found.memory
    metrics: dict[str, float] = {} if found.divergence is None else found.divergence.metrics
    if found.is_reference:  # the same setting twice is bit-identical
        metrics = dict.fromkeys(("mean_abs_nats", "max_abs_nats", "gradient_relative_error"), 0.0)
        metrics["token_mult_prob_error"] = 1.0
    return TradeoffRow(
        *cell,
        peak_bytes=None if memory is None else memory.peak_bytes,
        peak_phase="" if memory is None else memory.peak_phase,
        logit_peak_bytes=None if memory is None else memory.logit_peak_bytes,
        boundary_bytes=None if memory is None else memory.boundary_bytes,
        memory_source=found.memory_source,
        mean_abs_nats=metrics.get("mean_abs_nats"),
        max_abs_nats=metrics.get("max_abs_nats"),
        token_mult_prob_error=metrics.get("token_mult_prob_error"),
        gradient_relative_error=metrics.get("gradient_relative_error"),
        divergence_source=found.divergence_source,
        failure=found.failure,
        from_float64_nats=found.from_float64_nats,
    )


def _report(
    rows: list[TradeoffRow],
    memory: dict[str, MemoryReport],
    divergence: dict[str, DivergenceReport],
    failures: dict[str, str],
    sizes: dict[str, int],
) -> TradeoffReport:
    rows = pareto_front(rows)
    words = verdict(memory, divergence, failures) if memory else ""
    report = TradeoffReport(rows, memory, divergence, failures, words, sizes)
    if len(report.varied) > 1:
        report.verdict = f"{words} {grid_verdict(rows, report.varied)}".strip()
    return report
