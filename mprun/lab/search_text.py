"""What a search found, for people: the verdict, a table of modules with the evidence, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mprun.lab.evaluate import ALL
from mprun.lab.found import Found
from mprun.report.memory import print_facts
from mprun.report.summary import counted, duration_text

STYLES = {"found": "green", "empty": "green", "interrupted": "yellow", "none": "red"}


def verdict(found: Found, policy: str) -> str:
    """The outcome in one line."""
    if found.fp32_modules is None:
        said = "no set of FP32 modules suffices" if found.status == "none" else "interrupted before any set was found"
        return f"{policy}: {said}"
    if not found.fp32_modules:
        return f"{policy}: no module needs FP32"
    count = len(found.fp32_modules)
    return f"{policy}: {count} module{'s' if count > 1 else ''} must stay FP32" + (
        " (the best set so far)" if found.status == "interrupted" else ""
    )


def certainty(found: Found) -> str:
    """What is known of the set."""
    known = found.minimum
    if known is None:
        return ""
    if known.smallest:
        said = "the smallest: every smaller set was tested and fails" if known.items else "empty, the smallest there is"
    elif known.one_minimal:
        said = "1-minimal: it fails without any single one of them; a smaller set of others is not ruled out"
    else:
        said = "it passes; whether all of it is needed is not known"
    return f"{said}; search.budget ended" if known.budget_spent and found.status != "interrupted" else said


def print_found(console: Console, found: Found, policy: str) -> None:
    """Print verdict, table and facts."""
    style = STYLES[found.status]
    console.print()
    console.rule(Text(verdict(found, policy), style=f"bold {style}"), align="left", style=style)
    if found.cause is not None:
        console.print(Text(f"{found.cause.kind}: {found.cause.message}"), soft_wrap=False)
        console.print()
    if found.evidence:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
        for heading, width in (("module", 12), ("class", 6), ("by itself", 12), ("left in half", 12)):
            table.add_column(heading, overflow="fold", min_width=width)
        for one in found.evidence:
            table.add_row(Text(one.path), Text(one.cls), Text(one.alone or "-"), Text(one.without))
        console.print(table)
        console.print()
    print_facts(console, [(label, text) for label, text in facts(found) if text])


def facts(found: Found) -> Sequence[tuple[str, str]]:
    """Label and text: how sure, how close, what it took."""
    gradients, curve = "", ""
    if found.evaluation is not None:
        worst = max(found.evaluation.states, key=lambda state: state.margin)
        where = "all together" if worst.worst == ALL else worst.worst
        limit = f"{worst.margin:.2g} of the limit ({where})"
        gradients = f"error {worst.error:.2g}, at worst {limit}, at {len(found.evaluation.states)} states"
    if found.tracking is not None:
        curve = found.tracking.why
        if skips := len(found.tracking.curve.skips):
            curve += f"; {skips} skipped"
    work = (
        f"{counted(found.tests, 'set')} of {counted(found.candidates, 'candidate')}, {counted(found.evaluations, 'evaluation')}, "
        f"{counted(found.runs, 'short run')}, {duration_text(found.seconds)}"
    )
    return [("the set is", certainty(found)), ("gradients", gradients), ("loss", curve), ("tested", work)]
