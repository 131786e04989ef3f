"""Attention on CPUs: torch's fused kernel, but for short 16-bit sequences its unfused form.

On CPUs without matrix units the backward of torch's fused kernel sets up a matrix product of its own for every sequence and
head, in 16-bit dtypes and from 16 x 16 x 16 multiply-adds on. At 256 sequences of 12 tokens, 4 heads of 32, that is 93 ms
where the unfused form takes 4 (at 11 tokens: 9), and most of a training step. Past about 128 tokens the fused one is faster
again and, unlike the unfused, holds no scores.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface

CPU_SDPA = "sdpa_on_cpus"
_LONGEST = 128  # tokens, of queries and keys


def attention_name(asked: str | None, device_type: str) -> str:
    """The name under which transformers knows the attention that was asked for; None asks for torch's own choice."""
    return CPU_SDPA if device_type == "cpu" and asked in (None, "sdpa") else asked or "sdpa"


def _attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, **options: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """torch's scaled_dot_product_attention as transformers calls it; query is [B, heads, T, head size]."""
    in_16_bits = query.dtype in (torch.bfloat16, torch.float16)
    short = in_16_bits and query.shape[2] * key.shape[2] <= _LONGEST**2
    with sdpa_kernel(SDPBackend.MATH) if short else contextlib.nullcontext():
        result: tuple[torch.Tensor, torch.Tensor | None] = AttentionInterface()["sdpa"](
            module, query, key, value, mask, **options
        )
    return result


AttentionInterface.register(CPU_SDPA, _attention)
AttentionMaskInterface.register(CPU_SDPA, AttentionMaskInterface()["sdpa"])
