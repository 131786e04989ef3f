"""FSDP2 as AutoModel applies it: apply, look into, switch, recover.

With fsdp_watch.py, fsdp_experts.py and fakes.py the only files that touch private parts of torch, transformers or
nemo-automodel. Each use says why; tests/test_upstream.py fails loudly when one of them changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
from nemo_automodel.components.distributed.mesh import ParallelismSizes
from nemo_automodel.components.distributed.model_parallelizer import get_model_parallelizer
from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

# Private: the state FSDP2 hangs on a module. There is no public way to read or change a policy.
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from toolkit.dtensors import local_shard
from toolkit.spec import PolicySpec, torch_dtype

ROOT = "(root)"


@dataclass(frozen=True, slots=True)
class Unit:
    """What one FSDP unit really is set to, read back from FSDP2 itself."""

    name: str  # path in the model; the outermost unit is "(root)"
    module: str  # class of the wrapped module
    output_dtype: str
    param_dtype: str  # of the gathered parameters: compute
    reduce_dtype: str
    cast_forward_inputs: bool
    master_dtype: str  # of the sharded parameters and, with them, of the gradients the optimizer sees
    num_parameters: int  # of the unit itself, over all its shards


def build_setup(spec: PolicySpec, world_size: int) -> DistributedSetup:
    """Describe the device mesh and FSDP2 policy to AutoModel."""
    config = FSDP2Config(
        sequence_parallel=spec.sequence_parallel,
        mp_policy=_policy(spec, spec.output_dtype),
        offload_policy=CPUOffloadPolicy(pin_memory=False) if spec.cpu_offload else None,
    )
    inside = spec.activation_checkpointing if spec.activation_checkpointing != "hf" else False
    meshes = meshes_of(dist.group.WORLD, world_size, tp_size=spec.tensor_parallel_size)
    return dataclasses.replace(meshes, strategy_config=config, activation_checkpointing=inside)


@functools.cache
def meshes_of(world: dist.ProcessGroup, world_size: int, **sizes: int) -> DistributedSetup:
    """The device meshes of sizes named as in `ParallelismSizes`; each brings a dozen process groups, so once for a world."""
    return DistributedSetup.build(FSDP2Config(), ParallelismSizes(**sizes), world_size=world_size)


def _policy(spec: PolicySpec, output_dtype: str) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(spec.precision),
        reduce_dtype=torch_dtype(spec.reduce_dtype),
        output_dtype=torch_dtype(output_dtype),
        cast_forward_inputs=spec.cast_forward_inputs,
    )


def shard(model: nn.Module, setup: DistributedSetup) -> nn.Module:
    """Apply tensor parallelism, checkpointing and FSDP2 through the model's AutoModel parallelizer, at any rank count.

    `_apply` is what AutoModel's own dispatch ends in. It is called directly because the dispatch skips FSDP2, and with it
    the whole mixed-precision policy, on a single rank: the picked output dtype would be a silent no-op there.
    """
    # Its tensor-parallel embedding returns a view, which torch warns about once; nothing adds to it in place here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    config, context = setup.strategy_config, setup.mesh_context
    sharded: nn.Module = get_model_parallelizer(model)._apply(
        model=model,
        device_mesh=context.device_mesh,
        mp_policy=config.mp_policy,
        offload_policy=config.offload_policy,
        sequence_parallel=config.sequence_parallel,
        activation_checkpointing=context.activation_checkpointing,
        enable_fsdp2_prefetch=config.enable_fsdp2_prefetch,
    )
    return sharded


def attention_of(model: nn.Module) -> str:
    """The name of the attention that every layer reads at every forward; transformers has a public setter, but no getter."""
    config: Any = model.config
    return str(config._attn_implementation)


def unit_modules(model: nn.Module) -> dict[str, FSDPModule]:
    """Every FSDP unit of the model by name, outermost first."""
    return {name or ROOT: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}


def state_of(unit: FSDPModule) -> FSDPState:
    """FSDP2's own state of a unit."""
    return unit._get_fsdp_state()


def _set_policy(unit: FSDPModule, policy: MixedPrecisionPolicy) -> None:
    # The state reads output_dtype and cast_forward_inputs at every forward, so a change acts from the next one. The
    # groups read param_dtype and reduce_dtype once, at the first forward.
    state = state_of(unit)
    state._mp_policy = policy
    for group in state._fsdp_param_groups:
        group.mp_policy = policy


def head_name(model: nn.Module) -> str | None:
    """Name of the output projection's own FSDP unit, or None when the root owns it."""
    head = model.get_output_embeddings()  # type: ignore[operator]
    return next((name for name, unit in unit_modules(model).items() if unit is head and name != ROOT), None)


def apply_spec(model: nn.Module, spec: PolicySpec, overrides: dict[str, str] | None = None) -> None:
    """Set every unit to the spec's output dtype and input casts, live: it acts from the next forward on.

    Args:
        overrides: another output dtype for single units, by unit name (used to localise a divergence).
    """
    head = head_name(model)
    for name, unit in unit_modules(model).items():
        if name == head and spec.lm_head_precision == "float32":
            # The input cast is this unit's own need: whatever the last layer emits has to meet float32 weights.
            policy = MixedPrecisionPolicy(torch.float32, torch.float32, torch.float32, cast_forward_inputs=True)
        else:
            policy = _policy(spec, (overrides or {}).get(name, output_dtype_of(name, spec, head)))
        _set_policy(unit, policy)


def output_dtype_of(unit: str, spec: PolicySpec, head: str | None) -> str:
    """The output dtype a spec asks of a unit: its own, but for the root and the head where these return float32."""
    return spec.root_output_dtype if unit in (ROOT, head) else spec.output_dtype


def inspect_units(model: nn.Module) -> list[Unit]:
    """Read back what each FSDP unit is set to."""
    found = []
    for name, module in unit_modules(model).items():
        state = state_of(module)
        policy = state._mp_policy
        params = [p for group in state._fsdp_param_groups for p in group.fsdp_params]
        masters = {str(p.sharded_param.dtype).removeprefix("torch.") for p in params}
        found.append(
            Unit(
                name=name,
                module=type(module).__name__.removeprefix("FSDP"),
                output_dtype=str(policy.output_dtype).removeprefix("torch."),
                param_dtype=str(policy.param_dtype).removeprefix("torch."),
                reduce_dtype=str(policy.reduce_dtype).removeprefix("torch."),
                cast_forward_inputs=policy.cast_forward_inputs,
                master_dtype="+".join(sorted(masters)) or "none",
                num_parameters=sum(p.sharded_param.numel() for p in params),
            )
        )
    return found


def check_units(model: nn.Module, spec: PolicySpec) -> list[Unit]:
    """Compare what FSDP2 is set to with what was asked.

    Raises:
        RuntimeError: no unit exists, or one differs. Not a user's error: AutoModel or torch did something unexpected.
    """
    units = inspect_units(model)
    if not units or units[0].name != ROOT:
        raise RuntimeError("FSDP2 was not applied: the model has no root FSDP unit, so no output dtype would act.")
    head = head_name(model)
    for unit in units:
        own_head = unit.name == head and spec.lm_head_precision == "float32"
        wanted = {
            "output_dtype": output_dtype_of(unit.name, spec, head),
            "param_dtype": "float32" if own_head else spec.precision,
            "reduce_dtype": "float32" if own_head else spec.reduce_dtype,
            "cast_forward_inputs": own_head or spec.cast_forward_inputs,
        }
        if unit.num_parameters:
            wanted["master_dtype"] = "float32"
        for field, value in wanted.items():
            if getattr(unit, field) != value:
                raise RuntimeError(
                    f"FSDP unit {unit.name} has {field}={getattr(unit, field)} where {value} was asked for; nothing was run."
                )
    return units


def root_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters that belong to the root unit and no other."""
    inner = tuple(f"{name}." for name in unit_modules(model) if name != ROOT)
    return [name for name, _ in model.named_parameters() if not name.startswith(inner)]


def first_not_finite(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """Run a forward and name the first FSDP unit whose output holds an infinity or NaN, None if none does."""
    found = largest_outputs(model, forward)
    return next((name for name, largest in found.items() if not math.isfinite(largest)), None)


def largest_outputs(model: nn.Module, forward: Callable[[], Any]) -> dict[str, float]:
    """Run a forward without gradient; the largest magnitude each FSDP unit emits, NaN or infinity included, in its order."""
    found: dict[str, float] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            leaves = [t for t in torch.utils._pytree.tree_leaves(output) if isinstance(t, torch.Tensor)]
            local = [local_shard(t) for t in leaves if t.is_floating_point()]
            maxima = [float(t.abs().max()) for t in local if t.numel()]
            found[name] = math.nan if any(map(math.isnan, maxima)) else max(maxima, default=0.0)

        return hook

    units = unit_modules(model).items()
    handles = [cast(nn.Module, unit).register_forward_hook(look(name)) for name, unit in units]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    reshard(model)
    return found


@contextlib.contextmanager
def kept_unsharded(model: nn.Module) -> Iterator[None]:
    """Gather every parameter at most once while many forwards run without gradient; free the copies at the end.

    The public setter has no getter: the mesh each unit reshards to after forward is saved and put back by hand.
    """
    groups = [group for unit in unit_modules(model).values() for group in state_of(unit)._fsdp_param_groups]
    saved = [group.post_forward_mesh_info for group in groups]
    root = unit_modules(model)[ROOT]
    auto = {name: state_of(unit)._auto_reshard_after_forward for name, unit in unit_modules(model).items()}
    root.set_reshard_after_forward(False)
    try:
        yield
    finally:
        for group, mesh_info in zip(groups, saved, strict=True):
            group.post_forward_mesh_info = mesh_info
        for name, unit in unit_modules(model).items():
            state_of(unit)._auto_reshard_after_forward = auto[name]
        reshard(model)


def reshard(model: nn.Module) -> None:
    """Free every gathered copy of the parameters. Needed after a forward without backward: some units keep theirs."""
    for unit in unit_modules(model).values():
        unit.reshard()


def synchronize_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Complete the gradients of parameters that tensor-parallel peers hold in copies (norms of queries and keys, say).

    Each peer computes only its heads' part of them. AutoModel leaves this call to the training loop, and without it those
    gradients are off by up to 80 % with nothing to notice but a test. Once per step, after the last micro-batch.
    """
    synchronize_tp_replica_gradients([model], mesh)


def recover(model: nn.Module) -> None:
    """Make FSDP2 usable again after an exception left a forward or backward half done; gradients are dropped."""
    root = unit_modules(model)[ROOT]
    if state_of(root)._is_root is None:
        return  # no forward has started yet: nothing to put right, and the public reset would fail
    root.reset_iter_state()
    for unit in unit_modules(model).values():
        for group in state_of(unit)._fsdp_param_groups:
            for param in group.fsdp_params:
                # The public reset leaves these, and the next backward would add to them.
                unsharded = getattr(param, "_unsharded_param", None)
                if unsharded is not None:
                    unsharded.grad = None
                param.unsharded_accumulated_grad = None
    model.zero_grad(set_to_none=True)
