"""Why two settings diverge: which FSDP unit, which operation, and why a zero is zero.

Shapes: _B sequences, _T tokens.
"""

from __future__ import annotations

import dataclasses

import torch

from toolkit import fsdp
from toolkit.checks import is_power_of_two
from toolkit.policy import Policy
from toolkit.replay import score_tokens
from toolkit.settings import Setting
from toolkit.step import TrainingBatch


def by_unit(
    policy: Policy, training: TrainingBatch, side_a: Setting, side_b: Setting, logprobs_a_BT: torch.Tensor
) -> dict[str, float]:
    """Mean |delta| when one FSDP unit alone emits b's output dtype and all others a's."""
    if side_a.differing(side_b) != {"output_dtype"}:
        return {}
    found = {}
    mask_BT = training.batch.token_mask_BT[:, 1:].cpu() > 0
    before, after = (dataclasses.replace(policy.spec, **side.live) for side in (side_a, side_b))
    head = fsdp.head_name(policy.model)
    names = [
        name
        for name in fsdp.unit_modules(policy.model)
        if fsdp.output_dtype_of(name, before, head) != fsdp.output_dtype_of(name, after, head)
    ]
    with side_a.applied(policy):
        for done, name in enumerate(names):
            policy.stop_if_asked()
            policy.progress("localising", done, len(names))
            fsdp.apply_spec(policy.model, policy.spec, overrides={name: side_b.live["output_dtype"]})
            switched_BT = score_tokens(policy, training.batch, side_a, ranks=False).logprobs_BT
            delta = (switched_BT - logprobs_a_BT)[mask_BT].abs().double()
            total = policy.sum_over_data(torch.tensor([float(delta.sum()), len(delta)], dtype=torch.float64))
            found[name] = float(total[0] / total[1])
    return found


def explain(
    policy: Policy, a: Setting, b: Setting, metrics: dict[str, float], units: dict[str, float], gradient: str
) -> str:
    """Say in words why the divergence is what it is.

    Args:
        metrics: of the report; zero or not is read from `mean_abs_nats`.
        units: from `by_unit`.
        gradient: what the compared gradients are of.
    """
    differing = a.differing(b)
    if metrics["mean_abs_nats"] == 0.0:
        cause = _why_zero(policy, a, differing, metrics)
    elif differing == {"output_dtype"} and units:
        cause = _why_output_dtype(policy, a, b, units)
    elif "logprobs" in differing and "linear" in (a.live["logprob_mode"], b.live["logprob_mode"]):
        cause = _why_sampler_of_linear(policy, a, b)
    elif "logprob_mode" in differing and "linear" in (a.live["logprob_mode"], b.live["logprob_mode"]):
        cause = _why_linear(policy, differing)
    else:
        cause = _why_other(policy, differing)
        if gradient:
            cause += f" (Gradients compared are those of the {gradient}.)"
    if differing == {"output_dtype"} and a.live["temperature_order"] == "before_upcast" and is_power_of_two(a.temperature):
        cause += f" (The order of the temperature plays no part: dividing by {a.temperature}, a power of two, is exact.)"
    return cause


def _why_other(policy: Policy, differing: set[str]) -> str:
    """What each setting does to the forward; one of several is not singled out."""
    precision = policy.spec.precision
    noise = f"noise of {precision} arithmetic, as any other order of sums would make"
    reasons = {
        "temperature": "another temperature is another distribution: this is no rounding",
        "temperature_order": "dividing before the upcast rounds z/T to the output dtype; 'after_upcast' cures it",
        "cast_forward_inputs": "without input casts the residual stream keeps the output dtype from layer to layer",
        "autocast": "autocast picks the dtype of each operation, where the units' own dtypes decide without it",
        "batch_size": f"matrix products of another shape sum in another order: {noise}",
        "logprobs": f"a token at a time through the KV cache sums in another order than all at once: {noise}",
        "attn_implementation": f"another attention kernel sums in another order and rounds elsewhere: {noise}",
        "output_dtype": "the units emit another dtype",
        "precision": "every matrix product rounds its weights and operands to the compute dtype: what 16-bit compute costs",
        "lm_head_precision": (
            f"a float32 head keeps float32 logits of float32 weights, where the plain one rounds both to {precision}"
        ),
        "logprob_mode": "the same float32 sums, in another order",
        "logprob_chunk_size": "the same float32 sums, in another order",
    }
    if len(differing) == 1:
        return f"Cause: {reasons[next(iter(differing))]}."
    named = "; ".join(f"{name} ({reasons[name]})" for name in sorted(differing))
    return f"Cause: one or more of {named}. Compare them one at a time to tell which."


def _why_linear(policy: Policy, differing: set[str]) -> str:
    others = sorted(differing - {"logprob_mode", "logprob_chunk_size"})
    also = f" {', '.join(others)} differ too." if others else ""
    if policy.spec.precision == "float32":
        return f"Cause: linear mode sums the same float32 products in another order.{also}"
    return (
        f"Cause: the plain head rounds its logits to {policy.spec.precision}, and linear mode keeps them in float32; the "
        f"side in linear mode is the exact one (session.self_check() shows by how much).{also}"
    )


def _why_sampler_of_linear(policy: Policy, a: Setting, b: Setting) -> str:
    trainer = a if a.logprobs == "trainer" else b
    if trainer.live["logprob_mode"] != "linear" or policy.spec.precision == "float32":
        return _why_other(policy, {"logprobs"})
    return (
        f"Cause: the sampler takes the plain head, rounding its logits to {policy.spec.precision}, whatever logprob_mode "
        "says; the trainer's linear head keeps them in float32. That is no noise of the cache; logprob_mode='materialized' "
        "has the same rounding on both sides."
    )


def _why_zero(policy: Policy, a: Setting, differing: set[str], metrics: dict[str, float]) -> str:
    if not differing:
        return "Zero because both sides are the same setting, and a forward repeats bit for bit."
    spec = policy.spec
    reasons = []
    modes, routes = {"logprob_mode", "logprob_chunk_size"}, {"batch_size", "logprobs", "attn_implementation"}
    seeing = fsdp.root_parameters(policy.model)
    if differing == {"output_dtype"} and seeing:
        return (
            f"Zero on these tokens, but not by construction: the root unit owns {', '.join(seeing)} and casts no inputs in "
            "between, so it does see the output dtype. Here that moves no logprob; norm weights of exactly 1, or a flat or "
            "saturated distribution, hide it."
        )
    if differing == {"output_dtype"}:
        if a.live["cast_forward_inputs"]:
            reasons.append(
                f"every unit casts its inputs back to {spec.precision} (cast_forward_inputs=True), so a wider output dtype "
                f"only carries {spec.precision} numbers from one unit to the next"
            )
        if a.live["logprob_mode"] == "linear":
            reasons.append("linear mode makes float32 logits of them, and the root returns its logprobs in float32")
        else:
            reasons.append("the logits come from a matmul in that dtype and are upcast before the softmax either way")
        if not is_power_of_two(a.temperature):
            reasons.append(f"the temperature {a.temperature} divides after the upcast")
    elif differing <= modes:
        in_each_mode = "the sampler takes the last token's logits from the plain head in every logprob mode"
        fewer_rows = "the chunked logprobs compute the same float32 sums, only fewer rows at a time"
        reasons.append(in_each_mode if a.logprobs == "sampler" else fewer_rows)
    elif differing <= routes or ("logprobs" in differing and differing <= routes | modes):
        reasons.append(
            f"on this device the order of sums does not depend on {' or '.join(sorted(differing))} at these sizes"
        )
    elif differing == {"temperature_order"}:
        reasons.append(
            f"{a.live['output_dtype']} logits divided by {a.temperature} give the same bits before and after the upcast"
        )
    else:
        reasons.append(f"changing {', '.join(sorted(differing))} reaches no operation of this model's forward")
    note = ""
    if metrics["gradient_relative_error"] > 0:  # NaN without gradients
        note = f" The gradients still differ, by {metrics['gradient_relative_error']:.1e} relative: backward rounds too."
    return "Zero because " + ", and ".join(reasons) + "." + note


def _why_output_dtype(policy: Policy, a: Setting, b: Setting, units: dict[str, float]) -> str:
    worst = max(units, key=lambda name: units[name])
    total = sum(units.values())
    dtypes = {a.live["output_dtype"], b.live["output_dtype"]}
    divides_early = a.live["temperature_order"] == "before_upcast" and not is_power_of_two(a.temperature)
    if not total:
        return "Cause: no unit's output dtype makes it alone; it takes two of them together."
    if worst == fsdp.ROOT and divides_early:
        what = (
            f"the root unit's logits are divided by the temperature {a.temperature} in the output dtype, before the upcast; "
            "temperature_order='after_upcast' cures it"
        )
    elif policy.spec.precision == "float32":
        what = "compute is float32, so every unit really rounds what it emits: the residual stream and the logits"
    elif not a.live["cast_forward_inputs"]:
        what = "the residual stream keeps the output dtype from layer to layer, because cast_forward_inputs=False"
    elif worst in (fsdp.ROOT, fsdp.head_name(policy.model)):
        what = "the logits themselves are rounded to the output dtype"
    elif _feeds_final_norm(policy, worst):
        what = (
            f"the final norm belongs to the root unit, which casts no inputs in between, so it sees the output of {worst} "
            "in the output dtype; the other units cast their inputs first"
        )
    elif "float16" in dtypes:
        what = f"{worst} emits values below float16's normal range (6e-5), which lose digits"
    else:
        what = f"{worst} rounds its output"
    share = units[worst] / total
    return f"Cause: {what}. Switching {worst} alone makes {units[worst]:.1e} nats, {share:.0%} of the single effects."


def _feeds_final_norm(policy: Policy, unit: str) -> bool:
    layers = [name for name in fsdp.unit_modules(policy.model) if ".layers." in name or ".h." in name]
    return bool(layers) and unit == layers[-1]
