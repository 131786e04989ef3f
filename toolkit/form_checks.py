"""What was typed into the launcher's form -> the fields of a launch, or a message beside each field that is wrong.

The messages are those of the checks that a launch makes itself; here they only find their place. Nothing imports torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checks import check_whole
from toolkit.errors import SpecError
from toolkit.grpo_config import MEMORY_FIELDS
from toolkit.layout import ModelFacts, check_config, check_layout, check_length
from toolkit.spec import GRPOConfig, PolicySpec, split_fields

#: The form's fields in its order, with what each starts with. `sequence_length` is of the prediction only.
DEFAULTS: dict[str, Any] = {
    "model": "tiny policy",
    "ranks": 1,
    "output_dtype": "float32",
    "tensor_parallel_size": 1,
    "activation_checkpointing": False,
    "logprob_mode": "materialized",
    "task": "arithmetic",
    "learning_rate": 1e-4,
    "num_prompts_per_step": 32,
    "num_generations_per_prompt": 8,
    "max_new_tokens": 5,
    "train_micro_batch_size": None,
    "sequence_length": 64,
}
_FRACTIONS = ("learning_rate",)
_TEXTS = ("model", "output_dtype", "logprob_mode", "task")
#: Arguments of `launch` that are no fields of the spec or the config.
_PLACES = ("cluster", "device", "checkpoint_dir", "save_period")


@dataclass(frozen=True, slots=True)
class Known:
    """What the checks need beyond what was typed; None where it is not known yet, and its checks are left to the launch."""

    facts: ModelFacts | None = None
    num_gpus: int | None = None
    resolve_task: Callable[[Any], Any] | None = None


def split_given(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort what `workbench` was given into the form's own fields and those that go to the launch as they are.

    Raises:
        SpecError: a name that launch does not have.
    """
    in_form = [name for name in fields if name in DEFAULTS and (name != "task" or isinstance(fields[name], str | Path))]
    own = {name: fields[name] for name in in_form}
    others = {name: value for name, value in fields.items() if name not in in_form}
    split_fields({name: value for name, value in others.items() if name not in _PLACES})
    return own, others


def value_of(name: str, typed: Any) -> Any:
    """The value that a typed text stands for; the text itself where it is no number, for the check to say so."""
    if not isinstance(typed, str) or name in _TEXTS:
        return typed.strip() if isinstance(typed, str) else typed
    text = typed.strip()
    if not text and name == "train_micro_batch_size":
        return None
    try:
        return float(text) if name in _FRACTIONS else int(text)
    except ValueError:
        return text


def check_form(values: Mapping[str, Any], others: Mapping[str, Any], known: Known) -> dict[str, str]:
    """A message for each field that would be refused, by its name; under "" one that names no field of the form.

    Args:
        values: of all fields of the form.
        others: further arguments of the launch.
    """
    messages = {name: why for name, value in values.items() if (why := check_alone(name, value)) is not None}
    if known.resolve_task is not None and "task" not in messages:
        _note(messages, values, lambda: known.resolve_task and known.resolve_task(values["task"]), "task")
    if not messages:
        _note(messages, values, lambda: _together(values, others, known))
    return messages


def check_alone(name: str, value: Any) -> str | None:
    """What is wrong with a field's value whatever the others are; None if nothing."""
    try:
        if name == "ranks":
            check_whole(name, value)
        elif name == "sequence_length":
            check_whole(name, value, minimum=2)
        elif name in {field.name for field in dataclasses.fields(PolicySpec)}:
            PolicySpec(**{"model": "any", name: value})
        else:
            GRPOConfig(**{name: value})
    except SpecError as error:
        return str(error)
    return None


def _together(values: Mapping[str, Any], others: Mapping[str, Any], known: Known) -> None:
    spec, config = spec_and_config(values, others)
    if known.facts is None:
        return
    ranks, device = values["ranks"], others.get("device")
    if known.num_gpus is not None and "cluster" not in others:
        where = device or ("cuda" if known.num_gpus else "cpu")
        check_layout(spec, known.facts, ranks=ranks, device=where, num_gpus=known.num_gpus)
    else:
        check_layout(spec, known.facts, ranks=ranks, device="cpu", num_gpus=0)
    check_config(config, spec, known.facts, ranks=ranks)
    check_length("sequence_length", values["sequence_length"], known.facts)


def spec_and_config(values: Mapping[str, Any], others: Mapping[str, Any]) -> tuple[PolicySpec, GRPOConfig]:
    """What would be launched.

    Raises:
        SpecError: as they do.
    """
    given = {**values, **others}
    fields = {name: value for name, value in given.items() if name not in ("ranks", "sequence_length", *_PLACES)}
    policy_fields, grpo_fields = split_fields(fields)
    return PolicySpec(**policy_fields), GRPOConfig(**grpo_fields)


def _note(messages: dict[str, str], values: Mapping[str, Any], check: Callable[[], Any], field: str | None = None) -> None:
    try:
        check()
    except (SpecError, FileNotFoundError) as error:
        messages[field if field is not None else field_named(str(error), values)] = str(error)


def field_named(message: str, fields: Mapping[str, Any]) -> str:
    """The field that a message is about: the first it gives the value of (`ranks=3`); "" if it gives none's."""
    places = {name: found.start() for name in fields if (found := re.search(rf"\b{name}=", message))}
    return min(places, key=lambda name: places[name], default="")


def prediction_of(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `predict_memory` for the training step of this form, but for the output dtype.

    A rank's share of the step is its sequences; with micro-batches, two of them show what any number does.
    """
    spec, config = spec_and_config(values, others)
    share = config.num_prompts_per_step * config.num_generations_per_prompt // (values["ranks"] // spec.tensor_parallel_size)
    micro = min(config.train_micro_batch_size or share, share)
    fields = {field.name: getattr(spec, field.name) for field in dataclasses.fields(PolicySpec)}
    fields |= {name: getattr(config, name) for name in MEMORY_FIELDS}
    fields |= {"ranks": values["ranks"], "sequence_length": values["sequence_length"], "micro_batch_size": micro}
    fields |= {"num_micro_batches": min(2, -(-share // micro))}
    del fields["output_dtype"]
    return fields
