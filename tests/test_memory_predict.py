"""A prediction is the measured step to the byte, wherever both can be had; the figures of the 8B model come out again."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit.ledger import CATEGORIES
from toolkit.memory import MemoryReport
from toolkit.memory_predict import predict_settings
from toolkit.memory_report import peaks_table
from toolkit.models import known_models

from .test_readme import rows as readme_rows

B, T = 8, 65  # sequences of each rank, tokens of each
DTYPES = ("float32", "bfloat16", "float16")
MODES: tuple[dict[str, Any], ...] = (
    {"logprob_mode": "materialized", "logprob_chunk_size": None},
    {"logprob_mode": "chunked", "logprob_chunk_size": 16},
    {"logprob_mode": "linear", "logprob_chunk_size": None},
)
LAYOUTS = [{"ranks": 1}, {"ranks": 2}, {"ranks": 2, "tensor_parallel_size": 2}]
ORDERS = (False, "full", "selective", "hf")
BUILDS = list(itertools.product(LAYOUTS, ORDERS))


@pytest.mark.parametrize(
    ("build", "layout", "checkpointing"),
    [pytest.param(i, *both, marks=[pytest.mark.slow] if i % 4 else []) for i, both in enumerate(BUILDS)],
)
def test_the_prediction_is_the_measured_step(build: int, layout: dict[str, int], checkpointing: Any) -> None:
    """24 settings: 12 builds, each with two of the three output dtypes and of the three logprob modes, in turn.

    Asked for is 0.5 %, and found is 0, but for tensor parallelism over gloo: its threads let go of a collective's input when
    they get to it, so on a busy machine one hidden tensor more may be alive at the peak (2 % at this size).
    """
    fields = {**layout, "activation_checkpointing": checkpointing}
    pairs = [(DTYPES[build % 3], MODES[build % 3]), (DTYPES[(build + 1) % 3], MODES[(build + 2) % 3])]
    measured = []
    with tk.launch(model=tk.tiny_policy(), **fields) as session:
        for dtype, mode in pairs:
            session.set_live(**mode)
            measured.append(session.memory(output_dtype=dtype, num_sequences=B, sequence_length=T))
    predicted = predict_settings(
        {str(i): {"output_dtype": dtype, **mode} for i, (dtype, mode) in enumerate(pairs)},
        model=tk.tiny_policy(), sequence_length=T, micro_batch_size=B, device="cpu", **fields,
    )  # fmt: skip
    for (_, mode), real, made in zip(pairs, measured, predicted.values(), strict=True):
        bound = 0.02 if "tensor_parallel_size" in layout else 0.005
        assert made.peak_bytes == pytest.approx(real.peak_bytes, rel=bound)
        assert made.phase_peaks == pytest.approx(real.phase_peaks, rel=bound)
        assert made.boundaries == real.boundaries
        if mode["logprob_mode"] == "linear":  # picks the scored columns; without data a prediction takes the last one too
            assert sum(made.saved_by_dtype.values()) == pytest.approx(sum(real.saved_by_dtype.values()), rel=0.005)
        else:
            assert made.saved_by_dtype == real.saved_by_dtype
        assert made.logit_buffers == real.logit_buffers


def shrunk(name: str) -> dict[str, Any]:
    """A known model's config at a size that runs here."""
    small = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = known_models()[name] | small
    if "num_experts" in config:
        config |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return config


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Qwen2.5-1.5B", {"ranks": 1}),
        ("Qwen2.5-1.5B", {"ranks": 2, "tensor_parallel_size": 2}),  # a tied head, which AutoModel has to tie again
        ("Llama-3.2-1B", {"ranks": 1}),
        ("Qwen3-30B-A3B", {"ranks": 1}),
    ],
)
def test_each_family_of_the_known_models_has_a_real_twin(name: str, layout: dict[str, int], tmp_path: Path) -> None:
    """Fake tensors don't check dtypes or values; a small real one does. Norms, tied heads and experts differ by family."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_config(AutoConfig.for_model(**shrunk(name))).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tk.tiny_policy()).save_pretrained(tmp_path)
    fields: dict[str, Any] = {"activation_checkpointing": "full", "output_dtype": "bfloat16", **layout}
    with tk.launch(model=tmp_path, **fields) as session:
        real = session.memory(num_sequences=4, sequence_length=33)
    made = tk.predict_memory(tmp_path, sequence_length=33, micro_batch_size=4, device="cpu", **fields)
    assert {made.categories[n] for n in ("parameters", "optimizer")} == {
        real.categories[n] for n in ("parameters", "optimizer")
    }
    bound = 0.02 if layout["ranks"] > 1 else 0.005  # gloo's threads, see above
    assert made.peak_bytes == pytest.approx(real.peak_bytes, rel=bound)
    assert made.phase_peaks == pytest.approx(real.phase_peaks, rel=bound)


def test_gradients_of_earlier_micro_batches_live_through_the_forward(one_rank: tk.Session) -> None:
    """What a step of several micro-batches holds beyond one: the sharded gradients, here all parameters in float32."""
    one, two = predict_settings(
        {"one": {}, "two": {"num_micro_batches": 2}},
        model=tk.tiny_policy(), ranks=1, sequence_length=T, micro_batch_size=4, device="cpu",
    ).values()  # fmt: skip
    elements = int(one_rank.units().query("rank == 0")["num_parameters"].sum())
    assert one.num_sequences == two.num_sequences == 4
    more = two.phase_peaks["forward"] - one.phase_peaks["forward"] - (two.categories["inputs"] - one.categories["inputs"])
    assert more == pytest.approx(4 * elements, rel=0.001)  # and the first one's logprobs, a kilobyte


BYTES_PER_LOGIT = [
    # ranks that share the vocabulary, mode, sequences, output dtype: alive at once in forward, loss, backward. A float32
    # copy is 4, a 16-bit one 2; a chunk is a quarter of the rows, so each of its float32 copies is 1.
    (1, "materialized", 1, "float32", 6, 8, 12),
    (1, "materialized", 1, "bfloat16", 2, 10, 12),
    (1, "materialized", 1, "float16", 4, 10, 12),
    (1, "materialized", 4, "float32", 6, 12, 12),
    (1, "materialized", 4, "bfloat16", 2, 14, 12),
    (1, "materialized", 4, "float16", 4, 14, 12),
    (1, "chunked", 4, "float32", 6, 5, 10),
    (1, "chunked", 4, "bfloat16", 2, 4, 6),
    (1, "chunked", 4, "float16", 4, 4, 6),
    (2, "materialized", 4, "float32", 6, 8, 12),
    (2, "materialized", 4, "bfloat16", 2, 10, 8),
    (2, "materialized", 4, "float16", 4, 10, 8),
    (2, "chunked", 4, "float32", 6, 5, 10),
    (2, "chunked", 4, "bfloat16", 2, 4, 6),
    (2, "chunked", 4, "float16", 4, 4, 6),
]


@pytest.fixture(scope="module")
def logit_reports() -> dict[str, MemoryReport]:
    def setting(tp: int, mode: str, sequences: int, dtype: str) -> dict[str, Any]:
        chunks = {"logprob_chunk_size": sequences * 128 // 4} if mode == "chunked" else {}
        sizes = {"tensor_parallel_size": tp, "micro_batch_size": sequences}
        return {"logprob_mode": mode, "output_dtype": dtype, **sizes, **chunks}

    settings = {str(row[:4]): setting(*row[:4]) for row in BYTES_PER_LOGIT}
    return predict_settings(settings, model=tk.tiny_policy(), ranks=2, sequence_length=128, device="cpu")


@pytest.mark.parametrize("row", BYTES_PER_LOGIT, ids=lambda row: "-".join(map(str, row[:4])))
def test_bytes_per_logit_element(row: tuple[Any, ...], logit_reports: dict[str, MemoryReport]) -> None:
    """A 16-bit output costs 2 bytes where all logits are upcast at once, and saves 4 where they are in chunks."""
    report = logit_reports[str(row[:4])]
    for phase, expected in zip(("forward", "loss", "backward"), row[4:], strict=True):
        assert report.logit_phase_peaks[phase] / report.logit_elements == pytest.approx(expected, abs=0.15), phase
    assert report.logit_peak_bytes == max(report.logit_phase_peaks.values())


def test_the_table_has_a_row_per_setting_and_a_column_per_dtype(logit_reports: dict[str, MemoryReport]) -> None:
    rows = [row for row in BYTES_PER_LOGIT if row[1] == "chunked" and row[3] != "float16"]
    table = peaks_table(logit_reports[str(row[:4])] for row in rows)
    assert list(table.columns) == ["float32, GiB", "bfloat16, GiB", "difference, GiB", "peak in"]
    assert list(table.index.get_level_values("tensor_parallel_size")) == [1, 2]
    assert set(table["peak in"]) == {"backward"}
    assert ((table["bfloat16, GiB"] - table["float32, GiB"]).round(2) == table["difference, GiB"]).all()


CHUNKED = {"tensor_parallel_size": 2, "logprob_mode": "chunked"}
CHUNKED |= {"logprob_chunk_size": 2048}  # 1024 tokens of each of the two sequences, which is how the lab counted
#: The rows of the README's table: its first two cells, the name used here, the settings.
README_ROWS = [
    ("TP=1, all at once", "none", "TP1 none", {}),
    ("", "inside the units (AutoModel)", "TP1 full", {"activation_checkpointing": "full"}),
    ("", "outside (Hugging Face)", "TP1 hf", {"activation_checkpointing": "hf"}),
    ("TP=2, chunks of 2 × 1024 tokens", "none", "TP2 chunked none", CHUNKED),
    ("", "inside", "TP2 chunked full", {"activation_checkpointing": "full", **CHUNKED}),
    ("", "outside", "TP2 chunked hf", {"activation_checkpointing": "hf", **CHUNKED}),
    ("TP=1, linear (no logits)", "inside", "TP1 linear", {"activation_checkpointing": "full", "logprob_mode": "linear"}),
    ("TP=2, linear", "inside", "TP2 linear",
     {"activation_checkpointing": "full", "logprob_mode": "linear", "tensor_parallel_size": 2}),
]  # fmt: skip


@pytest.fixture(scope="module")
def eight_billion() -> dict[str, MemoryReport]:
    settings = {name: fields for _, _, name, fields in README_ROWS}
    settings["TP2 whole full"] = {"activation_checkpointing": "full", "tensor_parallel_size": 2}
    return predict_settings(
        {
            f"{name} {dtype}": {**fields, "output_dtype": dtype}
            for name, fields in settings.items()
            for dtype in ("float32", "bfloat16")
        },
        model="Qwen3-8B",
        ranks=8,
        sequence_length=4096,
        micro_batch_size=2,
        device="cuda",
    )


@pytest.mark.slow
@pytest.mark.parametrize("row", range(len(README_ROWS)), ids=[name for _, _, name, _ in README_ROWS])
def test_the_readme_shows_what_is_predicted(row: int, eight_billion: dict[str, MemoryReport]) -> None:
    logprobs, checkpointing, name, _ = README_ROWS[row]
    shown = readme_rows("| logprobs | activation checkpointing |")
    assert len(shown) == len(README_ROWS)
    GiB = [eight_billion[f"{name} {dtype}"].peak_bytes / 2**30 for dtype in ("float32", "bfloat16")]
    difference = f"{GiB[1] - GiB[0]:+.2f}".replace("-", "−").replace("+0.00", "0.00").replace("−0.00", "0.00")
    assert shown[row] == [logprobs, checkpointing, f"{GiB[0]:.2f}", f"{GiB[1]:.2f}", difference]


#: GiB per rank, as in the lab that found the method, but for two. TP2 chunked bfloat16 was 19.07 there: AdamW's temporaries
#: spanned all parameters; here AdamW is the fused one, which has none, so that backward is the peak. TP2 whole
#: bfloat16 was 22.82: NeMo-RL's vocabulary-parallel loss holds 14 bytes per logit, ours 10 (BYTES_PER_LOGIT), 2.32 GiB less.
EIGHT_BILLION = {
    "TP1 none float32": 86.47,
    "TP1 full float32": 29.57,
    "TP1 full bfloat16": 31.69,
    "TP1 hf bfloat16": 31.69,
    "TP2 chunked full float32": 20.70,
    "TP2 chunked full bfloat16": 18.18,
    "TP2 chunked hf float32": 22.82,
    "TP2 whole full bfloat16": 20.50,
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", EIGHT_BILLION)
def test_the_figures_of_qwen3_8b_on_8_ranks_come_out_again(setting: str, eight_billion: dict[str, MemoryReport]) -> None:
    report = eight_billion[setting]
    assert report.peak_bytes / 2**30 == pytest.approx(EIGHT_BILLION[setting], rel=0.02)
    assert tuple(report.categories) == CATEGORIES
    assert sum(report.categories.values()) == report.peak_bytes
    elements = 8_190_735_360 / 8
    assert report.categories["parameters"] == pytest.approx(4 * elements, rel=0.001)
    assert report.categories["optimizer"] == pytest.approx(8 * elements, rel=0.001)
    assert report.source == "predicted"
    assert "uncalibrated" in report.checked_against
    assert report.per_rank_peak_bytes == [report.peak_bytes]
    assert (report.ranks, report.model) == (8, "Qwen3-8B")


PARAMETERS = {
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Llama-3.3-70B": 70_553_706_496,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
}


def test_known_models_have_the_published_number_of_parameters() -> None:
    """So a wrong width, depth or head shows; and each file is a causal language model's config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    found = {}
    for name, config in known_models().items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        found[name] = sum(p.numel() for p in model.parameters())
    assert found == PARAMETERS


@pytest.mark.slow
def test_a_config_object_and_a_name_with_its_organisation_are_the_known_model() -> None:
    from transformers import AutoConfig

    fields = {"ranks": 64, "sequence_length": 16}
    named = tk.predict_memory("Qwen/qwen3-0.6b", **fields)
    given = tk.predict_memory(AutoConfig.for_model(**known_models()["Qwen3-0.6B"]), **fields)
    assert given.peak_bytes == named.peak_bytes
    assert (named.model, given.model) == ("Qwen3-0.6B", "Qwen3Config")


def test_predicting_leaves_the_kernel_and_a_live_session_alone(two_ranks: tk.Session) -> None:
    import multiprocessing

    import torch.distributed as dist

    before = two_ranks.logprobs([[1, 2, 3]])
    children = set(multiprocessing.active_children())
    joined = dist.is_initialized() and dist.get_backend()
    report = tk.predict_memory(tk.tiny_policy(), ranks=4, sequence_length=9)
    assert (dist.is_initialized() and dist.get_backend()) == joined
    assert set(multiprocessing.active_children()) == children
    assert (two_ranks.logprobs([[1, 2, 3]]) == before).all()
    assert json.loads(report.to_json())["source"] == "predicted"
    assert repr(report).startswith("MemoryReport: predicted peak ")


def test_ctrl_c_ends_a_prediction_and_leaves_no_process() -> None:
    import multiprocessing
    import os
    import signal
    import threading

    children = set(multiprocessing.active_children())
    timer = threading.Timer(6.0, lambda: os.kill(os.getpid(), signal.SIGINT))  # well inside: this one takes 20 CPU seconds
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        tk.predict_memory("Qwen3-32B", ranks=64, sequence_length=16, activation_checkpointing="full")
    timer.join()
    assert set(multiprocessing.active_children()) == children


def config_folder(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(known_models()["Qwen3-8B"] | changes))
    return folder


@pytest.mark.parametrize(
    ("model", "fields", "reason"),
    [
        ("Qwen3-9B", {}, "no known model. Known are Llama-3.1-8B, .*Qwen3-8B"),
        (8, {}, "must be a known model's name"),
        ("Qwen3-14B", {"tensor_parallel_size": 16, "ranks": 16}, "does not divide num_attention_heads=40"),
        ("Qwen3-8B", {"tensor_parallel_size": 3, "ranks": 8}, "ranks=8 is not divisible"),
        ("Qwen3-8B", {"sequence_length": 40961}, "more than the 40960 positions"),
        ("Qwen3-8B", {"sequence_length": 1}, "at least 2"),
        ("Qwen3-8B", {"micro_batch_size": 0}, "micro_batch_size=0"),
        ("Qwen3-8B", {"num_micro_batches": 1.5}, "num_micro_batches=1.5"),
        ("Qwen3-8B", {"device": "tpu"}, "device='tpu'"),
        ("Qwen3-8B", {"learning_rate": 1e-4}, "'learning_rate' plays no part"),
        ("Qwen3-8B", {"cpu_offload": True}, "cpu_offload=True cannot be predicted"),
        ("Qwen3-8B", {"attn_implementation": "flash_attention_2"}, "no fake kernels"),
        ("Qwen3-8B", {"outptu_dtype": "float32"}, "Did you mean 'output_dtype'"),
        ("Qwen3-0.6B", {"autocast": False}, "without autocast"),
    ],
)
def test_bad_requests_are_named_before_anything_starts(model: Any, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(tk.SpecError, match=reason):
        tk.predict_memory(model, **{"ranks": 8, "sequence_length": 64, **fields})


def test_bad_configs_are_named(tmp_path: Path) -> None:
    with pytest.raises(tk.SpecError, match="no multiple of its num_key_value_heads=5"):
        tk.predict_memory(config_folder(tmp_path, num_key_value_heads=5), ranks=1, sequence_length=8)
    with pytest.raises(tk.SpecError, match="no causal language model"):
        tk.predict_memory(config_folder(tmp_path, architectures=["BertModel"]), ranks=1, sequence_length=8)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        tk.predict_memory(tmp_path / "nothing", ranks=1, sequence_length=8)


def test_a_model_that_fails_while_it_is_built_raises_and_leaves_no_process(tmp_path: Path) -> None:
    import multiprocessing

    children = set(multiprocessing.active_children())
    with pytest.raises(tk.SpecError, match="cannot be loaded.*nonsense"):
        tk.predict_memory(config_folder(tmp_path, hidden_act="nonsense"), ranks=1, sequence_length=8)
    assert set(multiprocessing.active_children()) == children
