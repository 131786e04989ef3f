"""Watch what FSDP2 does out of sight: gathering parameters, casting outputs, reducing gradients.

With fsdp.py, the only file that touches private parts of torch; see there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

# Private by its module's name: what a tensor-parallel collective returns.
from torch.distributed._functional_collectives import AsyncCollectiveTensor

# Private: FSDP2 offers no events, and its hooks are bound before anyone could wrap them.
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

# Private: DTensor finds the global shape of a result by running the operation on fake tensors of global shapes.
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from toolkit.fsdp import state_of, unit_modules


def with_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind a wrapper: both kinds have a storage of their own, of the full size and with no memory behind it."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor  # to_local() would record an autograd node
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


class Observer(Protocol):
    """What `watch` tells about a forward and backward."""

    def tag(self, context: str) -> contextlib.AbstractContextManager[None]:
        """Allocations inside belong to `context`: "unshard" or "reduce"; inside "shapes" nothing is allocated at all."""

    def unit_output(self, unit: str, tensors: list[torch.Tensor]) -> None:
        """A unit's forward ended with these tensors, already in its output dtype."""

    def unit_backward(self, unit: str) -> None:
        """Backward reached this unit."""

    def gradients(self, tensors: list[torch.Tensor]) -> None:
        """These are gradients: unsharded ones before their reduction, sharded ones after."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage was resized in place, which is how FSDP2 allocates and frees gathered parameters."""


@contextlib.contextmanager
def watch(model: nn.Module, observer: Observer) -> Iterator[None]:
    """Report FSDP2's hidden work in this process to `observer` while the context is open.

    Patches the two private classes, because FSDP2 offers no events and its hooks are bound before anyone can wrap them.
    """
    names = {state_of(unit): name for name, unit in unit_modules(model).items()}

    def tagged(context: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
                with observer.tag(context):
                    return original(self, *args, **kwargs)

            return wrapper

        return wrap

    def watch_output(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: FSDPState, output: Any) -> Any:
            output = original(self, output)
            leaves = torch.utils._pytree.tree_leaves(output)
            observer.unit_output(names.get(self, ""), [t for t in leaves if isinstance(t, torch.Tensor)])
            return output

        return wrapper

    def watch_pre_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: FSDPState, grad: torch.Tensor) -> Any:
            observer.unit_backward(names.get(self, ""))
            return original(self, grad)

        return wrapper

    def watch_post_backward(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: FSDPParamGroup, *unused: Any) -> None:
            observer.gradients(_unsharded_gradients(self))
            with observer.tag("reduce"):
                original(self, *unused)
            observer.gradients([p.sharded_param.grad for p in self.fsdp_params if p.sharded_param.grad is not None])

        return wrapper

    def watch_resize(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: torch.UntypedStorage, size: int) -> Any:
            result = original(self, size)
            observer.resized(self)
            return result

        return wrapper

    with contextlib.ExitStack() as stack:
        for owner, name, wrap in (
            (FSDPParamGroup, "unshard", tagged("unshard")),
            (FSDPParamGroup, "wait_for_unshard", tagged("unshard")),
            (FSDPParamGroup, "post_backward", watch_post_backward),
            (FSDPState, "_cast_output_dtype", watch_output),
            (FSDPState, "_pre_backward", watch_pre_backward),
            (torch.UntypedStorage, "resize_", watch_resize),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", tagged("shapes")),
        ):
            stack.enter_context(_patched(owner, name, wrap))
        yield


def _unsharded_gradients(group: FSDPParamGroup) -> list[torch.Tensor]:
    grads = []
    for param in group.fsdp_params:
        unsharded = getattr(param, "_unsharded_param", None)  # exists only once the unit was gathered
        if unsharded is not None and unsharded.grad is not None:
            grads.append(unsharded.grad)
        if param.unsharded_accumulated_grad is not None:
            grads.append(param.unsharded_accumulated_grad)
    return grads


@contextlib.contextmanager
def _patched(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    original = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)
