"""From the flat keys of a recipe to the fields of a spec and a config, booking what became of each key; and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolkit.errors import SpecError
from toolkit.recipe_keys import ABSENT, IGNORED, RULES, Rule
from toolkit.recipe_values import as_yaml, near
from toolkit.spec import GRPOConfig, PolicySpec

Status = Literal["mapped", "used", "ignored"]

SPEC_FIELDS = {f.name: f for f in dataclasses.fields(PolicySpec)}
GRPO_FIELDS = {f.name: f for f in dataclasses.fields(GRPOConfig)}
_FIELDS = SPEC_FIELDS | GRPO_FIELDS
_REFINED = ("activation_checkpointing", "logprob_mode")  # given by a NeMo-RL key in part; a `toolkit.` key may say more
_DATASETS = ("dataset_name", "data_path", "train_data_path", "train")


@dataclass(frozen=True, slots=True)
class RecipeKey:
    """What became of one key of a recipe.

    Attributes:
        key: dotted, as in the YAML.
        value: after inheritance, overrides and interpolation.
        status: "mapped" to a field; "used" by a check or by another key; "ignored".
        maps_to: the fields and their values, e.g. `spec.output_dtype='bfloat16'`.
        why: why it is ignored, or what there is to know.
    """

    key: str
    value: Any
    status: Status
    maps_to: str = ""
    why: str = ""


@dataclass(slots=True)
class Mapped:
    """What has been made of a recipe's keys.

    Attributes:
        keys: flat, with NeMo-RL's defaults for those the recipe leaves out.
        references: keys that others are interpolated from.
        fields: of `PolicySpec` and `GRPOConfig`, and "ranks".
        sources: the key each field came from.
        rows: the account.
        problems: what stands against the recipe, each with its way out.
    """

    keys: Mapping[str, Any]
    references: frozenset[str]
    fields: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    rows: list[RecipeKey] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def take(self, key: str, value: Any, why: str, given: Mapping[str, Any]) -> None:
        """Book a key that gives these fields, or none: then it was used by a check."""
        for name, setting in given.items():
            refines = name in _REFINED and key.startswith("toolkit.")
            if name in self.fields and self.fields[name] != setting and not refines:
                other = self.sources[name]
                self.problems.append(
                    f"{key}={as_yaml(value)} contradicts {other}={as_yaml(self.keys[other])}: both set {name}. Delete one: "
                    f"overrides=['~{key}']."
                )
                return
        self.fields |= given
        self.sources |= dict.fromkeys(given, key)
        text = ", ".join(f"{_home(name)}{name}={setting!r}" for name, setting in given.items())
        self.rows.append(RecipeKey(key, value, "mapped" if given else "used", text, why))

    def ignore(self, key: str, value: Any, why: str) -> None:
        """Book a key that changes nothing here."""
        self.rows.append(RecipeKey(key, value, "ignored", "", why))


def map_keys(keys: Mapping[str, Any], references: frozenset[str]) -> Mapped:
    """Map flat keys, in the recipe's order; a `toolkit.` key comes after the NeMo-RL keys it refines."""
    defaults = {
        key: rule.default
        for key, rule in RULES.items()
        if rule.default is not ABSENT and key not in keys and _estimator_key(key) not in keys
    }
    found = Mapped({**keys, **defaults}, references)
    for key in sorted(found.keys, key=lambda key: key.startswith("toolkit.")):
        note = "NeMo-RL's default; the recipe does not say" if key in defaults else ""
        try:
            _map(found, key, found.keys[key], note)
        except SpecError as error:
            found.problems.append(str(error))
    if "policy.model_name" not in keys:
        found.problems.append("policy.model_name is missing: a recipe names its model.")
    if "task" not in found.fields and any(_names_dataset(key, value) for key, value in keys.items()):
        found.fields["task"] = None
    for name in found.fields.keys() & _FIELDS.keys():
        found.fields[name] = _whole(_FIELDS[name], found.fields[name])
    return found


def _map(found: Mapped, key: str, value: Any, note: str) -> None:
    """Book one key; raises or notes a problem where it asks for what the toolkit would not do."""
    rule, keys = RULES.get(key), found.keys
    off_section = _section_off(key, keys)
    if off_section:
        found.ignore(key, value, f"{off_section} is off")
    elif rule is None:
        _map_unknown(found, key, value)
    elif rule.only_with and not keys.get(rule.only_with):
        found.ignore(key, value, f"read only with {rule.only_with}")
    elif rule.read:
        given, why = rule.read(value, keys)
        found.take(key, value, "; ".join(filter(None, (why, note))), given)
    elif rule.field in _FIELDS:
        found.take(key, value, note, {rule.field: value})
    elif rule.off is None or value in rule.off:
        found.ignore(key, value, rule.why if rule.off is None else f"changes nothing here: {rule.why}")
    else:
        found.problems.append(_refusal(key, value, rule, note))


def _map_unknown(found: Mapped, key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    refused = next((s for s in _switches(key) if s in found.keys and s in RULES and not _gives(RULES[s])), None)
    ignored = next((why for prefix, why in IGNORED.items() if f"{key}.".startswith(f"{prefix}.")), None)
    if ignored:
        found.ignore(key, value, ignored)
    elif section == "toolkit" and name:
        _map_own(found, key, name, value)
    elif value in (None, {}) and any(key == "toolkit" or known.startswith(f"{key}.") for known in RULES):
        found.ignore(key, value, "an empty section")
    elif refused:
        found.ignore(key, value, f"belongs to {refused}, which is refused")
    elif any(f"{key}.".startswith(f"{reference}.") for reference in found.references):
        found.take(key, value, "another key is interpolated from it", {})
    else:
        hint = near(key, RULES) or f" If NeMo-RL knows it and it does not matter here, delete it: overrides=['~{key}']."
        found.problems.append(f"{key}={as_yaml(value)}: there is no such key.{hint}")


def _map_own(found: Mapped, key: str, name: str, value: Any) -> None:
    """A key of the section `toolkit`: a field that no NeMo-RL key gives, or says all of."""
    elsewhere = next((known for known, rule in RULES.items() if rule.field == name and name not in _REFINED), None)
    if elsewhere:
        found.problems.append(f"{key}: NeMo-RL has a key for it; write {elsewhere}={as_yaml(value)} instead.")
    elif name not in _FIELDS:
        own = [f for f in _FIELDS if f in _REFINED or all(rule.field != f for rule in RULES.values())]
        found.problems.append(f"{key}={as_yaml(value)}: the toolkit has no such field.{near(name, own)}")
    elif name == "activation_checkpointing" and not found.keys.get("policy.dtensor_cfg.activation_checkpointing"):
        found.problems.append(f"{key}={as_yaml(value)} needs policy.dtensor_cfg.activation_checkpointing=true beside it.")
    else:
        found.take(key, value, "", {name: value})


def _refusal(key: str, value: Any, rule: Rule, note: str) -> str:
    sign = "+" if note else ""  # the recipe does not have the key yet
    way_out = f" To do without it: overrides=['{sign}{key}={as_yaml(rule.off[0])}']." if rule.off else ""
    return f"{key}={as_yaml(value)}{f' ({note})' if note else ''}: {rule.why}.{way_out}"


def _section_off(key: str, keys: Mapping[str, Any]) -> str | None:
    """The key that switches a section around `key` off, if one does."""
    return next((s for s in _switches(key) if keys.get(s) is False and s != "policy.dtensor_cfg.enabled"), None)


def _switches(key: str) -> list[str]:
    """Keys that could switch a section around `key` on and off."""
    sections = key.split(".")[:-1]
    switches = [".".join([*sections[:depth], "enabled"]) for depth in range(1, len(sections) + 1)]
    return [switch for switch in switches if switch != key]


def _gives(rule: Rule) -> bool:
    return rule.read is not None or rule.field in _FIELDS


def _estimator_key(key: str) -> str:
    return key.replace("grpo.", "grpo.adv_estimator.", 1)


def _names_dataset(key: str, value: Any) -> bool:
    return key.startswith("data.") and key.rsplit(".", 1)[-1] in _DATASETS and bool(value)


def _whole(declared: dataclasses.Field[Any], value: Any) -> Any:
    """A whole float as an int where a field wants one: `${div:...}` gives floats."""
    return int(value) if isinstance(value, float) and value.is_integer() and str(declared.type).startswith("int") else value


def _home(name: str) -> str:
    return "spec." if name in SPEC_FIELDS else "config." if name in GRPO_FIELDS else ""


def written_keys(spec: PolicySpec, config: GRPOConfig, ranks: int) -> dict[str, Any]:
    """The flat keys of a recipe that says all of this."""
    values = {name: getattr(spec, name) for name in SPEC_FIELDS} | {name: getattr(config, name) for name in GRPO_FIELDS}
    model, task = Path(spec.model).expanduser(), values.pop("task")
    total = config.num_prompts_per_step * config.num_generations_per_prompt
    values["model"] = str(model.absolute() if model.is_dir() else spec.model)
    values["train_global_batch_size"] = values.get("train_global_batch_size") or total
    values["activation_checkpointing"] = bool(spec.activation_checkpointing)
    keys: dict[str, Any] = {
        "policy.model_name": values.pop("model"),
        "policy.dtensor_cfg.enabled": True,
        "policy.dtensor_cfg._v2": True,
        "policy.optimizer.name": "torch.optim.AdamW",
        "policy.scheduler": _schedulers(values.pop("warmup_steps"), values.pop("warmup_start_factor")),
        "cluster.gpus_per_node": ranks,
        "cluster.num_nodes": 1,
    }
    keys |= {"toolkit.task": task} if isinstance(task, str) else {"data.dataset_name": getattr(task, "name", "custom")}
    if spec.activation_checkpointing in ("selective", "hf"):
        keys["toolkit.activation_checkpointing"] = spec.activation_checkpointing
    if values.pop("logprob_mode") != ("materialized" if spec.logprob_chunk_size is None else "chunked"):
        keys["toolkit.logprob_mode"] = spec.logprob_mode
    for name, value in values.items():
        key = next((k for k, rule in RULES.items() if rule.field == name), f"toolkit.{name}")
        if key in RULES or value != _FIELDS[name].default:
            keys[key] = value
    for key, rule in RULES.items():  # an option the toolkit does not have, and NeMo-RL would take for granted
        if rule.default is not ABSENT and rule.off and key not in keys:
            keys[key] = rule.off[0]
    shaping = "grpo.reward_shaping."
    shaped = any(keys.get(shaping + name) is not None for name in ("overlong_buffer_length", "stop_properly_penalty_coef"))
    keys |= {f"{shaping}enabled": shaped, f"{shaping}max_response_length": config.max_new_tokens}
    return {key: value for key, value in keys.items() if not _unread(key, keys)}


def _unread(key: str, keys: Mapping[str, Any]) -> bool:
    gate = RULES[key].only_with if key in RULES else None
    return bool(gate and not keys.get(gate)) or _section_off(key, keys) is not None


def _schedulers(steps: int, start: float | None) -> list[dict[str, Any]] | None:
    """torch's schedulers that rise as `warmup_factor` does: from 1/steps in steps - 1, or from `start` in steps."""
    if steps < 2 and start is None:
        return None
    rise, start = (steps - 1, 1 / steps) if start is None else (steps, start)
    return [
        {
            "name": "torch.optim.lr_scheduler.LinearLR",
            "kwargs": {"start_factor": start, "end_factor": 1.0, "total_iters": rise},
        },
        {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10_000_000_000}},
        {"milestones": [rise]},
    ]
