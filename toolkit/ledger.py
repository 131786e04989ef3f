"""The recorder behind the memory report: every tensor storage that lives while it is open, from birth to death.

It sees each operation through torch's dispatcher, FSDP2's hidden work through `fsdp_watch`, and what autograd keeps
through saved-tensor hooks. The log is append-only and labels may arrive late (a tensor becomes "saved" after it was
made); categories are derived at the end, so they sum to the live bytes at any moment by construction.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import toolkit.imports  # noqa: F401 (first, to keep what it imports quiet)
from toolkit import fsdp
from toolkit.fsdp_watch import watch, with_memory

#: Order of precedence where a storage has several claims, and of stacking in figures.
CATEGORIES = (
    "parameters",
    "optimizer",
    "gradients",
    "unsharded_parameters",
    "inputs",
    "activations",
    "logits",
    "temporaries",
)


@dataclass(slots=True)
class Block:
    """One storage."""

    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    op: str
    phase: str
    context: str  # "unshard" or "reduce" inside FSDP2's collectives, else ""
    module: str  # innermost module whose forward made it
    is_logits: bool
    labels: set[str] = field(default_factory=set)

    @property
    def category(self) -> str:
        """Exactly one of CATEGORIES."""
        if "parameter" in self.labels:
            return "parameters"
        if "optimizer" in self.labels:
            return "optimizer"
        if "gradient" in self.labels or self.context == "reduce":
            return "gradients"
        if self.context == "unshard":
            return "unsharded_parameters"
        if "input" in self.labels:
            return "inputs"
        if self.is_logits:
            return "logits"
        if "saved" in self.labels or "retained" in self.labels:
            return "activations"
        return "temporaries"


class Ledger(TorchDispatchMode):
    """Record storages, their sizes over time, and what they are.

    Args:
        model: the FSDP2 model whose step is recorded.
        vocab_sizes: last dimensions by which logits are known: the vocabulary, and this rank's part of it.
        kernels: "cpu" or "cuda": whose kernels' own scratch is counted.
    """

    def __init__(self, model: nn.Module, vocab_sizes: Iterable[int], kernels: str) -> None:
        super().__init__()
        self._kernels = kernels
        self._model = model
        self._vocab_sizes = frozenset(vocab_sizes)
        self._head = fsdp.head_name(model)
        self._live: dict[int, tuple[int, int, weakref.ref[Any]]] = {}  # storage -> (block, bytes, keeps the callback)
        self._context: list[str] = []
        self._modules: list[str] = []
        self._backward_unit: str | None = None
        self._phase = "start"
        self._stack = contextlib.ExitStack()
        self.blocks: list[Block] = []
        self.events: list[tuple[int, int]] = []  # (block, change in bytes); time is the index
        self.phases: list[tuple[int, str]] = []  # (time, phase that begins)
        self.unit_outputs: dict[str, list[int]] = {}  # unit -> blocks of its outputs, in the output dtype
        self.saved: list[int] = []

    # ---- opening and closing

    def __enter__(self) -> Ledger:
        with contextlib.ExitStack() as stack:
            stack.enter_context(watch(self._model, self))
            for name, module in self._model.named_modules():
                pre = module.register_forward_pre_hook(self._entering(name or fsdp.ROOT), prepend=True)
                post = module.register_forward_hook(self._leaving, always_call=True)
                stack.callback(pre.remove)
                stack.callback(post.remove)
            super().__enter__()
            stack.push(super().__exit__)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _entering(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            self._modules.append(name)

        return hook

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record what runs inside as one phase: forward, loss, backward or optimizer."""
        self._begin(name)
        try:
            yield
        finally:
            if name == "forward":
                self._label_retained()
            self._begin("between")

    def _begin(self, name: str) -> None:
        self._phase = name
        self._backward_unit = None
        self.phases.append((len(self.events), name))

    def _label_retained(self) -> None:
        # What forward made and is still alive is kept for backward by somebody: mostly autograd, but a checkpoint
        # holds its arguments in a closure that no saved-tensor hook sees.
        for index, _, _ in self._live.values():
            block = self.blocks[index]
            if block.phase == "forward":
                block.labels.add("retained")

    # ---- what the dispatcher shows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor runs the operation on local tensors, which come back here
        result = func(*args, **(kwargs or {}))
        leaves = [result] if isinstance(result, torch.Tensor) else tree_leaves(result)  # mostly the former, and it is slow
        outputs = [t for t in leaves if isinstance(t, torch.Tensor)]
        op = func._schema.name
        for tensor in outputs:
            self.note(tensor, op)
        hidden = _bytes_inside(op, args, self._kernels)
        if hidden:
            self._note_inside(op, hidden, outputs[0] if outputs else args[0][0])
        return result

    def note(self, tensor: torch.Tensor, op: str = "before", label: str | None = None) -> int | None:
        """Book a tensor's storage if it is new, and label it; returns its block."""
        tensor = with_memory(tensor)
        if self._context[-1:] == ["shapes"]:
            return None  # DTensor working out global shapes: no memory behind it
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._live:
            index = self._live[key][0]
            self._resize(key, nbytes)
        else:
            index = len(self.blocks)
            self.blocks.append(self._block(nbytes, tensor.dtype, tuple(tensor.shape), op))
            # The callback runs when the memory is freed: torch keeps a storage's Python object as long as the storage.
            self._live[key] = (index, nbytes, weakref.ref(storage, functools.partial(self._free, key)))
            self.events.append((index, nbytes))
        if label is not None:
            self.blocks[index].labels.add(label)
        return index

    def _block(self, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...], op: str) -> Block:
        return Block(
            nbytes=nbytes,
            dtype=str(dtype).removeprefix("torch."),
            shape=shape,
            op=op,
            phase=self._phase,
            context=self._context[-1] if self._context else "",
            module=self._modules[-1] if self._modules else (self._backward_unit or ""),
            is_logits=len(shape) > 1 and shape[-1] in self._vocab_sizes and self._near_head(),
        )

    def _near_head(self) -> bool:
        """Whether logits can be made here: in the head, the loss, or backward before it reaches the layers."""
        ends = (fsdp.ROOT, self._head, "lm_head")
        if self._phase == "forward":
            return bool(self._modules) and self._modules[-1] in ends
        if self._phase == "backward":
            return not self._modules and self._backward_unit in (None, *ends)
        return self._phase == "loss"

    def _note_inside(self, op: str, nbytes: int, like: torch.Tensor) -> None:
        index = len(self.blocks)
        self.blocks.append(self._block(nbytes, like.dtype, tuple(like.shape), f"{op} (inside)"))
        self.events += [(index, nbytes), (index, -nbytes)]

    def _resize(self, key: int, nbytes: int) -> None:
        index, before, ref = self._live[key]
        if nbytes == before:
            return
        self._live[key] = (index, nbytes, ref)
        self.events.append((index, nbytes - before))
        block = self.blocks[index]
        block.nbytes = max(block.nbytes, nbytes)
        if nbytes > before and self._context:
            block.context = self._context[-1]

    def _free(self, key: int, _: Any) -> None:
        entry = self._live.pop(key, None)
        if entry is not None and entry[1]:
            self.events.append((entry[0], -entry[1]))

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        index = self.note(tensor, label="saved")
        if index is not None:
            self.saved.append(index)
        return tensor.detach()  # the tensor itself would be a reference cycle through its own grad_fn

    def label(self, tensors: Iterable[torch.Tensor], label: str) -> None:
        """Label tensors, booking those that were there before: "parameter", "optimizer", "input" or "gradient"."""
        for tensor in tensors:
            self.note(tensor, label=label)

    # ---- what FSDP2 tells (fsdp_watch.Observer)

    @contextlib.contextmanager
    def tag(self, context: str) -> Iterator[None]:
        self._context.append(context)
        try:
            yield
        finally:
            self._context.pop()

    def unit_output(self, unit: str, tensors: list[torch.Tensor]) -> None:
        if self._phase == "forward":
            noted = [self.note(t) for t in tensors if t.is_floating_point()]
            self.unit_outputs.setdefault(unit, []).extend(i for i in noted if i is not None)

    def unit_backward(self, unit: str) -> None:
        self._backward_unit = unit

    def gradients(self, tensors: list[torch.Tensor]) -> None:
        self.label(tensors, "gradient")

    def resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._live:
            self._resize(storage._cdata, storage.nbytes())

    # ---- reading the log

    def walk(self) -> Iterator[tuple[int, str, Counter[str]]]:
        """Live bytes by category after each event: (time, phase, bytes). The counter is reused; copy what you keep."""
        categories = [block.category for block in self.blocks]
        starts = dict(self.phases)  # a phase that begins and ends without an event leaves the later one
        live, phase = Counter[str](), "start"
        for time, (index, change) in enumerate(self.events):
            phase = starts.get(time, phase)
            live[categories[index]] += change
            yield time, phase, live

    def alive_at(self, time: int) -> dict[int, int]:
        """Blocks alive right after an event, with their bytes."""
        live = Counter[int]()
        for index, change in self.events[: time + 1]:
            live[index] += change
        return {index: nbytes for index, nbytes in live.items() if nbytes}


def _unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _bytes_inside(op: str, args: Any, kernels: str) -> int:
    """Bytes a kernel allocates inside one operation, invisible to the dispatcher.

    Found by auditing every operation of a CPU step against a counting allocator; anything else was below 64 KiB. Without
    them the peak of an unchunked loss is up to 13.8 % too low. CUDA's softmax makes the same copy (read in its source, not
    measured); its FSDP2 copies straight into the reduction's input.
    """
    if op in ("aten::_log_softmax", "aten::_softmax"):
        return 0 if args[0].is_contiguous() else _nbytes(args[0])  # softmax starts with .contiguous()
    if op in ("aten::_log_softmax_backward_data", "aten::_softmax_backward_data"):
        return sum(_nbytes(t) for t in args[:2] if not t.is_contiguous())
    if op == "fsdp::chunk_cat" and kernels == "cpu":
        return sum(_nbytes(t) for t in args[0])
    return 0


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
