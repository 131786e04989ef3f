"""Token logprobs against a float64 oracle, in every mode; what a mode promises in memory is measured in bytes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import toolkit as tk
from toolkit.errors import SpecError
from toolkit.logprobs import next_token_logprobs, token_logprobs
from toolkit.policy import Policy
from toolkit.spec import PolicySpec


def oracle(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """float64, on the stored logits."""
    scaled = logits.double() / temperature
    return scaled.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - scaled.logsumexp(-1)


def oracle_gradient(logits: torch.Tensor, targets: torch.Tensor, temperature: float, grad: torch.Tensor) -> torch.Tensor:
    leaf = logits.detach().double().requires_grad_()
    (oracle(leaf, targets, temperature) * grad.double()).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 17),
    vocab=st.integers(2, 70),
    chunk=st.one_of(st.none(), st.integers(1, 20)),
    temperature=st.sampled_from([0.3, 0.5, 0.7, 1.0, 2.0]),
    shift=st.sampled_from([0.0, 60.0, -60.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**16),
)
def test_value_and_gradient_match_float64_in_every_mode(
    rows: int, vocab: int, chunk: int | None, temperature: float, shift: float, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocab, generator=generator) * 5 + shift).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (rows,), generator=generator)
    weights = torch.randn(rows, generator=generator)
    logprobs = token_logprobs(logits, targets, temperature=temperature, chunk_rows=chunk)
    assert logprobs.dtype == torch.float32
    # float32 rounds z/T (up to 65 / 0.3 nats) once: half an ulp of 256 is 1.5e-5, and the difference of two such.
    torch.testing.assert_close(logprobs.double(), oracle(logits, targets, temperature), rtol=1e-6, atol=5e-5)
    (logprobs * weights).sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    exact = oracle_gradient(logits, targets, temperature, weights)
    # The gradient is rounded once to the logits' dtype, plus float32 noise of the softmax at large |z/T|.
    bound = torch.finfo(dtype).eps * exact.abs().max().item() + 1e-4 * weights.abs().max().item() / temperature
    assert (logits.grad.double() - exact).abs().max().item() <= bound


def test_known_values() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [2.0, 2.0]])
    torch.testing.assert_close(token_logprobs(logits, torch.tensor([1, 0])), torch.tensor([math.log(0.75), math.log(0.5)]))
    # At T = 0.5 the odds of 3:1 become 9:1.
    torch.testing.assert_close(
        token_logprobs(logits, torch.tensor([1, 0]), temperature=0.5), torch.tensor([math.log(0.9), math.log(0.5)])
    )


def test_a_chunk_leaves_the_callers_float32_logits_alone() -> None:
    logits = torch.randn(8, 5, requires_grad=True)
    before = logits.detach().clone()
    token_logprobs(logits, torch.zeros(8, dtype=torch.int64), temperature=0.7, chunk_rows=3).sum().backward()
    assert torch.equal(logits.detach(), before)


def saved_bytes(logits: torch.Tensor, targets: torch.Tensor, chunk_rows: int | None) -> int:
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    leaf = logits.requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        token_logprobs(leaf, targets, chunk_rows=chunk_rows)
    storages.pop(leaf.untyped_storage()._cdata, None)
    return sum(storages.values())


def test_chunking_is_real_it_saves_no_softmax() -> None:
    rows, vocab = 64, 1024
    logits, targets = torch.randn(rows, vocab).bfloat16(), torch.randint(vocab, (rows,))
    assert saved_bytes(logits, targets, None) >= 4 * rows * vocab  # the float32 log-softmax
    assert saved_bytes(logits, targets, 16) <= 16 * rows  # log-sum-exp (4 B) and targets (8 B) per row


def test_the_reviewed_temperature_error_comes_out_where_it_was_measured() -> None:
    """About 2.7 % at T=0.7 for bfloat16 logits ~ N(0, 5²) over 128256 tokens; nothing where T is a power of two."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(24, 128256, generator=generator) * 5).bfloat16()

    def vocabulary_mean_error(temperature: float) -> float:
        exact = torch.softmax(logits.double() / temperature, -1)
        early = torch.softmax((logits / temperature).double(), -1)
        return float((early / exact - 1).abs().mean())

    assert vocabulary_mean_error(0.7) == pytest.approx(0.027, abs=0.004)
    assert vocabulary_mean_error(0.5) == 0.0
    # And token_logprobs makes that error in one order and not in the other.
    targets = torch.multinomial(torch.softmax(logits.float() / 0.7, -1), 1, generator=generator).squeeze(-1)
    exact = oracle(logits, targets, 0.7)
    after = token_logprobs(logits, targets, temperature=0.7)
    before = token_logprobs(logits, targets, temperature=0.7, temperature_order="before_upcast")
    assert float((after - exact).abs().max()) < 1e-5
    assert 0.01 < float((before - exact).abs().mean()) < 0.05
    at_half = [
        token_logprobs(logits, targets, temperature=0.5, temperature_order=o) for o in ("after_upcast", "before_upcast")
    ]
    assert torch.equal(*at_half)


def test_masked_vocabulary_entries_have_no_probability_and_no_gradient() -> None:
    logits = torch.tensor([[1.0, -math.inf, 2.0]], requires_grad=True)
    for chunk in (None, 1):
        logits.grad = None
        value = token_logprobs(logits, torch.tensor([2]), chunk_rows=chunk)
        value.sum().backward()
        assert value.item() == pytest.approx(-math.log(1 + math.exp(-1)))
        assert logits.grad is not None
        assert logits.grad[0, 1].item() == 0.0


def test_next_token_logprobs_pair_each_token_with_the_logits_before_it() -> None:
    ids_BT = torch.tensor([[3, 1, 2], [0, 2, 4]])
    logits_BTV = torch.randn(2, 3, 5)
    want = torch.stack([oracle(logits_BTV[:, t], ids_BT[:, t + 1]) for t in range(2)], dim=1).float()
    for fields in ({}, {"logprob_mode": "chunked", "logprob_chunk_size": 2}):
        got = next_token_logprobs(logits_BTV, ids_BT, PolicySpec(model="m", **fields), 1.0)
        torch.testing.assert_close(got, want)


BAD = [
    (torch.zeros(2, 3), torch.tensor([0, 3]), 1.0, r"targets lie in \[0, 3\], outside the vocabulary \[0, 3\)"),
    (torch.zeros(2, 3), torch.tensor([-100, 1]), 1.0, "outside the vocabulary"),
    (torch.zeros(2, 3), torch.tensor([0]), 1.0, "differ in their leading shape"),
    (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), 1.0, "must be int64"),
    (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 1]), 1.0, "must be floating point"),
    (torch.zeros(2, 3), torch.tensor([0, 1]), 0.0, "logits are divided by it"),
    (torch.zeros(2, 3), torch.tensor([0, 1]), math.inf, "finite number of at least 0.001"),
    (torch.zeros(2, 3), torch.tensor([0, 1]), 1e-300, "finite number of at least 0.001"),
    (torch.tensor(0.0), torch.tensor(0), 1.0, "no dimension"),
    ([[0.0, 1.0]], torch.tensor([0]), 1.0, "logits is a list; it must be a torch tensor"),
]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"chunk_rows": -1}, "chunk_rows=-1 must be a whole number"),
        ({"chunk_rows": 0}, "chunk_rows=0"),
        ({"chunk_rows": 1.5}, "chunk_rows=1.5"),
        ({"temperature_order": "x"}, "temperature_order='x'"),
    ],
)
def test_bad_options_are_named(options: dict, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        token_logprobs(torch.zeros(2, 3), torch.tensor([0, 1]), **options)


@pytest.mark.parametrize(("logits", "targets", "temperature", "reason"), BAD)
def test_bad_input_is_named(logits: torch.Tensor, targets: torch.Tensor, temperature: float, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        tk.token_logprobs(logits, targets, temperature=temperature)


def vocab_parallel(
    policy: Policy, logits: torch.Tensor, targets: torch.Tensor, chunk: int | None
) -> tuple[torch.Tensor, ...]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    sharded = distribute_tensor(logits, policy.mesh["tp"], [Shard(-1)]).requires_grad_()
    logprobs = token_logprobs(sharded, targets, temperature=0.7, chunk_rows=chunk)
    logprobs.sum().backward()
    assert sharded.grad is not None
    return logprobs.detach(), sharded.grad.redistribute(placements=[Replicate()]).to_local()


def test_logits_sharded_over_the_vocabulary_give_the_same() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 7, 24, generator=generator) * 4 - 60
    targets = torch.randint(24, (3, 7), generator=generator)
    targets[0, :2] = torch.tensor([11, 12])  # on both sides of the shard edge
    exact = oracle_gradient(logits, targets, 0.7, torch.ones(3, 7))
    with tk.launch(model=tk.tiny_policy(), ranks=2, tensor_parallel_size=2) as session:
        for chunk in (None, 4):
            for logprobs, grad in session.run(vocab_parallel, logits, targets, chunk):
                torch.testing.assert_close(logprobs.double(), oracle(logits, targets, 0.7), rtol=1e-6, atol=5e-5)
                torch.testing.assert_close(grad.double(), exact, rtol=1e-5, atol=1e-5)
