"""A mixture of experts with its experts spread over the ranks, as AutoModel does it: its own class, its own sharding.

The policy is Hugging Face's class, which shards experts like any other weight. Here AutoModel's class is built beside it
with the policy's weights, to see what becomes of its logits.

With fsdp.py one of the few files that touch private parts of AutoModel; tests/test_upstream.py guards each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from nemo_automodel._transformers.registry import ModelRegistry  # private: nothing public finds a class without building it
from nemo_automodel.components.distributed.config import FSDP2Config, MoEParallelizerConfig
from nemo_automodel.components.distributed.model_parallelizer import parallelize_model
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.core_model_loading import revert_weight_conversion

from toolkit import fsdp
from toolkit.spec import PolicySpec, torch_dtype


def automodel_class(model: nn.Module) -> type[Any] | None:
    """AutoModel's own class for a sharded Hugging Face model, None if it has none that takes this config."""
    architecture = type(model).__name__.removeprefix("FSDP")
    found: type[Any] | None = ModelRegistry.resolve_custom_model_cls(architecture, model.config)
    return found


def checkpoint_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole model's float32 weights on this rank, named as in a checkpoint file; all ranks together."""
    fsdp.reshard(model)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    reverted: dict[str, torch.Tensor] = revert_weight_conversion(model, state)  # type: ignore[arg-type]
    return reverted


def build_expert_parallel(
    model: nn.Module,
    weights: dict[str, torch.Tensor],
    spec: PolicySpec,
    ranks: int,
    device: torch.device,
    *,
    output_dtype: str,
    lm_head_precision: str | None = None,
    wrap_outer_model: bool = True,
) -> nn.Module:
    """AutoModel's class with the given weights, its experts divided over all ranks; all ranks together.

    Args:
        model: the sharded Hugging Face model, for its config and class.
        weights: of `checkpoint_weights`.
        spec: for the compute and reduce dtypes.
        output_dtype: of every FSDP unit but a float32 head's.
        lm_head_precision, wrap_outer_model: as in NeMo-RL's `moe_parallelizer`; False leaves the outermost module, which
            returns the logits, without an FSDP unit.
    """
    owner = automodel_class(model)
    assert owner is not None
    with _cuda_not_asked(device):
        own = owner.from_config(model.config)
    own.initialize_weights(buffer_device=device, dtype=torch.float32)  # also moves what was built for CUDA to the device
    own.load_state_dict(own.state_dict_adapter.from_hf(dict(weights)))
    dtypes = (torch_dtype(spec.precision), torch_dtype(spec.reduce_dtype), torch_dtype(output_dtype))
    setup = dataclasses.replace(
        fsdp.meshes_of(dist.group.WORLD, ranks, ep_size=ranks),
        strategy_config=FSDP2Config(mp_policy=MixedPrecisionPolicy(*dtypes, spec.cast_forward_inputs)),
        moe_parallel_config=MoEParallelizerConfig(lm_head_precision=lm_head_precision, wrap_outer_model=wrap_outer_model),
    )
    sharded: nn.Module = parallelize_model(own.to(device), setup.mesh_context)
    return sharded.eval()


@contextlib.contextmanager
def eager_and_quiet() -> Iterator[None]:
    """Run AutoModel's classes as they stand, and hold back what they make torch and transformers warn of.

    Their experts' activation is compiled: ten seconds and a C++ compiler, for a few forwards.
    """
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed.nn.functional.all_reduce is deprecated")
            yield
    finally:
        transformers.utils.logging.set_verbosity(level)


@contextlib.contextmanager
def _cuda_not_asked(device: torch.device) -> Iterator[None]:
    """Let AutoModel's classes be built where there is no CUDA: they ask for its current device, only to note the name."""
    original = torch.cuda.current_device
    if device.type == "cpu":
        torch.cuda.current_device = lambda: 0
    try:
        yield
    finally:
        torch.cuda.current_device = original
