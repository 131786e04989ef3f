"""What an engine costs: start, calls and steps of two ranks, local and, where Ray is installed, on a cluster of two nodes.

    python -m tests.benchmarks.engines [--repeats 3]

Every figure is of this run. A start is divided by the time that importing torch, transformers and AutoModel takes in a
process of its own, measured in turn with it: less is not possible, and both slow down alike on a busy machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import toolkit as tk

FIELDS: dict[str, Any] = {
    "model": tk.tiny_policy(), "ranks": 2, "num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_new_tokens": 5,
    "learning_rate": 1e-4,
}  # fmt: skip
ROWS = {
    "import_seconds": "importing torch, transformers and AutoModel alone, s",
    "first_seconds": "first launch in a kernel, s",
    "first_ratio": "the same / importing (goal 1.1)",
    "next_seconds": "next launch in that kernel, s (goal 0.5)",
    "noop_ms": "no-op call to both ranks, ms (goal 1)",
    "array_ms": "4 MB array from each rank, ms",
    "step_ms": "GRPO step of 32 completions, ms",
    "close_seconds": "close, s",
}


def timed(fn: Callable[[], Any]) -> float:
    """Seconds a call takes."""
    started = time.perf_counter()
    fn()
    return time.perf_counter() - started


def four_megabytes(policy: Any) -> np.ndarray[Any, Any]:
    """On a rank: a result of 4 MB."""
    return np.ones(1 << 20, dtype=np.float32)


def measure(cluster: str | None) -> dict[str, list[float]]:
    """In a kernel that has imported nothing yet: launch, call, step, close, and launch again."""
    place = {} if cluster is None else {"cluster": cluster}
    started = time.perf_counter()
    session = tk.launch(**FIELDS, **place)
    first = time.perf_counter() - started
    ranks = session._ranks
    for fn in (lambda: ranks.call(int), lambda: session.run(four_megabytes), session.grpo_step):
        fn()  # the first of each pays for what the rest do not
    found = {
        "first_seconds": [first],
        "noop_ms": [1e3 * timed(lambda: ranks.call(int)) for _ in range(300)],
        "array_ms": [1e3 * timed(lambda: session.run(four_megabytes)) for _ in range(30)],
        "step_ms": [1e3 * timed(session.grpo_step) for _ in range(10)],
        "close_seconds": [timed(session.close)],
    }
    started = time.perf_counter()
    tk.launch(**FIELDS, **place).close()
    return {**found, "next_seconds": [time.perf_counter() - started - found["close_seconds"][0]]}


def in_new_process(*arguments: str) -> Any:
    """Run this file with other arguments in a new process; returns what it prints."""
    command = [sys.executable, "-m", "tests.benchmarks.engines", *arguments]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def compare(places: dict[str, str | None], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Measure each place and the imports in turn."""
    found: dict[str, dict[str, list[float]]] = {name: {} for name in places}
    for _ in range(repeats):
        for name, address in places.items():
            imports = in_new_process("--imports")
            here = {"import_seconds": [imports], **in_new_process("--measure", address or "")}
            here["first_ratio"] = [here["first_seconds"][0] / imports]
            for row, values in here.items():
                found[name].setdefault(row, []).extend(values)
    return found


def show(found: dict[str, dict[str, list[float]]]) -> None:
    """Print the table: median (least) of all repeats."""
    print(f"| two ranks, median (least) | {' | '.join(found)} |\n|---|{'---|' * len(found)}")
    for row, title in ROWS.items():
        cells = [f"{statistics.median(values[row]):.2f} ({min(values[row]):.2f})" for values in found.values()]
        print(f"| {title} | {' | '.join(cells)} |")
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    print(f"\n{cores} cores, load average {load:.1f} at the end")


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--imports", action="store_true", help="only time the imports, in this process")
    parser.add_argument("--measure", metavar="ADDRESS", help="only measure one engine, in this process ('' for local ranks)")
    arguments = parser.parse_args()
    if arguments.imports:
        print(json.dumps(timed(lambda: __import__("toolkit.imports"))))
    elif arguments.measure is not None:
        print(json.dumps(measure(arguments.measure or None)))
    elif importlib.util.find_spec("ray") is None:
        show(compare({"local": None}, arguments.repeats))
    else:
        from tests.ray_cluster import AUTHENTICATION, two_nodes

        os.environ.update(AUTHENTICATION)
        with two_nodes() as (address, _):
            show(compare({"local": None, "cluster of two nodes": address}, arguments.repeats))


if __name__ == "__main__":
    main()
