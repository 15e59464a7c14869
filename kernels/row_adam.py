"""row_adam: moment and direction of every layer of a flat sketch S [Σd, r], in place.

Three launches. The first reads S once and gives each row its squared norm and new moment. The
second sees vectors of rows only: a program a layer turns them into row factors. The third
multiplies S by its row's factor. S is thus read twice and written once, which is the least in
place: under `norm_preserving` every factor depends on all rows of its layer (mean √v̂, ‖S‖ and
‖D‖), and under `plain` nothing may be written before the last row is known to be finite.
Sums and factors are float64: squares of 1e-25 or 1e20 stay numbers, and S, its memory, is what
takes time.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.kernels import overlaps, require

VARIANTS = ("norm_preserving", "plain")
ENTRIES = 4096  # of S in a program: 32 a thread
_CHUNK = tl.constexpr(2048)  # rows of a layer that its program takes at a time
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _moments(
    S,
    v,
    new_v,
    squares,
    d,
    r,
    s_row,
    s_col,
    v_row,
    beta2: tl.float64,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = row < d
    total = tl.zeros([ROWS], tl.float64)
    for start in range(0, r, COLS):
        column = start + tl.arange(0, COLS)
        place = S + row[:, None] * s_row + column[None, :].to(tl.int64) * s_col
        x = tl.load(place, mask=there[:, None] & (column < r)[None, :], other=0.0).to(tl.float64)
        total += tl.sum(x * x, 1)
    old = tl.load(v + row * v_row, mask=there, other=0.0).to(tl.float64)
    mean = total / r
    tl.store(new_v + row, (mean + beta2 * (old - mean)).to(tl.float32), mask=there)
    tl.store(squares + row, total, mask=there)


@triton.jit
def _factors(
    new_v,
    squares,
    ends,
    factors,
    norms,
    faulty,
    correction: tl.float64,
    eps: tl.float64,
    PRESERVE: tl.constexpr,
):
    """Factors of one layer's rows, its norm, and a mark if any of its numbers is not finite."""
    layer = tl.program_id(0)
    begin = tl.load(ends + layer)
    end = tl.load(ends + layer + 1)
    roots = tl.zeros([_CHUNK], tl.float64)
    size = tl.zeros([_CHUNK], tl.float64)
    for start in range(begin, end, _CHUNK):
        row = start + tl.arange(0, _CHUNK)
        there = row < end
        roots += tl.sqrt(tl.load(new_v + row, mask=there, other=0.0).to(tl.float64) / correction)
        size += tl.load(squares + row, mask=there, other=0.0)
    root, norm = tl.sum(roots, 0), tl.sqrt(tl.sum(size, 0))
    norm += root - root  # 0, or nan where a moment left the range of float32
    tl.store(norms + layer, norm)
    tl.store(faulty, 1, mask=norm != norm)

    floor, gain = eps, 1.0
    if PRESERVE:
        rows = tl.maximum(end - begin, 1).to(tl.float64)
        floor = tl.maximum(eps * root / rows, _TINY)
        size = tl.zeros([_CHUNK], tl.float64)
        for start in range(begin, end, _CHUNK):
            row = start + tl.arange(0, _CHUNK)
            there = row < end
            value = tl.load(new_v + row, mask=there, other=0.0).to(tl.float64)
            factor = 1 / (tl.sqrt(value / correction) + floor)
            size += factor * factor * tl.load(squares + row, mask=there, other=0.0)
        moved = tl.sqrt(tl.sum(size, 0))
        # The RMS of the factors cancels here: norms are preserved, or zero.
        gain = tl.where(moved > 0, norm / moved, 1.0)
    for start in range(begin, end, _CHUNK):
        row = start + tl.arange(0, _CHUNK)
        there = row < end
        value = tl.load(new_v + row, mask=there, other=0.0).to(tl.float64)
        factor = gain / (tl.sqrt(value / correction) + floor)
        tl.store(factors + row, factor.to(tl.float32), mask=there)


@triton.jit
def _scale(S, factors, faulty, d, r, s_row, s_col, ROWS: tl.constexpr, COLS: tl.constexpr):
    if tl.load(faulty) == 0:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLS + tl.arange(0, COLS)
        factor = tl.load(factors + row, mask=row < d, other=0.0)
        place = S + row[:, None] * s_row + column[None, :].to(tl.int64) * s_col
        inside = (row < d)[:, None] & (column < r)[None, :]
        tl.store(place, tl.load(place, mask=inside, other=0.0) * factor[:, None], mask=inside)


def launch(
    S: Float32[Tensor, "d r"],
    v: Float32[Tensor, "d"],
    sizes: Sequence[int],
    t: int,
    *,
    beta2: float = 0.95,
    eps: float = 1e-8,
    variant: str = "norm_preserving",
) -> tuple[Float32[Tensor, "d"], Float[Tensor, "layers"]]:
    """S ← D in place; returns the new moment, and the norm of each layer's sketch in float64.

    The operator of torch around it is the library's, `logra_lab.rowadam.row_adam_`.

    Args:
        S: the sketches of all layers, one below the other, of any strides. v: their moments.
        sizes: rows of each layer, in order; their sum is d. t: number of this update, from 1.
        variant, beta2, eps: see `logra_lab.rowadam`.

    If any layer is not finite, or its moment leaves the range of float32, its norm is nan and S is
    as it was: the device decides, so that nothing waits for it here. Raises `InputError` for what
    does not fit. Cost: S is read twice and written once; 20 bytes a row, more for the factors.
    """
    _check(S, v, sizes, t, variant)
    require(_moments, S.device)
    d, r = S.shape
    new_v = torch.empty(d, dtype=torch.float32, device=S.device)
    squares = torch.empty(d, dtype=torch.float64, device=S.device)
    norms = torch.zeros(len(sizes), dtype=torch.float64, device=S.device)
    if S.numel() == 0:
        return new_v.copy_(v).mul_(beta2), norms
    factors, faulty = torch.empty_like(new_v), norms.new_zeros(1, dtype=torch.int32)
    ends = torch.tensor([0, *sizes]).cumsum(0).to(S.device)
    columns = min(triton.next_power_of_2(r), 512)
    rows = ENTRIES // columns
    programs = triton.cdiv(d, rows)
    flat = d, r, *S.stride()
    with torch.cuda.device_of(S):
        _moments[programs,](S, v, new_v, squares, *flat, v.stride(0), beta2, rows, columns)
        _factors[len(sizes),](
            new_v,
            squares,
            ends,
            factors,
            norms,
            faulty,
            1 - beta2**t,
            eps,
            variant == "norm_preserving",
        )
        _scale[programs, triton.cdiv(r, columns)](S, factors, faulty, *flat, rows, columns)
    return new_v, norms


def reference(
    S: Float[Tensor, "d r"],
    v: Float[Tensor, "d"],
    sizes: Sequence[int],
    t: int,
    *,
    beta2: float = 0.95,
    eps: float = 1e-8,
    variant: str = "norm_preserving",
) -> tuple[Float[Tensor, "d r"], Float[Tensor, "d"]]:
    """D and the new v of a finite sketch, layer by layer in float64, by the definitions."""
    S = S.double()
    v = beta2 * v.double() + (1 - beta2) * S.square().mean(1)
    D = []
    for part, moment in zip(S.split(list(sizes)), v.split(list(sizes)), strict=True):
        root = (moment / (1 - beta2**t)).sqrt()
        if variant == "plain":
            D.append(part / (root + eps)[:, None])
            continue
        s = 1 / (root + (eps * root.mean()).clamp_min(torch.finfo(torch.float32).tiny))
        moved = part * (s / s.square().mean().sqrt())[:, None]
        D.append(moved * (part.norm() / moved.norm()) if moved.any() else moved)
    return torch.cat(D), v


def _check(S: Tensor, v: Tensor, sizes: Sequence[int], t: int, variant: str) -> None:
    def need(good: bool, what: str, came: object) -> None:
        if not good:
            raise InputError(f"kernel row_adam: expected {what}, got {came}")

    need(S.dim() == 2, "a sketch [d, r]", list(S.shape))
    need(not overlaps(S), "an S that is not expanded", S.stride())
    need(S.dtype == v.dtype == torch.float32, "S and v in float32", (S.dtype, v.dtype))
    need(v.shape == S.shape[:1], f"moments [{S.shape[0]}]", list(v.shape))
    need(min(sizes, default=0) >= 0 and sum(sizes) == S.shape[0], f"{S.shape[0]} rows", sizes)
    need(v.device == S.device, "tensors on one device", (S.device, v.device))
    need(t >= 1, "an update number t ≥ 1", t)
    need(variant in VARIANTS, f"a variant of {VARIANTS}", variant)
