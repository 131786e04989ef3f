"""What one GRPO step is: `GRPOConfig`, and every check of its combinations. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.checks import check_flag, check_number, check_temperature, check_whole
from toolkit.errors import SpecError


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """One GRPO step: what is sampled, how it is graded, and the clipped policy-gradient update.

    Names are NeMo-RL's. Validated at construction.

    Attributes:
        task: "arithmetic", a `prompts.Task`, or an iterable of `(prompt, answer)` pairs.
        num_prompts_per_step: prompts sampled per step, over all ranks.
        num_generations_per_prompt: completions per prompt; their mean reward is the baseline, so at least 2.
        max_new_tokens: tokens sampled per completion at most.
        temperature: of sampling, and of the logprobs trained on.
        top_p, top_k: keep the smallest set of tokens with this probability / this many tokens; 1.0 / None keep all.
        train_micro_batch_size: sequences per forward and backward on a rank; None takes all of a rank's at once.
        learning_rate, weight_decay: of AdamW (betas 0.9, 0.999).
        warmup_steps: the learning rate rises linearly to its value over this many steps.
        max_grad_norm: gradients are scaled down to this total norm; None leaves them.
        ratio_clip_min, ratio_clip_max: the probability ratio counts within [1 - min, 1 + max].
        ratio_clip_c: dual clip; bounds the loss of tokens with negative advantage at this multiple of it; None is off.
        token_level_loss: True averages over all tokens of the step, False over sequences of their token means.
        normalize_rewards: divide advantages by the group's standard deviation.
        use_leave_one_out_baseline: a completion's baseline leaves out its own reward.

    Raises:
        SpecError: a value out of range.
    """

    task: Any = "arithmetic"
    num_prompts_per_step: int = 32
    num_generations_per_prompt: int = 8
    max_new_tokens: int = 8
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    train_micro_batch_size: int | None = None
    learning_rate: float = 5e-6
    weight_decay: float = 0.01
    warmup_steps: int = 0
    max_grad_norm: float | None = 1.0
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    token_level_loss: bool = True
    normalize_rewards: bool = True
    use_leave_one_out_baseline: bool = False

    def __post_init__(self) -> None:
        if self.num_generations_per_prompt == 1:
            raise SpecError(
                "num_generations_per_prompt=1: the baseline of a group is its mean reward, so the advantage of a group "
                "of one is always 0 and nothing would be learned. Use 2 or more."
            )
        whole = {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_new_tokens": 1, "warmup_steps": 0}
        whole |= {name: 1 for name in ("train_micro_batch_size", "top_k") if getattr(self, name) is not None}
        for field, minimum in whole.items():
            object.__setattr__(self, field, check_whole(field, getattr(self, field), minimum))
        object.__setattr__(self, "temperature", check_temperature(self.temperature))
        check_number("top_p", self.top_p, 0, 1, open_low=True)
        check_number("learning_rate", self.learning_rate, 0)
        check_number("weight_decay", self.weight_decay, 0)
        if self.max_grad_norm is not None:
            check_number("max_grad_norm", self.max_grad_norm, 0, open_low=True)
        check_number("ratio_clip_min", self.ratio_clip_min, 0, 1)
        check_number("ratio_clip_max", self.ratio_clip_max, 0)
        if self.ratio_clip_c is not None:
            check_number("ratio_clip_c", self.ratio_clip_c, 1, open_low=True)
        for field in ("token_level_loss", "normalize_rewards", "use_leave_one_out_baseline"):
            check_flag(field, getattr(self, field))


