"""Launch or resume a session: check everything that can be checked, start the ranks, tie widgets to the live settings."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import uuid
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.attach import attached, device_on
from toolkit.background import uninterrupted_imports
from toolkit.checks import check_folder, check_path, check_whole, is_widget
from toolkit.cluster import ClusterRanks
from toolkit.engines import KernelRanks, LocalRanks, local_ranks_warm_up
from toolkit.errors import SpecError
from toolkit.layout import ModelFacts, check_config, check_layout, gpu_notes, model_facts
from toolkit.live import saved_session
from toolkit.progress import Bars
from toolkit.ranks import Ranks
from toolkit.recipes import Recipe, launch_parts
from toolkit.session import Session
from toolkit.spec import GRPOConfig, PolicySpec, split_fields


def launch(
    spec: PolicySpec | Recipe | None = None,
    *,
    ranks: int | None = None,
    cluster: str | None = None,
    device: str | None = None,
    config: GRPOConfig | None = None,
    checkpoint_dir: str | Path | None = None,
    save_period: int | None = None,
    **fields: Any,
) -> Session:
    """Shard a model over ranks and return the live session.

    Args:
        spec: the policy's settings, or a recipe (`load_recipe`); or give its fields by name.
        ranks: 1 is the kernel itself; more are processes on this machine, one per GPU, or on CPU over gloo. None takes the
            recipe's, else 1.
        cluster: put the ranks on a running Ray cluster instead: "host:port" of its head, or "auto" for RAY_ADDRESS. The
            model, and what you import, must be on every node under the same path or name.
        device: "cpu" or "cuda"; None takes GPUs if there are any.
        config: the GRPO settings; or give its fields by name.
        checkpoint_dir: save there after every `save_period` steps (default 1), so that `session.restart()` and
            `tk.resume(checkpoint_dir)` go on from the last of them.
        **fields: fields of `PolicySpec` and `GRPOConfig`, over those of `spec` and `config`. A field may be a widget: its
            value is read now, and a later change reaches the live session.

    Raises:
        SpecError: a setting or combination that would do nothing or crash later. Nothing was started.
        FileNotFoundError: no such model.
    """
    if isinstance(spec, Recipe):
        spec, config, ranks = launch_parts(spec, config, ranks, fields)
    if spec is not None and not isinstance(spec, PolicySpec):
        raise SpecError(f"launch({spec!r}): give a PolicySpec, or the model by name: tk.launch(model={str(spec)!r}).")
    if config is not None and not isinstance(config, GRPOConfig):
        raise SpecError(f"config={config!r} must be a GRPOConfig, or give its fields by name.")
    widgets = {name: value for name, value in fields.items() if is_widget(value)}
    fields = {name: value.value if name in widgets else value for name, value in fields.items()}
    policy_fields, grpo_fields = split_fields(fields)
    if spec is None and "model" not in policy_fields:
        raise SpecError("launch needs a model: tk.launch(model=tk.tiny_policy()), or a PolicySpec.")
    spec = PolicySpec(**policy_fields) if spec is None else dataclasses.replace(spec, **policy_fields)
    config = GRPOConfig(**grpo_fields) if config is None else dataclasses.replace(config, **grpo_fields)
    ranks = check_whole("ranks", 1 if ranks is None else ranks)
    if device not in (None, "cpu", "cuda"):
        raise SpecError(f"device={device!r} is not allowed; choose 'cpu', 'cuda', or None to take GPUs if there are any.")
    facts = model_facts(spec.model)
    if ranks > 1 and cluster is None:
        local_ranks_warm_up()  # imports there go on while this process imports torch
    with contextlib.nullcontext() if cluster is None else attached(cluster):
        device, num_gpus = _devices(device) if cluster is None else (device_on(cluster, ranks, device), ranks)
        check_layout(spec, facts, ranks=ranks, device=device, num_gpus=num_gpus)
        check_config(config, spec, facts, ranks=ranks)
        session = _start(spec, config, facts, ranks, cluster, device, _autosave(checkpoint_dir, save_period))
    for name, widget in widgets.items():
        _bind(session, name, widget)
    return session


def resume(
    folder: str | Path,
    *,
    ranks: int | None = None,
    device: str | None = None,
    task: Any = None,
    checkpoint_dir: str | Path | None = None,
    save_period: int | None = None,
    **fields: Any,
) -> Session:
    """Go on with a session saved by `Session.save`: its weights, moments, settings and history, on any number of ranks.

    Load only what you saved yourself: torch's checkpoint format holds pickles.

    Args:
        folder: what `save` or `checkpoint_dir` wrote to.
        ranks: None takes as many as were saved.
        device: "cpu" or "cuda"; None takes GPUs if there are any.
        task: the task, unless it was one of the toolkit's by name.
        checkpoint_dir, save_period: as in `launch`; here it may be the folder itself.
        **fields: other settings to go on with, as in `launch`.

    Raises:
        FileNotFoundError: no session was saved there, or its model is gone.
        SpecError: the save is cut off, its task has to be given, or a setting is refused.
    """
    folder = check_path("resume", folder)
    saved = saved_session(folder)
    autosave = _autosave(checkpoint_dir, save_period, resumed=folder)
    config = dict(saved["config"])
    if task is not None:
        config["task"] = task
    if config["task"] is None:
        raise SpecError(
            f"resume({str(folder)!r}): the session ran a task of your own; give it again: tk.resume(..., task=...)."
        )
    session = launch(
        PolicySpec(**saved["spec"]),
        ranks=saved["ranks"] if ranks is None else ranks,
        device=device,
        config=GRPOConfig(**config),
        **fields,
    )
    try:
        from toolkit.records import StepRecord

        session._autosave = autosave
        session._load(folder, [StepRecord.from_json(record) for record in saved["records"]])
    except BaseException:
        session.close()
        raise
    return session


@contextlib.contextmanager
def twin_of(session: Session, **fields: Any) -> Iterator[Session]:
    """A second session of the same weights, moments and settings, but for these fields; closed afterwards."""
    task = session.config.task
    with tempfile.TemporaryDirectory() as folder:
        kept = session._saved  # what `restart` goes back to is the user's own save, not this one
        saved = session.save(Path(folder) / "twin")
        session._saved = kept
        given = {} if isinstance(task, str) else {"task": task}
        with resume(saved, ranks=session.num_ranks, device=session._device, **given, **fields) as twin:
            yield twin


def _autosave(folder: str | Path | None, period: int | None, resumed: Path | None = None) -> tuple[Path, int] | None:
    if folder is None:
        if period is not None:
            raise SpecError(f"save_period={period} does nothing without a checkpoint_dir to save to.")
        return None
    folder = check_folder("checkpoint_dir=", folder)
    if folder != resumed and folder.exists() and any(folder.iterdir()):
        raise SpecError(
            f"checkpoint_dir={str(folder)!r} is not empty, and saving would replace what is in it. To go on with a session "
            "saved there: tk.resume(folder, checkpoint_dir=folder); else take another folder, or remove this one."
        )
    return folder, check_whole("save_period", 1 if period is None else period)


def _start(
    spec: PolicySpec,
    config: GRPOConfig,
    facts: ModelFacts,
    num_ranks: int,
    cluster: str | None,
    device: str,
    autosave: tuple[Path, int] | None,
) -> Session:
    """Start the ranks and build the policy on them; on any failure nothing stays."""
    key = uuid.uuid4().hex
    with Bars() as bars, uninterrupted_imports():
        if "toolkit.worker" not in sys.modules:
            bars.update("importing transformers and AutoModel", 0, 1, at_once=True)
        from toolkit import imports, worker  # noqa: F401 (imports comes first to keep the others quiet)

    def start(spec: PolicySpec, keeps_reference: bool) -> Ranks:
        with Bars() as bars:
            if num_ranks > 1 or cluster is not None:
                bars.update(f"starting {num_ranks} ranks", 0, 1, at_once=True)
            ranks = _ranks(num_ranks, cluster, device)
        try:
            if device == "cuda":
                for note in gpu_notes(ranks.call(worker.gpu)):
                    warnings.warn(note, stacklevel=2)
            ranks.call(worker.start, key, spec, device, keeps_reference)
            ranks.raise_late_interrupt()
        except BaseException:
            ranks.close()
            raise
        return ranks

    session = Session(key, start, device, spec, config, facts, worker.resolve_task(config.task), autosave)
    if (
        num_ranks == 1 and cluster is None
    ):  # a dropped session frees its model like a closed one; processes end with their Ranks
        weakref.finalize(session, worker.drop, key)
    return session


def _ranks(num_ranks: int, cluster: str | None, device: str) -> Ranks:
    """Start the ranks of the engine asked for and connect them."""
    ranks: Ranks
    if cluster is not None:
        ranks = ClusterRanks(num_ranks, cluster, device)
    else:
        ranks = KernelRanks() if num_ranks == 1 else LocalRanks(num_ranks)
    try:
        ranks.connect(device)
    except BaseException:
        ranks.close()
        raise
    return ranks


def _devices(device: str | None) -> tuple[str, int]:
    with Bars() as bars, uninterrupted_imports():
        if "torch" not in sys.modules:
            bars.update("importing torch", 0, 1, at_once=True)
        import torch

        num_gpus = torch.cuda.device_count()
        return device or ("cuda" if num_gpus else "cpu"), num_gpus


def _bind(session: Session, name: str, widget: Any) -> None:
    """Let a widget's later values reach the session, and the session's reach the widget; both hold the same thing.

    A value that the session refuses raises in the callback (Jupyter logs it) and the widget goes back to what is.
    """
    from toolkit.policy import LIVE_FIELDS

    reference = weakref.ref(session)

    def changed(change: dict[str, Any]) -> None:
        live = reference()
        if live is None:
            return
        try:
            if name in LIVE_FIELDS:
                live.set_live(**{name: change["new"]})
            elif name in {f.name for f in dataclasses.fields(GRPOConfig)}:
                live.config = dataclasses.replace(live.config, **{name: change["new"]})
            elif change["new"] != getattr(live.spec, name):
                raise SpecError(f"{name!r} is built into the session; launch another one to change it.")
        except (ValueError, RuntimeError):
            widget.value = change["old"]
            raise

    def show(spec: PolicySpec) -> None:
        if name in LIVE_FIELDS and widget.value != getattr(spec, name):
            widget.value = getattr(spec, name)

    widget.observe(changed, names="value")
    session.on_change(show)
    session.on_close(lambda: widget.unobserve(changed, names="value"))
