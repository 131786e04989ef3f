"""Does this model, with these settings, fit on these ranks? What is asked of the model is read from its config only.

Everything here runs in the notebook before any rank starts, and imports torch no more than `spec` does.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.checks import check_rows, check_whole, is_power_of_two
from toolkit.errors import SpecError
from toolkit.spec import GRPOConfig, PolicySpec

#: Architectures whose loss and gradients under tensor parallelism were compared with one rank's (tests/test_layouts.py),
#: and whether AutoModel's plan for them shards the sequence too. Others may run and be silently wrong: a fused
#: gate_up_proj cut in two by Glm4's plan moves the loss, Qwen3-MoE's k_norm gradient comes out at half its size.
TENSOR_PARALLEL = {
    "LlamaForCausalLM": True,
    "Qwen2ForCausalLM": True,
    "Qwen3ForCausalLM": True,
    "Gemma3ForCausalLM": True,
    "CohereForCausalLM": False,
    "Ernie4_5ForCausalLM": False,
    "GPTNeoXForCausalLM": False,
    "Gemma2ForCausalLM": False,
    "GraniteForCausalLM": False,
    "MistralForCausalLM": False,
    "Phi3ForCausalLM": False,
    "SmolLM3ForCausalLM": False,
    "Starcoder2ForCausalLM": False,
}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's config says that the checks need; read without importing torch."""

    architecture: str
    vocab_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    tied_head: bool
    max_positions: int | None = None  # longest sequence its positions are made for


def model_facts(model: str | Path) -> ModelFacts:
    """Read the facts of a causal language model from its folder or, for a hub id, from the hub's config.

    Raises:
        FileNotFoundError: no such folder, or no config.json or weights in it.
        SpecError: the model is not a causal language model.
    """
    folder = Path(model).expanduser()
    config = read_config(model)
    if folder.is_dir() and not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise FileNotFoundError(f"model={str(model)!r}: the folder has a config.json but no weights (*.safetensors).")
    return facts_of(model, config)


def read_config(model: str | Path) -> dict[str, Any]:
    """The config of a model in a local folder or on the hub.

    Raises:
        FileNotFoundError: no such folder, or no config.json in it.
        SpecError: it is not valid JSON.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return _hub_config(str(model), folder)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"model={str(model)!r}: the folder has no config.json, so it holds no Hugging Face model.")
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except json.JSONDecodeError as error:
        raise SpecError(f"model={str(model)!r}: its config.json is not valid JSON ({error}).") from None
    return config


def facts_of(model: str | Path, config: Mapping[str, Any]) -> ModelFacts:
    """The facts in a config.

    Raises:
        SpecError: the model is not a causal language model.
    """
    architectures = config.get("architectures") or []
    causal = [name for name in architectures if name.endswith(("ForCausalLM", "LMHeadModel"))]
    if not causal:
        found = ", ".join(architectures) or "no architecture"
        raise SpecError(
            f"model={str(model)!r} is no causal language model: its config names {found}, and GRPO needs next-token "
            "logits. Choose a model whose architecture ends in ForCausalLM."
        )
    text = config.get("text_config") or config
    heads = text.get("num_attention_heads", text.get("n_head", 0))
    return ModelFacts(
        architecture=causal[0],
        vocab_size=text["vocab_size"],
        num_layers=text.get("num_hidden_layers", text.get("n_layer", 0)),
        num_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        max_positions=text.get("max_position_embeddings", text.get("n_positions")),
        # transformers' default for a config that does not say; Llama-family configs always do.
        tied_head=config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)),
    )


def _hub_config(model: str, folder: Path) -> dict[str, Any]:
    looks_like_path = model.startswith((".", "~", os.sep)) or model.count("/") != 1 or folder.is_file()
    if looks_like_path:
        raise FileNotFoundError(f"model={model!r}: there is no such folder. (A hub id looks like 'Qwen/Qwen3-0.6B'.)")
    from transformers import AutoConfig

    try:
        return dict(AutoConfig.from_pretrained(model).to_dict())
    except OSError as error:
        raise FileNotFoundError(
            f"model={model!r}: there is no such folder, and the hub gave no config for that id either."
        ) from error


def check_layout(spec: PolicySpec, facts: ModelFacts, *, ranks: int, device: str, num_gpus: int) -> None:
    """Refuse what this model on these ranks cannot do, before any rank starts.

    Args:
        device: "cpu" or "cuda".
        num_gpus: GPUs on this machine.

    Raises:
        SpecError: naming the setting, the sizes that clash, and the way out.
    """
    check_whole("ranks", ranks)
    tp = spec.tensor_parallel_size
    if device == "cuda" and ranks > num_gpus:
        raise SpecError(
            f"ranks={ranks} needs {ranks} GPUs, one per rank; this machine has {num_gpus}. "
            + (f"Use ranks={num_gpus} or fewer, or device='cpu'." if num_gpus else "Use device='cpu'.")
        )
    if ranks % tp:
        raise SpecError(
            f"ranks={ranks} is not divisible by tensor_parallel_size={tp}: every copy of the model needs {tp} ranks. "
            + (f"Use ranks={tp * (ranks // tp)} or ranks={tp * (ranks // tp + 1)}." if ranks > tp else f"Use ranks={tp}.")
        )
    if tp > 1:
        _check_architecture(spec, facts)
        sizes = {
            "vocab_size": facts.vocab_size,
            "num_attention_heads": facts.num_heads,
            "num_key_value_heads": facts.num_key_value_heads,
        }
        for name, size in sizes.items():
            if size % tp:
                raise SpecError(
                    f"tensor_parallel_size={tp} does not divide {name}={size} of {spec.model}. "
                    f"{_common_divisors(sizes)} divide all of {', '.join(sizes)}."
                )
    if facts.tied_head and spec.lm_head_precision:
        raise SpecError(
            f"lm_head_precision={spec.lm_head_precision!r}: the head of {spec.model} is tied to its input embedding, and "
            "one shared parameter cannot have two compute dtypes under FSDP2. Use an untied model, or precision='float32'."
        )
    check_output_dtype(spec, head_in_root=facts.tied_head)
    if device == "cpu" and spec.cpu_offload:
        raise SpecError("cpu_offload=True does nothing on device='cpu': everything is in host memory already.")
    if device == "cpu" and spec.attn_implementation == "flash_attention_2":
        raise SpecError("attn_implementation='flash_attention_2' has no CPU kernel. Use 'sdpa' or 'eager'.")


def _check_architecture(spec: PolicySpec, facts: ModelFacts) -> None:
    if facts.architecture not in TENSOR_PARALLEL:
        raise SpecError(
            f"tensor_parallel_size={spec.tensor_parallel_size}: {facts.architecture} was not compared with one rank under "
            "AutoModel's tensor-parallel plans, and for some architectures these give wrong gradients silently. Use "
            f"tensor_parallel_size=1 (FSDP shards over all ranks), or one of {', '.join(TENSOR_PARALLEL)}."
        )
    if spec.sequence_parallel and not TENSOR_PARALLEL[facts.architecture]:
        known = ", ".join(name for name, shards_sequence in TENSOR_PARALLEL.items() if shards_sequence)
        raise SpecError(
            f"sequence_parallel=True: AutoModel's plan for {facts.architecture} does not shard the sequence, so this would "
            f"do nothing or fail. Use sequence_parallel=False, or one of {known}."
        )


def gpu_notes(gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a user should know about the GPUs of the ranks, before the model is on them.

    Args:
        gpus: by rank: name, total_bytes, used_bytes.

    Returns:
        A sentence for unlike GPUs, and one for each that others use; none on a quiet box of one kind.
    """
    notes = []
    kinds: dict[str, list[int]] = {}
    for rank, gpu in enumerate(gpus):
        kinds.setdefault(f"{gpu['name']} ({gpu['total_bytes'] / 2**30:.0f} GiB)", []).append(rank)
    if len(kinds) > 1:
        listed = "; ".join(f"{name}: rank {', '.join(map(str, ranks))}" for name, ranks in kinds.items())
        notes.append(f"the ranks' GPUs are of different kinds, and every step waits for the slowest: {listed}.")
    for rank, gpu in enumerate(gpus):
        if gpu["used_bytes"] > 0.05 * gpu["total_bytes"]:
            used, total = gpu["used_bytes"] / 2**30, gpu["total_bytes"] / 2**30
            notes.append(
                f"{used:.1f} of {total:.1f} GiB of rank {rank}'s GPU are in use by other processes; times and the "
                "memory left are theirs to change."
            )
    return notes


def check_output_dtype(spec: PolicySpec, *, head_in_root: bool) -> None:
    """Refuse an output dtype that would crash in the head: in the root unit nobody casts its input back.

    Raises:
        SpecError: with the three ways out.
    """
    if head_in_root and not spec.runs_autocast and spec.output_dtype != spec.precision:
        raise SpecError(
            f"output_dtype={spec.output_dtype!r} without autocast: the head belongs to the root FSDP unit here (it is tied "
            f"to the embedding), so the last layer's {spec.output_dtype} output meets {spec.precision} head weights, which "
            f"no matmul accepts. Set autocast=True (needs a 16-bit precision), or output_dtype={spec.precision!r}."
        )


def check_length(name: str, length: int, facts: ModelFacts) -> None:
    """Refuse sequences longer than the model's positions.

    Raises:
        SpecError: naming both lengths.
    """
    if facts.max_positions is not None and length > facts.max_positions:
        raise SpecError(
            f"{name}={length} is more than the {facts.max_positions} positions this model is made for "
            "(max_position_embeddings of its config)."
        )


def check_made_up(spec: PolicySpec, sequence_length: int, facts: ModelFacts) -> None:
    """Refuse made-up sequences that are too long, or of a policy whose layout depends on which of them share a prompt.

    Raises:
        SpecError: with the way out.
    """
    check_length("sequence_length", sequence_length, facts)
    if spec.share_prompt_prefix:
        raise SpecError(
            "share_prompt_prefix=True: made-up sequences of a given length share no prompt. Measure a sampled step with "
            "session.memory(), or set share_prompt_prefix=False."
        )


def check_config(config: Any, spec: PolicySpec, facts: ModelFacts, *, ranks: int) -> None:
    """Refuse GRPO settings that this policy on these ranks cannot run.

    Raises:
        SpecError: not a GRPOConfig, completions longer than the model's positions, a batch that does not divide, or a
            temperature at which the spec's temperature order plays no part.
    """
    if not isinstance(config, GRPOConfig):
        raise SpecError(f"config={config!r} must be a GRPOConfig; dataclasses.replace(session.config, ...) changes one.")
    check_length("max_new_tokens", config.max_new_tokens, facts)
    check_batch(config, data_parallel_size=ranks // spec.tensor_parallel_size)
    check_temperature_order(spec, config.temperature)


def check_batch(config: GRPOConfig, *, data_parallel_size: int) -> None:
    """Refuse a batch that does not divide over the data-parallel ranks.

    Raises:
        SpecError: naming both numbers and the nearest that fit.
    """
    prompts, dp = config.num_prompts_per_step, data_parallel_size
    if prompts % dp:
        below, above = prompts - prompts % dp, prompts + dp - prompts % dp
        fits = f"{below} or {above}" if below else str(above)
        raise SpecError(
            f"num_prompts_per_step={prompts} does not divide over {dp} data-parallel ranks (groups stay whole on a rank, so "
            f"that baselines need no communication). Use {fits}."
        )
    size = config.train_global_batch_size
    if size is not None and size % dp:
        raise SpecError(f"train_global_batch_size={size} does not divide over {dp} data-parallel ranks.")


def check_temperature_order(spec: PolicySpec, temperature: float) -> None:
    """Refuse `temperature_order="before_upcast"` where it cannot differ from the default.

    Dividing by a power of two only shifts exponents, so both orders give the same bits.

    Raises:
        SpecError: with a temperature at which the order matters.
    """
    if spec.temperature_order == "before_upcast" and is_power_of_two(temperature):
        raise SpecError(
            f"temperature_order='before_upcast' changes nothing at temperature={temperature}: dividing by a power of two is "
            "exact in any floating dtype. Set another temperature, e.g. 0.7, or leave the order at 'after_upcast'."
        )


def check_token_ids(token_ids: Any, facts: ModelFacts) -> list[list[int]]:
    """Token ids as plain lists, each long enough to have a logprob and inside the vocabulary.

    Args:
        token_ids: sequences of sequences of whole numbers; arrays and tensors too.

    Raises:
        SpecError: naming the sequence and what is wrong with it.
    """
    rows = check_rows(token_ids)
    if not rows:
        raise SpecError("token_ids is empty; give at least one sequence of two or more token ids.")
    for index, row in enumerate(rows):
        if len(row) < 2:
            raise SpecError(f"token_ids[{index}] has {len(row)} token(s); the first has no logprob, so give two or more.")
        wrong = [token for token in row if not 0 <= token < facts.vocab_size]
        if wrong:
            raise SpecError(f"token_ids[{index}] has id {wrong[0]}, outside the vocabulary [0, {facts.vocab_size}).")
        check_length(f"the length of token_ids[{index}]", len(row), facts)
    return rows


def _common_divisors(sizes: Mapping[str, int]) -> str:
    common = math.gcd(*sizes.values())
    return ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
