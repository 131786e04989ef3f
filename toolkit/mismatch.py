"""How far two sets of logprobs of the same tokens are apart, under the field's names.

The formulas are NeMo-RL's (`ClippedPGLossFn`), with g the logprobs that made the tokens and p those that score them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the thresholds are read where torch is not loaded
    import torch

#: Above these the field starts to look for a cause: NeMo-RL's documentation for the first three; prime-rl for k3.
THRESHOLDS = {"token_mult_prob_error": 1.05, "gen_kl_error": 1e-3, "policy_kl_error": 1e-3, "k3": 0.015}


def mismatch_sums(g: torch.Tensor, p: torch.Tensor) -> dict[str, float]:
    """Sums over tokens of each mismatch measure; divide by the number of tokens for the metric.

    Args:
        g, p: [N] float, logprobs in nats of the tokens that count.

    Returns:
        token_mult_prob_error: exp(|g - p|), the factor by which the probability is off.
        gen_kl_error: e^(p-g) - 1 - (p-g), k3 (Schulman's estimator) of KL(g || p).
        policy_kl_error: the same with g and p exchanged (the samples are g's, so it is biased).
        js_divergence_error: the mean of both k3 against the logprob of the even mixture.
        sampling_importance_ratio: e^(p-g).
        k1: g - p.
    """
    g, p = g.double(), p.double()
    diff = p - g
    mixture = g.logaddexp(p) - math.log(2)
    sums = {
        "token_mult_prob_error": diff.abs().exp(),
        "gen_kl_error": diff.expm1() - diff,
        "policy_kl_error": (-diff).expm1() + diff,
        "js_divergence_error": 0.5 * (_k3(p - mixture) + _k3(g - mixture)),
        "sampling_importance_ratio": diff.exp(),
        "k1": -diff,
    }
    return {name: float(value.sum()) for name, value in sums.items()}


def _k3(x: torch.Tensor) -> torch.Tensor:
    return x.expm1() - x
