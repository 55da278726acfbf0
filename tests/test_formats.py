"""Facts of float formats, held against torch and against every number that 16 bits can represent."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mprun.numerics.formats import FORMATS, Format

HALF = [FORMATS["float16"], FORMATS["bfloat16"]]
TORCH = [FORMATS[name] for name in ("float16", "bfloat16", "float32", "float64")]


def every_positive(form: Format) -> torch.Tensor:
    """All finite numbers above 0 of a 16-bit format, ascending, float64. Their bit patterns are 1, 2, 3, ..."""
    bits = torch.arange(1, 2**15, dtype=torch.int32).to(torch.int16)
    values = bits.view(getattr(torch, form.name)).double()
    return values[values.isfinite()]


@pytest.mark.parametrize("form", HALF, ids=lambda form: form.name)
def test_every_sixteen_bit_number(form: Format) -> None:
    values = every_positive(form)
    assert len(values) == (2**form.exponent_bits - 1) * 2**form.mantissa_bits - 1
    assert values[-1].item() == form.max
    assert values[0].item() == form.smallest_subnormal
    # Normal numbers are those whose exponent bits are not all 0.
    assert values[2**form.mantissa_bits - 1].item() == form.smallest_normal
    one = int((values == 1).nonzero())
    assert values[one + 1].item() - 1 == form.eps


@pytest.mark.parametrize("form", HALF, ids=lambda form: form.name)
def test_ulp_is_the_distance_to_the_next_number_for_every_sixteen_bit_number(form: Format) -> None:
    values = every_positive(form)
    gaps = values.diff().tolist()
    assert [form.ulp(x) for x in values[:-1].tolist()] == gaps
    assert [form.ulp(-x) for x in values[:-1].tolist()] == gaps
    assert form.ulp(form.max) == gaps[-1]
    assert form.ulp(0.0) == form.smallest_subnormal


@pytest.mark.parametrize("form", TORCH, ids=lambda form: form.name)
def test_agrees_with_torch(form: Format) -> None:
    dtype = getattr(torch, form.name)
    facts = torch.finfo(dtype)
    assert (form.max, form.eps, form.smallest_normal) == (facts.max, facts.eps, facts.tiny)
    assert form.bytes == torch.empty(0, dtype=dtype).element_size()


@pytest.mark.parametrize("form", TORCH[:3], ids=lambda form: form.name)
def test_where_rounding_overflows_and_underflows(form: Format) -> None:
    dtype = getattr(torch, form.name)

    # torch rounds float64 to half by way of float32, twice; so the neighbours of a 16-bit border are those in float32.
    wide: Any = np.float64 if dtype is torch.float32 else np.float32

    def rounded(x: Any) -> float:
        return torch.tensor(wide(x)).to(dtype).item()

    assert rounded(form.overflow) == math.inf
    assert rounded(np.nextafter(wide(form.overflow), wide(0))) == form.max
    assert rounded(form.smallest_subnormal / 2) == 0
    assert rounded(np.nextafter(wide(form.smallest_subnormal / 2), wide(1))) == form.smallest_subnormal


def test_the_numbers_that_people_quote() -> None:
    half, brain = FORMATS["float16"], FORMATS["bfloat16"]
    assert (half.max, half.overflow, half.smallest_normal) == (65504.0, 65520.0, 2.0**-14)
    assert (half.smallest_subnormal, half.eps) == (2.0**-24, 2.0**-10)
    assert (brain.smallest_normal, brain.smallest_subnormal, brain.eps) == (2.0**-126, 2.0**-133, 2.0**-7)
    assert brain.max == pytest.approx(3.39e38, rel=1e-3)
    # Just below 0.5 the spacing of FP16 is 2**-12, so an update of 3e-6 is lost there.
    assert half.ulp(0.499) == 2.0**-12
    tensor_core = FORMATS["tfloat32"]
    assert (tensor_core.eps, tensor_core.smallest_normal) == (half.eps, FORMATS["float32"].smallest_normal)


def test_ulp_outside_of_the_range() -> None:
    half = FORMATS["float16"]
    assert half.ulp(65504.1) == half.ulp(-math.inf) == math.inf
    assert math.isnan(half.ulp(math.nan))


@given(st.floats(min_value=-65504, max_value=65504, width=32))
def test_rounding_moves_a_value_by_at_most_half_an_ulp(x: float) -> None:
    half = FORMATS["float16"]
    error = abs(torch.tensor(x).half().double().item() - x)
    assert error <= half.ulp(x) / 2


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_ulp_of_float64_is_pythons(x: float) -> None:
    assert FORMATS["float64"].ulp(x) == math.ulp(x)


def test_needs_no_torch() -> None:
    code = "import mprun.numerics.formats, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FP8 = [FORMATS["float8_e4m3fn"], FORMATS["float8_e5m2"]]


@pytest.mark.parametrize("form", FP8, ids=lambda form: form.name)
def test_every_eight_bit_number(form: Format) -> None:
    dtype = getattr(torch, form.name)
    values = torch.arange(1, 2**7, dtype=torch.uint8).view(dtype).double()
    values = values[values.isfinite()]
    # E4M3 gives away a single pattern (NaN), E5M2 a whole exponent.
    assert len(values) == (2**7 - 2 if not form.has_inf else 2**7 - 2**form.mantissa_bits - 1)
    assert (values[-1].item(), values[0].item()) == (form.max, form.smallest_subnormal)
    assert values[2**form.mantissa_bits - 1].item() == form.smallest_normal
    assert [form.ulp(x) for x in values[:-1].tolist()] == values.diff().tolist()
    facts = torch.finfo(dtype)
    assert (form.max, form.eps, form.smallest_normal) == (facts.max, facts.eps, facts.tiny)
    assert form.bytes == torch.empty(0, dtype=dtype).element_size()


def test_where_the_eight_bit_formats_overflow() -> None:
    e4m3, e5m2 = FP8

    def cast(x: float, form: Format) -> float:
        return torch.tensor(x, dtype=torch.float64).to(getattr(torch, form.name)).double().item()

    assert (e5m2.max, e5m2.overflow) == (57344.0, 61440.0)
    assert cast(e5m2.overflow, e5m2) == math.inf
    assert cast(61439.0, e5m2) == e5m2.max
    # 464 is the midpoint of 448 and the 480 that would follow; the tie goes to 448, whose mantissa is even.
    assert e4m3.max == 448.0
    assert 464.0 < e4m3.overflow < 464.0001
    assert cast(464.0, e4m3) == 448.0
    # Beyond, there is no inf to become: torch makes it the largest number, or NaN.
    assert not math.isinf(cast(1e6, e4m3))
    assert cast(480.0, e4m3) == 448.0 or math.isnan(cast(480.0, e4m3))
    for form in FP8:
        assert cast(form.smallest_subnormal / 2, form) == 0.0
        assert cast(form.smallest_subnormal * 0.51, form) == form.smallest_subnormal
