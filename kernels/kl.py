"""kl: predicted and realised KL, log-probability and entropy, in one pass over rows of logits.

Nothing of size V is stored, and nothing is squared before it is centred: see `online`.

Realised KL is log E e^y, with y the change of z/T less its mean under p_old. As E y = 0, that is
log(1 + E(e^y − 1 − y)): again no term is negative, and no log-probability has to be known before.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64, Shaped
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.kernels import require
from logra_lab.kernels.apply import TYPES, widen
from logra_lab.kernels.online import INF, LN2, excess, finite, join, log1p, moments, read
from logra_lab.operators import apply

KINDS = ("token", "variance", "realised")
_NUMBERS = 1 << 21  # of a [rows, V] temporary of the derivatives: 8 MiB


@triton.jit
def _rows(
    z,
    other,
    labels,
    out,
    n,
    size,
    z_row,
    z_column,
    other_row,
    other_column,
    labels_row,
    rate,
    KIND: tl.constexpr,
    DEPTH: tl.constexpr,
    LANES: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    z += place * z_row
    none = tl.zeros([LANES], tl.float32)
    top, W, surprise = none - INF, none, none  # x and y below count in powers of 2
    high, low, spread, scale = none, none, none, none
    dead_top, dead, lost = none - INF, none, none
    for start in range(0, size, DEPTH * LANES):
        logits = read(z, start, size, z_column, -INF, DEPTH, LANES)
        new_top = tl.maximum(top, tl.max(logits, 0))
        x = (logits - finite(new_top)) * rate
        w = tl.exp2(x)
        W2 = tl.sum(w, 0)
        fall = (top - finite(new_top)) * rate
        shrink = tl.exp2(fall)
        top = new_top
        if labels is not None:
            before = tl.where(W > 0, shrink * (surprise - W * fall), 0.0)
            surprise = before + tl.sum(tl.where(w > 0, -w * x, 0.0), 0)
        if KIND == "variance":
            u = read(other + place * other_row, start, size, other_column, 0.0, DEPTH, LANES)
            u = tl.where(w > 0, u, 0.0)  # what has no weight has no say, whatever its tangent
            high2, low2, u = moments(w, W2, u)
            W *= shrink
            heard = W > 0  # and what had some, before this maximum, is forgotten with it
            high, low = tl.where(heard, high, 0.0), tl.where(heard, low, 0.0)
            spread = tl.where(heard, shrink * spread, 0.0)
            high, low, gap, second = join(W, high, low, W2, high2, low2)
            # In this order: a large gap would have an infinite square, times a weight of 0.
            spread += tl.sum(w * u * u, 0) + gap * (W * second) * gap
            W += W2
        elif KIND == "realised":
            new = read(other + place * other_row, start, size, other_column, -INF, DEPTH, LANES)
            # What only the new policy may say weighs on its normaliser; what it may no longer say
            # is an infinite KL.
            masked, gone = logits == -INF, (new == -INF) & (logits != -INF)
            lost = tl.maximum(lost, tl.max(tl.where(gone, INF, 0.0), 0))
            mute = tl.where(masked, new, -INF)
            new_top = tl.maximum(dead_top, tl.max(mute, 0))
            dead *= tl.exp2((dead_top - finite(new_top)) * rate)
            dead += tl.sum(tl.exp2((mute - finite(new_top)) * rate), 0)
            dead_top = new_top
            high2, low2, y = moments(w, W2, tl.where(masked | gone, 0.0, new - logits))
            mean, rest, gap, second = join(W * shrink, high, low, W2, high2, low2)
            y = (y + ((high2 - mean) + (low2 - rest))) * rate
            t = ((high - mean) + (low - rest)) * rate
            rise = tl.maximum(fall + t + scale, tl.maximum(tl.max(x + y, 0), 0.0))
            spread = spread * tl.exp2(fall + t + scale - rise) + W * excess(fall, shrink, t, rise)
            spread += tl.sum(excess(x, w, y, rise[None, :]), 0)
            high, low, scale = mean, rest, rise
            W = W * shrink + W2
        else:
            W = W * shrink + W2

    # The lanes meet.
    peak = tl.max(top, 0)
    fall = (top - finite(peak)) * rate
    shrink = tl.exp2(fall)
    total = tl.sum(shrink * W, 0)
    if labels is not None:
        y = tl.load(labels + place * labels_row)
        said = widen(tl.load(z + y * z_column, mask=(y >= 0) & (y < size), other=float("nan")))
        entropy = tl.sum(tl.where(shrink * W > 0, shrink * (surprise - W * fall), 0.0), 0) / total
        logp = (said - finite(peak)) * rate - tl.log2(total)
        tl.store(out + n + place, logp * LN2)
        tl.store(out + 2 * n + place, (entropy + tl.log2(total)) * LN2)
    if KIND == "variance":
        heard = shrink * W > 0
        high, low = tl.where(heard, high, 0.0), tl.where(heard, low, 0.0)
        spread = tl.where(heard, spread, 0.0)
    if KIND != "token":
        middle = tl.sum(shrink * W * high, 0) / total
        u = (high - middle) + low
        below = tl.sum(shrink * W * u, 0) / total
        u -= below
        if KIND == "variance":
            half = 0.5 * (rate * LN2) * (rate * LN2)
            kl = half * tl.sum(shrink * spread + shrink * W * u * u, 0) / total
        else:
            t = u * rate
            rise = tl.maximum(tl.max(tl.where(W > 0, fall + t + scale, 0.0), 0), 0.0)
            part = spread * tl.exp2(tl.where(W > 0, fall + t + scale - rise, -INF))
            part += W * excess(fall, shrink, t, rise)
            kl = log1p(tl.sum(part, 0) / total, rise)
            edge = tl.max(dead_top, 0)
            mute = tl.sum(dead * tl.exp2((dead_top - finite(edge)) * rate), 0) / total
            gap = ((finite(edge) - peak) - middle - below) * rate - kl / LN2
            kl += tl.where(mute == 0, 0.0, log1p(mute, gap))
            kl += tl.max(lost, 0)
        tl.store(out + place, kl)


def launch(
    z: Shaped[Tensor, "n V"],
    other: Shaped[Tensor, "n V"] | None = None,
    labels: Int64[Tensor, "n"] | None = None,
    temperature: float = 1.0,
    kind: str = "token",
    *,
    out: Float32[Tensor, "3 n"] | None = None,
    lanes: int | None = None,
) -> Float32[Tensor, "3 n"]:
    """Of each row of logits, in float32: (KL, log-probability of its label, entropy), in nats.

    Args:
        z: logits, of any strides, in float32, bfloat16 or float16. −inf: masked, without a say.
        other, kind: the tangent ż, for ``variance``: ½ Var_p(ż/T), p = softmax(z/T); the new
            logits, for ``realised``: KL(softmax(z/T) ‖ softmax(other/T)), infinite where an id is
            newly masked; None for ``token``: KL is nan.
        labels: sampled ids, nan for one outside 0..V − 1; None: log-probability, entropy are nan.
        out: where to write them, contiguous; what was not asked for stays.
        lanes: columns of a chunk, a power of two; as wide as four warps load at once, so that a
            column lies in one thread and the loop needs no exchange between threads.

    A row without any id, or with nan or +inf logits, gives nan. Raises `InputError` for shapes,
    types or devices that do not fit. Cost: z and `other` are read once, 12 bytes a row written.
    """
    _check(z, other, labels, temperature, kind)
    require(_rows, z.device)
    n, V = z.shape
    if out is None:
        out = z.new_full((3, n), math.nan, dtype=torch.float32)
    elif out.shape != (3, n) or out.dtype != torch.float32 or not out.is_contiguous():
        raise InputError(f"kernel kl: expected out [3, {n}], float32, contiguous, got {out.shape}")
    if n == 0:
        return out
    if lanes is None:
        lanes = 512 if all(x is None or x.dtype == torch.float32 for x in (z, other)) else 1024
    other_strides = (0, 0) if other is None else other.stride()
    with torch.cuda.device_of(z):
        _rows[n,](
            z,
            other,
            labels,
            out,
            n,
            V,
            *z.stride(),
            *other_strides,
            0 if labels is None else labels.stride(0),
            math.log2(math.e) / temperature,
            kind,
            2 if kind == "realised" and lanes > 512 else 4,  # deeper would spill registers
            lanes,
            num_warps=4,
        )
    return out


def reference(
    z: Shaped[Tensor, "n V"],
    other: Shaped[Tensor, "n V"] | None = None,
    labels: Int64[Tensor, "n"] | None = None,
    temperature: float = 1.0,
    kind: str = "token",
) -> Float[Tensor, "3 n"]:
    """What `launch` gives, by the definitions, in float64."""
    log_p = torch.log_softmax(z.double() / temperature, dim=-1)
    p, alive = log_p.exp(), log_p > -math.inf
    out = p.new_full((3, len(p)), math.nan)
    if other is not None and kind == "variance":
        u = torch.where(alive, other.double() / temperature, 0)
        out[0] = (p * (u - (p * u).sum(-1, keepdim=True)).square()).sum(-1) / 2
    elif other is not None:
        log_q = torch.log_softmax(other.double() / temperature, dim=-1)
        x = torch.where(alive, log_q - log_p, 0)
        # p(e^x − 1 − x), with p e^x = q where e^x would be large or p is 0
        small = alive & (x.abs() < 1)
        out[0] = torch.where(small, p * (torch.expm1(x) - x), log_q.exp() - p - p * x).sum(-1)
    if labels is not None:
        out[1] = log_p.gather(1, labels[:, None])[:, 0]
        out[2] = torch.special.entr(p).sum(-1)
    return out


@torch.library.custom_op("logra_lab::logit_rows", mutates_args=())
def _op(
    z: Tensor, other: Tensor | None, labels: Tensor | None, temperature: float, kind: str
) -> Tensor:
    return launch(z, other, labels, temperature, kind)


@_op.register_fake
def _(
    z: Tensor, other: Tensor | None, labels: Tensor | None, temperature: float, kind: str
) -> Tensor:
    _check(z, other, labels, temperature, kind)
    return z.new_empty((3, z.shape[0]), dtype=torch.float32)


class _Rows(torch.autograd.Function):
    """The kernel, with the derivatives that an operator of its own would drop without a word."""

    @staticmethod
    def forward(
        z: Tensor,
        other: Tensor | None,
        labels: Tensor | None,
        temperature: float,
        kind: str,
    ) -> Tensor:
        return torch.ops.logra_lab.logit_rows(z, other, labels, temperature, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        z, other, labels, ctx.temperature, ctx.kind = inputs
        ctx.save_for_backward(z, other, labels)
        ctx.save_for_forward(z, other, labels)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (g,), (z, other, labels) = grads, ctx.saved_tensors
        parts = _derivatives(z, other, labels, ctx.temperature, ctx.kind)
        dz = torch.zeros_like(z)
        d_other = None if other is None else torch.zeros_like(other)
        for rows, result, by_z, by_other in parts:
            dz[rows] += (g[result, rows, None] * by_z).to(z.dtype)
            if d_other is not None and by_other is not None:
                d_other[rows] += (g[result, rows, None] * by_other).to(d_other.dtype)
        return dz, d_other, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        z, other, labels = ctx.saved_tensors
        parts = _derivatives(z, other, labels, ctx.temperature, ctx.kind)
        out = z.new_zeros((3, z.shape[0]), dtype=torch.float32)
        for rows, result, by_z, by_other in parts:
            for by, dot in ((by_z, tangents[0]), (by_other, tangents[1])):
                if by is not None and dot is not None:
                    # A masked id has no say, whatever its tangent.
                    out[result, rows] += torch.where(by != 0, by * dot[rows], 0).sum(-1)
        return out


def _derivatives(
    z: Tensor, other: Tensor | None, labels: Tensor | None, temperature: float, kind: str
) -> Iterator[tuple[slice, int, Tensor, Tensor | None]]:
    """For some rows at a time and each result: its derivatives by z and by `other`, [rows, V]."""
    cut = max(1, _NUMBERS // z.shape[1])
    for start in range(0, z.shape[0], cut):
        rows = slice(start, start + cut)
        log_p = torch.log_softmax(z[rows].float() / temperature, dim=-1)
        p = log_p.exp()
        if other is not None and kind == "variance":
            u = torch.where(p > 0, other[rows].float() / temperature, 0)
            u = u - (p * u).sum(-1, keepdim=True)
            square = u.square()
            mean = (p * square).sum(-1, keepdim=True)
            yield rows, 0, p * (square - mean) / (2 * temperature), p * u / temperature
        elif other is not None and kind == "realised":
            log_q = torch.log_softmax(other[rows].float() / temperature, dim=-1)
            x = torch.where(p > 0, log_q - log_p, 0)
            mean = (p * x).sum(-1, keepdim=True)
            yield rows, 0, p * (mean - x) / temperature, (log_q.exp() - p) / temperature
        if labels is not None:
            ids = labels[rows, None]
            known = (ids >= 0) & (ids < p.shape[1])  # elsewhere the log-probability is nan
            one = torch.zeros_like(p).scatter_(1, ids.clamp(0, p.shape[1] - 1), 1)
            yield rows, 1, torch.where(known, (one - p) / temperature, 0), None
            log_p = torch.where(p > 0, log_p, 0)
            mean = (p * log_p).sum(-1, keepdim=True)
            yield rows, 2, p * (mean - log_p) / temperature, None


def variance(
    z: Shaped[Tensor, "n V"], z_dot: Shaped[Tensor, "n V"], temperature: float = 1.0
) -> Float[Tensor, "n"]:
    """½ Var_p(ż/T) by `launch`, for autograd, forward mode, FakeTensorMode and torch.compile."""
    return apply(_Rows, z, z_dot, None, float(temperature), "variance").select(0, 0)


def realised(
    z_old: Shaped[Tensor, "n V"], z_new: Shaped[Tensor, "n V"], temperature: float = 1.0
) -> Float[Tensor, "n"]:
    """KL(p_old ‖ p_new), likewise."""
    return apply(_Rows, z_old, z_new, None, float(temperature), "realised").select(0, 0)


def token(
    z: Shaped[Tensor, "n V"], labels: Int64[Tensor, "n"], temperature: float = 1.0
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """Log-probability of the labels, and entropy, likewise."""
    _, logp, entropy = apply(_Rows, z, None, labels, float(temperature), "token")
    return logp, entropy


def _check(
    z: Tensor, other: Tensor | None, labels: Tensor | None, temperature: float, kind: str
) -> None:
    def need(good: bool, what: str, came: object) -> None:
        if not good:
            raise InputError(f"kernel kl: expected {what}, got {came}")

    need(kind in KINDS, f"a kind of {KINDS}", kind)
    need(z.dim() == 2 and z.shape[1] > 0, "logits [n, V] with V ≥ 1", list(z.shape))
    need(z.dtype in TYPES, f"logits in one of {TYPES}", z.dtype)
    need((other is None) == (kind == "token"), "a second [n, V] tensor unless kind='token'", kind)
    if other is not None:
        need(other.shape == z.shape, f"a second tensor {list(z.shape)}", list(other.shape))
        need(other.dtype in TYPES, f"a second tensor in one of {TYPES}", other.dtype)
    if labels is not None:
        need(
            labels.dtype == torch.int64 and labels.shape == z.shape[:1],
            f"int64 labels [{z.shape[0]}]",
            (labels.dtype, list(labels.shape)),
        )
    devices = {x.device for x in (z, other, labels) if x is not None}
    need(len(devices) == 1, "tensors on one device", devices)
    need(0 < temperature < math.inf, "a temperature > 0", temperature)
