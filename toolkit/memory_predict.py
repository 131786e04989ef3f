"""Predict the memory report of a model nobody has at hand: no weights, no GPU, a minute's thought at most.

The very code that builds, steps and measures runs under fake tensors as rank 0 of a fake process group (fakes.py), in a
process of its own, so that neither the group nor the patches ever touch the notebook's kernel or a live session.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.background import uninterrupted_imports
from toolkit.checks import check_whole
from toolkit.engines import LocalRanks
from toolkit.errors import SpecError
from toolkit.grpo_config import MEMORY_FIELDS
from toolkit.layout import ModelFacts, check_layout, check_made_up, facts_of, read_config
from toolkit.models import known_models
from toolkit.progress import Bars
from toolkit.spec import GRPOConfig, PolicySpec, split_fields

if TYPE_CHECKING:
    from toolkit.memory_report import MemoryReport
    from toolkit.policy import Policy

_CHECKED = {
    "cpu": "24 measured steps on CPU ranks: within 0.5 % (2 % under tensor parallelism over gloo); uncalibrated for CUDA",
    "cuda": "uncalibrated for CUDA, as no GPU run is recorded; tensors only: add the CUDA context, NCCL and fragmentation",
}


@dataclass(frozen=True, slots=True)
class _Job:
    """One prediction, checked."""

    spec: PolicySpec
    config: dict[str, Any]
    ranks: int
    grpo: GRPOConfig
    shape: tuple[int, int]
    kernels: str


def predict_memory(
    model: Any,
    *,
    ranks: int,
    sequence_length: int,
    micro_batch_size: int = 1,
    tensor_parallel_size: int = 1,
    num_micro_batches: int = 1,
    device: str | None = None,
    **spec_fields: Any,
) -> MemoryReport:
    """Predict where every byte of one training step's peak goes, on the rank that holds most.

    Forward, GRPO loss, backward, clipping and AdamW run for real, but on tensors without data, so any model at any number
    of ranks takes some ten CPU seconds and 600 MB. Sequences are of full length; padding would add an attention mask.

    Args:
        model: a known name ("Qwen3-8B"; an unknown one lists them), a folder with a config.json, a hub id, or a
            `transformers` config.
        ranks: how many the model is sharded over.
        sequence_length: tokens of each sequence.
        micro_batch_size: sequences in one forward and backward on each rank.
        tensor_parallel_size: ranks that share one copy of each layer; divides `ranks`.
        num_micro_batches: how many of them make a step; from the second on, gradients live through the forward.
        device: whose kernels' scratch is counted, "cpu" or "cuda"; None takes CUDA's if this machine has a GPU. The CPU's
            agree with `session.memory()` on CPU ranks; CUDA's are uncalibrated.
        **spec_fields: fields of `PolicySpec`, and those of `GRPOConfig` that matter to memory: temperature, max_grad_norm,
            ratio_clip_c, token_level_loss, force_on_policy_ratio, use_importance_sampling_correction, and
            reference_policy_kl_penalty (which keeps a second set of parameter shards).

    Returns:
        A report whose `source` is "predicted" and whose `checked_against` says how far to trust it.

    Raises:
        SpecError: a setting or combination that would do nothing or crash, sizes that don't divide, a sequence longer than
            the model's positions, or a model that is unknown or no causal language model.
        FileNotFoundError: no such folder or hub id.
    """
    sizes = {"ranks": ranks, "sequence_length": sequence_length, "micro_batch_size": micro_batch_size}
    sizes |= {"tensor_parallel_size": tensor_parallel_size, "num_micro_batches": num_micro_batches}
    return _run([_job(model, **sizes, device=device, **spec_fields)])[0]


def predict_settings(settings: Mapping[str, Mapping[str, Any]], **common: Any) -> dict[str, MemoryReport]:
    """Predict several settings, as many at once as there are cores.

    Args:
        settings: what each differs in, by a name of yours: arguments of `predict_memory`.
        **common: arguments all of them share.

    Returns:
        A report by each name, in the order given.
    """
    return dict(zip(settings, _run([_job(**{**common, **own}) for own in settings.values()]), strict=True))


def _job(
    model: Any,
    *,
    ranks: int,
    sequence_length: int,
    micro_batch_size: int = 1,
    tensor_parallel_size: int = 1,
    num_micro_batches: int = 1,
    device: str | None = None,
    **spec_fields: Any,
) -> _Job:
    name, config = _resolve(model)
    facts = facts_of(name, config)
    policy_fields, grpo_fields = split_fields(spec_fields)
    idle = [field for field in grpo_fields if field not in MEMORY_FIELDS]
    if idle:
        raise SpecError(f"{idle[0]!r} plays no part in the memory of a training step; leave it out of predict_memory.")
    spec = PolicySpec(model=name, tensor_parallel_size=tensor_parallel_size, **policy_fields)
    micro = check_whole("micro_batch_size", micro_batch_size)
    length = check_whole("sequence_length", sequence_length, minimum=2)
    shape = (micro * check_whole("num_micro_batches", num_micro_batches), length)
    if device not in (None, "cpu", "cuda"):
        raise SpecError(f"device={device!r} is not allowed; choose 'cpu', 'cuda', or None.")
    _check(spec, facts, ranks, length)
    if device is None:
        with uninterrupted_imports():
            import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return _Job(spec, config, ranks, GRPOConfig(train_micro_batch_size=micro, **grpo_fields), shape, device)


def _run(jobs: list[_Job]) -> list[MemoryReport]:
    num_workers = min(len(jobs), len(os.sched_getaffinity(0)))
    workers = LocalRanks(num_workers)
    try:
        with Bars() as bars:
            bars.update("importing transformers and AutoModel", 0, 1, at_once=True)
            workers.call(_import)
            workers.raise_late_interrupt()
        shares = workers.call(_predict_share, jobs, num_workers)
        workers.raise_late_interrupt()
    finally:
        workers.close()
    return [shares[place % num_workers][place // num_workers] for place in range(len(jobs))]


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


def _check(spec: PolicySpec, facts: ModelFacts, ranks: int, sequence_length: int) -> None:
    if spec.cpu_offload:
        raise SpecError("cpu_offload=True cannot be predicted: host and GPU memory are not told apart. Leave it at False.")
    if spec.attn_implementation == "flash_attention_2":
        raise SpecError("attn_implementation='flash_attention_2' has no fake kernels; 'sdpa' retains the same tensors.")
    if not facts.num_heads:
        raise SpecError(
            f"{spec.model}: its config has no attention heads; only transformers with attention can be predicted."
        )
    if facts.num_heads % facts.num_key_value_heads:
        raise SpecError(
            f"num_attention_heads={facts.num_heads} of {spec.model} is no multiple of its num_key_value_heads="
            f"{facts.num_key_value_heads}, so its queries cannot share keys evenly; correct the config."
        )
    check_layout(spec, facts, ranks=ranks, device="cpu", num_gpus=0)
    check_made_up(spec, sequence_length, facts)


# ---- in a process of its own


def _import() -> None:
    from toolkit import imports, memory  # noqa: F401 (a process forked from a warm server has them already)


def _predict_share(jobs: list[_Job], num_workers: int) -> list[MemoryReport]:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # AutoModel would build its mesh on a GPU; fake tensors of CUDA need one
    return [_predict(job) for job in jobs[int(os.environ["RANK"]) :: num_workers]]


def _predict(job: _Job) -> MemoryReport:
    from toolkit import fsdp
    from toolkit.fakes import fake_ranks, fake_tensors
    from toolkit.memory import made_up, record
    from toolkit.memory_report import report_of
    from toolkit.reference import keep_reference

    with fake_ranks(0, job.ranks):
        setup = fsdp.build_setup(job.spec, job.ranks)
        with fake_tensors():
            policy = _build(job.spec, job.config, setup)
            if job.grpo.reference_policy_kl_penalty:
                keep_reference(policy)
            training = made_up(policy, job.grpo, *job.shape)
            ledger = record(policy, job.grpo, training, 0, kernels=job.kernels)
            first = next(training.micro_batches(job.grpo.train_micro_batch_size))
            return report_of(policy, first, ledger, source="predicted", checked_against=_CHECKED[job.kernels])


def _build(spec: PolicySpec, config: dict[str, Any], setup: Any) -> Policy:
    """The policy from its config alone, with the optimizer state that AdamW makes in its first step."""
    import tokenizers
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from toolkit import fsdp
    from toolkit.attention import attention_name
    from toolkit.build import assemble, named_failure, without_dropout
    from toolkit.ranks import report_progress

    attention = attention_name(spec.attn_implementation, "cpu")
    with named_failure(spec):
        settings = without_dropout(AutoConfig.for_model(**config))
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32, attn_implementation=attention)
        model = fsdp.shard(model, setup)
    nothing = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel({})), eos_token="")
    policy = assemble(spec, model, nothing, setup, torch.device("cpu"))
    for param in model.parameters():
        moments = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        policy.optimizer.state[param] = {"step": torch.tensor(1.0), **moments}
    units = list(fsdp.unit_modules(model))

    def look(place: int) -> Any:
        def hook(*_: Any) -> None:
            report_progress(f"predicting {spec.model}", place, 2 * len(units))

        return hook

    for place, name in enumerate(units):
        model.get_submodule(name if name != fsdp.ROOT else "").register_forward_pre_hook(look(place))
    return policy
