"""The smallest set of modules that must stay FP32 so that a low-precision run tracks FP32.

A set passes if

1. its gradients at the states that an FP32 run kept are right (:mod:`mprun.lab.evaluate`), and then
2. a run of ``search.steps`` steps with it, from the same initialisation over the same batches, tracks the FP32 run: it ends well,
   and the root mean square of the gap between their smoothed loss curves is at most ``search.tolerance`` times twice the largest
   gap between two of FP32's own seeds (the run's and two more), or the format's resolution, 4 eps of the mean loss.

Every set that is accepted anywhere in the search has passed both. In this order: nothing in FP32; then, if that fails, other
scales (a scale that cures everything is the cause); then everything, since what that does not cure no set will; then the
candidates, most suspect first, minimised by delta debugging (:mod:`mprun.lab.ddmin`) first among leaves and, where all leaves
together do not do, with containers, level by level. A container in the result is exchanged for what is inside it if that passes.
A set that leaves nothing in half is none: it is FP32 by another name, and
is told as such. The result is 1-minimal; a set of one or two is the smallest there is among the level's candidates.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from mprun.config import Config, Mode, ScaleKind
from mprun.errors import MprunError
from mprun.lab.candidates import ROOT, Candidate, candidates, cost, rank, uncovered
from mprun.lab.causes import Cause, scales_that_pass, trouble_in_fp32, trouble_with_all
from mprun.lab.ddmin import BudgetSpentError, Items, Minimum, Trials, ddmin, minimise, minimum
from mprun.lab.evaluate import Evaluator
from mprun.lab.follow import SEEDS, Tracking, follow
from mprun.lab.found import Evidence, Found
from mprun.lab.local import ModuleError, local_errors
from mprun.lab.propose import policy
from mprun.lab.reference import Curve, Reference, reference
from mprun.numerics.formats import FORMATS
from mprun.report.summary import scale_text
from mprun.training.build import device_of, switches
from mprun.training.observe import observe

# Called after every test of a set: the set, whether it passed, the tests so far, and the best set so far.
Tell = Callable[[Items, bool, int, Items | None], None]


@dataclass
class Searching:
    """A search in progress: what it knows, and what it has asked."""

    config: Config
    run: Reference
    evaluator: Evaluator
    found: list[Candidate]
    errors: dict[str, ModuleError] = field(default_factory=dict)
    tracked: dict[tuple[frozenset[str], float | None], Tracking] = field(default_factory=dict)
    others: list[Curve] = field(default_factory=list)
    trials: Trials | None = None

    @property
    def steps(self) -> int:
        """Length of the runs."""
        return len(self.run.losses)


def search(config: Config, tell: Tell | None = None) -> Found:
    """Find the smallest set of FP32 modules for ``config``'s policy. See the module's docstring.

    Args:
        config: checked; ``search.budget``, ``search.tolerance``, ``search.steps`` say how long and how strictly.
        tell: called after every set that was tested.

    Raises:
        MprunError: what ``mprun train`` would refuse.
    """
    with switches(config, device_of(config)):  # the half kernels stay in place while models of many sets come and go
        return _search(config, tell)


def _search(config: Config, tell: Tell | None) -> Found:
    begin = time.perf_counter()
    steps = config.search.steps
    run = reference(config, steps=steps, keep=sorted({0, steps // 2, steps}))
    if (cause := trouble_in_fp32(run, config, steps=steps)) is not None:
        return Found("none", None, cause=cause, seconds=time.perf_counter() - begin)
    evaluator = Evaluator(run, config, tolerance=config.search.tolerance)
    found = candidates(evaluator.replay.rows, half_borders=config.precision.mode is not Mode.autocast)
    searching = Searching(config, run, evaluator, found)
    try:
        result = _searched(searching, tell)
    except KeyboardInterrupt:
        result = _best_so_far(searching, "interrupted")
    return dataclasses.replace(
        result,
        evaluations=len(evaluator.known),
        runs=len(searching.tracked),
        candidates=len(searching.found),
        seconds=time.perf_counter() - begin,
    )


def _searched(s: Searching, tell: Tell | None) -> Found:
    trials = s.trials = _trials(s, tell)
    if trials(()):
        return _result(s, "empty", Minimum((), True, True, False))
    if (scales := _cured_by_scale(s)) is not None:
        return scales
    if not _passes(s, (ROOT,)):
        why = _why(s, (ROOT,))
        return Found("none", None, cause=trouble_with_all(s.evaluator, why), tests=trials.count + 1)
    s.errors = _suspects(s)
    ranked = rank(s.found, s.errors.values())
    trials.order = {candidate.path: place for place, candidate in enumerate(ranked)}
    result: Minimum | None = None
    levels = sorted({candidate.level for candidate in ranked})
    for level in levels:
        pool = [candidate.path for candidate in ranked if candidate.level <= level]
        result = minimise(pool, trials, singles=level == levels[-1])
        if result is not None:
            result = _refined(s, result, pool)
            break
        if trials.count >= trials.budget:
            return _best_so_far(s, "found")
    if result is None or not _leaves_half(s, result.items):
        return Found("none", None, cause=_whole_model(s, result), tests=trials.count)
    return _result(s, "found", result)


def _leaves_half(s: Searching, items: Sequence[str]) -> bool:
    """Whether a module that computes with weights, or an operation of a container, is still in half beside ``items``."""
    first, half = s.run.states[0], s.config.precision.compute_dtype.value
    with s.evaluator.replay.running(uncovered(items)) as state:
        s.evaluator.replay.place(state, first)
        rows = observe(state, first.window[0])
    around = {row["module"].rpartition(".")[0] for row in rows if row["module"]}
    return any(row["compute_dtype"] == half and (row["param_dtype"] or row["module"] in around) for row in rows)


def _whole_model(s: Searching, result: Minimum | None) -> Cause:
    """The cause where nothing less than the whole model helps: FP32 by another name; and whether BF16 passes instead."""
    if result is None:
        wrong = s.errors.get("")
        why = f" ({wrong.why})" if wrong is not None and wrong.why else ""
        which = f"with every module inside it in FP32 it fails, so an operation of its own forward is the culprit{why}"
    else:
        which = f"it takes {', '.join(result.items)} in FP32, and beside that nothing computes in half"
    advice = "use precision=fp32"
    if s.config.precision.compute_dtype.value == "float16":
        advice = _bf16_instead(s)
    return Cause("model", f"nothing less than the whole model in FP32 suffices: {which}; {advice}", {})


def _bf16_instead(s: Searching) -> str:
    config = policy(s.config, "bfloat16")
    name = "bf16_master" if config.precision.mode is Mode.master else "bf16"
    try:
        evaluator = Evaluator(s.run, config, tolerance=config.search.tolerance)
        other = dataclasses.replace(s, config=config, evaluator=evaluator, tracked={})
        if _passes(other, ()):
            return f"use precision={name}, which passes the test as it is"
        return f"precision={name} does not pass as it is either ({_why(other, ())}): use precision=fp32"
    except MprunError as error:  # a device that does not compute in it
        return f"use precision=fp32 ({' '.join(str(error).split())})"


def _trials(s: Searching, tell: Tell | None) -> Trials:
    def told(items: Items, passes: bool) -> None:
        if tell is not None:
            tell(items, passes, trials.count, trials.best)

    order = [candidate.path for candidate in s.found]
    trials = Trials(
        order, partial(_passes, s), budget=s.config.search.budget, cost=lambda items: cost(items, s.found), tell=told
    )
    return trials


def _passes(s: Searching, items: Sequence[str], loss_scale: float | None = None) -> bool:
    """Both parts of the test."""
    modules = uncovered(items)
    return s.evaluator.evaluate(modules, loss_scale=loss_scale).passes and _track(s, modules, loss_scale).passes


def _why(s: Searching, items: Sequence[str]) -> str:
    """Why a set failed (or how well it passed), in one line."""
    modules = uncovered(items)
    evaluation = s.evaluator.evaluate(modules)
    return _track(s, modules, None).why if evaluation.passes else evaluation.why


def _track(s: Searching, modules: Sequence[str], loss_scale: float | None) -> Tracking:
    key = frozenset(modules), loss_scale
    if key not in s.tracked:
        try:
            curve = s.evaluator.replay.curve(modules, s.steps, loss_scale=loss_scale)
        except MprunError as error:  # a run with these rules would be refused
            curve = Curve((), (), (), (), "refused", str(error).splitlines()[0])
        eps = FORMATS[s.config.precision.compute_dtype.value].eps
        others = partial(_others, s)
        s.tracked[key] = follow(s.run.losses, others, curve, tolerance=s.config.search.tolerance, eps=eps)
    return s.tracked[key]


def _others(s: Searching) -> list[Curve]:
    """FP32 runs of other seeds, made when they are asked for the first time."""
    if not s.others:
        seeds = range(s.run.config.seed + 1, s.run.config.seed + 1 + SEEDS)
        s.others = [reference(s.config, steps=s.steps, seed=seed).curve for seed in seeds]
    return s.others


def _cured_by_scale(s: Searching) -> Found | None:
    """The result if another loss scale makes the run right without any FP32 module."""
    first = s.evaluator.evaluate(())
    half = s.config.precision.compute_dtype.value == "float16"
    if not half or first.passes or first.states[-1].finite == "loss":
        return None
    scales = scales_that_pass(s.evaluator)
    if not scales:
        return None
    scale = scales[-2] if len(scales) > 1 else scales[-1]  # with room above
    if not _passes(s, (), scale):
        return None
    kind, used = s.config.precision.loss_scale.kind, first.states[-1].loss_scale
    at = " without a loss scale" if kind is ScaleKind.none else f" at loss scale {scale_text(used)}"
    at = "" if "loss scale" in first.why else at
    interval = f"{scale_text(scales[0])} to {scale_text(scales[-1])}"
    message = f"{first.why}{at}; with loss scales from {interval} no module needs FP32: the scale is the cause"
    cause = Cause("scale", message, {"passing_scales": [scales[0], scales[-1]], "loss_scale": used})
    tests = s.trials.count if s.trials else 0
    return Found("none", None, cause=cause, loss_scale=scale, tests=tests)


def _suspects(s: Searching) -> dict[str, ModuleError]:
    """The local error of each module, at the scale at which the policy would run."""
    config = s.evaluator.replay.configured(())
    scale = s.evaluator.evaluate((ROOT,)).states[-1].loss_scale
    config.precision.loss_scale = dataclasses.replace(config.precision.loss_scale, init=scale)
    return {error.path: error for error in local_errors(s.run, config, s.run.states)}


def _refined(s: Searching, result: Minimum, pool: Sequence[str]) -> Minimum:
    """``result`` with its containers exchanged for what is inside them, where that passes."""
    trials, inside = s.trials, {candidate.path: candidate.inside for candidate in s.found}
    assert trials is not None, "a search has trials"
    items, spent = uncovered(result.items), result.budget_spent
    try:
        for container in [path for path in items if inside[path]]:
            others = [path for path in items if path != container]
            children = trials.sorted(inside[container])
            if trials([*others, *children]):
                kept = ddmin(children, partial(_beside, trials, others))
                items = trials.sorted([*others, *kept])
        items = ddmin(items, trials)
    except BudgetSpentError:
        spent = True
    return minimum(items, pool, trials, spent=spent)


def _beside(trials: Trials, others: Sequence[str], part: Iterable[str]) -> bool:
    return trials([*others, *part])


def _result(s: Searching, status: str, result: Minimum) -> Found:
    evidence = []
    classes = {candidate.path: candidate.cls for candidate in s.found}
    for path in result.items:
        rest = [other for other in result.items if other != path]
        evidence.append(Evidence(path, classes.get(path, "the whole model"), _alone(s, path), _why(s, rest)))
    trials = s.trials
    return Found(
        status,
        result.items,
        minimum=result,
        evidence=tuple(evidence),
        tests=trials.count if trials else 0,
        tracking=_track(s, result.items, None),
        evaluation=s.evaluator.evaluate(result.items),
    )


def _alone(s: Searching, path: str) -> str:
    """What a module does to numbers by itself, or the first wrong one inside of it."""
    inside = "" if path == ROOT else f"{path}."
    own = s.errors.get("" if path == ROOT else path)
    if own is not None and own.own:
        return own.why
    wrong = next((e for e in s.errors.values() if e.own and e.path.startswith(inside) and e.path != path), None)
    if wrong is not None:
        return f"inside it, {wrong.path}: {wrong.why}"
    return own.why if own is not None else ""


def _best_so_far(s: Searching, status: str) -> Found:
    """What is known when there is no time for more: the best set that passed."""
    trials = s.trials
    best = trials.best if trials is not None else None
    if trials is None or best is None:
        if status == "found":
            cause = Cause(
                "budget", f"search.budget={s.config.search.budget} ended before any set but everything passed"
            )
            return Found("none", None, cause=cause, tests=trials.count if trials else 0)
        return Found(status, None, tests=trials.count if trials else 0)
    known = minimum(uncovered(best), [candidate.path for candidate in s.found], trials, spent=True)
    return Found(status, known.items, minimum=known, tests=trials.count)
