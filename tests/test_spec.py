"""Every setting that would do nothing or crash later is refused, with the reason and the way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import toolkit as tk
from toolkit.errors import SpecError
from toolkit.layout import ModelFacts, check_batch, check_layout, check_temperature_order, model_facts
from toolkit.spec import DTYPES, GRPOConfig, PolicySpec, dtype_name, split_fields, torch_dtype


@pytest.mark.parametrize("name", DTYPES)
def test_the_dtype_table_agrees_with_torch(name: str) -> None:
    info, row = torch.finfo(torch_dtype(name)), DTYPES[name]
    assert (row.bytes * 8, row.max_value) == (info.bits, info.max)
    assert 2.0**-row.mantissa_bits == info.eps


@pytest.mark.parametrize(
    ("given", "name"),
    [("float32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32"), (torch.bfloat16, "bfloat16")],
)
def test_aliases_and_torch_dtypes_resolve(given: Any, name: str) -> None:
    assert dtype_name(given) == name
    assert PolicySpec(model="m", output_dtype=given).output_dtype == name


@pytest.mark.parametrize("given", ["float64", "int8", "bfloat", "", None, 3, "fp8"])
def test_an_unknown_dtype_names_itself_the_field_and_the_choices(given: Any) -> None:
    with pytest.raises(SpecError) as error:
        PolicySpec(model="m", output_dtype=given)
    assert f"output_dtype={given!r}" in str(error.value)
    assert "float32, bfloat16, float16" in str(error.value)


def test_numpys_numbers_are_numbers() -> None:
    config = GRPOConfig(num_prompts_per_step=np.int64(4), temperature=np.float32(0.5))
    assert (type(config.num_prompts_per_step), config.num_prompts_per_step) == (int, 4)
    assert (type(config.temperature), config.temperature) == (float, 0.5)


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(SpecError, match="Did you mean 'bfloat16'"):
        PolicySpec(model="m", output_dtype="BFloat16")
    with pytest.raises(SpecError, match="Did you mean 'bfloat16'"):
        PolicySpec(model="m", output_dtype="bflaot16")
    with pytest.raises(SpecError, match="Did you mean 'output_dtype'"):
        split_fields({"ouput_dtype": "float32"})


def test_omitted_output_dtype_is_float32() -> None:
    assert PolicySpec(model="m").output_dtype == "float32"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cast_forward_inputs": False, "autocast": False}, "no matmul accepts"),
    ({"cast_forward_inputs": False, "precision": "float32", "output_dtype": "bfloat16"}, "no matmul accepts"),
    ({"lm_head_precision": "bfloat16"}, "only 'float32' makes a difference"),
    ({"lm_head_precision": "float32", "precision": "float32"}, "changes nothing at precision='float32'"),
    ({"sequence_parallel": True}, "does nothing at tensor_parallel_size=1"),
    ({"logprob_chunk_size": 64}, "does nothing with logprob_mode='materialized'"),
    ({"logprob_mode": "chunked", "logprob_chunk_size": 0}, "at least 1"),
    ({"logprob_mode": "fused"}, "'materialized', 'chunked', 'linear'"),
    ({"logprob_mode": "linear", "logprob_chunk_size": 8}, "makes no logits to upcast"),
    ({"logprob_mode": "linear", "temperature_order": "before_upcast"}, "float32 from the start"),
    ({"sequence_packing": True, "sequence_parallel": True, "tensor_parallel_size": 2}, "a packed row has any length"),
    ({"share_prompt_prefix": True, "sequence_packing": True}, "in its own way"),
    ({"share_prompt_prefix": True, "sequence_parallel": True, "tensor_parallel_size": 2}, "in its own way"),
    ({"share_prompt_prefix": True, "attn_implementation": "eager", "output_dtype": "bfloat16"}, "only 'sdpa' takes"),
    ({"share_prompt_prefix": 1}, "share_prompt_prefix"),
    ({"attn_implementation": "eager"}, "becomes -inf"),
    ({"attn_implementation": "flash"}, "'eager', 'sdpa'"),
    ({"activation_checkpointing": "outside"}, "'full', 'selective', 'hf'"),
    ({"temperature_order": "before"}, "'after_upcast', 'before_upcast'"),
    ({"tensor_parallel_size": 0}, "at least 1"),
    ({"tensor_parallel_size": True}, "whole number"),
    ({"seed": -1}, "at least 0"),
    ({"autocast": "yes"}, "autocast='yes' must be True or False"),
    ({"autocast": 0}, "autocast=0 must be True or False"),
    ({"seed": 2**64}, "at most 4294967295"),
    ({"model": ""}, "must be a folder or a hub id"),
    ({"model": 3}, "must be a folder or a hub id"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED)
def test_a_setting_without_effect_or_future_is_refused_with_its_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        PolicySpec(**{"model": "m", **fields})


def test_what_looks_alike_but_works_is_accepted() -> None:
    PolicySpec(model="m", cast_forward_inputs=False)
    PolicySpec(model="m", cast_forward_inputs=False, autocast=False, output_dtype="bfloat16")
    PolicySpec(model="m", attn_implementation="eager", output_dtype="bfloat16")
    PolicySpec(model="m", activation_checkpointing=True)
    assert PolicySpec(model="m", activation_checkpointing=True).activation_checkpointing == "full"


def test_a_float32_head_keeps_the_root_from_rounding_it_back() -> None:
    spec = PolicySpec(model="m", output_dtype="bfloat16", lm_head_precision="float32")
    assert (spec.output_dtype, spec.root_output_dtype) == ("bfloat16", "float32")


REFUSED_GRPO: list[tuple[dict[str, Any], str]] = [
    ({"num_generations_per_prompt": 1}, "advantage of a group of one is always 0"),
    ({"num_prompts_per_step": 0}, "at least 1"),
    ({"temperature": 0}, "every advantage is 0"),
    ({"temperature": -1.0}, "at least 0.001"),
    ({"temperature": float("nan")}, "finite number"),
    ({"temperature": 1e-40}, "at least 0.001"),
    ({"temperature": "warm"}, "temperature='warm'"),
    ({"learning_rate": float("inf")}, "finite number"),
    ({"num_prompts_per_step": 2.0}, "whole number"),
    ({"top_p": 0.0}, "above 0"),
    ({"top_p": 1.5}, "at most 1"),
    ({"top_k": 0}, "at least 1"),
    ({"learning_rate": "fast"}, "learning_rate='fast'"),
    ({"ratio_clip_c": 0.5}, "above 1"),
    ({"max_grad_norm": 0}, "above 0"),
    ({"normalize_rewards": 2}, "must be True or False"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED_GRPO)
def test_grpo_settings_out_of_range_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        GRPOConfig(**fields)


FACTS = ModelFacts(
    "Qwen3ForCausalLM", vocab_size=96, num_layers=4, num_heads=4, num_key_value_heads=2, tied_head=False, max_positions=256
)


def layout(spec: dict[str, Any], facts: ModelFacts = FACTS, ranks: int = 2, device: str = "cpu", num_gpus: int = 0) -> None:
    check_layout(PolicySpec(model="m", **spec), facts, ranks=ranks, device=device, num_gpus=num_gpus)


def test_layouts_that_cannot_work_are_refused() -> None:
    tied = ModelFacts("Qwen3ForCausalLM", 96, 4, 4, 2, tied_head=True)
    odd = ModelFacts("Qwen3ForCausalLM", 97, 4, 4, 2, tied_head=False)
    with pytest.raises(SpecError, match="ranks=4 needs 4 GPUs, one per rank; this machine has 2. Use ranks=2 or fewer"):
        layout({}, ranks=4, device="cuda", num_gpus=2)
    with pytest.raises(SpecError, match="this machine has 0. Use device='cpu'"):
        layout({}, ranks=1, device="cuda", num_gpus=0)
    with pytest.raises(SpecError, match="ranks=3 is not divisible by tensor_parallel_size=2.*ranks=2 or ranks=4"):
        layout({"tensor_parallel_size": 2}, ranks=3)
    with pytest.raises(SpecError, match="ranks=1 is not divisible by tensor_parallel_size=2.*Use ranks=2\\.$"):
        layout({"tensor_parallel_size": 2}, ranks=1)
    with pytest.raises(SpecError, match="does not divide vocab_size=97"):
        layout({"tensor_parallel_size": 2}, odd)
    with pytest.raises(SpecError, match="does not divide num_key_value_heads=2.*1, 2 divide all"):
        layout({"tensor_parallel_size": 4}, ranks=4)
    with pytest.raises(SpecError, match="tied to its input embedding"):
        layout({"lm_head_precision": "float32"}, tied)
    with pytest.raises(SpecError, match="the head belongs to the root FSDP unit"):
        layout({"autocast": False}, tied)
    with pytest.raises(SpecError, match="cpu_offload=True does nothing"):
        layout({"cpu_offload": True})
    with pytest.raises(SpecError, match="no CPU kernel"):
        layout({"attn_implementation": "flash_attention_2"})
    for ranks in (0, -1, 1.5, True, "2"):
        with pytest.raises(SpecError, match="ranks="):
            layout({}, ranks=ranks)  # type: ignore[arg-type]
    layout({"autocast": False, "output_dtype": "bfloat16"}, tied)  # the same dtype on both sides: fine


def test_a_batch_must_divide_over_the_ranks() -> None:
    with pytest.raises(SpecError, match="num_prompts_per_step=5 does not divide over 2 data-parallel ranks.*Use 4 or 6"):
        check_batch(GRPOConfig(num_prompts_per_step=5), data_parallel_size=2)
    with pytest.raises(SpecError, match="Use 2"):
        check_batch(GRPOConfig(num_prompts_per_step=1), data_parallel_size=2)
    check_batch(GRPOConfig(num_prompts_per_step=6), data_parallel_size=2)


@pytest.mark.parametrize(("temperature", "matters"), [(1.0, False), (0.5, False), (2.0, False), (0.7, True), (1.5, True)])
def test_the_temperature_order_is_refused_exactly_where_it_cannot_matter(temperature: float, matters: bool) -> None:
    spec = PolicySpec(model="m", temperature_order="before_upcast")
    logits = torch.randn(10_000).bfloat16()
    same = torch.equal((logits / temperature).float(), logits.float() / temperature)
    assert same is not matters  # the rule agrees with the arithmetic
    if matters:
        check_temperature_order(spec, temperature)
    else:
        with pytest.raises(SpecError, match="changes nothing at temperature"):
            check_temperature_order(spec, temperature)


def test_model_facts_of_the_tiny_policy() -> None:
    assert model_facts(tk.tiny_policy()) == FACTS


def test_models_that_cannot_be_used_are_named(tmp_path: Any) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        model_facts("/nowhere/at/all")
    with pytest.raises(FileNotFoundError, match="no config.json"):
        model_facts(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["BertForSequenceClassification"]}')
    with pytest.raises(FileNotFoundError, match="no weights"):
        model_facts(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(SpecError, match="no causal language model: its config names BertForSequenceClassification"):
        model_facts(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(SpecError, match="config.json is not valid JSON"):
        model_facts(tmp_path)
