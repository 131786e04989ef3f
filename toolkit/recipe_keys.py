"""The keys of a NeMo-RL GRPO recipe: which setting of the toolkit each becomes, or why it has none.

One table, `RULES`. A key with a field is mapped as soon as `PolicySpec` or `GRPOConfig` has a field of that name; until
then, and for all other keys, values that ask for nothing are ignored and any other is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.recipe_values import (
    Keys,
    read_backend,
    read_chunk_size,
    read_global_batch,
    read_max_response,
    read_output_dtype,
    read_ranks,
    read_scheduler,
    read_shaping,
    read_tokenizer,
    read_total_length,
    read_truncation,
    read_version,
)

#: Reads a value with a form of its own, knowing the other keys: the fields it gives, and what is to be said about it.
Reader = Callable[[Any, Keys], tuple[dict[str, Any], str]]

ABSENT = object()
KL = "loss_fn.reference_policy_kl_penalty"


@dataclass(frozen=True, slots=True)
class Rule:
    """What becomes of one key.

    Attributes:
        why: why it is ignored, and at other values refused.
        field: the field of `PolicySpec` or `GRPOConfig` it is mapped to, if there is one of that name.
        off: values that ask for nothing; None: all of them.
        only_with: NeMo-RL reads the key only if this one is set.
        default: what NeMo-RL takes if the key is absent, where the toolkit's own default may differ.
        read: maps values that need more than a name.
    """

    why: str = "the toolkit has no such option"
    field: str | None = None
    off: tuple[Any, ...] | None = None
    only_with: str | None = None
    default: Any = ABSENT
    read: Reader | None = None


def _rules(section: str, **rules: Rule) -> dict[str, Rule]:
    return {f"{section}.{name}": rule for name, rule in rules.items()}


def _options(section: str, **off: Any) -> dict[str, Rule]:
    """Options mapped by their own name where the toolkit has them; `off` is the value that asks for nothing."""
    return {f"{section}.{name}": Rule(field=name, off=(value,)) for name, value in off.items()}


def _ignored(section: str, why: str, *names: str) -> dict[str, Rule]:
    return {f"{section}.{name}": Rule(why) for name in names}


_YOU_STEP = "you take the steps: session.grpo_step(n)"
_YOU_EVALUATE = "you evaluate when you like: session.evaluate(n)"
_CUSTOM = "it acts on AutoModel's own model classes, and the toolkit's model is Hugging Face's: it would do nothing"
_MOE = "NeMo-RL reads it at expert_parallel_size > 1 only, and silently not here; for the head, toolkit.lm_head_precision"
_NODES = "a recipe's ranks are those of one machine; for more, tk.launch(recipe, cluster=..., ranks=...)"
_SAMPLER = "the policy itself samples, with the weights it trains"

RULES: dict[str, Rule] = {
    "policy.model_name": Rule(field="model"),
    "policy.precision": Rule(field="precision"),
    "policy.max_grad_norm": Rule(field="max_grad_norm"),
    "policy.train_micro_batch_size": Rule(field="train_micro_batch_size"),
    "policy.train_global_batch_size": Rule(field="train_global_batch_size", read=read_global_batch),
    "policy.logprob_chunk_size": Rule(field="logprob_chunk_size", read=read_chunk_size),
    "policy.logprob_batch_size": Rule("scoring takes train_micro_batch_size sequences at a time; memory only"),
    "policy.max_total_sequence_length": Rule(read=read_total_length),
    "policy.make_sequence_length_divisible_by": Rule("sequences are padded to the longest of their batch"),
    "policy.offload_optimizer_for_logprob": Rule(off=(False,)),
    **_ignored("policy", _SAMPLER, "generation_batch_size", "refit_buffer_size_gb"),
    "policy.hf_config_overrides": Rule("the model's config is taken as it is saved", off=({}, None)),
    "policy.optimizer": Rule("a policy without an optimizer learns nothing; give policy.optimizer.kwargs.lr", off=()),
    "policy.optimizer.name": Rule("the optimizer is AdamW", off=("torch.optim.AdamW",)),
    "policy.scheduler": Rule(field="warmup_steps", read=read_scheduler),
    "policy.tokenizer.name": Rule(read=read_tokenizer),
    "policy.sequence_packing.enabled": Rule(field="sequence_packing"),
    **{
        f"policy.sequence_packing.{name}": Rule("micro-batches are counted in sequences: train_micro_batch_size")
        for name in ("train_mb_tokens", "logprob_mb_tokens", "algorithm", "sequence_length_round", "microbatch_order")
    },
    "policy.dynamic_batching.enabled": Rule("micro-batches hold train_micro_batch_size sequences", off=(False,)),
    "policy.megatron_cfg.enabled": Rule("the toolkit shards with FSDP2 through AutoModel, not with Megatron", off=(False,)),
    "policy.reward_model_cfg.enabled": Rule("the policy is a causal language model", off=(False,)),
    "policy.draft.enabled": Rule(off=(False,)),
    "policy.router_replay.enabled": Rule(off=(False,)),
    "cluster.gpus_per_node": Rule(read=read_ranks),
    "cluster.num_nodes": Rule(_NODES, off=(1,)),
    **_ignored("cluster", "for placement on nodes", "segment_size", "master_port_range_low", "master_port_range_high"),
    **_rules(
        "policy.optimizer.kwargs",
        lr=Rule(field="learning_rate"),
        weight_decay=Rule(field="weight_decay"),
        betas=Rule("AdamW runs with torch's betas", off=([0.9, 0.999],)),
        eps=Rule("AdamW runs with torch's eps", off=(1e-8,)),
        amsgrad=Rule(off=(False,)),
        maximize=Rule(off=(False,)),
        **{name: Rule("speed only") for name in ("foreach", "fused")},
    ),
    **_rules(
        "policy.tokenizer",
        chat_template=Rule("the model's own template is used", off=(None,)),
        chat_template_kwargs=Rule("the template is called without arguments", off=(None, {})),
        use_fastokens=Rule(off=(False,)),
        use_processor=Rule(off=(False,)),
    ),
    **_rules(
        "policy.dtensor_cfg",
        enabled=Rule(default=True, read=read_backend),
        _v2=Rule(default=False, read=read_version),
        fsdp_output_dtype=Rule(field="output_dtype", read=read_output_dtype),
        defer_fsdp_grad_sync=Rule("inert in NeMo-RL too: nothing there switches the sync off"),
        custom_parallel_plan=Rule("AutoModel's own plans are used", off=(None,)),
        env_vars=Rule("set them in this process before launching", off=(None, {})),
        clear_cache_every_n_steps=Rule(off=(None,)),
        lora_cfg=Rule(off=(None, {})),
        **{
            name: Rule(field=name)
            for name in ("tensor_parallel_size", "sequence_parallel", "activation_checkpointing", "cpu_offload")
        },
        **{
            name: Rule("ranks are data or tensor parallel", off=(1,))
            for name in ("context_parallel_size", "expert_parallel_size", "dp_replicate_size")
        },
    ),
    "policy.dtensor_cfg.lora_cfg.enabled": Rule("all weights are trained", off=(False,)),
    "policy.dtensor_cfg.automodel_kwargs.attn_implementation": Rule(field="attn_implementation"),
    "policy.dtensor_cfg.automodel_kwargs.force_hf": Rule("the model is always Hugging Face's class"),
    "policy.dtensor_cfg.automodel_kwargs.use_liger_kernel": Rule("NeMo-RL forces it off", off=(False,)),
    "policy.dtensor_cfg.automodel_kwargs.freeze_config": Rule("all weights are trained", off=(None, {})),
    "policy.dtensor_cfg.automodel_kwargs.backend": Rule(_CUSTOM, off=(None, {})),
    "policy.dtensor_cfg.moe_parallelizer.lm_head_precision": Rule(_MOE, off=(None,)),
    "policy.dtensor_cfg.moe_parallelizer.ignore_router_for_ac": Rule(_MOE, off=(True,)),
    "policy.dtensor_cfg.moe_parallelizer.reshard_after_forward": Rule(_MOE, off=(False,)),
    "policy.dtensor_cfg.moe_parallelizer.wrap_outer_model": Rule(_MOE, off=(True,)),
    **_rules(
        "policy.generation",
        backend=Rule(_SAMPLER, off=("vllm", "sglang", "trtllm", "hf")),
        stop_token_ids=Rule("completions end at the model's own end tokens", off=(None, [])),
        stop_strings=Rule("completions end at the model's own end tokens", off=(None, [])),
        **{name: Rule(field=name) for name in ("max_new_tokens", "temperature", "top_p", "top_k")},
    ),
    "policy.generation.colocated.enabled": Rule("the same ranks sample and train", off=(True,)),
    **_rules(
        "grpo",
        seed=Rule(field="seed", default=42),
        num_prompts_per_step=Rule(field="num_prompts_per_step", default=32),
        num_generations_per_prompt=Rule(field="num_generations_per_prompt", default=16),
        normalize_rewards=Rule(field="normalize_rewards", default=True),
        use_leave_one_out_baseline=Rule(field="use_leave_one_out_baseline", default=True),
        dynamic_sampling_max_gen_batches=Rule(
            field="dynamic_sampling_max_gen_batches", only_with="grpo.use_dynamic_sampling"
        ),
        batch_multiplier=Rule(field="batch_multiplier", off=(1,), only_with="grpo.use_dynamic_sampling"),
        max_rollout_turns=Rule("a rollout is one turn", off=(1,)),
        skip_reference_policy_logprobs_calculation=Rule("the KL penalty needs them", off=(False,), only_with=KL),
        calculate_advantages_on_gpu=Rule("speed only"),
        debug_payload_metrics=Rule("there is no payload"),
        deduplicate_multimodal_data=Rule("there are no images or sounds"),
        stop_at_validation_metric=Rule(_YOU_STEP, off=(None,)),
        stop_at_validation_threshold=Rule(_YOU_STEP, only_with="grpo.stop_at_validation_metric"),
    ),
    **_options("grpo", overlong_filtering=False, use_dynamic_sampling=False, advantage_clip_low=None),
    **_options("grpo", advantage_clip_high=None, seq_logprob_error_threshold=None),
    **_options("grpo", invalid_tool_call_advantage=None, malformed_thinking_advantage=None),
    **_ignored("grpo", _YOU_STEP, "max_num_steps", "max_num_epochs"),
    **_ignored("grpo", _YOU_EVALUATE, "val_period", "val_start_at", "val_batch_size", "val_at_start", "val_at_end"),
    **_ignored("grpo", _YOU_EVALUATE, "max_val_samples", "val_num_generations_per_prompt"),
    "grpo.async_grpo.enabled": Rule("a step samples, then trains", off=(False,)),
    "grpo.reward_scaling.enabled": Rule("rewards are taken as they are; scale them in the task's reward", off=(False,)),
    "grpo.reward_shaping.enabled": Rule(off=(False,), read=read_shaping),
    "grpo.reward_shaping.max_response_length": Rule(read=read_max_response),
    **_options(
        "grpo.reward_shaping", overlong_buffer_length=None, overlong_buffer_penalty=None, stop_properly_penalty_coef=None
    ),
    "grpo.adv_estimator.name": Rule("advantages are GRPO's", off=("grpo",)),
    "grpo.adv_estimator.normalize_rewards": Rule(field="normalize_rewards"),
    "grpo.adv_estimator.use_leave_one_out_baseline": Rule(field="use_leave_one_out_baseline"),
    "grpo.adv_estimator.reward_weights": Rule("GDPO only", off=(None,)),
    "grpo.adv_estimator.minus_baseline": Rule("Reinforce++ only"),
    KL: Rule("the toolkit keeps no reference policy", field="reference_policy_kl_penalty", off=(0,), default=0.01),
    **_rules(
        "loss_fn",
        reference_policy_kl_type=Rule(field="reference_policy_kl_type", only_with=KL),
        kl_input_clamp_value=Rule("log ratios are clamped to ±20, as NeMo-RL does by default", off=(20,), only_with=KL),
        kl_output_clamp_value=Rule("the KL estimate is clamped to ±10, as NeMo-RL does by default", off=(10,), only_with=KL),
        use_kl_in_reward=Rule(field="use_kl_in_reward", off=(False,), only_with=KL),
        use_on_policy_kl_approximation=Rule(field="use_on_policy_kl_approximation", off=(False,), only_with=KL),
        token_level_loss=Rule(field="token_level_loss"),
        ratio_clip_min=Rule(field="ratio_clip_min"),
        ratio_clip_max=Rule(field="ratio_clip_max"),
        truncated_importance_sampling_type=Rule(
            field="truncated_importance_sampling_type",
            only_with="loss_fn.truncated_importance_sampling_ratio",
            read=read_truncation,
        ),
        positive_example_nll_weight=Rule(off=(0,)),
    ),
    **_options("loss_fn", ratio_clip_c=None, sequence_level_importance_ratios=False, disable_ppo_ratio=False),
    **_options("loss_fn", use_cispo=False, use_importance_sampling_correction=False),
    **_options("loss_fn", truncated_importance_sampling_ratio=None),
    **_options("loss_fn", truncated_importance_sampling_ratio_min=None, force_on_policy_ratio=False),
    **_rules(
        "reward_penalties",
        token_ids=Rule("no penalty reads them"),
        **{
            name: Rule(off=(False,))
            for name in (
                "penalize_duplicated_reasoning", "penalize_empty_final_answer", "penalize_unwanted_tokens",
                "penalize_malformed_think_tag",
            )
        },
    ),
    "on_policy_distillation": Rule(off=(None,)),
    "data_plane.enabled": Rule(off=(False,)),
}  # fmt: skip

#: Sections of which every key is ignored, whatever it is.
IGNORED = {
    "data": "problems come from a task: toolkit.task in the recipe, or tk.launch(recipe, task=...)",
    "env": "completions are graded by the task's reward",
    "logger": "records are returned, not logged; session.history has them all",
    "checkpointing": "tk.launch(recipe, checkpoint_dir=..., save_period=...) saves",
    **{
        f"policy.generation.{name}": _SAMPLER
        for name in (
            "vllm_cfg", "vllm_kwargs", "sglang_cfg", "sglang_kwargs", "trtllm_cfg", "mcore_generation_config",
            "colocated.resources",
        )
    },
}  # fmt: skip
#: Mappings and lists that one rule reads as a whole.
WHOLE = (
    "policy.scheduler", "policy.hf_config_overrides", "policy.dtensor_cfg.env_vars", "policy.tokenizer.chat_template_kwargs",
    "policy.dtensor_cfg.automodel_kwargs.backend", "policy.dtensor_cfg.automodel_kwargs.freeze_config",
    "on_policy_distillation",
)  # fmt: skip
