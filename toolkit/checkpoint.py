"""Weights and AdamW moments to disk and back, by torch's distributed checkpoint: each rank writes its own shards.

Names in the files are those of the unsharded model, so another number of ranks, or another tensor-parallel size, can read
them. Nothing else is state: every step derives its random numbers from the spec's seed and the step's number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from toolkit import fsdp
from toolkit.errors import SpecError
from toolkit.policy import Policy

# By parameter name instead of by parameter group: groups follow the device mesh, which another layout changes.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
_MODEL, _OPTIMIZER = "model", "optimizer"


def save(policy: Policy, folder: str) -> None:
    """Write this rank's shards into an empty folder; all ranks together."""
    fsdp.reshard(policy.model)
    state: dict[str, Any] = {_MODEL: get_model_state_dict(policy.model)}
    if policy.optimizer.state:  # before the first step there is none, and asking for it would make one
        state[_OPTIMIZER] = get_optimizer_state_dict(policy.model, policy.optimizer, options=_OPTIONS)
    state_dict_saver.save(state, checkpoint_id=folder)


def load(policy: Policy, folder: str) -> None:
    """Read this rank's shards back into the policy; all ranks together.

    Raises:
        SpecError: files are missing, cut off, or of another model.
    """
    fsdp.reshard(policy.model)
    state: dict[str, Any] = {_MODEL: get_model_state_dict(policy.model)}
    try:
        has_moments = any(name.startswith(f"{_OPTIMIZER}.") for name in _stored_names(folder))
        if has_moments:
            state[_OPTIMIZER] = get_optimizer_state_dict(policy.model, policy.optimizer, options=_OPTIONS)
        state_dict_loader.load(state, checkpoint_id=folder)
    except (CheckpointException, OSError, EOFError, RuntimeError, ValueError) as error:
        raise SpecError(
            f"{folder!r} cannot be read: files are missing or cut off, or were saved from another model "
            f"({type(error).__name__}: {_first_line(error)}). Resume another save."
        ) from error
    set_model_state_dict(policy.model, state[_MODEL])
    if has_moments:
        set_optimizer_state_dict(policy.model, policy.optimizer, state[_OPTIMIZER], options=_OPTIONS)


def _stored_names(folder: str) -> list[str]:
    if not (Path(folder) / ".metadata").is_file():
        raise FileNotFoundError("no .metadata")
    return list(FileSystemReader(folder).read_metadata().state_dict_metadata)


def _first_line(error: BaseException) -> str:
    return (str(error) or "no details").strip().splitlines()[-1][:200]
