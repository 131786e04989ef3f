"""What launching, resuming and predicting take and do, as magics and on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from toolkit.arguments import Option, field_options, given_fields, model_of, predictable_models
from toolkit.background import uninterrupted_imports
from toolkit.checks import is_widget
from toolkit.errors import SpecError
from toolkit.grpo_config import MEMORY_FIELDS
from toolkit.spec import DTYPES, GRPOConfig, PolicySpec

if TYPE_CHECKING:
    from toolkit.memory_report import MemoryReport
    from toolkit.session import Session
    from toolkit.tradeoff_report import TradeoffReport

_RANKS = Option(("--ranks",), "1 is this kernel; more are processes on this machine, or on the cluster (default 1)", int)
_DEVICE = Option(("--device",), "cpu or cuda (default: GPUs if there are any)", values=("cpu", "cuda"))
_SAVING = (
    Option(("--checkpoint-dir",), "save there as steps are taken", metavar="FOLDER"),
    Option(("--save-period",), "steps from one such save to the next (default 1)", int),
)
LAUNCHED = Option(("-o", "--out"), "variable for the session (default session)", metavar="NAME")
LAUNCH = (
    *field_options(PolicySpec),
    _RANKS,
    Option(("--cluster",), "a running Ray cluster: host:port of its head, or auto", values=("auto",)),
    _DEVICE,
    *_SAVING,
    Option(("--recipe",), "a NeMo-RL recipe to take the settings from; those given here win", metavar="FILE"),
    Option(("--override",), "Hydra overrides of the recipe: key=value", nargs="+", metavar="KEY=VALUE"),
    *field_options(GRPOConfig),
)
RESUME = (
    Option(("folder",), "what %save_session or checkpoint_dir wrote to"),
    Option(("--ranks",), "default: as many as were saved", int),
    _DEVICE,
    *_SAVING,
    *field_options(PolicySpec, GRPOConfig, without=("model",)),
)
_SHAPE = (
    Option(("--ranks",), "how many the model is sharded over", int),
    Option(("--sequence-length",), "tokens of each sequence", int),
    Option(("--micro-batch-size",), "sequences in one forward and backward on each rank (default 1)", int),
)
PREDICT = (
    Option(("model",), "a known model's name, a folder with a config.json, or a hub id", values=predictable_models),
    *_SHAPE,
    Option(("--num-micro-batches",), "how many of them make a step (default 1)", int),
    Option(("--device",), "whose kernels' scratch is counted", values=("cpu", "cuda")),
    *field_options(PolicySpec, without=("model", "share_prompt_prefix")),  # made-up sequences share no prompt
    *field_options(GRPOConfig, only=MEMORY_FIELDS),
)
_AXES = (
    Option(("--checkpointing",), "of activation_checkpointing", str | bool, ("False", "full", "selective", "hf"), "+"),
    Option(("--logprob-modes",), "of logprob_mode", str, ("materialized", "chunked", "linear"), "+"),
    Option(("--tensor-parallel-sizes",), "of tensor_parallel_size", int, ("1", "2"), "+"),
)
TRADEOFFS = (
    Option(("dtypes",), f"output dtypes, the first is the reference (default {' '.join(DTYPES)})", str, tuple(DTYPES), "*"),
    *_AXES,
    Option(("--twins",), "measure other builds in sessions of their own instead of predicting them", bool, nargs="?"),
    Option(("--model",), "predict this model instead of measuring the session", str, predictable_models),
    *_SHAPE,
)


def launched(given: Mapping[str, Any]) -> Session:
    """`tk.launch` of the arguments `LAUNCH`.

    Raises:
        SpecError: a setting that is refused, or overrides without a recipe.
    """
    with uninterrupted_imports():
        from toolkit.launching import launch
        from toolkit.recipes import load_recipe

    recipe = None
    if "recipe" in given:
        recipe = load_recipe(given["recipe"], given.get("override", ()))
    elif "override" in given:
        raise SpecError(f"override={' '.join(given['override'])} changes keys of a recipe; give one with --recipe FILE.")
    return launch(recipe, **_beside(given, LAUNCH, "recipe", "override"), **given_fields(given))


def resumed(given: Mapping[str, Any]) -> Session:
    """`tk.resume` of the arguments `RESUME`."""
    from toolkit.launching import resume

    return resume(**_beside(given, RESUME), **given_fields(given))


def predicted(given: Mapping[str, Any]) -> MemoryReport:
    """`tk.predict_memory` of the arguments `PREDICT`.

    Raises:
        SpecError: a setting that is refused, or no ranks or length.
    """
    with uninterrupted_imports():
        from toolkit.memory_predict import predict_memory

    settings = {name: _read(value) for name, value in given.items() if name != "out"}
    missing = [name for name in ("ranks", "sequence_length") if name not in settings]
    if missing:
        raise SpecError(f"a prediction needs --{missing[0].replace('_', '-')}, a whole number.")
    return predict_memory(**{**settings, "model": model_of(settings["model"])})


def tradeoffs_of(given: Mapping[str, Any], session: Callable[[Mapping[str, Any]], Session] | None) -> TradeoffReport:
    """`session.tradeoffs` of the arguments `TRADEOFFS`, or `tk.tradeoffs` where they name a model.

    Args:
        session: finds the session; None where a model is given.

    Raises:
        SpecError: a setting that is refused, or one that only the other of the two takes.
    """
    from toolkit.tradeoff_grid import tradeoffs

    settings = {name: _read(value) for name, value in given.items() if name not in ("session", "out", "model")}
    shape = {option.name for option in _SHAPE}
    idle = [name for name in given if name in (shape if session is not None else ("session", "twins"))]
    if idle:
        why = (
            "of a prediction: give --model too" if session is not None else "of a session, and --model predicts without one"
        )
        raise SpecError(f"--{idle[0].replace('_', '-')} is a setting {why}.")
    return tradeoffs(model_of(given["model"]), **settings) if session is None else session(given).tradeoffs(**settings)


def _beside(given: Mapping[str, Any], options: tuple[Option, ...], *without: str) -> dict[str, Any]:
    """Those of the arguments that are no fields of the specs; a widget counts as its value now."""
    fields = given_fields(given)
    names = [option.name for option in options if option.name not in fields and option.name not in without]
    return {name: _read(given[name]) for name in names if name in given}


def _read(value: Any) -> Any:
    return value.value if is_widget(value) else value
