"""JupyterLab and a headless Chromium for tests/test_browser.py: start them, run cells, look at pixels and contrast."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
_OVERRIDES = {
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True
    },
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},  # all cells stay in the page
}  # fmt: skip
_LOCAL = re.compile(r"(https?|wss?)://(127\.0\.0\.1|localhost)[:/]|data:|blob:")
_NOTEBOOK = "window.jupyterapp?.shell?.currentWidget"

# Distinct colours (4 bits a channel) of a picture, and the share of pixels that stand out from the commonest.
_LOOK = """async (url) => {
  const image = new Image(); image.src = url; await image.decode();
  const canvas = document.createElement('canvas'); canvas.width = image.width; canvas.height = image.height;
  const context = canvas.getContext('2d'); context.drawImage(image, 0, 0);
  const data = context.getImageData(0, 0, image.width, image.height).data, counts = new Map();
  for (let i = 0; i < data.length; i += 4) {
    const key = (data[i] >> 4) << 8 | (data[i + 1] >> 4) << 4 | data[i + 2] >> 4;
    counts.set(key, (counts.get(key) || 0) + 1);
  }
  const [common] = [...counts].sort((a, b) => b[1] - a[1])[0];
  let ink = 0;
  for (const [key, count] of counts) {
    const far = [8, 4, 0].some(shift => Math.abs(((key >> shift) & 15) - ((common >> shift) & 15)) > 3);
    if (far) ink += count;
  }
  return {colours: counts.size, ink: ink / (data.length / 4), background: [8, 4, 0].map(s => ((common >> s) & 15) * 17)};
}"""

# Contrast (WCAG) of every visible text below an element with what is behind it, worst first; disabled controls left out.
_CONTRAST = """(root) => {
  const parse = text => { const n = text.match(/[\\d.]+/g); return n ? n.map(Number) : null; };
  const linear = v => v / 255 <= .03928 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
  const luminance = rgb => .2126 * linear(rgb[0]) + .7152 * linear(rgb[1]) + .0722 * linear(rgb[2]);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parse(getComputedStyle(e).backgroundColor);
      if (colour && (colour.length < 4 || colour[3] > .5)) return colour.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of root.querySelectorAll('*')) {
    const own = [...element.childNodes].filter(n => n.nodeType === 3).map(n => n.textContent.trim()).join('');
    const text = own || (element.matches('input') ? element.value : '');
    const box = element.getBoundingClientRect();
    if (!text || !box.width || !box.height || element.closest('style, script, option, [disabled], .mod-hidden')) continue;
    const style = getComputedStyle(element);
    if (style.visibility === 'hidden' || style.display === 'none') continue;
    const colour = parse(element.namespaceURI.endsWith('svg') ? style.fill : style.color);
    if (!colour) continue;
    const a = luminance(colour), b = luminance(behind(element));
    const figure = Boolean(element.closest('.js-plotly-plot'));
    found.push({text: text.slice(0, 60), figure, contrast: (Math.max(a, b) + .05) / (Math.min(a, b) + .05)});
  }
  return found.sort((a, b) => a.contrast - b.contrast);
}"""


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """JupyterLab over a folder, on a port of its own of this machine; gives its address."""
    config = folder / ".config" / "labconfig"
    config.mkdir(parents=True)
    (config / "default_setting_overrides.json").write_text(json.dumps(_OVERRIDES))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "JUPYTER_CONFIG_DIR": str(folder / ".config"), "JUPYTER_DATA_DIR": str(folder / ".data"),
        "JUPYTER_RUNTIME_DIR": str(folder / ".runtime"), "IPYTHONDIR": str(folder / ".ipython"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }  # fmt: skip
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", f"--ServerApp.root_dir={folder}", "--IdentityProvider.token="]
    command += ["--ServerApp.disable_check_xsrf=True", "--LabApp.expose_app_in_browser=True"]
    log = (folder / "server.log").open("w")
    with log, subprocess.Popen(command, env=env, stdout=log, stderr=log) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_for(url, server, folder / "server.log")
            yield url
            for session in _api(url, "GET", "sessions"):
                _api(url, "DELETE", f"sessions/{session['id']}")
        finally:
            server.terminate()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        with contextlib.suppress(OSError):
            _api(url, "GET", "status")
            return
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not answer: {log.read_text()}")


def _api(url: str, method: str, path: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(f"{url}/api/{path}", method=method), timeout=60) as reply:
        text = reply.read()
        return json.loads(text) if text else None


class Lab:
    """A notebook open in JupyterLab in a page that reaches this machine only."""

    def __init__(self, page: Any, url: str, notebook: str) -> None:
        self.page, self.asked_outside, self.errors = page, list[str](), list[str]()
        page.set_default_timeout(120_000)
        page.route("**/*", self._route)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(f"{url}/lab/tree/{notebook}?reset")
        page.wait_for_function(f"() => {_NOTEBOOK}?.sessionContext?.session?.kernel?.status === 'idle'", timeout=180_000)

    def _route(self, route: Any) -> None:
        if _LOCAL.match(route.request.url):
            route.continue_()
        else:
            self.asked_outside.append(route.request.url)
            route.abort()

    def command(self, name: str, **arguments: Any) -> None:
        """Execute a command of JupyterLab's, and wait for it."""
        self.page.evaluate("([name, args]) => window.jupyterapp.commands.execute(name, args)", [name, arguments])

    def run_all(self, timeout_s: float) -> list[dict[str, Any]]:
        """Run the notebook; the outputs of all cells."""
        self.page.evaluate("window.ran = false; window.jupyterapp.commands.execute('notebook:run-all-cells')"
                           ".then(() => { window.ran = true; }); null")  # fmt: skip
        self.page.wait_for_function("() => window.ran", timeout=timeout_s * 1000)
        cells = f"{_NOTEBOOK}.content.widgets.filter(cell => cell.outputArea)"
        outputs: list[dict[str, Any]] = self.page.evaluate(f"{cells}.flatMap(cell => cell.outputArea.model.toJSON())")
        return outputs

    def start(self, source: str) -> None:
        """Begin to run a new cell at the end."""
        self.page.evaluate(
            """async (source) => {
              const notebook = window.jupyterapp.shell.currentWidget.content;
              notebook.activeCellIndex = notebook.widgets.length - 1;
              await window.jupyterapp.commands.execute('notebook:insert-cell-below');
              const cell = window.cell = notebook.activeCell;
              cell.model.sharedModel.setSource(source);
              window.ran = false;
              window.jupyterapp.commands.execute('notebook:run-cell').then(() => { window.ran = true; });
            }""",
            source,
        )

    def output(self, timeout_s: float = 120) -> str:
        """Wait for the cell that was started; what it shows as text, errors too."""
        self.page.wait_for_function("() => window.ran", timeout=timeout_s * 1000)
        texts = []
        for output in self.page.evaluate("window.cell.outputArea.model.toJSON()"):
            data = output.get("data", {}).get("text/plain", output.get("text", ""))
            texts.append(f"{output['ename']}: {output['evalue']}" if output["output_type"] == "error" else "".join(data))
        return "\n".join(texts)

    def run(self, source: str, timeout_s: float = 120) -> str:
        """Run a new cell at the end; what it shows as text."""
        self.start(source)
        return self.output(timeout_s)

    def shoot(self, name: str, element: Any = None) -> bytes:
        """A screenshot of an element, or of the page; kept in the folder of BROWSER_SHOTS, if that is set."""
        if element is not None:
            element.scroll_into_view_if_needed()
        picture: bytes = (element or self.page).screenshot()
        if folder := os.environ.get("BROWSER_SHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            (Path(folder) / f"{name}.png").write_bytes(picture)
        return picture

    def look(self, picture: bytes) -> dict[str, Any]:
        """How many colours a picture has, how much of it stands out from its background, and that."""
        seen: dict[str, Any] = self.page.evaluate(_LOOK, "data:image/png;base64," + base64.b64encode(picture).decode())
        return seen

    def contrasts(self, element: Any) -> list[dict[str, Any]]:
        """The contrast of each text below an element, worst first."""
        found: list[dict[str, Any]] = element.evaluate(_CONTRAST)
        return found
