"""The two sides of a comparison: what a user may vary on one and the same sharded model, checked and applied."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from toolkit import fsdp
from toolkit.attention import attention_name
from toolkit.build import build
from toolkit.checks import check_one_of, check_temperature, check_whole
from toolkit.dtensors import local_shard
from toolkit.errors import SpecError
from toolkit.layout import check_layout, model_facts
from toolkit.policy import LIVE_FIELDS, Policy
from toolkit.spec import dtype_name

#: Where logprobs come from: the training forward, or the sampler's own route, token by token through its KV cache.
ROUTES = ("trainer", "sampler")
#: Fields of a spec that need another build: the side that differs in one is a second model of the same weights.
BUILT_FIELDS = ("precision", "lm_head_precision")
#: What may differ besides the fields of a spec.
OTHER_FIELDS = ("temperature", "batch_size", "logprobs", "attn_implementation")


@dataclass(frozen=True, slots=True)
class Setting:
    """One side of a comparison."""

    live: dict[str, Any]  # fields of PolicySpec to change
    temperature: float
    batch_size: int | None = None  # sequences in one forward of a rank, None for all of them
    logprobs: str = "trainer"
    attn_implementation: str = "sdpa"
    built: dict[str, Any] = field(default_factory=dict)  # BUILT_FIELDS of the spec

    @property
    def values(self) -> dict[str, Any]:
        """Every setting by name."""
        return {**self.live, **self.built, **{name: getattr(self, name) for name in OTHER_FIELDS}}

    def differing(self, other: Setting) -> set[str]:
        """Names of the settings in which two sides differ."""
        theirs = other.values
        return {name for name, value in self.values.items() if theirs[name] != value}

    def describe(self, other: Setting) -> str:
        """What distinguishes this side from the other, as text."""
        differing = self.differing(other)
        if differing == {"output_dtype"}:
            return f"{self.live['output_dtype']} outputs"
        words = {"batch_size": f"batch_size={self.batch_size or 'all'}"}
        named = [words.get(k, f"{k}={v}") for k, v in self.values.items() if k in differing]
        return ", ".join(named) or "the same setting"

    @contextlib.contextmanager
    def applied(self, policy: Policy) -> Iterator[None]:
        """Run the policy under this setting.

        Raises:
            SpecError: the combination is refused, or the attention kernel is not installed.
        """
        model: Any = policy.model
        before = fsdp.attention_of(model)
        wanted = attention_name(self.attn_implementation, policy.device.type)
        switches = wanted != before
        try:
            if switches:
                model.set_attn_implementation(wanted)
        except (ImportError, ValueError) as error:
            raise SpecError(f"attn_implementation={self.attn_implementation!r} cannot be used here: {error}") from error
        try:
            with policy.temporarily(**self.live):
                yield
        finally:
            if switches:
                model.set_attn_implementation(before)


@torch.no_grad()
def policy_for(policy: Policy, side: Setting) -> Policy:
    """The policy itself, or for a side that needs another build a second one of its weights on its ranks; all together.

    The second holds another copy of this rank's float32 shards as long as it lives.
    """
    if all(getattr(policy.spec, name) == value for name, value in side.built.items()):
        return policy
    other = build(dataclasses.replace(policy.spec, **side.live, **side.built), policy.device.type)
    fsdp.reshard(policy.model)
    for mine, theirs in zip(policy.model.parameters(), other.model.parameters(), strict=True):
        local_shard(theirs).copy_(local_shard(mine))
    return other


def resolve_settings(
    policy: Policy,
    a: str | Mapping[str, Any],
    b: str | Mapping[str, Any],
    common: Mapping[str, Any],
    temperature: float,
) -> tuple[Setting, Setting]:
    """Make settings of what a user gave: a dtype name, or a mapping of fields; `common` applies to both sides.

    Raises:
        SpecError: an unknown field, a field that needs another build, or a value that is refused.
    """
    clash = [name for side in (a, b) for name in (side if isinstance(side, Mapping) else ["output_dtype"]) if name in common]
    if clash:
        raise SpecError(
            f"{clash[0]!r} is given for both sides and for one of them; give it once. (A side is an output dtype, or a "
            "mapping of settings.)"
        )
    return tuple(_resolve(policy, {**common, **_fields(given)}, temperature) for given in (a, b))  # type: ignore[return-value]


def without_idle_batch_sizes(sides: tuple[Setting, Setting], num_sequences: int) -> tuple[tuple[Setting, Setting], str]:
    """The sides, their batch sizes None where a rank has no more sequences than that; and a sentence on it, or nothing."""
    idle = sorted({side.batch_size for side in sides if side.batch_size is not None and side.batch_size >= num_sequences})
    if not idle:
        return sides, ""
    a, b = (dataclasses.replace(side, batch_size=None) if side.batch_size in idle else side for side in sides)
    held = "1 sequence" if num_sequences == 1 else f"{num_sequences} sequences"
    return (a, b), f" (batch_size={', '.join(map(str, idle))} splits nothing here: a rank has {held}.)"


def _fields(given: str | Mapping[str, Any]) -> dict[str, Any]:
    return dict(given) if isinstance(given, Mapping) else {"output_dtype": given}


def _resolve(policy: Policy, fields: dict[str, Any], temperature: float) -> Setting:
    spec = policy.spec
    for name in fields:
        if name in LIVE_FIELDS or name in OTHER_FIELDS or name in BUILT_FIELDS:
            continue
        allowed = ", ".join((*OTHER_FIELDS, *LIVE_FIELDS, *BUILT_FIELDS))
        if name in {f.name for f in dataclasses.fields(spec)}:
            raise SpecError(
                f"{name!r} is built into a session and cannot differ between two sides of a divergence; launch a "
                f"second session with it. What can differ is {allowed}."
            )
        raise SpecError(f"{name!r} is no setting; use {allowed}.")
    live, built = ({name: fields.get(name, getattr(spec, name)) for name in names} for names in (LIVE_FIELDS, BUILT_FIELDS))
    live["output_dtype"] = dtype_name(live["output_dtype"], "output_dtype")
    batch_size, route = fields.get("batch_size"), fields.get("logprobs", "trainer")
    check_one_of("logprobs", route, ROUTES)
    kernel = fields.get("attn_implementation", spec.attn_implementation or "sdpa")
    # Checks the kernel, also against the output dtype, and a head of its own against the model.
    wanted = dataclasses.replace(spec, **live, **built, attn_implementation=kernel)
    ranks = dist.get_world_size()
    if kernel == "flash_attention_2" and policy.device.type == "cpu":
        raise SpecError("attn_implementation='flash_attention_2' has no CPU kernel; compare 'eager' with 'sdpa'.")
    check_layout(wanted, model_facts(spec.model), ranks=ranks, device=policy.device.type, num_gpus=ranks)
    return Setting(
        live,
        check_temperature(fields.get("temperature", temperature)),
        None if batch_size is None else check_whole("batch_size", batch_size),
        route,
        kernel,
        {name: getattr(wanted, name) for name in BUILT_FIELDS},
    )
