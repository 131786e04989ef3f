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


@pytest.mark.parametrize(("fields", "kind", "reason"), BAD)
def test_bad_launches_are_one_clear_error_and_start_nothing(fields: Any, kind: type[Exception], reason: str) -> None:
    before = children()
    with pytest.raises(kind, match=reason):
        tk.launch(**{"model": tk.tiny_policy(), **fields})
    assert children() <= before


def test_a_launch_needs_a_model() -> None:
    with pytest.raises(SpecError, match="launch needs a model"):
        tk.launch()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_breaks_while_loading_leaves_no_process(ranks: int, tmp_path: Path) -> None:
    shutil.copytree(tk.tiny_policy(), tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00not safetensors")
    before = children()
    with pytest.raises(Exception, match=r"(?i)safetensor|header"):
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
    with pytest.raises(tk.SessionClosed, match="closed"):
        session.grpo_step()
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


def test_rollouts_and_evaluation(one_rank: tk.Session, two_ranks: tk.Session) -> None:
    frame = two_ranks.rollout(4)
    assert len(frame) == 4 * two_ranks.config.num_generations_per_prompt
    assert list(frame.columns) == ["prompt", "completion", "answer", "reward", "tokens", "stopped", "mean_logprob"]
    assert frame["prompt"].nunique() == 4
    right = [float(c.strip() == a) for c, a in zip(frame["completion"], frame["answer"], strict=True)]
    assert frame["reward"].tolist() == right
    record = two_ranks.evaluate(5)  # five over two ranks
    assert record.num_problems == 5
    assert record.accuracy in [k / 5 for k in range(6)]
    assert "held-out" in repr(record)
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
    with pytest.raises(SpecError, match="two or more different dtypes"):
        one_rank.tradeoffs(("float32", "fp32"))
