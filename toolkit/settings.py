"""The two sides of a comparison: what a user may vary on one and the same sharded model, checked and applied."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit import fsdp
from toolkit.attention import attention_name
from toolkit.checks import check_one_of, check_temperature, check_whole
from toolkit.errors import SpecError
from toolkit.policy import LIVE_FIELDS, Policy
from toolkit.spec import dtype_name

#: Where logprobs come from: the training forward, or the sampler's own route, token by token through its KV cache.
ROUTES = ("trainer", "sampler")
#: What may differ besides the live fields of a spec.
OTHER_FIELDS = ("temperature", "batch_size", "logprobs", "attn_implementation")


@dataclass(frozen=True, slots=True)
class Setting:
    """One side of a comparison."""

    live: dict[str, Any]  # fields of PolicySpec to change
    temperature: float
    batch_size: int | None = None  # sequences in one forward of a rank, None for all of them
    logprobs: str = "trainer"
    attn_implementation: str = "sdpa"

    @property
    def values(self) -> dict[str, Any]:
        """Every setting by name."""
        return {**self.live, **{name: getattr(self, name) for name in OTHER_FIELDS}}

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


def _fields(given: str | Mapping[str, Any]) -> dict[str, Any]:
    return dict(given) if isinstance(given, Mapping) else {"output_dtype": given}


def _resolve(policy: Policy, fields: dict[str, Any], temperature: float) -> Setting:
    spec = policy.spec
    for name in fields:
        if name in LIVE_FIELDS or name in OTHER_FIELDS:
            continue
        allowed = ", ".join((*OTHER_FIELDS, *LIVE_FIELDS))
        if name in {f.name for f in dataclasses.fields(spec)}:
            raise SpecError(
                f"{name!r} is built into a session and cannot differ between two sides of a divergence; launch a "
                f"second session with it. Live settings are {allowed}."
            )
        raise SpecError(f"{name!r} is no setting; use {allowed}.")
    live = {name: fields.get(name, getattr(spec, name)) for name in LIVE_FIELDS}
    live["output_dtype"] = dtype_name(live["output_dtype"], "output_dtype")
    batch_size, route = fields.get("batch_size"), fields.get("logprobs", "trainer")
    check_one_of("logprobs", route, ROUTES)
    kernel = fields.get("attn_implementation", spec.attn_implementation or "sdpa")
    dataclasses.replace(spec, **live, attn_implementation=kernel)  # checks the kernel, also against the output dtype
    if kernel == "flash_attention_2" and policy.device.type == "cpu":
        raise SpecError("attn_implementation='flash_attention_2' has no CPU kernel; compare 'eager' with 'sdpa'.")
    return Setting(
        live,
        check_temperature(fields.get("temperature", temperature)),
        None if batch_size is None else check_whole("batch_size", batch_size),
        route,
        kernel,
    )
