"""Sick models: each has one known fault. First that each is what it claims to be, by plain runs; then what the lab says of it.

The claims: the fault shows under the policy that the case names; FP32 is healthy, or where precision is not the cause, sick
too; the stated cure makes the run healthy. The controls are healthy in their policy as they are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mprun.cli import main
from mprun.compose import compose
from mprun.config_check import to_plain
from mprun.data import build_data
from mprun.models.build import build_model
from tests.case_code import records
from tests.conftest import CPU
from tests.sick.cases import CAUSES, SYMPTOMS, Case, rule
from tests.sick.controls import HEALTHY
from tests.sick.faults import BY_NAME, SICK
from tests.sick.lab import alarms, ask, cure_works, faults_of
from tests.sick.run import MANY_SKIPS, config_of, healthy, run, shows

# A control that does not learn says nothing.
LEARNS = 0.9
QUICK_HEALTHY = {"resnet_master", "vit_bf16", "gpt", "lstm", "mixture", "masked", "near_the_limit"}
by_name = pytest.mark.parametrize("case", SICK, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_there_are_many_of_every_kind():
    assert len(SICK) >= 26
    assert len(HEALTHY) >= 12
    assert len({case.name for case in (*SICK, *HEALTHY)}) == len(SICK) + len(HEALTHY)
    assert {case.cause for case in SICK} == set(CAUSES)
    assert {case.symptom for case in SICK} == set(SYMPTOMS)
    assert {control.precision for control in HEALTHY} >= {"fp16_dynamic", "fp16_master_dynamic", "bf16", "bf16_master"}


@by_name
def test_the_culprits_are_modules(case):
    config = config_of(case.fp32)
    model = build_model(config.model, build_data(config, device=CPU).spec, trust=config.trust)
    paths = {path for path, _ in model.named_modules()}
    assert set(case.culprits) <= paths
    assert {case.cause, *case.accept} <= set(CAUSES)


@pytest.mark.parametrize("case", [SICK[0], HEALTHY[0]], ids=lambda case: case.name)
def test_the_quick_way_to_a_config_gives_what_the_command_line_gives(case):
    assert to_plain(config_of(case.overrides())) == to_plain(compose(case.overrides()).config)


@by_name
def test_the_fault_shows_and_the_cure_works(case: Case):
    should_be, sick, cured = run(case.should_be), run(case.overrides()), run(case.overrides(*case.cure))
    assert should_be.status == "ok", should_be.error
    assert should_be.last < LEARNS * should_be.first
    assert shows(case.symptom, sick, should_be, case.culprits), sick
    assert not healthy(sick, should_be) or case.symptom == "skips", sick
    assert healthy(cured, should_be), cured
    if case.sick_in_fp32:
        assert not healthy(run(case.fp32), should_be)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "path"),
    [(case, path) for case in SICK for path in case.also],
    ids=lambda value: getattr(value, "name", value),
)
def test_another_module_cures_it_as_well(case, path):
    assert healthy(run(case.overrides(*rule(path))), run(case.should_be))


@pytest.mark.parametrize(
    "control",
    [pytest.param(c, id=c.name, marks=[] if c.name in QUICK_HEALTHY else [pytest.mark.slow]) for c in HEALTHY],
)
def test_a_control_is_healthy(control):
    should_be, own = run(control.fp32), run(control.overrides())
    assert healthy(own, should_be), own
    assert own.skips < MANY_SKIPS
    assert should_be.last < LEARNS * should_be.first


# --- what the lab says ------------------------------------------------------------------------------------------------

# (case, instrument): why it is missed. Strict: one that is found after all fails, and is to be taken off the list.
MISSES: dict[tuple[str, str], str] = {}
ALARMS: dict[tuple[str, str], str] = {}
# Asked on every change; the others are slow.
QUICK = {
    "diagnose": {"linear_overflows", "rmsnorm_squares", "gradients_of_13_decades", "row_of_nan"},
    "search": {"sum_then_divide", "rmsnorm_pow_master", "learning_rate_explodes"},
    "startup": {"mask_of_1e9", "label_out_of_range"},
}
QUICK_CONTROLS = {("gpt", "postmortem"), ("near_the_limit", "diagnose"), ("masked", "search")}


def questions() -> list[Any]:
    found = []
    for case in SICK:
        for instrument in case.finds:
            quick = instrument == "postmortem" or case.name in QUICK.get(instrument, ())
            marks = [] if quick else [pytest.mark.slow]
            if reason := MISSES.get((case.name, instrument)):
                marks.append(pytest.mark.xfail(strict=True, reason=reason))
            found.append(pytest.param(case, instrument, marks=marks, id=f"{case.name}-{instrument}"))
    return found


def controls() -> list[Any]:
    found = []
    for control in HEALTHY:
        for instrument in ("postmortem", "diagnose", "search"):
            marks = [] if (control.name, instrument) in QUICK_CONTROLS else [pytest.mark.slow]
            if reason := ALARMS.get((control.name, instrument)):
                marks.append(pytest.mark.xfail(strict=True, reason=reason))
            found.append(pytest.param(control, instrument, marks=marks, id=f"{control.name}-{instrument}"))
    return found


@pytest.mark.parametrize(("case", "instrument"), questions())
def test_the_lab_names_the_cause_and_the_culprit_and_its_cure_works(case, instrument):
    answer = ask(instrument, tuple(case.overrides()))
    assert faults_of(case, instrument, answer) == [], answer
    assert cure_works(case, answer) is not False, answer.cure


@pytest.mark.parametrize(("control", "instrument"), controls())
def test_the_lab_finds_nothing_in_a_healthy_model(control, instrument):
    assert alarms(control, instrument) == []


@pytest.mark.parametrize(
    "name", ["linear_overflows", "custom_backward", "static_scale_too_large", "row_of_nan", "root_of_zero"]
)
def test_a_run_says_it_by_itself(name, tmp_path, monkeypatch, capsys):
    """The verdict that the instruments' tests ask for is in the run's own records, and where it stops, in its error."""
    case = BY_NAME[name]
    monkeypatch.chdir(tmp_path)
    code = main(case.overrides())
    found = [record for record in records("event") if record.get("event") == "postmortem"]
    kinds = {"scale": "scale_search"}
    grave = [one for one in found if one["verdict"] != "scale_search"] or found
    assert grave[-1]["verdict"] == kinds.get(case.cause, case.cause)
    assert tuple(grave[-1]["sample_ids"]) == case.samples or not case.samples
    if case.culprits:
        assert grave[-1]["module"] == case.culprits[0]
    assert (code == 0) == (case.symptom == "skips")
    if code:
        assert grave[-1]["message"] in " ".join(capsys.readouterr().err.split())
