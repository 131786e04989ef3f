"""A loss of the user's own on raw logits under two settings: how far apart they are, and what of it the loss rounds itself.

A loss that takes logits as the model returns them computes in their dtype, which is the root unit's output dtype. So two
settings may agree in every logprob and still train differently.

Shapes: _B sequences, _T tokens, _V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from toolkit import fsdp
from toolkit.dtensors import whole
from toolkit.errors import SpecError
from toolkit.gradient_effects import Shards, compare_gradients, relative_error, take_gradients
from toolkit.policy import Policy
from toolkit.prompts import Batch
from toolkit.settings import Setting
from toolkit.spec import GRPOConfig

if TYPE_CHECKING:
    import pandas as pd

#: Of logits [B, T, V] in the output dtype, token ids [B, T] and a mask [B, T] (1 where a token counts): a scalar.
RawLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check_loss(policy: Policy, sides: Sequence[Setting], num_sequences: int | None) -> None:
    """Raise a SpecError for a comparison that a loss on raw logits can play no part in.

    Args:
        num_sequences: given by the user; None where they are sampled, the same number on each rank.
    """
    a, b = sides
    beyond = sorted(a.differing(b) & {"temperature", "temperature_order", "logprob_mode", "logprob_chunk_size"})
    if beyond:
        raise SpecError(f"loss= takes logits as the model returns them: {beyond[0]} plays no part in it; give one for both.")
    for side in sides:
        if side.live["logprob_mode"] == "linear":
            raise SpecError(
                "logprob_mode='linear' makes no logits, and loss= is of logits: compare with logprob_mode='materialized'."
            )
        if side.logprobs == "sampler":
            raise SpecError("loss= takes the training forward's logits; logprobs='sampler' makes none to train on.")
        if side.batch_size is not None:
            raise SpecError(
                f"batch_size={side.batch_size} splits a forward, and loss= takes all sequences of a rank; leave out one."
            )
    if num_sequences is not None and num_sequences % policy.data_size:
        raise SpecError(
            f"loss= needs as many sequences on each rank as on any other: {num_sequences} cannot be shared by "
            f"{policy.data_size}; give a multiple of {policy.data_size}."
        )


def compare_losses(
    policy: Policy, built: Sequence[Policy], config: GRPOConfig, batch: Batch, sides: Sequence[Setting], loss: RawLoss
) -> tuple[pd.DataFrame, dict[str, float], str]:
    """The loss and its gradients under two settings, and what of it the loss rounds itself; all ranks together.

    Its own rounding is that of one side alone: the loss of the logits as they are, against that of the same logits upcast.
    What upcasting leaves between the sides is the forward's.

    Returns:
        A row per group of parameters and the metrics of `compare_gradients`, both of the loss as it is; beside these
        `loss_a`, `loss_b`, their relative error and both relative errors with upcast logits, and each side's own rounding
        (`loss_rounding_a`, `gradient_rounding_a`, ...). Then a sentence.

    Raises:
        SpecError: the function gives no scalar tensor that depends on the logits, or another one each time.
        FloatingPointError: the loss is not finite.
    """
    raw_a, upcast_a, raw_b, upcast_b = (
        _score(one, batch, side, loss, upcast) for one, side in zip(built, sides, strict=True) for upcast in (False, True)
    )
    frame, found = compare_gradients(policy, config, raw_a.gradients, raw_b.gradients)
    metrics = {"loss_a": raw_a.value, "loss_b": raw_b.value, "loss_relative_error": _relative(raw_a, raw_b), **found}
    metrics["loss_relative_error_upcast"] = _relative(upcast_a, upcast_b)
    metrics["gradient_relative_error_upcast"] = relative_error(upcast_a.gradients, upcast_b.gradients)
    for side, upcast, raw in (("a", upcast_a, raw_a), ("b", upcast_b, raw_b)):
        metrics[f"loss_rounding_{side}"] = _relative(upcast, raw)
        metrics[f"gradient_rounding_{side}"] = relative_error(upcast.gradients, raw.gradients)
    return frame, metrics, _in_words(metrics)


@dataclass(slots=True)
class _Score:
    value: float  # the mean over the data-parallel ranks
    gradients: Shards


def _score(policy: Policy, batch: Batch, side: Setting, loss: RawLoss, upcast: bool) -> _Score:
    policy.stop_if_asked()
    policy.model.train()  # dropout is off; checkpointing layers check this flag
    with side.applied(policy):
        try:
            with policy.autocast():  # around the loss and backward too, as NeMo-RL has it and as a GRPO step does
                logits_BTV = whole(policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT).logits)
                if upcast:
                    logits_BTV = logits_BTV.float()
                made_by = logits_BTV.grad_fn
                with policy.failing_together():
                    with torch.no_grad():  # of a copy: the loss may work in place
                        before = loss(logits_BTV.detach().clone(), batch.ids_BT, batch.token_mask_BT)
                    value = loss(logits_BTV, batch.ids_BT, batch.token_mask_BT)
                    _check_value(value, made_by, logits_BTV)
                    _check_repeats(float(before), float(value.detach()))
                value.backward()
            fsdp.synchronize_gradients(policy.model, policy.mesh)
            gradients = take_gradients(policy)
        finally:
            policy.model.zero_grad(set_to_none=True)
            fsdp.reshard(policy.model)
    total = policy.sum_over_data(value.detach().double().reshape(1).cpu())
    return _Score(float(total) / policy.data_size, gradients)


def _check_value(value: object, made_by: Any, logits_BTV: torch.Tensor) -> None:
    if not isinstance(value, torch.Tensor):
        what = f"gave {value!r:.60}, a {type(value).__name__}"
    elif value.ndim:
        what = f"gave a tensor of shape {tuple(value.shape)}"
    elif not _leads_to(made_by, value.grad_fn):
        what = "gave a tensor that does not depend on the logits (detached, or made of other numbers)"
    elif not math.isfinite(float(value.detach())):
        kind = "finite" if bool(torch.isfinite(logits_BTV).all()) else "no longer finite"
        raise FloatingPointError(
            f"loss= gave {float(value.detach())} of {str(logits_BTV.dtype).removeprefix('torch.')} logits that are {kind}."
        )
    else:
        return
    raise SpecError(f"loss= {what}; it must return a scalar tensor computed from the logits it is given.")


def _leads_to(wanted: Any, start: Any) -> bool:
    """Whether autograd's graph leads from a node to another."""
    seen, waiting = set[Any](), [start]
    while waiting:
        node = waiting.pop()
        if node is not None and node is wanted:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return False


def _check_repeats(value: float, again: float) -> None:
    if again != value:
        raise SpecError(
            f"loss= gave {value:.9g}, and of the very same logits {again:.9g}: such noise would be taken for rounding. Seed "
            "what is random in it."
        )


def _relative(a: _Score, b: _Score) -> float:
    if a.value == b.value:
        return 0.0
    return abs(b.value - a.value) / abs(a.value) if a.value else math.inf


def _in_words(metrics: dict[str, float]) -> str:
    own = [
        f"on side {side} its value by {metrics[f'loss_rounding_{side}']:.1e} relative and its gradient by "
        f"{metrics[f'gradient_rounding_{side}']:.1e}"
        for side in "ab"
        if metrics[f"loss_rounding_{side}"] or metrics[f"gradient_rounding_{side}"]
    ]
    value, gradient = metrics["loss_relative_error_upcast"], metrics["gradient_relative_error_upcast"]
    forward = f"the forward alone makes {value:.1e} and {gradient:.1e}" if value or gradient else "the forward makes nothing"
    if own:
        return (
            f" Cause in the loss: it computes on raw logits in their own 16 bits, which rounds {', and '.join(own)}; upcast "
            f"them first, with logits.float(). Between the sides {forward}."
        )
    if metrics["loss_relative_error"] or metrics["gradient_relative_error"]:
        return f" The loss itself rounds nothing: upcast logits give the same bits on each side. Between them {forward}."
    return " The loss and its gradients are the same bit for bit on both sides, and with upcast logits too."
