"""NeMo-RL's options of a step, on real ranks: several updates, a frozen reference, dynamic sampling, overlong filtering."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import toolkit as tk
from toolkit.collect import collect
from toolkit.dtensors import local_shard
from toolkit.errors import SpecError
from toolkit.policy import Policy
from toolkit.reference import reference_weights
from toolkit.step import score, split_updates, training_batch

from .test_step import FIELDS, trajectory


def test_several_updates_of_a_step_are_the_same_on_any_number_of_ranks() -> None:
    fields = {"train_global_batch_size": 8, "learning_rate": 5e-4}  # four updates
    one, weights_one = trajectory(**fields)
    two, weights_two = trajectory(ranks=2, train_micro_batch_size=3, **fields)
    for a, b in zip(one, two, strict=True):
        assert a["reward"] == b["reward"]
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["probs_ratio_max"] == pytest.approx(b["probs_ratio_max"], rel=1e-4)
        assert a["probs_ratio_min"] < 0.99  # after the first update the ratios are not 1: the clip has something to do
        assert a["probs_ratio_max"] > 1.01
    deltas = torch.cat([(a - b).flatten() for a, b in zip(weights_one, weights_two, strict=True)])
    assert float(deltas.abs().mean()) < 1e-5


def test_updates_partition_the_step_and_count_their_own_tokens(two_ranks: tk.Session) -> None:
    def counted(policy: Policy, config: Any, problems: Any) -> tuple[float, list[float], list[list[int]], list[int]]:
        graded = collect(policy, config, problems, None, 0, lambda _: None)
        training = training_batch(policy, config, graded.rollouts, graded.shaped_B)
        parts = split_updates(policy, training, 4)
        rows = [part.batch.ids_BT.sum(-1).tolist() for part in parts]
        return training.num_tokens, [part.num_tokens for part in parts], rows, training.batch.ids_BT.sum(-1).tolist()

    problems = two_ranks._problems(two_ranks.task, 8, 0)
    for tokens, parts, rows, whole in two_ranks.run(counted, two_ranks.config, problems):
        assert sum(parts) == tokens
        assert [list(column) for column in zip(*rows, strict=True)] == [whole[i : i + 4] for i in range(0, len(whole), 4)]


def test_taking_the_current_logprobs_as_previous_changes_nothing_but_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, weights = trajectory()
    forced, forced_weights = trajectory(force_on_policy_ratio=True)
    assert [m["loss"] for m in forced] == [m["loss"] for m in plain]
    assert forced == plain
    assert all(torch.equal(a, b) for a, b in zip(weights, forced_weights, strict=True))


# ---- reference


def test_the_reference_is_the_model_as_it_was_loaded() -> None:
    fields = {**FIELDS, "learning_rate": 1e-3, "reference_policy_kl_penalty": 0.1}

    def both(policy: Policy, ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, bool]:
        from toolkit.prompts import make_batch

        batch = make_batch(ids, [1] * len(ids), 0)
        before = [local_shard(p).clone() for p in policy.model.parameters()]
        mine = score(policy, batch, 1.0)
        with reference_weights(policy):
            theirs = score(policy, batch, 1.0)
        same = all(torch.equal(a, local_shard(b)) for a, b in zip(before, policy.model.parameters(), strict=True))
        return mine, theirs, same

    ids = [[1, 5, 6, 7, 2], [1, 8, 9, 4, 2]]
    with tk.launch(model=tk.tiny_policy(), **FIELDS) as fresh:
        want = fresh.logprobs(ids)
    for ranks in (1, 2):
        with tk.launch(model=tk.tiny_policy(), ranks=ranks, **fields) as session:
            first, second = session.grpo_step(2)
            mine, theirs, same = session.run(both, ids)[0]
        assert first.metrics["kl_penalty"] == 0.0  # the policy is the reference still
        assert second.metrics["kl_penalty"] > 1e-4
        torch.testing.assert_close(theirs, torch.from_numpy(want), rtol=0, atol=0)
        assert (mine - theirs).abs().max() > 1e-2
        assert same


def test_a_penalty_holds_the_policy_near_its_reference() -> None:
    def divergence(penalty: float) -> float:
        with tk.launch(model=tk.tiny_policy(), **FIELDS, reference_policy_kl_penalty=penalty) as session:
            return sum(record.metrics["kl_penalty"] for record in session.grpo_step(12)[-4:])

    assert divergence(3.0) < 0.5 * divergence(1e-9)


def test_a_reference_can_be_asked_for_until_the_first_step(tmp_path: Any) -> None:
    with tk.launch(model=tk.tiny_policy(), **FIELDS) as session:
        session.config = dataclasses.replace(session.config, reference_policy_kl_penalty=0.1)
        assert session.grpo_step().metrics["kl_penalty"] == 0.0
        session.save(tmp_path / "saved")
        straight = session.grpo_step().metrics
    with tk.resume(tmp_path / "saved") as resumed:  # its reference is the model as loaded, not as saved
        assert resumed.grpo_step().metrics == straight
    with tk.launch(model=tk.tiny_policy(), **FIELDS) as session:
        session.grpo_step()
        with pytest.raises(SpecError, match="no reference was kept at the start"):
            session.config = dataclasses.replace(session.config, reference_policy_kl_penalty=0.1)
        session.grpo_step()


# ---- dynamic sampling and overlong filtering


def gathered(policy: Policy, config: Any, problems: Any, step: int) -> Any:
    graded = collect(policy, config, problems, None, step, lambda _: None)
    r = graded.rollouts
    real_BT, made_BT = r.batch.mask_BT > 0, r.batch.token_mask_BT > 0
    rows = [
        (
            r.prompts[b],
            r.completions[b],
            r.answers[b],
            r.batch.ids_BT[b][real_BT[b]].tolist(),
            [round(x, 4) for x in r.generation_logprobs_BT[b][made_BT[b]].tolist()],
            float(graded.rewards_B[b]),
        )
        for b in range(len(r.prompts))
    ]
    return rows, graded.counts


def test_dynamic_sampling_keeps_groups_that_differ_and_is_the_same_on_two_ranks() -> None:
    found = []
    fields = {**FIELDS, "precision": "float32", "use_dynamic_sampling": True}
    for ranks in (1, 2):
        with tk.launch(model=tk.tiny_policy(), ranks=ranks, **fields) as session:
            problems = session._problems(session.task, session.config.num_sampled_prompts, 0)
            per_rank = session.run(gathered, session.config, problems, 0)
            found.append([row for rows, _ in per_rank for row in rows])
            assert per_rank[0][1] == per_rank[-1][1]
            counts = per_rank[0][1]
            assert (
                session.grpo_step().metrics["dynamic_sampling_num_gen_batches"] == counts["dynamic_sampling_num_gen_batches"]
            )
    one, two = found
    assert one == two
    assert len(one) == 32
    for start in range(0, 32, 4):
        group = one[start : start + 4]
        assert len({row[0] for row in group}) == 1
        assert len({row[5] for row in group}) == 2  # some right, some wrong
        for prompt, completion, answer, ids, logprobs, reward in group:
            assert reward == float(completion == answer)
            assert len(logprobs) < len(ids)
            assert prompt.endswith("=")
    batches = counts["dynamic_sampling_num_gen_batches"]
    assert batches >= 2
    assert 0 <= counts["dynamic_sampling_num_discarded_valid_samples"] < 8 * 4


def test_dynamic_sampling_gives_up_with_the_reason(two_ranks: tk.Session) -> None:
    before = two_ranks.config
    never = tk.Task("never", [(f"{a}+1=", "wrong") for a in range(9)])
    two_ranks.config = dataclasses.replace(before, task=never, use_dynamic_sampling=True, dynamic_sampling_max_gen_batches=2)
    with pytest.raises(SpecError, match="found 0 of 8 prompts whose completions differ in reward, in 2 batches"):
        two_ranks.grpo_step()
    two_ranks.config = before
    two_ranks.grpo_step()


def test_cut_off_completions_count_in_the_baseline_only(one_rank: tk.Session) -> None:
    def batches(policy: Policy, config: Any, problems: Any) -> Any:
        graded = collect(policy, config, problems, None, 0, lambda _: None)
        plain = training_batch(
            policy, dataclasses.replace(config, overlong_filtering=False), graded.rollouts, graded.shaped_B
        )
        filtered = training_batch(policy, config, graded.rollouts, graded.shaped_B)
        return plain, filtered, graded.rollouts.stopped_B

    config = dataclasses.replace(one_rank.config, overlong_filtering=True, max_new_tokens=3)
    problems = one_rank._problems(one_rank.task, 8, 0)
    plain, filtered, stopped_B = one_rank.run(batches, config, problems)[0]
    assert 0 < int(stopped_B.sum()) < len(stopped_B)
    assert torch.equal(plain.advantages_B, filtered.advantages_B)
    assert filtered.num_sequences == float(stopped_B.sum())
    assert filtered.num_tokens == float(plain.batch.token_mask_BT[stopped_B].sum())
    assert not filtered.batch.token_mask_BT[~stopped_B].any()
    assert torch.equal(filtered.batch.mask_BT, plain.batch.mask_BT)


def test_a_step_in_which_everything_is_cut_off_has_no_loss(one_rank: tk.Session) -> None:
    before = one_rank.config
    one_rank.config = dataclasses.replace(before, overlong_filtering=True, max_new_tokens=1, task=[("1+1=", "22")])
    record = one_rank.grpo_step()
    one_rank.config = before
    assert record.metrics["loss"] == 0.0
    assert record.metrics["grad_norm"] == 0.0
    assert record.metrics["truncation_rate"] > 0.9


def test_instruments_take_every_option(two_ranks: tk.Session) -> None:
    """Memory of made-up tokens and divergence of given ones have neither sampler nor rewards."""
    fields = {
        "use_importance_sampling_correction": True, "reference_policy_kl_penalty": 0.1, "train_global_batch_size": 8,
    }  # fmt: skip
    with tk.launch(model=tk.tiny_policy(), **FIELDS, **fields) as session:
        report = session.memory(num_sequences=4, sequence_length=33)
        assert sum(report.categories.values()) == report.peak_bytes
        plain = two_ranks.divergence(token_ids=[[1, 5, 6, 7, 2]] * 2)
        mine = session.divergence(token_ids=[[1, 5, 6, 7, 2]] * 2)
        assert mine.tokens.columns.tolist() == plain.tokens.columns.tolist()
        assert session.divergence().summary["gradient_cosine"] > 0.9
        parameters = report.categories["parameters"]
    with tk.launch(model=tk.tiny_policy(), **FIELDS) as session:
        without = session.memory(num_sequences=4, sequence_length=33).categories["parameters"]
        num_parameters = int(session.units()["num_parameters"].sum())
    assert parameters - without == 4 * num_parameters  # the reference's shards
