"""The CPU allocator's own log of a block, by torch's profiler: an account of memory independent of the ledger's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass
class Allocations:
    """What a block allocated, known once it has ended."""

    peak_bytes: int = 0


@contextlib.contextmanager
def allocations() -> Iterator[Allocations]:
    """Most bytes the allocator had given out at once inside the block, beyond those at its start."""
    found = Allocations()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        yield found
    stack, events = list(profile.profiler.kineto_results.experimental_event_tree()), []
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if "ALLOCATION" in str(event.tag).upper():
            events.append((event.start_time_ns, event.extra_fields.alloc_size))
    assert events
    live = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        live += size
        found.peak_bytes = max(found.peak_bytes, live)
