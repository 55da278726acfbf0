"""A run in sentences: what ran and in which precision, how it ended, what was skipped and why, what the probe says is worst.

Each sentence has a level: ``good`` and ``bad`` are verdicts, ``warn`` is what a person should look at, ``plain`` is a fact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mprun.report.page_data import RunFiles
from mprun.report.probe_view import ACTIVATION, FLOW, GRADIENT, Grid, View, grid, relative_peak, short, underflow
from mprun.report.run_folders import first_line
from mprun.report.summary import bytes_text, count_text, counted, duration_text, number_text, scale_text

Said = tuple[str, str]

FORMAT = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}
# From which part of the gradients on an underflow is worth a look, and from which distance to the limit a peak is.
LOOK_UNDERFLOW, LOOK_PEAK = 0.01, -3.0
ENDED = {
    "ok": "good", "diverged": "bad", "failed": "bad", "oom": "bad", "broken": "bad", "killed": "bad", "interrupted": "warn",
}  # fmt: skip


def said_of(run: RunFiles) -> list[Said]:
    """The sentences of a run, the end first."""
    found = [_end(run), ("plain", what(run)), ("plain", policy(run.config))]
    found += _skips(run)
    found += probe_words(run)
    return [(level, text) for level, text in found if text]


def level_of(status: str) -> str:
    """The level of a status."""
    return ENDED.get(status, "plain")


def _end(run: RunFiles) -> Said:
    result, row = run.result, run.status
    if not result:
        told = {
            "running": "The run goes on: this is how far it has come.",
            "killed": "The run was killed: it has no result, and no process holds its folder. What it had logged is here.",
        }
        unknown = "The run has no result: it was killed, or goes on. What it had logged is here."
        return level_of(row), told.get(row, unknown) + _reached(run)
    applied = result.get("steps_applied")
    after = f" after {counted(applied, 'applied step')}" if isinstance(applied, int) else ""
    if row == "ok":
        stopped = result.get("stopped")
        why = f" ({stopped})" if stopped else ""
        return "good", f"The run came to its end{after}{why}.{_scores(result)}"
    ends = {
        "diverged": "The run diverged",
        "oom": "The run ran out of memory",
        "interrupted": "The run was interrupted",
    }
    reason = first_line(result.get("error"))
    name, _, message = reason.partition(": ")
    reason = message if name.endswith(("Error", "Exception", "Interrupt")) and message else reason
    return level_of(row), f"{ends.get(row, 'The run failed')}{after}{': ' + reason if reason else '.'}"


def _reached(run: RunFiles) -> str:
    last = next((record for record in reversed(run.records) if record.get("kind") in ("train", "val")), None)
    return f" Last logged: step {count_text(last['step'])}." if last and isinstance(last.get("step"), int) else ""


def _scores(result: Mapping[str, Any]) -> str:
    final, best = result.get("final") or {}, result.get("best") or {}
    parts = [
        f"{name} {number_text(final[name])}"
        for name in ("val/loss", "val/top1", "ema/loss", "ema/top1")
        if name in final
    ]
    text = f" Final: {', '.join(parts)}." if parts else ""
    if best:
        text += f" Best {best['metric']} {number_text(best['value'])} at step {count_text(best['step'])}."
    return text


def what(run: RunFiles) -> str:
    """Which model on which data, for how long, on what."""
    config, env = run.config, run.env
    model, dataset = (config.get(f"{group}.name", "?") for group in ("model", "dataset"))
    parts = [
        f"{model} on {dataset}, {config.get('optimizer.name', '?')} at learning rate {config.get('optimizer.lr', '?')}"
    ]
    batch, windows = config.get("train.batch_size"), config.get("train.accumulate")
    if batch:
        parts.append(f"batch {batch}" + (f" x {windows} micro-batches" if windows and windows != 1 else ""))
    parts.append(f"seed {config.get('seed', '?')}")
    device = env.get("device")
    if isinstance(device, dict) and device.get("name"):
        parts.append(f"on {device['name']} ({device.get('type')})")
    result = run.result
    if isinstance(result.get("wall_s"), int | float):
        parts.append(f"in {duration_text(result['wall_s'])}")
    if isinstance(result.get("examples_per_s"), int | float):
        parts.append(f"{count_text(result['examples_per_s'])} examples/s")
    if isinstance(result.get("peak_memory"), int | float):
        parts.append(f"peak memory {bytes_text(result['peak_memory'])}")
    return "Ran " + ", ".join(parts) + "."


def policy(config: Mapping[str, Any]) -> str:
    """The precision policy in one sentence; empty where the configuration says nothing of it."""

    def get(key: str) -> Any:
        return config.get(f"precision.{key}")

    mode, compute = get("mode"), FORMAT.get(str(get("compute_dtype")), str(get("compute_dtype")))
    if mode is None:
        return ""
    product = {
        "full": f"everything in {compute}"
        + (", matrix products with TF32 inputs" if get("fp32_matmul") == "tf32" else ""),
        "autocast": f"products and convolutions in {compute}, parameters and range-sensitive operations in FP32 (autocast)",
        "master": f"parameters and arithmetic in {compute}, FP32 master parameters and optimizer state (master)",
        "pure": f"everything in {compute}, without FP32 masters (pure: a negative control)",
    }
    rules = get("fp32_modules") or []
    kept = f", {', '.join(map(str, rules))} kept in FP32" if rules else ""
    evaluated = f", evaluated in {FORMAT.get(str(get('eval_dtype')), get('eval_dtype'))}" if get("eval_dtype") else ""
    return f"Precision {get('name')}: {product.get(str(mode), str(mode))}{kept}{evaluated}; {_scale(config)}."


def _scale(config: Mapping[str, Any]) -> str:
    kind, init = (config.get(f"precision.loss_scale.{key}") for key in ("kind", "init"))
    if kind not in ("static", "dynamic") or not isinstance(init, int | float):
        return "no loss scale"
    if kind == "static":
        return f"static loss scale {scale_text(init)}"
    growth, back = (config.get(f"precision.loss_scale.{key}") for key in ("growth_interval", "backoff_factor"))
    return f"dynamic loss scale from {scale_text(init)} (x {back} on overflow, grows after {growth} applied steps)"


# --- skips --------------------------------------------------------------------------------------------------------------


def _skips(run: RunFiles) -> list[Said]:
    skips = run.of("skip")
    if not skips:
        scaled = run.config.get("precision.loss_scale.kind") != "none" and run.records
        return [("good", "No step was skipped.")] if scaled else []
    reasons = Counter(str(record.get("reason")) for record in skips)
    attempts = max((int(record.get("attempt") or 0) for record in run.records), default=0)
    rate = len(skips) / max(attempts, 1)
    parts = ", ".join(f"{count_text(count)} {reason.replace('_', ' ')}" for reason, count in reasons.most_common())
    last = skips[-1]
    were = "was" if len(skips) == 1 else "were"
    text = f"{count_text(len(skips))} of {counted(attempts, 'attempt')} {were} skipped ({rate:.1%}): {parts}; "
    text += f"the last at attempt {last.get('attempt')}."
    dynamic = run.config.get("precision.loss_scale.kind") == "dynamic"
    if reasons.keys() == {"overflow"} and dynamic and _at_start(skips) and attempts > len(skips):
        text += " All of them at the start, one after another: the dynamic scale searching downwards, which is benign."
        rate = 0.0
    found = [("warn" if rate > 0.05 or reasons.keys() - {"overflow"} else "plain", text)]
    return found + _postmortems(run)


def _at_start(skips: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the skips are the first attempts and nothing else."""
    return [record.get("attempt") for record in skips] == list(range(1, len(skips) + 1))


def _postmortems(run: RunFiles) -> list[Said]:
    """What was found out about skips: the benign ones in one sentence, of the others each verdict once."""
    events = [record for record in run.of("event") if record.get("event") == "postmortem"]
    search = [record for record in events if record.get("verdict") == "scale_search"]
    found: list[Said] = []
    if search:
        many = f" (and of {len(search) - 1} earlier)" if len(search) > 1 else ""
        found.append(("plain", f"Post-mortem, attempt {search[-1].get('attempt')}{many}: {search[-1].get('message')}"))
    others = [record for record in events if record not in search]
    texts = Counter(str(record.get("message")) for record in others)
    for text, count in texts.most_common(8):
        first = next(record for record in others if str(record.get("message")) == text)
        times = f" ({count} times)" if count > 1 else ""
        found.append(("bad", f"Post-mortem, attempt {first.get('attempt')}: {text}{times}"))
    if len(texts) > 8:
        found.append(("plain", f"{len(texts) - 8} further verdicts are among the events below."))
    return found


# --- the probe ----------------------------------------------------------------------------------------------------------


def probe_words(run: RunFiles) -> list[Said]:
    """The worst underflow of gradients and the peak nearest to the limit; nothing without samples."""
    view = run.view
    if view is None:
        return []
    lost = grid(run.probe, view, FLOW, underflow)
    found = [_underflow(run, view, lost)]
    for tensor, noun in ((ACTIVATION, "activations"), (GRADIENT, "activation gradients")):
        found.append(_peak(run, view, grid(run.probe, view, tensor, relative_peak), noun, tensor))
    return [said for said in found if said[1]]


def _underflow(run: RunFiles, view: View, lost: Grid) -> Said:
    worst = lost.worst()
    if worst is None:
        return "plain", ""
    module, attempt, value = worst
    sample = run.probe[lost.attempts.index(attempt)]
    scale = view.scale(sample, GRADIENT)
    form = short(view.form(module))
    many = int(((lost.values >= LOOK_UNDERFLOW).any(axis=1)).sum())
    at = "without a loss scale" if scale == 1 else f"at scale {scale_text(scale)}"
    verb = "would underflow" if view.what_if else "underflow"
    if value < 1e-5:
        at = at if view.what_if else "at the loss scale of the sample"
        return "good", f"In every module less than 0.001% of the activation gradients {verb} {form} {at}."
    text = f"{module or 'The model'}: {_percent(value)} of activation gradients {verb} {form} {at} (attempt {attempt})"
    others = f"; {many} modules lose 1% or more" if many > 1 else ""
    level = "warn" if value >= LOOK_UNDERFLOW and not view.what_if else "plain"
    return level, f"{text}, the most of {len(lost.modules)} modules{others}."


def _peak(run: RunFiles, view: View, peaks: Grid, noun: str, tensor: str) -> Said:
    skipped = {record.get("attempt") for record in run.of("skip")}
    if told := _not_finite(peaks, noun, skipped if tensor == GRADIENT else set()):
        return "warn", told
    worst = peaks.worst()
    if worst is None:
        return "plain", ""
    module, attempt, value = worst
    form = view.form(module)
    if value < LOOK_PEAK:
        return "plain", ""
    if tensor == GRADIENT and attempt in skipped:
        return "plain", ""  # the step was skipped for it, and that is told already
    sample = run.probe[peaks.attempts.index(attempt)]
    scale = view.scale(sample, tensor)
    times = f", times the scale {scale_text(scale)}," if scale != 1 else ""
    amax = float(form.max) * 2.0**value
    over = amax >= form.overflow
    then = (
        f"beyond {short(form)}'s largest number, {form.max:g}"
        if over
        else f"{2.0**value:.0%} of {short(form)}'s largest number, {form.max:g}"
    )
    would = " (FP16 is only a question here: the run is FP32)" if view.what_if else ""
    level = "bad" if over and not view.what_if else "warn"
    return level, f"{module or 'The model'}: {noun} reach {amax:.3g}{times} at attempt {attempt}: {then}{would}."


def _not_finite(peaks: Grid, noun: str, told: set[Any]) -> str:
    """Where the first inf or NaN is, but in the attempts that were ``told`` of already; empty where there is none."""
    bad = np.isinf(peaks.values)
    for column, attempt in enumerate(peaks.attempts):
        modules = [name or "the model" for name, found in zip(peaks.modules, bad[:, column], strict=True) if found]
        if modules and attempt not in told:
            where = modules[0] if len(modules) == 1 else f"{len(modules)} of {len(peaks.modules)} modules"
            return f"At attempt {attempt} {noun} of {where} hold inf or NaN."
    return ""


def _percent(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 else f"{100 * value:.2g}%"
