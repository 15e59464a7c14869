"""online: sums under a softmax, without the softmax; the arithmetic of `kl`, in registers.

An online softmax: every lane keeps its largest logit and its sums under weights relative to that,
and the lanes meet at a row's end, so that nothing of size V is stored. What is squared is centred
first: a chunk's mean and its sums about it are found in registers and joined to the earlier ones
as Chan, Golub and LeVeque do (The American Statistician 37, 1983), never as E u² − (E u)²; means
are kept as two float32 numbers, which a variance of 1e-4 over tangents of 1000 needs.
"""

import math

import triton
import triton.language as tl

from logra_lab.kernels.apply import widen

INF = tl.constexpr(math.inf)
LN2 = tl.constexpr(math.log(2))


@triton.jit
def read(row, start, size, stride, BEHIND: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr):
    at = start + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    return widen(tl.load(row + at.to(tl.int64) * stride, mask=at < size, other=BEHIND))


@triton.jit
def finite(top):
    """A maximum to subtract: 0 where no id has been seen, as −inf − (−inf) is no number."""
    return tl.where(top == -INF, 0.0, top)


@triton.jit
def share(part, total):
    return part / tl.where(total > 0, total, 1.0)


@triton.jit
def moments(w, total, u):
    """Weighted mean of a chunk's columns, as two numbers, and what is left of u."""
    high = share(tl.sum(w * u, 0), total)
    u -= high
    low = share(tl.sum(w * u, 0), total)
    return high, low, u - low


@triton.jit
def join(W, high, low, W2, high2, low2):
    """Mean of two sets of weights W, W2; and the gap of their means."""
    gap = (high2 - high) + (low2 - low)
    second = share(W2, W + W2)
    heavy = second > 0.5  # start from the heavier: a light one must not round it
    step = tl.where(heavy, -gap * share(W, W + W2), gap * second)
    base = tl.where(heavy, high2, high)
    mean = base + step
    return mean, (step - (mean - base)) + tl.where(heavy, low2, low), gap, second


@triton.jit
def excess(x, w, y, scale):
    """w·(e^Y − 1 − Y)/2^scale, with Y = y·ln 2 and w = 2^x; where Y is large e^Y w is 2^(x + y)."""
    Y = y * LN2
    series = 1 / 720 + Y * (1 / 5040 + Y / 40320)
    series = Y * Y * (0.5 + Y * (1 / 6 + Y * (1 / 24 + Y * (1 / 120 + Y * series))))
    w *= tl.exp2(-scale)
    return tl.where(tl.abs(Y) < 0.5, w * series, tl.exp2(x + y - scale) - w * (1 + Y))


@triton.jit
def log1p(part, scale):
    """log(1 + part·2^scale); through atanh where a logarithm near 1 would lose digits."""
    x = part * tl.exp2(tl.minimum(scale, 1.0))
    s = x / (2 + x)
    q = s * s
    series = 1 / 5 + q * (1 / 7 + q * (1 / 9 + q * (1 / 11 + q * (1 / 13 + q / 15))))
    series = 2 * s * (1 + q * (1 / 3 + q * series))
    above = (scale + tl.log2(tl.exp2(-tl.maximum(scale, 1.0)) + part)) * LN2
    return tl.where(scale > 1, above, tl.where(x < 1, series, tl.log2(1 + x) * LN2))
