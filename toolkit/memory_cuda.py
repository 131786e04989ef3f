"""What CUDA's own allocator says beside the ledger: its peak, and a snapshot for PyTorch's memory visualizer.

The allocator sees what the ledger cannot, scratch inside kernels and libraries, and rounds every block up to 512 bytes; the
ledger knows what each byte is. Neither counts the CUDA context and NCCL's buffers, which are not allocated through torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

#: Allocations and frees kept in a snapshot; a step of an 8B model makes some 50,000.
_MAX_ENTRIES = 1_000_000


@dataclass(slots=True)
class AllocatorPeak:
    """What the allocator saw while a context was open."""

    peak_bytes: int | None = None  # most bytes allocated at once in this process; None on a CPU, which keeps no count


@contextlib.contextmanager
def allocator_beside(device: torch.device, snapshot: Path | None) -> Iterator[AllocatorPeak]:
    """Watch the allocator of a CUDA device; on a CPU, nothing.

    Args:
        snapshot: a file to write the allocations to, each with its stack, for pytorch.org/memory_viz. Several ranks write
            one each, with the rank before the suffix.
    """
    seen = AllocatorPeak()
    if device.type != "cuda":
        yield seen
        return
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    if snapshot is not None:  # documented under these names in torch's guide to CUDA memory, underscore and all
        torch.cuda.memory._record_memory_history(max_entries=_MAX_ENTRIES)
    try:
        yield seen
        torch.cuda.synchronize(device)
        seen.peak_bytes = torch.cuda.max_memory_allocated(device)
        if snapshot is not None:
            torch.cuda.memory._dump_snapshot(str(rank_file(snapshot)))
    finally:
        if snapshot is not None:
            torch.cuda.memory._record_memory_history(enabled=None)


def rank_file(path: Path) -> Path:
    """This rank's file: `path` itself for a single rank."""
    return path if dist.get_world_size() == 1 else path.with_suffix(f".rank{dist.get_rank()}{path.suffix}")
