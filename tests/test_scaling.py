"""The loss scale as a value: its trajectory is GradScaler's, its limits and hysteresis are as documented."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mprun.precision.scaling import LossScale, ScaleState


def yes(value: bool) -> torch.Tensor:
    return torch.tensor(value)


def move(rule: LossScale, state: ScaleState, overflow: bool) -> ScaleState:
    return rule.adjust(state, overflow=yes(overflow), applied=yes(not overflow), failed=yes(overflow))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=60),
    st.integers(1, 7),
    st.sampled_from([2.0**16, 2.0**10, 3.0, 1.0]),
    st.sampled_from([2.0, 1.5, 4.0]),
    st.sampled_from([0.5, 0.25, 0.9]),
)
def test_trajectory_equals_grad_scaler(overflows, interval, init, growth, backoff):
    """The oracle is torch.amp.GradScaler itself, driven through a real optimizer with planted infinities."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    oracle = torch.amp.GradScaler(
        "cpu", init_scale=init, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    # Floor and ceiling out of the way: torch has neither.
    rule = LossScale("dynamic", init, growth, backoff, interval, min=1e-38, max=3e38, hysteresis=1)
    state = rule.start()
    oracle.scale(torch.zeros(()))  # GradScaler makes its tensors on first use
    for overflow in overflows:
        weight.grad = torch.full((1,), float("inf") if overflow else 1.0)
        oracle.step(optimizer)
        oracle.update()
        state = move(rule, state, overflow)
        assert state.scale.item() == oracle.get_scale()
        assert state.growth_tracker.item() == oracle._get_growth_tracker()


def test_floor_and_ceiling_hold():
    rule = LossScale("dynamic", init=4.0, min=1.0, max=8.0, growth_interval=1)
    state = rule.start()
    for _ in range(5):
        state = move(rule, state, overflow=True)
    assert state.scale.item() == 1.0
    for _ in range(9):
        state = move(rule, state, overflow=False)
    assert state.scale.item() == 8.0


def test_scale_never_reaches_zero_in_thousands_of_overflows():
    rule = LossScale("dynamic")
    state = rule.start()
    for _ in range(2000):
        state = move(rule, state, overflow=True)
    assert state.scale.item() == 2.0**-14
    assert state.consecutive_skips.item() == 2000


def test_hysteresis_tolerates_overflows_in_a_row_and_is_refilled_by_an_applied_step():
    rule = LossScale("dynamic", init=64.0, hysteresis=3, growth_interval=1000)
    state = rule.start()
    scales = []
    for overflow in (True, True, False, True, True, True, True):
        state = move(rule, state, overflow)
        scales.append(state.scale.item())
    assert scales == [64, 64, 64, 64, 64, 32, 16]


def test_static_scale_stays_and_counts_skips():
    rule = LossScale("static", init=128.0)
    state = rule.start()
    for overflow in (True, True):
        state = move(rule, state, overflow)
    assert (state.scale.item(), state.consecutive_skips.item()) == (128.0, 2)
    assert move(rule, state, overflow=False).consecutive_skips.item() == 0


def test_a_non_finite_loss_or_empty_window_leaves_scale_and_tracker():
    rule = LossScale("dynamic", growth_interval=3)
    state = move(rule, rule.start(), overflow=False)
    after = rule.adjust(state, overflow=yes(False), applied=yes(False), failed=yes(True))
    assert (after.scale.item(), after.growth_tracker.item(), after.consecutive_skips.item()) == (65536.0, 1, 1)
    empty = rule.adjust(state, overflow=yes(False), applied=yes(False), failed=yes(False))
    assert (empty.scale.item(), empty.growth_tracker.item(), empty.consecutive_skips.item()) == (65536.0, 1, 0)


@given(st.integers(-14, 24), st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20))
def test_scaling_by_a_power_of_two_and_back_is_exact(power, values):
    rule = LossScale("static", init=2.0**power)
    state = rule.start()
    x = torch.tensor(values)
    x = x[(x == 0) | (x.abs() > 1e-20)]  # away from FP32's own subnormals
    assert torch.equal(rule.scaled(x, state) * rule.inverse(state), x)


def test_state_survives_a_round_trip_and_a_changed_range():
    rule = LossScale("dynamic", init=1024.0, growth_interval=4)
    state = rule.start()
    for _ in range(3):
        state = move(rule, state, overflow=False)
    again = rule.load(rule.save(state))
    assert again.state_dict() == state.state_dict() == {
        "scale": 1024.0, "growth_tracker": 3, "hysteresis_left": 1, "consecutive_skips": 0}  # fmt: skip
    assert move(rule, again, overflow=False).scale.item() == 2048.0
    assert LossScale("dynamic", init=16.0, max=64.0).load(rule.save(state)).scale.item() == 64.0
    assert LossScale("static", init=16.0).load(rule.save(state)).scale.item() == 16.0
    for other in (LossScale("none"), LossScale("static", init=2.0)):
        assert LossScale("dynamic", init=16.0).load(other.save(other.start())).scale.item() == 16.0


@pytest.mark.parametrize("kind", ["none", "static", "dynamic"])
def test_scaled_multiplies_only_where_there_is_a_scale(kind):
    rule = LossScale(kind, init=8.0)
    assert rule.scaled(torch.tensor(0.5), rule.start()).item() == (0.5 if kind == "none" else 4.0)


@pytest.mark.parametrize("kind", ["none", "static", "dynamic"])
def test_skips_in_a_row_are_counted_on_after_a_resume(kind):
    """Patience must not begin anew with every resume, under any kind of scale; another kind is another matter."""
    rule = LossScale(kind=kind)
    state = rule.start()
    for _ in range(3):
        state = rule.adjust(state, overflow=yes(False), applied=yes(False), failed=yes(True))
    assert rule.load(rule.save(state)).consecutive_skips.item() == 3
    other = LossScale(kind="static" if kind == "dynamic" else "dynamic")
    assert other.load(rule.save(state)).consecutive_skips.item() == 0
