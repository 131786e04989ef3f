"""Time, memory and error of token logprobs with gradient, ours and the peers', against the matmul limit of the same run.

    python -m tests.benchmarks.logprobs --rows 2048 --hidden 512 --vocab 32768 --json small.json
    python -m tests.benchmarks.logprobs --growth

The task: logprobs [N] of `softmax(hidden @ weight.T / 0.7)`, bfloat16 operands, a random gradient for each token, gradients
of hidden and weight. The limit: the four matrix products that any form which recomputes its logits has to make (8*N*H*V
floating-point operations), in bfloat16 and nothing else. Time is CPU seconds of one thread, so that other work on the
machine counts little; everything is measured in turn within each round, and a ratio is one of medians (and of minima).
Memory is the CPU allocator's own log: the peak beyond the inputs and the two gradients. Error is against float64.

Peers come with the `bench` extra; one that is missing is listed as not installed. They are run on the CPU, where those with
kernels for GPUs fall back to torch: their figures here say nothing about GPUs.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.allocations import allocations
from toolkit.linear_head import linear_logprobs
from toolkit.logprobs import token_logprobs

TEMPERATURE = 0.7
LIMIT_COLUMNS = 4096
Logprobs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# ---- ways to compute them


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, kept: bool) -> torch.Tensor:
    found = linear_logprobs(hidden, weight, targets, temperature=TEMPERATURE, float32_logits=kept)
    assert isinstance(found, torch.Tensor)
    return found


def naive(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    scaled = (hidden @ weight.t()).float() / TEMPERATURE
    return scaled.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def chunked_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return token_logprobs(hidden @ weight.t(), targets, temperature=TEMPERATURE, chunk_rows=256)


def torch_linear_cross_entropy() -> Logprobs:
    options = torch.nn.LinearCrossEntropyOptions()
    call = torch.nn.functional.linear_cross_entropy
    return lambda h, w, y: -call(h / TEMPERATURE, w, y, reduction="none", options=options)


def automodel_chunked(*, compiled: bool) -> Logprobs:
    from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy

    loss = ChunkedCrossEntropy(chunk_len=256, compile=compiled, reduction="none")
    return lambda h, w, y: -loss(h / TEMPERATURE, y, w)


def trl_selective() -> Logprobs:
    from trl.trainer.utils import selective_log_softmax

    return lambda h, w, y: selective_log_softmax(h @ w.t(), y, temperature=TEMPERATURE)


def trl_chunked() -> Logprobs:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    return lambda h, w, y: ChunkedLogProbFunction.apply(h, w, None, y, TEMPERATURE, 8192, None, 1.0, ())[0]


def liger() -> Logprobs:
    from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction

    return lambda h, w, y: _ChunkedSelectiveLogProbFunction.apply(h, w, y, None, TEMPERATURE, 4096)


def cut_cross_entropy() -> Logprobs:
    from cut_cross_entropy import linear_cross_entropy

    return lambda h, w, y: -linear_cross_entropy(h / TEMPERATURE, w, y, reduction="none", impl="torch_compile")


PEERS: dict[str, Callable[[], Logprobs]] = {
    "cut-cross-entropy, compile path": cut_cross_entropy,
    "AutoModel chunked CE, eager": functools.partial(automodel_chunked, compiled=False),
    "AutoModel chunked CE, compiled": functools.partial(automodel_chunked, compiled=True),
    "TRL selective_log_softmax": trl_selective,
    "TRL chunked": trl_chunked,
    "Liger selective logprob": liger,
    "torch F.linear_cross_entropy": torch_linear_cross_entropy,
}


def candidates(wanted: str | None) -> tuple[dict[str, Logprobs], dict[str, str]]:
    """What can be run here by name, and why the rest cannot."""
    found: dict[str, Logprobs] = {
        "linear, float32-kept logits (default)": functools.partial(ours, kept=True),
        "linear, native logits": functools.partial(ours, kept=False),
        "materialized (naive)": naive,
        "chunked logits": chunked_logits,
    }
    missing = {}
    for name, make in PEERS.items():
        try:
            found[name] = make()
        except (ImportError, AttributeError) as error:
            missing[name] = f"not installed ({error})"
    if wanted is not None:
        found = {name: call for name, call in found.items() if any(part in name for part in wanted.split(","))}
    return found, missing


# ---- measuring


class Task:
    """The operands, and what is run on them."""

    def __init__(self, rows: int, hidden: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(rows, hidden, generator=generator).bfloat16().requires_grad_()
        self.weight = (torch.randn(vocab, hidden, generator=generator) * 3 / hidden**0.5).bfloat16().requires_grad_()
        self.targets = torch.randint(vocab, (rows,), generator=generator)
        self.grad = torch.randn(rows, generator=generator)

    def run(self, call: Logprobs) -> torch.Tensor:
        self.hidden.grad = self.weight.grad = None
        logprobs = call(self.hidden, self.weight, self.targets)
        logprobs.backward(self.grad.to(logprobs.dtype))
        return logprobs.detach()

    def products(self, *, float32_logits: bool) -> dict[str, float]:
        """CPU seconds of each matrix product over the whole vocabulary, by part."""
        hidden, weight = self.hidden.detach(), self.weight.detach()
        rows = len(hidden)
        wide = hidden.float() if float32_logits else hidden
        tile = torch.empty(rows * LIMIT_COLUMNS, dtype=wide.dtype)
        grads, grad_hidden = torch.empty(rows * LIMIT_COLUMNS, dtype=torch.bfloat16), torch.empty_like(hidden)
        grad_weight = torch.empty_like(weight[:LIMIT_COLUMNS])
        seconds = dict.fromkeys(("logits", "logits again", "gradient of hidden", "gradient of weight"), 0.0)
        matmul = torch.backends.mkldnn.matmul
        before = matmul.fp32_precision
        matmul.fp32_precision = "bf16"
        try:
            for part in weight.split(LIMIT_COLUMNS):
                part_wide = part.float() if float32_logits else part
                logits, grad = (t[: rows * len(part)].view(rows, -1) for t in (tile, grads))
                for name in ("logits", "logits again"):
                    seconds[name] += cpu_seconds(lambda a=part_wide, z=logits: torch.mm(wide, a.t(), out=z))
                seconds["gradient of hidden"] += cpu_seconds(lambda a=part, g=grad: torch.mm(g, a, out=grad_hidden))
                seconds["gradient of weight"] += cpu_seconds(
                    lambda a=part, g=grad: torch.mm(g.t(), hidden, out=grad_weight[: len(a)])
                )
        finally:
            matmul.fp32_precision = before
        return seconds

    def error(self, logprobs: torch.Tensor, rows: int = 128) -> float:
        """Largest, in nats, over some rows."""
        few = self.hidden.detach()[:rows].double()
        scaled = few @ self.weight.detach().double().t() / TEMPERATURE
        exact = scaled.log_softmax(-1).gather(-1, self.targets[:rows, None])[:, 0]
        return float((logprobs[:rows].double() - exact).abs().max())

    def extra_bytes(self, call: Logprobs) -> tuple[torch.Tensor, int]:
        """The logprobs, and the allocator's peak beyond inputs and gradients."""
        self.hidden.grad = self.weight.grad = None
        with allocations() as found:
            logprobs = self.run(call)
        return logprobs, found.peak_bytes - self.hidden.nbytes - self.weight.nbytes


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def compare(arguments: argparse.Namespace) -> dict[str, Any]:
    task = Task(arguments.rows, arguments.hidden, arguments.vocab)
    calls, missing = candidates(arguments.only)
    limit: list[float] = []
    kept_parts = [task.products(float32_logits=True)]
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    facts: dict[str, dict[str, float]] = {}
    for name, call in list(calls.items()):
        try:
            logprobs, extra_bytes = task.extra_bytes(call)  # warms up too, and compiles
            facts[name] = {"max_error_nats": task.error(logprobs), "extra_bytes": extra_bytes}
            seconds[name].append(cpu_seconds(functools.partial(task.run, call)))
        except Exception as error:  # a peer that fails is listed, and the others are still measured
            missing[name] = f"failed: {type(error).__name__}: {error}".splitlines()[0]
            calls.pop(name)
            continue
        limit.append(sum(task.products(float32_logits=False).values()))
        print(f"  {name}: {seconds[name][0]:.2f} s", flush=True)
    order = [name for name in calls if seconds[name][0] < arguments.slow * statistics.median(limit)]
    for _ in range(arguments.rounds - 1):
        random.shuffle(order)
        limit.append(sum(task.products(float32_logits=False).values()))
        kept_parts.append(task.products(float32_logits=True))
        for name in order:
            seconds[name].append(cpu_seconds(functools.partial(task.run, calls[name])))
    middle, least = statistics.median(limit), min(limit)
    table = [
        {
            "name": name,
            "of_limit_median": statistics.median(seconds[name]) / middle,
            "of_limit_minimum": min(seconds[name]) / least,
            "rounds": len(seconds[name]),
            **facts[name],
            "extra_of_float32_logits": facts[name]["extra_bytes"] / (4 * arguments.rows * arguments.vocab),
        }
        for name in calls
    ]
    kept = {part: statistics.median(p[part] for p in kept_parts) / middle for part in kept_parts[0]}
    native = task.products(float32_logits=False)
    return {
        "rows": arguments.rows,
        "hidden": arguments.hidden,
        "vocab": arguments.vocab,
        "limit_seconds_median": middle,
        "limit_gflops": 8e-9 * arguments.rows * arguments.hidden * arguments.vocab / middle,
        "parts_native_of_limit": {part: value / sum(native.values()) for part, value in native.items()},
        "parts_float32_kept_of_limit": kept,
        "table": sorted(table, key=lambda row: row["of_limit_median"]),
        "missing": missing,
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "amx": torch.cpu._is_amx_tile_supported(),
    }


def growth(arguments: argparse.Namespace) -> dict[str, Any]:
    """Ours from 2k to 64k tokens."""
    rows = []
    for tokens in (2048, 8192, 32768, 65536):
        task = Task(tokens, arguments.hidden, arguments.vocab)
        call = functools.partial(ours, kept=True)
        _, extra = task.extra_bytes(call)
        seconds = min(cpu_seconds(functools.partial(task.run, call)) for _ in range(2))
        rows.append(
            {
                "rows": tokens,
                "extra_bytes": extra,
                "extra_of_float32_logits": extra / (4 * tokens * arguments.vocab),
                "microseconds_per_row": 1e6 * seconds / tokens,
            }
        )
    return {"hidden": arguments.hidden, "vocab": arguments.vocab, "growth": rows}


# ---- printing


def show(result: dict[str, Any]) -> None:
    if "growth" in result:
        print(f"linear, float32-kept logits, H={result['hidden']}, V={result['vocab']}")
        for row in result["growth"]:
            print(
                f"  N={row['rows']:6d}  {row['extra_bytes'] / 2**20:7.1f} MiB beyond inputs and gradients "
                f"({row['extra_of_float32_logits']:.3f} of float32 logits)  {row['microseconds_per_row']:.1f} us a token"
            )
        return
    amx = "with" if result["amx"] else "without"
    print(
        f"N={result['rows']} H={result['hidden']} V={result['vocab']}, bfloat16, one thread, torch {result['torch']}, "
        f"{result['cpu']} {amx} AMX; limit {result['limit_gflops']:.0f} GFLOP/s"
    )
    print(f"{'':40s} time/limit      beyond gradients         max error")
    print(f"{'':40s} median   min      MiB  of fp32 [N,V]     nats   rounds")
    for row in result["table"]:
        times = f"{row['of_limit_median']:6.2f} {row['of_limit_minimum']:6.2f}"
        memory = f"{row['extra_bytes'] / 2**20:8.1f} {row['extra_of_float32_logits']:10.3f}"
        print(f"{row['name']:40s} {times} {memory}     {row['max_error_nats']:.1e} {row['rounds']:5d}")
    for name, why in result["missing"].items():
        print(f"{name:40s} {why}")
    for mode in ("native", "float32_kept"):
        parts = result[f"parts_{mode}_of_limit"]
        shown = ", ".join(f"{part} {value:.2f}" for part, value in parts.items())
        print(f"products alone, {mode.replace('_', '-')} logits: {sum(parts.values()):.2f} of the limit ({shown})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048, help="N, tokens")
    parser.add_argument("--hidden", type=int, default=512, help="H")
    parser.add_argument("--vocab", type=int, default=32768, help="V")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow", type=float, default=6.0, help="measure once what takes this many times the limit")
    parser.add_argument("--only", help="parts of names, separated by commas")
    parser.add_argument("--growth", action="store_true", help="ours alone, from 2k to 64k tokens")
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = growth(arguments) if arguments.growth else compare(arguments)
    show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
