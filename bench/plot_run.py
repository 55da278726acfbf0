"""Draw a run from its ``metrics.jsonl``: loss, accuracy, and the loss scale with the steps it skipped.

    python bench/plot_run.py outputs/latest --out run.png

Needs the extra ``plot``. A run without a loss scale shows the gradient norm in its place.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, StrMethodFormatter

from mprun.errors import MprunError
from mprun.report.summary import count_text, number_text
from mprun.tracking import read_metrics

Records = list[dict[str, Any]]

# Okabe and Ito's palette: told apart by colour-blind readers, too.
BLUE, VERMILION, GREEN, GREY, INK = "#0072B2", "#D55E00", "#009E73", "#8A8F98", "#2B2F36"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run_dir", type=Path, help="a run folder")
    parser.add_argument("--out", type=Path, required=True, help="the picture to write: .png, .svg or .pdf")
    args = parser.parse_args()
    try:
        records = read_metrics(args.run_dir, effective=True)
    except MprunError as error:
        print(f"plot_run: {error}", file=sys.stderr)
        return error.exit_code
    draw(records, load_json(args.run_dir / "result.json"), args.run_dir.resolve().name).savefig(args.out, dpi=160)
    print(args.out)
    return 0


def draw(records: Records, result: dict[str, Any], fallback_name: str) -> Figure:
    """The picture of a run: two or three panels over the applied steps."""
    panels = [draw_loss]
    if series(records, "val", "val/top1")[0]:
        panels.append(draw_top1)
    scales = series(records, "train", "precision/loss_scale")[1]
    panels.append(draw_scale if any(scale != 1 for scale in scales) else draw_grad_norm)

    layout = ConstrainedLayoutEngine(h_pad=0.07, w_pad=0.08)
    figure = Figure(figsize=(7.2, 1.1 + 1.75 * len(panels)), layout=layout, facecolor="white")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    last = max((record.get("step", 0) for record in records), default=1) or 1
    for panel, axis in zip(panels, axes, strict=True):
        prepare(axis)
        panel(axis, records)
        # Room on the left: a search for the loss scale happens at step 0.
        axis.set_xlim(-0.02 * last, 1.02 * last)
    axes[-1].set_xlabel("applied steps", color=INK)
    axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    axes[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes[0].set_title(subtitle(records, result), loc="left", fontsize=9, color=GREY, pad=8)
    axes[0].annotate(
        str(result.get("name") or fallback_name), (0, 1), xycoords="axes fraction", xytext=(0, 27),
        textcoords="offset points", fontsize=13, fontweight="bold", color=INK,
    )  # fmt: skip
    figure.align_ylabels(axes)
    return figure


def draw_loss(axis: Axes, records: Records) -> None:
    steps, losses = series(records, "train", "train/loss")
    axis.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=0.8)
    axis.plot(steps, smooth(losses), color=BLUE, linewidth=1.6, label="train")
    axis.plot(
        *series(records, "val", "val/loss"), color=VERMILION, linewidth=1.4, marker="o", markersize=3, label="val"
    )
    axis.set_ylabel("loss", color=INK)
    positive = [loss for loss in losses if math.isfinite(loss) and loss > 0]
    if positive and max(positive) > 20 * min(positive):
        axis.set_yscale("log")
        # Ticks at 1, 2 and 5, or a curve within one decade has a single number beside it.
        axis.yaxis.set_major_locator(
            LogLocator(subs=(1.0, 2.0, 5.0) if max(positive) < 1e3 * min(positive) else (1.0,))
        )
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.yaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
    legend(axis, "upper right")


def draw_top1(axis: Axes, records: Records) -> None:
    for name, label, colour in (("ema/top1", "EMA", GREEN), ("val/top1", "val", VERMILION)):
        steps, values = series(records, "val", name)
        if steps:
            axis.plot(steps, values, color=colour, linewidth=1.4, marker="o", markersize=3, label=label)
    steps, values = series(records, "val", "val/top1")
    best = max(range(len(values)), key=lambda index: (math.isfinite(values[index]), values[index]))
    axis.plot(steps[best], values[best], "o", markersize=8, markerfacecolor="none", markeredgecolor=INK)
    axis.annotate(
        number_text(values[best]), (steps[best], values[best]), xytext=(0, -16), textcoords="offset points",
        ha="right" if steps[best] > 0.9 * steps[-1] else "center", fontsize=9, color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.85},
    )  # fmt: skip
    axis.set_ylabel("top-1", color=INK)
    axis.margins(y=0.12)
    legend(axis, "lower right")


def draw_scale(axis: Axes, records: Records) -> None:
    known = [r for r in records if r["kind"] in ("train", "skip") and r.get("precision/loss_scale")]
    axis.step(
        [r["step"] for r in known], [r["precision/loss_scale"] for r in known], where="post", color=BLUE, linewidth=1.6
    )
    skips = [r for r in known if r["kind"] == "skip"]
    if skips:
        steps, scales = [r["step"] for r in skips], [r["precision/loss_scale"] for r in skips]
        label = f"{count_text(len(skips))} skipped"
        axis.plot(steps, scales, "x", color=VERMILION, markersize=5, markeredgewidth=1.3, label=label)
        legend(axis, "upper right")
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_locator(LogLocator(base=2, numticks=6))
    axis.set_ylabel("loss scale", color=INK)
    axis.margins(y=0.15)


def draw_grad_norm(axis: Axes, records: Records) -> None:
    steps, norms = series(records, "train", "train/grad_norm")
    axis.plot(steps, norms, color=BLUE, alpha=0.25, linewidth=0.8)
    axis.plot(steps, smooth(norms), color=BLUE, linewidth=1.6)
    axis.set_ylabel("gradient norm", color=INK)


def series(records: Records, kind: str, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric, where it was logged."""
    found = [(record["step"], record[name]) for record in records if record["kind"] == kind and name in record]
    return [step for step, _ in found], [value for _, value in found]


def smooth(values: list[float]) -> list[float]:
    """Mean over a window around each point, which does not lag behind a falling curve; NaN and inf are left out."""
    reach = len(values) // 60
    out = []
    for index in range(len(values)):
        near = [v for v in values[max(0, index - reach) : index + reach + 1] if math.isfinite(v)]
        out.append(sum(near) / len(near) if near else math.nan)
    return out


def prepare(axis: Axes) -> None:
    """Quiet axes: two spines, a light grid, small grey numbers."""
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color("#C9CDD3")
    axis.grid(axis="y", which="major", color="#E9EBEE", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(which="both", colors=GREY, labelsize=8.5, length=0)


def legend(axis: Axes, place: Literal["upper right", "lower right"]) -> None:
    """A legend without a frame, in the ink colour."""
    handles, labels = axis.get_legend_handles_labels()
    axis.legend(handles, labels, loc=place, frameon=False, fontsize=8.5, labelcolor=INK, handlelength=1.4)


def subtitle(records: Records, result: dict[str, Any]) -> str:
    """How it ended, in one line."""
    skipped = sum(record["kind"] == "skip" for record in records)
    parts = [
        str(result.get("status", "not finished")),
        f"{count_text(max((record.get('step', 0) for record in records), default=0))} steps applied",
        f"{count_text(skipped)} skipped",
    ]
    if best := result.get("best"):
        parts.append(f"best {best['metric']} {number_text(best['value'])} at step {count_text(best['step'])}")
    if speed := result.get("examples_per_s"):
        parts.append(f"{count_text(speed)} examples/s")
    return "  ·  ".join(parts)


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one while the run goes on."""
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    raise SystemExit(main())
