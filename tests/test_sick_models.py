"""Sick models: each has one known fault. First that each is what it claims to be, by plain runs; then what the lab says of it.

The claims: the fault shows under the policy that the case names; FP32 is healthy, or where precision is not the cause, sick
too; the stated cure makes the run healthy. The controls are healthy in their policy as they are.
"""

from __future__ import annotations

import pytest
import torch

from mprun.compose import compose
from mprun.config_check import to_plain
from mprun.data import build_data
from mprun.models.build import build_model
from tests.conftest import CPU
from tests.sick.cases import CAUSES, SYMPTOMS, Case, rule
from tests.sick.controls import HEALTHY
from tests.sick.faults import SICK
from tests.sick.run import MANY_SKIPS, config_of, healthy, run, shows

# A control that does not learn says nothing.
LEARNS = 0.9
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
    ("case", "path"), [(case, path) for case in SICK for path in case.also], ids=lambda value: getattr(value, "name", value)
)
def test_another_module_cures_it_as_well(case, path):
    assert healthy(run(case.overrides(*rule(path))), run(case.should_be))


@pytest.mark.parametrize("control", HEALTHY, ids=lambda control: control.name)
def test_a_control_is_healthy(control):
    should_be, own = run(control.fp32), run(control.overrides())
    assert healthy(own, should_be), own
    assert own.skips < MANY_SKIPS
    assert should_be.last < LEARNS * should_be.first
