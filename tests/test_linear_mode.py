"""Linear mode on real models: the head inside the forward, its gradient, what it returns and holds, how it is switched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit as tk
from toolkit import fsdp
from toolkit.errors import SpecError
from toolkit.logprobs import forward_logprobs
from toolkit.policy import Policy
from toolkit.prompts import make_batch

from .conftest import SMALL
from .test_policy import BATCH, loss_and_gradients, what_units_emit


def relative_errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float((found[name] - grad).norm() / grad.norm()) for name, grad in exact.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_tied_head_in_the_root_unit_gets_the_same_gradient(ranks: int, tied_model: Path) -> None:
    """The embedding's gradient is the sum of both uses; the head's part is lost where it runs outside of the forward."""
    with tk.launch(model=tied_model, precision="float32") as session:
        loss, exact = session.run(loss_and_gradients)[0]
    with tk.launch(model=tied_model, precision="float32", logprob_mode="linear", ranks=ranks) as session:
        for found_loss, found in session.run(loss_and_gradients):
            assert found_loss == pytest.approx(loss, rel=1e-6)
            assert max(relative_errors(found, exact).values()) < 2e-6


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_bfloat16_the_heads_gradient_is_near_the_float32_one(ranks: int) -> None:
    """A head whose gradient is not reduced, or reduced twice, is off by 0.5 and more; bfloat16 explains a few percent."""
    with tk.launch(model=tk.tiny_policy(), precision="float32") as session:
        exact = session.run(loss_and_gradients)[0][1]
    with tk.launch(model=tk.tiny_policy(), logprob_mode="linear", output_dtype="bfloat16", ranks=ranks) as session:
        for _, found in session.run(loss_and_gradients):
            assert relative_errors(found, exact)["lm_head.weight"] < 0.05


@pytest.mark.parametrize("layout", [{}, {"ranks": 2}, {"ranks": 2, "tensor_parallel_size": 2}], ids=str)
def test_no_logits_are_made_in_training(layout: dict[str, int]) -> None:
    with tk.launch(model=tk.tiny_policy(), logprob_mode="linear", **layout) as session:
        report = session.memory(num_sequences=8, sequence_length=129)
        assert report.logit_buffers == []
        assert report.categories["logits"] == report.logit_peak_bytes == 0
        assert max(report.timeline["logits"]) == 0
        report.figure()
        session.set_live(logprob_mode="materialized")  # and where they are made, they are seen
        assert session.memory(num_sequences=8, sequence_length=129).logit_peak_bytes >= 8 * report.logit_elements


def precision_of_logprobs(policy: Policy) -> tuple[str, bool]:
    with torch.no_grad():
        logprobs_BT = forward_logprobs(policy, make_batch(*BATCH, pad_id=0), 1.0)
    fsdp.reshard(policy.model)
    return str(logprobs_BT.dtype), bool((logprobs_BT != logprobs_BT.bfloat16().float()).any())


def test_the_root_and_the_head_return_float32_while_the_blocks_emit_the_picked_dtype() -> None:
    with tk.launch(model=tk.tiny_policy(), logprob_mode="linear", output_dtype="bfloat16", ranks=2) as session:
        for seen in session.run(what_units_emit):
            wide = {name for name, dtypes in seen["emitted"].items() if dtypes == {"torch.float32"}}
            assert wide == {fsdp.ROOT, "lm_head"}
            assert seen["without_gradient"] == []
        assert session.run(precision_of_logprobs) == [("torch.float32", True)] * 2


def test_it_is_switched_live_and_back(two_ranks: tk.Session) -> None:
    ids = [[1, 5, 6, 7, 2], [1, 8, 9, 4, 10, 11, 2]]
    before = two_ranks.logprobs(ids)
    two_ranks.set_live(logprob_mode="linear")
    try:
        linear = two_ranks.logprobs(ids)
        assert two_ranks.grpo_step().metrics["global_valid_toks"] > 0  # samples with a KV cache in this mode too
    finally:
        two_ranks.set_live(logprob_mode="materialized")
    difference = abs(linear - before)[~(before != before)]
    assert 0 < difference.max() < 0.1  # what a bfloat16 head rounds
    assert set(two_ranks.units()["output_dtype"]) == {"float32"}


def test_previous_logprobs_are_those_of_the_training_forward_to_the_bit(one_rank: tk.Session) -> None:
    one_rank.set_live(logprob_mode="linear")
    try:
        metrics = one_rank.grpo_step().metrics
    finally:
        one_rank.set_live(logprob_mode="materialized")
    assert metrics["probs_ratio"] == metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0


def test_a_step_in_float32_is_the_step_of_the_materialized_mode() -> None:
    records = {}
    for mode in ("materialized", "linear"):
        with tk.launch(model=tk.tiny_policy(), precision="float32", logprob_mode=mode, learning_rate=1e-4, **SMALL) as s:
            records[mode] = [s.grpo_step().metrics for _ in range(2)]
    for ours, theirs in zip(records["linear"], records["materialized"], strict=True):
        assert ours["reward"] == theirs["reward"]
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)


def test_the_divergence_of_the_modes_is_what_the_head_rounds_and_says_so() -> None:
    for precision, most in (("bfloat16", 0.1), ("float32", 2e-5)):
        with tk.launch(model=tk.tiny_policy(), precision=precision, **SMALL) as session:
            report = session.divergence({"logprob_mode": "materialized"}, {"logprob_mode": "linear"})
            assert 0 < report.metrics["max_abs_nats"] < most
            assert ("rounds its logits to bfloat16" in report.cause) is (precision == "bfloat16")
    with tk.launch(model=tk.tiny_policy(), logprob_mode="linear", ranks=2, tensor_parallel_size=2, **SMALL) as session:
        assert session.divergence().metrics["max_abs_nats"] < 0.1


def test_a_failure_inside_leaves_the_models_own_forward() -> None:
    def fail(policy: Policy) -> None:
        def raise_here(*_: Any) -> None:
            raise ArithmeticError("planted")

        handle = policy.model.lm_head.register_forward_pre_hook(raise_here)
        try:
            forward_logprobs(policy, make_batch(*BATCH, pad_id=0), 1.0)
        finally:
            handle.remove()

    def own_forwards(policy: Policy) -> list[bool]:
        return ["forward" in vars(module) for module in (policy.model, policy.model.lm_head)]

    with tk.launch(model=tk.tiny_policy(), logprob_mode="linear", lm_head_precision="float32") as session:
        with pytest.raises(ArithmeticError, match="planted"):
            session.run(fail)
        assert session.run(own_forwards) == [[False, True]]  # a float32 head has one of its own
        assert session.run(precision_of_logprobs) == [("torch.float32", True)]


SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 64, "initializer_range": 0.5,
}  # fmt: skip


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[[Any], Path]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def save(config: Any) -> Path:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
        AutoTokenizer.from_pretrained(tk.tiny_policy()).save_pretrained(tmp_path)
        return tmp_path

    return save


def test_with_a_large_vocabulary_the_peak_of_the_step_falls(save_model: Callable[[Any], Path]) -> None:
    """Beyond parameters, moments and gradients nothing of a vocabulary's size is left: a tile, of 1024 columns."""
    from transformers import Qwen3Config

    peaks = {}
    model = save_model(Qwen3Config(**{**SIZES, "vocab_size": 8192}, tie_word_embeddings=False))
    with tk.launch(model=model) as session:
        for mode in ("materialized", "linear"):
            session.set_live(logprob_mode=mode)
            peaks[mode] = session.memory(num_sequences=32, sequence_length=33)
    assert peaks["materialized"].peak_bytes - peaks["linear"].peak_bytes > 10 * peaks["linear"].logit_elements
    assert peaks["linear"].categories["temporaries"] < 0.5 * peaks["linear"].logit_elements * 4


def test_a_models_soft_cap_is_applied(save_model: Callable[[Any], Path]) -> None:
    from transformers import Gemma2Config

    model = save_model(Gemma2Config(**SIZES, final_logit_softcapping=3.0))
    with tk.launch(model=model, precision="float32") as session:
        loss, exact = session.run(loss_and_gradients)[0]
        session.set_live(logprob_mode="linear")
        found_loss, found = session.run(loss_and_gradients)[0]
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert max(relative_errors(found, exact).values()) < 1e-5


def test_a_model_that_scales_its_logits_is_refused_with_the_way_out(save_model: Callable[[Any], Path]) -> None:
    from transformers import GraniteConfig

    model = save_model(GraniteConfig(**SIZES, logits_scaling=8.0))
    with tk.launch(model=model) as session:
        with pytest.raises(SpecError, match="more to its logits than a linear layer.*logprob_mode='chunked'"):
            session.set_live(logprob_mode="linear")
        assert session.spec.logprob_mode == "materialized"
        session.set_live(logprob_mode="chunked")
        session.run(loss_and_gradients)


def test_the_samplers_plain_head_is_named_as_the_cause_in_linear_mode() -> None:
    sampler, trainer = {"logprobs": "sampler"}, {"logprobs": "trainer"}
    with tk.launch(
        model=tk.tiny_policy(), num_prompts_per_step=4, num_generations_per_prompt=4, max_new_tokens=5
    ) as session:
        mixed = session.divergence(sampler, trainer, logprob_mode="linear")
        assert mixed.metrics["mean_abs_nats"] > 1e-3
        assert "the sampler takes the plain head, rounding its logits to bfloat16" in mixed.cause
        same = session.divergence({**sampler, "logprob_mode": "linear"}, {**sampler, "logprob_mode": "materialized"})
        assert same.metrics["max_abs_nats"] == 0.0
        assert "from the plain head in every logprob mode" in same.cause
