"""Precision edges that are arithmetic on what a model's head was given and what came out of it.

Shapes: _N scored tokens, _H hidden, _V vocabulary.

A causal model has no reward head, so the losses on raw outputs take its logit of one token (end of sequence) for a score.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.checks import is_power_of_two
from toolkit.edge_report import MADE_UP, Edge, unmeasured
from toolkit.logprobs import token_logprobs
from toolkit.raw_losses import preference_accuracy, preference_loss, value_loss
from toolkit.rounding import (
    normal_logits,
    rounded_temperature,
    temperature_order_error,
    temperature_rounding_error,
)

TEMPERATURES = (0.3, 0.5, 0.7, 0.9, 1.0, 1.3, 1.7, 2.0)
#: The distribution of logits for which the reviewed figure of 2.7 % at T=0.7 holds.
REFERENCE_STD, REFERENCE_VOCAB, _REFERENCE_ROWS = 5.0, 128256, 8
REFERENCE = f"made-up logits N(0, {REFERENCE_STD:.0f}²), V={REFERENCE_VOCAB}"
_PROBABILITY = "relative, mean over the vocabulary"

PREFERENCE, TIES, ACCURACY, VALUE = (
    "preference loss in bfloat16", "reward ties in bfloat16", "reward accuracy in bfloat16", "value MSE in bfloat16"
)  # fmt: skip
ORDER, HELD = "temperature before the upcast", "temperature held in bfloat16"
HEAD = "float32 head under a bfloat16 root"
#: Of what needs the head's output. Those that need a float32 head are TIES, ACCURACY and HEAD.
NAMES = (PREFERENCE, TIES, ACCURACY, VALUE, ORDER, HELD, HEAD)
_TRANSFORMED = (
    "the model changes what its head emits (a soft-cap or a scale), so the head cannot be run again by itself here; launch "
    "with lm_head_precision='float32' and compare."
)


@dataclass(slots=True)
class HeadRows:
    """What the head was given and what came out of the model, at scored tokens; on the CPU."""

    hidden_NH: torch.Tensor  # in the dtype the head computes in
    logits_NV: torch.Tensor  # bfloat16
    weight_VH: torch.Tensor  # float32 master weights
    bias_V: torch.Tensor | None
    targets_N: torch.Tensor  # int64
    transformed: bool  # whether the logits are something else than the head's output


def float32_head(rows: HeadRows, token: int | None = None) -> torch.Tensor:
    """Logits [N, V] of a head in float32 with its float32 master weights, or [N] of one token."""
    weight_VH, bias_V = rows.weight_VH, rows.bias_V
    if token is not None:
        weight_VH, bias_V = weight_VH[token : token + 1], None if bias_V is None else bias_V[token : token + 1]
    logits = torch.nn.functional.linear(rows.hidden_NH.float(), weight_VH, bias_V)
    return logits if token is None else logits.squeeze(-1)


# ---- losses on raw outputs


def raw_loss_edges(rows: HeadRows, token: int) -> Iterator[Edge]:
    """Preference, reward order and value losses on the logit of one token."""
    scores_N = rows.logits_NV[:, token]
    pairs = torch.tensor(list(itertools.combinations(range(len(scores_N)), 2)), dtype=torch.int64).reshape(-1, 2)
    left, right = pairs[:, 0], pairs[:, 1]
    setting = f"score: bfloat16 logit of token {token} at {len(scores_N)} positions, all pairs"
    if len(left):
        exact = preference_loss(scores_N[left].double(), scores_N[right].double())
        plain, cured = (
            _relative(preference_loss(scores_N[left], scores_N[right], upcast=up), exact) for up in (False, True)
        )
        yield Edge(
            PREFERENCE, f"Bradley-Terry; {setting}", plain, "relative", "upcast the scores first", cured,
            "difference, log-sigmoid and mean are rounded to 8 bits each; the scores' own rounding stays either way",
        )  # fmt: skip
        yield from _order_edges(rows, token, left, right, setting)
    else:
        yield from (
            unmeasured(name, "fewer than two tokens were sampled; sample more.") for name in (PREFERENCE, TIES, ACCURACY)
        )
    yield from _value_edges(rows, scores_N)


def _order_edges(rows: HeadRows, token: int, left: torch.Tensor, right: torch.Tensor, setting: str) -> Iterator[Edge]:
    """Ties and wrong orders among rounded scores, against those of a head in float32."""
    if rows.transformed:
        yield from (unmeasured(name, _TRANSFORMED) for name in (TIES, ACCURACY))
        return
    scores_N, exact_N = rows.logits_NV[:, token], float32_head(rows, token)
    higher = exact_N[left] > exact_N[right]
    chosen, rejected = torch.where(higher, left, right), torch.where(higher, right, left)
    distinct = exact_N[chosen] > exact_N[rejected]
    chosen, rejected = chosen[distinct], rejected[distinct]
    if not len(chosen):
        yield from (unmeasured(name, "no two scores differ, even with a float32 head.") for name in (TIES, ACCURACY))
        return
    (right_share, tied), (upcast_share, upcast_tied), (cured_share, cured_tied) = (
        preference_accuracy(x_N[chosen], x_N[rejected]) for x_N in (scores_N, scores_N.float(), exact_N)
    )
    cure = "a float32 score head (lm_head_precision='float32')"
    yield Edge(
        TIES, setting, tied, "share of pairs", cure, cured_tied,
        f"pairs that a float32 head tells apart; upcasting afterwards leaves {upcast_tied:.2%} tied",
    )  # fmt: skip
    yield Edge(
        ACCURACY, setting, 1 - right_share, "share of pairs", cure, 1 - cured_share,
        f"ties and reversals; upcasting afterwards leaves {1 - upcast_share:.2%} wrong",
    )  # fmt: skip


def _value_edges(rows: HeadRows, values_N: torch.Tensor) -> Iterator[Edge]:
    """Returns are the tokens' float32 logprobs: numbers of the model's own that bfloat16 does not have."""
    returns_N = token_logprobs(rows.logits_NV, rows.targets_N)
    for given_N, setting, finding in (
        (
            returns_N, "float32 returns",
            "nothing to cure: float32 returns make torch compute the error in float32; only the gradient is bfloat16",
        ),
        (
            returns_N.bfloat16(), "bfloat16 returns (cast on their way through a unit)",
            "difference, square and mean are rounded to 8 bits each",
        ),
    ):  # fmt: skip
        exact = value_loss(values_N.double(), given_N.double())
        plain, cured = (_relative(value_loss(values_N, given_N, upcast=up), exact) for up in (False, True))
        yield Edge(VALUE, setting, plain, "relative", "upcast values and returns first", cured, finding)


def _relative(value: torch.Tensor, exact: torch.Tensor) -> float:
    return abs(float(value) / float(exact) - 1)


# ---- the temperature


def temperature_edges(rows: HeadRows, own: float) -> Iterator[Edge]:
    """Dividing before the upcast, over TEMPERATURES; and a temperature rounded to bfloat16 (`own`, if it is not exact)."""
    reference_NV = normal_logits(_REFERENCE_ROWS, REFERENCE_VOCAB, REFERENCE_STD)
    for name, logits_NV, setting in (
        (ORDER, rows.logits_NV, "this model's logits"),
        (f"{ORDER}{MADE_UP}", reference_NV, REFERENCE),
    ):
        for temperature in TEMPERATURES:
            plain, cured = (
                float(temperature_order_error(z_NV, temperature).mean()) for z_NV in (logits_NV, logits_NV.float())
            )
            yield Edge(
                name, f"T={temperature}, {setting}", plain, _PROBABILITY, "temperature_order='after_upcast'", cured,
                _why_order(temperature), temperature,
            )  # fmt: skip
    odd = own if rounded_temperature(own, torch.bfloat16) != own else 0.7
    held = rounded_temperature(odd, torch.bfloat16)
    plain, cured = (
        float(temperature_rounding_error(rows.logits_NV, odd, dtype).mean()) for dtype in (torch.bfloat16, torch.float32)
    )
    yield Edge(
        HELD, f"T={odd}, this model's logits", plain, _PROBABILITY, "keep it a Python number, or float32", cured,
        f"{odd} becomes {held:.8g} ({held / odd - 1:+.2%}): every distribution is sharpened or flattened alike", odd,
    )  # fmt: skip


def _why_order(temperature: float) -> str:
    if is_power_of_two(temperature):
        return "exactly 0: dividing by a power of two only changes exponents"
    return "z/T is rounded to 8 bits; how much that is depends on the logits' spread and offset"


# ---- a float32 head

REFUSED_TIED = (
    "Refused at launch: one parameter shared with the embedding cannot have two compute dtypes under FSDP2. Untie the "
    "head, or use precision='float32'."
)


def num_experts(text_config: Any) -> int:
    """Routed experts of a layer by a model's text config, 0 for a dense model; families name them differently."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return int(next((n for name in names if (n := getattr(text_config, name, None))), 0))


def head_edges(rows: HeadRows, *, tied: bool) -> Iterator[Edge]:
    """A float32 head whose logits a bfloat16 root rounds back: on this dense head; why not on a tied one."""
    if tied:
        yield unmeasured(HEAD, f"this model's head is tied. {REFUSED_TIED}")
    elif rows.transformed:
        yield unmeasured(HEAD, _TRANSFORMED)
    else:
        yield _head_edge(rows)
    yield unmeasured(f"{HEAD}, tied", REFUSED_TIED if tied else "this model's head is not tied to its embedding.")


def _head_edge(rows: HeadRows) -> Edge:
    logits_NV = float32_head(rows)
    exact_N = torch.log_softmax(logits_NV.double(), -1).gather(-1, rows.targets_N[:, None]).squeeze(-1)
    error, cured, without = (
        float((token_logprobs(z_NV, rows.targets_N) - exact_N).abs().mean())
        for z_NV in (logits_NV.bfloat16(), logits_NV, rows.logits_NV)
    )
    return Edge(
        HEAD, "logprobs of sampled tokens, against a float64 softmax of the float32 head's logits", error, "nats",
        "a float32 root output (the toolkit's with lm_head_precision='float32'), or logits that bypass the root", cured,
        f"the root rounds the head's logits back, silently; without any float32 head it is {without:.1e} nats",
    )  # fmt: skip
