"""`python -m toolkit report`: one offline page whose figures carry its JSON's numbers; clean errors, clean interrupts."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.__main__ import main
from toolkit.page import Section, page

from .test_ranks import gone

QUICK = "--num-prompts-per-step 8 --num-generations-per-prompt 4 --max-new-tokens 5 --steps 2 --evaluate 20 --pictures False"


class Tags(HTMLParser):
    """Every address a page refers to, its scripts, headings and commands."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "poster")]
        if tag not in ("meta", "link", "img", "br", "hr", "input"):
            self._open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts[self._open[-1]][-1] += data


def parsed(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    tags.close()
    assert tags._open == []
    return tags


def figures(tags: Tags) -> list[dict[str, Any]]:
    """What each `Plotly.newPlot` of a page is given: data and layout."""
    found = []
    for script in tags.texts["script"]:
        if "Plotly.newPlot(" not in script or len(script) > 3_000_000:  # plotly itself
            continue
        start = script.index("Plotly.newPlot(")
        rest = script[script.index("[", start) :]
        data, end = json.JSONDecoder().raw_decode(rest)
        layout, _ = json.JSONDecoder().raw_decode(rest[end:].lstrip(", \n"))
        found.append({"data": data, "layout": layout})
    return found


def values(array: Any) -> np.ndarray[Any, Any]:
    """An array of a figure's JSON, plain or typed."""
    if isinstance(array, dict):
        return np.frombuffer(base64.b64decode(array["bdata"]), dtype=array["dtype"])
    return np.array(array)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tags, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("report")
    page, records = folder / "r.html", folder / "r.json"
    page.write_text("an old one")
    code = main(["report", "--model", "tiny_policy", *QUICK.split(), "--dtypes", "float32", "bf16",
                 "--out", str(page), "--json", str(records)])  # fmt: skip
    assert code == 0
    assert sorted(file.name for file in folder.iterdir()) == ["r.html", "r.json"]
    return parsed(page.read_text(encoding="utf-8")), json.loads(records.read_text())


@pytest.mark.slow
def test_the_page_needs_nothing_else_and_starts_with_the_verdict(made: tuple[Tags, dict[str, Any]]) -> None:
    tags, records = made
    assert all(address.startswith("#") for address in tags.addresses)
    assert sum(len(script) > 3_000_000 for script in tags.texts["script"]) == 1  # plotly itself, once
    assert tags.texts["p"][0] == records["verdict"]
    assert "prefers-color-scheme:dark" in tags.texts["style"][0]
    assert len(tags.texts["h2"]) == len(tags.texts["code"]) == 8
    assert [f["layout"]["title"]["text"] for f in figures(tags)]


@pytest.mark.slow
def test_its_figures_carry_the_numbers_of_the_json(made: tuple[Tags, dict[str, Any]]) -> None:
    tags, records = made
    by_title = {f["layout"]["title"]["text"]: f["data"] for f in figures(tags)}

    def data(start: str) -> Any:
        return next(data for title, data in by_title.items() if title.startswith(start))

    steps = [record for dtype in ("float32", "bfloat16") for record in records["steps"][dtype]]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    drawn = np.concatenate([values(trace["y"]) for trace in data("Reward ")[::2]])
    np.testing.assert_array_equal(drawn, [step["metrics"]["reward"] for step in steps])

    memory = records["tradeoffs"]["memory"]
    total = np.sum([values(trace["y"]) for trace in data("Peak ")], axis=0)
    assert total.max() * 2**20 == pytest.approx(memory["float32"]["peak_bytes"])
    compared = data("bfloat16 against float32: peak ")
    for trace, dtype in zip(compared[::2], ("float32", "bfloat16"), strict=True):
        assert values(trace["y"]).sum() * 2**20 == pytest.approx(memory[dtype]["peak_bytes"])

    divergence = records["tradeoffs"]["divergence"]["bfloat16"]
    scatter = data("float32 outputs against bfloat16 outputs")[0]
    assert sorted(values(scatter["x"])) == pytest.approx(sorted(divergence["tokens"]["prob_a"]))
    units = data("One FSDP unit at a time")[0]
    assert list(values(units["y"])) == pytest.approx(list(divergence["units"].values()))

    check = next(d for title, d in by_title.items() if "float64" in title)
    assert list(values(check[0]["y"])) == [row["max_abs_nats"] for row in records["check"]["modes"]]
    grid = [trace for trace in list(by_title.values())[-1] if trace["mode"] != "lines"]
    peaks = [row["peak_bytes"] for row in records["tradeoffs"]["rows"]]
    assert [values(trace["y"])[0] * 2**20 for trace in grid] == pytest.approx(peaks)


@pytest.mark.slow
def test_its_tables_have_units_and_its_json_every_record(made: tuple[Tags, dict[str, Any]]) -> None:
    tags, records = made
    cells = tags.texts["td"]
    assert any(cell.endswith(" MiB") for cell in cells)
    assert any(cell.endswith(" nats") for cell in cells)
    assert [e["summary"]["num_problems"] for e in records["evaluations"]] == [20, 20]
    assert records["edges"]["type"] == "EdgeReport"
    assert records["settings"]["num_prompts_per_step"] == 8
    assert {unit["output_dtype"] for unit in records["units"]} == {"float32"}
    assert records["failures"] == {}


BAD: list[tuple[str, str]] = [
    ("report --model nowhere", "model='nowhere': there is no such folder"),
    ("report --model tiny_policy --dtypes float32", "dtypes='float32': a report compares two"),
    ("report --model tiny_policy --dtypes float32 float64", "dtypes='float64' is not a dtype"),
    ("report --model tiny_policy --ranks none", "ranks='none' must be a whole number"),
    ("report --model tiny_policy --steps 0", "steps=0 must be a whole number of at least 1"),
    ("report --model tiny_policy --evaluate -1", "evaluate=-1 must be a whole number of at least 0"),
    ("report --model tiny_policy --pictures perhaps", "pictures='perhaps' must be True or False"),
    ("report --model tiny_policy --seed x", "seed='x' must be a whole number"),
    ("report --model tiny_policy --output-dtype bfloat16", "unrecognized arguments: --output-dtype"),
    ("report --model tiny_policy --out /proc/x.html", "out='/proc': nothing can be written there"),
    ("report --model tiny_policy --out FOLDER", "that is a folder; give the path of a file"),
    ("report --model tiny_policy --out FOLDER/x --json FOLDER/x", "is the file that the page goes to"),
    ("predict-memory tiny_policy --sequence-length 16", "needs --ranks"),
    ("predict-memory Qwen9 --ranks 2 --sequence-length 16", "model='Qwen9' is no known model"),
    ("report --ranks 2", "a report is of a model: --model tiny_policy"),
    ("nonsense", "invalid choice: 'nonsense'"),
    ("", "required: COMMAND"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_arguments_end_with_2_and_the_specs_own_message(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([word.replace("FOLDER", str(tmp_path)) for word in line.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_help_names_the_commands_and_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"--help": ["report", "predict-memory"], "report --help": ["--logprob-mode", "--dtypes", "--top-k"]}
    for line, words in asked.items():
        with pytest.raises(SystemExit) as ended:
            main(line.split())
        assert ended.value.code == 0
        text = capsys.readouterr().out
        assert all(word in text for word in words)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["launching", "GRPO step(s) with float32"])
def test_ctrl_c_leaves_no_process_and_no_file(moment: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "toolkit", "report", "--model", "tiny_policy", "--ranks", "2", *QUICK.split()]
    command += ["--steps", "100000", "--out", str(tmp_path / "r.html")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    while moment not in (said := process.stderr.readline()):
        assert said
    time.sleep(1)
    ranks = _children(process.pid)
    assert len(ranks) >= 1  # while launching, the server that is importing
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; no file was written and no rank is left" in rest
    assert "Traceback" not in rest
    assert "leaked" not in rest
    assert gone(ranks)
    assert list(tmp_path.iterdir()) == []


def _children(pid: int) -> list[int]:
    """All descendants of a process."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *_children(int(child))]
    return found


@pytest.mark.slow
def test_predict_memory_prints_and_writes_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "predict-memory tiny_policy --ranks 2 --sequence-length 16 --output-dtype bfloat16"
    assert main([*line.split(), "--json", str(tmp_path / "p.json")]) == 0
    found = json.loads((tmp_path / "p.json").read_text())
    assert found["output_dtype"] == "bfloat16"
    assert str(sum(found["categories"].values())) == str(found["peak_bytes"])
    out = capsys.readouterr().out
    assert "predicted peak" in out
    assert all(str(value) in out for value in found["categories"].values())


def test_a_page_shows_pictures_where_no_script_runs_and_escapes_what_it_is_told() -> None:
    import plotly.graph_objects as go

    figure = go.Figure(layout={"title": {"text": "A <b> & <br>finding"}})
    picture = "data:image/svg+xml;base64,QQ=="
    section = Section("S & T", "f('<x>')", "<p>body</p>", [figure, figure])
    text = page("t<i>tle", "a < b", [section], pictures=[picture])
    tags = parsed(text)
    assert "t<i>tle" in tags.texts["title"]
    assert tags.texts["p"][0] == "a < b"
    assert tags.texts["code"] == ["f('<x>')"]
    assert picture in tags.addresses
    assert "Picture (needs JavaScript): A <b> & finding" in tags.texts["p"]
    assert text.count("<img") == 1
    assert len(figures(tags)) == 2
    assert "<script" not in page("t", "v", [Section("no figure", "x", "")])
