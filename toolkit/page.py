"""Records as one HTML page that needs nothing else: no network, no server, plotly's script inside, once.

Readable in light and dark, which the browser decides; without JavaScript it shows static pictures, where this machine can
draw them (kaleido and a Chrome or Chromium), and the tables in any case.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1b1b;--pale:#5f5f5f;--paper:#ffffff;--code:#f2f2f2}
@media (prefers-color-scheme:dark){:root{--ink:#e4e4e4;--pale:#a5a5a5;--paper:#111111;--code:#222222}
.js-plotly-plot .main-svg text{fill:#a5a5a5 !important}}
body{font-family:system-ui,sans-serif;line-height:1.45;color:var(--ink);background:var(--paper);max-width:70rem;
margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:3rem}
.verdict{font-size:1.1rem;border-left:.3rem solid #D55E00;padding-left:1rem}
pre{background:var(--code);padding:.5rem .8rem;overflow-x:auto}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;margin:.8rem 0}
td,th{padding:.2rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid #7f7f7f55}
img{max-width:100%}
footer{margin-top:3rem;color:var(--pale);font-size:.85rem}
a{color:inherit}
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a page.

    Attributes:
        title: its heading.
        command: the Python that made what it shows.
        body: HTML: what was found in words, and tables.
        figures: plotly figures, below the body.
    """

    title: str
    command: str
    body: str
    figures: Sequence[go.Figure] = field(default=())


def page(title: str, verdict: str, sections: Sequence[Section], *, footer: str = "", pictures: Sequence[str] = ()) -> str:
    """The page as text.

    Args:
        verdict: the answer, on top.
        footer: how it was made.
        pictures: a data URL for each figure of the sections in order, shown where no script runs; none leaves them out.
    """
    import plotly.offline

    stills = iter(pictures)
    parts = [_section(number, section, stills) for number, section in enumerate(sections, 1)]
    links = "".join(f"<li><a href='#part-{n}'>{html.escape(s.title)}</a></li>" for n, s in enumerate(sections, 1))
    contents = f"<nav aria-label='Contents'><ol>{links}</ol></nav>" if len(sections) > 1 else ""
    script = f"<script>{plotly.offline.get_plotlyjs()}</script>" if any(section.figures for section in sections) else ""
    still = "<noscript><style>.plotly-graph-div{display:none}</style></noscript>"
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>{still}{script}</head><body><main>"
        f"<h1>{html.escape(title)}</h1><p class='verdict'>{html.escape(verdict)}</p>{contents}{''.join(parts)}</main>"
        f"<footer>{html.escape(footer)}</footer></body></html>\n"
    )


def paragraphs(*texts: str) -> str:
    """Text as HTML paragraphs."""
    return "".join(f"<p>{html.escape(text)}</p>" for text in texts)


def table(frame: pd.DataFrame) -> str:
    """A frame as an HTML table; numbers to four digits."""
    return str(frame.to_html(index=False, border=0, float_format="{:.4g}".format, na_rep="–"))


def draw(figures: Iterable[go.Figure]) -> list[str]:
    """Each figure as an SVG data URL.

    Raises:
        ModuleNotFoundError: kaleido is not installed.
        Exception: whatever kaleido raises where it finds no browser, or the browser fails.
    """
    if importlib.util.find_spec("kaleido") is None:
        raise ModuleNotFoundError("kaleido is not installed (pip install 'kaleido>=1.1')")
    import plotly.io

    figures = list(figures)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.svg" for number in range(len(figures))]
        plotly.io.write_images(figures, files, width=980)
        return [f"data:image/svg+xml;base64,{base64.b64encode(file.read_bytes()).decode()}" for file in files]


def _section(number: int, section: Section, stills: Iterable[str]) -> str:
    figures = "".join(_figure(figure, next(iter(stills), "")) for figure in section.figures)
    command = f"<pre><code>{html.escape(section.command)}</code></pre>"
    body = f"<div class='scroll'>{section.body}</div>"
    return f"<section id='part-{number}'><h2>{number}. {html.escape(section.title)}</h2>{command}{body}{figures}</section>"


def _figure(figure: go.Figure, still: str) -> str:
    import plotly.io

    title = html.escape(" ".join((figure.layout.title.text or "").replace("<br>", " ").split()), quote=True)
    config = {"displaylogo": False, "responsive": True}
    drawn = plotly.io.to_html(figure, include_plotlyjs=False, full_html=False, config=config)
    image = f"<img src='{still}' alt='{title}'>" if still else f"<p>Picture (needs JavaScript): {title}</p>"
    return f"<figure style='margin:0' role='group' aria-label='{title}'>{drawn}<noscript>{image}</noscript></figure>"
