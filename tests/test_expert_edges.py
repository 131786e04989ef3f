"""A float32 head under a 16-bit root where the experts are divided over two ranks: AutoModel's own class, on gloo."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit as tk
from toolkit import fsdp_experts
from toolkit.edge_report import Edge
from toolkit.expert_edges import EXPERT_HEAD, expert_head_edges
from toolkit.policy import Policy
from toolkit.prompts import Batch, make_batch

#: A pair for each rank.
ROWS = ([[1, 5, 14, 6, 40, 7, 8, 2], [1, 7, 14, 2]], [[1, 7, 14, 13, 5, 40, 11, 2], [1, 20, 30, 2]])
FEW = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_new_tokens": 3}


def moe_model(folder: Path, family: str = "Qwen3Moe", **fields: Any) -> Path:
    """A random mixture of four experts with a wide spread of logits, norm weights away from 1."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=96, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **{"num_experts": 4, "tie_word_embeddings": False, **fields},
    )  # fmt: skip
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, param in model.named_parameters():
        if "norm" in name:
            param.data.mul_(1 + 0.3 * torch.randn_like(param))
        elif name == "lm_head.weight":
            param.data.mul_(20)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(tk.tiny_policy()).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tk.Session]:
    with tk.launch(model=moe_model(tmp_path_factory.mktemp("experts")), ranks=2, **FEW) as session:
        yield session


def batch_of(policy: Policy) -> Batch:
    """This rank's two rows: padded left, as prompts are, or right."""
    rows = ROWS[policy.data_rank]
    return make_batch(rows, [1] * len(rows), 0, side=("left", "right")[policy.data_rank])


def build(policy: Policy, precision: str, **form: Any) -> Any:
    weights = fsdp_experts.checkpoint_weights(policy.model)
    spec = dataclasses.replace(policy.spec, precision=precision)
    return fsdp_experts.build_expert_parallel(policy.model, weights, spec, 2, policy.device, **form)


def test_it_is_the_same_model_with_its_experts_divided(experts: tk.Session) -> None:
    """In float32 AutoModel's class, two experts on each rank, gives what Hugging Face's whole class gives in one process."""
    from transformers import AutoModelForCausalLM

    def run(policy: Policy) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
        batch = batch_of(policy)
        with torch.no_grad(), fsdp_experts.eager_and_quiet():
            model = build(policy, "float32", output_dtype="float32")
            found_BTV = model(batch.ids_BT, position_ids=batch.positions_BT, attention_mask=batch.mask_BT).logits
            whole = AutoModelForCausalLM.from_pretrained(policy.spec.model, dtype=torch.float32)
            own_BTV = whole(input_ids=batch.ids_BT, position_ids=batch.positions_BT, attention_mask=batch.mask_BT).logits
        local = model.model.layers["0"].mlp.experts.gate_and_up_projs.to_local()
        return found_BTV, own_BTV, local.shape[0], batch.mask_BT

    for found_BTV, own_BTV, num_local, mask_BT in experts.run(run):
        assert num_local == 2
        at_BT = mask_BT.bool()
        torch.testing.assert_close(found_BTV[at_BT], own_BTV[at_BT], atol=2e-5, rtol=1e-5)
        assert float(own_BTV.abs().max()) > 5


def test_the_rounding_is_that_of_a_float64_oracle_and_both_cures_undo_it(experts: tk.Session) -> None:
    def edges(policy: Policy) -> list[Edge]:
        return expert_head_edges(policy, batch_of(policy))

    def oracle(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
        """|logprob - exact| of this rank's tokens, and that with no float32 head; float64 from the hidden states on."""
        batch = batch_of(policy)
        weight_VH = dict(fsdp_experts.checkpoint_weights(policy.model))["lm_head.weight"].double()
        hidden: list[torch.Tensor] = []
        found = []
        for head_precision in ("float32", None):
            with torch.no_grad(), fsdp_experts.eager_and_quiet():
                model = build(policy, "bfloat16", output_dtype="bfloat16", lm_head_precision=head_precision)
                model.get_output_embeddings().register_forward_hook(lambda head, args, output: hidden.append(args[0]))
                found += [model(batch.ids_BT, position_ids=batch.positions_BT, attention_mask=batch.mask_BT).logits]
        assert torch.equal(hidden[0], hidden[1].float())
        assert all(logits_BTV.dtype == torch.bfloat16 for logits_BTV in found)
        at_BT = batch.token_mask_BT[:, 1:] > 0
        rows_BTV = [z.double()[:, :-1].log_softmax(-1) for z in (hidden[0].double() @ weight_VH.T, *found)]
        exact, rounded, plain = (r.gather(-1, batch.ids_BT[:, 1:, None])[..., 0][at_BT] for r in rows_BTV)
        return (rounded - exact).abs(), (plain - exact).abs()

    mine = experts.run(oracle)
    rounded, plain = (float(torch.cat([rank[i] for rank in mine]).mean()) for i in range(2))
    for first, second in experts.run(edges):
        assert first.edge == second.edge == EXPERT_HEAD
        assert first.error == second.error == pytest.approx(rounded, abs=1e-6)
        assert rounded > 1e-3
        assert (first.error_with_cure, second.error_with_cure) == (0.0, 0.0)  # their logits are the head's own, bit for bit
        assert "fsdp_output_dtype='float32'" in first.cure
        assert "wrap_outer_model=False" in second.cure
        assert f"{plain:.1e} nats" in first.finding
        assert "Qwen3MoeForCausalLM with these weights, experts over 2 ranks" in first.setting


def test_the_report_has_it_and_the_session_goes_on(experts: tk.Session) -> None:
    report = experts.precision_edges()
    assert report.worst[EXPERT_HEAD].error == pytest.approx(5.0e-3, rel=0.5)  # the README; what is sampled differs by CPU
    assert set(report.not_measured) == {"float32 head under a bfloat16 root, tied"}
    assert experts.grpo_step().summary["step"] == 1


# ---- where there is nothing to measure, the reason


def reason(policy: Policy) -> str:
    (edge,) = expert_head_edges(policy, batch_of(policy))
    assert edge.error is None
    return edge.finding


def test_a_family_without_a_class_of_automodels_own_is_said_so(tmp_path: Path) -> None:
    with tk.launch(model=moe_model(tmp_path, "Mixtral", num_local_experts=4), ranks=2, **FEW) as session:
        assert (
            "AutoModel has no class of its own for MixtralForCausalLM" in session.precision_edges().not_measured[EXPERT_HEAD]
        )


def test_a_class_that_refuses_the_model_is_quoted(tmp_path: Path) -> None:
    """Hugging Face's MiniMax-M2 always norms queries and keys; AutoModel's only by a field that its config lacks."""
    with tk.launch(model=moe_model(tmp_path, "MiniMaxM2", num_local_experts=4), ranks=2, **FEW) as session:
        found = session.precision_edges().not_measured[EXPERT_HEAD]
        assert (
            "cannot be built or run here: Error(s) in loading state_dict for MiniMaxM2ForCausalLM: Unexpected key(s)"
            in found
        )
        session.grpo_step()


def test_experts_that_cannot_be_divided_and_one_rank_are_said_so(tmp_path: Path, one_rank: tk.Session) -> None:
    uneven = moe_model(tmp_path / "3", num_experts=3)
    with tk.launch(model=uneven, ranks=2, **FEW) as session:
        assert set(session.run(reason)) == {"3 experts cannot be divided evenly over 2 ranks."}
    with tk.launch(model=uneven, **FEW) as session:
        assert session.run(reason) == ["one rank holds all experts; launch with ranks=2 or more."]
    assert "this model is dense" in one_rank.run(reason)[0]
    with tk.launch(model=moe_model(tmp_path / "tied", tie_word_embeddings=True), ranks=2, **FEW) as session:
        (found, _) = session.run(reason)
        assert "AutoModel leaves a tied head in the compute dtype" in found
        assert "Untie the head" in found


def test_a_model_too_large_for_whole_copies_is_said_so(experts: tk.Session) -> None:
    def limited(policy: Policy) -> str:
        return expert_head_edges(policy, batch_of(policy), limit=1000)[0].finding

    (found, _) = experts.run(limited)
    assert found.startswith("the model has 86,912 parameters")
    assert "up to 1,000" in found
