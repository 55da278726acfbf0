"""The learning rate on the device is the schedule's, however long the run and whatever was skipped."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mprun.training import rates
from mprun.training.rates import Rates
from mprun.training.schedule import Schedule

CPU = torch.device("cpu")


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 10**6))
def test_equals_the_schedule_over_any_sequence_of_skips(applied_or_not, start):
    schedule = Schedule("cosine", total_steps=start + 50, warmup_steps=20, final=0.1)
    looked_up, before = Rates(schedule, CPU), rates.ENTRIES
    rates.ENTRIES = 7  # so that it is laid out anew many times
    try:
        applied = torch.tensor(start)
        for goes in applied_or_not:
            assert looked_up.at(applied).item() == schedule(int(applied))
            applied = applied + int(goes)
    finally:
        rates.ENTRIES = before


def test_a_jump_is_followed_when_told_and_refused_when_not():
    schedule = Schedule("linear", total_steps=10**6)
    looked_up = Rates(schedule, CPU)
    looked_up.at(torch.tensor(0))
    with pytest.raises(IndexError):
        looked_up.at(torch.tensor(500_000))
    looked_up.moved()
    assert looked_up.at(torch.tensor(500_000)).item() == schedule(500_000)


def test_a_run_of_a_trillion_steps_costs_nothing_at_the_start():
    begin = time.perf_counter()
    looked_up = Rates(Schedule("cosine", total_steps=10**12, warmup_steps=10**9), CPU)
    assert looked_up.at(torch.tensor(0)).item() == 1e-9
    assert looked_up.values is not None
    assert len(looked_up.values) == rates.ENTRIES
    assert time.perf_counter() - begin < 1
