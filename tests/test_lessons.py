"""The lesson recipes: each says what it shows, and the arithmetic behind each is computed here.

The outcomes themselves are measured by ``mprun verify --all``; what can be computed in a moment is checked on every change.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from mprun.compose import compose
from mprun.config import Config
from mprun.config_check import to_plain
from mprun.recipes import expectations
from tests.conftest import FP16, SGD, batch

ROOT = Path(__file__).resolve().parent.parent
LESSONS = sorted(path.stem for path in (ROOT / "recipes" / "lessons").glob("*.yaml"))
# (mistake, cure): which keys may differ between the two.
PAIRS = {
    ("underflow_unscaled", "underflow_fp32"): {"precision"},
    ("underflow_unscaled", "underflow_static"): {"precision"},
    ("underflow_unscaled", "underflow_dynamic"): {"precision"},
    ("pure_bf16_stalls", "pure_bf16_cured"): {"precision"},
    ("clip_before_unscale", "clip_after_unscale"): {"train.clip_norm"},
    ("scale_static_too_high", "scale_dynamic_settles"): {"precision"},
    ("batchnorm_half", "batchnorm_fp32"): {"precision.fp32_modules"},
}


def config(name: str) -> Config:
    return compose([f"recipe=lessons/{name}"]).config


def expected(name: str) -> dict[str, tuple[str, float | str, float]]:
    return {line.metric: (line.op, line.value, line.tolerance) for line in expectations(config(name).expect)}


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_says_what_it_shows_and_was_measured(name):
    text = (ROOT / "recipes" / "lessons" / f"{name}.yaml").read_text()
    for part in ("# Claim ", f"# Command   mprun verify lessons/{name}\n", "# Time ", "# Hardware "):
        assert part in text
    made = config(name)
    assert made.meta.keys() >= {"title", "source", "seeds"}
    assert made.meta["seeds"] == [0, 1, 2]
    assert made.expect[0]["measured"].keys() == {"commit", "device", "versions", "seeds", "values"}
    for line in made.expect:
        assert len(line["measured"]["values"]) == 3
    for other in re.findall(r"lessons/(\w+)", text):
        assert other in LESSONS


@pytest.mark.parametrize(("pair", "differ"), PAIRS.items(), ids=lambda item: "-".join(item))
def test_a_pair_differs_in_its_lesson_alone(pair, differ):
    mistake, cure = (to_plain(config(name)) for name in pair)
    for plain in (mistake, cure):
        for key in ("meta", "expect", "name"):
            del plain[key]
    for key in differ:
        for plain in (mistake, cure):
            node = plain
            *path, last = key.split(".")
            for part in path:
                node = node[part]
            del node[last]
    assert mistake == cure


def test_every_lesson_has_a_counterpart():
    assert {name for pair in PAIRS for name in pair} == set(LESSONS)


@pytest.mark.parametrize(("pair"), PAIRS, ids="-".join)
def test_the_measured_outcomes_are_the_claimed_ones(pair):
    """The numbers of the recipes, held against what their headers say of them; both were measured on the same machine."""
    mistake, cure = expected(pair[0]), expected(pair[1])
    _, good, _ = cure["val/top1"]
    assert isinstance(good, float)
    if pair[0] == "scale_static_too_high":
        assert mistake["status"][1] == "diverged"
        assert mistake["steps_applied"][1] == 0
        return
    op, bad, tolerance = mistake["val/top1"]
    assert isinstance(bad, float)
    assert op == "<="
    assert good - cure["val/top1"][2] - (bad + tolerance) > 0.05  # no run can pass for both
    assert good - bad > 0.10


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def test_no_gradient_of_a_logit_survives_in_the_underflow_lesson():
    made = config("underflow_unscaled")
    weight, size = made.train.loss_weight, made.train.batch_size
    assert made.train.drop_last  # a short batch would have larger gradients
    assert weight / size < 2.0**-25  # |softmax - target| is at most 1
    logits = torch.tensor([[60.0, 0.0]]).repeat(size, 1).requires_grad_()
    loss = weight * nn.functional.cross_entropy(logits, torch.ones(size, dtype=torch.long))
    loss.backward()
    assert logits.grad is not None
    assert float(logits.grad.abs().max()) == pytest.approx(weight / size)  # the bound is reached
    assert logits.grad.half().count_nonzero() == 0
    assert (logits.grad * 65536).half().count_nonzero() == logits.numel()


def test_clipping_the_scaled_gradient_is_clipping_the_true_one_at_the_inverse_scale(make_state):
    """A plain loop that clips before it unscales, against our run with ``clip_norm = 1/S``, step by step."""
    from mprun.training.step import train_step

    scale, lr, steps = 1024.0, 0.5, 8
    generator = torch.Generator().manual_seed(0)
    # Whole numbers up to 4 and weights that start at 0: every product is exact in FP16 for a start.
    inputs = torch.randint(-4, 5, (16, 4), generator=generator).float()
    targets = torch.randint(0, 3, (16,), generator=generator)
    state = make_state(
        nn.Linear(4, 3, bias=False), steps=steps,
        **{**FP16, **SGD, "precision.loss_scale.kind": "static", "precision.loss_scale.init": scale, "optimizer.lr": lr,
           "train.clip_norm": 1 / scale, "schedule.name": "constant", "device": "cpu"},
    )  # fmt: skip
    plain = nn.Linear(4, 3, bias=False)
    with torch.no_grad():
        plain.weight.copy_(next(state.model.parameters()))
    start = plain.weight.detach().clone()
    optimizer = torch.optim.SGD(plain.parameters(), lr=lr)
    for _ in range(steps):
        with torch.autocast("cpu", torch.float16):
            logits = plain(inputs)
        loss = nn.functional.cross_entropy(logits.float(), targets)
        optimizer.zero_grad()
        (loss * scale).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)  # the mistake: the norm of S g
        assert plain.weight.grad is not None
        plain.weight.grad /= scale
        optimizer.step()
        result = train_step(state, [batch(inputs, targets)]).read()
        assert result.applied
        assert result.grad_norm > 100 / scale  # it was clipped
    ours = next(state.model.parameters()).detach()
    moved, theirs = (ours - start).norm(), (plain.weight.detach() - start).norm()
    assert float(moved) == pytest.approx(float(theirs), rel=1e-3)
    assert moved <= steps * lr / scale * (1 + 1e-5)  # the crawl: no step is longer than lr / S
    torch.testing.assert_close(ours - start, plain.weight.detach() - start, rtol=2e-3, atol=2e-3 * lr / scale)


@pytest.mark.parametrize(
    ("dtype", "momentum", "low", "high"),
    [
        (torch.float32, 0.003, 0.999, 1.001),
        (torch.bfloat16, 0.003, 0.49, 0.51),  # half an ulp from 0.5 up is 2^-9, and 0.003 (1 - 0.5) is less
        (torch.float16, 0.003, 0.90, 0.95),  # half an ulp is 2^-12: stops 0.08 below
        (torch.bfloat16, 0.1, 0.96, 1.0),
    ],
)
def test_a_running_mean_in_half_stops_where_its_increment_is_half_an_ulp(dtype, momentum, low, high):
    """r := r + m (x - r) from 0 to x = 1 stands still once m (1 - r) is below half an ulp of r."""
    norm = nn.BatchNorm1d(1, momentum=momentum).to(dtype)
    data = torch.tensor([[0.5], [1.5]], dtype=dtype).repeat(50, 1)
    for _ in range(4000):
        norm(data)
    assert norm.running_mean is not None
    before = norm.running_mean.clone()
    norm(data)
    assert torch.equal(norm.running_mean, before)
    assert low <= float(before) <= high
    half_ulp = torch.finfo(dtype).eps / 4  # of numbers from 0.5 to 1
    assert momentum * (1 - float(before)) <= half_ulp + 1e-6


def test_the_static_scale_of_the_lesson_overflows_where_the_header_says():
    scale = config("scale_static_too_high").precision.loss_scale.init
    assert scale == 2.0**24
    limit = 65504 / scale
    assert limit == pytest.approx(0.0039, rel=0.01)
    assert torch.tensor(limit * 1.001 * scale).half().isinf()


def test_a_weight_of_a_tenth_loses_the_updates_of_the_stall_lesson():
    lr = config("pure_bf16_stalls").optimizer.lr
    weight = torch.tensor(0.1, dtype=torch.bfloat16)
    assert weight - torch.tensor(lr, dtype=torch.bfloat16) == weight
    master = torch.tensor(0.1)
    for _ in range(10):
        master -= lr
    assert master.bfloat16() < weight
