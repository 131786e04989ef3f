"""16-bit matrix products on CPUs that have no instructions for them: in float32, rounded once.

torch multiplies bfloat16 and float16 matrices with oneDNN from AVX-512 on. On a CPU with AVX2 only (many laptops and cloud
machines) it falls back to plain loops, 10 to 60 times slower than float32; they too sum in float32 and round at the end, so
the numbers here differ from theirs in the order of the sum only.

Shapes: [M, K] times [K, N]. The longest of the three is cut into blocks, so that what is held in float32 stays small beside
the matrices, and memory reports stay true.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

_BLOCK = 256  # rows, columns or terms at a time
_BATCHED = 2**17  # elements of batched factors and products at a time
_SIXTEEN_BITS = (torch.bfloat16, torch.float16)

_running = False


@contextlib.contextmanager
def float32_products() -> Iterator[None]:
    """Take products of 16-bit CPU matrices by way of float32, where the CPU has nothing better; elsewhere do nothing."""
    global _running
    before = _running
    if lacks_16_bit_products():
        _install()
        _running = True
    try:
        yield
    finally:
        _running = before


def lacks_16_bit_products() -> bool:
    """Whether torch multiplies 16-bit matrices in plain loops here."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def product(
    a_MK: torch.Tensor,
    b_KN: torch.Tensor,
    plus_MN: torch.Tensor | None = None,
    mm: Callable[..., torch.Tensor] = torch.mm,
) -> torch.Tensor:
    """`a @ b`, or `plus + a @ b`, of 16-bit matrices in their dtype: summed in float32, rounded once."""
    (m, k), n = a_MK.shape, b_KN.shape[1]
    result_MN = a_MK.new_empty(m, n)

    def put(rows: slice, columns: slice, sum_MN: torch.Tensor) -> None:
        result_MN[rows, columns] = sum_MN if plus_MN is None else sum_MN + plus_MN[rows, columns]

    everything = slice(None)
    if k >= max(m, n):
        sum_MN = torch.zeros(m, n, device=a_MK.device)
        for terms in _blocks(k):
            sum_MN += mm(a_MK[:, terms].float(), b_KN[terms].float())
        put(everything, everything, sum_MN)
    elif m >= n:
        wide_KN = b_KN.float()
        for rows in _blocks(m):
            put(rows, everything, mm(a_MK[rows].float(), wide_KN))
    else:
        wide_MK = a_MK.float()
        for columns in _blocks(n):
            put(everything, columns, mm(wide_MK, b_KN[:, columns].float()))
    return result_MN


def batched_product(a_BMK: torch.Tensor, b_BKN: torch.Tensor, bmm: Callable[..., torch.Tensor] = torch.bmm) -> torch.Tensor:
    """The same of many pairs of small matrices."""
    (batch, m, k), n = a_BMK.shape, b_BKN.shape[2]
    result_BMN = a_BMK.new_empty(batch, m, n)
    for pairs in _blocks(batch, max(1, _BATCHED // max(1, m * k + k * n + m * n))):
        result_BMN[pairs] = bmm(a_BMK[pairs].float(), b_BKN[pairs].float())
    return result_BMN


def _blocks(length: int, block: int = _BLOCK) -> list[slice]:
    return [slice(start, start + block) for start in range(0, length, block)]


@functools.cache
def _install() -> torch.library.Library:
    """Put our kernels before torch's for the CPU, once in a process; each hands on what it is not for."""
    library = torch.library.Library("aten", "IMPL")
    own = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in ("mm", "bmm", "addmm")}

    def is_ours(*factors: torch.Tensor) -> bool:
        return _running and all(factor.dtype in _SIXTEEN_BITS for factor in factors)

    def mm(keys: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        plain = functools.partial(own["mm"].call_boxed, keys)
        return product(a, b, mm=plain) if is_ours(a, b) else plain(a, b)

    def bmm(keys: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        plain = functools.partial(own["bmm"].call_boxed, keys)
        return batched_product(a, b, plain) if is_ours(a, b) else plain(a, b)

    def addmm(keys: Any, c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
        if is_ours(a, b, c) and beta == alpha == 1:
            return product(a, b, c.expand(len(a), b.shape[1]), functools.partial(own["mm"].call_boxed, keys))
        return own["addmm"].call_boxed(keys, c, a, b, beta=beta, alpha=alpha)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # we mean to override
        for name, kernel in (("mm", mm), ("bmm", bmm), ("addmm", addmm)):
            library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)
    return library
