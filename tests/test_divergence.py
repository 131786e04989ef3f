"""Divergence: worked values, a zero that says why it is zero, and planted causes that must be found."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import toolkit as tk
from toolkit import fsdp
from toolkit.divergence import _metrics, _per_token, _Score, _tokens
from toolkit.divergence_report import DivergenceReport
from toolkit.errors import SpecError
from toolkit.policy import Policy
from toolkit.prompts import make_batch
from toolkit.replay import Scored
from toolkit.spec import GRPOConfig
from toolkit.step import TrainingBatch, forward_backward, score

ROWS = [[1, 5, 14, 6, 40, 7, 8, 2], [1, 7, 14, 13, 5, 40, 11, 2], [1, 20, 30, 2]]


def test_metrics_by_hand() -> None:
    g = torch.tensor([math.log(0.5), math.log(0.9), math.log(0.1)], dtype=torch.float64)
    p = torch.tensor([math.log(0.25), math.log(0.9), math.log(0.2)], dtype=torch.float64)
    found = _metrics(g, p, GRPOConfig())
    two = math.log(2)

    def k3(of: float, mixture: float) -> float:
        return of / mixture - 1 - math.log(of / mixture)

    mixtures = ((0.5, 0.25, 0.375), (0.9, 0.9, 0.9), (0.1, 0.2, 0.15))
    want = {
        "mean_abs_nats": 2 * two / 3,
        "max_abs_nats": two,
        "fraction_bit_identical": 1 / 3,
        "token_mult_prob_error": (2 + 1 + 2) / 3,
        "k1": 0.0,
        "k3": ((0.5 - 1 + two) + 0 + (2 - 1 - two)) / 3,
        "gen_kl_error": ((0.5 - 1 + two) + 0 + (2 - 1 - two)) / 3,
        "policy_kl_error": ((2 - 1 - two) + 0 + (0.5 - 1 + two)) / 3,
        "js_divergence_error": sum((k3(a, m) + k3(b, m)) / 2 for a, b, m in mixtures) / 3,
        "sampling_importance_ratio": (0.5 + 1 + 2) / 3,
        "pearson": np.corrcoef([0.5, 0.9, 0.1], [0.25, 0.9, 0.2])[0, 1],
        "fraction_outside_clip": 2 / 3,
    }
    assert {k: found[k] for k in want} == pytest.approx(want, abs=1e-12)


def test_the_table_is_what_the_two_settings_give_on_the_same_tokens(one_rank: tk.Session) -> None:
    report = one_rank.divergence("float32", "bfloat16", token_ids=ROWS)
    by_dtype = {}
    for dtype in ("float32", "bfloat16"):
        one_rank.output_dtype = dtype
        by_dtype[dtype] = one_rank.logprobs(ROWS)
    one_rank.output_dtype = "float32"
    table = report.tokens
    assert list(table.columns) == [
        "sequence", "position", "token", "text", "logprob_a", "logprob_b", "delta_nats", "prob_a", "prob_b", "ratio",
        "rank_a", "rank_b",
    ]  # fmt: skip
    assert len(table) == sum(len(row) - 1 for row in ROWS)
    for row in table.itertuples():
        assert row.token == ROWS[row.sequence][row.position]
        # The padded widths differ between the two calls, and with them the rounding of bfloat16 GEMMs: noise, not an error.
        assert row.logprob_a == pytest.approx(by_dtype["float32"][row.sequence, row.position - 1], abs=0.05)
    np.testing.assert_allclose(table["delta_nats"], table["logprob_b"] - table["logprob_a"])
    np.testing.assert_allclose(table["ratio"], np.exp(table["delta_nats"]))
    np.testing.assert_allclose(table["prob_a"], np.exp(table["logprob_a"]))
    assert report.metrics["mean_abs_nats"] == pytest.approx(table["delta_nats"].abs().mean())
    assert report.metrics["max_abs_nats"] == table["delta_nats"].abs().max()


def test_it_does_not_depend_on_the_sessions_own_setting(one_rank: tk.Session) -> None:
    reports = []
    for dtype in ("float32", "float16"):
        one_rank.output_dtype = dtype
        reports.append(one_rank.divergence("float32", "bfloat16", token_ids=ROWS))
    one_rank.output_dtype = "float32"
    pd.testing.assert_frame_equal(reports[0].tokens, reports[1].tokens)
    assert reports[0].metrics == reports[1].metrics


def test_two_ranks_gather_every_token_once() -> None:
    with tk.launch(model=tk.tiny_policy(), precision="float32") as session:
        alone = session.divergence("float32", "bfloat16", token_ids=ROWS)
    with tk.launch(model=tk.tiny_policy(), precision="float32", ranks=2) as session:
        together = session.divergence("float32", "bfloat16", token_ids=ROWS)  # three rows over two ranks: one is padding
    columns = ["sequence", "position", "token", "text"]
    pd.testing.assert_frame_equal(alone.tokens[columns], together.tokens[columns])
    np.testing.assert_allclose(alone.tokens["logprob_a"], together.tokens["logprob_a"], atol=2e-5)
    assert together.metrics["gradient_cosine"] == pytest.approx(alone.metrics["gradient_cosine"], abs=1e-4)
    assert together.metrics["gradient_relative_error"] == pytest.approx(alone.metrics["gradient_relative_error"], rel=0.05)


def whole_gradient(policy: Policy, config: GRPOConfig, dtype: str) -> np.ndarray[Any, Any]:
    """Of the mean logprob of ROWS under an output dtype, in float64, gathered over all ranks."""
    padded = ROWS + ROWS[:1] * (-len(ROWS) % policy.data_size)
    share = len(padded) // policy.data_size
    mine = padded[policy.data_rank * share :][:share]
    with policy.temporarily(output_dtype=dtype):
        batch = make_batch(mine, [1] * share, 0)
        if policy.data_rank == 1:
            batch.token_mask_BT[1] = 0  # the last of the padded rows
        previous_BT = score(policy, batch, 1.0)
        tokens = float(sum(len(row) - 1 for row in ROWS))
        forward_backward(policy, config, TrainingBatch(batch, torch.ones(share), previous_BT, tokens, float(len(ROWS))))
    grads = [p.grad.full_tensor().double().flatten() for p in policy.model.parameters()]  # type: ignore[union-attr]
    policy.model.zero_grad(set_to_none=True)
    return torch.cat(grads).numpy()


@pytest.mark.parametrize("session", ["one_rank", "two_ranks", "tensor_parallel"])
def test_gradients_are_compared_element_by_element(session: str, request: pytest.FixtureRequest) -> None:
    """Every element once, also of those parameters that tensor-parallel peers hold in copies."""
    live: tk.Session = request.getfixturevalue(session)
    found = live.divergence("float32", "bfloat16", token_ids=ROWS).metrics
    a, b = (live.run(whole_gradient, live.config, dtype)[0] for dtype in ("float32", "bfloat16"))
    error = np.linalg.norm(b - a) / np.linalg.norm(a)
    assert found["gradient_relative_error"] == pytest.approx(error, rel=1e-6)
    assert found["gradient_cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), abs=1e-12)
    assert error > 1e-6
    assert np.linalg.norm(a) != pytest.approx(np.linalg.norm(b), rel=1e-6)


def test_tensor_parallel_peers_count_once(tensor_parallel: tk.Session) -> None:
    """Against one rank. The fourth rank's share is padding on two ranks, which neither table nor means may hold."""
    with tk.launch(model=tk.tiny_policy(), precision="float32") as session:
        alone = session.divergence("float32", "bfloat16", token_ids=ROWS)
    together = tensor_parallel.divergence("float32", "bfloat16", token_ids=ROWS)
    columns = ["sequence", "position", "token", "text"]
    pd.testing.assert_frame_equal(alone.tokens[columns], together.tokens[columns])
    np.testing.assert_allclose(alone.tokens["logprob_a"], together.tokens["logprob_a"], atol=2e-5)
    # Sums in another order move what is rounded to bfloat16 now and then by a last bit: means agree, tokens need not.
    assert together.metrics["mean_abs_nats"] == pytest.approx(alone.metrics["mean_abs_nats"], rel=0.1)
    assert list(together.units) == list(alone.units)
    assert together.units == pytest.approx(alone.units, rel=0.2)


def test_where_the_most_likely_token_differs_is_counted_by_hand(two_ranks: tk.Session) -> None:
    """Two ranks of two rows, the last of which is padding; flips are planted in counted and in other places."""

    def flips(policy: Policy, config: GRPOConfig) -> tuple[int, float]:
        training = _tokens(policy, config, None, ROWS, None, 0)
        zeros_BT = torch.zeros_like(training.previous_BT)
        a = _Score(Scored(zeros_BT, zeros_BT.long(), zeros_BT.long()), "", [])
        flipped_BT = a.tokens.argmax_BT.clone()
        if policy.data_rank == 0:
            flipped_BT[0, 2], flipped_BT[1, 0], flipped_BT[1, 6] = 5, 7, 9
        else:
            flipped_BT[0, 1], flipped_BT[0, 6] = 3, 4  # the row of three scored tokens: the second is after its end
            flipped_BT[1, :] = 8
        b = _Score(Scored(zeros_BT, flipped_BT, zeros_BT.long()), "", [])
        frame, metrics = _per_token(policy, config, training, a, b)
        return len(frame), metrics["argmax_flips"]

    scored = sum(len(row) - 1 for row in ROWS)
    assert two_ranks.run(flips, two_ranks.config) == [(scored, 4 / scored)] * 2


def test_most_likely_tokens_are_those_of_the_two_settings() -> None:
    row = ROWS[0]

    def most_likely(policy: Policy, dtype: str) -> list[int]:
        ids_BT = torch.tensor([row])
        with policy.temporarily(output_dtype=dtype), torch.no_grad(), policy.autocast():
            logits_BTV = policy.forward(ids_BT, torch.ones_like(ids_BT), torch.arange(len(row))[None]).logits
        fsdp.reshard(policy.model)
        return logits_BTV[0].argmax(-1).tolist()

    def shrink_embedding(policy: Policy) -> None:
        with torch.no_grad():
            policy.model.model.embed_tokens.weight.mul_(2.0**-20)  # where float16 has few digits left

    with tk.launch(model=tk.tiny_policy()) as session:
        session.run(shrink_embedding)
        (a,), (b,) = (session.run(most_likely, dtype) for dtype in ("float32", "float16"))
        flipped = [x != y for x, y in zip(a, b, strict=True)]
        assert 0 < sum(flipped[:-1]) < len(row) - 1
        for length in range(2, len(row) + 1):  # prefix by prefix, so that each position shows where it counts
            report = session.divergence("float32", "float16", token_ids=[row[:length]])
            assert report.metrics["argmax_flips"] == sum(flipped[: length - 1]) / (length - 1)


def test_effects_of_single_units_are_means_over_the_tokens_of_all_ranks(two_ranks: tk.Session) -> None:
    """The last layer alone makes all of the divergence, so its effect is the table's own mean, without the padding row."""
    report = two_ranks.divergence("float32", "bfloat16", token_ids=ROWS)
    assert len(report.tokens) == sum(len(row) - 1 for row in ROWS)
    assert report.units["model.layers.3"] == pytest.approx(report.tokens["delta_nats"].abs().mean(), rel=1e-6)
    assert report.metrics["mean_abs_nats"] > 0
    assert all(value == 0.0 for name, value in report.units.items() if name != "model.layers.3")
    single = two_ranks.divergence("float32", "bfloat16", token_ids=ROWS[:1])  # one rank has nothing but padding
    assert len(single.tokens) == len(ROWS[0]) - 1
    assert single.units["model.layers.3"] == pytest.approx(single.tokens["delta_nats"].abs().mean(), rel=1e-6)
    assert 0 < single.metrics["gradient_relative_error"] < 0.1


def test_the_final_norm_in_the_root_unit_is_named(one_rank: tk.Session) -> None:
    report = one_rank.divergence("float32", "bfloat16")
    assert 1e-5 < report.metrics["mean_abs_nats"] < 2e-2
    assert "the final norm belongs to the root unit" in report.cause
    assert report.units["model.layers.3"] == pytest.approx(report.metrics["mean_abs_nats"], rel=1e-6)
    assert all(value == 0.0 for name, value in report.units.items() if name != "model.layers.3")
    assert 0 < report.metrics["gradient_relative_error"] < 0.1
    assert 0.99 < report.metrics["gradient_cosine"] < 1


@pytest.mark.usefixtures("final_norm_unit")
def test_with_the_final_norm_in_a_unit_of_its_own_it_is_exactly_zero_and_says_why() -> None:
    """Fact 3: then a float32 output only widens bfloat16 numbers on the way from unit to unit."""
    with tk.launch(model=tk.tiny_policy()) as session:
        report = session.divergence("float32", "bfloat16")
        assert report.metrics["fraction_bit_identical"] == 1.0
        assert report.metrics["mean_abs_nats"] == report.metrics["max_abs_nats"] == 0.0
        assert report.metrics["token_mult_prob_error"] == 1.0
        assert report.metrics["gradient_relative_error"] == 0.0
        assert report.metrics["gradient_cosine"] == pytest.approx(1.0)
        assert report.cause.startswith("Zero because every unit casts its inputs back to bfloat16")
        assert "bit-identical" in report.headline
        # And under the settings named by fact 3 it is not.
        for common in (
            {"temperature": 0.7, "temperature_order": "before_upcast"},
            {"cast_forward_inputs": False},
        ):
            assert session.divergence("float32", "bfloat16", **common).metrics["mean_abs_nats"] > 1e-4, common
        assert session.divergence("float32", "float16").metrics["mean_abs_nats"] > 1e-4
        half = {"temperature": 0.5, "temperature_order": "before_upcast"}
        at_half = session.divergence("float32", "bfloat16", **half)
        assert at_half.metrics["mean_abs_nats"] == 0.0
        assert "dividing by 0.5, a power of two, is exact" in at_half.cause


def test_a_zero_that_is_a_coincidence_says_so(tied_model: Path, tmp_path: Path) -> None:
    """Norm weights of exactly 1 hide the final norm's rounding; that is no guarantee, and not called one."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=False, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tk.tiny_policy()).save_pretrained(tmp_path)

    def scale_final_norm(policy: Policy) -> None:
        with torch.no_grad():
            policy.model.model.norm.weight.mul_(1.1)

    with tk.launch(model=tmp_path) as session:
        report = session.divergence(token_ids=ROWS)
        assert report.metrics["mean_abs_nats"] == 0.0
        assert report.cause.startswith("Zero on these tokens, but not by construction: the root unit owns model.norm.weight")
        session.run(scale_final_norm)
        report = session.divergence(token_ids=ROWS)
        assert report.metrics["mean_abs_nats"] > 0.0
        assert "the final norm belongs to the root unit" in report.cause


def overflow(policy: Policy) -> None:
    with torch.no_grad():
        policy.model.model.layers[3].mlp.down_proj.weight.mul_(3e5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_leaves_float16s_range_is_an_error_that_names_the_unit_and_the_rest_is_kept(ranks: int) -> None:
    fields = {"num_prompts_per_step": 4, "num_generations_per_prompt": 2, "max_new_tokens": 3}
    with tk.launch(model=tk.tiny_policy(), ranks=ranks, **fields) as session:
        session.run(overflow)
        with pytest.raises(FloatingPointError, match="output_dtype='float16', first in FSDP unit model.layers.3"):
            session.divergence("float32", "float16")
        report = session.tradeoffs()
        assert list(report.memory) == ["float32", "bfloat16"]
        assert list(report.failures) == ["float16"]
        assert "float16 outputs cannot be used: " in report.verdict
        assert session.output_dtype == "float32"
        session.grpo_step()


def test_the_same_setting_twice_is_zero_and_says_so(one_rank: tk.Session) -> None:
    report = one_rank.divergence("bfloat16", "bf16")
    assert report.metrics["fraction_bit_identical"] == 1.0
    assert "same setting" in report.cause


PLANTED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"temperature": 0.7, "temperature_order": "before_upcast"}, "temperature_order='after_upcast' cures it"),
    ({}, {"cast_forward_inputs": False}, "the residual stream keeps the output dtype"),
    ({"precision": "float32"}, {}, "compute is float32"),
]


@pytest.mark.parametrize(("spec", "common", "cause"), PLANTED)
def test_planted_causes_are_found(spec: dict[str, Any], common: dict[str, Any], cause: str) -> None:
    with tk.launch(model=tk.tiny_policy(), **spec) as session:
        report = session.divergence("float32", "bfloat16", **common)
    assert report.metrics["mean_abs_nats"] > 1e-4
    assert cause in report.cause


def test_float16_loses_small_embedding_values(one_rank: tk.Session) -> None:
    report = one_rank.divergence("float32", "float16")
    assert max(report.units, key=lambda unit: report.units[unit]) == "model.embed_tokens"
    assert "below float16's normal range" in report.cause


def test_the_orders_of_temperature_and_the_modes_of_logprobs_compare_too(one_rank: tk.Session) -> None:
    orders = one_rank.divergence(
        {"temperature_order": "after_upcast"},
        {"temperature_order": "before_upcast"},
        output_dtype="bfloat16",
        temperature=0.7,
    )
    assert orders.metrics["mean_abs_nats"] > 1e-4
    assert (orders.a, orders.b) == ("temperature_order=after_upcast", "temperature_order=before_upcast")
    wide = one_rank.divergence(
        {"temperature_order": "after_upcast"},
        {"temperature_order": "before_upcast"},
        output_dtype="float32",
        temperature=0.7,
    )
    assert wide.metrics["mean_abs_nats"] == 0.0
    assert "give the same bits before and after the upcast" in wide.cause
    modes = one_rank.divergence(
        {"logprob_mode": "materialized"}, {"logprob_mode": "chunked", "logprob_chunk_size": 7}, token_ids=ROWS
    )
    assert modes.metrics["max_abs_nats"] < 1e-5


BAD: list[tuple[Any, Any, dict[str, Any], str]] = [
    ("float32", "float8", {}, "output_dtype='float8'"),
    ("float32", {"activation_checkpointing": "hf"}, {}, "'activation_checkpointing' is built into a session"),
    ({"precision": "float8"}, {}, {}, "precision='float8'"),
    ({"precision": "float32", "lm_head_precision": "float32"}, {}, {}, "changes nothing at precision='float32'"),
    ("float32", {"dtype": "float32"}, {}, "'dtype' is no setting"),
    ("float32", "bfloat16", {"temperature": 0.0}, "logits are divided by it"),
    ("float32", {"temperature": "warm"}, {}, "temperature='warm'"),
    ("float32", {"cast_forward_inputs": False, "autocast": False}, {}, "no matmul accepts"),
    ("float32", "bfloat16", {"output_dtype": "float16"}, "'output_dtype' is given for both sides and for one"),
    ({"temperature": 0.5}, {"temperature": 0.7}, {"temperature": 0.6}, "'temperature' is given for both"),
    ("float32", "bfloat16", {"token_ids": []}, "token_ids is empty"),
    ("float32", "bfloat16", {"token_ids": [[1, 2], [3]]}, r"token_ids\[1\] has 1 token"),
    ("float32", "bfloat16", {"token_ids": [[1, 96]]}, r"has id 96, outside the vocabulary \[0, 96\)"),
]


@pytest.mark.parametrize(("a", "b", "options", "reason"), BAD)
def test_bad_requests_are_named_and_the_session_goes_on(
    a: Any, b: Any, options: dict[str, Any], reason: str, two_ranks: tk.Session
) -> None:
    with pytest.raises(SpecError, match=reason):
        two_ranks.divergence(a, b, **options)
    assert set(two_ranks.units()["output_dtype"]) == {"float32"}


def test_distance_to_float64_truth_is_float32_noise_in_float32_compute() -> None:
    """An oracle for the whole forward: the plain transformers model in float64."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tk.tiny_policy(), dtype=torch.float64)
    with tk.launch(model=tk.tiny_policy(), precision="float32") as session:
        logprobs = session.logprobs(ROWS)
    for row, found in zip(ROWS, logprobs, strict=True):
        ids = torch.tensor([row])
        exact = torch.log_softmax(model(ids).logits, -1)[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)
        np.testing.assert_allclose(found[: len(row) - 1], exact.detach().numpy(), atol=1e-5)
        assert np.isnan(found[len(row) - 1 :]).all()


def test_a_temperature_of_the_config_is_the_one_compared_at() -> None:
    def scored(policy: Policy, temperature: float) -> torch.Tensor:
        return score(policy, make_batch(ROWS, [1] * 3, 0), temperature)

    with tk.launch(model=tk.tiny_policy(), temperature=0.7) as session:
        report = session.divergence("float32", "bfloat16", token_ids=ROWS)
        (direct,) = session.run(scored, 0.7)
    first = report.tokens.query("sequence == 0")["logprob_a"]
    np.testing.assert_array_equal(first.to_numpy(), direct[0].double().numpy())


def test_the_report_shows_itself(one_rank: tk.Session) -> None:
    report = one_rank.divergence()
    assert isinstance(report, DivergenceReport)
    assert repr(report).startswith("DivergenceReport: float32 outputs against bfloat16 outputs")
    assert report.to_frame() is report.tokens
    parsed = json.loads(report.to_json())
    assert parsed["metrics"] == pytest.approx(report.metrics)
    assert len(parsed["tokens"]["token"]) == len(report.tokens)
    assert set(report.summary) == {
        "a", "b", "token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error",
        "sampling_importance_ratio", "mean_abs_nats", "max_abs_nats", "fraction_bit_identical", "k1", "k3", "pearson",
        "fraction_outside_clip", "argmax_flips", "gradient_relative_error", "gradient_cosine", "update_relative_error",
        "update_cosine", "a_from_float32_nats", "a_from_float64_nats", "b_from_float32_nats", "b_from_float64_nats",
        "float32_from_float64_nats",
    }  # fmt: skip
