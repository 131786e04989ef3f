"""16-bit products by way of float32: as exact as torch's own, and only where they are asked for."""

from __future__ import annotations

import pytest
import torch

from toolkit import products
from toolkit.products import batched_product, float32_products, lacks_16_bit_products, product

SHAPES = [(700, 33, 41), (33, 700, 41), (33, 41, 700), (300, 300, 300), (1, 5, 1), (0, 4, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_rounded_once(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Within half a unit in the last place of float64, and what float32 sums lose."""
    m, k, n = shape
    a, b, c = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype).t(), torch.randn(n).to(dtype).expand(m, n)
    for found, exact in (
        (product(a, b), a.double() @ b.double()),
        (product(a, b, c), c.double() + a.double() @ b.double()),
    ):
        assert found.dtype is dtype
        half_unit = exact.abs() * torch.finfo(dtype).eps / 2
        assert bool(((found.double() - exact).abs() <= half_unit + 1e-4).all())


def test_batched_products_are_products() -> None:
    a, b = torch.randn(5000, 6, 8).bfloat16(), torch.randn(5000, 7, 8).bfloat16().transpose(1, 2)
    exact = a.double() @ b.double()
    assert bool(((batched_product(a, b).double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all())


def test_they_act_inside_the_region_only_and_for_16_bits_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(products, "lacks_16_bit_products", lambda: True)
    monkeypatch.setattr(products, "product", lambda a, b, *_, **__: seen.append((*a.shape, b.shape[1])) or a.new_ones(2, 4))
    a, weight = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4, 3, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(a, weight)
    with float32_products():
        assert torch.equal(torch.nn.functional.linear(a, weight), torch.ones(2, 4, dtype=torch.bfloat16))
        assert float((a.float() @ weight.float().t()).sum()) == 24.0
        assert float((a.float() @ weight.float().t()).sum()) == 24.0
    assert torch.equal(torch.nn.functional.linear(a, weight), expected)
    assert seen == [(2, 3, 4)]


def test_gradients_and_biases_go_the_same_way() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Linear(24, 48).bfloat16()
    inputs = torch.randn(300, 24, dtype=torch.bfloat16, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        output = layer(inputs)
        return [output.detach(), *torch.autograd.grad(output.float().square().sum(), [inputs, *layer.parameters()])]

    mine, torchs = [], gradients()
    with float32_products():
        mine = gradients()
    for ours, theirs in zip(mine, torchs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=0.02 * float(theirs.abs().max()))


@pytest.mark.skipif(not lacks_16_bit_products(), reason="this CPU has 16-bit products of its own")
def test_where_the_cpu_has_none_they_are_several_times_faster() -> None:
    from torch.utils.benchmark import Timer

    a, b = torch.randn(512, 512).bfloat16(), torch.randn(512, 512).bfloat16()
    timer = Timer("a @ b", globals={"a": a, "b": b})
    torchs = timer.timeit(3).median
    with float32_products():
        assert timer.timeit(3).median < torchs / 2
