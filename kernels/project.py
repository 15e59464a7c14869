"""project: P = X Aᵀ with the signs of A drawn in registers, tile by tile, and never stored.

A program makes 128 tokens × 128 columns of P: a Philox call for every column of A gives it the 128
signs that it needs, in the type of X, so that the products are exact on tensor cores and only the
float32 sum over k rounds. float32 tokens are cut into three bfloat16 numbers, which hold all of
their 24 bits, and summed by the same units.
"""

import math

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.kernels import require
from logra_lab.kernels.apply import TYPES, narrow, widen
from logra_lab.kernels.signs import BITS, BLOCK, INDICES, pack, words
from logra_lab.kernels.signs import reference as signs

# Rows of X and columns of A that a program multiplies at a time, by bytes a number: the most that
# the compiler fits into registers.
BLOCKS = {2: (128, 64), 4: (128, 32)}


@triton.jit
def draw(key, column, block, dtype: tl.constexpr):
    """Signs ±1 [columns, 128] in `dtype`: rows 128·block to 128·block + 127 of √r·A, transposed."""
    a, b, c, d = words(key, column, block)
    four = tl.join(tl.join(a, c), tl.join(b, d))  # [columns, 2, 2]: word 2u + v at [u, v]
    four = tl.reshape(four, [column.shape[0], 4])
    top = four[:, :, None] << (31 - tl.arange(0, BITS))[None, None, :].to(tl.uint32)
    top = tl.reshape(top, [column.shape[0], BLOCK])
    # The wanted bit becomes the sign of a number whose other bits spell 1.
    if dtype == tl.float32:
        return ((top & 0x80000000) ^ 0xBF800000).to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        return (((top >> 16) & 0x8000) ^ 0xBF80).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    elif dtype == tl.float16:
        return (((top >> 16) & 0x8000) ^ 0xBC00).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        return (2 * (top >> 31).to(tl.int32) - 1).to(tl.int8)


@triton.jit
def _split(x):
    """The first 8 significant bits of float32 numbers, and the rest, exactly; of inf it is 0."""
    high = (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return high, tl.where(x == high, 0.0, x - high)


@triton.jit(do_not_specialize=["key", "scale"])
def _project(
    out,
    x,
    tokens,
    key: tl.uint64,
    rows,
    inner,
    columns,
    rank,
    scale,
    x_outer,
    x_inner,
    x_column,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Neighbouring programs share their rows of X, which the second finds in the L2 cache.
    tiles = tl.cdiv(rank, BLOCK)
    block = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    x += ((row // inner) * x_outer + (row % inner) * x_inner)[:, None]
    pieces: tl.constexpr = x.dtype.element_ty == tl.float32
    sixteen: tl.constexpr = tl.bfloat16 if pieces else x.dtype.element_ty
    unit: tl.constexpr = tl.float32 if WIDE else sixteen

    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = there & (column < columns)[None, :]
        part = tl.load(x + column[None, :].to(tl.int64) * x_column, mask=inside, other=0.0)
        A = draw(key, column, block, unit)
        if pieces:
            high, rest = _split(part)
            middle, low = _split(rest)
            total = tl.dot(high.to(unit), A, total, input_precision="ieee")
            total = tl.dot(middle.to(unit), A, total, input_precision="ieee")
            total = tl.dot(low.to(unit), A, total, input_precision="ieee")
        elif WIDE:
            total = tl.dot(widen(part), A, total, input_precision="ieee")
        else:
            total = tl.dot(part, A, total)

    total *= scale
    if tokens is not None:
        total *= widen(tl.load(tokens + row, mask=row < rows, other=0.0))[:, None]
    i = block * BLOCK + tl.arange(0, BLOCK)
    place = out + row[:, None] * rank + i[None, :]
    tl.store(place, narrow(total, out.dtype.element_ty), mask=there & (i < rank)[None, :])


def launch(
    x: Float[Tensor, "*batch k"],
    key: tuple[int, int],
    rank: int,
    tokens: Float[Tensor, "*batch"] | None = None,
    *,
    blocks: tuple[int, int] | None = None,
) -> Float[Tensor, "*batch r"]:
    """P = tokens · X Aᵀ in the type of X, summed in float32 and rounded once to that type.

    Args:
        x: float32, bfloat16 or float16, of any strides; more than two leading dimensions are
            copied where their strides cannot be merged.
        key: of the projection, `Projection.key`. tokens: a factor for every token, or None.
        blocks: rows and columns of X that a program multiplies at a time, powers of two from 16.
            They order the float32 sum.

    Raises `InputError` for shapes, types or devices that do not fit. Cost: 2·n·k·r operations on
    tensor cores (three times as many for float32), X read from memory once and from the L2 cache
    r/128 times; the signs are drawn once for every 128 tokens.
    """
    _check(x, rank, tokens)
    require(_project, x.device)
    out = x.new_empty(*x.shape[:-1], rank)
    if out.numel():
        fill(out, x, key, tokens, blocks or BLOCKS[x.element_size()])
    return out


def fill(
    out: Tensor, x: Tensor, key: tuple[int, int], tokens: Tensor | None, blocks: tuple[int, int]
) -> None:
    """Write P into contiguous memory; nothing is checked."""
    flat, rank = in_three(x), out.shape[-1]
    rows = flat.shape[0] * flat.shape[1]
    grid = triton.cdiv(rows, blocks[0]) * triton.cdiv(rank, BLOCK.value)
    with torch.cuda.device_of(x):
        _project[grid,](
            out,
            flat,
            None if tokens is None else tokens.contiguous(),
            pack(key),
            rows,
            flat.shape[1],
            x.shape[-1],
            rank,
            1 / math.sqrt(rank),
            *flat.stride(),
            interpreted(_project),
            *blocks,
            num_warps=8,
        )


def reference(
    x: Float[Tensor, "*batch k"],
    key: tuple[int, int],
    rank: int,
    tokens: Float[Tensor, "*batch"] | None = None,
) -> Float[Tensor, "*batch r"]:
    """P in float64, by the definition."""
    A = signs(key, slice(0, rank), slice(0, x.shape[-1]), x.device).double() / math.sqrt(rank)
    P = x.double() @ A.T
    return P if tokens is None else P * tokens.double()[..., None]


def in_three(x: Float[Tensor, "*batch k"]) -> Float[Tensor, "outer inner k"]:
    """A view with two leading dimensions, each of its own stride; a copy where none exists."""
    return x.flatten(0, -3) if x.dim() > 3 else x[(None,) * (3 - x.dim())]


def interpreted(kernel: object) -> bool:
    """Whether `kernel` runs in the interpreter, whose products of bfloat16 are wrong.

    There the kernels multiply the same numbers widened to float32.
    """
    return not isinstance(kernel, triton.JITFunction)


def _check(x: Tensor, rank: int, tokens: Tensor | None) -> None:
    def need(good: bool, what: str, came: object) -> None:
        if not good:
            raise InputError(f"kernel project: expected {what}, got {came}")

    need(x.dim() >= 1, "X [*batch, k]", list(x.shape))
    need(x.dtype in TYPES, f"X in one of {TYPES}", x.dtype)
    need(1 <= rank < INDICES >> 1, "a rank in 1..2**31 - 1", rank)
    need(x.shape[-1] < INDICES >> 1, "fewer than 2**31 columns", x.shape[-1])
    if tokens is not None:
        need(tokens.dtype in TYPES, f"token factors in one of {TYPES}", tokens.dtype)
        need(
            tokens.shape == x.shape[:-1],
            f"token factors {list(x.shape[:-1])}",
            list(tokens.shape),
        )
        need(tokens.device == x.device, f"token factors on {x.device}", tokens.device)
