"""A prompt computed once for its completions gives what it gives computed for each: logprobs, gradients, sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import toolkit as tk
from tests.test_layouts import random_model
from toolkit.errors import SpecError
from toolkit.policy import Policy
from toolkit.prompts import Batch, make_batch
from toolkit.shared_prompts import share_prompts
from toolkit.spec import GRPOConfig
from toolkit.step import TrainingBatch, forward_backward, score

from .conftest import SMALL

PROMPTS = [[1, 5, 6, 7], [1, 8], [1, 8], [1, 9, 9, 4, 3]]
COMPLETIONS = [[[5, 2], [6, 7, 8], [9]], [[4, 4, 4], [2]], [[3, 2], [2], [7, 8]], [[5, 2]]]


def groups() -> Batch:
    """Groups of 3, 2 + 3 of one prompt, and 1; prompts and completions of several lengths, and two columns too many."""
    pairs = [(prompt, made) for prompt, completions in zip(PROMPTS, COMPLETIONS, strict=True) for made in completions]
    return make_batch([p + c for p, c in pairs], [len(p) for p, _ in pairs], 0, width=10)


def test_rows_by_hand() -> None:
    batch = make_batch([[5, 6, 7, 8], [5, 6, 9], [4, 7]], [2, 2, 1], 0)
    rows = share_prompts(batch)
    assert rows.ids_RL.tolist() == [[5, 6, 7, 8, 9, 0], [0, 4, 7, 0, 0, 0]]
    assert rows.positions_RL[0].tolist() == [0, 1, 2, 3, 2, 1]
    assert rows.columns_K.tolist() == [1, 2, 1, 4]
    assert rows.targets_RK.tolist() == [[7, 8, 9, 0], [7, 0, 0, 0]]
    assert rows.counted_RK.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    seen = [[int(v) for v in row] for row in rows.mask_R1LL[0, 0]]
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],  # a pad: it sees what it likes, nobody sees it
    ]
    assert rows.spread(torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])).tolist() == [[0, 1, 2], [0, 3, 4], [0, 5, 6]]


@pytest.mark.parametrize("longest_row", [1, 8, 12, 1024])
def test_every_completion_comes_back_to_its_place(longest_row: int) -> None:
    batch = groups()
    rows = share_prompts(batch, longest_row)
    assert torch.equal(rows.spread(rows.targets_RK.float())[:, 4:], batch.ids_BT[:, 5:].float())
    assert rows.ids_RL.shape[1] <= max(longest_row, 5 + 3)
    assert float(rows.counted_RK.sum()) == float(batch.token_mask_BT.sum())


@pytest.mark.parametrize(("model_type", "drift"), [("gpt2", 1e-12), ("llama", 1e-6), ("tiny", 1e-6)])
def test_logprobs_and_gradients_in_float64(model_type: str, drift: float, tmp_path: Path) -> None:
    """Llama's and Qwen3's norms compute in float32 whatever the model's dtype, so their gradients drift by that."""
    folder = tk.tiny_policy() if model_type == "tiny" else _random(tmp_path, model_type)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa").eval()
    batch = groups()
    weights_BT = torch.randn(batch.ids_BT[:, 1:].shape, dtype=torch.float64) * batch.token_mask_BT[:, 1:]

    def apart() -> torch.Tensor:
        logits = model(input_ids=batch.ids_BT, attention_mask=batch.mask_BT, position_ids=batch.positions_BT).logits
        return logits[:, :-1].log_softmax(-1).gather(-1, batch.ids_BT[:, 1:, None])[..., 0]

    def shared() -> torch.Tensor:
        rows = share_prompts(batch, longest_row=12)
        logits = model(
            input_ids=rows.ids_RL, attention_mask=rows.mask_R1LL, position_ids=rows.positions_RL,
            logits_to_keep=rows.columns_K,
        ).logits  # fmt: skip
        return rows.spread(logits.log_softmax(-1).gather(-1, rows.targets_RK[..., None])[..., 0])

    found = []
    for logprobs in (apart, shared):
        made_BT = logprobs()
        gradients = torch.autograd.grad((made_BT * weights_BT).sum(), list(model.parameters()))
        found.append((made_BT.detach()[batch.token_mask_BT[:, 1:] > 0], torch.cat([g.flatten() for g in gradients])))
    for expected, mine in zip(*found, strict=True):
        assert float((mine - expected).abs().max()) < drift * float(expected.abs().max())
        assert float((mine - expected).abs().mean()) < drift / 10 * float(expected.abs().max())


def _random(folder: Path, model_type: str) -> Path:
    if model_type != "gpt2":
        return random_model(folder, model_type)
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=2))
    for param in model.parameters():
        param.data.mul_(4)
    model.save_pretrained(folder)
    return folder


def _trained(policy: Policy) -> tuple[torch.Tensor, torch.Tensor]:
    batch = groups().to(policy.device)
    previous_BT = score(policy, batch, 0.7)
    whole = TrainingBatch(batch, torch.linspace(-1, 2, batch.num_sequences), 0.9 * previous_BT, 16.0, 9.0)
    forward_backward(policy, GRPOConfig(temperature=0.7, train_micro_batch_size=4), whole)
    grads = torch.cat([p.grad.full_tensor().flatten() for p in policy.model.parameters()])  # type: ignore[union-attr]
    policy.model.zero_grad(set_to_none=True)
    return previous_BT[batch.token_mask_BT[:, 1:] > 0], grads


@pytest.mark.parametrize("mode", ["materialized", "chunked", "linear"])
def test_scoring_and_training_in_every_mode(mode: str) -> None:
    found = []
    for share in (False, True):
        fields = {"precision": "float32", "logprob_mode": mode if share else "materialized", "share_prompt_prefix": share}
        with tk.launch(model=tk.tiny_policy(), **SMALL, **fields) as session:
            found.append(session.run(_trained)[0])
    for expected, mine in zip(*found, strict=True):
        assert float((mine - expected).abs().max()) < 1e-5 * float(expected.abs().max())
        assert float((mine - expected).abs().mean()) < 1e-6 * float(expected.abs().max())


def test_on_policy_the_ratio_is_exactly_one_in_the_mode_and_precision_people_use() -> None:
    with tk.launch(model=tk.tiny_policy(), share_prompt_prefix=True, **SMALL) as session:
        metrics = session.grpo_step().metrics
    assert metrics["probs_ratio_min"] == metrics["probs_ratio_max"] == 1.0


def test_a_step_runs_on_fewer_tokens() -> None:
    def columns(policy: Policy) -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []
        handle = policy.model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        score(policy, groups(), 1.0)
        handle.remove()
        return seen

    with tk.launch(model=tk.tiny_policy(), share_prompt_prefix=True, **SMALL) as session:
        assert session.run(columns) == [[(4, 14)]]  # of 9 sequences of 10: prompts of 5, and 3 times 3 tokens


def test_refused_where_it_cannot_act(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SpecError, match=r"has layers of sliding_attention.*Use share_prompt_prefix=False"):
        tk.launch(model=random_model(tmp_path, "mistral"), share_prompt_prefix=True)
    with tk.launch(model=tk.tiny_policy(), share_prompt_prefix=True, **SMALL) as session:
        with pytest.raises(SpecError, match="made-up sequences of a given length share no prompt"):
            session.memory(num_sequences=4, sequence_length=16)
        assert session.memory().peak_bytes > 0
    with pytest.raises(SpecError, match="made-up sequences"):
        tk.predict_memory(tk.tiny_policy(), ranks=1, sequence_length=16, share_prompt_prefix=True)


@pytest.mark.parametrize("lost", ["positions", "mask"])
def test_a_model_that_goes_by_something_else_is_found_out(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Policy, ids_BT: Any, mask_BT: Any, positions_BT: Any, **options: Any) -> Any:
        if mask_BT is not None and mask_BT.dim() == 4:
            if lost == "mask":
                mask_BT = torch.ones_like(mask_BT).tril()
            else:
                positions_BT = torch.arange(ids_BT.shape[1]).expand_as(ids_BT)
        return self.model(input_ids=ids_BT, attention_mask=mask_BT, position_ids=positions_BT, **options)

    monkeypatch.setattr(Policy, "forward", forward)
    with pytest.raises(SpecError, match="see each other, or does not go by positions and masks alone"):
        tk.launch(model=tk.tiny_policy(), share_prompt_prefix=True)
