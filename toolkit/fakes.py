"""Fake tensors and a fake process group: the code that runs a step runs unchanged, at any size, with no memory behind it.

A fake tensor has a shape, a dtype and a storage of a known size, and no data. Three things have to be put right for FSDP2,
tensor parallelism and transformers to do under it what they do for real; without them nothing fails, and the figures are
silently wrong (up to 4.7 times too high):

- device meshes keep their map of ranks in a real tensor: an operation on real tensors alone runs for real;
- transformers takes a fake tensor for a trace, and then builds a mask of all pairs of tokens that it skips in a real run;
- storages get addresses, by which AutoModel tells whether a head is tied to its embedding;
- code that looks at values (is the mask all ones? is the norm finite?) gets the answer of an ordinary step.

(The third fix, telling DTensor's shape propagation at global shapes from memory, is `fsdp_watch`'s: both kinds need it.)

One of the few files that touch private parts of torch and transformers; tests/test_upstream.py guards each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers.masking_utils
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.tensor import DTensor

# Importing it registers the backend "fake", whose collectives return at once and move nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.ranks import stop_requested


@contextlib.contextmanager
def fake_ranks(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a process group of any size, alone. Nothing may have joined a process group in this process before."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Make every tensor created inside a fake one, and FSDP2, DTensor and transformers treat it as they would a real one."""
    with contextlib.ExitStack() as stack:
        # AutoModel ties a head again if its address is not the embedding's; all fake ones have the address 0.
        torch.UntypedStorage.data_ptr = _address  # type: ignore[method-assign, assignment]
        stack.callback(delattr, torch.UntypedStorage, "data_ptr")  # uncovers the inherited one
        stack.enter_context(_replaced(transformers.masking_utils, "is_tracing", lambda tensor=None: False))
        # Small tensors made of Python numbers keep them; torch's own limit is one number, too few for lists of flags.
        stack.enter_context(_replaced(fake_tensor, "CONSTANT_NUMEL_LIMIT", 4096))
        stack.enter_context(_replaced(dist, "all_reduce", _all_reduce_among_alike))
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(_OrdinaryValues())
        yield mode


#: What makes fake tensors of real ones.
_LIFTING = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def _address(storage: torch.UntypedStorage) -> int:
    """An address of its own for every storage that has bytes."""
    return int(storage._cdata) if storage.nbytes() else 0


class _OrdinaryValues(TorchDispatchMode):
    """Answer questions about data that is not there as in an ordinary step: conditions hold, and selections take all."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor runs the operation on local tensors, which come back here
        if stop_requested():  # nobody waits for this rank: anywhere is a boundary, in backward too
            raise KeyboardInterrupt
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as the real one does; its fake makes a second tensor
        if not any(issubclass(t, FakeTensor) for t in types) and func not in _LIFTING:
            tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            with unset_fake_temporarily() if tensors else contextlib.nullcontext():
                return func(*args, **(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            # What is computed in float64 to be looked at is how far two things are apart: not at all.
            return {torch.bool: True, torch.float32: 1.0, torch.float64: 0.0}.get(args[0].dtype, 1)
        except DynamicOutputShapeException:
            if func is not torch.ops.aten.index.Tensor:
                raise
            values, (mask,) = args
            return values.reshape(-1, *values.shape[mask.dim() :]).clone()


_all_reduce = dist.all_reduce


def _all_reduce_among_alike(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **options: Any) -> Any:
    """All-reduce where every peer holds what this rank holds: known small values (flags, counts) come out as they would."""
    work = _all_reduce(tensor, op=op, group=group, **options)
    if isinstance(tensor, FakeTensor) and tensor.constant is not None and op == dist.ReduceOp.SUM:
        tensor.constant.mul_(dist.get_world_size(group))
    return work


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
