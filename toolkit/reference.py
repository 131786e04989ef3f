"""The frozen reference of a KL penalty: the policy's own shards as they were loaded, swapped in for one scoring pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from toolkit import fsdp
from toolkit.dtensors import local_shard
from toolkit.policy import Policy


@torch.no_grad()
def keep_reference(policy: Policy) -> None:
    """Copy this rank's float32 shards; call it before the first step."""
    policy.reference = [local_shard(param).clone() for param in policy.model.parameters()]


@contextlib.contextmanager
def reference_weights(policy: Policy) -> Iterator[None]:
    """Run with the reference's weights; at most one parameter's shard more is held meanwhile."""
    _swap(policy)
    try:
        yield
    finally:
        _swap(policy)


@torch.no_grad()
def _swap(policy: Policy) -> None:
    assert policy.reference is not None
    fsdp.reshard(policy.model)  # gathered copies are of the other weights
    for param, kept in zip(policy.model.parameters(), policy.reference, strict=True):
        shard = local_shard(param)
        held = shard.clone()
        shard.copy_(kept)
        kept.copy_(held)
