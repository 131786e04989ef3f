"""One GRPO step against TRL's GRPOTrainer: the same model, prompts, group size and tokens, in turn in one process.

    pip install -e '.[bench]'
    python -m tests.benchmarks.grpo_step                # the tiny policy
    python -m tests.benchmarks.grpo_step --model PATH   # another folder

Prints seconds per step and per phase, their ratio, and the growth of memory over training of each in a process of its own.
Both train float32 weights with bfloat16 autocast, AdamW, no reference model, one update per rollout, token-level loss.
"""

from __future__ import annotations

import argparse
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

PROMPTS, GROUP, NEW_TOKENS, LEARNING_RATE = 32, 8, 5, 1e-4


def launch(model: str) -> tk.Session:
    return tk.launch(
        model=model, num_prompts_per_step=PROMPTS, num_generations_per_prompt=GROUP, max_new_tokens=NEW_TOKENS,
        learning_rate=LEARNING_RATE, max_grad_norm=1.0, weight_decay=0.0,
    )  # fmt: skip


def trainer(model: str, steps: int, callbacks: list[Any]) -> Any:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from toolkit.prompts import arithmetic

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [exact_match(p, c, a) for p, c, a in zip(prompts, completions, answer, strict=True)]

    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in arithmetic().problems]
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP,
        max_completion_length=NEW_TOKENS, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", beta=0.0,
        loss_type="dapo", temperature=1.0, bf16=True, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1,
        max_grad_norm=1.0, weight_decay=0.0, seed=0, disable_tqdm=True, dataloader_num_workers=0,
    )  # fmt: skip
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    return GRPOTrainer(
        loaded, reward, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=callbacks
    )


def in_turn(model: str, steps: int) -> dict[str, Any]:
    """Seconds of each step, TRL's and ours one after the other; the first of each is left out."""
    from transformers import TrainerCallback

    session = launch(model)
    theirs: list[float] = []
    ours: list[tk.StepRecord] = []
    our_seconds: list[float] = []

    class Turns(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            theirs.append(time.perf_counter() - self.started)
            started = time.perf_counter()
            ours.append(session.grpo_step())
            our_seconds.append(time.perf_counter() - started)

    trl = trainer(model, steps, [Turns()])
    trl.train()
    session.close()
    rewards = [row["reward"] for row in trl.state.log_history if "reward" in row]
    phases = {name: statistics.median(r.seconds[name] for r in ours[1:]) for name in ours[0].seconds}
    return {
        "trl_seconds": theirs[1:],
        "toolkit_seconds": our_seconds[1:],
        "toolkit_phases": phases,
        "trl_rewards": rewards,
        "toolkit_rewards": [r.metrics["reward"] for r in ours],
    }


def peak_growth(which: str, model: str) -> int:
    """Bytes by which the resident memory grew at most over three steps, after one to warm up."""

    def reset() -> int:
        Path("/proc/self/clear_refs").write_text("5")
        return resident("VmRSS")

    def resident(field: str) -> int:
        (line,) = (text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(field))
        return int(line.split()[1]) * 1024

    if which == "toolkit":
        with launch(model) as session:
            before = reset()
            session.grpo_step(4)
            return resident("VmHWM") - before
    trl = trainer(model, 4, [])
    before = reset()
    trl.train()
    return resident("VmHWM") - before


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(tk.tiny_policy()))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json")
    parser.add_argument("--peak", choices=("toolkit", "trl"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(peak_growth(args.peak, args.model))
        return
    result = in_turn(args.model, args.steps)
    for which in ("toolkit", "trl"):
        command = [sys.executable, "-m", "tests.benchmarks.grpo_step", "--model", args.model, "--peak", which]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        result[f"{which}_peak_growth_bytes"] = int(out.strip().splitlines()[-1])
    ours, theirs = (statistics.median(result[f"{which}_seconds"]) for which in ("toolkit", "trl"))
    print(f"seconds per step, median of {args.steps - 1}: toolkit {ours:.3f}, TRL {theirs:.3f}, ratio {ours / theirs:.2f}")
    print("toolkit by phase: " + ", ".join(f"{name} {s:.3f}" for name, s in result["toolkit_phases"].items()))
    grown = [result[f"{which}_peak_growth_bytes"] / 2**20 for which in ("toolkit", "trl")]
    print(f"growth of resident memory over 4 steps: toolkit {grown[0]:.0f} MiB, TRL {grown[1]:.0f} MiB, "
          f"ratio {grown[0] / grown[1]:.2f}")  # fmt: skip
    for which in ("toolkit", "trl"):
        print(f"mean reward, {which}: {statistics.mean(result[f'{which}_rewards']):.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
