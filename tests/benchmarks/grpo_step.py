"""One GRPO step against TRL's GRPOTrainer: the same model, prompts, group size and tokens, in turn in one process.

    pip install -e '.[bench]'
    python -m tests.benchmarks.grpo_step                                        # the tiny policy
    python -m tests.benchmarks.grpo_step --model smollm2 --precision float32 --steps 5 --seeds 0

Prints seconds per step and per phase, wall and CPU; the growth of memory, of each in a process of its own; and the mean
reward of the last third of a run, by seed. Both train float32 weights (under bfloat16 autocast, or with `--precision
float32` without), AdamW, no reference model, one update per rollout, token-level loss. TRL takes no scoring pass then, so
neither does the toolkit (`force_on_policy_ratio=True`); the step with one is printed beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import toolkit as tk
from toolkit.rewards import exact_match

#: Of each model: the task, and what a step of it is.
TINY = {"task": "arithmetic", "num_prompts_per_step": 32, "max_new_tokens": 5, "learning_rate": 1e-4}
SMOLLM2 = {"task": "one_digit_sums", "num_prompts_per_step": 8, "max_new_tokens": 3, "learning_rate": 2e-5}
GROUP = 8
#: The toolkit's ways. TRL takes a step's sequences at once, with gradient checkpointing (its default), without scoring pass.
WAYS = ("toolkit", "checkpointed", "in quarters", "with scoring")  # the third in four micro-batches
#: So that freed memory goes back to the system, and the resident size is what is in use.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def settings(model: str) -> tuple[str, dict[str, Any]]:
    """The folder, and the fields of a step."""
    return (str(tk.smollm2()), SMOLLM2) if model == "smollm2" else (str(tk.tiny_policy()), TINY)


def changed(config: tk.GRPOConfig, way: str) -> tk.GRPOConfig:
    """The config, without scoring pass and in one micro-batch but for what the way says."""
    quarter = config.num_prompts_per_step * config.num_generations_per_prompt // 4
    plain = dataclasses.replace(config, force_on_policy_ratio=way != "with scoring")
    return dataclasses.replace(plain, train_micro_batch_size=quarter if way == "in quarters" else None)


def launch(model: str, precision: str, way: str = "toolkit", seed: int = 0) -> tk.Session:
    folder, step = settings(model)
    session = tk.launch(
        model=folder, precision=precision, num_generations_per_prompt=GROUP, max_grad_norm=1.0, weight_decay=0.0, seed=seed,
        share_prompt_prefix=True, activation_checkpointing="full" if way == "checkpointed" else False, **step,
    )  # fmt: skip
    session.config = changed(session.config, way)
    return session


def trainer(model: str, precision: str, steps: int, callbacks: list[Any], seed: int = 0) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from toolkit.tasks import resolve_task

    folder, step = settings(model)
    task = resolve_task(step["task"])
    grade = task.reward or exact_match

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [grade(p, c, a) for p, c, a in zip(prompts, completions, answer, strict=True)]

    rows = [{"prompt": str(prompt), "answer": answer} for prompt, answer in task.problems]
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, num_generations=GROUP,
        per_device_train_batch_size=step["num_prompts_per_step"] * GROUP,
        max_completion_length=step["max_new_tokens"], learning_rate=step["learning_rate"], lr_scheduler_type="constant",
        beta=0.0, loss_type="dapo", temperature=1.0, bf16=precision == "bfloat16", use_cpu=True, report_to=[],
        save_strategy="no", logging_steps=1, max_grad_norm=1.0, weight_decay=0.0, seed=seed, disable_tqdm=True,
        dataloader_num_workers=0,
    )  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return GRPOTrainer(
        loaded, reward, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=callbacks
    )


def rewards_of(trl: Any) -> list[float]:
    return [row["reward"] for row in trl.state.log_history if "reward" in row]


# ---- time


def in_turn(model: str, precision: str, steps: int) -> dict[str, Any]:
    """Seconds (wall, CPU) of each step: TRL's, and each of our ways, in turn; the first of each is left out."""
    from transformers import TrainerCallback

    sessions = {name: launch(model, precision, name) for name in WAYS}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ("trl", *WAYS)}
    records: dict[str, list[tk.StepRecord]] = {name: [] for name in WAYS}

    def now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def since(started: tuple[float, float]) -> tuple[float, float]:
        wall, cpu = now()
        return wall - started[0], cpu - started[1]

    class Turns(TrainerCallback):
        started = (0.0, 0.0)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = now()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds["trl"].append(since(self.started))
            for name, kept in records.items():
                started = now()
                kept.append(sessions[name].grpo_step())
                seconds[name].append(since(started))

    trainer(model, precision, steps, [Turns()]).train()
    gigaflops = counted_gigaflops(sessions["toolkit"])
    for session in sessions.values():
        session.close()
    phases = {
        which: {name: statistics.median(r.seconds[name] for r in kept[1:]) for name in kept[0].seconds}
        for which, kept in records.items()
    }
    return {"seconds": {name: kept[1:] for name, kept in seconds.items()}, "phases": phases, "gigaflops": gigaflops}


def counted_gigaflops(session: tk.Session) -> float:
    """Of the matrix products of one step without a scoring pass."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        session.grpo_step()
    return float(counter.get_total_flops()) / 1e9


def products_per_second(hidden: int = 576, inner: int = 1536, rows: int = 336) -> float:
    """GFLOP per CPU second of a float32 product of the size of an MLP layer's, the best of ten."""
    import torch

    a, b = torch.randn(rows, hidden), torch.randn(hidden, inner)
    best = float("inf")
    for _ in range(10):
        started = time.process_time()
        for _ in range(5):
            a @ b
        best = min(best, time.process_time() - started)
    return 5 * 2 * rows * hidden * inner / best / 1e9


# ---- memory and learning, each side in a process of its own


def resident(field: str) -> int:
    (line,) = (text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(field))
    return int(line.split()[1]) * 1024


def reset_peak() -> int:
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def peaks(which: str, model: str, precision: str) -> dict[str, int]:
    """Peak resident bytes over two steps after one to warm up: beyond what the imports take, and beyond the warm state."""
    if which != "trl":
        importlib.import_module("toolkit.worker")  # the heavy imports

        imported = resident("VmRSS")
        with launch(model, precision, which) as session:
            session.grpo_step()
            warm = reset_peak()
            session.grpo_step(2)
            peak = resident("VmHWM")
        return {"whole": peak - imported, "step": peak - warm}
    import transformers

    importlib.import_module("trl.trainer.grpo_trainer")

    imported = resident("VmRSS")
    warm: list[int] = []

    class Warm(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if not warm:
                warm.append(reset_peak())

    trainer(model, precision, 3, [Warm()]).train()
    peak = resident("VmHWM")
    return {"whole": peak - imported, "step": peak - warm[0]}


def curve(which: str, model: str, precision: str, steps: int, seed: int) -> list[float]:
    """Mean reward of each step."""
    if which == "toolkit":
        with launch(model, precision, which, seed) as session:
            return [float(session.grpo_step().metrics["reward"]) for _ in range(steps)]
    trl = trainer(model, precision, steps, [], seed)
    trl.train()
    return rewards_of(trl)


def apart(*arguments: str) -> Any:
    command = [sys.executable, "-m", "tests.benchmarks.grpo_step", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | MALLOC)
    return json.loads(done.stdout.strip().splitlines()[-1])


# ---- the table


def show_times(result: dict[str, Any]) -> None:
    theirs, their_cpu = (statistics.median(column) for column in zip(*result["seconds"]["trl"], strict=True))
    rounds = len(result["seconds"]["trl"])
    print(f"seconds per step, median of {rounds} in turn: wall (CPU), share of TRL's")
    for name, kept in result["seconds"].items():
        wall, cpu = (statistics.median(column) for column in zip(*kept, strict=True))
        print(f"  {name:16}{wall:8.3f} ({cpu:.3f})   {wall / theirs:.2f} ({cpu / their_cpu:.2f})")
    for name, phases in result["phases"].items():
        print(f"  {name} by phase: " + ", ".join(f"{phase} {s:.3f}" for phase, s in phases.items()))
    rate = products_per_second()
    cpu = statistics.median(cpu for _, cpu in result["seconds"]["toolkit"])
    bare = result["gigaflops"] / rate
    print(f"  toolkit's matrix products: {result['gigaflops']:.0f} GFLOP; at the {rate:.0f} GFLOP per CPU second of a bare "
          f"float32 product {bare:.2f} s, {bare / cpu:.2f} of its CPU time")  # fmt: skip


def show_peaks(found: dict[str, dict[str, int]]) -> None:
    print("peak resident memory, MiB: beyond the imports; beyond the warm state (weights, moments)")
    for which, kept in found.items():
        ratio = {name: kept[name] / found["trl"][name] for name in kept}
        whole, step = (f"{kept[name] / 2**20:6.0f} ({ratio[name]:.2f})" for name in ("whole", "step"))
        print(f"  {which:16}{whole}   {step}")


def show_curves(curves: dict[str, dict[str, list[float]]], steps: int) -> None:
    third = max(1, steps // 3)
    print(f"mean reward of the first and last {third} of {steps} steps, by seed")
    for which, by_seed in curves.items():
        shown = ", ".join(f"{statistics.mean(c[:third]):.3f} -> {statistics.mean(c[-third:]):.3f}" for c in by_seed.values())
        print(f"  {which:16}{shown}")


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16", help="of compute, in both")
    parser.add_argument("--steps", type=int, default=12, help="in turn")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2], help="of the learning runs; none skips them")
    parser.add_argument("--learning-steps", type=int, default=25)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--apart", nargs=2, help=argparse.SUPPRESS)  # (peak or curve, which side)
    args = parser.parse_args()
    if args.apart:
        what, which = args.apart
        if what == "peak":
            print(json.dumps(peaks(which, args.model, args.precision)))
        else:
            print(json.dumps(curve(which, args.model, args.precision, args.learning_steps, args.seeds[0])))
        return
    same = ["--model", args.model, "--precision", args.precision, "--learning-steps", str(args.learning_steps)]
    result = in_turn(args.model, args.precision, args.steps)
    show_times(result)
    result["peaks"] = {which: apart(*same, "--apart", "peak", which) for which in ("trl", *WAYS)}
    show_peaks(result["peaks"])
    for which in ("trl", "toolkit"):
        by_seed = {s: apart(*same, "--apart", "curve", which, "--seeds", str(s)) for s in args.seeds}
        result.setdefault("curves", {})[which] = by_seed
    if args.seeds:
        show_curves(result["curves"], args.learning_steps)
    if args.json:
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
