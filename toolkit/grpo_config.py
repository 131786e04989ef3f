"""What one GRPO step is: `GRPOConfig`, and every check of its combinations. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from toolkit.checks import check_flag, check_number, check_one_of, check_temperature, check_whole
from toolkit.errors import SpecError

TruncationType = Literal["tis", "icepop", "seq-mask-tis"]
KLType = Literal["k1", "k2", "k3"]

#: Tasks by name; tasks.py makes them, in this order.
TASKS = ("arithmetic", "one_digit_sums", "gsm8k")

#: Fields on which it depends which tensors of a training step live; the others play no part in its memory.
MEMORY_FIELDS = (
    "temperature", "max_grad_norm", "ratio_clip_c", "token_level_loss", "force_on_policy_ratio",
    "use_importance_sampling_correction", "reference_policy_kl_penalty",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """One GRPO step: what is sampled, how it is graded, and the clipped policy-gradient update.

    Names are NeMo-RL's. Validated at construction.

    Attributes:
        task: "arithmetic", "one_digit_sums" or "gsm8k"; a path to a .jsonl file of questions and answers; a `Task`, or an
            iterable of `(prompt, answer)` pairs.
        num_prompts_per_step: prompts sampled per step, over all ranks.
        num_generations_per_prompt: completions per prompt; their mean reward is the baseline, so at least 2.
        max_new_tokens: tokens sampled per completion at most.
        temperature: of sampling, and of the logprobs trained on.
        top_p, top_k: keep the smallest set of tokens with this probability / this many tokens; 1.0 / None keep all.
        train_global_batch_size: sequences per optimizer update, over all ranks; None takes all of the step's in one
            update. Only with several updates do previous and current logprobs differ, and the clip settings act.
        train_micro_batch_size: sequences per forward and backward on a rank, at most; None takes all of an update's at once.
        learning_rate, weight_decay: of AdamW (betas 0.9, 0.999).
        warmup_steps: the learning rate rises linearly to its value over this many steps.
        warmup_start_factor: share of its value it starts at, as in torch's `LinearLR`; None is 1 / warmup_steps.
        max_grad_norm: gradients are scaled down to this total norm; None leaves them.
        ratio_clip_min, ratio_clip_max: the probability ratio counts within [1 - min, 1 + max].
        ratio_clip_c: dual clip; bounds the loss of tokens with negative advantage at this multiple of it; None is off.
        token_level_loss: True averages over all tokens of the step, False over sequences of their token means.
        sequence_level_importance_ratios: GSPO; one ratio per sequence, the geometric mean over its tokens.
        use_cispo: the clipped ratio weighs -A * logprob and is not differentiated itself.
        disable_ppo_ratio: REINFORCE; the loss is -A * logprob, without ratio or clip.
        force_on_policy_ratio: take the current logprobs, detached, as the previous ones: saves the scoring pass; the ratio
            is exactly 1. One update per step only.
        use_importance_sampling_correction: weigh each token's loss by the trainer's over the sampler's probability.
        truncated_importance_sampling_ratio: bound on that weight; None leaves it.
        truncated_importance_sampling_ratio_min: lower bound, for the two types that have one and optionally for "tis".
        truncated_importance_sampling_type: "tis" clamps, "icepop" drops tokens outside the bounds, "seq-mask-tis" drops
            sequences whose mean ratio is outside.
        reference_policy_kl_penalty: weight of the KL divergence from the model as it was loaded. 0 keeps no reference
            (NeMo-RL's default is 0.01).
        reference_policy_kl_type: "k1", "k2" or "k3", Schulman's estimators.
        normalize_rewards: divide advantages by the group's standard deviation. False, with token_level_loss, is Dr.GRPO.
        use_leave_one_out_baseline: a completion's baseline leaves out its own reward.
        advantage_clip_low, advantage_clip_high: bounds on advantages; None leaves them.
        use_dynamic_sampling: DAPO; drop groups whose rewards are all equal and sample on until the step is full.
        dynamic_sampling_max_gen_batches: give up after this many batches.
        overlong_filtering: completions cut off by max_new_tokens count in the baseline but not in the loss.
        overlong_buffer_length: DAPO; within this many tokens of max_new_tokens the reward falls linearly; None is off.
        overlong_buffer_penalty: by this much at most.
        stop_properly_penalty_coef: multiplies the reward of completions that were cut off; None leaves it.

    Raises:
        SpecError: a value out of range, or a setting that would do nothing beside the others.
    """

    task: Any = "arithmetic"
    num_prompts_per_step: int = 32
    num_generations_per_prompt: int = 8
    max_new_tokens: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    train_global_batch_size: int | None = None
    train_micro_batch_size: int | None = None
    learning_rate: float = 5e-6
    weight_decay: float = 0.01
    warmup_steps: int = 0
    warmup_start_factor: float | None = None
    max_grad_norm: float | None = 1.0
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    token_level_loss: bool = True
    sequence_level_importance_ratios: bool = False
    use_cispo: bool = False
    disable_ppo_ratio: bool = False
    force_on_policy_ratio: bool = False
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    truncated_importance_sampling_type: TruncationType = "tis"
    reference_policy_kl_penalty: float = 0.0
    reference_policy_kl_type: KLType = "k3"
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = False
    advantage_clip_low: float | None = None
    advantage_clip_high: float | None = None
    use_dynamic_sampling: bool = False
    dynamic_sampling_max_gen_batches: int = 10
    overlong_filtering: bool = False
    overlong_buffer_length: int | None = None
    overlong_buffer_penalty: float = 1.0
    stop_properly_penalty_coef: float | None = None

    def __post_init__(self) -> None:
        if self.warmup_start_factor is not None:
            check_number("warmup_start_factor", self.warmup_start_factor, 0, 1, open_low=True)
            if self.warmup_steps == 0:
                raise SpecError(f"warmup_start_factor={self.warmup_start_factor} does nothing at warmup_steps=0; set both.")
        if self.num_generations_per_prompt == 1:
            raise SpecError(
                "num_generations_per_prompt=1: the baseline of a group is its mean reward, so the advantage of a group "
                "of one is always 0 and nothing would be learned. Use 2 or more."
            )
        if self.top_k == 1:
            raise SpecError(
                "top_k=1 makes all completions of a prompt the same, so every advantage is 0 and nothing would be learned. "
                "Use 2 or more, or None."
            )
        self._check_values()
        self._check_loss()
        self._check_sampling()

    def _check_values(self) -> None:
        whole = {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_new_tokens": 1, "warmup_steps": 0}
        whole |= {"dynamic_sampling_max_gen_batches": 1}
        optional = ("train_global_batch_size", "train_micro_batch_size", "top_k", "overlong_buffer_length")
        whole |= {name: 1 for name in optional if getattr(self, name) is not None}
        for field, minimum in whole.items():
            object.__setattr__(self, field, check_whole(field, getattr(self, field), minimum))
        if self.temperature == 0:
            raise SpecError(
                "temperature=0: greedy completions of one prompt are all the same, so every advantage is 0 and nothing "
                "would be learned. Use session.evaluate() for greedy accuracy; sample with a temperature above 0."
            )
        object.__setattr__(self, "temperature", check_temperature(self.temperature))
        check_number("top_p", self.top_p, 0, 1, open_low=True)
        check_number("ratio_clip_min", self.ratio_clip_min, 0, 1)
        for field in (
            "learning_rate",
            "weight_decay",
            "ratio_clip_max",
            "reference_policy_kl_penalty",
            "overlong_buffer_penalty",
        ):
            check_number(field, getattr(self, field), 0)
        above = {"max_grad_norm": 0.0, "ratio_clip_c": 1.0, "truncated_importance_sampling_ratio": 0.0}
        for field, low in above.items():
            if getattr(self, field) is not None:
                check_number(field, getattr(self, field), low, open_low=True)
        within = {
            "truncated_importance_sampling_ratio_min": (0.0, math.inf),
            "advantage_clip_low": (-math.inf, 0.0),
            "advantage_clip_high": (0.0, math.inf),
            "stop_properly_penalty_coef": (0.0, 1.0),
        }
        for field, (low, high) in within.items():
            if getattr(self, field) is not None:
                check_number(field, getattr(self, field), low, high)
        for flag in (f.name for f in dataclasses.fields(self) if f.type == "bool"):
            check_flag(flag, getattr(self, flag))
        check_one_of("truncated_importance_sampling_type", self.truncated_importance_sampling_type, get_args(TruncationType))
        check_one_of("reference_policy_kl_type", self.reference_policy_kl_type, get_args(KLType))

    def _check_loss(self) -> None:
        updates = self.num_updates
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise SpecError(
                "sequence_level_importance_ratios=True (GSPO) weighs whole sequences, and token_level_loss=True averages "
                "over tokens. Set token_level_loss=False."
            )
        modes = [n for n in ("use_cispo", "disable_ppo_ratio", "force_on_policy_ratio") if getattr(self, n)]
        if len(modes) > 1:
            raise SpecError(f"{modes[0]} and {modes[1]} each say what becomes of the ratio; set one of them.")
        if modes and modes[0] != "force_on_policy_ratio" and self.ratio_clip_c is not None:
            raise SpecError(f"ratio_clip_c={self.ratio_clip_c} does nothing with {modes[0]}=True, which has no dual clip.")
        if self.force_on_policy_ratio and updates > 1:
            raise SpecError(
                f"force_on_policy_ratio=True with train_global_batch_size={self.train_global_batch_size}: the step takes "
                f"{updates} updates, and after the first the ratio is not 1. Set train_global_batch_size=None."
            )
        self._check_importance_sampling()
        if self.reference_policy_kl_penalty == 0 and self.reference_policy_kl_type != "k3":
            raise SpecError(
                f"reference_policy_kl_type={self.reference_policy_kl_type!r} does nothing at reference_policy_kl_penalty=0. "
                "Set a penalty above 0."
            )

    def _check_importance_sampling(self) -> None:
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        kind = self.truncated_importance_sampling_type
        if high is None and (low is not None or kind != "tis"):
            raise SpecError(
                "truncated_importance_sampling_ratio_min and _type do nothing without truncated_importance_sampling_ratio; "
                "set it too."
            )
        if high is not None and not self.use_importance_sampling_correction:
            raise SpecError(
                f"truncated_importance_sampling_ratio={high} bounds a weight that is not used. Set "
                "use_importance_sampling_correction=True."
            )
        if kind != "tis" and low is None:
            raise SpecError(
                f"truncated_importance_sampling_type={kind!r} needs truncated_importance_sampling_ratio_min too."
            )
        if low is not None and high is not None and low >= high:
            raise SpecError(
                f"truncated_importance_sampling_ratio_min={low} must be below truncated_importance_sampling_ratio={high}."
            )

    def _check_sampling(self) -> None:
        total = self.num_prompts_per_step * self.num_generations_per_prompt
        size = self.train_global_batch_size
        if size is not None and total % size:
            raise SpecError(
                f"train_global_batch_size={size} does not divide the {total} sequences of a step (num_prompts_per_step="
                f"{self.num_prompts_per_step} times num_generations_per_prompt={self.num_generations_per_prompt})."
            )
        if not self.use_dynamic_sampling and self.dynamic_sampling_max_gen_batches != 10:
            raise SpecError("dynamic_sampling_max_gen_batches does nothing without use_dynamic_sampling=True.")
        if self.overlong_buffer_length is None and self.overlong_buffer_penalty != 1.0:
            raise SpecError("overlong_buffer_penalty does nothing without overlong_buffer_length; set both.")
        if self.overlong_buffer_length is not None and self.overlong_buffer_length > self.max_new_tokens:
            raise SpecError(
                f"overlong_buffer_length={self.overlong_buffer_length} is more than max_new_tokens={self.max_new_tokens}."
            )

    @property
    def num_updates(self) -> int:
        """Optimizer updates per step."""
        total = self.num_prompts_per_step * self.num_generations_per_prompt
        return max(1, total // (self.train_global_batch_size or total))

    @property
    def shapes_rewards(self) -> bool:
        """Whether length changes rewards."""
        return self.overlong_buffer_length is not None or self.stop_properly_penalty_coef is not None

    @property
    def num_sampled_prompts(self) -> int:
        """Prompts a step may sample: those of every batch of dynamic sampling."""
        return self.num_prompts_per_step * (self.dynamic_sampling_max_gen_batches if self.use_dynamic_sampling else 1)
