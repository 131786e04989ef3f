"""Run the notebooks and store outputs that read well anywhere.

    python notebooks/refresh.py                 # all of them; needs the `dev` extra and a Chrome or Chromium

Each plotly output gets a PNG beside it, because code hosts and offline HTML show nothing for plotly's own format. Widgets
and progress bars are dropped: without a kernel they only say "model not found".
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import nbformat
import plotly.io
from nbclient import NotebookClient

WIDTH = 760  # about that of a notebook; plotly's renderer in JupyterLab shows every pixel of the picture
PLOTLY, WIDGET = "application/vnd.plotly.v1+json", "application/vnd.jupyter.widget-view+json"


def keep(output: Any) -> bool:
    if output.output_type == "stream":
        return output.name == "stdout"
    return WIDGET not in output.get("data", {})


def add_picture(output: Any) -> None:
    figure = output.get("data", {}).get(PLOTLY)
    if figure is not None:
        picture = plotly.io.from_json(json.dumps({k: figure[k] for k in ("data", "layout")}))
        output.data["image/png"] = base64.b64encode(picture.to_image("png", width=WIDTH)).decode()


def refresh(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(path.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if keep(output)]
            for output in cell.outputs:
                add_picture(output)
    notebook.metadata.pop("widgets", None)
    notebook.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in [Path(p) for p in sys.argv[1:]] or sorted(Path(__file__).parent.glob("*.ipynb")):
        refresh(path)
