"""The notebook and the workbench in a real JupyterLab and a headless Chromium, with no network but this machine.

`BROWSER_SHOTS=folder` keeps the screenshots; REQUIRE_BROWSER=1 makes a missing browser a failure.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .lab import CHROMIUM, FLAGS, ROOT, Lab, served

pytestmark = pytest.mark.browser

NOTEBOOK = "precision_tradeoffs.ipynb"
#: WCAG's for text; figures use a grey that keeps 4.5 on white and 4.2 on JupyterLab's dark pages.
TEXT, FIGURE_TEXT = 4.5, 4.0
PLOT = ".js-plotly-plot"


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The notebook, open."""
    missing = [name for name, there in {"playwright": importlib.util.find_spec("playwright"), "chromium": CHROMIUM}.items()
               if not there]  # fmt: skip
    if missing:
        assert os.environ.get("REQUIRE_BROWSER") != "1", f"no {' and no '.join(missing)}"
        pytest.skip(f"no {' and no '.join(missing)}")
    from playwright.sync_api import sync_playwright

    folder = tmp_path_factory.mktemp("lab")
    shutil.copy(ROOT / "notebooks" / NOTEBOOK, folder)
    with served(folder) as url, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=FLAGS)
        try:
            yield Lab(browser.new_page(viewport={"width": 1300, "height": 1800}), url, NOTEBOOK)
        finally:
            browser.close()


@pytest.fixture(scope="module")
def ran(lab: Lab) -> Lab:
    """The notebook, run from top to bottom."""
    outputs = lab.run_all(timeout_s=1500)
    assert [output for output in outputs if output["output_type"] == "error"] == []
    return lab


def assert_drawn(lab: Lab, name: str, plot: Any) -> None:
    """A plot shows marks and text, and not only the page behind it."""
    seen = lab.look(lab.shoot(name, plot))
    assert seen["colours"] >= 8, (name, seen)
    assert seen["ink"] >= 0.005, (name, seen)


def test_the_notebook_runs_and_its_figures_are_drawn(ran: Lab) -> None:
    plots = ran.page.locator(PLOT)
    assert plots.count() >= 7
    for place in range(plots.count()):
        assert_drawn(ran, f"notebook_{place}", plots.nth(place))
    blank = ran.look(ran.shoot("blank", ran.page.locator(".jp-InputPrompt").first))
    assert blank["colours"] < 8 or blank["ink"] < 0.2  # a piece of empty page is told from a plot
    assert "Error displaying widget" not in ran.page.inner_text(".jp-NotebookPanel")
    ran.shoot("notebook_page")


def test_picking_bfloat16_switches_the_running_session(ran: Lab) -> None:
    ran.run("picker.value = 'float32'\nsession = tk.launch(model=tk.tiny_policy(), output_dtype=picker, **recipe)")
    units = "session.output_dtype, session.units()['output_dtype'].unique().tolist()"
    assert ran.run(units) == "('float32', ['float32'])"
    ran.page.get_by_label("Output dtype").first.select_option("bfloat16")
    assert ran.run(units) == "('bfloat16', ['bfloat16'])"
    assert "step 1 (bfloat16 outputs)" in ran.run("session.grpo_step()")
    ran.run("session.output_dtype = 'float16'")  # and back: the widget shows what the session is
    assert ran.page.get_by_label("Output dtype").first.input_value() == "float16"


def test_an_interrupt_in_mid_step_stops_it_and_the_session_lives_on(ran: Lab) -> None:
    ran.start("session.grpo_step(500)")
    ran.page.wait_for_function(r"() => /GRPO\ssteps/.test(window.cell.outputArea.node.innerText)")
    ran.command("notebook:interrupt-kernel")
    shown = ran.output(60)
    assert "KeyboardInterrupt: stopped after " in shown
    taken = int(ran.run("len(session.history)"))
    assert taken < 500
    assert f"step {taken + 1} (" in ran.run("session.grpo_step()")
    ran.run("session.close()")


def test_the_workbench_by_keyboard(ran: Lab) -> None:
    page, bench = ran.page, ran.page.locator(".toolkit-workbench")
    launch = bench.get_by_role("button", name="Launch", exact=True)
    ran.shoot("bench_form", bench)
    bench.get_by_label("Model").focus()
    labels = []
    for _ in range(13):
        labels.append(page.evaluate("document.activeElement.labels?.[0]?.innerText"))
        page.keyboard.press("Tab")
    assert labels[:4] == ["Model", "Ranks", "Output dtype", "Tensor parallel size"]
    assert labels[-1] == "Predict at length"
    assert page.evaluate("document.activeElement.innerText") == "Launch"

    bench.get_by_label("Prompts per step").fill("8")
    bench.get_by_label("Generations per prompt").fill("4")
    bench.get_by_label("Ranks").focus()
    page.keyboard.press("Control+A")
    page.keyboard.type("two")
    bench.get_by_text("ranks='two' must be a whole number of at least 1.").wait_for()
    assert launch.is_disabled()
    ran.shoot("bench_bad_value", bench)
    page.keyboard.press("Control+A")
    page.keyboard.type("2")
    bench.get_by_text("ranks='two'").wait_for(state="detached")
    bench.get_by_text("Predicted peak of a training step").wait_for(timeout=120_000)
    assert launch.is_enabled()
    ran.shoot("bench_predicted", bench)
    launch.focus()
    page.keyboard.press("Enter")
    bench.get_by_text("Launched Session(").wait_for(timeout=120_000)
    assert not launch.is_visible()
    assert ran.run("bench.session.num_ranks") == "2"


def test_the_workbench_steps_switches_and_stops(ran: Lab) -> None:
    page, bench = ran.page, ran.page.locator(".toolkit-workbench")

    def press(name: str) -> None:
        bench.get_by_role("button", name=name, exact=True).click()

    bench.get_by_label("Steps").fill("3")
    press("Run")
    bench.get_by_text("Step 3 (float32 outputs)").wait_for(timeout=120_000)
    bench.get_by_label("Output dtype").last.select_option("bfloat16")
    bench.get_by_text("bfloat16 outputs from the next step on.").wait_for()
    assert ran.run("bench.session.units()['output_dtype'].unique().tolist()") == "['bfloat16']"
    press("Step")
    bench.get_by_text("Step 4 (bfloat16 outputs)").wait_for(timeout=120_000)
    page.wait_for_function("() => [...document.querySelectorAll('.toolkit-workbench .annotation-text')]"
                           ".some(text => text.textContent === '→ bfloat16')")  # fmt: skip
    for place in range(2):
        assert_drawn(ran, f"bench_figure_{place}", bench.locator(PLOT).nth(place))

    bench.get_by_label("Steps").fill("500")
    press("Run")
    page.wait_for_function("() => /Step \\d+: /.test(document.querySelector('.toolkit-workbench').innerText)")
    press("Stop")
    bench.get_by_role("button", name="Step", exact=True).and_(page.locator(":enabled")).wait_for()
    taken = int(ran.run("len(bench.records)"))
    assert taken < 500
    press("Step")
    bench.get_by_text(f"Step {taken + 1} (bfloat16 outputs)").wait_for(timeout=120_000)
    ran.shoot("bench_live", bench)


def test_the_dark_theme_is_legible(ran: Lab) -> None:
    page, bench = ran.page, ran.page.locator(".toolkit-workbench")
    bench.get_by_label("Steps").fill("some")  # an error is text, too
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        ran.command("apputils:change-theme", theme=theme)
        page.wait_for_function(f"() => document.body.dataset.jpThemeName === '{theme}'")
        page.wait_for_timeout(500)
        short = theme.split()[1].lower()
        picture = ran.look(ran.shoot(f"bench_{short}", bench))
        assert (max(picture["background"]) < 64) == (short == "dark")
        texts = ran.contrasts(bench)
        assert any("steps='some' must be a whole number" in text["text"] for text in texts)
        assert sum(text["figure"] for text in texts) > 20
        faint = [text for text in texts if text["contrast"] < (FIGURE_TEXT if text["figure"] else TEXT)]
        assert faint == [], theme
        assert_drawn(ran, f"notebook_{short}", page.locator(PLOT).first)
    bench.get_by_label("Steps").fill("5")


def test_closing_ends_the_ranks_and_keeps_the_figures(ran: Lab) -> None:
    bench = ran.page.locator(".toolkit-workbench")
    pids = ran.run("pids = bench.session._ranks.pids; pids")
    ran.run("bench.close()")
    bench.get_by_text("Closed. tk.workbench() makes another one.").wait_for()
    for pid in map(int, pids.strip("[]").split(",")):
        assert not Path(f"/proc/{pid}").exists()
    assert bench.locator(PLOT).count() == 2
    ran.shoot("bench_closed", bench)


def test_nothing_was_asked_of_the_network(ran: Lab) -> None:
    assert ran.asked_outside == []
    assert ran.errors == []
