"""Losses on raw model outputs: reward scores and values, which reach them in the output dtype, not as float32 logprobs.

Shapes: _N pairs, or values.

    preference   mean -log sigmoid(beta (chosen - rejected))                            (Bradley and Terry 1952)
    accuracy     share of chosen > rejected; an equal pair, a tie, counts as wrong
    value        mean (v - R)^2 / 2, or of max((v - R)^2, (clip(v, old -+ range) - R)^2)  (PPO, arXiv 1707.06347)

NeMo-RL hands these losses the logits as the model returned them (its `LossInputType.LOGIT`): with a 16-bit output dtype the
difference and the sigmoid of the preference run in 16 bits. `upcast=True` converts first; results are then float32.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.checks import check_flag
from toolkit.errors import SpecError


def preference_loss(
    chosen_N: torch.Tensor, rejected_N: torch.Tensor, *, beta: float = 1.0, upcast: bool = True
) -> torch.Tensor:
    """Bradley-Terry loss of pairs, a scalar in nats.

    Args:
        chosen_N, rejected_N: [N] scores, any floating dtype.
        beta: scale of the score difference, above 0.
        upcast: compute in float32 (float64 scores stay so); False computes in the scores' own dtype.

    Raises:
        SpecError: no pairs, shapes or dtypes that do not fit, beta not above 0.
    """
    _check(chosen_N=chosen_N, rejected_N=rejected_N)
    if not beta > 0:
        raise SpecError(f"beta={beta!r} must be above 0.")
    chosen_N, rejected_N = _upcast(upcast, chosen_N, rejected_N)
    return -torch.nn.functional.logsigmoid(beta * (chosen_N - rejected_N)).mean()


def preference_accuracy(chosen_N: torch.Tensor, rejected_N: torch.Tensor) -> tuple[float, float]:
    """Share of pairs ordered rightly, and share of ties (which are not); the subtraction plays no part in either.

    Raises:
        SpecError: no pairs, shapes or dtypes that do not fit.
    """
    _check(chosen_N=chosen_N, rejected_N=rejected_N)
    right, tied = (chosen_N > rejected_N).double().mean(), (chosen_N == rejected_N).double().mean()
    return float(right), float(tied)


def value_loss(
    values_N: torch.Tensor,
    returns_N: torch.Tensor,
    *,
    old_values_N: torch.Tensor | None = None,
    clip_range: float | None = None,
    upcast: bool = True,
) -> torch.Tensor:
    """Half the mean squared error of values, clipped as in PPO if `clip_range` is given; a scalar.

    With float32 returns torch's type promotion computes the error in float32 whatever the values' dtype.

    Raises:
        SpecError: no values, shapes or dtypes that do not fit, one of clip_range and old_values_N without the other.
    """
    given = {"values_N": values_N, "returns_N": returns_N}
    if (clip_range is None) != (old_values_N is None):
        raise SpecError("give clip_range and old_values_N together: values are clipped to old_values_N -+ clip_range.")
    _check(**given if old_values_N is None else given | {"old_values_N": old_values_N})
    values_N, returns_N = _upcast(upcast, values_N, returns_N)
    squares_N = (values_N - returns_N).square()
    if clip_range is not None and old_values_N is not None:
        (old_N,) = _upcast(upcast, old_values_N)
        clipped_N = torch.minimum(torch.maximum(values_N, old_N - clip_range), old_N + clip_range)
        squares_N = torch.maximum(squares_N, (clipped_N - returns_N).square())
    return 0.5 * squares_N.mean()


def _upcast(upcast: bool, *tensors: torch.Tensor) -> list[torch.Tensor]:
    check_flag("upcast", upcast)
    return [t.float() if upcast and t.dtype.itemsize < 4 else t for t in tensors]


def _check(**tensors: Any) -> None:
    shapes = {}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise SpecError(
                f"{name} is {getattr(value, 'dtype', type(value).__name__)}; it must be a floating-point tensor."
            )
        shapes[name] = tuple(value.shape)
    if len(set(shapes.values())) > 1 or len(next(iter(shapes.values()))) != 1:
        raise SpecError(f"{', '.join(f'{k} {v}' for k, v in shapes.items())}: give one dimension of equal length.")
    if next(iter(shapes.values())) == (0,):
        raise SpecError(f"{next(iter(shapes))} is empty; give at least one.")
