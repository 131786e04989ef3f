"""A live policy on its ranks, as the notebook sees it: step it, look into it, switch it, close it."""

from __future__ import annotations

import dataclasses
import sys
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from toolkit.engines import KernelRanks, LocalRanks
from toolkit.errors import SpecError
from toolkit.layout import (
    ModelFacts,
    check_batch,
    check_output_dtype,
    check_temperature_order,
    check_token_ids,
)
from toolkit.progress import Bars
from toolkit.ranks import Ranks, count_interrupts
from toolkit.spec import GRPOConfig, PolicySpec, check_whole

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from toolkit.divergence import DivergenceReport
    from toolkit.memory import MemoryReport
    from toolkit.prompts import Task
    from toolkit.records import EvaluationRecord, StepRecord, StepRecords
    from toolkit.tradeoffs import TradeoffReport


class Session:
    """A sharded policy, ready to be stepped and looked into. Made by `launch`; a context manager.

    Attributes:
        spec: the policy's settings as they are now.
        history: a row per step taken, as a DataFrame.
    """

    def __init__(self, spec: PolicySpec, config: GRPOConfig, facts: ModelFacts, *, ranks: int, device: str) -> None:
        self.spec = spec
        self._config = config
        self._facts = facts
        self._device = device
        self._key = uuid.uuid4().hex
        self._records: list[StepRecord] = []
        self._pending: dict[str, Any] = {}  # live settings picked while a call was running
        self._listeners: list[Callable[[PolicySpec], None]] = []  # called after a live change
        self._closers: list[Callable[[], None]] = []
        self._check_config(config, ranks)
        self._ranks: Ranks = KernelRanks() if ranks == 1 else LocalRanks(ranks)
        try:
            with Bars() as bars:
                if "toolkit.worker" not in sys.modules:
                    bars.update("importing transformers and AutoModel", 0, 1, at_once=True)
                from toolkit import imports, worker  # noqa: F401 (imports comes first to keep the others quiet)
            self._worker = worker
            self._task = worker.resolve_task(config.task)
            with Bars() as bars:
                if ranks > 1:
                    bars.update(f"starting {ranks} ranks", 0, 1, at_once=True)
                self._ranks.connect(device)
            self._ranks.call(worker.start, self._key, spec, device)
        except BaseException:
            self._ranks.close()
            raise
        if ranks == 1:  # a dropped session frees its model like a closed one; processes end with their Ranks
            weakref.finalize(self, worker.drop, self._key)

    # ---- what it is

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self._ranks.n

    @property
    def is_open(self) -> bool:
        """Whether the session can still be used."""
        return self._ranks.lost is None

    @property
    def output_dtype(self) -> str:
        """The FSDP output dtype; set it to switch every unit of every rank, from the next forward on, with no rebuild."""
        return self.spec.output_dtype

    @output_dtype.setter
    def output_dtype(self, value: str) -> None:
        self.set_live(output_dtype=value)

    @property
    def config(self) -> GRPOConfig:
        """The GRPO settings of the coming steps; settable."""
        return self._config

    @config.setter
    def config(self, value: GRPOConfig) -> None:
        self._check_config(value, self.num_ranks)
        if value.task is not self._config.task:  # resolved once only: it may be an iterator
            self._task = self._worker.resolve_task(value.task)
        self._config = value

    def _check_config(self, config: GRPOConfig, ranks: int) -> None:
        check_batch(config, data_parallel_size=ranks // self.spec.tensor_parallel_size)
        check_temperature_order(self.spec, config.temperature)

    @property
    def task(self) -> Task:
        """The task of the config."""
        return self._task

    @property
    def history(self) -> pd.DataFrame:
        """A row per step taken: its metrics, output dtype and seconds."""
        import pandas as pd

        return pd.DataFrame([record.summary for record in self._records])

    def units(self) -> pd.DataFrame:
        """A row per rank and FSDP unit: the dtypes it is really set to, read back from FSDP2."""
        import pandas as pd

        per_rank = self.run(self._worker.units)
        return pd.DataFrame([{"rank": r, **dataclasses.asdict(unit)} for r, found in enumerate(per_rank) for unit in found])

    # ---- what it does

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `fn(policy, *args, **kwargs)` on every rank, also a function defined in the notebook; results by rank."""
        results = self._call(fn, *args, **kwargs)
        self._ranks.raise_late_interrupt()
        return results

    def _call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        self._apply_pending()
        return self._ranks.call(self._worker.on_policy, self._key, fn, args, kwargs)

    def grpo_step(self, n: int = 1) -> StepRecord | StepRecords:
        """Take `n` GRPO steps; returns the record of the step, or a list of records if `n` is more than 1.

        Ctrl-C stops at the next boundary; steps that are done stay done and are in `history`.
        """
        from toolkit.records import StepRecords
        from toolkit.step import grpo_step

        check_whole("n", n)
        task = self.task
        records = StepRecords()
        with Bars() as bars:
            for done in range(n):
                bars.update("GRPO steps", done, n) if n > 1 else None
                step = len(self._records)
                problems = self._problems(task, self._config.num_prompts_per_step, step)
                with count_interrupts() as interrupts:  # a step that is taken is booked before Ctrl-C ends the cell
                    record = self._call(grpo_step, self._config, problems, task.reward, step)[0]
                    self._records.append(record)
                    records.append(record)
                self._ranks.raise_late_interrupt()
                if interrupts.count:
                    raise KeyboardInterrupt
        return records[0] if n == 1 else records

    def rollout(self, n: int | None = None) -> pd.DataFrame:
        """Sample and grade completions of `n` prompts (None: one step's worth) without training; a row each."""
        import pandas as pd

        config = self._config if n is None else dataclasses.replace(self._config, num_prompts_per_step=n)
        self._check_config(config, self.num_ranks)
        task, step = self.task, len(self._records)
        problems = self._problems(task, config.num_prompts_per_step, step)
        per_rank = self.run(self._worker.rollout, config, problems, task.reward, step)
        return pd.DataFrame([row for rows in per_rank for row in rows])

    def evaluate(self, n: int | None = None) -> EvaluationRecord:
        """Greedy accuracy on the task's held-out problems (the first `n`, None for all).

        Raises:
            SpecError: the task holds nothing out.
        """
        from toolkit.step import evaluate

        task = self.task
        if not task.held_out:
            raise SpecError(f"task {task.name!r} holds no problems out; make a tk.Task(..., held_out=[...]) to evaluate on.")
        if n is not None:
            check_whole("n", n)
        problems = task.held_out[:n]
        return cast("EvaluationRecord", self.run(evaluate, problems, task.reward, self._config.max_new_tokens)[0])

    def logprobs(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> np.ndarray[Any, Any]:
        """Logprobs of given tokens, each given those before it, as the training forward computes them.

        Args:
            token_ids: sequences of ids; they may differ in length.

        Returns:
            [B, T-1] float32 in nats: column t is the logprob of token t+1. NaN where a sequence has no token.

        Raises:
            SpecError: no tokens, a sequence of fewer than two, or an id outside the vocabulary.
        """
        import numpy as np

        rows = check_token_ids(token_ids, self._facts.vocab_size)
        copies = self.spec.tensor_parallel_size
        padded = rows + rows[:1] * (-len(rows) % (self.num_ranks // copies))
        per_rank = self.run(self._worker.logprobs, padded, temperature)
        result: np.ndarray[Any, Any] = np.concatenate(per_rank[::copies])[: len(rows)]
        return result

    def memory(
        self,
        *,
        output_dtype: str | None = None,
        num_sequences: int | None = None,
        sequence_length: int | None = None,
    ) -> MemoryReport:
        """Run one training step under the memory ledger and put the weights back.

        Args:
            output_dtype: measure with this one; the session keeps its own. None takes the session's.
            num_sequences, sequence_length: measure made-up tokens of this size on each rank (give both); None samples the
                next step's.
        """
        from toolkit.memory import measure

        if (num_sequences is None) != (sequence_length is None):
            raise SpecError("give num_sequences and sequence_length together, or neither to measure the next step's tokens.")
        shape = None
        if num_sequences is not None and sequence_length is not None:
            check_whole("num_sequences", num_sequences)
            check_whole("sequence_length", sequence_length, minimum=2)
            shape = (num_sequences, sequence_length)
        task, step = self.task, len(self._records)
        problems = self._problems(task, self._config.num_prompts_per_step, step)
        settings: dict[str, Any] = {"step": step, "output_dtype": output_dtype, "shape": shape}
        reports: list[MemoryReport] = self.run(measure, self._config, problems, task.reward, **settings)
        return max(reports, key=lambda report: report.peak_bytes)

    def divergence(
        self,
        a: str | Mapping[str, Any] = "float32",
        b: str | Mapping[str, Any] = "bfloat16",
        *,
        token_ids: Sequence[Sequence[int]] | None = None,
        **common: Any,
    ) -> DivergenceReport:
        """Compare each token's logprob under two settings of these weights.

        Args:
            a, b: an output dtype, or a mapping of live settings: output_dtype, cast_forward_inputs, autocast, temperature,
                temperature_order, logprob_mode, logprob_chunk_size.
            token_ids: score these sequences; None samples completions of the next step's prompts and scores those.
            **common: settings for both sides, e.g. `temperature=0.7, temperature_order="before_upcast"`.

        Raises:
            SpecError: an unknown setting, or one that needs another build.
        """
        from toolkit.divergence import compare

        rows = None if token_ids is None else check_token_ids(token_ids, self._facts.vocab_size)
        task, step = self.task, len(self._records)
        problems = self._problems(task, self._config.num_prompts_per_step, step)
        settings = {"problems": problems, "token_ids": rows, "reward": task.reward, "step": step}
        return cast("DivergenceReport", self.run(compare, self._config, a, b, common, **settings)[0])

    def tradeoffs(self, dtypes: Iterable[str] = ("float32", "bfloat16", "float16")) -> TradeoffReport:
        """Measure memory under each output dtype and its divergence from the first; ends in a verdict in words."""
        from toolkit.tradeoffs import tradeoffs

        return tradeoffs(self, tuple(dtypes))

    # ---- live settings

    def set_live(self, **settings: Any) -> None:
        """Change live settings (`policy.LIVE_FIELDS`) of every rank; acts from the next forward on, with no rebuild.

        Called from another thread while a call runs (a widget's callback), it acts from the next call on.

        Raises:
            SpecError: the combination is refused; nothing has changed.
        """
        if all(getattr(self.spec, name) == value for name, value in settings.items()) and not self._pending:
            return
        spec = dataclasses.replace(self.spec, **settings)
        check_output_dtype(spec, head_in_root=self._facts.tied_head)
        check_temperature_order(spec, self._config.temperature)
        if self._ranks.busy:  # a widget's callback, on another thread, in mid-call: from the next call on
            self._pending.update(settings)
            return
        self._ranks.call(self._worker.on_policy, self._key, self._worker.set_live, (settings,), {})
        self.spec = spec
        for listener in list(self._listeners):
            listener(spec)

    def _apply_pending(self) -> None:
        while self._pending:
            settings, self._pending = self._pending, {}
            self.set_live(**settings)

    # ---- helpers

    def _problems(self, task: Task, count: int, step: int) -> list[tuple[str, str]]:
        from toolkit.prompts import draw_problems

        return draw_problems(task, count, self.spec.seed, step)

    def on_change(self, listener: Callable[[PolicySpec], None]) -> None:
        """Call `listener(spec)` after every live change."""
        self._listeners.append(listener)

    def on_close(self, closer: Callable[[], None]) -> None:
        """Call `closer()` when the session is closed."""
        self._closers.append(closer)

    # ---- ending

    def close(self) -> None:
        """End the ranks and free the model. Calling it again does nothing."""
        while self._closers:
            self._closers.pop()()
        self._listeners.clear()
        self._ranks.close()
        self._worker.drop(self._key)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Session({self.spec.model}: {self.num_ranks} {self._device} rank{'s' if self.num_ranks > 1 else ''}, "
            f"{self.spec.precision} compute, {self.spec.output_dtype} outputs, {len(self._records)} steps)"
        )
