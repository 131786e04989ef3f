"""A saved session goes on as if nothing had happened, and a lost one comes back from its last save."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import toolkit as tk
from toolkit.errors import RanksLost, SessionClosed, SpecError
from toolkit.live import SESSION_FILE
from toolkit.policy import Policy

from .faults import fault

FIELDS: dict[str, Any] = {
    "num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_new_tokens": 5, "learning_rate": 1e-4,
    "warmup_steps": 3,
}  # fmt: skip


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    """Whole master weights and first moments, by parameter name."""
    found = {}
    for name, param in policy.model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        moments = policy.optimizer.state.get(param, {})
        for kind, value in {"weight": param.detach(), **moments}.items():
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[f"{name}/{kind}"] = whole.clone()
    return found


def without_times(record: tk.StepRecord) -> tuple[Any, ...]:
    return record.step, record.output_dtype, record.metrics, record.examples


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two steps, a save, and two more, on two ranks with float32 compute."""
    folder = tmp_path_factory.mktemp("straight") / "saved"
    with tk.launch(model=tk.tiny_policy(), ranks=2, precision="float32", output_dtype="bfloat16", **FIELDS) as session:
        session.grpo_step(2)
        assert session.save(folder) == folder
        after = session.grpo_step(2)
        return {"folder": folder, "records": after, "weights": session.run(weights)[0], "history": session.history}


def test_resumed_is_straight_bit_for_bit(straight: dict[str, Any]) -> None:
    with tk.resume(straight["folder"]) as session:
        assert session.num_ranks == 2
        assert session.output_dtype == "bfloat16"
        assert len(session.history) == 2
        records = session.grpo_step(2)
        assert [without_times(r) for r in records] == [without_times(r) for r in straight["records"]]
        found = session.run(weights)[0]
        assert session.history.drop(columns="seconds").equals(straight["history"].drop(columns="seconds"))
    assert found.keys() == straight["weights"].keys()
    assert all(torch.equal(found[name], straight["weights"][name]) for name in found)


@pytest.mark.parametrize(
    "layout",
    [{"ranks": 1}, {"ranks": 2, "tensor_parallel_size": 2}, {"ranks": 1, "activation_checkpointing": "full"}],
    ids=["one rank", "tensor parallel", "checkpointed"],
)
def test_resumed_on_another_layout_is_the_same_but_for_rounding(straight: dict[str, Any], layout: dict[str, Any]) -> None:
    with tk.resume(straight["folder"], **layout) as session:
        (first, _) = session.grpo_step(2)
        found = session.run(weights)[0]
    # bfloat16 outputs at float32 compute: what another order of summation moves, rounding to bfloat16 can enlarge.
    assert first.metrics["loss"] == pytest.approx(straight["records"][0].metrics["loss"], abs=2e-4)
    for name, whole in straight["weights"].items():
        if name.endswith("/weight"):  # two steps of at most 1e-4 each
            torch.testing.assert_close(found[name], whole, rtol=0, atol=2e-4)
        elif name.endswith("/step"):
            assert found[name] == whole == 4


def test_saved_before_the_first_step_has_no_moments(tmp_path: Path) -> None:
    with tk.launch(model=tk.tiny_policy(), **FIELDS) as session:
        session.save(tmp_path / "fresh")
        straight = session.grpo_step(2)
    with tk.resume(tmp_path / "fresh") as session:
        assert [without_times(r) for r in session.grpo_step(2)] == [without_times(r) for r in straight]


@fault(
    "`session.restart()` with a `checkpoint_dir`",
    "what was lost, in words",
    "the session from its last completed step; steps go on bit for bit",
)
def test_a_killed_rank_is_replaced_from_the_last_completed_step(tmp_path: Path) -> None:
    def die(policy: Policy) -> None:
        if policy.data_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()

    with tk.launch(model=tk.tiny_policy(), ranks=2, checkpoint_dir=tmp_path / "auto", **FIELDS) as session:
        session.grpo_step(2)
        with pytest.raises(RanksLost, match=r"rank 1 died.*session.restart\(\)"):
            session.run(die)
        assert session.restart() == f"restarted from {tmp_path / 'auto'}, saved after step 2; no step was lost."
        third = session.grpo_step()
    with tk.launch(model=tk.tiny_policy(), ranks=2, **FIELDS) as undisturbed:
        assert without_times(undisturbed.grpo_step(3)[-1]) == without_times(third)


@fault(
    "`session.restart()` without",
    "the same",
    "the session from its last `save`, else from the model's own weights",
)
def test_a_restart_says_what_was_lost(tmp_path: Path) -> None:
    with tk.launch(model=tk.tiny_policy(), **FIELDS) as session:
        first = session.grpo_step()
        assert session.restart() == "restarted from the model's own weights; 1 step(s) were lost: nothing had been saved."
        assert without_times(session.grpo_step()) == without_times(first)
        session.save(tmp_path / "saved")
        second = session.grpo_step()
        assert "saved after step 1; 1 step(s) taken since were lost" in session.restart()
        session.output_dtype = "bfloat16"
        session.output_dtype = "float32"
        assert without_times(session.grpo_step()) == without_times(second)
    with pytest.raises(SessionClosed):
        session.restart()


@fault(
    "a save fails or is cut off",
    "that error",
    "the last good save",
)
def test_saving_again_replaces_and_a_failed_save_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "saved"
    with tk.launch(model=tk.tiny_policy(), **FIELDS) as session:
        session.save(folder)
        session.grpo_step()
        with monkeypatch.context() as patch:
            patch.setattr("toolkit.live.json.dumps", lambda *a, **k: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.save(folder)
        assert json.loads((folder / SESSION_FILE).read_text())["records"] == []
        session.save(folder)
        assert len(json.loads((folder / SESSION_FILE).read_text())["records"]) == 1
        os.replace(folder, tmp_path / ".saved.previous")  # as if the process died between the two renames
        with tk.resume(folder) as resumed:
            assert len(resumed.history) == 1
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.tex").write_text("")
        with pytest.raises(SpecError, match="holds something that is no saved session"):
            session.save(tmp_path / "mine")
        session.grpo_step()


def test_own_tasks_are_asked_for_again(tmp_path: Path) -> None:
    mine = tk.Task("mine", [("1+1=", "2"), ("2+2=", "4")] * 4)
    with tk.launch(model=tk.tiny_policy(), task=mine, **FIELDS) as session:
        session.save(tmp_path / "saved")
    with pytest.raises(SpecError, match=r"ran a task of your own; give it again: tk.resume"):
        tk.resume(tmp_path / "saved")
    with tk.resume(tmp_path / "saved", task=mine) as session:
        assert session.task is mine


def test_bad_saves_are_clear_errors(straight: dict[str, Any], tmp_path: Path) -> None:
    import shutil

    with pytest.raises(FileNotFoundError, match="no session was saved there"):
        tk.resume(tmp_path / "nowhere")
    with pytest.raises(SpecError, match="save_period=2 does nothing without a checkpoint_dir"):
        tk.launch(model=tk.tiny_policy(), save_period=2)
    cut = tmp_path / "cut"
    shutil.copytree(straight["folder"], cut)
    index = cut / ".metadata"
    whole = index.read_bytes()
    for length in (0, 1, 40, len(whole) // 2, len(whole) - 1):
        index.write_bytes(whole[:length])
        with pytest.raises(SpecError, match="cannot be read: files are missing or cut off"):
            tk.resume(cut, ranks=1)
    index.write_bytes(whole)
    shard = next(cut.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(SpecError, match="cannot be read: files are missing or cut off"):
        tk.resume(cut)
    shard.unlink()
    with pytest.raises(SpecError, match="cannot be read: files are missing or cut off"):
        tk.resume(cut, ranks=1)
    (cut / SESSION_FILE).write_text((cut / SESSION_FILE).read_text()[:100])
    with pytest.raises(SpecError, match="is cut off, or of another version"):
        tk.resume(cut)


@pytest.mark.parametrize("layout", [{}, {"ranks": 2}, {"ranks": 2, "tensor_parallel_size": 2}], ids=["1", "2", "2 TP"])
def test_an_exported_model_is_the_trained_one_for_transformers(layout: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tk.launch(model=tk.tiny_policy(), precision="float32", **layout, **FIELDS) as session:
        session.grpo_step()
        folder = session.export(tmp_path / "model")
        ids = [[1, 5, 6, 7, 8, 2]]
        want = session.logprobs(ids)
        trained = session.run(weights)[0]
        with pytest.raises(SpecError, match="the folder is not empty"):
            session.export(folder)
        with pytest.raises(SpecError, match="is not a dtype"):
            session.export(tmp_path / "other", dtype="int8")
        session.grpo_step()
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, param in model.named_parameters():
        assert torch.equal(param, trained[f"{name}/weight"]), name
    logits = model(torch.tensor(ids)).logits.log_softmax(-1)
    found = logits[0, :-1].gather(-1, torch.tensor(ids)[0, 1:, None])[:, 0]
    torch.testing.assert_close(found, torch.from_numpy(want[0]), rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folder)("1+1=")["input_ids"] == [
        *AutoTokenizer.from_pretrained(tk.tiny_policy())("1+1=")["input_ids"]
    ]
    with tk.launch(model=folder, **FIELDS) as again:
        assert again.logprobs(ids).shape == want.shape


def test_a_tied_model_is_exported_with_its_tie(tied_model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    with tk.launch(model=tied_model, **FIELDS) as session:
        session.export(tmp_path / "model", dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_a_new_run_does_not_replace_an_old_ones_saves(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    with tk.launch(model=tk.tiny_policy(), checkpoint_dir=folder, **FIELDS) as session:
        session.grpo_step(2)
    with pytest.raises(SpecError, match=r"is not empty, and saving would replace.*tk.resume\(folder"):
        tk.launch(model=tk.tiny_policy(), checkpoint_dir=folder, **FIELDS)
    with tk.resume(folder, checkpoint_dir=folder) as session:
        session.grpo_step()
    with tk.resume(folder) as session:
        assert len(session.history) == 3
    with pytest.raises(SpecError, match="ranks=0"):
        tk.resume(folder, ranks=0)
    with pytest.raises(SpecError, match="checkpoint_dir=5: give a path"):
        tk.launch(model=tk.tiny_policy(), checkpoint_dir=5)  # type: ignore[arg-type]
