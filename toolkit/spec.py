"""What a session is asked to be: dtypes, `PolicySpec`, `GRPOConfig`, and every check of their combinations.

Nothing here imports torch: a wrong setting is refused before anything heavy starts. A check names what was typed, why
it cannot work (or would do nothing), and the way out. Numbered facts are those of the README's section "What decides".
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from toolkit.checks import check_flag, check_one_of, check_whole
from toolkit.errors import SpecError
from toolkit.grpo_config import GRPOConfig as GRPOConfig

if TYPE_CHECKING:
    import torch

    from toolkit.recipes import Recipe

Checkpointing = Literal["full", "selective", "hf"]
LogprobMode = Literal["materialized", "chunked", "linear"]
TemperatureOrder = Literal["after_upcast", "before_upcast"]


@dataclass(frozen=True, slots=True)
class DType:
    """One row of the dtype table."""

    name: str
    bytes: int
    mantissa_bits: int  # explicitly stored; relative rounding error is 2**-(mantissa_bits + 1)
    max_value: float


#: The one table of dtype names. Everything that names, sizes or validates a dtype reads it here.
DTYPES: dict[str, DType] = {
    "float32": DType("float32", 4, 23, 3.4028234663852886e38),
    "bfloat16": DType("bfloat16", 2, 7, 3.3895313892515355e38),
    "float16": DType("float16", 2, 10, 65504.0),
}
_ALIASES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def dtype_name(value: Any, field: str = "dtype") -> str:
    """Return the table name of a dtype given as a name, an alias (`bf16`) or a `torch.dtype`.

    Raises:
        SpecError: for anything that is not in the table; names `field`, what was given, and what is allowed.
    """
    name = str(value).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in DTYPES:
        size = "".join(filter(str.isdigit, name))  # float64 is no slip of the pen for float16
        likely = [known for known in (*DTYPES, *_ALIASES) if known.endswith(size)] if size else list(DTYPES)
        guess = difflib.get_close_matches(name.lower(), likely, n=1)
        hint = f" Did you mean {_ALIASES.get(guess[0], guess[0])!r}?" if guess else ""
        raise SpecError(f"{field}={value!r} is not a dtype this toolkit knows; choose one of {', '.join(DTYPES)}.{hint}")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a table name."""
    import torch

    dtype = getattr(torch, DTYPES[name].name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """How the policy is built and at which precision each part of it runs.

    Names are NeMo-RL's and torch's where they have one. Validated at construction.

    Attributes:
        model: a local folder in Hugging Face format, or a hub id.
        output_dtype: dtype every FSDP unit casts its outputs to (`MixedPrecisionPolicy.output_dtype`; NeMo-RL PR 4115
            calls it `fsdp_output_dtype`). Switchable on a live session.
        precision: compute dtype, i.e. that of the gathered parameters (`MixedPrecisionPolicy.param_dtype`). The sharded
            master parameters are always float32.
        reduce_dtype: dtype in which gradients are summed over ranks.
        cast_forward_inputs: every unit casts its floating inputs to `precision` first (torch's and NeMo-RL's default).
            False leaves them as the previous unit's output dtype made them: with float32 outputs, a true float32
            residual stream.
        autocast: run forward, loss and backward under `torch.autocast(precision)`, as NeMo-RL does; of no consequence
            at float32 compute.
        lm_head_precision: None, or "float32" to run the output projection in float32.
        tensor_parallel_size: ranks that share one copy of each layer. The rest are data parallel.
        sequence_parallel: shard the sequence between the tensor-parallel regions.
        activation_checkpointing: False; "full" or "selective" (AutoModel's, inside the FSDP unit); "hf" (Hugging Face's,
            outside it: then the output dtype decides the dtype of one saved tensor per layer).
        cpu_offload: keep sharded parameters and optimizer state in host memory (CUDA only).
        logprob_mode: "materialized" takes a float32 copy of all logits; "chunked" never has more than
            `logprob_chunk_size` rows of it, forward or backward; "linear" makes no logits at all, and keeps what it makes
            of them in float32: the head runs a tile of the vocabulary at a time, on the scored tokens only. (Sampling
            takes ordinary logits of the last token in every mode.)
        logprob_chunk_size: rows (tokens) of logits upcast at a time; only for "chunked", where None means 1024.
        temperature_order: "after_upcast" divides float32 logits by the temperature; "before_upcast" reproduces NeMo-RL
            and divides in the output dtype.
        sequence_packing: training and scoring put a micro-batch's sequences end to end into one row, without pads; each
            attends to itself only. Without a variable-length attention kernel (as on CPU) attention costs the square of
            the row: set `train_micro_batch_size`.
        share_prompt_prefix: training and scoring compute a prompt once for its completions, which stand behind it in one
            row of at most 1024 tokens; each attends to the prompt and itself only. The head runs on completion tokens only.
        attn_implementation: None (sdpa), "eager", "sdpa", or "flash_attention_2" (CUDA only).
        seed: of parameter initialisation, prompts and sampling.

    Raises:
        SpecError: a value or combination that would do nothing or crash later.
    """

    model: str | Path
    output_dtype: str = "float32"
    precision: str = "bfloat16"
    reduce_dtype: str = "float32"
    cast_forward_inputs: bool = True
    autocast: bool = True
    lm_head_precision: str | None = None
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    activation_checkpointing: Checkpointing | bool = False
    cpu_offload: bool = False
    logprob_mode: LogprobMode = "materialized"
    logprob_chunk_size: int | None = None
    temperature_order: TemperatureOrder = "after_upcast"
    sequence_packing: bool = False
    share_prompt_prefix: bool = False
    attn_implementation: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike) or not str(self.model):
            raise SpecError(f"model={self.model!r} must be a folder or a hub id, e.g. tk.tiny_policy().")
        object.__setattr__(self, "model", str(self.model))
        for field in ("output_dtype", "precision", "reduce_dtype"):
            object.__setattr__(self, field, dtype_name(getattr(self, field), field))
        if self.lm_head_precision is not None:
            object.__setattr__(self, "lm_head_precision", dtype_name(self.lm_head_precision, "lm_head_precision"))
        for field in (f.name for f in dataclasses.fields(self) if f.type == "bool"):
            check_flag(field, getattr(self, field))
        if self.activation_checkpointing is True:  # NeMo-RL's way to say it
            object.__setattr__(self, "activation_checkpointing", "full")
        check_one_of("activation_checkpointing", self.activation_checkpointing, (False, *get_args(Checkpointing)))
        check_one_of("logprob_mode", self.logprob_mode, get_args(LogprobMode))
        check_one_of("temperature_order", self.temperature_order, get_args(TemperatureOrder))
        check_one_of("attn_implementation", self.attn_implementation, (None, "eager", "sdpa", "flash_attention_2"))
        object.__setattr__(self, "tensor_parallel_size", check_whole("tensor_parallel_size", self.tensor_parallel_size))
        object.__setattr__(self, "seed", check_whole("seed", self.seed, 0, 2**32 - 1))
        self._check_combinations()

    def _check_combinations(self) -> None:
        if not self.cast_forward_inputs and not self.runs_autocast and self.output_dtype != self.precision:
            # torch: "expected m1 and m2 to have the same dtype", from the second unit on.
            raise SpecError(
                f"output_dtype={self.output_dtype!r} with cast_forward_inputs=False and no autocast would hand "
                f"{self.output_dtype} activations to {self.precision} weights, which no matmul accepts. Set "
                f"cast_forward_inputs=True, or autocast=True (needs a 16-bit precision), or output_dtype={self.precision!r}."
            )
        if self.lm_head_precision not in (None, "float32"):
            raise SpecError(
                f"lm_head_precision={self.lm_head_precision!r}: only 'float32' makes a difference here; the head already "
                f"runs in precision={self.precision!r}. Leave it at None."
            )
        if self.lm_head_precision == "float32" and self.precision == "float32":
            raise SpecError(
                "lm_head_precision='float32' changes nothing at precision='float32': the head already runs in it. "
                "Leave it at None."
            )
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise SpecError(
                "sequence_parallel=True does nothing at tensor_parallel_size=1: there is no group to shard the sequence "
                "over. Set tensor_parallel_size to 2 or more, or sequence_parallel=False."
            )
        if self.logprob_chunk_size is not None:
            if self.logprob_mode != "chunked":
                why = "makes no logits to upcast" if self.logprob_mode == "linear" else "upcasts all logits at once"
                raise SpecError(
                    f"logprob_chunk_size={self.logprob_chunk_size} does nothing with logprob_mode={self.logprob_mode!r}, "
                    f"which {why}. Set logprob_mode='chunked', or leave the chunk size at None."
                )
            object.__setattr__(self, "logprob_chunk_size", check_whole("logprob_chunk_size", self.logprob_chunk_size))
        if self.temperature_order == "before_upcast" and self.logprob_mode == "linear":
            raise SpecError(
                "temperature_order='before_upcast' does nothing with logprob_mode='linear', whose logits are float32 from "
                "the start. Leave the order at 'after_upcast', or set logprob_mode='materialized' to see its error."
            )
        if (
            self.attn_implementation == "eager"
            and self.cast_forward_inputs
            and DTYPES[self.output_dtype].max_value > DTYPES[self.precision].max_value
        ):
            raise SpecError(
                f"attn_implementation='eager' with output_dtype={self.output_dtype!r} and precision={self.precision!r}: the "
                f"attention mask is built from {self.output_dtype}'s lowest number, which becomes -inf when the next unit "
                f"casts it to {self.precision}; padded rows then turn into NaN, and all others after them. Use 'sdpa', or "
                f"output_dtype={self.precision!r}."
            )
        if self.sequence_packing and self.sequence_parallel:
            raise SpecError(
                "sequence_packing=True with sequence_parallel=True: a packed row has any length, and sequence parallelism "
                "shards it evenly. Set one of them to False."
            )
        self._check_sharing()

    def _check_sharing(self) -> None:
        if not self.share_prompt_prefix:
            return
        for other in ("sequence_packing", "sequence_parallel"):
            if getattr(self, other):
                raise SpecError(
                    f"share_prompt_prefix=True with {other}=True: each lays the rows out in its own way. Set one of them to "
                    "False."
                )
        if self.attn_implementation in ("eager", "flash_attention_2"):
            raise SpecError(
                f"share_prompt_prefix=True with attn_implementation={self.attn_implementation!r}: completions of one row "
                "are kept apart by a mask of true and false per pair of tokens, which only 'sdpa' takes. Use 'sdpa' or None."
            )

    @property
    def runs_autocast(self) -> bool:
        """Whether an autocast region is entered (there is none to enter at float32 compute)."""
        return self.autocast and self.precision != "float32"

    @property
    def root_output_dtype(self) -> str:
        """Output dtype of the root unit and of the head, which return logits, or in linear mode logprobs.

        A 16-bit root would round a float32 head's logits, or float32 logprobs, back (torch casts the whole output tree),
        so both keep float32 there; all other units keep `output_dtype`.
        """
        wide = self.lm_head_precision == "float32" or self.logprob_mode == "linear"
        return "float32" if wide else self.output_dtype

    @property
    def chunk_rows(self) -> int | None:
        """Rows of logits upcast at a time, None for all."""
        return (self.logprob_chunk_size or 1024) if self.logprob_mode == "chunked" else None

    def to_recipe(self, config: GRPOConfig | None = None, ranks: int = 1) -> Recipe:
        """This spec, and a config, as a NeMo-RL recipe; its `to_yaml(path)` writes what `load_recipe` reads."""
        from toolkit.recipes import to_recipe

        return to_recipe(self, config, ranks)


def split_fields(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort keyword fields into those of `PolicySpec` and those of `GRPOConfig`.

    Raises:
        SpecError: a name that neither has; suggests the nearest.
    """
    spec_names = {f.name for f in dataclasses.fields(PolicySpec)}
    grpo_names = {f.name for f in dataclasses.fields(GRPOConfig)}
    for name in fields:
        if name not in spec_names | grpo_names:
            guess = difflib.get_close_matches(name, spec_names | grpo_names, n=1)
            hint = f" Did you mean {guess[0]!r}?" if guess else ""
            raise SpecError(f"{name!r} is no field of PolicySpec or GRPOConfig.{hint}")
    return (
        {k: v for k, v in fields.items() if k in spec_names},
        {k: v for k, v in fields.items() if k in grpo_names},
    )
