import doctest
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import mprun.training.schedule
from mprun.config import ScheduleConfig
from mprun.errors import ConfigError
from mprun.training.schedule import SHAPES, Schedule, build_schedule

DECAYING = ("cosine", "linear", "wsd")


@st.composite
def runs(draw: st.DrawFn, names: tuple[str, ...] = tuple(SHAPES)) -> Schedule:
    """Any legal schedule of a run of up to 300 steps."""
    total = draw(st.integers(1, 300))
    config = ScheduleConfig(
        name=draw(st.sampled_from(names)),
        warmup_steps=draw(st.integers(0, max(total - 1, 1))),
        final=draw(st.floats(0, 1)),
        decay_frac=draw(st.floats(0, 1)),
        milestones=draw(st.lists(st.floats(0, 1), max_size=3)),
        gamma=draw(st.floats(0, 1)),
    )
    return build_schedule(config, total)


@settings(deadline=None)  # the machine may be busy
@example(Schedule("step", total_steps=1, warmup_steps=1, milestones=(0.0,)))
@given(runs())
def test_range_and_table(schedule: Schedule) -> None:
    table = schedule.table()
    assert len(table) == schedule.total_steps + 1
    assert all(0.0 <= m <= 1.0 for m in table)
    assert table[-1] == table[-2] == schedule(schedule.total_steps + 1000), "the last value is kept"
    assert table == [schedule(step) for step in range(schedule.total_steps + 1)]


@settings(deadline=None)
@given(runs())
def test_warmup_is_linear_and_peaks_at_its_last_step(schedule: Schedule) -> None:
    w = schedule.warmup_steps
    assert [schedule(s) for s in range(w)] == [(s + 1) / w for s in range(w)]
    if w:
        assert schedule(w - 1) == 1.0
    elif schedule.name != "step":
        assert schedule(0) == 1.0


@settings(deadline=None)
@given(runs())
def test_never_rises_after_the_peak(schedule: Schedule) -> None:
    table = schedule.table()[schedule.peak_step :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(table))


@settings(deadline=None)
@given(runs(DECAYING))
def test_decaying_shapes_end_exactly_at_final(schedule: Schedule) -> None:
    room = schedule.total_steps - 1 > schedule.peak_step
    assert schedule(schedule.total_steps - 1) == (schedule.final if room else 1.0)


def test_cosine_and_linear_against_closed_forms() -> None:
    total, warmup, final = 101, 11, 0.1
    for s in range(warmup, total):
        p = (s - 10) / 90
        cosine = final + (1 - final) * (1 + math.cos(math.pi * p)) / 2
        assert Schedule("cosine", total, warmup, final)(s) == pytest.approx(cosine, abs=1e-15)
        assert Schedule("linear", total, warmup, final)(s) == pytest.approx(1 - (1 - final) * p, abs=1e-15)


def test_three_epochs_of_two_windows_reach_peak_and_end_on_time() -> None:
    table = build_schedule(ScheduleConfig(name="cosine", warmup_steps=2), 6).table()
    assert table[:2] == [0.5, 1.0]
    assert table[5] == 0.0
    assert table[4] > 0.0


def test_wsd_holds_and_then_decays_over_its_fraction() -> None:
    table = Schedule("wsd", total_steps=100, warmup_steps=10, decay_frac=0.3).table()
    assert table[9:70] == [1.0] * 61
    assert table[70] == pytest.approx(1 - 1 / 30)
    assert table[84] == pytest.approx(0.5)
    assert table[99] == 0.0


def test_step_drops_at_its_milestones_and_not_below_final() -> None:
    schedule = Schedule("step", total_steps=100, final=0.05)
    assert [schedule(s) for s in (0, 49, 50, 74, 75, 99)] == pytest.approx([1, 1, 0.1, 0.1, 0.05, 0.05])


def test_warmup_steps_win_over_warmup_frac() -> None:
    assert build_schedule(ScheduleConfig(warmup_steps=3, warmup_frac=0.5), 100).warmup_steps == 3


def test_warmup_frac_is_rounded_to_steps() -> None:
    assert build_schedule(ScheduleConfig(warmup_frac=0.05), 1350).warmup_steps == 68
    assert build_schedule(ScheduleConfig(warmup_frac=0.05), 5).warmup_steps == 0


def test_one_step_run_is_taken_at_the_peak() -> None:
    for name in SHAPES:
        if name != "step":
            assert build_schedule(ScheduleConfig(name=name, warmup_steps=1), 1)(0) == 1.0


@pytest.mark.parametrize(
    ("fields", "total", "message"),
    [
        ({"name": "cosin"}, 9, r"schedule\.name='cosin' is unknown: did you mean 'cosine'\?"),
        ({"warmup_steps": -1}, 9, r"warmup_steps=-1"),
        ({"warmup_steps": 9}, 9, r"warmup_steps=9 .* a run of 9: .* at most 8"),
        ({"warmup_frac": 0.9}, 3, r"warmup_frac=0\.9 .* a warm-up of 3 steps in a run of 3"),
        ({"final": 1.5}, 9, r"schedule\.final=1\.5"),
        ({"final": math.nan}, 9, r"schedule\.final=nan"),
        ({"decay_frac": -0.1}, 9, r"schedule\.decay_frac=-0\.1"),
        ({"gamma": 2.0}, 9, r"schedule\.gamma=2\.0"),
        ({"milestones": [0.5, 75]}, 9, r"schedule\.milestones\[1\]=75"),
        ({}, 0, "at least 1 optimizer step"),
    ],
)
def test_nonsense_is_refused_by_name(fields: dict[str, Any], total: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_schedule(ScheduleConfig(**fields), total)


def test_is_a_value() -> None:
    schedule = build_schedule(ScheduleConfig(name="linear"), 7)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    with pytest.raises(AttributeError):
        schedule.total_steps = 8  # type: ignore[misc]
    with pytest.raises(ValueError, match="negative"):
        schedule(-1)


def test_docstrings_compute_what_they_say() -> None:
    result = doctest.testmod(mprun.training.schedule)
    assert result.attempted >= 7
    assert result.failed == 0


def test_options_in_conf_are_the_shapes() -> None:
    files = {path.stem: path for path in (Path(__file__).parents[1] / "conf" / "schedule").glob("*.yaml")}
    assert set(files) == set(SHAPES)
    for name, path in files.items():
        merged = OmegaConf.merge(OmegaConf.structured(ScheduleConfig), OmegaConf.load(path))
        assert build_schedule(OmegaConf.to_object(merged), 100) == Schedule(name, 100)  # type: ignore[arg-type]
        assert path.read_text().startswith("# "), "`mprun list` shows the first comment"
