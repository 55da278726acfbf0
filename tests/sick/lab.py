"""Ask an instrument of the lab about a case, and hold its answer against what is known by construction.

An answer is right if it names the cause, and the module or the sample where one is at fault. Its cure is applied to a plain run
and has to make it healthy: what an instrument says of its own verification does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from mprun.lab.candidates import uncovered
from mprun.lab.diagnose import Diagnosis, diagnose
from mprun.lab.reference import short_run
from mprun.lab.search import search
from mprun.training.env import step_rng
from mprun.training.postmortem import examine
from mprun.training.result import NONFINITE_GRAD, NONFINITE_LOSS, StepResult
from mprun.training.state import TrainState
from mprun.training.step import train_step
from mprun.training.verdict import SCALE_SEARCH, UNREPRODUCED, Verdict
from tests.sick.cases import Case, Control, rule
from tests.sick.run import config_of, healthy, run

FEW = 3  # of the skips of a run, the first so many are examined
# What search calls a cause of the kinds that no FP32 module cures.
SEARCH_KINDS = {"divergence": ("learning_rate", "model", "divergence"), "bad_data": ("data",), "scale": ("scale",)}


@dataclass(frozen=True)
class Answer:
    """What an instrument said.

    Attributes:
        kind: its word for the cause; ``nothing`` where it finds nothing wrong.
        said: in its own words, one line.
        modules: whom it blames.
        samples: ids that it blames.
        cure: overrides that it proposes; None where it proposes none that are overrides.
    """

    kind: str
    said: str
    modules: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()
    cure: tuple[str, ...] | None = None


# --- asking -----------------------------------------------------------------------------------------------------------


def verdicts(words: Sequence[str]) -> list[Verdict]:
    """Post-mortems of the first skips of a run, and of the step that ends it, as the loop makes them."""
    config = config_of(words)
    found: list[Verdict] = []
    losses: list[float] = []

    def watch(state: TrainState, window: Sequence[object]) -> StepResult:
        rng = step_rng(state.device)
        result = train_step(state, window)  # type: ignore[arg-type]
        row = result.read()
        if row.applied:
            losses.append(row.loss)
        last = row.outcome in (NONFINITE_LOSS, NONFINITE_GRAD) or row.consecutive_skips >= state.loss_scale.patience
        if not row.applied and (last or len(found) < FEW):
            first_loss = losses[0] if losses else None
            found.append(examine(state, window, loss_scale=row.loss_scale, rng=rng, first_loss=first_loss))  # type: ignore[arg-type]
        return result

    short_run(config, steps=config.train.steps or 0, watch=watch)
    return found


def ask_postmortem(words: Sequence[str]) -> Answer:
    """The gravest of the verdicts: the last one that is more than a scale search, else the last one."""
    found = verdicts(words)
    if not found:
        return Answer("nothing", "no step was skipped")
    grave = [verdict for verdict in found if verdict.kind not in (SCALE_SEARCH, UNREPRODUCED)]
    verdict = (grave or found)[-1]
    cure = rule(*verdict.fp32_modules) if verdict.fp32_modules else None
    if verdict.kind == SCALE_SEARCH and verdict.largest_scale:
        lowest = min(verdict.largest_scale, 2.0**-14)
        cure = (f"precision.loss_scale.init={verdict.largest_scale}", f"precision.loss_scale.min={lowest}")
    modules = (verdict.module,) if verdict.module else ()
    kind = "scale" if verdict.kind == SCALE_SEARCH else verdict.kind
    return Answer(kind, verdict.message, modules, verdict.sample_ids, cure)


def ask_diagnose(words: Sequence[str]) -> Answer:
    """What ``mprun diagnose`` finds; the modules are those it keeps out of FP16."""
    config = config_of([*words, "diagnose.every=5"])
    found = Diagnosis()
    diagnose(config, found, lambda line: None)
    if found.fp16 is None:
        return Answer("not_precision", found.reason)
    modules = tuple(found.fp16.rules)
    said = found.reason + "".join(f"; {path}: {why}" for path, why in found.fp16.rules.items())
    chosen = found.chosen
    if chosen is None:
        return Answer("fp32", said, modules, cure=("precision=fp32",))
    master = "master" in config.precision.mode.value
    option = (
        ("fp16_master_dynamic" if master else "fp16_dynamic") if chosen.scaled else "bf16_master" if master else "bf16"
    )
    cure = [f"precision={option}", *(rule(*chosen.rules) if chosen.rules else ())]
    if chosen.scaled:
        cure += [f"precision.loss_scale.init={chosen.init}", f"precision.loss_scale.min={min(chosen.init, 2.0**-14)}"]
    else:
        cure += ["precision.loss_scale.init=65536", "precision.loss_scale.max=16777216"]
    return Answer("precision" if modules or not chosen.scaled else "nothing", said, modules, cure=tuple(cure))


def ask_search(words: Sequence[str]) -> Answer:
    """What ``mprun search`` finds."""
    found = search(config_of([*words, "search.steps=40"]))
    if found.cause is not None:
        samples = tuple(int(i) for i in found.cause.evidence.get("sample_ids", ()))
        cure = (f"precision.loss_scale.init={found.loss_scale}",) if found.loss_scale else None
        return Answer(found.cause.kind, found.cause.message, (), samples, cure)
    modules = found.fp32_modules or ()
    said = "; ".join(f"{one.path}: {one.alone}; without it {one.without}" for one in found.evidence)
    kind = {"empty": "nothing", "found": "precision"}.get(found.status, found.status)
    return Answer(kind, said or found.status, modules, cure=rule(*modules) if modules else None)


def _cli(name: str) -> Callable[[Sequence[str]], Answer]:
    def ask_cli(words: Sequence[str]) -> Answer:
        from tests.sick import cli

        found: Answer = getattr(cli, f"ask_{name}")(words)
        return found

    return ask_cli


ASK: dict[str, Callable[[Sequence[str]], Answer]] = {
    "postmortem": ask_postmortem,
    "diagnose": ask_diagnose,
    "search": ask_search,
    "compare": _cli("compare"),
    "startup": _cli("startup"),
}


@cache
def ask(instrument: str, words: tuple[str, ...]) -> Answer:
    """Ask once."""
    return ASK[instrument](words)


# --- judging ----------------------------------------------------------------------------------------------------------


def faults_of(case: Case, instrument: str, answer: Answer) -> list[str]:
    """What is wrong with an answer; empty if it is right. The cure is not looked at."""
    judges = {
        "postmortem": _postmortem,
        "diagnose": _diagnose,
        "search": _search,
        "compare": _compare,
        "startup": _startup,
    }
    return judges[instrument](case, answer)


def _postmortem(case: Case, answer: Answer) -> list[str]:
    wrong = []
    if answer.kind not in (case.cause, *case.accept):
        wrong.append(f"cause {answer.kind}, not {case.cause}")
    if case.culprits and answer.modules != case.culprits[:1]:
        wrong.append(f"module {answer.modules}, not {case.culprits}")
    if case.cause == "bad_data" and answer.samples != case.samples:
        wrong.append(f"samples {answer.samples}, not {case.samples}")
    return wrong


def _diagnose(case: Case, answer: Answer) -> list[str]:
    if case.sick_in_fp32:
        wrong = [] if answer.kind == "not_precision" else [f"{answer.kind}, not that FP32 goes wrong itself"]
        named = [path for path in case.culprits if path not in answer.said]
        if case.cause == "bad_data":
            named += [str(i) for i in case.samples if f"sample {i}" not in answer.said]
        return wrong + [f"{what} is not named" for what in named]
    if answer.kind == "not_precision":
        return ["it says that FP32 goes wrong"]
    return _set_faults(case, answer.modules)


def _search(case: Case, answer: Answer) -> list[str]:
    if case.sick_in_fp32 or not case.culprits:
        kinds = SEARCH_KINDS[case.cause]
        wrong = [] if answer.kind in kinds else [f"{answer.kind}, not {' or '.join(kinds)}"]
        if case.cause == "bad_data" and answer.samples != case.samples:
            wrong.append(f"samples {answer.samples}, not {case.samples}")
        return wrong
    if answer.kind != "precision":
        return [f"{answer.kind}, not a set of modules"]
    return _set_faults(case, answer.modules)


def _compare(case: Case, answer: Answer) -> list[str]:
    return [] if answer.kind == "fail" else [f"{answer.kind}, not that the policy fails"]


def _startup(case: Case, answer: Answer) -> list[str]:
    wrong = [] if answer.modules == case.culprits else [f"{answer.modules}, not {case.culprits}"]
    if case.cause == "bad_data" and not set(case.samples) <= set(answer.samples):
        wrong.append(f"samples {answer.samples}, not {case.samples}")
    if case.cause == "lost_updates" and "no FP32 masters" not in answer.said:
        wrong.append("it does not say that updates are lost")
    return wrong


def _set_faults(case: Case, modules: Sequence[str]) -> list[str]:
    """What is wrong with a set of FP32 modules: a culprit is not in it, or it is larger than the known cure."""
    wrong = [] if _blames(case, modules) else [f"{modules}, not {case.culprits}"]
    most, own = len(rules_of(case)), uncovered(modules)
    if len(own) > max(most, len(case.culprits)):
        wrong.append(f"{own}, where {most or 'none'} would do")
    return wrong


def rules_of(case: Case) -> tuple[str, ...]:
    """The FP32 modules of the known cure."""
    word = next((word for word in case.cure if word.startswith("precision.fp32_modules=[")), "")
    return tuple(part for part in word.partition("[")[2].rstrip("]").split(",") if part)


def _blames(case: Case, modules: Sequence[str]) -> bool:
    """Whether ``modules`` are a known cure, or each culprit is one of them, or inside or around one."""
    known = [set(rules_of(case)), *({path} for path in case.also)]
    if not case.culprits or set(uncovered(modules)) in known:
        return True
    return all(any(_related(path, culprit) for path in modules) for culprit in case.culprits)


def _related(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")


def cure_works(case: Case, answer: Answer) -> bool | None:
    """Whether a plain run with the proposed overrides is healthy; None if none were proposed."""
    if answer.cure is None:
        return None
    return healthy(run(case.overrides(*answer.cure)), run(case.should_be))


def alarms(control: Control, instrument: str) -> list[str]:
    """What an instrument finds wrong with a healthy control."""
    answer = ask(instrument, tuple(control.overrides()))
    benign = ("nothing", "scale") if instrument == "postmortem" else ("nothing",)
    return [] if answer.kind in benign else [f"{answer.kind}: {answer.said}"]
