"""A live policy on its ranks, as the notebook sees it: step it and look into it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from toolkit.background import count_interrupts
from toolkit.checks import check_flag, check_function, check_path, check_source, check_temperature, check_texts, check_whole
from toolkit.errors import SessionClosed, SpecError
from toolkit.layout import check_config, check_token_ids
from toolkit.live import LivePolicy
from toolkit.progress import Bars
from toolkit.spec import GRPOConfig

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from toolkit.divergence_report import DivergenceReport
    from toolkit.edge_report import EdgeReport
    from toolkit.memory import MemoryReport
    from toolkit.prompts import Task
    from toolkit.raw_logits import RawLoss
    from toolkit.records import EvaluationRecord, StepRecord, StepRecords
    from toolkit.self_check import SelfCheckReport
    from toolkit.tradeoff_report import TradeoffReport


class Session(LivePolicy):
    """A sharded policy, ready to be stepped and looked into. Made by `launch` or `resume`; a context manager."""

    __slots__ = ()

    # ---- what it is

    @property
    def config(self) -> GRPOConfig:
        """The GRPO settings of the coming steps; settable."""
        return self._config

    @config.setter
    def config(self, value: GRPOConfig) -> None:
        check_config(value, self._spec, self._facts, ranks=self.num_ranks)
        if value.reference_policy_kl_penalty > 0 and not self._keeps_reference:
            if self._records:
                raise SpecError(
                    f"reference_policy_kl_penalty={value.reference_policy_kl_penalty}: no reference was kept at the start, "
                    "and the weights have been trained since. Launch with a penalty above 0."
                )
            self.run(self._worker.keep_reference)
            self._keeps_reference = True
        if value.task is not self._config.task:  # resolved once only: it may be an iterator
            self._task = self._worker.resolve_task(value.task)
        self._config = value

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
        frame = pd.DataFrame([{"rank": r, **dataclasses.asdict(unit)} for r, found in enumerate(per_rank) for unit in found])
        return frame[["rank", "name", "output_dtype", *(c for c in frame if c not in ("rank", "name", "output_dtype"))]]

    # ---- what it does

    def run_cell(self, source: str, *, as_text: bool = False) -> list[Any]:
        """Run a cell's code on every rank, where `policy`, `model`, `rank`, `torch` and `dist` are known (`%%ranks`).

        Variables stay on the rank for later cells. The notebook's are not there: `run(fn, *args)` sends what it needs.

        Args:
            source: the cell.
            as_text: bring back the repr of results instead of the results, for what cannot or should not travel.

        Returns:
            The value of the last expression, by rank.

        Raises:
            SpecError, SyntaxError: no text, or no Python; nothing was sent.
        """
        compile(check_source(source), "<%%ranks>", "exec")
        return self.run(self._worker.run_cell, self._key, source, as_text)

    def grpo_step(self, n: int = 1) -> StepRecord | StepRecords:
        """Take `n` GRPO steps; returns the record of the step, or a list of records if `n` is more than 1.

        Ctrl-C stops at the next boundary; steps that are done stay done and are in `history`.
        """
        from toolkit.records import StepRecords

        check_whole("n", n)
        records = StepRecords()
        with Bars() as bars:
            for done in range(n):
                bars.update("GRPO steps", done, n) if n > 1 else None
                try:
                    with count_interrupts() as interrupts:  # a step that is taken is booked before Ctrl-C ends the cell
                        records.append(self._one_step())
                    self._ranks.raise_late_interrupt()
                    if interrupts.count:
                        raise KeyboardInterrupt
                except KeyboardInterrupt:
                    raise KeyboardInterrupt(
                        f"stopped after {len(records)} of {n} steps; they are in session.history"
                    ) from None
        return records[0] if n == 1 else records

    def _one_step(self) -> StepRecord:
        from toolkit.step import grpo_step

        with self._ranks.exclusively():  # another thread's step is another step
            config, task, step = self._config, self._task, len(self._records)
            problems = self._problems(task, config.num_sampled_prompts, step)
            record: StepRecord = self._call(grpo_step, config, problems, task.reward, step)[0]
            self._records.append(record)
            self._save_if_due()
            return record

    def rollout(self, n: int | None = None) -> pd.DataFrame:
        """Sample and grade completions of `n` prompts (None: one step's worth) without training; a row each."""
        import pandas as pd

        if n is not None:
            check_whole("n", n)
        config = self._config if n is None else dataclasses.replace(self._config, num_prompts_per_step=n)
        check_config(config, self._spec, self._facts, ranks=self.num_ranks)
        task, step = self._task, len(self._records)
        problems = self._problems(task, config.num_prompts_per_step, step)
        per_rank = self.run(self._worker.rollout, config, problems, task.reward, step)
        return pd.DataFrame([row for rows in per_rank for row in rows])

    def evaluate(self, n: int | None = None) -> EvaluationRecord:
        """Greedy completions of the task's held-out problems, graded: all, or `n` drawn at random (always the same).

        Raises:
            SpecError: the task holds nothing out.
        """
        from toolkit.records import EvaluationRecord

        task = self._task
        if not task.held_out:
            raise SpecError(f"task {task.name!r} holds no problems out; make a tk.Task(..., held_out=[...]) to evaluate on.")
        problems = task.held_out
        if n is not None and check_whole("n", n) < len(problems):
            problems = self._worker.draw_problems(problems, n, 0, 0)
        per_rank = self.run(self._worker.evaluate, problems, task.reward, self._config.max_new_tokens)
        rows = [row for rows in per_rank for row in rows]
        return EvaluationRecord([row["reward"] for row in rows], rows, self._spec.output_dtype)

    def logprobs(self, token_ids: Sequence[Sequence[int]], *, temperature: float = 1.0) -> np.ndarray[Any, Any]:
        """Logprobs of given tokens, each given those before it, as the training forward computes them.

        Args:
            token_ids: sequences of ids; they may differ in length.
            temperature: the logits are divided by it, in the session's `temperature_order`.

        Returns:
            [B, T-1] float32 in nats: column t is the logprob of token t+1. NaN where a sequence has no token.

        Raises:
            SpecError: no tokens, a sequence of fewer than two, or an id outside the vocabulary.
        """
        import numpy as np

        rows = check_token_ids(token_ids, self._facts)
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
        snapshot: str | os.PathLike[str] | None = None,
    ) -> MemoryReport:
        """Run one training step under the memory ledger and put the weights back.

        Args:
            output_dtype: measure with this one; the session keeps its own. None takes the session's.
            num_sequences, sequence_length: measure made-up tokens of this size on each rank (give both); None samples the
                next step's.
            snapshot: on GPUs, a file for PyTorch's memory visualizer (pytorch.org/memory_viz): every allocation of the step
                and its stack. Several ranks write one each, named by rank.

        Raises:
            SpecError: half a size is given, one that cannot be, or a snapshot without a GPU.
        """
        from toolkit.memory import check_shape, measure

        if snapshot is not None and self._device != "cuda":
            raise SpecError("snapshot is CUDA's allocator's log, and this session runs on CPU ranks: leave it out.")
        shape = check_shape(self._spec, self._facts, num_sequences, sequence_length)
        step, problems = self._next_problems()
        settings: dict[str, Any] = {"step": step, "output_dtype": output_dtype, "shape": shape}
        settings["snapshot"] = None if snapshot is None else check_path("snapshot=", snapshot)
        reports: list[MemoryReport] = self.run(measure, self._config, problems, self._task.reward, **settings)
        return max(reports, key=lambda report: report.peak_bytes)

    def divergence(
        self,
        a: str | Mapping[str, Any] = "float32",
        b: str | Mapping[str, Any] = "bfloat16",
        *,
        token_ids: Sequence[Sequence[int]] | None = None,
        text: str | Sequence[str] | None = None,
        truth: bool | None = None,
        gradients: bool = True,
        loss: RawLoss | None = None,
        **common: Any,
    ) -> DivergenceReport:
        """Compare each token's logprob, and the gradients, under two settings of these weights.

        Args:
            a, b: an output dtype, or a mapping of settings: those of `set_live` (output_dtype, cast_forward_inputs,
                autocast, logprob_mode, logprob_chunk_size, temperature_order), and temperature, batch_size (sequences in one
                forward of a rank; None for all), logprobs ("trainer", or "sampler": token by token through the KV cache),
                attn_implementation ("sdpa", "eager"), precision and lm_head_precision (these two: a second model meanwhile).
            token_ids, text: score these sequences; neither samples completions of the next step's prompts and scores those
                (on tokens a model would not write, a float32 head shows nothing).
            truth: also run the same weights all in float32 and all in float64, and say how far each side is from that. It
                takes 12 bytes a parameter on every rank and a forward in each dtype; None does it up to 20 M parameters.
            gradients: also compare gradients, which takes a backward of each side.
            loss: a loss of yours on raw logits, `loss(logits_BTV, token_ids_BT, mask_BT)`: called on each rank with its
                sequences' logits in the output dtype and a float32 mask, 1 at tokens that count (`logits[:, :-1]` goes with
                `mask[:, 1:]`), it returns a scalar tensor; ranks are averaged. Value and gradients are compared instead of
                GRPO's, as they are and with the logits upcast first: so a loss that rounds is named as the cause.
            **common: settings for both sides, e.g. `temperature=0.7, temperature_order="before_upcast"`.

        Raises:
            SpecError: an unknown setting, one that needs another build or is refused, sequences without two tokens, or a
                loss that gives no scalar, or that some ranks would have more sequences for.
            FloatingPointError: values left the range of a dtype; names the FSDP unit.
        """
        from toolkit.divergence import compare

        if text is not None and token_ids is not None:
            raise SpecError("give text or token_ids, not both.")
        if truth is not None:
            check_flag("truth", truth)
        check_flag("gradients", gradients)
        if loss is not None:
            check_function("loss=", loss)
            if not gradients:
                raise SpecError("loss= is compared with its gradients: leave gradients=False out.")
        ids = self._encoded(text) if text is not None else token_ids
        rows = None if ids is None else check_token_ids(ids, self._facts)
        step, problems = self._next_problems()
        settings: dict[str, Any] = {"token_ids": rows, "truth": truth, "gradients": gradients, "loss": loss}
        settings |= {"problems": problems, "step": step, "reward": self._task.reward}
        return cast("DivergenceReport", self.run(compare, self._config, a, b, common, **settings)[0])

    def _encoded(self, text: str | Sequence[str]) -> list[list[int]]:
        texts = check_texts(text)
        encoded: list[list[int]] = self.run(self._worker.encode, texts)[0]
        for one, ids in zip(texts, encoded, strict=True):
            if len(ids) < 2:
                raise SpecError(f"text {one!r} is a single token, and the first has no logprob; give a longer one.")
        return encoded

    def self_check(
        self, *, token_ids: Sequence[Sequence[int]] | None = None, temperature: float | None = None
    ) -> SelfCheckReport:
        """Compare every logprob mode with float64 on this model, and with what rounding explains.

        Args:
            token_ids: score these sequences; None samples completions of the next step's prompts and scores those.
            temperature: of the logprobs; None takes the config's.
        """
        from toolkit.self_check import self_check

        rows = None if token_ids is None else check_token_ids(token_ids, self._facts)
        temperature = self._config.temperature if temperature is None else check_temperature(temperature)
        step, problems = self._next_problems()
        reports: list[SelfCheckReport] = self.run(self_check, self._config, problems, rows, temperature, step)
        return reports[0]

    def precision_edges(self) -> EdgeReport:
        """Measure each known precision edge on this model, with and without its cure, on completions sampled for it.

        Losses on raw outputs (preference, reward order, value), the temperature before the upcast and its own rounding, a
        float32 head under a 16-bit root (with experts on 2 ranks or more also in AutoModel's expert-parallel form), the
        range of float16. An edge that this model or session cannot show is listed with the reason.
        """
        from toolkit.edges import measure_edges

        step, problems = self._next_problems()
        return cast("EdgeReport", self.run(measure_edges, self._config, problems, step)[0])

    def tradeoffs(
        self,
        dtypes: Iterable[str] = ("float32", "bfloat16", "float16"),
        *,
        checkpointing: Iterable[str | bool] | None = None,
        logprob_modes: Iterable[str] | None = None,
        tensor_parallel_sizes: Iterable[int] | None = None,
        twins: bool = False,
    ) -> TradeoffReport:
        """Memory and divergence of a grid of settings; the first is the reference. Ends in a verdict in words.

        Args:
            dtypes, checkpointing, logprob_modes, tensor_parallel_sizes: values of each axis; None keeps the session's.
            twins: launch a second session of these weights for each other checkpointing and tensor-parallel size, one at a
                time, and measure there; False predicts their memory, and marks it so.

        Raises:
            SpecError: fewer than two settings, or one that is refused.
        """
        from toolkit.launching import twin_of  # a twin is launched: the one thing here that comes later in the flow
        from toolkit.tradeoff_grid import measure

        check_flag("twins", twins)
        twin = functools.partial(twin_of, self)
        return measure(self, twin, dtypes, checkpointing, logprob_modes, tensor_parallel_sizes, twins=twins)

    def _next_problems(self) -> tuple[int, list[tuple[str, str]]]:
        step = len(self._records)
        return step, self._problems(self._task, self._config.num_prompts_per_step, step)

    def _problems(self, task: Task, count: int, step: int) -> list[tuple[str, str]]:
        drawn: list[tuple[str, str]] = self._worker.draw_problems(task.problems, count, self.spec.seed, step)
        return drawn

    def __repr__(self) -> str:
        state = f"{len(self._records)} steps"
        if self._ranks.lost is not None:
            state += ", closed" if isinstance(self._ranks.lost, SessionClosed) else ", ranks lost"
        return (
            f"Session({self.spec.model}: {self.num_ranks} {self._device} rank{'s' if self.num_ranks > 1 else ''}, "
            f"{self.spec.precision} compute, {self.spec.output_dtype} outputs, {state})"
        )
