"""Is each way to compute logprobs as exact as it claims, on this model and these tokens? Compared with float64.

Shapes: _B sequences, _T tokens, _N rows (tokens), _V vocabulary, _H hidden.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist

from toolkit import fsdp
from toolkit.collect import sample_step
from toolkit.linear_forward import final_softcap, linear_forward, next_targets
from toolkit.logprobs import forward_logprobs
from toolkit.policy import Policy
from toolkit.prompts import Batch, make_batch
from toolkit.records import Report
from toolkit.spec import DTYPES, GRPOConfig, LogprobMode

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_ORACLE_ROWS = 64  # rows of float64 logits at a time


@dataclass(repr=False, eq=False)
class SelfCheckReport(Report):
    """Error of each logprob mode against float64 logprobs of the same hidden states and head weights.

    Attributes:
        modes: a row per mode: mode, mean_abs_nats, max_abs_nats, bound_nats (what rounding can explain), within_bound.
        num_tokens: scored tokens, over all ranks.
        temperature: of the logprobs.
        output_dtype, precision: of the session.
        largest_logit: in absolute value; what 16-bit logits round away is proportional to it.
    """

    modes: list[dict[str, Any]]
    num_tokens: int
    temperature: float
    output_dtype: str
    precision: str
    largest_logit: float

    @property
    def passed(self) -> bool:
        """Whether every mode stayed within its bound."""
        return all(row["within_bound"] for row in self.modes)

    @property
    def summary(self) -> dict[str, Any]:
        errors = {f"{row['mode']}_max_abs_nats": row["max_abs_nats"] for row in self.modes}
        bounds = {f"{row['mode']}_bound_nats": row["bound_nats"] for row in self.modes}
        return {"passed": self.passed, "num_tokens": self.num_tokens, **errors, **bounds, "temperature": self.temperature}

    @property
    def headline(self) -> str:
        found = ", ".join(f"{row['mode']} {row['max_abs_nats']:.1e}" for row in self.modes)
        outside = [row["mode"] for row in self.modes if not row["within_bound"]]
        verdict = f"{' and '.join(outside)} OUTSIDE of what rounding explains" if outside else "all within their bounds"
        return f"largest error in nats against float64 over {self.num_tokens} tokens: {found}; {verdict}"

    def to_frame(self) -> pd.DataFrame:
        """A row per mode."""
        import pandas as pd

        return pd.DataFrame(self.modes)

    def figure(self) -> go.Figure:
        """Largest error of each mode beside its bound, on a logarithmic axis."""
        from toolkit.figures import BLUE, GREY, new_figure

        names = [row["mode"] for row in self.modes]
        best = min(self.modes, key=lambda row: row["max_abs_nats"])
        outside = [row["mode"] for row in self.modes if not row["within_bound"]]
        verdict = f"{' and '.join(outside)} outside of what rounding explains" if outside else "all within their bounds"
        figure = new_figure(f"{best['mode']} is nearest to float64, {best['max_abs_nats']:.1e} nats at most; {verdict}")
        for label, column, colour in (("largest error", "max_abs_nats", BLUE), ("bound", "bound_nats", GREY)):
            heights = [row[column] for row in self.modes]
            figure.add_bar(x=names, y=heights, name=label, marker={"color": colour})
        figure.update_yaxes(type="log", title_text="nats")
        return figure


def self_check(
    policy: Policy,
    config: GRPOConfig,
    problems: list[tuple[str, str]],
    token_ids: list[list[int]] | None,
    temperature: float,
    step: int,
) -> SelfCheckReport:
    """Compare every mode on this rank (all ranks together), on given tokens or on sampled completions of the problems."""
    batch = _tokens(policy, config, problems, token_ids, step)
    scored_BT = batch.token_mask_BT[:, 1:] > 0
    policy.model.train()
    with torch.no_grad():
        exact = _exact(policy, batch, temperature)
        errors = {}
        for mode in get_args(LogprobMode):
            with _in_mode(policy, mode):
                logprobs_BT = forward_logprobs(policy, batch, temperature)
                fsdp.reshard(policy.model)
            errors[mode] = (logprobs_BT.double() - exact.logprobs_BT)[scored_BT].abs().cpu()
    mine = {
        "errors": {} if policy.mesh["tp"].get_local_rank() else errors,  # its peers hold the same tokens
        "largest": exact.largest_logit,
        "size": exact.largest_sum,
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    largest, size = (max(part[name] for part in every) for name in ("largest", "size"))
    rows = []
    for mode in errors:
        all_N = torch.cat([part["errors"][mode] for part in every if part["errors"]])
        bound = error_bound(policy, mode, temperature, largest, size)
        rows.append(
            {
                "mode": mode,
                "mean_abs_nats": float(all_N.mean()),
                "max_abs_nats": float(all_N.max()),
                "bound_nats": bound,
                "within_bound": bool((all_N <= bound).all()),  # NaN is not
            }
        )
    spec = policy.spec
    return SelfCheckReport(rows, len(all_N), temperature, spec.output_dtype, spec.precision, largest)


def error_bound(policy: Policy, mode: str, temperature: float, largest_logit: float, largest_sum: float) -> float:
    """How far rounding alone can move a logprob, in nats.

    float32 rounds the products' sum and z/T: some units in the last place of the largest partial sum. A logit that is
    rounded to 16 bits moves by at most u = 2^-(mantissa bits + 1) of itself, and a logprob by twice the largest move: its
    own logit's and the others'.
    """
    spec = policy.spec
    exact = 6e-7 * (largest_sum / temperature + 1)
    if mode == "linear":
        return exact
    head = "float32" if spec.lm_head_precision == "float32" else spec.precision
    dtypes = [head, "float32" if spec.lm_head_precision == "float32" else spec.output_dtype]
    dtypes += [head] * 3 if final_softcap(policy.model) is not None else []  # divided, tanh, multiplied
    dtypes += dtypes[1:2] if spec.temperature_order == "before_upcast" else []
    moves = sum(2.0 ** -(DTYPES[name].mantissa_bits + 1) for name in dtypes if name != "float32")
    return exact + 2 * moves * largest_logit / temperature


@contextlib.contextmanager
def _in_mode(policy: Policy, mode: str) -> Iterator[None]:
    spec = policy.spec
    rows = spec.logprob_chunk_size if mode == "chunked" else None
    order = "after_upcast" if mode == "linear" else spec.temperature_order
    with policy.temporarily(logprob_mode=mode, logprob_chunk_size=rows, temperature_order=order):
        yield


def _tokens(
    policy: Policy,
    config: GRPOConfig,
    problems: list[tuple[str, str]],
    token_ids: list[list[int]] | None,
    step: int,
) -> Batch:
    if token_ids is None:
        return sample_step(policy, config, problems, step).batch.to(policy.device)
    share = -(-len(token_ids) // policy.data_size)
    mine = token_ids[policy.data_rank * share : (policy.data_rank + 1) * share] or token_ids[:1]
    return make_batch(mine, [1] * len(mine), policy.tokenizer.pad_token_id).to(policy.device)


@dataclass(slots=True)
class _Exact:
    logprobs_BT: torch.Tensor  # [B, T-1] float64, 0 where not scored
    largest_logit: float
    largest_sum: float  # of |hidden| @ |weight|: the size of what float32 sums


def _exact(policy: Policy, batch: Batch, temperature: float) -> _Exact:
    """float64 logprobs of what the head is given, looked at inside the forward, where its weight is gathered."""
    targets_BT, scored_BT = batch.ids_BT[:, 1:], batch.token_mask_BT[:, 1:] > 0
    softcap = final_softcap(policy.model)
    found: list[_Exact] = []

    def look(hidden_BTH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None) -> None:
        hidden_NH, targets_N = hidden_BTH[:, :-1][scored_BT], targets_BT[scored_BT]
        weight_VH = weight_VH.double()
        logprobs, largest, size = [], 0.0, 0.0
        for rows_NH, ids_N in zip(hidden_NH.split(_ORACLE_ROWS), targets_N.split(_ORACLE_ROWS), strict=True):
            rows_NH = rows_NH.double()
            z_NV = rows_NH @ weight_VH.t()
            sums_NV = rows_NH.abs() @ weight_VH.abs().t()
            if bias_V is not None:
                z_NV, sums_NV = z_NV + bias_V, sums_NV + bias_V.abs()
            if softcap is not None:
                z_NV = softcap * torch.tanh(z_NV / softcap)
            logp_NV = torch.log_softmax(z_NV / temperature, -1)
            logprobs.append(logp_NV.gather(-1, ids_N[:, None])[:, 0])
            largest, size = max(largest, float(z_NV.abs().max())), max(size, float(sums_NV.max()))
        logprobs_BT = torch.zeros(scored_BT.shape, dtype=torch.float64, device=scored_BT.device)
        logprobs_BT[scored_BT] = torch.cat(logprobs) if logprobs else logprobs_BT.new_zeros(0)
        found.append(_Exact(logprobs_BT, largest, size))

    with policy.autocast(), _in_mode(policy, "linear"):
        next_BT = next_targets(batch.ids_BT, batch.token_mask_BT)
        linear_forward(policy.model, batch.ids_BT, batch.mask_BT, batch.positions_BT, next_BT, temperature, look=look)
        fsdp.reshard(policy.model)
    return found[0]
