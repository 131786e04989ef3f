"""The picked output dtype is what every FSDP unit of every rank really emits: seen by hooks, not read back from a config."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import toolkit as tk
from toolkit import fsdp
from toolkit.errors import SpecError
from toolkit.policy import Policy, switch
from toolkit.prompts import make_batch
from toolkit.rollouts import Rollouts, sample
from toolkit.spec import DTYPES, GRPOConfig
from toolkit.step import TrainingBatch, forward_backward, forward_logprobs, score

BATCH = ([[1, 5, 6, 7, 2], [1, 8, 9, 4, 10, 11, 2]], [3, 4])


def training(policy: Policy) -> TrainingBatch:
    batch = make_batch(*BATCH, pad_id=0)
    advantages_B = torch.tensor([1.0, -0.5])
    return TrainingBatch(batch, advantages_B, torch.zeros(2, batch.ids_BT.shape[1] - 1), 5.0, 2.0)


def what_units_emit(policy: Policy) -> dict[str, Any]:
    """Run forward and backward with hooks on every unit and on the collectives."""
    emitted: dict[str, set[str]] = {}
    handles = []
    for name, module in policy.model.named_modules():
        if isinstance(module, FSDPModule):

            def hook(module: Any, args: Any, output: Any, name: str = name) -> None:
                leaves = torch.utils._pytree.tree_leaves(output)
                found = {str(t.dtype) for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()}
                emitted.setdefault(name or fsdp.ROOT, set()).update(found)

            handles.append(module.register_forward_hook(hook))
    reduced: set[torch.dtype] = set()

    class Collectives(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "reduce_scatter" in func._schema.name:
                leaves = torch.utils._pytree.tree_leaves((args, kwargs))
                reduced.update(t.dtype for t in leaves if isinstance(t, torch.Tensor))
            return func(*args, **(kwargs or {}))

    with Collectives():
        forward_backward(policy, GRPOConfig(), training(policy))
    for handle in handles:
        handle.remove()
    result = {
        "emitted": emitted,
        "parameters": {str(p.dtype) for p in policy.model.parameters()},
        "gradients": {str(p.grad.dtype) for p in policy.model.parameters() if p.grad is not None},
        "without_gradient": [n for n, p in policy.model.named_parameters() if p.grad is None],
        "reduced_in": {str(d) for d in reduced},
        "moments": {str(v.dtype) for s in policy.optimizer.state.values() for v in s.values()},
    }
    policy.model.zero_grad(set_to_none=True)
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_unit_emits_the_picked_dtype_and_masters_stay_float32(ranks: int, request: pytest.FixtureRequest) -> None:
    session: tk.Session = request.getfixturevalue("one_rank" if ranks == 1 else "two_ranks")
    session.grpo_step()  # so that the optimizer has its moments
    for dtype in (*DTYPES, "float32"):  # and back
        session.output_dtype = dtype
        for seen in session.run(what_units_emit):
            assert len(seen["emitted"]) == 7  # root, embedding, four layers, head
            assert set(map(frozenset, seen["emitted"].values())) == {frozenset({f"torch.{dtype}"})}, dtype
            assert seen["parameters"] == seen["gradients"] == seen["moments"] == {"torch.float32"}
            assert seen["without_gradient"] == []
            if ranks > 1:  # a single rank has nothing to reduce
                assert seen["reduced_in"] == {"torch.float32"}
        assert set(session.units()["output_dtype"]) == {dtype}
        assert set(session.units()["rank"]) == set(range(ranks))


@pytest.mark.parametrize("ranks", [1, 2])
def test_omitted_output_dtype_means_float32_on_every_unit(ranks: int) -> None:
    with tk.launch(model=tk.tiny_policy(), ranks=ranks) as session:
        for seen in session.run(what_units_emit):
            assert set(map(frozenset, seen["emitted"].values())) == {frozenset({"torch.float32"})}


def loss_and_gradients(policy: Policy) -> tuple[float, dict[str, torch.Tensor]]:
    """Of one fixed batch of four sequences, this rank's share of them."""
    rows = [[1, 5, 6, 7, 2], [1, 8, 9, 4, 10, 11, 2], [1, 3, 3, 2], [1, 12, 4, 4, 9, 2]]
    share = len(rows) // policy.data_size
    mine = slice(policy.data_rank * share, (policy.data_rank + 1) * share)
    batch = make_batch(rows[mine], [2, 3, 1, 2][mine], 0, width=12)
    advantages_B = torch.tensor([1.0, -0.5, 0.25, 2.0])[mine]
    # Against half the current logprobs the ratios spread far over the clip range, on both sides of it.
    previous_BT = 0.5 * score(policy, batch, 1.0)
    whole = TrainingBatch(batch, advantages_B, previous_BT, num_tokens=14.0, num_sequences=4.0)
    loss, _ = forward_backward(policy, GRPOConfig(), whole)
    grads = {
        n: (p.grad.full_tensor() if isinstance(p.grad, torch.distributed.tensor.DTensor) else p.grad).clone()
        for n, p in policy.model.named_parameters()
        if p.grad is not None
    }
    policy.model.zero_grad(set_to_none=True)
    return loss, grads


@pytest.mark.parametrize(
    "other",
    [
        {"ranks": 2},
        {"ranks": 2, "tensor_parallel_size": 2},
        {"ranks": 2, "tensor_parallel_size": 2, "sequence_parallel": True},
        {"ranks": 1, "activation_checkpointing": "full"},
        {"ranks": 1, "activation_checkpointing": "selective"},
        {"ranks": 1, "activation_checkpointing": "hf"},
        {"ranks": 1, "logprob_mode": "chunked", "logprob_chunk_size": 5},
        {"ranks": 1, "logprob_mode": "linear"},
        {"ranks": 2, "logprob_mode": "linear"},
        {"ranks": 2, "logprob_mode": "linear", "tensor_parallel_size": 2},
        {"ranks": 2, "logprob_mode": "linear", "tensor_parallel_size": 2, "sequence_parallel": True},
        {"ranks": 1, "logprob_mode": "linear", "activation_checkpointing": "hf"},
    ],
    ids=lambda o: "-".join(str(v) for v in o.values()),
)
def test_loss_and_gradients_are_those_of_one_rank(other: dict[str, Any]) -> None:
    """In float32 compute the ways to run a step differ only in the order of float32 sums.

    1e-6 of a gradient's norm is a few units in the last place (6e-8) over sums of a dozen tokens and two ranks. A missing
    term is far above it: without the sum over tensor-parallel peers, gradients of the query and key norms were off by 0.8.
    """
    base = {"model": tk.tiny_policy(), "precision": "float32"}
    with tk.launch(**base) as session:
        loss, grads = session.run(loss_and_gradients)[0]
    with tk.launch(**base, **other) as session:
        results = session.run(loss_and_gradients)
    assert len(grads) == 47
    for other_loss, other_grads in results:
        assert other_loss == pytest.approx(loss, rel=1e-6)
        for name, grad in grads.items():
            found = other_grads[_checkpointed(name, other_grads)]
            assert float((found - grad).norm() / grad.norm()) < 2e-6, name


def _checkpointed(name: str, names: dict[str, Any]) -> str:
    """AutoModel's checkpoint wrapper puts itself into the parameter's path."""
    return next(n for n in names if n.replace("_checkpoint_wrapped_module.", "") == name)


def test_a_switch_reaches_the_next_forward_without_a_rebuild(two_ranks: tk.Session) -> None:
    def identities(policy: Policy) -> list[int]:
        return [id(policy.model), *(id(p) for group in policy.optimizer.param_groups for p in group["params"])]

    def logits_dtype(policy: Policy) -> str:
        batch = make_batch(*BATCH, pad_id=0)
        with torch.no_grad(), policy.autocast():
            return str(policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT).logits.dtype)

    before = two_ranks.run(identities)
    two_ranks.output_dtype = "bfloat16"
    assert two_ranks.run(logits_dtype) == ["torch.bfloat16"] * 2
    two_ranks.output_dtype = "float32"
    assert two_ranks.run(logits_dtype) == ["torch.float32"] * 2
    assert two_ranks.run(identities) == before


def test_a_refused_switch_changes_nothing(tied_model: Path) -> None:
    with tk.launch(model=tied_model, autocast=False, output_dtype="bfloat16") as session:
        with pytest.raises(SpecError, match="the head belongs to the root"):
            session.output_dtype = "float32"
        assert session.output_dtype == "bfloat16"
        assert set(session.units()["output_dtype"]) == {"bfloat16"}
        with pytest.raises(SpecError, match="output_dtype='int8'"):
            session.output_dtype = "int8"
        session.run(what_units_emit)


def test_the_crash_that_the_tied_head_check_prevents_is_real(tied_model: Path) -> None:
    def forced(policy: Policy) -> None:
        spec = dataclasses.replace(policy.spec, output_dtype="float32")
        fsdp.apply_spec(policy.model, spec)
        try:
            forward_logprobs(policy, make_batch(*BATCH, pad_id=0), 1.0)
        finally:
            fsdp.apply_spec(policy.model, policy.spec)

    with tk.launch(model=tied_model, autocast=False, output_dtype="bfloat16") as session:
        with pytest.raises(RuntimeError, match="same dtype"):
            session.run(forced)
        session.run(what_units_emit)  # and the session is usable afterwards


def test_the_nan_that_the_eager_check_prevents_is_real() -> None:
    def forced(policy: Policy) -> bool:
        policy.model.set_attn_implementation("eager")
        try:
            with torch.no_grad():
                logprobs_BT = forward_logprobs(policy, make_batch(*BATCH, pad_id=0), 1.0)
        finally:
            policy.model.set_attn_implementation("sdpa")
            fsdp.reshard(policy.model)
        return bool(logprobs_BT.isnan().any())

    with tk.launch(model=tk.tiny_policy()) as session:
        assert session.run(forced) == [True]
        session.output_dtype = "bfloat16"
        assert session.run(forced) == [False]


def test_inspection_catches_a_unit_that_differs(one_rank: tk.Session) -> None:
    def tamper(policy: Policy) -> None:
        spec = policy.spec
        unit = fsdp.unit_modules(policy.model)["model.layers.2"]
        fsdp._set_policy(unit, dataclasses.replace(fsdp.state_of(unit)._mp_policy, output_dtype=torch.float16))
        try:
            fsdp.check_units(policy.model, spec)
        finally:
            fsdp.apply_spec(policy.model, spec)

    with pytest.raises(RuntimeError, match=r"unit model.layers.2 has output_dtype=float16 where float32 was asked for"):
        one_rank.run(tamper)
    assert set(one_rank.units()["output_dtype"]) == {"float32"}


def test_an_unsharded_model_is_caught() -> None:
    from toolkit.spec import PolicySpec

    with pytest.raises(RuntimeError, match="FSDP2 was not applied"):
        fsdp.check_units(torch.nn.Linear(2, 2), PolicySpec(model="m"))


def carries_more_than_bfloat16(policy: Policy) -> bool:
    batch = make_batch(*BATCH, pad_id=0)
    with torch.no_grad(), policy.autocast():
        logits = policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT).logits
    fsdp.reshard(policy.model)
    return bool((logits != logits.bfloat16().to(logits.dtype)).any())


def test_a_float32_head_gives_float32_logits_whatever_the_output_dtype() -> None:
    with tk.launch(model=tk.tiny_policy()) as session:
        assert session.run(carries_more_than_bfloat16) == [False]  # a bfloat16 head's logits, only widened
    for ranks in (1, 2):
        with tk.launch(model=tk.tiny_policy(), lm_head_precision="float32", output_dtype="bfloat16", ranks=ranks) as session:
            assert session.run(carries_more_than_bfloat16) == [True] * ranks
            units = session.units().set_index(["rank", "name"])["output_dtype"]
            assert units.xs("lm_head", level="name").eq("float32").all()
            assert units.xs(fsdp.ROOT, level="name").eq("float32").all()
            assert units.drop(["lm_head", fsdp.ROOT], level="name").eq("bfloat16").all()


def test_after_a_failed_forward_the_next_step_is_the_undisturbed_one() -> None:
    def fail_in_layer_two(policy: Policy) -> None:
        layer = policy.model.model.layers[2]

        def raise_here(*_: Any) -> None:
            raise ArithmeticError("planted")

        handle = layer.mlp.register_forward_pre_hook(raise_here)
        try:
            forward_backward(policy, GRPOConfig(), training(policy))
        finally:
            handle.remove()

    def fail_in_backward(policy: Policy) -> None:
        layer = policy.model.model.layers[1]

        def raise_here(*_: Any) -> None:
            raise ArithmeticError("planted")

        handle = layer.mlp.register_full_backward_pre_hook(raise_here)
        try:
            forward_backward(policy, GRPOConfig(), training(policy))
        finally:
            handle.remove()

    fields = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_new_tokens": 5, "learning_rate": 1e-4}
    with tk.launch(model=tk.tiny_policy(), **fields) as session:
        straight = [session.grpo_step().metrics for _ in range(3)]
    with tk.launch(model=tk.tiny_policy(), **fields) as session:
        disturbed = [session.grpo_step().metrics]
        for failing in (fail_in_layer_two, fail_in_backward):
            with pytest.raises(ArithmeticError, match="planted"):
                session.run(failing)
            disturbed.append(session.grpo_step().metrics)
    assert disturbed == straight


def changed_copy(folder: Path, name: str, change: dict[str, Any]) -> Path:
    """The tiny policy with entries of one of its JSON files changed; None takes an entry out."""
    shutil.copytree(tk.tiny_policy(), folder)
    fields = json.loads((folder / name).read_text()) | change
    (folder / name).write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))
    return folder


def test_dropout_is_off_in_training_too(tmp_path: Path) -> None:
    dropping = changed_copy(tmp_path / "m", "config.json", {"attention_dropout": 0.5})
    rows = [[1, 5, 6, 7, 2], [1, 8, 9]]
    with tk.launch(model=tk.tiny_policy()) as plain, tk.launch(model=dropping) as session:
        np.testing.assert_array_equal(session.logprobs(rows), plain.logprobs(rows))
        assert session.run(loss_and_gradients)[0][0] == plain.run(loss_and_gradients)[0][0]


@pytest.mark.parametrize("name", ["GPT2", "OPT"])
def test_every_kind_of_dropout_is_off(name: str, tmp_path: Path) -> None:
    """Against transformers' own model in evaluation mode, in float64: no kind has dropouts of the same names."""
    import transformers

    fields = {
        "GPT2": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2},
        "OPT": {
            "max_position_embeddings": 64, "hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "layerdrop": 0.5, "attention_dropout": 0.3,
        },
    }[name]  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(vocab_size=96, bos_token_id=1, eos_token_id=2, pad_token_id=0, **fields)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tk.tiny_policy()).save_pretrained(tmp_path)
    rows = [[1, 5, 6, 7, 2], [1, 8, 9, 40, 41]]
    with tk.launch(model=tmp_path, precision="float32") as session:
        found = session.logprobs(rows)
    exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with torch.no_grad():
        want_BTV = torch.log_softmax(exact(torch.tensor(rows)).logits, -1)
    want = want_BTV[:, :-1].gather(-1, torch.tensor(rows)[:, 1:, None]).squeeze(-1)
    np.testing.assert_allclose(found, want.numpy(), atol=1e-5)


def test_a_tokenizer_without_a_pad_token_pads_with_the_end_of_sequence(tmp_path: Path) -> None:
    def sampled(policy: Policy) -> tuple[int | None, Rollouts]:
        problems = [("1+1=", "2"), ("12+34=", "46"), ("7+88=", "95")]
        return policy.tokenizer.pad_token_id, sample(
            policy, problems, num_generations=4, max_new_tokens=5, temperature=1.0, seed=1
        )

    bare = changed_copy(tmp_path / "m", "tokenizer_config.json", {"pad_token": None})
    with tk.launch(model=tk.tiny_policy()) as plain, tk.launch(model=bare) as session:
        ((pad, rollouts),), ((_, want),) = session.run(sampled), plain.run(sampled)
        np.testing.assert_array_equal(session.logprobs([[1, 5], [1, 6, 7]]), plain.logprobs([[1, 5], [1, 6, 7]]))
    assert pad == 2
    assert rollouts.completions == want.completions
    assert torch.equal(rollouts.batch.mask_BT, want.batch.mask_BT)
    padding = rollouts.batch.mask_BT == 0
    assert padding[:, 0].any()
    assert rollouts.batch.ids_BT[padding].eq(2).all()
    assert torch.equal(rollouts.batch.ids_BT[~padding], want.batch.ids_BT[~padding])
    assert torch.equal(rollouts.generation_logprobs_BT, want.generation_logprobs_BT)


class Gathers(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the all-gathers of parameters."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name == "c10d::_allgather_base_"
        return func(*args, **(kwargs or {}))


def test_parameters_are_gathered_once_while_kept_and_every_time_before_and_after(two_ranks: tk.Session) -> None:
    def counts(policy: Policy) -> tuple[list[int], list[bool]]:
        found, sharded = [], []

        def look() -> None:
            sharded.append(all(isinstance(p, DTensor) for p in policy.model.parameters()))

        def forwards(number: int) -> None:
            batch = make_batch(*BATCH, pad_id=0)
            with Gathers() as gathers, torch.no_grad(), policy.autocast():
                for _ in range(number):
                    policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT)
            found.append(gathers.count)

        def train() -> None:
            with Gathers() as gathers:
                forward_backward(policy, GRPOConfig(), training(policy))
            found.append(gathers.count)
            policy.model.zero_grad(set_to_none=True)

        train()
        look()
        with fsdp.kept_unsharded(policy.model):
            forwards(3)
            look()
        look()
        train()
        look()
        return found, sharded

    units = 7  # root, embedding, four layers, head
    for found, sharded in two_ranks.run(counts):
        assert found[1] == units
        assert found[0] == found[2] > units  # backward gathers again what forward has freed
        assert sharded == [True, False, True, True]


def forward_of_ones_own(policy: Policy) -> None:
    batch = make_batch(*BATCH, pad_id=0)
    with torch.no_grad(), policy.autocast():
        policy.forward(batch.ids_BT, batch.mask_BT, batch.positions_BT)


def test_nothing_stays_gathered_after_any_call(two_ranks: tk.Session) -> None:
    """A gathered copy is as large as the model, and would be in the next measurement of memory."""

    def sharded(policy: Policy) -> bool:
        return all(isinstance(p, DTensor) for p in policy.model.parameters())

    def switched() -> None:
        two_ranks.output_dtype = "bfloat16"
        assert two_ranks.run(sharded) == [True, True]
        two_ranks.output_dtype = "float32"

    rows = [[1, 5, 6, 7, 2], [1, 8, 9]]
    calls: list[Any] = [
        lambda: two_ranks.run(forward_of_ones_own),
        lambda: two_ranks.logprobs(rows),
        lambda: two_ranks.divergence(token_ids=rows),
        lambda: two_ranks.rollout(2),
        lambda: two_ranks.evaluate(2),
        lambda: two_ranks.memory(num_sequences=1, sequence_length=5),
        two_ranks.grpo_step,
        switched,
    ]
    for call in calls:
        call()
        assert two_ranks.run(sharded) == [True, True]


def test_switch_refuses_what_needs_a_build(one_rank: tk.Session) -> None:
    with pytest.raises(AssertionError):
        one_rank.run(switch, precision="float32")


@pytest.mark.gpu
def test_on_gpus_automodels_own_route_ends_in_the_same_checked_state() -> None:
    ranks = torch.cuda.device_count()
    with tk.launch(model=tk.tiny_policy(), ranks=ranks, output_dtype="bfloat16") as session:
        assert set(session.units()["output_dtype"]) == {"bfloat16"}
        assert session.grpo_step().metrics["global_valid_toks"] > 0


def test_a_model_that_lets_packed_sequences_see_each_other_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with tk.launch(model=tk.tiny_policy(), sequence_packing=True):
        pass
    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(SpecError, match="lets packed sequences see each other"):
        tk.launch(model=tk.tiny_policy(), sequence_packing=True)
