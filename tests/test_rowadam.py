"""RowAdam against the hand formulas, one number at a time, in float64."""

import math

import pytest
import torch

from logra_lab.errors import InputError
from logra_lab.rowadam import NonFiniteSketch, row_adam, row_adam_, row_moment, row_scales

VARIANTS = ["plain", "norm_preserving"]


def sketches(steps, d=4, r=3, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    rows = torch.logspace(-2, 1, d, dtype=torch.float64)[:, None]  # rows of unlike size
    return [
        (rows * torch.randn(d, r, dtype=torch.float64, generator=g)).to(dtype) for _ in range(steps)
    ]


def by_hand(history, variant, beta2, eps):
    """Section 2 of the method in Python floats: direction and moment after the last sketch."""
    d, r = history[0].shape
    v = [0.0] * d
    for S in history:
        v = [
            beta2 * v[i] + (1 - beta2) * sum(S[i, j].item() ** 2 for j in range(r)) / r
            for i in range(d)
        ]
    t, S = len(history), history[-1]
    root = [math.sqrt(x / (1 - beta2**t)) for x in v]
    if variant == "plain":
        s = [1 / (x + eps) for x in root]
        return [[S[i, j].item() * s[i] for j in range(r)] for i in range(d)], v
    floor = max(eps * sum(root) / d, 1.1754943508222875e-38)  # smallest normal float32
    s = [1 / (x + floor) for x in root]
    rms = math.sqrt(sum(x * x for x in s) / d)
    D = [[S[i, j].item() * s[i] / rms for j in range(r)] for i in range(d)]
    size = math.sqrt(sum(x.item() ** 2 for x in S.flatten()))
    now = math.sqrt(sum(x * x for row in D for x in row))
    return [[x * size / now for x in row] for row in D], v


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(("beta2", "eps"), [(0.95, 1e-8), (0.5, 0.3), (0.0, 1e-8)])
def test_directions_catch_a_summed_moment_a_late_bias_correction_or_a_misplaced_eps(
    variant, steps, beta2, eps
):
    history = sketches(steps)
    v = torch.zeros(4, dtype=torch.float64)
    for t, S in enumerate(history, start=1):
        D, v = row_adam(S, v, t, beta2=beta2, eps=eps, variant=variant)
    expected, moment = by_hand(history, variant, beta2, eps)
    torch.testing.assert_close(D, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)
    torch.testing.assert_close(v, torch.tensor(moment, dtype=torch.float64), rtol=1e-12, atol=0)


def test_first_plain_step_catches_a_missing_bias_correction():
    """At t = 1, v̂ is this sketch's own row mean square: every row of D has RMS 1."""
    (S,) = sketches(1)
    D, _ = row_adam(S, torch.zeros(4, dtype=torch.float64), 1, variant="plain", eps=0.0)
    torch.testing.assert_close(D.square().mean(1), torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norm_preserving_catches_a_direction_of_another_size(dtype):
    v = torch.zeros(4, dtype=dtype)
    for t, S in enumerate(sketches(4, dtype=dtype), start=1):
        D, v = row_adam(S, v, t, variant="norm_preserving")
        rtol = 1e-6 if dtype == torch.float32 else 1e-13
        assert D.dtype == dtype
        torch.testing.assert_close(D.norm(), S.norm(), rtol=rtol, atol=0)
        assert (D / S).std(1).max() < 1e-4 * (D / S).abs().max()  # one factor a row


def test_defaults_catch_another_beta2_eps_or_variant():
    """Published: β₂ = 0.95, ε = 1e-8; the main runs are norm-preserving."""
    history = sketches(2)
    _, v = row_adam(history[0], torch.zeros(4, dtype=torch.float64), 1)
    D, _ = row_adam(history[1], v, 2)
    expected, _ = by_hand(history, "norm_preserving", 0.95, 1e-8)
    torch.testing.assert_close(D, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_row_order_catches_a_moment_per_layer(variant):
    """The moment is per row: permuting rows permutes D, and nothing else."""
    (S,) = sketches(1)
    v = torch.tensor([1.0, 4.0, 0.25, 9.0], dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1])
    D, w = row_adam(S, v, 3, variant=variant)
    D2, w2 = row_adam(S[order], v[order], 3, variant=variant)
    torch.testing.assert_close(D2, D[order], rtol=1e-13, atol=0)
    assert torch.equal(w2, w[order])


def test_column_order_catches_a_moment_per_element_that_a_redraw_would_invalidate():
    """A redraw mixes columns: v sees a row only through its norm, and so carries over."""
    first, second = sketches(2)
    g = torch.Generator().manual_seed(4)
    rotation = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64, generator=g)).Q
    v = row_moment(torch.zeros(4, dtype=torch.float64), first)
    turned = row_moment(torch.zeros(4, dtype=torch.float64), first @ rotation)
    torch.testing.assert_close(v, turned, rtol=1e-12, atol=0)
    D, _ = row_adam(second, v, 2)
    D2, _ = row_adam(second @ rotation, turned, 2)
    torch.testing.assert_close(D2, D @ rotation, rtol=1e-11, atol=1e-15)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seen", [0.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_sketch_catches_nan_from_zero_over_zero(variant, seen, dtype):
    v = torch.full((3,), seen, dtype=dtype)
    D, new = row_adam(torch.zeros(3, 5, dtype=dtype), v, 2, variant=variant)
    assert torch.equal(D, torch.zeros(3, 5, dtype=dtype))
    torch.testing.assert_close(new, 0.95 * v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-25, 1e-12, 1e17])
def test_extreme_sketches_catch_overflow_of_the_row_factors(size, dtype):
    """1e-25 squared is below float32's range: the moment is 0, the direction must stay finite."""
    g = torch.Generator().manual_seed(0)
    S = size * torch.randn(6, 4, dtype=torch.float64, generator=g).to(dtype)
    D, v = row_adam(S, torch.zeros(6, dtype=dtype), 1, variant="norm_preserving")
    assert torch.isfinite(D).all()
    assert torch.isfinite(v).all()
    torch.testing.assert_close(D.double().norm(), S.double().norm(), rtol=1e-5, atol=0)
    D, _ = row_adam(S, torch.zeros(6, dtype=dtype), 1, variant="plain")
    assert torch.isfinite(D).all()
    assert D.abs().max() <= 4**0.5 * 1.001  # |S_ij| ≤ √r · RMS of its row


def test_dead_row_catches_a_floor_that_lets_silent_rows_take_over():
    """A row that has been silent gets at most 1/ε times the factor, and a zero row stays zero."""
    S = torch.ones(3, 4)
    S[1] = 0
    D, _ = row_adam(S, torch.zeros(3), 1, variant="norm_preserving")
    assert torch.equal(D[1], torch.zeros(4))
    torch.testing.assert_close(D.norm(), S.norm())
    torch.testing.assert_close(D[0], D[2])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_catches_an_update_made_of_nan_or_a_spoilt_moment(variant, bad):
    S = torch.ones(3, 4)
    S[2, 1] = bad
    v = torch.tensor([1.0, 2.0, 3.0])
    kept, old = S.clone(), v.clone()
    with pytest.raises(NonFiniteSketch, match=r"layers\.3\.q_proj.*not finite"):
        row_adam(S, v, 2, variant=variant, name="layers.3.q_proj")
    torch.testing.assert_close(S, kept, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(v, old)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -100.0])
def test_a_spoilt_moment_catches_an_update_made_of_nan(variant, bad):
    """The root of v̂ is no finite number there, nor is what is divided by it."""
    S, v = torch.ones(3, 4), torch.tensor([1.0, bad, 3.0])
    with pytest.raises(NonFiniteSketch, match=r"layers\.3\.q_proj.*moments"):
        row_adam_(S, v, {"layers.3.q_proj": 3}, 2, variant=variant)
    assert torch.equal(S, torch.ones(3, 4))


@pytest.mark.parametrize("t", [0, -1])
def test_an_update_number_catches_a_division_by_zero(t):
    S = torch.ones(3, 4)
    with pytest.raises(InputError, match="t ≥ 1"):
        row_adam_(S, torch.ones(3), {"a": 3}, t)
    assert torch.equal(S, torch.ones(3, 4))


def test_step_catches_a_moment_or_sketch_modified_in_place():
    (S,) = sketches(1)
    v = torch.ones(4, dtype=torch.float64)
    kept = S.clone()
    row_adam(S, v, 1)
    assert torch.equal(S, kept)
    assert torch.equal(v, torch.ones(4, dtype=torch.float64))


def test_row_scales_catches_factors_that_are_not_the_direction():
    first, second = sketches(2)
    v = row_moment(row_moment(torch.zeros(4, dtype=torch.float64), first), second)
    for variant in VARIANTS:
        D, _ = row_adam(
            second,
            row_moment(torch.zeros(4, dtype=torch.float64), first),
            2,
            variant=variant,
        )
        s = row_scales(v, second, {"layer": 4}, 2, variant=variant)
        torch.testing.assert_close(s[:, None] * second, D, rtol=1e-14, atol=0)


def test_unknown_variant_catches_a_silent_default():
    with pytest.raises(InputError, match=r"'adam'.*norm_preserving.*plain"):
        row_adam(torch.ones(2, 2), torch.ones(2), 1, variant="adam")
