"""One HTML file that needs nothing else: words, tables, and plots whose script lies in the page, compressed. Imports no torch.

plotly's script is 4.8 MB, and 2.0 MB as gzip in base64; the browser unpacks it (``DecompressionStream``, in every browser since
2023) and says so where it cannot. plotly itself is not imported: a figure is a plain dict of its JSON, and its script is a
file of the package. Where the extra ``plot`` is not installed, the page has its words and tables, and a line for the plots.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mprun.training.env import atomic_write_text

NO_PLOTLY = "plots are left out: they need the extra, pip install 'mprun[plot]'"


@dataclass(frozen=True)
class Plot:
    """A figure: plotly's ``data`` and ``layout`` as plain values. ``key`` is its id in the page, of letters and ``-``."""

    key: str
    title: str
    figure: dict[str, Any]
    note: str = ""
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """A heading and what is below it: HTML text and plots. Neighbouring plots share a row where the window is wide enough."""

    title: str
    parts: Sequence[str | Plot]


@dataclass(frozen=True)
class Page:
    """A page. ``head`` is HTML below the title; ``status`` is a word with its level: good, warn, bad or plain."""

    title: str
    status: tuple[str, str]
    head: str
    sections: Sequence[Section]


def render(page: Page) -> str:
    """The page as HTML."""
    plots = [part for section in page.sections for part in section.parts if isinstance(part, Plot)]
    script = packed_plotly() if plots else None
    head = page.head if script or not plots else page.head + note(NO_PLOTLY)
    body = "".join(_section(section, drawn=script is not None) for section in page.sections)
    word, level = page.status
    scripts = "" if script is None else (
        f'<script type="application/json" id="figures">{_figures(plots)}</script>\n'
        f'<script type="text/plain" id="plotly">{script}</script>\n'
    )  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(page.title)}</title>\n<style>\n{_asset('page.css')}</style></head>\n<body><main>\n"
        '<div id="trouble"></div><noscript><p><b>'
        "The plots are drawn by a script, and scripts are switched off here.</b></p></noscript>\n"
        f'<h1>{escape(page.title)}<span class="status {level}">{escape(word)}</span></h1>\n{head}\n{body}'
        f"</main>\n{scripts}<script>\n{_asset('page.js')}</script>\n</body></html>\n"
    )


def save(page: Page, path: Path) -> None:
    """Write the page, whole or not at all.

    Raises:
        OSError: the disk refuses.
    """
    atomic_write_text(path, render(page))


def packed_plotly() -> str | None:
    """The script of plotly, gzip in base64; None where the extra ``plot`` is not installed."""
    spec = find_spec("plotly")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "package_data" / "plotly.min.js"
    return _packed(path) if path.is_file() else None


@cache
def _packed(path: Path) -> str:
    return base64.b64encode(gzip.compress(path.read_bytes(), 6, mtime=0)).decode("ascii")


def _asset(name: str) -> str:
    return (files("mprun.report") / "assets" / name).read_text(encoding="utf-8")


def _section(section: Section, *, drawn: bool) -> str:
    blocks: list[str] = []
    for row, several in _rows(section.parts):
        if several and drawn:
            blocks.append(f'<div class="grid">{"".join(row)}</div>')
        elif not several:
            blocks += row
    return f"<section><h2>{escape(section.title)}</h2>\n{''.join(blocks)}</section>\n"


def _rows(parts: Sequence[str | Plot]) -> Iterator[tuple[list[str], bool]]:
    """The parts as HTML, neighbouring plots together; and whether it is plots."""
    plots: list[str] = []
    for part in parts:
        if isinstance(part, Plot):
            plots.append(_figure(part))
            continue
        if plots:
            yield plots, True
            plots = []
        yield [part], False
    if plots:
        yield plots, True


def _figure(plot: Plot) -> str:
    height = plot.figure["layout"]["height"]
    below = f'<p class="note">{escape(plot.note)}</p>' if plot.note else ""
    return (
        f"<figure{' class=wide' * plot.wide}><h3>{escape(plot.title)}</h3>{below}"
        f'<div class="plot" id="{plot.key}" style="height:{height}px"></div></figure>\n'
    )


def _figures(plots: Sequence[Plot]) -> str:
    found = {plot.key: plot.figure for plot in plots}
    assert len(found) == len(plots), "every plot has a key of its own"
    # "</script" in a string would end the element; JSON reads the escape as the same text.
    return json.dumps(plain(found), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def plain(value: Any) -> Any:
    """JSON of six digits: what is drawn needs no more. NaN and infinity are gaps."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


# --- words and tables ---------------------------------------------------------------------------------------------------


def escape(text: object) -> str:
    """Text that HTML takes literally."""
    return html.escape(str(text), quote=True)


def note(text: str) -> str:
    """A quiet line."""
    return f'<p class="note">{escape(text)}</p>\n'


def words(said: Sequence[tuple[str, str]]) -> str:
    """Sentences, each with a level (good, warn, bad or plain) that colours its border."""
    return (
        '<ul class="words">' + "".join(f'<li class="{level}">{escape(text)}</li>' for level, text in said) + "</ul>\n"
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], *, levels: dict[str, str] | None = None) -> str:
    """A table that scrolls; numbers to the right, cells of a word in ``levels`` in that word's colour."""
    numeric = [
        bool(rows) and all(_number(row[index]) or row[index] in ("", "-", None) for row in rows)
        for index in range(len(columns))
    ]
    head = "".join(
        f"<th{' class=number' * right}>{escape(name)}</th>" for name, right in zip(columns, numeric, strict=True)
    )
    body = "".join(
        "<tr>" + "".join(_cell(cell, right, levels or {}) for cell, right in zip(row, numeric, strict=True)) + "</tr>\n"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n'


def _cell(cell: Any, right: bool, levels: dict[str, str]) -> str:
    text = "" if cell is None else str(cell)
    classes = [
        *(["number"] if right else []),
        *(["long"] if len(text) > 60 else []),
        *([levels[text]] if text in levels else []),
    ]
    attribute = f' class="{" ".join(classes)}"' if classes else ""
    return f"<td{attribute}>{escape(text)}</td>"


def _number(cell: Any) -> bool:
    text = str(cell).replace(",", "").replace("%", "").split(" ±")[0].strip()
    try:
        float(text)
    except ValueError:
        return False
    return True


def folded(summary: str, inside: str) -> str:
    """Something that is opened by a click."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>\n"
