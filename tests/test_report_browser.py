"""The pages of ``mprun report`` in a real browser, from the disk: every plot is drawn, nothing is complained about or fetched."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from made_pages import full_run, records
from made_runs import failed, made_run, ok

from mprun.cli import main

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
# The marks that plotly draws for each kind of trace.
DRAWN = ("scatterlayer", "heatmaplayer", "barlayer")


def opened(page: Path, tmp_path: Path, *flags: str) -> tuple[str, str, list[str]]:
    """The page's document once its scripts are done, what the console said, and every address that was asked for."""
    log = tmp_path / f"{page.stem}-net.json"
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-sync", "--disable-default-apps", f"--user-data-dir={tmp_path / 'profile'}",
        "--enable-logging=stderr", f"--log-net-log={log}", "--virtual-time-budget=60000", "--window-size=1280,900", *flags, "--dump-dom",
        page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return done.stdout, "\n".join(console), asked_for(log)


def asked_for(log: Path) -> list[str]:
    """Addresses that the page asked for; what the browser asks for by itself (its clock, updates) has no origin."""
    content = json.loads(log.read_text(encoding="utf-8", errors="replace"))
    kind = content["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    found = [
        event["params"] for event in content["events"] if event["type"] == kind and "url" in event.get("params", {})
    ]
    return [
        event["url"]
        for event in found
        if event.get("initiator") != "not an origin" and not event["url"].startswith("data:")
    ]


def plots_of(document: str) -> dict[str, str]:
    """The part of the document that belongs to each plot."""
    starts = [(match.start(), match[1]) for match in re.finditer(r'<div class="plot[^"]*" id="([\w-]+)"', document)]
    ends = [start for start, _ in starts[1:]] + [document.index("</main>")]
    return {key: document[start:end] for (start, key), end in zip(starts, ends, strict=True)}


def holds(page: Path) -> dict[str, list[str]]:
    """Kinds of the traces of each figure that a page holds."""
    text = re.search(
        r'<script type="application/json" id="figures">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL
    )
    assert text
    return {key: [trace["type"] for trace in figure["data"]] for key, figure in json.loads(text[1]).items()}


def check(page: Path, tmp_path: Path, expected: set[str]) -> str:
    document, console, asked = opened(page, tmp_path)
    assert not console
    assert not asked
    assert 'data-state="ready"' in document
    plots, traces = plots_of(document), holds(page)
    assert plots.keys() == traces.keys() >= expected
    for key, part in plots.items():
        assert part.count('class="main-svg"') >= 1, key
        if "heatmap" in traces[key]:
            assert re.search(r'class="heatmaplayer.*?<image[^>]+href="data:image/png', part, re.DOTALL), key
        if "bar" in traces[key]:
            assert part.count('class="point"') >= 1, key
        if "scatter" in traces[key]:
            assert re.search(r'class="(js-line|point)"[^>]* d="M|class="point[^"]*"', part), key
    return document


def test_a_page_that_complains_and_fetches_is_noticed(tmp_path):
    page = tmp_path / "bad.html"
    page.write_text('<img src="http://mprun.invalid/x.png"><script>nothing.there()</script>', encoding="utf-8")
    _, console, asked = opened(page, tmp_path)
    assert "nothing is not defined" in console
    assert asked == ["http://mprun.invalid/x.png"]


def test_every_plot_of_a_run_is_drawn_from_the_disk(tmp_path):
    folder = full_run(tmp_path / 'a run, with <odd> & "letters"', steps=2000)
    assert main(["report", str(folder)]) == 0
    page = folder / "report.html"
    assert page.stat().st_size < 5_000_000
    check(page, tmp_path, {
        "loss", "top1", "lr", "grad-norm", "loss-scale", "underflow-activation-grad", "amax-activation-grad", "amax-activation", "exponents", "memory",
    })  # fmt: skip


def test_every_plot_of_a_sweep_is_drawn_from_the_disk(tmp_path):
    for precision in ("fp32", "fp16_dynamic"):
        for seed in range(2):
            dead = (precision, seed) == ("fp16_dynamic", 1)
            made_run(tmp_path / "s" / f"{precision}-{seed}", "model=mlp", f"precision={precision}", seed=seed, records=records(100, seed=seed),
                     result=failed("NonFiniteError: nan") if dead else ok(0.1, 0.9))  # fmt: skip
    assert main(["report", str(tmp_path / "s"), "--out", str(tmp_path / "s.html")]) == 0
    check(tmp_path / "s.html", tmp_path, {"train-loss", "val-loss", "val-top1"})


def test_an_old_browser_is_told_why_there_are_no_plots(tmp_path):
    folder = full_run(tmp_path / "run", steps=20)
    assert main(["report", str(folder)]) == 0
    page = folder / "report.html"
    text = page.read_text(encoding="utf-8")
    page.write_text(
        text.replace("<script>\n//", "<script>delete window.DecompressionStream;</script><script>\n//", 1),
        encoding="utf-8",
    )
    document, _, _ = opened(page, tmp_path)
    assert 'data-state="failed"' in document
    assert re.search(r'id="trouble" class="shown">The plots are not drawn: this browser cannot unpack them', document)
    assert 'class="main-svg"' not in document
