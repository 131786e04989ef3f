"""Logprobs without logits against a float64 oracle: value, every gradient, entropy; that no [N, V] tensor is ever made."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit as tk
from tests.allocations import allocations
from toolkit import linear_head as module
from toolkit.errors import SpecError
from toolkit.linear_head import linear_logprobs
from toolkit.logprobs import token_logprobs
from toolkit.policy import Policy

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class Problem:
    """Operands, and everything about them in float64."""

    def __init__(
        self,
        dtype: torch.dtype,
        rows: int,
        hidden: int,
        vocab: int,
        *,
        temperature: float = 1.0,
        shift: float = 0.0,
        softcap: float | None = None,
        bias: bool = False,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.temperature, self.softcap = temperature, softcap
        hidden_NH = torch.randn(rows, hidden, generator=generator)
        weight_VH = torch.randn(vocab, hidden, generator=generator) * 4 / math.sqrt(hidden)
        hidden_NH[:, 0], weight_VH[:, 0] = 1.0, shift  # every logit of a row moves by the same
        self.hidden, self.weight = hidden_NH.to(dtype).requires_grad_(), weight_VH.to(dtype).requires_grad_()
        self.bias = torch.randn(vocab, generator=generator).to(dtype).requires_grad_() if bias else None
        self.targets = torch.randint(vocab, (rows,), generator=generator)
        self.grad_logprob = torch.randn(rows, generator=generator)
        self.grad_entropy = torch.randn(rows, generator=generator)

    def ours(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found = linear_logprobs(
            self.hidden, self.weight, self.targets, bias=self.bias, temperature=self.temperature, softcap=self.softcap,
            with_entropy=True, **options,
        )  # fmt: skip
        assert isinstance(found, tuple)
        return found

    def oracle(self, *, entropy_counts: bool) -> dict[str, Any]:
        hidden, weight = self.hidden.detach().double().requires_grad_(), self.weight.detach().double().requires_grad_()
        bias = None if self.bias is None else self.bias.detach().double().requires_grad_()
        z = hidden @ weight.t() + (0 if bias is None else bias)
        if self.softcap is not None:
            z = self.softcap * torch.tanh(z / self.softcap)
        z.retain_grad()
        logp = torch.log_softmax(z / self.temperature, -1)
        entropy = -(logp.exp() * logp.clamp(min=-1e30)).sum(-1)
        chosen = logp.gather(-1, self.targets[:, None])[:, 0]
        loss = (chosen * self.grad_logprob).sum() + (entropy * self.grad_entropy).sum() * entropy_counts
        loss.backward()
        size = hidden.detach().abs() @ weight.detach().abs().t() + (0 if bias is None else bias.detach().abs())
        # float32 rounds the products' sum and z/T: some units in the last place of the largest partial sum.
        delta = 6e-7 * (float(size.max()) / self.temperature + 1)
        p, g = logp.exp().detach(), self.grad_logprob.abs()[:, None]
        terms = g * (p + torch.nn.functional.one_hot(self.targets, len(weight)))
        if entropy_counts:
            terms = terms + self.grad_entropy.abs()[:, None] * p * (-logp.detach().clamp(min=-1e30) + entropy[:, None] + 1)
        assert z.grad is not None
        return {
            "logprobs": chosen.detach(),
            "entropy": entropy.detach(),
            "delta": delta,
            "hidden": hidden.grad,
            "weight": weight.grad,
            "bias": None if bias is None else bias.grad,
            "grad_logits": z.grad.abs(),  # each of these is rounded to 16 bits, so errors are relative to their sizes
            "terms": terms.detach() / self.temperature,  # each of these inherits the logprob's error
        }


def check_against_oracle(problem: Problem, *, entropy_counts: bool, **options: Any) -> None:
    exact = problem.oracle(entropy_counts=entropy_counts)
    logprobs, entropy = problem.ours(**options)
    assert logprobs.dtype == entropy.dtype == torch.float32
    delta = exact["delta"]
    assert float((logprobs.detach().double() - exact["logprobs"]).abs().max()) <= delta
    assert float((entropy.detach().double() - exact["entropy"]).abs().max()) <= delta * (1 + float(exact["entropy"].max()))
    loss = (logprobs * problem.grad_logprob).sum() + (entropy * problem.grad_entropy).sum() * entropy_counts
    loss.backward()
    dtype = problem.hidden.dtype
    # Rounded three times at most: the logit's gradient, each tile's product (bfloat16), the result. Below float16's
    # normal range the result's error is absolute.
    rounding, floor = 2 * torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    per_logit = rounding * exact["grad_logits"] + 6 * delta * exact["terms"]
    bounds = {
        "hidden": per_logit @ problem.weight.detach().double().abs(),
        "weight": per_logit.t() @ problem.hidden.detach().double().abs(),
        "bias": per_logit.sum(0),
    }
    for name, bound in bounds.items():
        leaf = getattr(problem, name)
        if leaf is None:
            continue
        assert leaf.grad.dtype == leaf.dtype
        excess = (leaf.grad.double() - exact[name]).abs() - bound
        assert float(excess.max()) <= floor, name


@settings(max_examples=120, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 23),
    hidden=st.integers(1, 40),
    vocab=st.integers(1, 70),
    tile=st.tuples(st.integers(1, 25), st.integers(1, 80), st.integers(1, 25)),
    temperature=st.sampled_from([0.3, 0.5, 0.7, 1.0, 2.0]),
    shift=st.sampled_from([0.0, 60.0, -60.0]),
    softcap=st.sampled_from([None, None, 8.0]),
    bias=st.booleans(),
    entropy_counts=st.booleans(),
    two_sweeps=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_values_and_gradients_match_float64_at_any_shape(
    dtype: torch.dtype, rows: int, hidden: int, vocab: int, tile: tuple[int, int, int], temperature: float, shift: float,
    softcap: float | None, bias: bool, entropy_counts: bool, two_sweeps: bool, seed: int,
) -> None:  # fmt: skip
    """Tiles of any size against any shape: what hangs over an edge must neither be lost nor counted twice.

    Logits all near -60 are what shows a phantom column: its logit of 0 would take all the probability.
    """
    problem = Problem(
        dtype, rows, hidden, vocab, temperature=temperature, shift=shift, softcap=softcap, bias=bias, seed=seed
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TILE_COLUMNS", tile[1])
        patch.setattr(module, "_BLOCK_ROWS", tile[2])
        patch.setattr(module, "_SMALL_BYTES", 0 if two_sweeps else 2**20)
        check_against_oracle(problem, entropy_counts=entropy_counts, chunk_tokens=tile[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab", [2500, 2048])
def test_values_and_gradients_match_float64_at_the_real_tile_size(dtype: torch.dtype, vocab: int) -> None:
    check_against_oracle(Problem(dtype, 700, 48, vocab, temperature=0.7, shift=-60.0), entropy_counts=True)


def test_16_bit_operands_lose_nothing_that_16_bit_logits_lose() -> None:
    """Four orders: what a 16-bit head rounds away, kept. Logits ~ N(0, 4²)."""
    problem = Problem(torch.bfloat16, 256, 256, 8000, temperature=0.7)
    exact = problem.oracle(entropy_counts=False)["logprobs"]
    kept, _ = problem.ours()
    rounded, _ = problem.ours(float32_logits=False)
    plain = token_logprobs(problem.hidden @ problem.weight.t(), problem.targets, temperature=0.7)
    kept_error, rounded_error, plain_error = (
        float((x.detach().double() - exact).abs().max()) for x in (kept, rounded, plain)
    )
    assert kept_error < 1e-5
    assert plain_error > 1e-2
    assert rounded_error == pytest.approx(plain_error, rel=0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_an_entropy_it_returns_one_tensor_of_the_same_bits(dtype: torch.dtype) -> None:
    problem = Problem(dtype, 9, 16, 50)
    alone = linear_logprobs(problem.hidden, problem.weight, problem.targets, chunk_tokens=4)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, problem.ours(chunk_tokens=4)[0])


def test_ignored_positions_take_no_part() -> None:
    problem = Problem(torch.float32, 6, 8, 11)
    problem.targets[[0, 3]] = -100
    with torch.no_grad():
        problem.hidden[0] = math.nan  # as an uninitialised pad row may be
    logprobs, entropy = problem.ours()
    assert logprobs[[0, 3]].tolist() == entropy[[0, 3]].tolist() == [0.0, 0.0]
    (logprobs + entropy).sum().backward()
    assert problem.hidden.grad is not None
    assert problem.hidden.grad[[0, 3]].abs().max() == 0.0
    rest = Problem(torch.float32, 6, 8, 11)
    counted = [1, 2, 4, 5]
    alone = linear_logprobs(rest.hidden[counted], rest.weight, rest.targets[counted])
    assert torch.equal(alone, logprobs[counted])


def test_a_batch_of_nothing_but_ignored_positions_still_gives_every_parameter_a_gradient() -> None:
    """A parameter without one would make FSDP2's ranks disagree about what to reduce."""
    problem = Problem(torch.bfloat16, 3, 4, 5, bias=True)
    problem.targets[:] = -100
    torch.use_deterministic_algorithms(True)  # fills memory that nobody wrote with NaN
    try:
        logprobs, entropy = problem.ours()
        (logprobs + entropy).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    for leaf in (problem.hidden, problem.weight, problem.bias):
        assert leaf is not None
        assert leaf.grad is not None
        assert leaf.grad.abs().max() == 0.0


@pytest.mark.parametrize("columns", [4, 1024])
def test_masked_and_padded_vocabulary_has_no_probability_and_no_gradient(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padding left out by slicing, or masked by a bias of -inf, is as if it did not exist; so are whole tiles of it."""
    monkeypatch.setattr(module, "_TILE_COLUMNS", columns)
    real, padded = 9, 17
    problem = Problem(torch.float32, 5, 8, padded)
    problem.targets %= real
    with torch.no_grad():
        problem.weight[real:] = 1e3
    bias = torch.zeros(padded)
    bias[real:] = -math.inf
    expected = token_logprobs(problem.hidden @ problem.weight[:real].t(), problem.targets)
    for weight, extra in ((problem.weight[:real], None), (problem.weight, bias)):
        problem.weight.grad = None
        logprobs, entropy = linear_logprobs(problem.hidden, weight, problem.targets, bias=extra, with_entropy=True)
        torch.testing.assert_close(logprobs, expected)
        (logprobs + entropy).sum().backward()
        assert problem.weight.grad is not None
        assert problem.weight.grad[:real].abs().min() > 0
        assert problem.weight.grad[real:].abs().max() == 0.0
    masked_first = torch.zeros(padded)
    masked_first[:8] = -math.inf  # a running maximum that starts at -inf
    problem.targets[:] = 8
    late = linear_logprobs(problem.hidden, problem.weight[:real], problem.targets, bias=masked_first[:real])
    assert late.detach().abs().max() < 1e-6


def test_a_target_that_is_masked_has_no_probability() -> None:
    problem = Problem(torch.float32, 3, 4, 6)
    bias = torch.zeros(6)
    bias[2] = -math.inf
    problem.targets[:] = torch.tensor([2, 0, 1])
    logprobs = linear_logprobs(problem.hidden, problem.weight, problem.targets, bias=bias)
    assert isinstance(logprobs, torch.Tensor)
    assert logprobs[0] == -math.inf
    assert logprobs[1:].isfinite().all()


def test_a_frozen_operand_gets_no_gradient_and_costs_none() -> None:
    problem = Problem(torch.bfloat16, 5, 8, 12)
    problem.weight.requires_grad_(False)
    problem.ours()[0].sum().backward()
    assert problem.hidden.grad is not None
    assert problem.weight.grad is None


def test_an_operand_edited_between_forward_and_backward_is_noticed() -> None:
    problem = Problem(torch.float32, 5, 8, 12)
    logprobs, _ = problem.ours()
    with torch.no_grad():
        problem.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()


def test_autocast_and_the_processes_matmul_mode_change_nothing_and_are_left_alone() -> None:
    problem = Problem(torch.float32, 40, 64, 300)
    expected = problem.ours()[0]
    before = torch.backends.mkldnn.matmul.fp32_precision
    with torch.autocast("cpu", torch.bfloat16):
        found = problem.ours()[0]
    assert torch.equal(found, expected)
    narrow = Problem(torch.bfloat16, 40, 64, 300)
    narrow.ours()[0].sum().backward()
    assert torch.backends.mkldnn.matmul.fp32_precision == before


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(result)
        self.numel = max(self.numel, *(t.numel() for t in leaves if isinstance(t, torch.Tensor)), 0)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_of_the_logits_size_is_ever_made_and_nothing_of_it_is_saved(dtype: torch.dtype) -> None:
    rows, hidden, vocab = 1024, 32, 16384
    problem = Problem(dtype, rows, hidden, vocab, softcap=20.0)
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    inputs = {t.untyped_storage()._cdata for t in (problem.hidden, problem.weight)}
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        logprobs, entropy = problem.ours()
        torch.autograd.backward([logprobs, entropy], [problem.grad_logprob, problem.grad_entropy])
    assert largest.numel == max(rows * module._TILE_COLUMNS, vocab * hidden)  # one tile's gradient, or the weight's
    assert sum(n for key, n in saved.items() if key not in inputs) <= 24 * rows  # targets 8; three float32 results


def peak_bytes(rows: int, hidden: int, vocab: int) -> int:
    """Most bytes of the CPU allocator during forward and backward, beyond the inputs and the two gradients."""
    problem = Problem(torch.bfloat16, rows, hidden, vocab)
    with allocations() as found:
        problem.ours()[0].sum().backward()
    return found.peak_bytes - 2 * (rows + vocab) * hidden


def test_memory_does_not_grow_with_the_number_of_tokens() -> None:
    """Beyond gradients: a tile, its gradient, small sums. 8 times the tokens, the same but for a few numbers per token."""
    vocab, hidden = 2048, 16
    few, many = peak_bytes(4096, hidden, vocab), peak_bytes(8 * 4096, hidden, vocab)
    logits = 4 * 4096 * vocab  # bytes of one float32 [N, V], for the few
    assert few <= 0.5 * logits
    assert many <= few + 7 * 4096 * (4 * hidden + 64)  # hidden's gradient in float32 (32 MiB at most), sixteen numbers
    assert many <= 0.10 * 8 * logits


def sharded(policy: Policy, problem: dict[str, Any], sizes: tuple[int, int], two_sweeps: bool) -> tuple[torch.Tensor, ...]:
    group, rank = policy.mesh["tp"].get_group(), policy.mesh["tp"].get_local_rank()
    mine = slice(0, sizes[0]) if rank == 0 else slice(sizes[0], sum(sizes))
    hidden = problem["hidden"].clone().requires_grad_()
    weight, bias = (problem[name][mine].clone().requires_grad_() for name in ("weight", "bias"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TILE_COLUMNS", 5)
        patch.setattr(module, "_BLOCK_ROWS", 8)
        patch.setattr(module, "_SMALL_BYTES", 0 if two_sweeps else 2**20)
        logprobs, entropy = linear_logprobs(
            hidden, weight, problem["targets"], bias=bias, temperature=0.7, with_entropy=True, group=group, chunk_tokens=3
        )
        ((logprobs * problem["g"]).sum() + (entropy * problem["e"]).sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert bias.grad is not None
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad, bias.grad


@pytest.fixture(scope="module")
def tensor_parallel() -> Any:
    with tk.launch(model=tk.tiny_policy(), ranks=2, tensor_parallel_size=2) as session:
        yield session


@pytest.mark.parametrize("sizes", [(12, 11), (23, 0), (0, 23), (1, 22)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("two_sweeps", [False, True])
def test_two_shards_of_the_vocabulary_give_what_one_gives(
    sizes: tuple[int, int], dtype: torch.dtype, two_sweeps: bool, tensor_parallel: tk.Session
) -> None:
    problem = Problem(dtype, 19, 16, 23, temperature=0.7, bias=True)
    with torch.no_grad():
        problem.bias.sub_(60.0)
    problem.targets[:4] = torch.tensor([11, 12, 0, 22])  # on both sides of the edge, and at both ends
    problem.targets[4] = -100
    given = {n: getattr(problem, n).detach() for n in ("hidden", "weight", "bias", "targets")}
    given |= {"g": problem.grad_logprob, "e": problem.grad_entropy}
    logprobs, entropy = problem.ours()
    ((logprobs * problem.grad_logprob).sum() + (entropy * problem.grad_entropy).sum()).backward()
    results = tensor_parallel.run(sharded, given, sizes, two_sweeps)
    close = {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for found in results:
        torch.testing.assert_close(found[0], logprobs.detach(), rtol=1e-6, atol=4e-5)
        torch.testing.assert_close(found[1], entropy.detach(), rtol=1e-6, atol=4e-5)
        torch.testing.assert_close(found[2], problem.hidden.grad, **close)
    for index, leaf in ((3, problem.weight), (4, problem.bias)):
        assert leaf is not None
        torch.testing.assert_close(torch.cat([found[index] for found in results]), leaf.grad, **close)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"targets": torch.tensor([0, 4])}, r"targets lie in \[0, 4\], outside the vocabulary \[0, 4\); -100 marks"),
    ({"targets": torch.tensor([-1, 0])}, "outside the vocabulary"),
    ({"targets": torch.tensor([0.0, 1.0])}, "must be int64"),
    ({"targets": torch.tensor([0])}, "must have hidden's leading shape"),
    ({"targets": [0, 1]}, "targets is a list; it must be a torch tensor"),
    ({"hidden": torch.zeros(2, 3, dtype=torch.int64)}, "hidden has dtype torch.int64"),
    ({"hidden": torch.zeros(2, 3, dtype=torch.float64)}, "must be float32, bfloat16 or float16"),
    ({"hidden": torch.zeros(2, 3).bfloat16()}, r"hidden.to\(weight.dtype\)"),
    ({"hidden": torch.zeros(2, 5)}, r"must be \[..., H\] and \[V, H\]"),
    ({"weight": torch.zeros(4, 3, 1)}, r"must be \[..., H\] and \[V, H\]"),
    ({"weight": torch.zeros(4, 3, device="meta")}, "weight is on meta and hidden on cpu"),
    ({"bias": torch.zeros(3)}, r"must be \[4\]"),
    ({"bias": torch.zeros(4, dtype=torch.int64)}, "one float for each row of weight"),
    ({"temperature": 0.0}, "logits are divided by it"),
    ({"temperature": -1.0}, "at least 0.001"),
    ({"softcap": 0.0}, "softcap=0.0 must be a finite number above 0"),
    ({"softcap": math.inf}, "softcap=inf"),
    ({"softcap": True}, "softcap=True"),
    ({"chunk_tokens": 0}, "chunk_tokens=0"),
]


@pytest.mark.parametrize(("change", "reason"), BAD)
def test_bad_input_is_named(change: dict[str, Any], reason: str) -> None:
    options = {"hidden": torch.zeros(2, 3), "weight": torch.zeros(4, 3), "targets": torch.tensor([0, 1]), **change}
    with pytest.raises(SpecError, match=reason):
        tk.linear_logprobs(**options)


def refuse_dtensor(policy: Policy) -> str:
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = distribute_tensor(torch.zeros(4, 3), policy.mesh["tp"], [Shard(0)])
    with pytest.raises(SpecError) as error:
        linear_logprobs(torch.zeros(2, 3), weight, torch.tensor([0, 1]))
    return str(error.value)


def test_a_sharded_weight_is_refused_with_what_would_have_gone_wrong(tensor_parallel: tk.Session) -> None:
    for message in tensor_parallel.run(refuse_dtensor):
        assert message.startswith("weight is a DTensor")
        assert "full_tensor() would give a gradient that is wrong" in message
