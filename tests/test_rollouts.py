"""Sampling is what it says: greedy is transformers' greedy, logprobs are the trainer's, ranks change nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit as tk
from toolkit.policy import Policy
from toolkit.prompts import arithmetic
from toolkit.rollouts import Rollouts, _invert, sample
from toolkit.step import score

PROBLEMS = arithmetic().held_out[:12]


def sampled(policy: Policy, **options: Any) -> Rollouts:
    options = {"num_generations": 2, "max_new_tokens": 5, "temperature": 1.0, **options}
    return sample(policy, PROBLEMS, **options)


def all_completions(per_rank: list[Rollouts]) -> list[str]:
    return [text for rollouts in per_rank for text in rollouts.completions]


def test_greedy_is_transformers_greedy() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tk.tiny_policy())
    model = AutoModelForCausalLM.from_pretrained(tk.tiny_policy(), dtype=torch.float32)
    want = []
    for prompt, _ in PROBLEMS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        want.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    with tk.launch(model=tk.tiny_policy(), precision="float32") as session:
        assert all_completions(session.run(sampled, num_generations=1, greedy=True)) == want


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_sampler_logprobs_are_the_trainers(temperature: float) -> None:
    def both(policy: Policy) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rollouts = sampled(policy, temperature=temperature)
        scored_BT = score(policy, rollouts.batch, temperature)
        return rollouts.generation_logprobs_BT[:, 1:], scored_BT, rollouts.batch.token_mask_BT[:, 1:]

    # Cached decoding and one whole forward differ by float32 noise only (3e-6 in the lab); a wrong mask, position or cache
    # slot moves logprobs by 0.1 and more.
    with tk.launch(model=tk.tiny_policy(), precision="float32") as session:
        ((generated_BT, scored_BT, mask_BT),) = session.run(both)
    torch.testing.assert_close(generated_BT * mask_BT, scored_BT * mask_BT, atol=2e-5, rtol=0)
    assert (generated_BT * (1 - mask_BT) == 0).all()


def test_one_rank_and_two_sample_the_same() -> None:
    found = []
    for layout in ({"ranks": 1}, {"ranks": 2}, {"ranks": 2, "tensor_parallel_size": 2}):
        with tk.launch(model=tk.tiny_policy(), precision="float32", **layout) as session:
            per_rank = session.run(sampled, seed=5)
            found.append(all_completions(per_rank[:: layout.get("tensor_parallel_size", 1)]))
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 24


def test_completions_end_at_their_end_of_sequence_or_are_cut(one_rank: tk.Session) -> None:
    (rollouts,) = one_rank.run(sampled)
    eos = 2
    for row in range(rollouts.batch.num_sequences):
        ids = rollouts.batch.ids_BT[row][rollouts.batch.token_mask_BT[row] > 0].tolist()
        assert eos not in ids[:-1]
        assert (ids[-1] == eos) is bool(rollouts.stopped_B[row])
        assert rollouts.completions[row] == "".join(one_rank_decode(ids))
    (short,) = one_rank.run(sampled, max_new_tokens=1)
    assert not short.stopped_B.all()
    assert (short.batch.token_mask_BT.sum(-1) == 1).all()


def one_rank_decode(ids: list[int]) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tk.tiny_policy())
    return [tokenizer.decode([i]) for i in ids if i != 2]


def test_any_of_several_end_of_sequence_tokens_ends_a_completion(tmp_path: Path) -> None:
    shutil.copytree(tk.tiny_policy(), tmp_path / "m")
    generation = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    digits = list(range(4, 14))  # as chat models have <|im_end|> and <|endoftext|>: here every digit ends it too
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": [2, *digits]}))
    with tk.launch(model=tmp_path / "m") as session:
        (rollouts,) = session.run(sampled)
        assert rollouts.batch.token_mask_BT.sum(-1).eq(1).all()
        assert rollouts.stopped_B.all()
        assert set(rollouts.completions) == {""}


def test_seeds_differ_and_repeat(one_rank: tk.Session) -> None:
    first, again, other = (all_completions(one_rank.run(sampled, seed=s)) for s in (1, 1, 2))
    assert first == again != other


def test_inverting_the_distribution_samples_it() -> None:
    logits_V = torch.tensor([0.0, 1.0, -2.0, 3.0, float("-inf")])
    count = 20_000
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = _invert(logits_V.expand(count, -1), uniform)
    observed = tokens.bincount(minlength=5)[:4]
    expected = torch.softmax(logits_V[:4].double(), 0) * count
    assert tokens.max() < 4  # what has no probability is never drawn
    assert float(((observed - expected) ** 2 / expected).sum()) < 16.27  # chi-squared, 3 degrees of freedom, p = 1e-3
    edge = _invert(logits_V.expand(2, -1), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert edge.tolist() == [0, 3]


def test_top_k_and_top_p_restrict_the_choice() -> None:
    # float32, because bfloat16 logits tie, and a tie is two tokens to top-k and one to argmax.
    with tk.launch(model=tk.tiny_policy(), precision="float32") as session:
        greedy = all_completions(session.run(sampled, greedy=True))
        assert all_completions(session.run(sampled, top_k=1, seed=3)) == greedy
        assert all_completions(session.run(sampled, top_p=1e-6, seed=3)) == greedy
        assert all_completions(session.run(sampled, seed=3)) != greedy


def exact_logits(prompts: list[str]) -> list[torch.Tensor]:
    """Next-token logits [V] of each prompt, by the plain transformers model in float64."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tk.tiny_policy())
    model = AutoModelForCausalLM.from_pretrained(tk.tiny_policy(), dtype=torch.float64)
    with torch.no_grad():
        return [model(torch.tensor([tokenizer(prompt)["input_ids"]])).logits[0, -1] for prompt in prompts]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(2.0, None, 0.9), (0.5, None, 0.9), (3.0, 4, 1.0), (3.0, 5, 0.8), (1.5, None, 1.0)]
)
def test_tokens_and_their_logprobs_by_hand(
    temperature: float, top_k: int | None, top_p: float, tensor_parallel: tk.Session
) -> None:
    """Temperature first, then the k most likely, then the smallest set that holds top_p of what these hold.

    The choice is made in that set; the logprob is that of the whole distribution at the temperature.
    """
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "num_generations": 32, "max_new_tokens": 1}
    per_rank = tensor_parallel.run(sampled, **options, seed=3)[::2]
    tokens = [int(i) for r in per_rank for i in r.batch.ids_BT[r.batch.token_mask_BT > 0]]
    logprobs = [float(x) for r in per_rank for x in r.generation_logprobs_BT[r.batch.token_mask_BT > 0]]
    uniform = torch.rand(len(tokens), 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64).flatten()
    want_tokens, want_logprobs = [], []
    for prompt, logits_V in enumerate(exact_logits([prompt for prompt, _ in PROBLEMS])):
        whole_V = torch.softmax(logits_V / temperature, -1)
        kept_V = whole_V.clone()
        if top_k is not None:
            kept_V[whole_V < whole_V.topk(top_k).values[-1]] = 0
        kept_V /= kept_V.sum()
        order = kept_V.argsort(descending=True)
        before = kept_V[order].cumsum(-1) - kept_V[order]  # what the more likely ones hold
        kept_V[order[before >= top_p]] = 0
        cumulative_V = kept_V.cumsum(-1) / kept_V.sum()
        for place in range(32):
            want_tokens.append(int((cumulative_V <= uniform[32 * prompt + place]).sum()))
            want_logprobs.append(float(whole_V[want_tokens[-1]].log()))
    assert tokens == want_tokens
    assert len(set(tokens)) > 5
    assert logprobs == pytest.approx(want_logprobs, abs=1e-4)


def test_tensor_parallel_peers_follow_the_first_of_them(tensor_parallel: tk.Session) -> None:
    def own_seed(policy: Policy) -> Rollouts:
        return sampled(policy, seed=5 + policy.mesh["tp"].get_local_rank())  # peers that would choose differently

    apart, alike = tensor_parallel.run(own_seed), tensor_parallel.run(sampled, seed=5)
    for mine, theirs in zip(apart, alike, strict=True):
        assert torch.equal(mine.batch.ids_BT, theirs.batch.ids_BT)
        assert torch.equal(mine.generation_logprobs_BT, theirs.generation_logprobs_BT)
    assert all_completions(alike[:1]) == all_completions(alike[1:2]) != all_completions(alike[2:3])
    assert all_completions(tensor_parallel.run(sampled, seed=6)) != all_completions(alike)


def test_logits_out_of_range_are_a_clear_error_not_nan_rewards() -> None:
    def break_head(policy: Policy) -> None:
        policy.model.lm_head.weight.data.mul_(1e8)

    for ranks in (1, 2):
        with tk.launch(model=tk.tiny_policy(), output_dtype="float16", ranks=ranks) as session:
            session.run(break_head)
            with pytest.raises(FloatingPointError, match="sampling met .* first in FSDP unit lm_head: .*ends at 65504"):
                session.grpo_step()
            assert session.history.empty
            session.output_dtype = "bfloat16"
            session.rollout(2)
