"""Ranks under real Jupyter kernels: output arrives while the cell runs, interrupts keep the ranks, restarts are clean."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from .faults import fault
from .test_ranks import gone

LAUNCH = """
import time
import torch.distributed as dist
import toolkit as tk
session = tk.launch(model=tk.tiny_policy(), ranks=2, num_prompts_per_step=8, num_generations_per_prompt=4, max_new_tokens=5)
print(session.run(lambda policy: __import__("os").getpid()))
"""
# The last line says when the ranks came to their end: what they said before it must have been shown before that.
SPEAK = """
def speak(policy):
    for i in range(6):
        if policy.is_first:
            print("tick", i, flush=True)
        time.sleep(0.3)
    dist.barrier()
    return time.time()
print(session.run(speak)[0])
"""


def text_of(outputs: Any, name: str = "stdout") -> str:
    return "".join(o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == name)


@pytest.fixture
def kernel() -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=120)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run_cell(client: BlockingKernelClient, code: str, timeout: float = 180) -> tuple[str, dict[str, Any]]:
    """Standard output of a cell, and its reply."""
    shown: list[str] = []

    def hook(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream" and message["content"]["name"] == "stdout":
            shown.append(message["content"]["text"])

    reply = client.execute_interactive(code, timeout=timeout, output_hook=hook)
    return "".join(shown), reply["content"]


def launched(client: BlockingKernelClient) -> list[int]:
    out, reply = run_cell(client, LAUNCH)
    assert reply["status"] == "ok", reply
    pids: list[int] = eval(out.strip().splitlines()[-1])
    assert len(set(pids)) == 2
    return pids


class Timed(NotebookClient):
    """Notes when each standard output arrived."""

    arrived: list[tuple[float, str]]

    def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
        if msg["msg_type"] == "stream" and msg["content"]["name"] == "stdout":
            self.arrived = [*getattr(self, "arrived", []), (time.time(), msg["content"]["text"])]
        return super().process_message(msg, cell, cell_index)


def test_output_arrives_while_the_cell_runs_in_nbclient() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in (LAUNCH, SPEAK)])
    client = Timed(notebook, timeout=180, kernel_name="python3")
    client.execute()
    *ticks, ended = text_of(notebook.cells[1].outputs).splitlines()
    assert ticks == [f"[rank 0] tick {i}" for i in range(6)]
    assert next(when for when, text in client.arrived if "tick 1" in text) < float(ended)


@pytest.mark.slow
def test_output_is_in_its_cell_under_papermill(tmp_path: Path) -> None:
    import papermill

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in (LAUNCH, SPEAK)])
    nbformat.write(notebook, tmp_path / "in.ipynb")
    papermill.execute_notebook(tmp_path / "in.ipynb", tmp_path / "out.ipynb", kernel_name="python3", progress_bar=False)
    cells = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells
    assert text_of(cells[-1].outputs).splitlines()[:-1] == [f"[rank 0] tick {i}" for i in range(6)]


def test_the_kernels_interrupt_stops_at_a_boundary_and_the_session_goes_on(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    manager, client = kernel
    pids = launched(client)
    message = client.execute("session.grpo_step(10_000)")
    time.sleep(3)
    manager.interrupt_kernel()
    asked = time.monotonic()
    while True:
        try:
            reply = client.get_shell_msg(timeout=60)
        except Empty:
            raise AssertionError("the interrupted cell did not end") from None
        if reply["parent_header"]["msg_id"] == message:
            break
    assert time.monotonic() - asked < 5
    assert reply["content"]["ename"] == "KeyboardInterrupt"
    assert "of 10000 steps; they are in session.history" in reply["content"]["evalue"]
    out, reply = run_cell(client, "taken = len(session.history); session.grpo_step(); print(len(session.history) - taken)")
    assert reply["status"] == "ok"
    assert out.strip() == "1"
    out, _ = run_cell(client, "print(session.run(lambda policy: __import__('os').getpid()))")
    assert eval(out) == pids


@fault(
    "the kernel is restarted or killed",
    "",
    "what was saved (`tk.resume`); no rank is left running",
)
def test_a_restarted_or_killed_kernel_leaves_no_rank(kernel: tuple[KernelManager, BlockingKernelClient]) -> None:
    manager, client = kernel
    first = launched(client)
    manager.restart_kernel(now=False)
    assert gone(first)
    client.wait_for_ready(timeout=120)
    second = launched(client)
    assert not set(first) & set(second)
    manager.restart_kernel(now=True)
    assert gone(second)


def test_the_extension_is_light_completes_and_fails_its_cell(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    _, client = kernel
    heavy = "{'torch', 'transformers', 'nemo_automodel', 'pandas', 'numpy', 'plotly', 'omegaconf', 'ipywidgets'}"
    loading = f"import sys\nbefore = set(sys.modules)\n%load_ext toolkit\nprint({heavy} & (set(sys.modules) - before))"
    out, reply = run_cell(client, loading)
    assert reply["status"] == "ok"
    assert out == "set()\n"
    for line, expected in (("%launch --model ti", "tiny_policy"), ("m = %memory bf", "bfloat16")):
        completed = client.complete(f"x = 1\n{line}", len(line) + 6, reply=True, timeout=60)["content"]
        assert completed["matches"] == [expected]
        assert completed["cursor_start"] == 6 + line.rindex(" ") + 1
    told = client.inspect("%launch?", 7, reply=True, timeout=60)["content"]["data"]["text/plain"]
    assert "--output-dtype" in told
    assert "Example: %launch --model tiny_policy" in told
    shown: list[Any] = []
    cell = "%launch --model tiny_policy --ranks none"
    failed = client.execute_interactive(cell, timeout=60, output_hook=lambda m: shown.append(m))["content"]
    assert (failed["status"], failed["ename"]) == ("error", "ToolkitError")
    errors = [m["content"] for m in shown if m["msg_type"] == "error"]
    assert [e["traceback"] for e in errors] == [["ranks='none' must be a whole number of at least 1."]]
