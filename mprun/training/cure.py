"""What would make a window finite that overflows: FP32 rules, found by trying, and BF16.

The culprit's module gets an FP32 rule and the window is run once more. What overflows then (a number that is in range in FP32
may overflow where the next module casts it) gets a rule too, and so on. In the end every rule that is not needed is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mprun.errors import MprunError
from mprun.numerics.places import INPUT, LOSS
from mprun.precision.policy import check_support
from mprun.training.replay import Exam, Replay
from mprun.training.state import TrainState
from mprun.training.verdict import SHORT, rules_text

MOST_RULES = 8
WIDE_EPS = 1e-4  # a normal number of FP16
PATIENCE_S = 60.0  # a run waits meanwhile


def cure_text(state: TrainState, rules: Sequence[str], *, bf16: bool) -> str:
    """What to do, in words."""
    if not rules:
        return f"no set of up to {MOST_RULES} FP32 modules was found that helps" + ("; use BF16" if bf16 else "")
    them = "it" if len(rules) == 1 else "these"
    text = f"keep {them} in FP32: {rules_text([*state.policy.fp32_modules, *rules])}"
    return text + (", or use BF16" if bf16 else "")


def divergence_words(state: TrainState) -> tuple[str, str]:
    """What a divergence is called, and what to do about it.

    Where the optimizer itself works in half, an eps that rounds to 0 there makes it divide by what has rounded to 0 too, at any
    learning rate; FP32 on such weights proves nothing about precision.
    """
    for group in state.optimizer.param_groups if state.policy.mode == "pure" else ():
        eps, dtype = group.get("eps"), state.policy.param_dtype
        if isinstance(eps, float) and eps > 0 and not torch.tensor(eps).to(dtype):
            form = SHORT[str(dtype).removeprefix("torch.")]
            return (
                f"divergence, of an optimizer in {form}, where its eps={eps:g} is 0",
                f"keep FP32 weights (precision.mode=master), or set optimizer.eps={WIDE_EPS:g}",
            )
    return "divergence, not precision", "lower the learning rate"


def find_rules(exam: Exam, seen: Replay) -> list[str]:
    """FP32 rules with which the window is finite, none of them without effect; empty if none were found."""
    policy, rules = exam.state.policy, list[str]()

    def tried(names: Sequence[str], *, traced: bool) -> Replay | None:
        try:
            return exam.run(policy=replace(policy, fp32_modules=(*policy.fp32_modules, *names)), traced=traced)
        except MprunError:  # no cast can be put around a module
            return None

    now: Replay | None = seen
    while now is not None and not now.finite:
        more = len(rules) < MOST_RULES and exam.spent_s < PATIENCE_S
        path = _candidate(exam.state, now, rules) if more else None
        if path is None:
            return []
        rules.append(path)
        now = tried(rules, traced=True)
    if now is None:
        return []
    for rule in rules[:-1]:
        others = [name for name in rules if name != rule]
        without = tried(others, traced=False)
        if without is not None and without.finite:
            rules = others
    return rules


def _candidate(state: TrainState, seen: Replay, rules: Sequence[str]) -> str | None:
    """The module to try next: the culprit, or a neighbour if it has a rule already.

    A number that is in range in FP32 overflows at the border to half. In the backward pass of ``autocast`` that is where the
    module before begins, whose output is half. In the half modes the border is the module's own: what is around it comes next.
    """
    event = seen.first
    if event is None or event.module == INPUT or not seen.order:
        return None
    path = seen.order[-1] if event.module == LOSS else event.module

    def covered(name: str) -> bool:
        return any(name == rule or name.startswith(f"{rule}.") for rule in rules)

    if covered(path) and state.policy.mode == "autocast" and event.where == "backward":
        ran = [index for index, name in enumerate(seen.order) if covered(name) and path in (name, *_around(name))]
        before = seen.order[: min(ran, default=0)]
        return next((name for name in reversed(before) if not covered(name)), None)
    return next((name for name in (path, *_around(path)) if name and not covered(name)), None)


def _around(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:size]) for size in range(len(parts) - 1, 0, -1)]


def bf16_helps(exam: Exam) -> bool:
    """Whether the window is finite with BF16 in FP16's place."""
    policy, half = exam.state.policy, torch.float16
    if policy.compute_dtype != half:
        return False

    def wide_of(dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if dtype == half else dtype

    wide = replace(
        policy,
        param_dtype=wide_of(policy.param_dtype),
        compute_dtype=torch.bfloat16,
        output_dtype=wide_of(policy.output_dtype),
    )
    try:
        check_support(wide, exam.state.device)
        return exam.run(policy=wide).finite
    except MprunError:
        return False
