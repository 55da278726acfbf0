"""Exponent statistics, held against plain casts and float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mprun.numerics import stats as module
from mprun.numerics.formats import FORMATS
from mprun.numerics.stats import PACKED, Stats, combine, from_json, measure, merged, stats, unpack

FORMS = [FORMATS[name] for name in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")]
# All that float32 can be: subnormals, the borders of the formats, NaN and infinities among them.
BORDERS = [0.0, -0.0, 2.0**-149, 2.0**-126, 2.0**-24, 2.0**-14, 448.0, 464.0, 465.0, 65504.0, 65519.0, 65520.0, 65536.0]
NUMBERS = st.one_of(
    st.floats(width=32), st.floats(-1, 1, width=32), st.floats(2.0**-40, 2.0**20, width=32), st.sampled_from(BORDERS)
)
LISTS = st.lists(NUMBERS, max_size=40)


def there(x: Tensor) -> Stats:
    """What an accelerator would be given to do, done on the CPU."""
    return unpack(module._look_there([x.reshape(-1)] if x.numel() else [], x.device))


def reference(x: Tensor) -> dict[str, float]:
    """Count, zeros, non-finite, amax and rms by numpy in float64."""
    values = x.double().numpy().reshape(-1)
    finite = values[np.isfinite(values)]
    return {
        "count": values.size,
        "zeros": int((values == 0).sum()),
        "nonfinite": values.size - finite.size,
        "amax": float(np.abs(finite).max(initial=0.0)),
        "rms": float(np.sqrt((finite**2).mean())) if finite.size else 0.0,
    }


def agrees(found: Stats, x: Tensor, rel: float = 1e-5) -> bool:
    expected = reference(x)
    rms = expected.pop("rms")
    return all(getattr(found, key) == value for key, value in expected.items()) and math.isclose(
        found.rms, rms, rel_tol=rel
    )


@given(values=LISTS)
@example(values=[])
@example(values=[math.nan, math.inf, -math.inf])
@example(values=[2.0**-149, -(2.0**-149), 3e38])
def test_counts_and_sums_are_those_of_numpy(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    for found in (stats(x), there(x)):
        assert agrees(found, x)
        nonzero = x[x.isfinite() & (x != 0)].double()
        exponents = [math.frexp(v)[1] - 1 for v in nonzero.abs().tolist()]
        # float32's subnormals share one bin, the lowest.
        expected = {e: exponents.count(e) for e in set(exponents)}
        bins = {found.low + i: n for i, n in enumerate(found.bins) if n}
        assert sum(expected.values()) == sum(bins.values()) == found.nonzero
        assert {e: n for e, n in bins.items() if e > -127} == {e: n for e, n in expected.items() if e >= -126}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@given(values=LISTS, k=st.integers(-20, 20))
def test_fractions_are_those_of_a_cast(form, values: list[float], k: int) -> None:
    """``S * x`` in float64, cast: what became 0, what lies below the smallest normal number, what is beyond the format."""
    x = torch.tensor(values, dtype=torch.float32)
    found, scale = stats(x), 2.0**k
    finite = x[x.isfinite()].double() * scale
    nonzero = finite[finite != 0]
    low = torch.tensor(form.smallest_subnormal / 2, dtype=torch.float64)
    # What shares an exponent with its neighbours beyond a limit is what the docstrings leave out.
    tie = int((nonzero.abs() == low).sum())
    # float32 has no exponents of its own for subnormals: with them the fraction is only sure below every one of them.
    if bool(((x != 0) & (x.abs() < 2.0**-126)).any()) and form.name == "bfloat16":
        return
    n = max(len(nonzero), 1)
    became_zero = int((nonzero.abs() <= low).sum())
    if (
        form.name != "bfloat16"
    ):  # float64 goes to the 8- and 16-bit formats by way of float32, whose own limits come first
        cast = nonzero.to(getattr(torch, form.name)).double()
        assert int((cast == 0).sum()) == became_zero
    assert round(found.underflow_frac(form, scale) * n) == became_zero - tie
    small = int(((nonzero.abs() < form.smallest_normal) & (nonzero.abs() > low)).sum())
    assert round(found.subnormal_frac(form, scale) * n) == small + tie
    beyond = nonzero.abs() >= form.overflow
    assert found.overflows(form, scale) == bool(beyond.any())
    sure = int((nonzero.abs() >= 2.0 ** math.frexp(form.max)[1]).sum())
    assert sure <= round(found.overflow_frac(form, scale) * n) <= max(int(beyond.sum()), sure)


@given(values=LISTS)
def test_overflow_to_half_is_where_the_cast_says(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    finite = x[x.isfinite()]
    found = stats(x)
    for name in ("float16", "bfloat16"):
        assert found.overflows(FORMATS[name]) == bool(finite.to(getattr(torch, name)).isinf().any())
    assert found.overflows(FORMATS["float8_e5m2"]) == bool(finite.to(torch.float8_e5m2).float().isinf().any())


@given(parts=st.lists(LISTS, min_size=1, max_size=4))
def test_parts_taken_together_are_the_whole(parts: list[list[float]]) -> None:
    tensors = [torch.tensor(part, dtype=torch.float32) for part in parts]
    whole = stats(torch.cat(tensors))
    together = unpack(combine([measure(t) for t in tensors]))
    for found in (merged([stats(t) for t in tensors]), together):
        assert (found.count, found.zeros, found.nonfinite, found.amax) == (
            whole.count,
            whole.zeros,
            whole.nonfinite,
            whole.amax,
        )
        assert found.bins == whole.bins
        assert found.low == whole.low or not whole.bins
        assert math.isclose(found.rms, whole.rms, rel_tol=1e-5)


@settings(max_examples=30)
@given(values=LISTS, k=st.integers(-30, 30))
def test_json_and_scaling(values: list[float], k: int) -> None:
    found = stats(torch.tensor(values, dtype=torch.float32))
    assert from_json(found.as_json()) == found
    assert found.scaled(k).underflow_frac(FORMS[0]) == found.underflow_frac(FORMS[0], 2.0**k)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5, 7), (2, 40_000)], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape).mul(torch.randn(shape).exp()).to(dtype)
    assert agrees(stats(x), x)
    assert agrees(there(x.float()), x.float())
    assert measure(x).shape == (PACKED,)


def test_complex_numbers_count_as_two() -> None:
    x = torch.tensor([3 + 4j, 0 + 0j, complex(math.inf, 1)])
    assert agrees(stats(x), torch.view_as_real(x))
    assert agrees(stats(x.conj()), torch.view_as_real(x.conj().resolve_conj()))
    assert agrees(stats(x.conj().imag), torch.tensor([-4.0, 0.0, -1.0]))  # a view that has its sign as a flag


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.transpose(0, 2),
        lambda x: x[:, ::2],
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x[:1].expand(8, -1, -1, -1),
        lambda x: x.permute(3, 0, 2, 1)[1:],
    ],
)
def test_any_layout_in_memory(make) -> None:
    torch.manual_seed(0)
    x, y = make(torch.randn(8, 6, 10, 90)), torch.randn(8, 6, 10, 90)
    assert agrees(stats(x), x)
    difference = unpack(measure(x, minus=make(y).contiguous()))
    assert agrees(difference, x - make(y))


def test_many_numbers_of_many_magnitudes() -> None:
    """Several chunks, one of them with what is not finite, one far from 1; the sum of squares leaves float32's range."""
    torch.manual_seed(0)
    x = torch.randn(5 * module.CPU_CHUNK + 17)
    x[: module.CPU_CHUNK] *= 1e-22
    x[-module.CPU_CHUNK :] *= 1e30
    x[module.CPU_CHUNK + 5], x[7], x[9] = math.nan, math.inf, 0.0
    assert agrees(stats(x), x)
    assert agrees(there(x), x)
    assert agrees(stats(x[: module.CPU_CHUNK]), x[: module.CPU_CHUNK])


@given(values=LISTS, k=st.integers(-16, 16))
def test_the_factor_comes_first(values: list[float], k: int) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    factor = torch.tensor(2.0**k)
    assert unpack(measure(x, factor)) == unpack(measure(x, 2.0**k)) == stats(x * 2.0**k)


def test_autocast_does_not_reach_the_statistics() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            assert stats(x) == stats(x.clone())
            assert agrees(there(x), x)
            inside = stats(x)
        assert inside == stats(x)


def test_flushed_subnormals() -> None:
    """Where a thread flushes subnormals to 0, its arithmetic does, and the statistics count them all the same."""
    x = torch.tensor([2.0**-130, 1.0])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert stats(x).nonzero == 2
        assert stats(x * 1.0).nonzero == 1
    finally:
        torch.set_flush_denormal(False)


def test_nothing_is_left_in_the_graph() -> None:
    x = torch.randn(4, requires_grad=True)
    assert not measure(x).requires_grad
    assert not measure(x * 2, minus=x).requires_grad
