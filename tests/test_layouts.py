"""Tensor parallelism only where it gives one rank's loss and gradients, for every architecture that is let through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import toolkit as tk
from tests.test_policy import loss_and_gradients
from toolkit.errors import SpecError
from toolkit.layout import TENSOR_PARALLEL, gpu_notes
from toolkit.policy import Policy
from toolkit.prompts import make_batch
from toolkit.step import score

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
    "CohereForCausalLM": "cohere",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "GPTNeoXForCausalLM": "gpt_neox",
    "Gemma2ForCausalLM": "gemma2",
    "GraniteForCausalLM": "granite",
    "MistralForCausalLM": "mistral",
    "Phi3ForCausalLM": "phi3",
    "SmolLM3ForCausalLM": "smollm3",
    "Starcoder2ForCausalLM": "starcoder2",
}


def random_model(folder: Path, model_type: str) -> Path:
    """Two layers with weights large enough that a wrong shard moves the loss, and norm weights away from 1."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type, vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    if "head_dim" in config.to_dict():
        config.head_dim = 16
    model = AutoModelForCausalLM.from_config(config)
    for name, param in model.named_parameters():
        param.data.mul_(1 + 0.3 * torch.randn_like(param) if "norm" in name else 4)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tk.tiny_policy()).save_pretrained(folder)
    return folder


def length_between_layers(policy: Policy) -> tuple[int, int]:
    """Tokens of one sequence that this rank holds between two layers, and in all."""
    seen = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        seen.append((hidden.to_local() if isinstance(hidden, DTensor) else hidden).shape[1])

    layer = next(m for n, m in policy.model.named_modules() if n.endswith("layers.1"))
    handle = layer.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
    batch = make_batch([[1, 5, 6, 7, 8, 9, 4, 2]], [3], pad_id=0)
    score(policy, batch, 1.0)
    handle.remove()
    return seen[0], batch.ids_BT.shape[1]


def test_every_listed_architecture_is_compared() -> None:
    assert MODEL_TYPES.keys() == TENSOR_PARALLEL.keys()


@pytest.mark.parametrize(
    "architecture",
    [
        name if name in ("LlamaForCausalLM", "Qwen3ForCausalLM") else pytest.param(name, marks=pytest.mark.slow)
        for name in TENSOR_PARALLEL
    ],
)
def test_tensor_parallel_equals_one_rank(architecture: str, tmp_path: Path) -> None:
    model = random_model(tmp_path, MODEL_TYPES[architecture])
    with tk.launch(model=model, precision="float32") as session:
        loss, gradients = session.run(loss_and_gradients)[0]
    layouts: list[dict[str, Any]] = [{}] + [{"sequence_parallel": True}] * TENSOR_PARALLEL[architecture]
    for layout in layouts:
        with tk.launch(model=model, precision="float32", ranks=2, tensor_parallel_size=2, **layout) as session:
            tp_loss, tp_gradients = session.run(loss_and_gradients)[0]
            held, whole = session.run(length_between_layers)[0] if layout else (1, 2)
        assert abs(tp_loss - loss) < 1e-6
        assert tp_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            # Key gradients nearly cancel in the softmax, so they are compared on the scale of the largest parameter.
            scale = max(float(gradient.norm()), 1e-3 * max(float(g.norm()) for g in gradients.values()))
            assert float((tp_gradients[name] - gradient).norm()) < 1e-5 * scale, (layout, name)
        assert held == whole // 2, "sequence_parallel left the sequence whole"


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    model = random_model(tmp_path, "glm4")
    with pytest.raises(SpecError, match="Glm4ForCausalLM was not compared with one rank.*tensor_parallel_size=1"):
        tk.launch(model=model, ranks=2, tensor_parallel_size=2)


def test_sequence_parallel_is_refused_where_the_plan_ignores_it(tmp_path: Path) -> None:
    model = random_model(tmp_path, "mistral")
    with pytest.raises(SpecError, match="does not shard the sequence.*LlamaForCausalLM"):
        tk.launch(model=model, ranks=2, tensor_parallel_size=2, sequence_parallel=True)


GIB = 2**30


def test_mixed_and_busy_gpus_are_reported() -> None:
    quiet = {"name": "H100", "total_bytes": 80 * GIB, "used_bytes": GIB}
    assert gpu_notes([quiet, quiet]) == []
    mixed, busy = gpu_notes([quiet, {"name": "A100", "total_bytes": 40 * GIB, "used_bytes": 10 * GIB}, quiet])
    assert mixed.endswith("H100 (80 GiB): rank 0, 2; A100 (40 GiB): rank 1.")
    assert busy.startswith("10.0 of 40.0 GiB of rank 1's GPU are in use by other processes")
