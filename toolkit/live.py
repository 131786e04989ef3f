"""A policy living on its ranks: call it, switch it live, save it, bring it back after its ranks were lost, close it."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from toolkit.checks import check_folder, check_function
from toolkit.errors import RanksLost, SessionClosed, SpecError
from toolkit.layout import ModelFacts, check_output_dtype, check_temperature_order
from toolkit.ranks import Ranks
from toolkit.spec import GRPOConfig, PolicySpec, dtype_name

if TYPE_CHECKING:
    from toolkit.prompts import Task
    from toolkit.recipes import Recipe
    from toolkit.records import StepRecord


class LivePolicy:
    """What a session does that is no step and no measurement.

    Its attributes are fixed: a misspelt one raises instead of doing nothing.
    """

    __slots__ = (
        "__weakref__", "_autosave", "_closers", "_config", "_device", "_facts", "_keeps_reference", "_key", "_listeners",
        "_pending", "_ranks", "_records", "_saved", "_spec", "_start", "_task", "_worker",
    )  # fmt: skip

    def __init__(
        self,
        key: str,
        start: Callable[[PolicySpec, bool], Ranks],
        device: str,
        spec: PolicySpec,
        config: GRPOConfig,
        facts: ModelFacts,
        task: Task,
        autosave: tuple[Path, int] | None = None,
    ) -> None:
        """Start ranks with the policy built on them under `key`.

        Args:
            start: makes the ranks and builds the policy, keeping a reference for a KL penalty or not; called again by
                `restart`.
            autosave: folder to save to after every so many steps.
        """
        from toolkit import worker

        self._worker = worker
        self._key, self._start, self._device = key, start, device
        self._spec, self._config, self._facts, self._task = spec, config, facts, task
        self._keeps_reference = config.reference_policy_kl_penalty > 0
        self._ranks = start(spec, self._keeps_reference)
        self._records: list[StepRecord] = []
        self._pending: dict[str, Any] = {}  # live settings picked while a call was running
        self._listeners: list[Callable[[PolicySpec], None]] = []  # called after a live change
        self._closers: list[Callable[[], None]] = []
        self._saved: Path | None = None
        self._autosave = autosave

    @property
    def spec(self) -> PolicySpec:
        """The policy's settings as they are now; change live ones with `output_dtype` or `set_live`."""
        return self._spec

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

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run `fn(policy, *args, **kwargs)` on every rank, also a function defined in the notebook; results by rank.

        Raises:
            SpecError: `fn` is no function.
        """
        check_function("run", fn)
        results = self._call(fn, *args, **kwargs)
        self._ranks.raise_late_interrupt()
        return results

    def _call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        self._apply_pending()
        return self._ranks.call(self._worker.on_policy, self._key, fn, args, kwargs)

    # ---- live settings

    def set_live(self, **settings: Any) -> None:
        """Change live settings (`policy.LIVE_FIELDS`) of every rank; acts from the next forward on, with no rebuild.

        Called from another thread while a call runs (a widget's callback), it acts from the next call on.

        Raises:
            SpecError: the combination is refused; nothing has changed.
        """
        unknown = [name for name in settings if name not in self._worker.LIVE_FIELDS]
        if unknown:
            raise SpecError(f"{unknown[0]!r} cannot change on a live session; {', '.join(self._worker.LIVE_FIELDS)} can.")
        self._ranks.raise_if_lost()
        if all(getattr(self.spec, name) == value for name, value in settings.items()) and not self._pending:
            return
        spec = dataclasses.replace(self.spec, **settings)
        check_output_dtype(spec, head_in_root=self._facts.tied_head)
        check_temperature_order(spec, self._config.temperature)
        if self._ranks.busy:  # a widget's callback, on another thread, in mid-call: from the next call on
            self._pending.update(settings)
            return
        self._ranks.call(self._worker.on_policy, self._key, self._worker.set_live, (settings,), {})
        self._spec = spec
        for listener in list(self._listeners):
            listener(spec)
        self._ranks.raise_late_interrupt()

    def _apply_pending(self) -> None:
        while self._pending:
            settings, self._pending = self._pending, {}
            self.set_live(**settings)

    def on_change(self, listener: Callable[[PolicySpec], None]) -> None:
        """Call `listener(spec)` after every live change.

        Raises:
            SpecError: it is no function.
        """
        check_function("on_change", listener)
        self._listeners.append(listener)

    def on_close(self, closer: Callable[[], None]) -> None:
        """Call `closer()` when the session is closed.

        Raises:
            SpecError: it is no function.
        """
        check_function("on_close", closer)
        self._closers.append(closer)

    # ---- saving and coming back

    def save(self, folder: str | Path) -> Path:
        """Save weights, optimizer, settings and history, so that `tk.resume(folder)` goes on as if nothing had happened.

        The weights and moments are torch's distributed checkpoint, so they can be resumed on another number of ranks. An
        earlier save in the folder is replaced once the new one is complete; an interrupted save leaves it as it was. On a
        cluster the folder must be one that all nodes see.

        Raises:
            SpecError: the folder exists and holds something else, or cannot be made or written to.
        """
        saved = self._save(check_folder("save", folder))
        self._ranks.raise_late_interrupt()
        return saved

    def _save(self, folder: Path) -> Path:
        if folder.exists() and any(folder.iterdir()) and not (folder / SESSION_FILE).is_file():
            raise SpecError(f"save({str(folder)!r}): the folder holds something that is no saved session; take another one.")
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self._call(self._worker.save, str(partial))
        (partial / SESSION_FILE).write_text(json.dumps(self._described(), indent=1))
        _replace(partial, folder)
        self._saved = folder
        return folder

    def to_recipe(self) -> Recipe:
        """The settings as they are now as a NeMo-RL recipe; its `to_yaml(path)` writes what `load_recipe` reads."""
        return self._spec.to_recipe(self._config, self.num_ranks)

    def export(self, folder: str | Path, dtype: str = "float32") -> Path:
        """Write the model as it is now in Hugging Face's format (safetensors, config, tokenizer), for `from_pretrained`.

        Args:
            dtype: of the written weights; the masters are float32.

        Raises:
            SpecError: the folder exists and is not empty, or cannot be made or written to; or an unknown dtype.
        """
        folder = check_folder("export", folder)
        dtype = dtype_name(dtype)
        if folder.exists() and any(folder.iterdir()):
            raise SpecError(f"export({str(folder)!r}): the folder is not empty; take another one.")
        self.run(self._worker.export, str(folder), dtype)
        return folder

    def _described(self) -> dict[str, Any]:
        spec, config = (
            dataclasses.asdict(self._spec),
            dataclasses.asdict(dataclasses.replace(self._config, task="arithmetic")),
        )
        config["task"] = self._config.task if isinstance(self._config.task, str) else None
        model = Path(str(self._spec.model)).expanduser()
        spec["model"] = str(model.absolute()) if model.is_dir() else str(self._spec.model)
        records = [json.loads(record.to_json()) for record in self._records]
        return {"format": 1, "ranks": self.num_ranks, "spec": spec, "config": config, "records": records}

    def _load(self, folder: Path, records: list[StepRecord]) -> None:
        self._call(self._worker.load, str(folder))
        self._saved, self._records = folder, records

    def _save_if_due(self) -> None:
        if self._autosave is not None and len(self._records) % self._autosave[1] == 0:
            self._save(self._autosave[0])

    def restart(self) -> str:
        """Bring the ranks back, with the weights, moments and history of the last save (the model's own, if there is none).

        Settings stay as they are now. Use it after `RanksLost`; on ranks that are alive it ends them first.

        Returns:
            What was lost, in words.

        Raises:
            SessionClosed: the session was closed; launch or resume another one.
        """
        if isinstance(self._ranks.lost, SessionClosed):
            raise self._ranks.lost
        self._ranks.close()
        self._worker.drop(self._key)
        self._pending.clear()
        try:
            self._ranks = self._start(self._spec, self._keeps_reference)
        except BaseException:
            self._ranks.lost = RanksLost("the ranks were stopped and did not start again; call session.restart() again.")
            raise
        taken, self._records = self._records, []
        if self._saved is None:
            lost = f"{len(taken)} step(s) were lost: nothing had been saved" if taken else "nothing was lost"
            return f"restarted from the model's own weights; {lost}."
        kept = saved_session(self._saved)["records"]
        self._load(self._saved, taken[: len(kept)])
        lost = f"{len(taken) - len(kept)} step(s) taken since were lost" if len(taken) > len(kept) else "no step was lost"
        return f"restarted from {self._saved}, saved after step {len(kept)}; {lost}."

    # ---- ending

    def close(self) -> None:
        """End the ranks and free the model. Calling it again does nothing."""
        while self._closers:
            self._closers.pop()()
        self._listeners.clear()
        self._ranks.close()
        self._worker.drop(self._key)

    def __enter__(self) -> Self:
        self._ranks.raise_if_lost()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


SESSION_FILE = "session.json"


def saved_session(folder: Path) -> dict[str, Any]:
    """What `save` wrote about the session itself.

    Raises:
        FileNotFoundError: no session was saved there.
        SpecError: the file is not what `save` writes.
    """
    previous = _previous(folder)
    if not folder.exists() and previous.exists():  # a save was cut off between its two renames
        os.replace(previous, folder)
    if not (folder / SESSION_FILE).is_file():
        raise FileNotFoundError(f"{str(folder)!r}: no session was saved there (no {SESSION_FILE}).")
    try:
        found = json.loads((folder / SESSION_FILE).read_text())
        complete = found["format"] == 1 and {"ranks", "spec", "config", "records"} <= found.keys()
    except (json.JSONDecodeError, KeyError, TypeError):
        complete = False
    if not complete:
        raise SpecError(f"{str(folder / SESSION_FILE)!r} is cut off, or of another version of this toolkit.")
    return dict(found)


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _replace(partial: Path, folder: Path) -> None:
    previous = _previous(folder)
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        os.replace(folder, previous)
    os.replace(partial, folder)
    shutil.rmtree(previous, ignore_errors=True)
