"""What a divergence can vary besides dtypes, its distance to the truth, its gradients by group, and text as input."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import toolkit as tk
from toolkit import fsdp
from toolkit.cause import _why_other
from toolkit.divergence_figures import gradients_figure
from toolkit.errors import SpecError
from toolkit.gradient_effects import _error, _group
from toolkit.gradients import clip_gradients, set_optimizer
from toolkit.policy import LIVE_FIELDS, Policy
from toolkit.prompts import make_batch
from toolkit.replay import score_tokens
from toolkit.rollouts import sample
from toolkit.settings import BUILT_FIELDS, OTHER_FIELDS, Setting
from toolkit.spec import GRPOConfig, PolicySpec
from toolkit.step import TrainingBatch, forward_backward, score

FEW: dict[str, Any] = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_new_tokens": 3}
ROWS = [[1, 5, 14, 6, 40, 7, 8, 2], [1, 7, 14, 13, 5, 40, 11, 2], [1, 20, 30, 2]]


# ---- the truth


def qwen3_logprobs(weights: dict[str, np.ndarray[Any, Any]], ids: list[int]) -> np.ndarray[Any, Any]:
    """Logprobs of the tiny policy in float64, written out from the architecture's definition: the oracle."""
    heads, kv_heads, size, eps = 4, 2, 32, 1e-6

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight

    def turned(x: Any) -> Any:  # rotary positions, halves rotated
        frequencies = (1.0 / 10000.0 ** (np.arange(0, size, 2, dtype=np.float32) / np.float32(size))).astype(np.float32)
        angles = np.arange(len(ids))[:, None] * frequencies.astype(np.float64)
        cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))
        return x * cos + np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin

    x = weights["model.embed_tokens.weight"][ids]
    for layer in range(4):
        w = {k.removeprefix(f"model.layers.{layer}."): v for k, v in weights.items() if f"layers.{layer}." in k}
        h = norm(x, w["input_layernorm.weight"])
        q = turned(norm((h @ w["self_attn.q_proj.weight"].T).reshape(-1, heads, size), w["self_attn.q_norm.weight"]))
        k = turned(norm((h @ w["self_attn.k_proj.weight"].T).reshape(-1, kv_heads, size), w["self_attn.k_norm.weight"]))
        v = (h @ w["self_attn.v_proj.weight"].T).reshape(-1, kv_heads, size)
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / math.sqrt(size)
        scores[:, np.triu(np.ones((len(ids), len(ids)), dtype=bool), 1)] = -np.inf
        attention = np.exp(scores - scores.max(-1, keepdims=True))
        attention /= attention.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", attention, v).reshape(len(ids), -1) @ w["self_attn.o_proj.weight"].T
        h = norm(x, w["post_attention_layernorm.weight"])
        gate = h @ w["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
    logits = norm(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T
    logprobs = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    return logprobs[np.arange(len(ids) - 1), ids[1:]]


@pytest.fixture(scope="module")
def fresh() -> Any:
    """The tiny policy as shipped; tests leave its weights as they are."""
    with tk.launch(model=tk.tiny_policy(), num_prompts_per_step=4, num_generations_per_prompt=4, max_new_tokens=5) as live:
        yield live


def test_the_distance_to_float64_is_that_to_an_oracle_written_out_by_hand(fresh: tk.Session) -> None:
    report = fresh.divergence("float32", "bfloat16", token_ids=ROWS)
    weights = {k: v.double().numpy() for k, v in load_file(tk.tiny_policy() / "model.safetensors").items()}
    truth = np.concatenate([qwen3_logprobs(weights, row) for row in ROWS])
    for side in "ab":
        want = np.abs(report.tokens[f"logprob_{side}"].to_numpy() - truth).mean()
        assert report.truth[f"{side}_from_float64_nats"] == pytest.approx(want, rel=1e-9)
        assert want > 1e-3
    assert 1e-8 < report.truth["float32_from_float64_nats"] < 1e-5
    assert f"a is {report.truth['a_from_float64_nats']:.1e} nats away" in report.headline


def test_identical_to_each_other_and_both_far_from_the_truth(fresh: tk.Session) -> None:
    """The reading issue and reviewers ask for: agreement is not accuracy."""
    report = fresh.divergence("float32", "float32", token_ids=ROWS)
    assert report.metrics["fraction_bit_identical"] == 1.0
    assert report.truth["a_from_float64_nats"] == report.truth["b_from_float64_nats"] > 1e-3
    assert "nats away" in report.headline


def test_float32_compute_is_float32_noise_from_the_truth_at_each_sides_temperature() -> None:
    with tk.launch(model=tk.tiny_policy(), precision="float32") as session:
        report = session.divergence({"temperature": 0.7}, {"temperature": 1.0}, token_ids=ROWS)
        assert report.metrics["mean_abs_nats"] > 1e-2
        assert all(value < 1e-5 for value in report.truth.values())
        assert "another temperature is another distribution" in report.cause


def test_the_truth_is_left_out_on_request_and_the_same_on_two_ranks(two_ranks: tk.Session) -> None:
    assert two_ranks.divergence(token_ids=ROWS, truth=False).truth == {}
    found = two_ranks.divergence(token_ids=ROWS, truth=True).truth
    assert set(found) >= {"a_from_float64_nats", "b_from_float32_nats"}
    assert found["float32_from_float64_nats"] < 1e-5
    with pytest.raises(SpecError, match="truth='yes' must be True or False"):
        two_ranks.divergence(token_ids=ROWS, truth="yes")  # type: ignore[arg-type]


# ---- routes: sampler and trainer, batch size, attention kernel


def test_the_replayed_sampler_is_the_sampler_bit_for_bit(fresh: tk.Session) -> None:
    def both(policy: Policy) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        problems = [("1+2=", "3"), ("14+77=", "91"), ("5+60=", "65"), ("9+9=", "18")]
        rollouts = sample(policy, problems, num_generations=2, max_new_tokens=5, temperature=0.9)
        side = Setting({}, 0.9, logprobs="sampler")
        mask_BT = rollouts.batch.token_mask_BT[:, 1:] > 0
        found = score_tokens(policy, rollouts.batch, side)
        return found.logprobs_BT[mask_BT], rollouts.generation_logprobs_BT[:, 1:][mask_BT], found.rank_BT[mask_BT]

    ((replayed, sampled, ranks),) = fresh.run(both)
    assert torch.equal(replayed, sampled)
    assert len(replayed) > 10
    assert int(ranks.min()) == 1


def test_sampler_against_trainer_is_kernel_noise_in_float32_and_finds_a_planted_cache_bug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tk.launch(model=tk.tiny_policy(), precision="float32", max_new_tokens=5) as session:
        report = session.divergence({"logprobs": "sampler"}, {"logprobs": "trainer"})
        assert report.metrics["max_abs_nats"] < 1e-4
        assert report.gradients is None
        assert math.isnan(report.metrics["gradient_relative_error"])
        assert "The sampler makes no gradients" in report.cause
        forward = Policy.forward

        def off_by_one(self: Policy, ids: Any, mask: Any, positions: Any, **options: Any) -> Any:
            cached = options.get("past_key_values") is not None
            return forward(self, ids, mask, positions + 1 if cached else positions, **options)

        monkeypatch.setattr(Policy, "forward", off_by_one)
        report = session.divergence({"logprobs": "sampler"}, {"logprobs": "trainer"}, token_ids=ROWS)
        assert report.metrics["max_abs_nats"] > 1e-2
        assert "through the KV cache" in report.cause


def test_two_ranks_decode_shares_of_different_length(two_ranks: tk.Session) -> None:
    report = two_ranks.divergence({"logprobs": "sampler"}, {"logprobs": "trainer"}, token_ids=ROWS)
    assert len(report.tokens) == sum(len(row) - 1 for row in ROWS)
    assert report.metrics["max_abs_nats"] < 0.5


def test_a_divergence_that_names_no_kernel_runs_the_sessions_own(fresh: tk.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()
    forward = Policy.forward

    def looking(self: Policy, *args: Any, **options: Any) -> Any:
        seen.add(self.model.config._attn_implementation)
        return forward(self, *args, **options)

    monkeypatch.setattr(Policy, "forward", looking)
    fresh.logprobs(ROWS)
    own = set(seen)
    fresh.divergence(token_ids=ROWS)
    fresh.divergence(token_ids=ROWS, attn_implementation="sdpa")
    assert seen == own


def test_batch_size_is_the_number_of_sequences_in_a_forward(fresh: tk.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    forward = Policy.forward

    def counting(self: Policy, ids_BT: torch.Tensor, *args: Any, **options: Any) -> Any:
        sizes.append(len(ids_BT))
        return forward(self, ids_BT, *args, **options)

    monkeypatch.setattr(Policy, "forward", counting)
    report = fresh.divergence({"batch_size": 1}, {"batch_size": 2}, token_ids=ROWS)
    assert set(sizes) == {1, 2}
    assert (report.a, report.b) == ("batch_size=1", "batch_size=2")
    assert report.metrics["max_abs_nats"] < 0.5
    assert fresh.divergence({"batch_size": 1}, {"batch_size": None}, token_ids=ROWS).b == "batch_size=all"


def test_another_attention_kernel_is_switched_live_and_put_back(fresh: tk.Session) -> None:
    def kernel(policy: Policy) -> str:
        return str(policy.model.config._attn_implementation)

    (before,) = fresh.run(kernel)
    assert before != "eager"
    report = fresh.divergence(
        {"attn_implementation": "eager"}, {"attn_implementation": "sdpa"}, output_dtype="bfloat16", token_ids=ROWS
    )
    assert 1e-4 < report.metrics["mean_abs_nats"] < 0.1
    assert "another attention kernel" in report.cause
    assert fresh.run(kernel) == [before]
    with pytest.raises(SpecError, match="attn_implementation='eager' with output_dtype='float32'"):
        fresh.divergence({"attn_implementation": "eager"}, {"attn_implementation": "sdpa"}, token_ids=ROWS)
    assert fresh.run(kernel) == [before]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("field", ["precision", "lm_head_precision"])
def test_sides_of_another_build_are_what_a_session_of_that_build_gives(ranks: int, field: str, tmp_path: Path) -> None:
    """Same tokens, same weights (trained ones, not the folder's), gradients and all; the session stays as it was."""
    with tk.launch(model=tk.tiny_policy(), ranks=ranks, learning_rate=1e-3, **FEW) as session:
        session.grpo_step()
        report = session.divergence({field: None if "head" in field else "bfloat16"}, {field: "float32"}, token_ids=ROWS)
        own = session.divergence(token_ids=ROWS)
        session.export(tmp_path / "trained", dtype="float32")
        assert set(session.units()["param_dtype"]) == {"bfloat16"}
    with tk.launch(model=tmp_path / "trained", ranks=ranks, **{field: "float32"}, **FEW) as session:
        other = session.divergence(token_ids=ROWS)
    columns = ["sequence", "position", "token", "text"]
    pd.testing.assert_frame_equal(report.tokens[columns], other.tokens[columns])
    np.testing.assert_array_equal(report.tokens["logprob_a"], own.tokens["logprob_a"])
    np.testing.assert_array_equal(report.tokens["logprob_b"], other.tokens["logprob_a"])
    assert report.metrics["mean_abs_nats"] > 1e-3
    assert 1e-3 < report.metrics["gradient_relative_error"] < 0.5
    assert report.truth["b_from_float64_nats"] < report.truth["a_from_float64_nats"]
    assert (report.b, report.units) == (f"{field}=float32", {})
    assert ("16-bit compute costs" if field == "precision" else "a float32 head keeps float32 logits") in report.cause


def test_both_sides_may_share_another_build(fresh: tk.Session) -> None:
    """Then single units are switched in it."""
    report = fresh.divergence("float32", "bfloat16", token_ids=ROWS, precision="float32")
    assert "compute is float32, so every unit really rounds what it emits" in report.cause
    assert sum(value > 0 for value in report.units.values()) > 3
    assert report.truth["a_from_float64_nats"] < 1e-5


def test_a_float32_head_of_a_tied_model_is_refused_as_at_launch(tied_model: Path) -> None:
    with tk.launch(model=tied_model, **FEW) as session:
        with pytest.raises(SpecError, match="tied to its input embedding"):
            session.divergence({}, {"lm_head_precision": "float32"}, token_ids=ROWS)
        session.grpo_step()


BAD: list[tuple[Any, Any, dict[str, Any], str]] = [
    ({}, {}, {"gradients": 1}, "gradients=1 must be True or False"),
    ({"batch_size": 0}, {}, {}, "batch_size=0 must be a whole number"),
    ({"logprobs": "vllm"}, {}, {}, "logprobs='vllm' is not allowed; choose one of 'trainer', 'sampler'"),
    ({"attn_implementation": "flash_attention_2"}, {}, {}, "has no CPU kernel"),
    ({"lm_head_precision": "bfloat16"}, {}, {}, "only 'float32' makes a difference"),
    ({"reduce_dtype": "bfloat16"}, {}, {}, "'reduce_dtype' is built into a session"),
    ("float32", "bfloat16", {"text": ""}, "none of them empty"),
    ("float32", "bfloat16", {"text": []}, "none of them empty"),
    ("float32", "bfloat16", {"text": [3]}, "none of them empty"),
    ("float32", "bfloat16", {"text": "12+7=é"}, "does not know all of"),
    ("float32", "bfloat16", {"text": "1+1", "token_ids": ROWS}, "text or token_ids, not both"),
]


@pytest.mark.parametrize(("a", "b", "options", "reason"), BAD)
def test_bad_requests_are_named(a: Any, b: Any, options: dict[str, Any], reason: str, fresh: tk.Session) -> None:
    with pytest.raises(SpecError, match=reason):
        fresh.divergence(a, b, **options)
    assert set(fresh.units()["output_dtype"]) == {"float32"}


@pytest.mark.parametrize(("size", "held"), [(1, "1 sequence"), (3, "3 sequences"), (4, "3 sequences")])
def test_a_batch_size_that_splits_nothing_is_said_to(size: int, held: str, fresh: tk.Session) -> None:
    tokens = {"text": "1+1=2"} if held == "1 sequence" else {"token_ids": ROWS[:3]}
    report = fresh.divergence({"batch_size": size}, {}, truth=False, **tokens)
    assert report.metrics["fraction_bit_identical"] == 1.0
    assert "both sides are the same setting" in report.cause
    assert f"(batch_size={size} splits nothing here: a rank has {held}.)" in report.cause


def test_a_text_of_one_token_is_named(fresh: tk.Session) -> None:
    def plain(policy: Policy) -> list[int]:
        return list(policy.tokenizer("1")["input_ids"])

    (ids,) = fresh.run(plain)
    if len(ids) > 1:  # the tokenizer puts a first token of its own before it
        assert len(fresh.divergence(text="1").tokens) == len(ids) - 1
    else:
        with pytest.raises(SpecError, match="text '1' is a single token"):
            fresh.divergence(text="1")


def test_text_is_scored_as_its_tokens(fresh: tk.Session) -> None:
    def ids(policy: Policy, text: str) -> list[int]:
        return list(policy.tokenizer(text)["input_ids"])

    texts = ["12+7=19", "40+2=42"]
    rows = [fresh.run(ids, text)[0] for text in texts]
    by_text, by_ids = fresh.divergence(text=texts), fresh.divergence(token_ids=rows)
    assert by_text.metrics == by_ids.metrics
    assert "".join(by_text.tokens.query("sequence == 1")["text"]).endswith("42")


# ---- gradients by group, and one optimizer step


def test_groups_of_parameters() -> None:
    assert _group("model.layers.3.self_attn.q_proj.weight") == "model.layers.3.self_attn"
    assert _group("model.layers.3.input_layernorm.weight") == "model.layers.3.input_layernorm"
    assert _group("lm_head.weight") == "lm_head"
    assert _group("transformer.h.0.attn.c_attn.bias") == "transformer.h.0.attn"


def test_errors_by_hand() -> None:
    """a = (3, 4), b = (4, 3): |b - a| / |a| = sqrt(2) / 5, cosine 24 / 25."""
    assert _error(torch.tensor([25.0, 25.0, 24.0, 2.0])) == pytest.approx((math.sqrt(2) / 5, 24 / 25))
    assert _error(torch.zeros(4)) == (0.0, 1.0)
    assert _error(torch.tensor([0.0, 1.0, 0.0, 1.0])) == (math.inf, 1.0)


def real_change(policy: Policy, config: GRPOConfig, dtype: str) -> dict[str, np.ndarray[Any, Any]]:
    """What the real optimizer adds to each parameter for the gradient of the mean logprob of ROWS; put back afterwards."""
    held = {name: p.full_tensor().clone() for name, p in policy.model.named_parameters()}  # type: ignore[attr-defined]
    state = {p: {k: v.clone() for k, v in s.items()} for p, s in policy.optimizer.state.items()}
    with policy.temporarily(output_dtype=dtype):
        batch = make_batch(ROWS, [1] * 3, 0)
        previous_BT, tokens = score(policy, batch, 1.0), float(sum(len(row) - 1 for row in ROWS))
        forward_backward(policy, config, TrainingBatch(batch, torch.ones(3), previous_BT, tokens, 3.0))
    clip_gradients(policy, config.max_grad_norm)
    set_optimizer(policy, dataclasses.replace(config, warmup_steps=0), 0)
    policy.optimizer.step()
    policy.optimizer.zero_grad(set_to_none=True)
    changes = {}
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            changes[name] = (p.full_tensor() - held[name]).double().numpy()  # type: ignore[attr-defined]
            p.to_local().copy_(held[name])  # type: ignore[attr-defined]
        policy.optimizer.state.clear()
        for key, values in state.items():
            policy.optimizer.state[key] = values
    fsdp.reshard(policy.model)
    return changes


@pytest.mark.parametrize("steps", [0, 2])
def test_the_effect_on_a_step_is_that_of_the_real_optimizer(steps: int) -> None:
    """With and without moments, and with a clip bound that binds."""
    fields = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.05, "max_new_tokens": 4}
    with tk.launch(model=tk.tiny_policy(), num_prompts_per_step=4, num_generations_per_prompt=4, **fields) as session:
        for _ in range(steps):
            session.grpo_step()
        a, b = (session.run(real_change, session.config, dtype)[0] for dtype in ("float32", "bfloat16"))
        report = session.divergence("float32", "bfloat16", token_ids=ROWS)
    frame = report.gradients
    assert frame is not None
    assert int(frame["num_parameters"].sum()) == sum(x.size for x in a.values())
    for row in frame.itertuples():
        names = [name for name in a if _group(name) == row.group]
        x, y = (np.concatenate([side[name].ravel() for name in names]) for side in (a, b))
        error, cosine = np.linalg.norm(y - x) / np.linalg.norm(x), x @ y / np.linalg.norm(x) / np.linalg.norm(y)
        assert row.update_relative_error == pytest.approx(error, rel=1e-3, abs=1e-6)
        assert row.update_cosine == pytest.approx(cosine, abs=1e-6)
    x, y = (np.concatenate([v.ravel() for v in side.values()]) for side in (a, b))
    assert report.metrics["update_relative_error"] == pytest.approx(np.linalg.norm(y - x) / np.linalg.norm(x), rel=1e-3)
    assert report.metrics["update_relative_error"] > 1e-4


def test_without_gradients_the_rest_is_the_same(fresh: tk.Session) -> None:
    """And no backward runs, which would be most of the time on a larger model."""
    full, less = fresh.divergence(token_ids=ROWS), fresh.divergence(token_ids=ROWS, gradients=False)
    pd.testing.assert_frame_equal(full.tokens, less.tokens)
    assert less.gradients is None
    assert math.isnan(less.metrics["gradient_relative_error"])
    assert less.cause == full.cause
    with pytest.raises(ValueError, match="no gradients"):
        gradients_figure(less)


def test_two_ranks_count_each_element_once(two_ranks: tk.Session) -> None:
    frame = two_ranks.divergence(token_ids=ROWS).gradients
    assert frame is not None

    def sizes(policy: Policy) -> int:
        return sum(p.numel() for p in policy.model.parameters())

    assert int(frame["num_parameters"].sum()) == two_ranks.run(sizes)[0]


# ---- causes, planted


def test_a_root_that_rounds_a_float32_heads_logits_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: without the toolkit's own cure the root keeps its 16 bits above a float32 head."""

    def without_cure(unit: str, spec: PolicySpec, head: str | None) -> str:
        return "float32" if unit == head else spec.output_dtype

    monkeypatch.setattr(fsdp, "output_dtype_of", without_cure)
    with tk.launch(model=tk.tiny_policy(), lm_head_precision="float32") as session:
        report = session.divergence("float32", "bfloat16", token_ids=ROWS)
        assert report.units[fsdp.ROOT] == max(report.units.values()) > 0
        assert "the logits themselves are rounded to the output dtype" in report.cause


def test_several_differences_are_not_blamed_on_one(fresh: tk.Session) -> None:
    report = fresh.divergence({"temperature": 0.9}, {"batch_size": 1}, token_ids=ROWS)
    assert "one or more of batch_size" in report.cause
    assert "temperature (another temperature" in report.cause


def test_every_setting_has_a_reason(fresh: tk.Session) -> None:
    def reasons(policy: Policy) -> list[str]:
        return [_why_other(policy, {name}) for name in (*LIVE_FIELDS, *OTHER_FIELDS, *BUILT_FIELDS)]

    (found,) = fresh.run(reasons)
    assert all(text.startswith("Cause: ") for text in found)
