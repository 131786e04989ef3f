"""A precision workbench for RL on language models, in Jupyter.

What does the FSDP2 output dtype save in memory and cost in nats, for your model and your recipe? The package follows the
data; a module imports only from those before it:

    checks, grpo_config -> spec -> layout -> background -> ranks -> engines, attach -> cluster -> fsdp -> prompts -> policy
         -> build -> rollouts -> rewards -> advantages -> collect -> logprobs -> losses -> reference, gradients -> step
         -> checkpoint
    instruments read along the way: fsdp_watch -> ledger -> memory_report -> memory_cuda -> memory,
         fakes -> memory_predict, mismatch -> settings -> replay -> cause -> truth -> raw_logits -> divergence,
         raw_losses, rounding -> edge_rows -> edges, tradeoff_grid, self_check
    surface on top: worker -> live -> session -> recipes -> launching -> figures -> widgets -> launcher -> dashboard
         -> workbenches, arguments -> commands -> magics -> notebook; page -> tour -> __main__ (`python -m toolkit`)

Importing `toolkit` imports neither torch nor transformers; the first `launch` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolkit.divergence_report import DivergenceReport as DivergenceReport
    from toolkit.edge_report import EdgeReport as EdgeReport
    from toolkit.errors import RanksLost as RanksLost
    from toolkit.errors import SessionClosed as SessionClosed
    from toolkit.errors import SpecError as SpecError
    from toolkit.launching import launch as launch
    from toolkit.launching import resume as resume
    from toolkit.linear_head import linear_logprobs as linear_logprobs
    from toolkit.logprobs import token_logprobs as token_logprobs
    from toolkit.memory import MemoryReport as MemoryReport
    from toolkit.memory_predict import predict_memory as predict_memory
    from toolkit.models import smollm2 as smollm2
    from toolkit.models import tiny_policy as tiny_policy
    from toolkit.prompts import Task as Task
    from toolkit.recipes import Recipe as Recipe
    from toolkit.recipes import load_recipe as load_recipe
    from toolkit.records import EvaluationRecord as EvaluationRecord
    from toolkit.records import StepRecord as StepRecord
    from toolkit.self_check import SelfCheckReport as SelfCheckReport
    from toolkit.session import Session as Session
    from toolkit.spec import GRPOConfig as GRPOConfig
    from toolkit.spec import PolicySpec as PolicySpec
    from toolkit.tradeoff_grid import tradeoffs as tradeoffs
    from toolkit.tradeoff_report import TradeoffReport as TradeoffReport
    from toolkit.widgets import dtype_picker as dtype_picker
    from toolkit.workbenches import Workbench as Workbench
    from toolkit.workbenches import workbench as workbench

_HOMES = {
    "DivergenceReport": "divergence_report",
    "EdgeReport": "edge_report",
    "EvaluationRecord": "records",
    "GRPOConfig": "spec",
    "MemoryReport": "memory",
    "PolicySpec": "spec",
    "RanksLost": "errors",
    "Recipe": "recipes",
    "SelfCheckReport": "self_check",
    "Session": "session",
    "SessionClosed": "errors",
    "SpecError": "errors",
    "StepRecord": "records",
    "Task": "prompts",
    "TradeoffReport": "tradeoff_report",
    "Workbench": "workbenches",
    "dtype_picker": "widgets",
    "launch": "launching",
    "linear_logprobs": "linear_head",
    "load_recipe": "recipes",
    "predict_memory": "memory_predict",
    "resume": "launching",
    "smollm2": "models",
    "tiny_policy": "models",
    "token_logprobs": "logprobs",
    "tradeoffs": "tradeoff_grid",
    "workbench": "workbenches",
}
__all__ = ["load_ipython_extension", "unload_ipython_extension", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"toolkit.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext toolkit`: register the magics and start importing torch and AutoModel for later ranks."""
    from toolkit.magics import load

    load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """`%unload_ext toolkit`: remove the magics; sessions stay as they are."""
    from toolkit.magics import unload

    unload(ipython)
