"""What a newcomer meets first: the commands, the folders, cheap imports, and files that must agree with each other."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import toolkit as tk

from . import api, faults

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked_files() -> list[str]:
    out = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return out.stdout.split()


def test_top_level_is_exactly_what_the_design_says() -> None:
    top = {path.split("/")[0] for path in tracked_files()}
    visible = {name for name in top if not name.startswith(".")}
    assert visible == {
        "toolkit", "notebooks", "data", "tests", "environment.yml", "pyproject.toml", "README.md", "LICENSE"
    }  # fmt: skip


def readme_command(heading: str) -> str:
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", (ROOT / "README.md").read_text(), re.M | re.S)
    assert section, f"README has no section {heading}"
    blocks = re.findall(r"^```bash\n(.*?)^```$", section[1], re.M | re.S)
    assert len(blocks) == 1, f"{heading} must hold exactly one bash block"
    (command,) = blocks[0].splitlines()
    return command


def test_each_readme_block_is_the_one_command() -> None:
    assert (
        readme_command("Quick start")
        == "pip install -e . && jupyter lab --notebook-dir=. notebooks/precision_tradeoffs.ipynb"
    )
    assert readme_command("Tests") == "pip install -e '.[test]' && pytest"


def test_the_readmes_fault_table_is_what_the_tests_cause() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    first = lines.index("| what happens | what you see | what survives |")
    shown = [line for line in lines[first : first + 30] if line.startswith("|")]
    assert sorted(shown) == sorted(faults.table()), "python -m tests.faults prints it"


def test_the_api_reference_is_what_the_code_says() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    first = lines.index("| call | what it does |")
    assert lines[first : first + len(api.table())] == api.table(), "python -m tests.api prints it"
    assert (ROOT / "toolkit/API.md").read_text() == api.reference(), "python -m tests.api --full > toolkit/API.md"
    assert api.undocumented() == []


def test_environment_yml_installs_this_project_and_a_python_it_supports() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    *conda, pip_section = environment["dependencies"]
    assert pip_section == {"pip": ["-e .[test]"]}  # every other version is declared once, in pyproject.toml
    python = next(d for d in conda if d.startswith("python="))
    from packaging.specifiers import SpecifierSet

    assert SpecifierSet(PROJECT["requires-python"]).contains(python.removeprefix("python="))
    assert {d.split("=")[0] for d in conda} == {"python", "pip"}


def test_every_dependency_has_an_upper_bound() -> None:
    for requirement in PROJECT["dependencies"]:
        assert "<" in requirement or "==" in requirement, requirement
    assert any(r.startswith("triton<3.9") for r in PROJECT["dependencies"])


def test_importing_the_toolkit_and_its_extension_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, toolkit as tk\n"
        "tk.dtype_picker; tk.launch; tk.PolicySpec(model='m'); tk.GRPOConfig(); tk.tiny_policy(); tk.load_recipe\n"
        "tk.predict_memory\n"
        "tk.tradeoffs\n"
        "from toolkit import launcher\n"  # in the background a form imports what its checks and its prediction need
        "launcher.Launcher._import, launcher.PAUSE_SECONDS = (lambda self: None), 1e6\n"
        "bench = tk.workbench(); assert 'Launch' in bench.launcher.button.description and bench._repr_mimebundle_()\n"
        "bench.close()\n"
        "import toolkit.magics, toolkit.tradeoff_grid, toolkit.tradeoff_report\n"
        "heavy = {'torch', 'transformers', 'nemo_automodel', 'pandas', 'plotly'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(subprocess.CalledProcessError):  # and this test can fail
        subprocess.run([sys.executable, "-c", "import torch\n" + code], check=True, stderr=subprocess.DEVNULL)


def test_every_public_name_resolves_and_stays_itself_after_the_modules_are_imported() -> None:
    for module in (ROOT / "toolkit").glob("*.py"):
        importlib.import_module(f"toolkit.{module.stem}" if module.stem != "__init__" else "toolkit")
    for name in tk.__all__:
        assert callable(getattr(tk, name)), f"tk.{name} is {getattr(tk, name)!r}"  # a module of that name would shadow it
        assert getattr(tk, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        tk.nonsense  # noqa: B018


def test_modules_are_of_readable_size() -> None:
    for module in (ROOT / "toolkit").glob("*.py"):
        lines = len(module.read_text().splitlines())
        assert lines <= 350, f"{module.name} has {lines} lines"


def test_shipped_weights_are_small_and_their_accuracy_is_recorded() -> None:
    weights = list((ROOT / "data").rglob("*.safetensors"))
    assert [w.parent.name for w in weights] == ["tiny_policy"]
    assert sum(w.stat().st_size for w in weights) < 5_000_000


def test_nothing_names_a_machine_or_a_registry() -> None:
    banned = re.compile(r"/work/|/root/|/opt/|pypi\.org|files\.pythonhosted|registry\.npmjs")
    for path in tracked_files():
        if path.endswith((".safetensors", ".png")) or path == "tests/test_packaging.py":
            continue
        text = (ROOT / path).read_text(errors="replace")
        assert not banned.search(text), f"{path}: {banned.search(text)}"
