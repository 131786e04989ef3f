"""The truth to measure distances from: the same weights run all in float32 and all in float64, without FSDP.

Shapes: _B sequences, _T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from toolkit import fsdp
from toolkit.errors import SpecError
from toolkit.policy import Policy
from toolkit.prompts import Batch

#: Models of at most so many parameters are compared with the truth unasked: it takes 12 bytes a parameter on every rank.
CHEAP_PARAMETERS = 20_000_000


class _Float64Throughout(TorchFunctionMode):
    """Turns casts to float32 into casts to float64: Hugging Face's norms, softmax and rotary angles ask for float32."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {k: torch.float64 if value is torch.float32 else value for k, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


@torch.no_grad()
def exact_logprobs(policy: Policy, batch: Batch, temperatures: set[float]) -> dict[tuple[str, float], torch.Tensor]:
    """Logprobs [B, T-1], float64 on the CPU, by ("float32" or "float64", temperature).

    Each rank holds the whole model unsharded meanwhile: 4 bytes a parameter of the gathered weights, and 8 of the copy.

    Raises:
        SpecError: the model has an operation without a float64 kernel.
    """
    fsdp.reshard(policy.model)
    state = get_model_state_dict(policy.model, options=StateDictOptions(full_state_dict=True))
    config = copy.deepcopy(policy.model.config)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    model.load_state_dict(state)
    model.to(policy.device).eval()
    del state
    found: dict[tuple[str, float], torch.Tensor] = {}
    try:
        with torch.autocast(policy.device.type, enabled=False):
            logits_BTV = _logits(model, batch)
            found |= {("float32", t): _logprobs(logits_BTV, batch, t) for t in temperatures}
            model.double()
            with _Float64Throughout():
                logits_BTV = _logits(model, batch)
            assert logits_BTV.dtype == torch.float64
            found |= {("float64", t): _logprobs(logits_BTV, batch, t) for t in temperatures}
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise SpecError(
            f"{policy.spec.model} cannot run in float64 ({str(error).splitlines()[0]}); use truth=False."
        ) from error
    return found


def _logits(model: Any, batch: Batch) -> torch.Tensor:
    logits: torch.Tensor = model(
        input_ids=batch.ids_BT, attention_mask=batch.mask_BT, position_ids=batch.positions_BT, use_cache=False
    ).logits
    return logits


def _logprobs(logits_BTV: torch.Tensor, batch: Batch, temperature: float) -> torch.Tensor:
    scaled = logits_BTV[:, :-1] / temperature
    return torch.log_softmax(scaled, -1).gather(-1, batch.ids_BT[:, 1:, None]).squeeze(-1).double().cpu()
