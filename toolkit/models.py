"""The models that come with the toolkit."""

from __future__ import annotations

from pathlib import Path


def tiny_policy() -> Path:
    """Folder of the tiny policy: a 1 M parameter Qwen3 that can half do two-digit sums (data/tiny_policy/README.md)."""
    package = Path(__file__).parent
    beside = package.parent / "data" / "tiny_policy"  # a checkout or an editable install
    return beside if beside.is_dir() else package / "data" / "tiny_policy"  # a wheel
