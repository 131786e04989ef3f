"""A loss of the user's own on raw logits under two settings: as it is, and with the logits upcast before it.

A loss that takes logits as the model returns them computes in their dtype, which is the root unit's output dtype. So two
settings may agree in every logprob and still train differently.

Shapes: _B sequences, _T tokens, _V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from toolkit import fsdp
from toolkit.dtensors import whole
from toolkit.errors import SpecError
from toolkit.gradient_effects import Shards, compare_gradients, take_gradients
from toolkit.policy import Policy, check_finite
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
    for side in sides:
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
    """The loss and its gradients under two settings, and whether it is the loss that makes them differ; all ranks together.

    Returns:
        A row per group of parameters and the metrics of `compare_gradients`, both of the loss as it is; beside these
        `loss_a` and `loss_b`, their relative error, and both relative errors with upcast logits. Then a sentence.

    Raises:
        SpecError: the function gives no scalar tensor that depends on the logits.
        FloatingPointError: the loss is not finite.
    """
    frame, metrics = None, dict[str, float]()
    for upcast in (False, True):
        (a, grads_a), (b, grads_b) = (_score(one, batch, side, loss, upcast) for one, side in zip(built, sides, strict=True))
        rows, found = compare_gradients(policy, config, grads_a, grads_b)
        if upcast:
            metrics["loss_relative_error_upcast"] = _relative(a, b)
            metrics["gradient_relative_error_upcast"] = found["gradient_relative_error"]
        else:
            frame, metrics = rows, {"loss_a": a, "loss_b": b, "loss_relative_error": _relative(a, b), **found}
    assert frame is not None
    return frame, metrics, _in_words(metrics)


def _score(policy: Policy, batch: Batch, side: Setting, loss: RawLoss, upcast: bool) -> tuple[float, Shards]:
    """The mean of the loss over the data-parallel ranks, and its gradient."""
    policy.model.train()  # dropout is off; checkpointing layers check this flag
    with side.applied(policy):
        try:
            with policy.autocast():  # around the loss and backward too, as NeMo-RL has it and as a GRPO step does
                logits_BTV = whole(policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT).logits)
                with policy.failing_together():
                    value = loss(logits_BTV.float() if upcast else logits_BTV, batch.ids_BT, batch.token_mask_BT)
                    _check_scalar(value)
                check_finite(policy, value.detach().reshape(1, 1), batch, "the loss on raw logits")
                value.backward()
            fsdp.synchronize_gradients(policy.model, policy.mesh)
            gradients = take_gradients(policy)
        finally:
            policy.model.zero_grad(set_to_none=True)
            fsdp.reshard(policy.model)
    total = policy.sum_over_data(value.detach().double().reshape(1).cpu())
    return float(total) / policy.data_size, gradients


def _check_scalar(value: object) -> None:
    if isinstance(value, torch.Tensor) and value.ndim == 0 and value.requires_grad:
        return
    if not isinstance(value, torch.Tensor):
        what = f"gave {value!r:.60}, a {type(value).__name__}"
    elif value.ndim:
        what = f"gave a tensor of shape {tuple(value.shape)}"
    else:
        what = "gave a tensor that does not depend on the logits (detached, or made of other numbers)"
    raise SpecError(f"loss= {what}; it must return a scalar tensor computed from the logits it is given.")


def _relative(a: float, b: float) -> float:
    return abs(b - a) / abs(a) if a else (0.0 if a == b else float("inf"))


def _in_words(metrics: dict[str, float]) -> str:
    """For value and gradient apart: a loss may round the one where the forward's rounding outweighs it in the other."""
    words, rounds = [], False
    for name, key in (("value", "loss_relative_error"), ("gradient", "gradient_relative_error")):
        raw, upcast = metrics[key], metrics[f"{key}_upcast"]
        if raw == 0:
            words.append(f"its {name} is the same bit for bit on both sides")
            continue
        whose = "the loss's own rounding" if upcast <= raw / 2 else "the forward's rounding, not its own"
        rounds |= upcast <= raw / 2
        words.append(f"its {name} differs by {raw:.1e} relative, and by {upcast:.1e} with logits.float() before it: {whose}")
    cause = " Cause in the loss: it computes on raw logits, in their own dtype; upcast them first." if rounds else ""
    return f"{cause} Of the loss, {'; '.join(words)}."
