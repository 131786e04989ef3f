"""Run a causal language model so that its forward returns token logprobs instead of logits.

The head has to run where FSDP2 has gathered its weight: inside the forward of the unit that owns it, or its gradient is
never reduced. So for the length of a call the model's forward and its head's are ours; FSDP2's hooks, tensor parallelism's
and the ledger's sit around them as around the originals.

Shapes: _B sequences, _T tokens, _K of them scored, _V vocabulary, _H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from toolkit.dtensors import local_shard, whole
from toolkit.errors import SpecError
from toolkit.linear_head import IGNORED, linear_logprobs

Look = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None]


def linear_forward(
    model: nn.Module,
    ids_BT: torch.Tensor,
    mask_BT: torch.Tensor | None,
    positions_BT: torch.Tensor,
    targets_BK: torch.Tensor,
    temperature: float,
    *,
    columns_K: torch.Tensor | None = None,
    look: Look | None = None,
) -> torch.Tensor:
    """Logprobs of targets, each given the tokens up to a column.

    Args:
        targets_BK: int64 token ids, IGNORED where nothing is to be scored: that never reaches the head.
        columns_K: the columns that predict the targets; None takes all T, the last one too.
        look: called with what the head is given, [B, T, H], and with the whole weight [V, H] and bias it has.

    Returns:
        [B, K] float32, 0 where the target is ignored.

    Raises:
        SpecError: the model's output projection is not a linear layer.
    """
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Linear):
        raise SpecError(
            f"logprob_mode='linear' needs a linear output projection; this model's is a {type(head).__name__}. Use "
            "logprob_mode='chunked'."
        )
    decoder: Any = model.base_model
    softcap = final_softcap(model)

    def read_out(hidden_BTH: torch.Tensor) -> torch.Tensor:
        # The root unit casts nothing between the last layer and a head it owns; autocast would round its input too.
        hidden_BTH = local_shard(hidden_BTH).to(head.weight.dtype)
        if look is not None:
            look(hidden_BTH, whole(head.weight.detach()), None if head.bias is None else whole(head.bias.detach()))
        return _read_out(head, hidden_BTH, targets_BK, temperature, softcap)

    def forward(**inputs: Any) -> torch.Tensor:
        hidden_BTH = decoder(**inputs).last_hidden_state
        logprobs: torch.Tensor = head(hidden_BTH if columns_K is None else hidden_BTH[:, columns_K])
        return _my_copy(logprobs, head.weight)

    with _forward_of(head, read_out), _forward_of(model, forward):
        logprobs_BK: torch.Tensor = model(
            input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, use_cache=False
        )
    return logprobs_BK


def next_targets(ids_BT: torch.Tensor, scored_BT: torch.Tensor) -> torch.Tensor:
    """The token after each column [B, T], IGNORED where that is not to be scored (and after the last)."""
    targets_BT = torch.full_like(ids_BT, IGNORED)
    targets_BT[:, :-1] = torch.where(scored_BT[:, 1:] > 0, ids_BT[:, 1:], IGNORED)
    return targets_BT


def final_softcap(model: nn.Module) -> float | None:
    """The cap of the model's logits (Gemma 2 and 3), None for most models."""
    config: Any = model.config
    cap: float | None = config.get_text_config().to_dict().get("final_logit_softcapping")
    return cap


def _read_out(
    head: nn.Linear, hidden_BTH: torch.Tensor, targets_BT: torch.Tensor, temperature: float, softcap: float | None
) -> torch.Tensor:
    weight, bias = local_shard(head.weight), None if head.bias is None else local_shard(head.bias)
    mesh = head.weight.device_mesh if isinstance(head.weight, DTensor) else None
    logprobs_BT = linear_logprobs(
        hidden_BTH, weight, targets_BT, bias=bias, temperature=temperature, softcap=softcap,
        group=None if mesh is None else mesh.get_group(),
    )  # fmt: skip
    assert isinstance(logprobs_BT, torch.Tensor)
    if mesh is None:
        return logprobs_BT.unsqueeze(-1)
    # Tensor parallelism: its hook before this gave every rank all of hidden, and its hook after this takes each rank's
    # tensor for a part of a [B, T, ranks] one. They are equal; `_my_copy` takes this rank's again.
    return DTensor.from_local(logprobs_BT.unsqueeze(-1), mesh, [Shard(-1)], run_check=False)


def _my_copy(logprobs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """This rank's [B, T] of [B, T, 1] or, where a tensor-parallel hook gathered all ranks', of [B, T, ranks]."""
    local = local_shard(logprobs)
    copy = weight.device_mesh.get_local_rank() if local.shape[-1] > 1 and isinstance(weight, DTensor) else 0
    return local[..., copy]


@contextlib.contextmanager
def _forward_of(module: nn.Module, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let a module run another forward, inside all of its hooks."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
