"""Build the policy on a rank: load through transformers or AutoModel, shard, check."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from nemo_automodel import NeMoAutoModelForCausalLM
from nemo_automodel.components.distributed.config import DistributedSetup
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from toolkit import fsdp
from toolkit.attention import attention_name
from toolkit.errors import SpecError
from toolkit.layout import check_output_dtype
from toolkit.policy import Policy, by_mesh, probe
from toolkit.ranks import report_progress
from toolkit.spec import PolicySpec


def build(spec: PolicySpec, device_type: str) -> Policy:
    """Load and shard the model on this rank; both routes end in the same checked state.

    On CPU, and on a single GPU (where AutoModel skips FSDP2), transformers loads the weights and AutoModel's
    parallelizer shards them. On several GPUs AutoModel's `from_pretrained` loads each rank's shard only.
    """
    first = dist.get_rank() == 0

    def progress(done: int) -> None:
        if first:
            report_progress("loading the model", done, 3)

    progress(0)
    device = torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device("cpu")
    torch.manual_seed(spec.seed)
    setup = fsdp.build_setup(spec, dist.get_world_size())
    with _quiet_transformers(), named_failure(spec):
        tokenizer = _load_tokenizer(str(spec.model))
        config = without_dropout(AutoConfig.from_pretrained(str(spec.model)))
        progress(1)
        model: Any
        if device_type == "cuda" and dist.get_world_size() > 1:
            model = NeMoAutoModelForCausalLM.from_pretrained(
                spec.model,
                torch_dtype="float32",  # master weights
                distributed_setup=setup,
                force_hf=True,  # AutoModel's own classes have no KV cache, so could not sample
                use_liger_kernel=False,
                attn_implementation=attention_name(spec.attn_implementation, device_type),
                **_dropout_fields(config),
            )
        else:
            model = AutoModelForCausalLM.from_pretrained(
                spec.model,
                config=config,
                dtype=torch.float32,
                attn_implementation=attention_name(spec.attn_implementation, device_type),
            )
            model = fsdp.shard(model.to(device), setup)
    progress(2)
    policy = assemble(spec, model, tokenizer, setup, device)
    progress(3)
    return policy


def assemble(
    spec: PolicySpec, model: Any, tokenizer: PreTrainedTokenizerBase, setup: DistributedSetup, device: torch.device
) -> Policy:
    """Make a sharded model the policy: Hugging Face's checkpointing, live dtypes, checks, optimizer, a first forward."""
    if spec.activation_checkpointing == "hf":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if spec.lm_head_precision == "float32":
        _exempt_from_autocast(model.get_output_embeddings(), device.type)
    fsdp.apply_spec(model, spec)
    fsdp.check_units(model, spec)
    check_output_dtype(spec, head_in_root=fsdp.head_name(model) is None)
    groups = [{"params": group} for group in by_mesh(model.parameters())]
    policy = Policy(
        spec=spec,
        model=model,
        tokenizer=_with_pad_token(tokenizer),
        mesh=setup.mesh_context.device_mesh,
        device=device,
        # One pass over each parameter and no temporaries, on CPUs as on GPUs.
        optimizer=torch.optim.AdamW(groups, lr=0.0, fused=True),
        eos_ids=_eos_ids(model, tokenizer),
    )
    probe(policy)
    return policy


def without_dropout(config: Any) -> Any:
    """The model's config with every dropout at 0, of whole layers (`layerdrop`) and router jitter too.

    A second forward of the same tokens must give the same logprobs.
    """
    for name, value in _dropout_fields(config).items():
        setattr(config, name, value)
    return config


def _dropout_fields(config: Any) -> dict[str, float]:
    named = config.to_dict().items()
    return {k: 0.0 for k, v in named if isinstance(v, float) and ("drop" in k or "jitter" in k)}


@contextlib.contextmanager
def named_failure(spec: PolicySpec) -> Iterator[None]:
    """Say which model could not be loaded; the libraries' own messages often don't."""
    try:
        yield
    except SpecError:
        raise
    except Exception as error:  # safetensors, tokenizers and transformers each have their own kinds
        raise SpecError(f"model={str(spec.model)!r} cannot be loaded: {type(error).__name__}: {error}") from error


def _load_tokenizer(model: str) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    if not tokenizer("1+1=")["input_ids"] or tokenizer.eos_token_id is None:
        raise SpecError(f"model={model!r} has no usable tokenizer: it makes no tokens of text, or has no end of sequence.")
    return tokenizer


def _eos_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    generation: Any = model.generation_config
    listed = generation.eos_token_id if generation is not None else None
    ids = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(i for i in [*ids, tokenizer.eos_token_id] if i is not None))


def _with_pad_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    if tokenizer.pad_token_id is not None:
        return tokenizer
    padded = copy.deepcopy(tokenizer)
    padded.pad_token = padded.eos_token  # masked wherever it pads, so any id does
    return padded


def _exempt_from_autocast(head: nn.Module, device_type: str) -> None:
    """Keep autocast from casting a float32 head's operands back to 16 bits."""
    inner = head.forward

    def forward(hidden: torch.Tensor) -> Any:
        with torch.autocast(device_type, enabled=False):
            return inner(hidden)

    head.forward = forward


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Replace transformers' own weight-loading bars by ours, for the time of the load only."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()
