"""Predict the memory report of a model nobody has at hand: no weights, no GPU, a minute's thought at most.

The very code that builds, steps and measures runs under fake tensors as rank 0 of a fake process group (fakes.py), in a
process of its own, so that neither the group nor the patches ever touch the notebook's kernel or a live session.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.engines import LocalRanks, local_ranks_warm_up
from toolkit.errors import SpecError
from toolkit.layout import ModelFacts, check_layout, check_length, facts_of, read_config
from toolkit.models import known_models
from toolkit.progress import Bars
from toolkit.spec import GRPOConfig, PolicySpec, check_whole, split_fields

if TYPE_CHECKING:
    from toolkit.memory_report import MemoryReport
    from toolkit.policy import Policy

#: What of a GRPO step changes which tensors live; the rest would do nothing here.
_MATTERS = ("temperature", "max_grad_norm", "ratio_clip_c", "token_level_loss")
_CHECKED = {
    "cpu": "measured steps on CPU: within 0.5 %",
    "cuda": "uncalibrated for CUDA, as no GPU run is recorded; tensors only: add the CUDA context, NCCL and fragmentation",
}


def predict_memory(
    model: Any,
    *,
    ranks: int,
    sequence_length: int,
    micro_batch_size: int = 1,
    tensor_parallel_size: int = 1,
    num_micro_batches: int = 1,
    device: str = "cuda",
    **spec_fields: Any,
) -> MemoryReport:
    """Predict where every byte of one training step's peak goes, on the rank that holds most.

    Forward, GRPO loss, backward, clipping and AdamW run for real, but on tensors without data, so any model at any number
    of ranks takes a few seconds and some 600 MB. Sequences are of full length; padding adds an attention mask.

    Args:
        model: a known name ("Qwen3-8B"; an unknown one lists them), a folder with a config.json, a hub id, or a
            `transformers` config.
        ranks: how many the model is sharded over.
        sequence_length: tokens of each sequence.
        micro_batch_size: sequences in one forward and backward on each rank.
        num_micro_batches: how many of them make a step; from the second on, gradients live through the forward.
        device: whose kernels' scratch is counted. "cuda" is uncalibrated; "cpu" agrees with `session.memory()` on CPU ranks.
        **spec_fields: fields of `PolicySpec`, and those of `GRPOConfig` that matter to memory: temperature, max_grad_norm,
            ratio_clip_c, token_level_loss.

    Returns:
        A report whose `source` is "predicted" and whose `checked_against` says how far to trust it.

    Raises:
        SpecError: a setting or combination that would do nothing or crash, sizes that don't divide, a sequence longer than
            the model's positions, or a model that is unknown or no causal language model.
        FileNotFoundError: no such folder or hub id.
    """
    name, config = _resolve(model)
    facts = facts_of(name, config)
    policy_fields, grpo_fields = split_fields(spec_fields)
    idle = [field for field in grpo_fields if field not in _MATTERS]
    if idle:
        raise SpecError(f"{idle[0]!r} plays no part in the memory of a training step; leave it out of predict_memory.")
    spec = PolicySpec(model=name, tensor_parallel_size=tensor_parallel_size, **policy_fields)
    micro = check_whole("micro_batch_size", micro_batch_size)
    length = check_whole("sequence_length", sequence_length, minimum=2)
    shape = (micro * check_whole("num_micro_batches", num_micro_batches), length)
    _check(spec, facts, ranks, length, device)
    grpo = GRPOConfig(train_micro_batch_size=micro, **grpo_fields)
    local_ranks_warm_up()
    worker = LocalRanks(1)
    try:
        with Bars() as bars:
            bars.update("importing transformers and AutoModel", 0, 1, at_once=True)
            worker.call(_import)
        report: MemoryReport = worker.call(_predict, spec, config, ranks, grpo, shape, device)[0]
        return report
    finally:
        worker.close()


def _resolve(model: Any) -> tuple[str, dict[str, Any]]:
    """Name and config of what the user gave."""
    if not isinstance(model, str | os.PathLike):
        to_dict = getattr(model, "to_dict", None)
        if not callable(to_dict) or not getattr(model, "model_type", ""):
            raise SpecError(f"model={model!r} must be a known model's name, a folder, a hub id, or a transformers config.")
        return _from_object(model)
    known = known_models()
    name = str(model)
    by_name = {key.lower(): key for key in known}
    found = by_name.get(name.split("/")[-1].lower() if name.count("/") == 1 else name.lower())
    if found is not None and not Path(name).expanduser().is_dir():
        return found, known[found]
    if not Path(name).expanduser().exists() and os.sep not in name and not name.startswith((".", "~")):
        raise SpecError(
            f"model={name!r} is no known model. Known are {', '.join(known)}; or give a folder with a config.json, a hub id "
            "('org/name'), or a transformers config."
        )
    return name, read_config(name)


def _from_object(model: Any) -> tuple[str, dict[str, Any]]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = dict(model.to_dict())
    if not config.get("architectures") and model.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model.model_type]]
    return f"{type(model).__name__}", config


def _check(spec: PolicySpec, facts: ModelFacts, ranks: int, sequence_length: int, device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise SpecError(f"device={device!r} is not allowed; choose 'cpu' or 'cuda'.")
    if spec.cpu_offload:
        raise SpecError("cpu_offload=True cannot be predicted: host and GPU memory are not told apart. Leave it at False.")
    if spec.attn_implementation == "flash_attention_2":
        raise SpecError("attn_implementation='flash_attention_2' has no fake kernels; 'sdpa' retains the same tensors.")
    if facts.num_heads % facts.num_key_value_heads:
        raise SpecError(
            f"num_attention_heads={facts.num_heads} of {spec.model} is no multiple of its num_key_value_heads="
            f"{facts.num_key_value_heads}, so its queries cannot share keys evenly; correct the config."
        )
    check_layout(spec, facts, ranks=ranks, device="cpu", num_gpus=0)
    check_length("sequence_length", sequence_length, facts)


# ---- in a process of its own


def _import() -> None:
    from toolkit import imports, memory  # noqa: F401 (a rank forked from a warm server has them already)


def _predict(
    spec: PolicySpec, config: dict[str, Any], ranks: int, grpo: GRPOConfig, shape: tuple[int, int], device: str
) -> MemoryReport:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake tensors on CUDA need a driver; on the CPU they need nothing
    from toolkit import fsdp
    from toolkit.fakes import fake_ranks, fake_tensors
    from toolkit.memory import made_up, record
    from toolkit.memory_report import report_of

    with fake_ranks(0, ranks):
        setup = fsdp.build_setup(spec, ranks)
        with fake_tensors():
            policy = _build(spec, config, setup)
            training = made_up(policy, *shape)
            ledger = record(policy, grpo, training, 0, kernels=device)
            first = next(training.micro_batches(grpo.train_micro_batch_size))
            return report_of(policy, first, ledger, source="predicted", checked_against=_CHECKED[device])


def _build(spec: PolicySpec, config: dict[str, Any], setup: Any) -> Policy:
    """The policy from its config alone; optimizer state as after a first step, which is when training is fullest."""
    import tokenizers
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from toolkit import fsdp
    from toolkit.build import assemble, without_dropout
    from toolkit.ranks import report_progress, stop_requested

    settings = without_dropout(AutoConfig.for_model(**config))
    attention = spec.attn_implementation or "sdpa"
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=attention)
    model = fsdp.shard(model, setup)
    nothing = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({})), eos_token="")
    policy = assemble(spec, model, nothing, setup, torch.device("cpu"))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    policy.optimizer.step()
    policy.optimizer.zero_grad(set_to_none=True)

    units = list(fsdp.unit_modules(model))

    def look(place: int) -> Any:
        def hook(*_: Any) -> None:
            report_progress(f"predicting {spec.model}", place, 2 * len(units))
            if stop_requested():
                raise KeyboardInterrupt

        return hook

    for place, name in enumerate(units):
        model.get_submodule(name if name != fsdp.ROOT else "").register_forward_pre_hook(look(place))
    return policy
