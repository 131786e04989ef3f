"""The policy on a rank: run forward, act together with the other ranks, switch precision live.

Shapes: _B sequences, _T tokens, _V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerBase

from toolkit import fsdp
from toolkit.dtensors import whole
from toolkit.errors import PeerFailed, SpecError
from toolkit.layout import check_output_dtype
from toolkit.linear_forward import linear_forward, next_targets
from toolkit.prompts import Batch
from toolkit.ranks import report_progress, stop_requested
from toolkit.shared_prompts import share_prompts
from toolkit.spec import DTYPES, PolicySpec, torch_dtype


@dataclass(slots=True)
class Policy:
    """A sharded model and all it needs to be trained on this rank."""

    spec: PolicySpec
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    mesh: DeviceMesh
    device: torch.device
    optimizer: torch.optim.Optimizer
    eos_ids: tuple[int, ...]  # any of them ends a completion; chat models have several
    reference: list[torch.Tensor] | None = None  # float32 shards of a KL penalty's reference, in the parameters' order

    @property
    def data_rank(self) -> int:
        """This rank's place among the data-parallel ranks; tensor-parallel peers share it."""
        return self.mesh.get_local_rank("dp_shard")  # (slicing the mesh takes a millisecond)

    @property
    def data_size(self) -> int:
        """Number of data-parallel ranks."""
        return self._size("dp_shard")

    @property
    def tensor_size(self) -> int:
        """Number of ranks that share one copy of each layer."""
        return self._size("tp")

    def _size(self, axis: str) -> int:
        names = self.mesh.mesh_dim_names
        assert names is not None
        return self.mesh.size(names.index(axis))

    @property
    def vocab_size(self) -> int:
        """V of the whole model."""
        config: Any = self.model.config
        return int(config.get_text_config().vocab_size)

    @property
    def max_positions(self) -> int | None:
        """Longest sequence the model's positions are made for, None if its config does not say."""
        config: Any = self.model.config
        text = config.get_text_config().to_dict()
        limit: int | None = text.get("max_position_embeddings", text.get("n_positions"))
        return limit

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for all: shows progress, returns records."""
        return dist.get_rank() == 0

    def progress(self, description: str, done: int, total: int) -> None:
        """Show progress in the calling cell, once for all ranks."""
        if self.is_first:
            report_progress(description, done, total)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The region forward, loss and backward run in (as in NeMo-RL, the backward too)."""
        return torch.autocast(self.device.type, torch_dtype(self.spec.precision), enabled=self.spec.runs_autocast)

    def forward(self, ids_BT: torch.Tensor, mask_BT: torch.Tensor | None, positions_BT: torch.Tensor, **options: Any) -> Any:
        """Run the model; `.logits` is [B, T, V] in the root's output dtype, sharded over V when tensor-parallel.

        Without a mask, a row may hold several sequences end to end: each begins where positions begin again.
        """
        options.setdefault("use_cache", False)
        return self.model(input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, **options)

    def forward_logprobs(self, batch: Batch, mask_BT: torch.Tensor | None, temperature: float) -> torch.Tensor:
        """Run the model without logits: [B, T-1] float32 logprobs of the batch's completion tokens, 0 at others."""
        targets_BT = next_targets(batch.ids_BT, batch.token_mask_BT)
        return linear_forward(self.model, batch.ids_BT, mask_BT, batch.positions_BT, targets_BT, temperature)[:, :-1]

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a CPU tensor over the data-parallel ranks (over all ranks, less the copies of tensor-parallel peers)."""
        dist.all_reduce(values)
        return values / self.tensor_size

    def stop_if_asked(self) -> None:
        """Raise KeyboardInterrupt on every rank if Ctrl-C reached any of them. Call where stopping leaves no half step."""
        flag = torch.tensor([stop_requested()], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Run code that may fail on one rank only (a reward function, say) so that all ranks leave together."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        failed = torch.tensor([error is not None], dtype=torch.int32)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        if error is not None:
            raise error
        if failed.item():
            raise PeerFailed("another rank failed")

    @contextlib.contextmanager
    def temporarily(self, **settings: Any) -> Iterator[None]:
        """Run with other live settings of the spec (`output_dtype`, `cast_forward_inputs`, `autocast`, ...)."""
        before = self.spec
        switch(self, **settings)
        try:
            yield
        finally:
            self.spec = before
            fsdp.apply_spec(self.model, before)


def check_finite(policy: Policy, values: torch.Tensor, batch: Batch, doing: str) -> None:
    """Raise on every rank if any rank met a NaN or an infinity, naming the unit it first shows in.

    Args:
        values: what was computed; -inf is allowed (a token of no probability).
        batch: the sequences it was computed of; looked into again, a row of them, if something is wrong.

    Raises:
        FloatingPointError: naming the precision, the output dtype and the FSDP unit.
    """
    bad = torch.isnan(values) | (values == torch.inf)
    flag = torch.tensor([bool(bad.any())], dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    if not flag.item():
        return
    rows = bad.reshape(bad.shape[0], -1).any(-1).nonzero().flatten().tolist()
    row = batch.rows(rows[0], rows[0] + 1) if rows else batch.rows(0, 1)
    with policy.autocast():
        mine = fsdp.first_not_finite(policy.model, lambda: policy.forward(row.ids_BT, row.mask_BT, row.positions_BT))
    units: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(units, mine)
    unit = next((u for u in units if u is not None), None)
    raise FloatingPointError(
        f"{doing} met values that are not finite at precision={policy.spec.precision!r} and "
        f"output_dtype={policy.spec.output_dtype!r}{f', first in FSDP unit {unit}' if unit else ''}: they left the range of "
        "the dtype (float16 ends at 65504), or the weights are not finite. Use bfloat16 or float32 there."
    )


def probe(policy: Policy) -> None:
    """Run a forward of a few tokens, so that settings which crash deep inside do so now, with a message that helps.

    Raises:
        SpecError: the forward failed.
    """
    ids_BT = torch.zeros(1, max(2, policy.tensor_size), dtype=torch.int64, device=policy.device)
    try:
        with torch.no_grad(), policy.autocast():
            policy.forward(ids_BT, torch.ones_like(ids_BT), torch.arange(ids_BT.shape[1], device=policy.device)[None])
        fsdp.reshard(policy.model)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        fsdp.recover(policy.model)
        spec = policy.spec
        raise SpecError(
            f"{spec.model} cannot run with output_dtype={spec.output_dtype!r}, precision={spec.precision!r}, autocast="
            f"{spec.autocast}, cast_forward_inputs={spec.cast_forward_inputs}: {str(error).splitlines()[0]}. Where an "
            f"operation outside the inner FSDP units (a final LayerNorm, say) refuses mixed dtypes, output_dtype="
            f"{spec.precision!r} cures it."
        ) from error
    if policy.spec.logprob_mode == "linear":
        _check_linear(policy)
    if policy.spec.sequence_packing:
        _check_packing(policy)
    if policy.spec.share_prompt_prefix:
        _check_sharing(policy)


@torch.no_grad()
def _check_packing(policy: Policy) -> None:
    """See that a packed sequence does not depend on the one before it; nothing in a model's class tells.

    Raises:
        SpecError: it does.
    """
    length = 4 * policy.tensor_size
    second = torch.arange(length, device=policy.device) % policy.vocab_size
    positions_BT = torch.arange(length, device=policy.device).repeat(2)[None]
    with policy.autocast():
        rows = [torch.cat([first, second])[None] for first in (second, second.flip(0))]
        after = [whole(policy.forward(ids_BT, None, positions_BT).logits)[:, length:] for ids_BT in rows]
    fsdp.reshard(policy.model)
    if not torch.equal(*after):
        raise SpecError(
            f"sequence_packing=True: {policy.spec.model} lets packed sequences see each other (it does not take new "
            "positions for a new sequence). Use sequence_packing=False."
        )


@torch.no_grad()
def _check_sharing(policy: Policy) -> None:
    """See that completions which share a prompt's row are computed as in rows of their own.

    Raises:
        SpecError: they are not: the model has layers that look at a window of tokens only, or that take no mask of ours.
    """
    config: Any = policy.model.config
    text = config.get_text_config().to_dict()
    windowed = text.get("use_sliding_window", True) and text.get("sliding_window")
    other = [kind for kind in text.get("layer_types") or ["sliding_attention"] * bool(windowed) if kind != "full_attention"]
    why = f"has layers of {other[0]}, for which no mask of shared rows is made" if other else _sharing_differs(policy)
    if why:
        raise SpecError(f"share_prompt_prefix=True: {policy.spec.model} {why}. Use share_prompt_prefix=False.")


#: Mean error of logits over their spread: bfloat16 gives 0.01 over thirty layers, wrong positions 0.13, a lost prompt 0.5.
_LARGEST_NOISE = 0.05


def _sharing_differs(policy: Policy) -> str | None:
    prompt, width = 4, 8
    ids_BT = torch.arange(3 * width, device=policy.device).view(3, width) % policy.vocab_size
    ids_BT[:, :prompt] = ids_BT[0, :prompt]
    counted_BT = (torch.arange(width, device=policy.device) >= prompt).float().expand(3, width)
    batch = Batch(ids_BT, torch.ones_like(ids_BT), torch.arange(width, device=policy.device).expand(3, width), counted_BT)
    other = dataclasses.replace(batch, ids_BT=torch.cat([ids_BT[:2], ids_BT[2:].roll(1, 1)]))
    other.ids_BT[:, :prompt] = ids_BT[0, :prompt]

    def run(batch: Batch) -> torch.Tensor:
        rows = share_prompts(batch)
        logits = policy.forward(rows.ids_RL, rows.mask_R1LL, rows.positions_RL, logits_to_keep=rows.columns_K).logits
        return whole(logits).view(3, width - prompt, -1).double()

    try:
        with policy.autocast():
            apart_BTV = whole(policy.forward(ids_BT, batch.mask_BT, batch.positions_BT).logits)[:, prompt - 1 : -1].double()
            shared_BTV, beside_another_BTV = run(batch), run(other)
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        fsdp.recover(policy.model)
        return f"cannot run rows with a mask of their own ({str(error).splitlines()[0]})"
    fsdp.reshard(policy.model)
    off = float((shared_BTV - apart_BTV).abs().mean() / apart_BTV.std())
    if not torch.equal(shared_BTV[:2], beside_another_BTV[:2]) or off > _LARGEST_NOISE:
        return "lets completions in one row see each other, or does not go by positions and masks alone"
    return None


@torch.no_grad()
def _check_linear(policy: Policy) -> None:
    """Compare linear mode with the model's own logits on a few tokens.

    Some models do more to their logits than a linear layer and a cap (scale them, say); nothing in a model's class tells.

    Raises:
        SpecError: they differ by more than a 16-bit head rounds.
    """
    width = 8 * policy.tensor_size
    ids_BT = torch.arange(width, device=policy.device)[None] % policy.vocab_size
    ones_BT = torch.ones_like(ids_BT)
    batch = Batch(ids_BT, ones_BT, torch.arange(width, device=policy.device)[None], ones_BT.float())
    with policy.autocast():
        logits_BTV = whole(policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT).logits)[:, :-1].double()
        found_BT = policy.forward_logprobs(batch, batch.mask_BT, 1.0)
    fsdp.reshard(policy.model)
    expected_BT = logits_BTV.log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
    apart = float((found_BT - expected_BT).abs().max())
    mantissa_bits = min(DTYPES[name].mantissa_bits for name in (policy.spec.precision, policy.spec.output_dtype))
    allowed = 1e-3 + 2.0 ** (1 - mantissa_bits) * float(logits_BTV.abs().max())
    if apart > allowed:
        raise SpecError(
            f"logprob_mode='linear' gives logprobs up to {apart:.2g} nats from those of {policy.spec.model}'s own logits, "
            f"where rounding explains {allowed:.2g}: this model does more to its logits than a linear layer and a soft cap. "
            "Use logprob_mode='chunked'."
        )


#: Fields of a spec that a live session can change; the others need another build.
LIVE_FIELDS = (
    "output_dtype",
    "cast_forward_inputs",
    "autocast",
    "logprob_mode",
    "logprob_chunk_size",
    "temperature_order",
)


def switch(policy: Policy, **settings: Any) -> list[fsdp.Unit]:
    """Change live settings; acts from the next forward on, with no rebuild.

    Returns:
        What every FSDP unit is set to now, read back.

    Raises:
        SpecError: the combination is refused; nothing has changed.
    """
    assert set(settings) <= set(LIVE_FIELDS)
    before, spec = policy.spec, dataclasses.replace(policy.spec, **settings)
    check_output_dtype(spec, head_in_root=fsdp.head_name(policy.model) is None)
    try:
        fsdp.apply_spec(policy.model, spec)
        policy.spec = spec
        units = fsdp.check_units(policy.model, spec)
        if spec != before:
            probe(policy)
    except Exception:
        policy.spec = before
        fsdp.apply_spec(policy.model, before)
        raise
    return units


def by_mesh(params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by device mesh and placement: torch's fused ("foreach") operations refuse a mixture.

    Under tensor parallelism some parameters are sharded over two mesh axes and some over one.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        data = param.data
        key = (data.device_mesh, data.placements) if isinstance(data, DTensor) else None
        groups.setdefault(key, []).append(param)
    return list(groups.values())
