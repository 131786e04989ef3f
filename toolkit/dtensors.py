"""Of a tensor that may be sharded over ranks: what is here, and all of it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor gathered from all ranks that hold parts of it; every one of them has to call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
