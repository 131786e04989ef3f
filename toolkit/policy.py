"""The policy on a rank: load through transformers or AutoModel, shard with FSDP2, run forward, switch precision live.

Shapes: _B sequences, _T tokens, _V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from nemo_automodel import NeMoAutoModelForCausalLM
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from toolkit import fsdp
from toolkit.errors import PeerFailed
from toolkit.layout import check_output_dtype
from toolkit.ranks import report_progress, stop_requested
from toolkit.spec import GRPOConfig, PolicySpec, torch_dtype


@dataclass(slots=True)
class Policy:
    """A sharded model and all it needs to be trained on this rank."""

    spec: PolicySpec
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    mesh: DeviceMesh
    device: torch.device
    optimizer: torch.optim.Optimizer

    @property
    def data_rank(self) -> int:
        """This rank's place among the data-parallel ranks; tensor-parallel peers share it."""
        return self.mesh["dp_shard"].get_local_rank()

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.mesh["dp_shard"].size()

    @property
    def tensor_size(self) -> int:
        """Number of ranks that share one copy of each layer."""
        return self.mesh["tp"].size()

    @property
    def vocab_size(self) -> int:
        """V of the whole model."""
        config: Any = self.model.config
        return int(config.get_text_config().vocab_size)

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: shows progress, returns records."""
        return dist.get_rank() == 0

    def progress(self, description: str, done: int, total: int) -> None:
        """Show progress in the calling cell, once for all ranks."""
        if self.is_first:
            report_progress(description, done, total)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The region forward, loss and backward run in (as in NeMo-RL, the backward too)."""
        return torch.autocast(self.device.type, torch_dtype(self.spec.precision), enabled=self.spec.runs_autocast)

    def forward(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, positions_BT: torch.Tensor, **options: Any) -> Any:
        """Run the model; `.logits` is [B, T, V] in the root's output dtype, sharded over V when tensor-parallel."""
        options.setdefault("use_cache", False)
        return self.model(input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, **options)

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a CPU tensor over the data-parallel ranks (over all ranks, less the copies of tensor-parallel peers)."""
        dist.all_reduce(values)
        return values / self.tensor_size

    def stop_if_asked(self) -> None:
        """Raise KeyboardInterrupt on every rank if Ctrl-C reached any of them. Call where stopping leaves no half step."""
        flag = torch.tensor([stop_requested()], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Run code that may fail on one rank only (a reward function, say) so that all ranks leave together."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        failed = torch.tensor([error is not None], dtype=torch.int32)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if error is not None:
            raise error
        if failed.item():
            raise PeerFailed("another rank failed")

    @contextlib.contextmanager
    def temporarily(self, **settings: Any) -> Iterator[None]:
        """Run with other live settings of the spec (`output_dtype`, `cast_forward_inputs`, `autocast`, ...)."""
        before = self.spec
        switch(self, **settings)
        try:
            yield
        finally:
            self.spec = before
            fsdp.apply_spec(self.model, before)


#: Fields of a spec that a live session can change; the others need another build.
LIVE_FIELDS = (
    "output_dtype",
    "cast_forward_inputs",
    "autocast",
    "logprob_mode",
    "logprob_chunk_size",
    "temperature_order",
)


def switch(policy: Policy, **settings: Any) -> list[fsdp.Unit]:
    """Change live settings; acts from the next forward on, with no rebuild.

    Returns:
        What every FSDP unit is set to now, read back.

    Raises:
        SpecError: the combination is refused; nothing has changed.
    """
    assert set(settings) <= set(LIVE_FIELDS)
    spec = dataclasses.replace(policy.spec, **settings)
    check_output_dtype(spec, head_in_root=fsdp.head_name(policy.model) is None)
    fsdp.apply_spec(policy.model, spec)
    policy.spec = spec
    return fsdp.check_units(policy.model, spec)


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
    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(spec.model)
        config = _config_without_dropout(str(spec.model))
        progress(1)
        model: Any
        if device_type == "cuda" and dist.get_world_size() > 1:
            model = NeMoAutoModelForCausalLM.from_pretrained(
                spec.model,
                torch_dtype="float32",  # master weights
                distributed_setup=setup,
                force_hf=True,  # AutoModel's own classes have no KV cache, so could not sample
                use_liger_kernel=False,
                attn_implementation=spec.attn_implementation or "sdpa",
                **_dropout_fields(config),
            )
        else:
            model = AutoModelForCausalLM.from_pretrained(
                spec.model, config=config, dtype=torch.float32, attn_implementation=spec.attn_implementation or "sdpa"
            )
            model = fsdp.shard(model.to(device), setup)
    progress(2)
    if spec.activation_checkpointing == "hf":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if spec.lm_head_precision == "float32":
        _exempt_from_autocast(model.get_output_embeddings(), device.type)
    fsdp.apply_spec(model, spec)
    fsdp.check_units(model, spec)
    check_output_dtype(spec, head_in_root=fsdp.head_name(model) is None)
    policy = Policy(
        spec=spec,
        model=model,
        tokenizer=_with_pad_token(tokenizer),
        mesh=setup.mesh_context.device_mesh,
        device=device,
        optimizer=torch.optim.AdamW([{"params": group} for group in by_mesh(model.parameters())], lr=0.0),
    )
    progress(3)
    return policy


def set_optimizer(policy: Policy, config: GRPOConfig, step: int) -> float:
    """Set weight decay and learning rate for a step (counted from 0, for the warm-up); returns the rate."""
    warmup = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    for group in policy.optimizer.param_groups:
        group["lr"] = config.learning_rate * warmup
        group["weight_decay"] = config.weight_decay
    return config.learning_rate * warmup


def by_mesh(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by device mesh and placement: torch's fused ("foreach") operations refuse a mixture.

    Under tensor parallelism some parameters are sharded over two mesh axes and some over one.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        data = param.data
        key = (data.device_mesh, data.placements) if isinstance(data, DTensor) else None
        groups.setdefault(key, []).append(param)
    return list(groups.values())


def _config_without_dropout(model: str) -> Any:
    """The model's config with every dropout at 0: a second forward of the same tokens must give the same logprobs."""
    config = AutoConfig.from_pretrained(model)
    for name, value in _dropout_fields(config).items():
        setattr(config, name, value)
    return config


def _dropout_fields(config: Any) -> dict[str, float]:
    named = config.to_dict().items()
    return {k: 0.0 for k, v in named if isinstance(v, float) and ("dropout" in k or k.endswith("pdrop"))}


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
