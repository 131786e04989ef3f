"""The private parts of torch, transformers and AutoModel that we use. When one changes, it is here that it shows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from nemo_automodel.components.distributed.parallelizer import ModelParallelizer
from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

import toolkit as tk
from toolkit import fsdp
from toolkit.policy import Policy


def test_the_names_fsdp_py_reads_exist() -> None:
    for owner, names in {
        FSDPState: ("_cast_output_dtype", "_pre_backward"),
        FSDPParamGroup: ("unshard", "wait_for_unshard", "post_backward"),
        FSDPModule: ("_get_fsdp_state", "reset_iter_state", "set_reshard_after_forward", "reshard"),
    }.items():
        for name in names:
            assert callable(getattr(owner, name)), f"{owner.__name__}.{name}"
    assert {"sharded_param", "_unsharded_param", "unsharded_accumulated_grad"} <= set(FSDPParam.__annotations__)
    fields = set(MixedPrecisionPolicy.__dataclass_fields__)
    assert fields == {"param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"}
    accepted = inspect.signature(ModelParallelizer._apply).parameters
    assert {"model", "device_mesh", "mp_policy", "offload_policy", "sequence_parallel", "activation_checkpointing"} <= set(
        accepted
    )
    assert list(inspect.signature(synchronize_tp_replica_gradients).parameters)[:2] == ["model_parts", "device_mesh"]


def test_the_states_attributes_mean_what_we_take_them_for(one_rank: tk.Session) -> None:
    def look(policy: Policy) -> dict[str, Any]:
        state = fsdp.state_of(fsdp.unit_modules(policy.model)["model.layers.0"])
        group = state._fsdp_param_groups[0]
        return {
            "policy": state._mp_policy,
            "same": group.mp_policy is state._mp_policy,
            "mesh_info": hasattr(group, "post_forward_mesh_info"),
            "auto": state._auto_reshard_after_forward,
            "root": fsdp.state_of(fsdp.unit_modules(policy.model)[fsdp.ROOT])._is_root,
            "params": len(group.fsdp_params),
        }

    one_rank.logprobs([[1, 2, 3]])
    (seen,) = one_rank.run(look)
    assert isinstance(seen["policy"], MixedPrecisionPolicy)
    assert seen["same"]
    assert seen["mesh_info"]
    assert isinstance(seen["auto"], bool)
    assert seen["root"] is True
    assert seen["params"] == 11


def test_automodel_still_skips_fsdp2_on_one_rank() -> None:
    """Why fsdp.shard calls `_apply` itself. If this fails, AutoModel applies it now and the detour may go."""
    from nemo_automodel.components.distributed.model_parallelizer import parallelize_model
    from transformers import AutoModelForCausalLM

    from toolkit.engines import KernelRanks
    from toolkit.spec import PolicySpec

    KernelRanks().connect("cpu")
    model = AutoModelForCausalLM.from_pretrained(tk.tiny_policy())
    setup = fsdp.build_setup(PolicySpec(model=tk.tiny_policy(), output_dtype="bfloat16"), 1)
    assert not isinstance(parallelize_model(model, setup.mesh_context), FSDPModule)


def test_storages_keep_their_python_object_until_they_are_freed() -> None:
    """The ledger learns of a free through a weak reference to it."""
    import weakref

    tensor = torch.ones(4)
    freed: list[int] = []
    reference = weakref.ref(tensor.untyped_storage(), lambda _: freed.append(1))
    view = tensor[1:]
    del tensor
    assert not freed
    assert reference() is not None
    del view
    assert freed == [1]


def test_queries_and_keys_norms_need_the_call_that_automodel_leaves_to_the_training_loop() -> None:
    """Without synchronize_gradients their gradients under tensor parallelism are silently wrong, by 0.3 and more."""
    from .test_policy import loss_and_gradients

    with tk.launch(model=tk.tiny_policy(), precision="float32") as session:
        exact = session.run(loss_and_gradients)[0][1]

    def without(policy: Policy) -> dict[str, torch.Tensor]:
        synchronize = fsdp.synchronize_gradients
        fsdp.synchronize_gradients = lambda model, mesh: None
        try:
            return loss_and_gradients(policy)[1]
        finally:
            fsdp.synchronize_gradients = synchronize

    with tk.launch(model=tk.tiny_policy(), precision="float32", ranks=2, tensor_parallel_size=2) as session:
        found = session.run(without)[0]
    name = "model.layers.0.self_attn.q_norm.weight"
    assert float((found[name] - exact[name]).norm() / exact[name].norm()) > 0.1


def test_the_names_that_fakes_and_the_watch_of_shapes_use_exist() -> None:
    """What only shows under fake tensors is compared with real steps in test_memory_predict.py."""
    import transformers.masking_utils
    from torch._subclasses import fake_tensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    assert callable(ShardingPropagator._propagate_tensor_meta_non_cached)
    assert "elem" in AsyncCollectiveTensor.__slots__
    assert isinstance(fake_tensor.CONSTANT_NUMEL_LIMIT, int)
    assert callable(transformers.masking_utils.is_tracing)


def test_a_fake_tensor_still_passes_for_a_trace_in_transformers() -> None:
    """Why fakes.py answers for it. If this fails, the replacement may go."""
    import transformers.masking_utils
    from torch._subclasses.fake_tensor import FakeTensorMode

    from toolkit.fakes import fake_tensors

    with FakeTensorMode():
        assert transformers.masking_utils.is_tracing(torch.ones(2))
    with fake_tensors():
        assert not transformers.masking_utils.is_tracing(torch.ones(2))
    assert transformers.masking_utils.is_tracing(FakeTensorMode().from_tensor(torch.ones(2)))


def test_values_that_are_not_there_are_those_of_an_ordinary_step() -> None:
    from toolkit.fakes import fake_tensors

    with fake_tensors():
        values = torch.rand(3, 4)
        assert bool((values == 1).all())
        assert values[values > 0.5].shape == (12,)
        assert torch.tensor([5, 7]).tolist() == [5, 7]


def test_the_attention_in_use_is_where_we_read_it() -> None:
    """And transformers' public setter writes it there, for every layer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tk.tiny_policy(), attn_implementation="sdpa")
    assert fsdp.attention_of(model) == "sdpa"
    model.set_attn_implementation("eager")
    assert fsdp.attention_of(model) == model.model.layers[0].self_attn.config._attn_implementation == "eager"


def test_automodels_class_of_a_mixture_is_found_and_still_asks_for_cuda() -> None:
    """Why fsdp_experts.py answers for `torch.cuda.current_device`. If this fails, the replacement may go."""
    import pytest
    from nemo_automodel._transformers.registry import ModelRegistry
    from transformers import Qwen3MoeConfig

    if torch.cuda.is_available():
        pytest.skip("asks where there is CUDA")
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    owner = ModelRegistry.resolve_custom_model_cls("Qwen3MoeForCausalLM", config)
    assert owner.__module__ == "nemo_automodel.components.models.qwen3_moe.model"
    assert owner.ModelCapabilities().supports_ep
    with pytest.raises((AssertionError, RuntimeError), match="CUDA|NVIDIA"):
        owner.from_config(config)
