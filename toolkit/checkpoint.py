"""Weights and AdamW moments to disk and back, by torch's distributed checkpoint: each rank writes its own shards.

Names in the files are those of the unsharded model, so another number of ranks, or another tensor-parallel size, can read
them. Nothing else is state: every step derives its random numbers from the spec's seed and the step's number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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
from toolkit.spec import torch_dtype

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


def export(policy: Policy, folder: str, dtype: str) -> None:
    """Gather the whole model on rank 0 and write it in Hugging Face's format; all ranks together."""
    fsdp.reshard(policy.model)
    whole: dict[str, Any] = get_model_state_dict(
        policy.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    with policy.failing_together():
        if policy.is_first:
            model: Any = policy.model
            state = {name: tensor.to(torch_dtype(dtype)) for name, tensor in whole.items()}
            with torch.device("meta"):  # only its class, config and ties are needed to write the file
                empty = type(model)._from_config(model.config, dtype=torch_dtype(dtype))
            empty.generation_config = model.generation_config
            empty.save_pretrained(folder, state_dict=state)
            policy.tokenizer.save_pretrained(folder)


def _stored_names(folder: str) -> list[str]:
    if not (Path(folder) / ".metadata").is_file():
        raise FileNotFoundError("no .metadata")
    try:
        return list(FileSystemReader(folder).read_metadata().state_dict_metadata)
    except Exception as error:  # a pickle cut off raises whatever its next instruction happens to meet
        raise ValueError(f".metadata is no index of a checkpoint: {error}") from error


def _first_line(error: BaseException) -> str:
    return (str(error) or "no details").strip().splitlines()[-1][:200]
