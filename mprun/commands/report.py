"""``mprun report [RUN | SWEEP | COMPARISON | latest]``: one HTML page that needs nothing else, from the folder alone.

    mprun report                                 the newest run
    mprun report outputs/x/20260101-120000-abc   any run, also one that goes on, was killed or failed
    mprun report outputs/sweeps/x/20260101-...   a sweep, or any folder above runs: table, curves, how they ended
    mprun report outputs/compare/x/20260101-...  what compare, diagnose or search found
    --out FILE    where to write it; report.html in the folder by default

The page opens from the disk, without a network: verdicts in words, curves, loss scale and skips, heatmaps of what each module
loses to its format, memory, environment and configuration. What a folder does not hold is left out, with a line that says why.
Secrets in the configuration are masked. Plots need the extra: ``pip install 'mprun[plot]'``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mprun.commands.flags import parse
from mprun.errors import ConfigError, MprunError
from mprun.report.html_page import Page, save
from mprun.report.page_data import RunFiles
from mprun.report.page_run import run_page
from mprun.report.probe_view import sound, with_flow
from mprun.report.run_folders import CONFIG, LOADER, RESULT, flatten, read_run
from mprun.report.summary import shown_path
from mprun.runs import LATEST, OUTPUTS, SWEEP_FILE
from mprun.tracking.jsonl import METRICS_FILE, read_metrics, read_probe
from mprun.tracking.masking import masked
from mprun.training.env import from_json

REPORT, COMPARISON = "report.html", "compare.json"
LAB = ("compare", "diagnose", "search")


def run(words: Sequence[str]) -> int:
    """Write the page, and print its name. Returns 0.

    Raises:
        ConfigError: there is no such folder, it holds no run, or the file cannot be written.
    """
    asked = parse(words, "report", valued=("--out",))
    if len(asked.plain) > 1:
        raise ConfigError(
            f"report makes one page, not {' and '.join(asked.plain)}: give one folder; a sweep's has all its runs"
        )
    folder = folder_of(asked.plain[0] if asked.plain else LATEST)
    out = Path(asked.one("--out") or folder / REPORT).expanduser()
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise ConfigError(
            f"--out {out}: {'this is a folder' if out.is_dir() else f'there is no folder {out.parent}'}; give a file"
        )
    page = page_of(folder)
    try:
        save(page, out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror or error}): say where with --out FILE") from error
    print(out)
    return 0


def folder_of(target: str) -> Path:
    """The folder that ``target`` means: itself, the one around a file in it, or the newest run.

    Raises:
        ConfigError: there is none.
    """
    path = Path(OUTPUTS) / LATEST if target == LATEST else Path(target).expanduser()
    if not path.exists():
        what = "there is no run yet" if target == LATEST else "no such folder"
        raise ConfigError(f"report {target}: {what} ({path}); give a run, a sweep, or latest")
    path = path.parent if path.is_file() else path
    return shown_path(path.resolve())


def page_of(folder: Path) -> Page:
    """The page of a run, a sweep or what a command of the lab found, whichever ``folder`` holds.

    Raises:
        ConfigError: none of them.
    """
    if (folder / COMPARISON).is_file():
        from mprun.commands.report_many import comparison_page

        return comparison_page(folder)
    own = (folder / CONFIG).is_file() or (folder / RESULT).is_file()
    if (folder / SWEEP_FILE).is_file() or not own:
        from mprun.commands.report_many import sweep_page

        return sweep_page(folder)
    files = read_files(folder)
    if str(files.config.get("command")) in LAB or str(files.result.get("command")) in LAB:
        from mprun.commands.report_many import lab_page

        return lab_page(files)
    return run_page(files)


def read_files(folder: Path, result: dict[str, Any] | None = None) -> RunFiles:
    """A run folder as it is; what cannot be read is a line of its ``problems``.

    Args:
        folder: of the run.
        result: what ``result.json`` will hold, for a run that is about to write it.
    """
    problems: list[str] = []
    row, records = read_run(folder), _records(folder, problems)
    config = _read(folder / CONFIG, problems, yaml.load, Loader=LOADER)
    config = masked(config) if isinstance(config, dict) else {}
    found = result if result is not None else _json(folder / RESULT, problems)
    env, memory, modules = (_json(folder / name, problems) for name in ("env.json", "memory.json", "modules.json"))
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True) if config else ""
    result = _sound(from_json(found)) if isinstance(found, dict) else {}
    return RunFiles(
        folder=folder,
        name=str(config.get("name") or result.get("name") or folder.name),
        status=str(result["status"]) if "status" in result else row.status,
        config=flatten(config),
        config_text=text,
        result=masked(result),
        records=records,
        probe=_samples(folder, records, problems),
        modules=[item for item in modules if isinstance(item, dict)] if isinstance(modules, list) else [],
        env=masked(env) if isinstance(env, dict) else {},
        memory=memory if isinstance(memory, dict) else {},
        traceback=masked(_read(folder / "error.txt", problems, str) or ""),
        problems=problems,
    )


def _sound(result: dict[str, Any]) -> dict[str, Any]:
    """``result.json`` without scores that are none: whoever edited the file by hand still gets the rest of the page."""
    final, best = result.get("final"), result.get("best")
    if final is not None:
        kept = final if isinstance(final, dict) else {}
        result = {**result, "final": {key: value for key, value in kept.items() if isinstance(value, int | float)}}
    if best is not None:
        fields = [best.get(key) for key in ("metric", "value", "step")] if isinstance(best, dict) else []
        whole = len(fields) == 3 and all(map(isinstance, fields, (str, int | float, int)))
        result = {**result, "best": best if whole else None}
    return result


def _records(folder: Path, problems: list[str]) -> list[dict[str, Any]]:
    try:
        found = read_metrics(folder, effective=True)
        return [masked(record) if record.get("kind") == "event" else record for record in found]
    except MprunError as error:
        if (folder / METRICS_FILE).exists():
            problems.append(f"Left out: {error}")
        return []


def _samples(folder: Path, records: Sequence[Mapping[str, Any]], problems: list[str]) -> list[dict[str, Any]]:
    """The samples of the probe that count."""
    try:
        found = read_probe(folder, effective=True, records=records or None)
    except MprunError as error:
        problems.append(f"The probe's samples are left out: {error}.")
        return []
    samples = [sample for one in found if (sample := sound(one)) is not None]
    if lost := len(found) - len(samples):
        problems.append(f"Left out: {lost} of {len(found)} samples of the probe, which are damaged.")
    return [dict(with_flow(sample)) for sample in samples]


def _json(path: Path, problems: list[str]) -> Any:
    return _read(path, problems, json.loads)


def _read(path: Path, problems: list[str], read: Any, **more: Any) -> Any:
    """What a file holds; None where it is missing, and a line where it is broken."""
    try:
        return read(path.read_text(encoding="utf-8"), **more)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, yaml.YAMLError) as error:
        problems.append(f"Left out: {path.name} cannot be read ({' '.join(str(error).split())[:160]}).")
        return None
