"""Sessions as a notebook uses them: bad input, widgets, several at once, and nothing left behind."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import shutil
import threading
import weakref
from pathlib import Path
from typing import Any

import ipywidgets
import numpy as np
import pytest

import toolkit as tk
from toolkit.errors import SpecError
from toolkit.spec import GRPOConfig, PolicySpec

from .faults import fault
from .test_ranks import gone


def children() -> set[int]:
    """Rank processes this process has started that are still there."""
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"output_dtype": "bf17"}, SpecError, "output_dtype='bf17'"),
    ({"model": "/nowhere"}, FileNotFoundError, "no such folder"),
    ({"model": None}, SpecError, "must be a folder or a hub id"),
    ({"ranks": 3, "tensor_parallel_size": 2}, SpecError, "ranks=3 is not divisible"),
    ({"ranks": 8, "tensor_parallel_size": 8}, SpecError, "does not divide"),
    ({"ranks": 2, "num_prompts_per_step": 5}, SpecError, "does not divide over 2 data-parallel ranks"),
    ({"ranks": 0}, SpecError, "ranks=0"),
    ({"device": "tpu"}, SpecError, "device='tpu'"),
    ({"device": "cuda", "ranks": 64}, SpecError, "ranks=64 needs 64 GPUs"),
    ({"num_generations": 4}, SpecError, "Did you mean 'num_generations_per_prompt'"),
    ({"temperature_order": "before_upcast"}, SpecError, "changes nothing at temperature=1.0"),
    ({"task": "algebra"}, SpecError, "task='algebra' is not known"),
    ({"ranks": 2, "task": []}, SpecError, "has no problems"),
]


@fault(
    "a setting that would do nothing or crash later",
    "`SpecError`: what you typed, why, the way out",
    "everything; nothing was started",
)
@pytest.mark.parametrize(("fields", "kind", "reason"), BAD)
def test_bad_launches_are_one_clear_error_and_start_nothing(fields: Any, kind: type[Exception], reason: str) -> None:
    before = children()
    with pytest.raises(kind, match=reason):
        tk.launch(**{"model": tk.tiny_policy(), **fields})
    assert children() <= before


def test_a_launch_needs_a_model_by_name() -> None:
    with pytest.raises(SpecError, match="launch needs a model"):
        tk.launch()
    with pytest.raises(SpecError, match=r"give a PolicySpec, or the model by name: tk.launch\(model='some/folder'\)"):
        tk.launch("some/folder")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="must be a GRPOConfig"):
        tk.launch(model=tk.tiny_policy(), config={"task": "arithmetic"})  # type: ignore[arg-type]


def copy_of_tiny(folder: Path) -> Path:
    shutil.copytree(tk.tiny_policy(), folder)
    return folder


def test_models_that_cannot_run_are_refused_at_launch(tmp_path: Path) -> None:
    no_tokenizer = copy_of_tiny(tmp_path / "a")
    (no_tokenizer / "tokenizer.json").unlink()
    (no_tokenizer / "tokenizer_config.json").unlink()
    with pytest.raises(SpecError, match="cannot be loaded|no usable tokenizer"):
        tk.launch(model=no_tokenizer)
    short = copy_of_tiny(tmp_path / "b")
    weights = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(SpecError, match=f"model='{short}' cannot be loaded: SafetensorError"):
        tk.launch(model=short)


def test_an_operation_that_refuses_mixed_dtypes_is_found_at_launch_with_its_cure(tmp_path: Path) -> None:
    """GPT-2's final LayerNorm lies in the root unit: on CPU it takes no float32 input with bfloat16 weights."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=2)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tk.tiny_policy()).save_pretrained(tmp_path)
    with pytest.raises(SpecError, match="output_dtype='float32'.*output_dtype='bfloat16' cures it"):
        tk.launch(model=tmp_path)
    fields = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_new_tokens": 2}
    with tk.launch(model=tmp_path, output_dtype="bfloat16", **fields) as session:
        with pytest.raises(SpecError, match="cannot run with output_dtype='float32'"):
            session.output_dtype = "float32"
        assert session.output_dtype == "bfloat16"
        assert session.grpo_step().output_dtype == "bfloat16"


def test_lengths_beyond_the_models_positions_are_refused(two_ranks: tk.Session) -> None:
    with pytest.raises(SpecError, match="max_new_tokens=300 is more than the 256 positions"):
        two_ranks.config = dataclasses.replace(two_ranks.config, max_new_tokens=300)
    with pytest.raises(SpecError, match="sequence_length=257 is more than the 256 positions"):
        two_ranks.memory(num_sequences=1, sequence_length=257)
    with pytest.raises(SpecError, match=r"token_ids\[0\]=257 is more than"):
        two_ranks.logprobs([[1] * 257])
    before = two_ranks.config
    long = [("1" * 255, "1")] * 8 + [("1+1=", "2")] * 8
    two_ranks.config = dataclasses.replace(before, task=long)
    with pytest.raises(SpecError, match="has 256 tokens; with max_new_tokens=5 that is more than the 256 positions"):
        two_ranks.grpo_step()
    two_ranks.config = before
    two_ranks.rollout(2)


BAD_IDS: list[tuple[Any, str]] = [
    ([[1.9, 5.0]], r"token_ids\[0\] has 1.9; token ids are whole numbers"),
    ([[True, 2]], "has True"),
    (["156"], r"token_ids\[0\] is '156'"),
    ("12+34=", "for text, encode it first"),
    ([1, 2, 3], r"token_ids\[0\] is 1"),
    (None, "token_ids=None"),
]


@pytest.mark.parametrize(("ids", "reason"), BAD_IDS)
def test_token_ids_are_taken_as_they_are_or_not_at_all(ids: Any, reason: str, one_rank: tk.Session) -> None:
    with pytest.raises(SpecError, match=reason):
        one_rank.logprobs(ids)


def test_token_ids_may_be_arrays_and_tensors(one_rank: tk.Session) -> None:
    import torch

    rows = [[1, 5, 6], [1, 7, 8]]
    want = one_rank.logprobs(rows)
    np.testing.assert_array_equal(one_rank.logprobs(np.array(rows)), want)
    np.testing.assert_array_equal(one_rank.logprobs(torch.tensor(rows)), want)  # type: ignore[arg-type]
    np.testing.assert_array_equal(one_rank.logprobs([torch.tensor(r) for r in rows]), want)  # type: ignore[list-item]


def test_attributes_that_do_nothing_cannot_be_set(one_rank: tk.Session) -> None:
    for name in ("spec", "history", "outputdtype", "num_ranks"):
        with pytest.raises(AttributeError):
            setattr(one_rank, name, 1)
    for settings, reason in (
        ({"temperature": 0.5}, "'temperature' cannot change"),
        ({"model": "x"}, "'model' cannot change"),
    ):
        with pytest.raises(SpecError, match=reason):
            one_rank.set_live(**settings)
    for config in (None, {"task": "arithmetic"}):
        with pytest.raises(SpecError, match="must be a GRPOConfig"):
            one_rank.config = config  # type: ignore[assignment]


def test_live_settings_act_on_the_next_forward() -> None:
    """Each by what it changes: logprobs worked by hand from the logits, the region autocast opens, the bytes of the loss."""
    import torch

    from toolkit import fsdp
    from toolkit.policy import Policy

    rows = [[1, 5, 6, 7, 14, 2], [1, 8, 9, 40, 41, 2]]

    def logits(policy: Policy) -> tuple[torch.Tensor, bool]:
        ids_BT = torch.tensor(rows)
        seen: list[bool] = []
        handle = policy.model.lm_head.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
        with torch.no_grad(), policy.autocast():
            found = policy.forward(ids_BT, torch.ones_like(ids_BT), torch.arange(6).expand(2, -1)).logits
        handle.remove()
        fsdp.reshard(policy.model)
        return found, seen[0]

    def by_hand(scaled_BTV: torch.Tensor) -> np.ndarray[Any, Any]:
        logprobs_BTV = torch.log_softmax(scaled_BTV.double(), -1)[:, :-1]
        return logprobs_BTV.gather(-1, torch.tensor(rows)[:, 1:, None]).squeeze(-1).numpy()

    def loss_bytes_per_logit() -> float:
        report = session.memory(num_sequences=4, sequence_length=129)
        return report.logit_peak_bytes / report.logit_elements

    with tk.launch(model=tk.tiny_policy(), temperature=0.7) as session:
        session.set_live(output_dtype="bfloat16", temperature_order="before_upcast")
        ((logits_BTV, autocasts),) = session.run(logits)
        assert (logits_BTV.dtype, autocasts) == (torch.bfloat16, True)
        early = session.logprobs(rows, temperature=0.7)
        np.testing.assert_allclose(early, by_hand(logits_BTV / 0.7), atol=1e-5)
        with pytest.raises(SpecError, match="changes nothing at temperature=0.5"):
            session.config = dataclasses.replace(session.config, temperature=0.5)

        session.set_live(temperature_order="after_upcast")
        late = session.logprobs(rows, temperature=0.7)
        np.testing.assert_allclose(late, by_hand(logits_BTV.double() / 0.7), atol=1e-5)
        assert np.abs(early - late).max() > 1e-3

        session.config = dataclasses.replace(session.config, temperature=0.5)
        with pytest.raises(SpecError, match="changes nothing at temperature=0.5"):
            session.set_live(temperature_order="before_upcast")
        assert session.spec.temperature_order == "after_upcast"
        np.testing.assert_array_equal(session.logprobs(rows, temperature=0.7), late)

        session.set_live(autocast=False)
        assert session.run(logits)[0][1] is False
        session.set_live(cast_forward_inputs=False)
        assert set(session.units()["cast_forward_inputs"]) == {False}
        session.set_live(cast_forward_inputs=True, autocast=True)
        assert set(session.units()["cast_forward_inputs"]) == {True}
        assert session.run(logits)[0][1] is True

        assert loss_bytes_per_logit() > 10
        session.set_live(logprob_mode="chunked", logprob_chunk_size=8)
        assert loss_bytes_per_logit() == pytest.approx(4, abs=0.3)
        np.testing.assert_allclose(session.logprobs(rows, temperature=0.7), late, atol=1e-5)


def test_two_threads_take_different_steps() -> None:
    fields = {"num_prompts_per_step": 2, "num_generations_per_prompt": 2, "max_new_tokens": 3}
    with tk.launch(model=tk.tiny_policy(), **fields) as session:
        threads = [threading.Thread(target=session.grpo_step, args=(3,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert session.history["step"].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_breaks_while_loading_leaves_no_process(ranks: int, tmp_path: Path) -> None:
    shutil.copytree(tk.tiny_policy(), tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not safetensors")
    before = children()
    with pytest.raises(SpecError, match=r"cannot be loaded: SafetensorError"):
        tk.launch(model=tmp_path / "broken", ranks=ranks)
    assert gone(list(children() - before))


def test_spec_and_config_objects_and_fields_over_them() -> None:
    spec, config = PolicySpec(model=tk.tiny_policy(), output_dtype="bfloat16"), GRPOConfig(num_prompts_per_step=4)
    with tk.launch(spec, config=config, max_new_tokens=3, precision="float32") as session:
        assert session.spec == dataclasses.replace(spec, precision="float32")
        assert session.config == dataclasses.replace(config, max_new_tokens=3)
        assert "bfloat16 outputs" in repr(session)


def test_a_config_that_does_not_fit_is_refused_and_the_old_one_kept(two_ranks: tk.Session) -> None:
    before = two_ranks.config
    with pytest.raises(SpecError, match="does not divide"):
        two_ranks.config = GRPOConfig(num_prompts_per_step=3)
    assert two_ranks.config is before
    with pytest.raises(SpecError, match="does not divide"):
        two_ranks.rollout(3)
    with pytest.raises(SpecError, match="n=0"):
        two_ranks.grpo_step(0)
    with pytest.raises(SpecError, match="n=0"):
        two_ranks.evaluate(0)


def test_a_closed_session_says_so_and_closes_again() -> None:
    session = tk.launch(model=tk.tiny_policy())
    model = weakref.ref(session.run(lambda policy: policy.model)[0])
    session.close()
    session.close()
    assert not session.is_open
    assert repr(session).endswith("0 steps, closed)")
    for use in (session.grpo_step, session.__enter__, lambda: session.set_live(output_dtype="float32")):
        with pytest.raises(tk.SessionClosed, match="closed"):
            use()
    gc.collect()
    assert model() is None  # its memory is free


def test_a_dropped_session_frees_its_model_and_its_ranks() -> None:
    session = tk.launch(model=tk.tiny_policy())
    model = weakref.ref(session.run(lambda policy: policy.model)[0])
    before = children()
    ranked = tk.launch(model=tk.tiny_policy(), ranks=2)
    started = children() - before
    assert len(started) == 2
    del session, ranked
    gc.collect()
    assert model() is None
    assert gone(list(started))


def test_sessions_side_by_side_do_not_collide() -> None:
    fields = {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_new_tokens": 5, "learning_rate": 1e-4}
    with tk.launch(model=tk.tiny_policy(), **fields) as alone:
        straight = [alone.grpo_step().metrics for _ in range(2)]
    with (
        tk.launch(model=tk.tiny_policy(), **fields) as first,
        tk.launch(model=tk.tiny_policy(), output_dtype="float16", seed=1, **fields) as second,
        tk.launch(model=tk.tiny_policy(), ranks=2, **fields) as third,
        tk.launch(model=tk.tiny_policy(), ranks=2, output_dtype="bfloat16", **fields) as fourth,
    ):
        mixed = []
        for _ in range(2):
            mixed.append(first.grpo_step().metrics)
            second.grpo_step()
            third.grpo_step()
            fourth.grpo_step()
        assert set(third.units()["output_dtype"]) == {"float32"}
        assert set(fourth.units()["output_dtype"]) == {"bfloat16"}
    assert mixed == straight


def test_logprobs_of_given_tokens(one_rank: tk.Session, two_ranks: tk.Session) -> None:
    rows = [[1, 5, 6, 7], [1, 8], [1, 9, 9]]
    for session in (one_rank, two_ranks):  # three rows over two ranks: one is filled up and dropped again
        found = session.logprobs(rows)
        assert found.shape == (3, 3)
        assert found.dtype == np.float32
        assert np.isnan(found).sum(axis=1).tolist() == [0, 2, 1]
        assert (found[~np.isnan(found)] < 0).all()
    hot = one_rank.logprobs(rows, temperature=2.0)
    assert not np.allclose(hot[0], one_rank.logprobs(rows)[0])


def test_logprobs_of_tensor_parallel_ranks_come_once_and_in_order(tensor_parallel: tk.Session) -> None:
    """Five rows over two copies of the model, of two ranks each: against the plain transformers model in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    rows = [[1, 5, 6, 7], [1, 8], [1, 9, 9], [1, 4, 40, 5, 14], [1, 20, 30]]
    model = AutoModelForCausalLM.from_pretrained(tk.tiny_policy(), dtype=torch.float64)
    for temperature in (1.0, 0.7):
        found = tensor_parallel.logprobs(rows, temperature=temperature)
        want = np.full((5, 4), np.nan)
        for index, row in enumerate(rows):
            logprobs_TV = torch.log_softmax(model(torch.tensor([row])).logits[0].detach() / temperature, -1)
            want[index, : len(row) - 1] = [float(logprobs_TV[t, token]) for t, token in enumerate(row[1:])]
        np.testing.assert_allclose(found, want, atol=1e-5)


@pytest.mark.parametrize("session", ["one_rank", "two_ranks", "tensor_parallel"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_held_out_problem_is_graded_once_whatever_the_ranks(
    session: str, count: int, request: pytest.FixtureRequest
) -> None:
    """The share of the last rank is filled up with the first problem, here the only one graded 1."""
    live: tk.Session = request.getfixturevalue(session)
    held_out = [(f"{a}+1=", str(a)) for a in range(count)]
    task = tk.Task("first", held_out, held_out, reward=lambda prompt, completion, answer: float(prompt == "0+1="))
    before = live.config
    live.config = dataclasses.replace(before, task=task)
    try:
        record = live.evaluate()
    finally:
        live.config = before
    assert list(zip(record.to_frame()["prompt"], record.to_frame()["answer"], strict=True)) == held_out
    assert record.num_problems == count
    assert record.accuracy == 1 / count


def test_rollouts_and_evaluation(one_rank: tk.Session, two_ranks: tk.Session) -> None:
    frame = two_ranks.rollout(4)
    assert len(frame) == 4 * two_ranks.config.num_generations_per_prompt
    assert list(frame.columns) == ["prompt", "completion", "answer", "reward", "tokens", "stopped", "mean_logprob"]
    assert frame["prompt"].nunique() == 4
    right = [float(c.strip() == a) for c, a in zip(frame["completion"], frame["answer"], strict=True)]
    assert frame["reward"].tolist() == right
    record = two_ranks.evaluate(5)  # five over two ranks
    assert record.num_problems == len(record.to_frame()) == 5
    assert record.accuracy == record.to_frame()["reward"].mean()
    assert "greedy accuracy" in repr(record)
    assert record.figure().data[0].x == tuple(record.rewards)
    # A part is drawn at random, so it estimates the whole: the first hundred held-out sums have one digit less.
    whole = two_ranks.evaluate()
    assert len(whole.to_frame()) == 1001
    assert abs(two_ranks.evaluate(300).accuracy - whole.accuracy) < 4 * (0.25 / 300) ** 0.5
    before = two_ranks.config
    pairs = [("1+1=", "2"), ("1+2=", "3")]
    two_ranks.config = dataclasses.replace(before, task=tk.Task("t", pairs, pairs, reward=lambda *_: 2.0))
    graded = two_ranks.evaluate()
    two_ranks.config = before
    assert "greedy mean reward 2.000" in repr(graded)
    with pytest.raises(ValueError, match="no accuracy"):
        graded.accuracy  # noqa: B018
    one = tk.launch(model=tk.tiny_policy(), task=[("1+1=", "2")], num_prompts_per_step=1)
    with one, pytest.raises(SpecError, match="holds no problems out"):
        one.evaluate()


# ---- widgets


def test_the_picker_is_labelled_and_offers_the_table() -> None:
    picker = tk.dtype_picker()
    assert isinstance(picker, ipywidgets.Dropdown)
    assert picker.description == "Output dtype"
    assert picker.options == ("float32", "bfloat16", "float16")
    assert tk.dtype_picker("bf16").value == "bfloat16"
    with pytest.raises(SpecError, match="value='int8'"):
        tk.dtype_picker("int8")


@pytest.mark.parametrize("ranks", [1, 2])
def test_picking_switches_the_live_session_and_setting_moves_the_picker(ranks: int) -> None:
    picker = tk.dtype_picker("bfloat16")
    with tk.launch(model=tk.tiny_policy(), output_dtype=picker, ranks=ranks) as session:
        assert session.output_dtype == "bfloat16"
        assert set(session.units()["output_dtype"]) == {"bfloat16"}
        picker.value = "float16"
        assert session.output_dtype == "float16"
        assert set(session.units()["output_dtype"]) == {"float16"}
        assert session.units()["rank"].nunique() == ranks
        session.output_dtype = "float32"
        assert picker.value == "float32"
    picker.value = "bfloat16"  # after close: nobody listens, nothing raises


def test_a_pick_the_session_refuses_goes_back(tied_model: Path) -> None:
    picker = tk.dtype_picker("bfloat16")
    with tk.launch(model=tied_model, autocast=False, output_dtype=picker) as session:
        with pytest.raises(SpecError, match="head belongs to the root"):
            picker.value = "float32"
        assert picker.value == session.output_dtype == "bfloat16"


def test_a_pick_during_a_step_from_another_thread_acts_from_the_next_call(two_ranks: tk.Session) -> None:
    from toolkit.launching import _bind

    picker = tk.dtype_picker("float32")
    _bind(two_ranks, "output_dtype", picker)
    in_call = threading.Event()

    def slow(policy: Any) -> str:
        import time

        time.sleep(0.5)
        return str(policy.spec.output_dtype)

    def pick() -> None:
        in_call.wait()
        picker.value = "float16"

    thread = threading.Thread(target=pick)
    thread.start()
    threading.Timer(0.2, in_call.set).start()
    assert two_ranks.run(slow) == ["float32"] * 2  # the running call is not touched
    thread.join()
    assert set(two_ranks.units()["output_dtype"]) == {"float16"}
    assert two_ranks.output_dtype == picker.value == "float16"
    two_ranks.output_dtype = "float32"


def test_other_fields_may_be_widgets_too() -> None:
    rate = ipywidgets.FloatText(value=1e-4)
    ranks_of_precision = ipywidgets.Dropdown(options=["float32", "bfloat16"], value="float32")
    with tk.launch(model=tk.tiny_policy(), learning_rate=rate, precision=ranks_of_precision) as session:
        rate.value = 2e-4
        assert session.config.learning_rate == 2e-4
        with pytest.raises(SpecError):
            rate.value = -1.0
        assert rate.value == session.config.learning_rate == 2e-4
        with pytest.raises(SpecError, match="'precision' is built into the session"):
            ranks_of_precision.value = "bfloat16"
        assert ranks_of_precision.value == session.spec.precision == "float32"


def test_tradeoffs_end_in_a_verdict_from_their_own_records(one_rank: tk.Session) -> None:
    report = one_rank.tradeoffs(("float32", "bfloat16"))
    frame = report.to_frame().set_index("output_dtype")
    change = frame.loc["bfloat16", "peak_bytes"] - frame.loc["float32", "peak_bytes"]
    assert frame.loc["float32", "mean_abs_nats"] == 0.0
    assert ("lower the peak" in report.verdict) == (change < 0)
    assert f"{frame.loc['bfloat16', 'mean_abs_nats']:.1e} nats" in report.verdict
    assert report.headline == report.verdict
    with pytest.raises(SpecError, match="two or more different settings"):
        one_rank.tradeoffs(("float32", "fp32"))
