"""Values of a NeMo-RL recipe that have a form of their own: what fields they give, knowing the recipe's other keys.

Each reader returns the fields of `PolicySpec` or `GRPOConfig` and what is to be said about them in the recipe's table.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from toolkit.errors import SpecError
from toolkit.spec import GRPOConfig, PolicySpec, dtype_name

Keys = Mapping[str, Any]  # dotted NeMo-RL keys with their values

V2 = "policy.dtensor_cfg._v2"


def as_yaml(value: Any) -> str:
    """A value as it is typed in an override."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


def near(key: str, known: Iterable[str]) -> str:
    """A hint at the known key nearest to a mistyped one, or nothing."""
    guess = difflib.get_close_matches(key, list(known), n=1, cutoff=0.75)
    return f" Did you mean {guess[0]!r}?" if guess else ""


def read_backend(value: Any, keys: Keys) -> tuple[dict[str, Any], str]:
    """Refuse what leaves no backend, or two."""
    if keys.get("policy.megatron_cfg.enabled"):
        return {}, "policy.megatron_cfg.enabled is refused"
    if value is not True:
        raise SpecError(
            f"policy.dtensor_cfg.enabled={as_yaml(value)} leaves no backend that the toolkit has. Set it to true."
        )
    return {}, "the one backend the toolkit has"


def read_version(value: Any, keys: Keys) -> tuple[dict[str, Any], str]:
    """DTensor v1 or v2 (AutoModel); either runs here."""
    if not isinstance(value, bool):
        raise SpecError(f"{V2}={as_yaml(value)} must be true or false.")
    return {}, "AutoModel, as here" if value else "DTensor v1: float32 outputs; here through AutoModel all the same"


def read_output_dtype(value: Any, keys: Keys) -> tuple[dict[str, Any], str]:
    """The FSDP output dtype, of a v1 recipe float32 only; `param` is NeMo-RL PR 4226's word for the compute dtype."""
    key = "policy.dtensor_cfg.fsdp_output_dtype"
    name = dtype_name(keys.get("policy.precision", PolicySpec.precision) if value == "param" else value, key)
    if name != "float32" and not keys[V2]:
        raise SpecError(
            f"{key}={as_yaml(value)} in a DTensor v1 recipe ({V2} is false, or absent after inheritance): v1 workers always "
            f"return float32, so NeMo-RL would do nothing with it. Set {V2}=true, or {key}=float32."
        )
    return {"output_dtype": name}, "the compute dtype, policy.precision" if value == "param" else ""


def read_chunk_size(value: Any, keys: Keys) -> tuple[dict[str, Any], str]:
    """Rows of logits upcast at a time; null upcasts all."""
    if value is None:
        return {}, "logits are upcast all at once"
    return {"logprob_mode": "chunked", "logprob_chunk_size": value}, "in training too, where NeMo-RL's DTensor path drops it"


def read_global_batch(value: Any, keys: Keys) -> tuple[dict[str, Any], str]:
    """Sequences per update."""
    counts = (keys["grpo.num_prompts_per_step"], keys["grpo.num_generations_per_prompt"])
    total = math.prod(counts) if all(isinstance(count, int | float) for count in counts) else value
    if value == total:
        return {}, "one update per step"
    if "train_global_batch_size" in GRPOConfig.__dataclass_fields__:
        return {"train_global_batch_size": value}, ""
    raise SpecError(
        f"policy.train_global_batch_size={as_yaml(value)} would take several updates per rollout; the toolkit takes one, of "
        f"{total} sequences (num_prompts_per_step times num_generations_per_prompt). Set it to {total}."
    )


def read_total_length(value: Any, keys: Keys) -> tuple[dict[str, Any], str]:
    """Refuse completions longer than the whole sequence."""
    new = keys.get("policy.generation.max_new_tokens")
    if isinstance(new, int) and isinstance(value, int) and new > value:
        raise SpecError(
            f"policy.generation.max_new_tokens={new} is more than policy.max_total_sequence_length={value}, prompt included."
        )
    return {}, "sequences end after max_new_tokens"


def read_tokenizer(value: Any, keys: Keys) -> tuple[dict[str, Any], str]:
    """Refuse another tokenizer than the model's."""
    if value != keys.get("policy.model_name"):
        raise SpecError(
            f"policy.tokenizer.name={value!r} is not the model; the toolkit takes the tokenizer saved with the model. Set "
            "policy.tokenizer.name='${policy.model_name}'."
        )
    return {}, "the model's own"


def read_scheduler(value: Any, keys: Keys) -> tuple[dict[str, Any], str]:
    """Constant, or rising linearly and then constant."""
    parts = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(part, Mapping) for part in parts):
        raise SpecError(f"policy.scheduler={as_yaml(value)} is not a scheduler with name and kwargs, nor a list of these.")
    kinds = [str(part.get("name")).rsplit(".", 1)[-1] for part in parts if "milestones" not in part]
    arguments = [part.get("kwargs") or {} for part in parts if "milestones" not in part]
    constant = all(a.get("factor") == 1 for k, a in zip(kinds, arguments, strict=True) if k == "ConstantLR")
    milestones = [part["milestones"] for part in parts if "milestones" in part]
    if kinds in ([], ["ConstantLR"]) and constant and not milestones:
        return {"warmup_steps": 0}, "constant"
    linear = arguments[0] if arguments else {}
    steps, start = linear.get("total_iters", 5), linear.get("start_factor", 1 / 3)  # torch's defaults
    known = kinds in (["LinearLR"], ["LinearLR", "ConstantLR"]) and constant and linear.get("end_factor", 1) == 1
    joined = milestones == [[steps]] * (len(kinds) - 1)
    if not (known and joined and isinstance(steps, int) and isinstance(start, int | float)):
        raise SpecError(
            "policy.scheduler: the toolkit's learning rate is constant, or rises linearly to its value and stays there: "
            "LinearLR to end_factor 1, then ConstantLR with factor 1 from the milestone at LinearLR's total_iters. "
            "Set policy.scheduler=null for a constant one."
        )
    if abs(start * (steps + 1) - 1) < 1e-9:
        return {"warmup_steps": steps + 1}, ""
    return {"warmup_steps": steps, "warmup_start_factor": start}, ""


def read_shaping(value: Any, keys: Keys) -> tuple[dict[str, Any], str]:
    """Refuse reward shaping where the toolkit has none."""
    if value and "overlong_buffer_length" not in GRPOConfig.__dataclass_fields__:
        raise SpecError("grpo.reward_shaping.enabled=true: the toolkit shapes no rewards. Set it to false.")
    return {}, "switches the keys beside it"


def read_max_response(value: Any, keys: Keys) -> tuple[dict[str, Any], str]:
    """Refuse a length other than the one that ends completions."""
    new = keys.get("policy.generation.max_new_tokens")
    if value != new:
        raise SpecError(
            f"grpo.reward_shaping.max_response_length={as_yaml(value)} is not max_new_tokens={as_yaml(new)}, "
            "from which the toolkit counts an overlong completion back. Make them equal."
        )
    return {}, "max_new_tokens, where the buffer ends"


def read_truncation(value: Any, keys: Keys) -> tuple[dict[str, Any], str]:
    """How the importance weight is truncated; null leaves the toolkit's default."""
    if value is not None:
        return {"truncated_importance_sampling_type": value}, ""
    return {}, "NeMo-RL took a ratio without a type as tis before it had types"


def read_ranks(value: Any, keys: Keys) -> tuple[dict[str, Any], str]:
    """GPUs of the one node."""
    return {"ranks": value}, "one rank per GPU, or as many CPU ranks"
