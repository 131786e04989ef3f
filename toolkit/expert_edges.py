"""A float32 head under a 16-bit root in an expert-parallel model, as AutoModel builds and shards it, and its cures.

Shapes: _B sequences, _T tokens, _V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from toolkit import fsdp_experts
from toolkit.edge_report import Edge, unmeasured
from toolkit.edge_rows import HEAD, REFUSED_TIED, num_experts
from toolkit.errors import PeerFailed
from toolkit.policy import Policy
from toolkit.prompts import Batch
from toolkit.truth import CHEAP_PARAMETERS

EXPERT_HEAD = f"{HEAD}, expert parallel"
#: What is built, as keyword arguments of `build_expert_parallel`: as it is, with each cure, and without a float32 head.
_FORMS: dict[str, dict[str, Any]] = {
    "rounded": {"output_dtype": "bfloat16", "lm_head_precision": "float32"},
    "float32 outputs": {"output_dtype": "float32", "lm_head_precision": "float32"},
    "no outer unit": {"output_dtype": "bfloat16", "lm_head_precision": "float32", "wrap_outer_model": False},
    "no float32 head": {"output_dtype": "bfloat16"},
}
_CURES = {
    "float32 outputs": "fsdp_output_dtype='float32', which the root returns too",
    "no outer unit": "moe_parallelizer.wrap_outer_model=False: logits bypass the root",
}


def expert_head_edges(policy: Policy, batch: Batch, limit: int = CHEAP_PARAMETERS) -> list[Edge]:
    """Build AutoModel's expert-parallel form of this model over all ranks and look at its logits; all ranks together.

    A row for each of both cures, or one that says why there are none. Every rank holds the whole model four times over, one
    after another, so models of more than `limit` parameters are left out.
    """
    reason = _why_not(policy, limit)
    if reason:
        return [unmeasured(EXPERT_HEAD, reason)]
    weights = fsdp_experts.checkpoint_weights(policy.model)
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    try:
        for name, form in _FORMS.items():
            found[name] = _logprobs(policy, weights, batch, form)
    except _CannotRunError as error:
        return [unmeasured(EXPERT_HEAD, str(error))]
    exact_BT = found["rounded"][1]  # all but the float32 outputs give their head the same hidden states
    mask_BT = batch.token_mask_BT[:, 1:].cpu() > 0
    pairs = {**found, "no float32 head": (found["no float32 head"][0], exact_BT)}
    sums = torch.tensor(
        [*(float((got - own)[mask_BT].abs().sum()) for got, own in pairs.values()), float(mask_BT.sum())],
        dtype=torch.float64,
    )
    *totals, count = policy.sum_over_data(sums).tolist()
    errors = {name: total / count for name, total in zip(pairs, totals, strict=True)}
    owner = fsdp_experts.automodel_class(policy.model)
    assert owner is not None
    return [
        Edge(
            EXPERT_HEAD,
            f"AutoModel's {owner.__name__} with these weights, experts over {dist.get_world_size()} ranks; logprobs "
            "of sampled tokens, against a float64 softmax of what its float32 head emits",
            errors["rounded"], "nats", cure, errors[name],
            "moe_parallelizer.lm_head_precision=float32 is undone by the outermost unit, silently; without any float32 head "
            f"it is {errors['no float32 head']:.1e} nats",
        )
        for name, cure in _CURES.items()
    ]  # fmt: skip


class _CannotRunError(Exception):
    """AutoModel's class does not take this model or cannot run on these ranks; the message says why."""


def _why_not(policy: Policy, limit: int) -> str:
    """Why there is nothing to measure, "" if there is."""
    text: Any = policy.model.config.get_text_config()  # type: ignore[operator, union-attr]
    experts, ranks = num_experts(text), dist.get_world_size()
    size = sum(p.numel() for p in policy.model.parameters())
    if not experts:
        return "this model is dense; there are no experts to be parallel over."
    if text.tie_word_embeddings:
        return (
            f"this model's head is tied; AutoModel leaves a tied head in the compute dtype whatever is asked. {REFUSED_TIED}"
        )
    if ranks == 1:
        return "one rank holds all experts; launch with ranks=2 or more."
    if experts % ranks:
        return f"{experts} experts cannot be divided evenly over {ranks} ranks."
    if size > limit:
        return (
            f"the model has {size:,} parameters, and every rank would hold all of them; it is measured up to "
            f"{limit:,}. The rounding is that of the dense row: the head does not know about experts."
        )
    if fsdp_experts.automodel_class(policy.model) is None:
        return (
            f"AutoModel has no class of its own for {type(policy.model).__name__.removeprefix('FSDP')}, and only its own "
            "divide their experts over ranks."
        )
    return ""


@torch.no_grad()
def _logprobs(
    policy: Policy, weights: dict[str, torch.Tensor], batch: Batch, form: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs [B, T-1] of the batch's tokens in float64 on the CPU: of the model's logits, and of what its head emitted.

    Raises:
        _CannotRunError: on every rank, where any of them could not.
    """
    seen: list[torch.Tensor] = []
    try:
        with policy.failing_together(), fsdp_experts.eager_and_quiet():
            model: Any = fsdp_experts.build_expert_parallel(
                policy.model, weights, policy.spec, dist.get_world_size(), policy.device, **form
            )
            tokens_BT = torch.zeros(1, 2, dtype=torch.int64, device=policy.device)
            # The same on every rank, so that an operation without a kernel here fails on all of them alike.
            model(
                tokens_BT,
                position_ids=torch.arange(2, device=policy.device)[None],
                attention_mask=torch.ones_like(tokens_BT),
            )
    except (Exception, PeerFailed) as error:  # AutoModel's classes fail in as many ways as there are classes
        words = " ".join((str(error) or type(error).__name__).split())
        raise _CannotRunError(f"AutoModel's own class of this model cannot be built or run here: {words[:300]}") from error
    handle = model.get_output_embeddings().register_forward_hook(lambda head, args, output: seen.append(output))
    with fsdp_experts.eager_and_quiet():
        logits_BTV = model(batch.ids_BT, position_ids=batch.positions_BT, attention_mask=batch.mask_BT).logits
    handle.remove()
    return _of_targets(logits_BTV, batch), _of_targets(seen[0], batch)


def _of_targets(logits_BTV: torch.Tensor, batch: Batch) -> torch.Tensor:
    logprobs_BTV = torch.log_softmax(logits_BTV[:, :-1].double(), -1)
    return logprobs_BTV.gather(-1, batch.ids_BT[:, 1:, None]).squeeze(-1).cpu()
