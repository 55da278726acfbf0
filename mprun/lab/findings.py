"""A diagnosis as plain values and as sentences: ``result.json``, and the precision files that it recommends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mprun.config import Config
from mprun.config_check import to_plain
from mprun.lab.advice import SHORT, ModuleLoss
from mprun.lab.diagnose import Diagnosis, Trial
from mprun.lab.module_error import ModuleError, rounding_db
from mprun.lab.propose import Proposal, policy, with_rules
from mprun.numerics.formats import FORMATS, power

# Below what rounding leaves by more than this, the format's digits cost a module something.
COSTS_DB = 25.0
YAML_WORDS = ("none", "null", "true", "false", "yes", "no", "on", "off")


def as_plain(found: Diagnosis) -> dict[str, Any]:
    """What ``result.json`` says beside status and error."""
    measured, chosen = found.measured, found.chosen
    curve = measured.reference.curve if measured else None
    return {
        "recommended": None if chosen is None else recommendation(chosen),
        "reason": found.reason,
        "fp32_modules": [*chosen.rules] if chosen else [],
        "fp32": None if curve is None else {"steps": len(curve.losses), "status": curve.status, "error": curve.error,
                                            "first_loss": _first(curve.losses), "last_loss": _last(curve.losses)},
        "data": measured.outlier if measured else "",
        "sampled_steps": sorted(measured.samples) if measured else [],
        "modules": module_rows(found),
        **{
            name: proposal_plain(proposal)
            for name, proposal in (("float16", found.fp16), ("bfloat16", found.bf16))
            if proposal is not None
        },
    }  # fmt: skip


def recommendation(chosen: Proposal) -> dict[str, Any]:
    """The policy in a few numbers."""
    scale = {
        "init": chosen.init, "static": chosen.static, "low": chosen.interval.low, "high": chosen.interval.high,
    }  # fmt: skip
    return {"dtype": chosen.dtype, "loss_scale": scale if chosen.scaled else None, "fp32_modules": [*chosen.rules]}


def proposal_plain(found: Proposal) -> dict[str, Any]:
    """Everything that is known of a policy in one half format."""
    return {
        "failed": found.failed,
        "rules": found.rules,
        "half_modules": found.halves,
        "interval": {"low": found.interval.low, "high": found.interval.high} if found.scaled and found.rows else None,
        "scales": [dataclasses.asdict(row) for row in found.rows],
        "trials": [trial_plain(trial) for trial in found.trials],
        "local_errors": [dataclasses.asdict(error) for error in found.errors],
        "modules": [dataclasses.asdict(loss) for loss in found.losses],
    }


def trial_plain(trial: Trial) -> dict[str, Any]:
    """A verification run."""
    content = dataclasses.asdict(trial)
    parity = content.pop("parity")
    return {**content, "loss_gap": parity["gap"], "allowed_gap": parity["allowed"]}


def module_rows(found: Diagnosis) -> list[dict[str, Any]]:
    """One row a module that would be half in FP16 or BF16, the worst first."""
    fp16, bf16 = found.fp16, found.bf16
    if fp16 is None:
        return []
    losses = {loss.path: loss for loss in fp16.losses}
    errors = {name: _by_path(p) for name, p in (("float16", fp16), ("bfloat16", bf16))}
    rows = []
    paths = dict.fromkeys([*losses, *(path for by_path in errors.values() for path in by_path), *fp16.rules])
    for path in paths:
        loss = losses.get(path)
        half, full = errors["float16"].get(path), errors["bfloat16"].get(path)
        if not (half or full or path in fp16.rules or (loss and loss.half)):
            continue
        known = half or full
        row = {
            "module": path,
            "class": loss.cls if loss else known.cls if known else "",
            "fp32_in": [SHORT[p.dtype] for p in (fp16, bf16) if p is not None and path in p.rules],
            "input_amax": loss.amax["input"] if loss else known.input_amax if known else None,
            "output_amax": loss.amax["output"] if loss else known.output_amax if known else None,
            "gradient_amax": loss.amax["gradient"] if loss else None,
            "weight_amax": loss.amax["weight"] if loss else None,
            "scale_high": loss.scale_high if loss and loss.amax["gradient"] else None,
            "fp16_forward_db": half.forward_sqnr_db if half else None,
            "fp16_grad_db": half.grad_sqnr_db if half else None,
            "bf16_forward_db": full.forward_sqnr_db if full else None,
            "bf16_grad_db": full.grad_sqnr_db if full else None,
        }
        row["level"], row["says"] = _sentence(path, loss, half, full, fp16, bf16)
        rows.append(row)
    return sorted(rows, key=lambda row: (-row["level"], _least(row), -_size(row)))


def _by_path(proposal: Proposal | None) -> dict[str, ModuleError]:
    return {} if proposal is None else {error.path: error for error in proposal.errors}


def _least(row: Mapping[str, Any]) -> float:
    values = [row[key] for key in ("fp16_forward_db", "fp16_grad_db") if row[key] is not None]
    return min(values, default=math.inf)


def _size(row: Mapping[str, Any]) -> float:
    return max(row["input_amax"] or 0.0, row["output_amax"] or 0.0)


def _sentence(
    path: str,
    loss: ModuleLoss | None,
    half: ModuleError | None,
    full: ModuleError | None,
    fp16: Proposal,
    bf16: Proposal | None,
) -> tuple[int, str]:
    """How bad it is (3: must stay in FP32, 2: is wrong as part of something, 1: costs digits, 0: nothing), and why in words."""
    rule = path
    in_bf16 = bf16 is not None and rule in bf16.rules
    if rule in fp16.rules:
        why = fp16.rules[rule]
        if loss and loss.overflow:
            why = f"{loss.overflow} reaches {loss.amax[loss.overflow]:.2g}, {loss.factor:.2g} times FP16's largest"
        advice = "keep it in FP32" if in_bf16 else "keep it in FP32, or use BF16"
        return 3, f"{why}; {advice}"
    if in_bf16 and bf16 is not None:
        return 3, f"{bf16.rules[rule]}; keep it in FP32 with BF16 (FP16's digits are enough)"
    if loss and loss.overflow:
        return 2, (
            f"{loss.overflow} reaches {loss.amax[loss.overflow]:.2g}, {loss.factor:.2g} times FP16's largest"
            + ("" if fp16.failed else "; cured by what is kept in FP32 before it")
        )
    if half and half.beyond:
        return 2, f"{half.why or 'wrong in FP16'}" + ("" if half.own else "; by what is inside it")
    return _digits(half, full)


def _digits(half: ModuleError | None, full: ModuleError | None) -> tuple[int, str]:
    """Where rounding alone costs something."""
    for error, name in ((half, "float16"), (full, "bfloat16")):
        if error is None:
            continue
        worst, natural = min(error.forward_sqnr_db, error.grad_sqnr_db), rounding_db(FORMATS[name])
        if worst < natural - COSTS_DB:
            part = "output" if error.forward_sqnr_db <= error.grad_sqnr_db else "gradient"
            bits = FORMATS[name].mantissa_bits + 1
            return (
                1,
                f"{SHORT[name]}'s {bits} bits cost: its {part} has {worst:.0f} dB, one rounding leaves {natural:.0f}",
            )
    return 0, ""


def _first(values: Sequence[float]) -> float | None:
    return values[0] if values else None


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None


def recommended(config: Config, found: Diagnosis, *, static: bool = False) -> str:
    """A precision file: every key, with the reason of what is not the default."""
    chosen = found.chosen
    assert chosen is not None, "there is something to recommend"
    init, kind = (chosen.static, "static") if static else (chosen.init, "dynamic")
    tried = with_rules(policy(config, chosen.dtype, init=init, kind=kind), chosen.rules)
    plain = to_plain(tried)["precision"]
    plain["name"] = "recommended_static" if static else "recommended"
    measured = found.measured
    steps = len(measured.reference.losses) if measured else 0
    trial = next((t for t in chosen.trials if t.kind in (kind, "none")), None)
    lines = [
        f"# {' '.join(found.reason.split())}.",
        f"# Measured on {steps} FP32 steps of {config.name}, seed {config.seed}, by mprun diagnose.",
    ]
    if trial is not None:
        lines.append(
            f"# Tried: {trial.steps} steps, {trial.skips} skipped, loss {trial.parity.gap:+.3g} against FP32 "
            f"(allowed: {trial.parity.allowed:.2g})."
        )
    scale = plain.pop("loss_scale")
    rules = plain.pop("fp32_modules")
    lines += [f"{key}: {_yaml(value)}" for key, value in plain.items()]
    lines += ["fp32_modules:" + ("" if rules else " []")]
    lines += [
        f"  - {_yaml(rule)}" + (f"  # {' '.join(chosen.rules[rule].split())}" if rule in chosen.rules else "")
        for rule in rules
    ]
    notes = {}
    if chosen.scaled:
        safe = f"safe: {power(chosen.interval.low)} to {power(chosen.interval.high)}"
        notes["init"] = f"  # {safe}" + ("" if static else f"; a static scale: {power(chosen.static)}")
    lines += ["loss_scale:"]
    lines += [f"  {key}: {_yaml(value)}{notes.get(key, '')}" for key, value in scale.items()]
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A module may be called 1.10 or on, which YAML would take for 1.1 and True.
        plain = value.replace(".", "_").isidentifier() and value.lower() not in YAML_WORDS
        return value if plain else "'" + value.replace("'", "''") + "'"
    return repr(value)
