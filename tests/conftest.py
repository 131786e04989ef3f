"""Shared fixtures, the `gpu` marker, and nbval made strict.

nbval by itself passes cells whose magic failed (IPython answers a UsageError without an iopub error) and waits for its
time-out when a kernel dies; both are closed here.
"""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
import pytest

import toolkit as tk
from toolkit.models import smollm2_is_installed
from toolkit.session import Session

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two busy ranks on two cores must not spin for each other

#: A batch small enough for tests, large enough that both ranks have mixed groups.
SMALL = {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_new_tokens": 5}


@pytest.fixture(scope="session")
def one_rank() -> Iterator[Session]:
    """The tiny policy at the defaults, in this process. Tests train it, so don't rely on its weights."""
    with tk.launch(model=tk.tiny_policy(), **SMALL) as session:
        yield session


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Session]:
    """The same on two gloo ranks."""
    with tk.launch(model=tk.tiny_policy(), ranks=2, **SMALL) as session:
        yield session


@pytest.fixture(scope="session")
def tensor_parallel() -> Iterator[Session]:
    """Two data-parallel by two tensor-parallel ranks in float32 compute. Tests leave its weights as they are."""
    with tk.launch(model=tk.tiny_policy(), ranks=4, tensor_parallel_size=2, precision="float32", **SMALL) as session:
        yield session


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Qwen3 with a tied head, norm weights away from 1 (at 1 they hide what the final norm rounds)."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    for name, param in model.named_parameters():
        if "norm" in name:
            param.data.mul_(1 + 0.3 * torch.randn_like(param))
    folder = tmp_path_factory.mktemp("tied")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tk.tiny_policy()).save_pretrained(folder)
    return folder


#: Notebooks that take more than a minute; the tour is run by default.
_SLOW_NOTEBOOKS = ("memory_of_output_dtype.ipynb", "mismatch_results.ipynb")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow notebooks; skip GPU tests without a GPU, but fail them where one is promised (REQUIRE_GPU=1)."""
    import torch

    for item in items:
        trains_smollm2 = item.path.name == "grpo_smollm2.ipynb" and smollm2_is_installed()  # else its cells are skipped
        if item.path.name in _SLOW_NOTEBOOKS or trains_smollm2:
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available() or os.environ.get("REQUIRE_GPU") == "1":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


# ---- nbval

_SIGNIFICANT_DIGITS = 4
_NEVER_COMPARED = ("image/svg+xml", "stderr")


def _canonical(output: Any) -> Any:
    """A plotly output without what differs from run to run."""
    if isinstance(output, dict):
        if {"bdata", "dtype"} <= output.keys():  # plotly's typed arrays
            values = np.frombuffer(base64.b64decode(output["bdata"]), dtype=output["dtype"])
            return {"values": [_canonical(v) for v in values.tolist()], "shape": output.get("shape")}
        return {k: _canonical(v) for k, v in output.items() if k not in ("uid", "template")}
    if isinstance(output, list | tuple):
        return [_canonical(v) for v in output]
    return float(f"{output:.{_SIGNIFICANT_DIGITS}g}") if isinstance(output, float) else output


def pytest_collectstart(collector: pytest.Collector) -> None:
    if type(collector).__name__ == "IPyNbFile":
        collector.skip_compare += _NEVER_COMPARED  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    from nbval import kernel, plugin

    cell_class, kernel_class = plugin.IPyNbCell, kernel.RunningKernel
    sanitize, runtest = cell_class.sanitize, cell_class.runtest

    def strict_sanitize(self: Any, output: Any) -> Any:
        return _canonical(output) if isinstance(output, dict) else sanitize(self, output)

    def await_reply(self: Any, msg_id: str, timeout: float | None = None) -> None:
        end = time.monotonic() + timeout if timeout is not None else float("inf")
        while True:
            left = min(2.0, end - time.monotonic())
            if left <= 0:
                raise Empty
            try:
                message = self.get_message(stream="shell", timeout=left)
            except Empty:
                if not self.is_alive():
                    raise RuntimeError("the kernel died (out of memory?)") from None
                continue
            if message["parent_header"].get("msg_id") == msg_id:
                self.last_reply = message["content"]
                if message["content"].get("status") == "aborted":
                    raise RuntimeError("the kernel aborted the cell")
                return

    def strict_runtest(self: Any) -> None:
        if self.parent.kernel is not None:
            self.parent.kernel.last_reply = {}
        runtest(self)
        reply = self.parent.kernel.last_reply
        if reply.get("status") == "error" and not self.options["check_exception"]:
            self.raise_cell_error(f"{reply.get('ename')}: {reply.get('evalue')}")

    cell_class.sanitize, cell_class.runtest, kernel_class.await_reply = strict_sanitize, strict_runtest, await_reply


@pytest.fixture
def final_norm_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The final norm in a unit of its own, as custom models have it: then both output dtypes give the same bits."""
    from torch.distributed.fsdp import fully_shard

    from toolkit import fsdp

    apply = fsdp.shard

    def with_norm_unit(model: Any, setup: Any) -> Any:
        mesh = setup.mesh_context.device_mesh["dp_shard"]
        fully_shard(model.model.norm, mesh=mesh, mp_policy=setup.strategy_config.mp_policy)
        return apply(model, setup)

    monkeypatch.setattr(fsdp, "shard", with_norm_unit)
