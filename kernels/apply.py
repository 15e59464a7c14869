"""apply: W ← W − U A for an int8 factor, signs in registers, in one pass over W.

The factor's rows are integers with a scale 2^e, so the product is a sum of integers, exact in any
order; multiplying it by 2^e is exact too, and the subtraction is the only rounding. Hence the bits
are those of the torch path (`logra_lab.sync.update.apply`) for every block size, row shard and
column slice.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Int8, Shaped
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.kernels import overlaps, require
from logra_lab.kernels.signs import BITS, BLOCK, INDICES, pack, unpack, words
from logra_lab.kernels.signs import reference as signs

TYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_RANK = 1 << 16  # 127·2^16 < 2^24: sums are integers that float32 holds
# A program's part of W: the product of 128 × 128 takes 64 registers a thread.
BLOCKS = (128, 128)


@triton.jit
def widen(x):
    """To float32, exactly; bfloat16 by bits, since the interpreter miscasts its subnormals."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 to a served type, to nearest, ties to even; the interpreter truncates to bfloat16.

    Half a unit less one, plus the last bit that stays, carries exactly when the dropped half is
    above a half, or is a half and the last bit is odd.
    """
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        quiet = tl.full(near.shape, 0x7FC0, tl.uint16)  # the carry would turn a NaN into a number
        return tl.where(x == x, near, quiet).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _add_word(total, word, values, inside, first, rank, stride):
    """total + values[:, first : first + 32] · (signs of one word), in integers."""
    i = first + tl.arange(0, BITS)
    part = tl.load(
        values + i[None, :].to(tl.int64) * stride, mask=inside & (i < rank)[None, :], other=0
    )
    return tl.dot(part, unpack(word), total, out_dtype=tl.int32)


@triton.jit
def _add_block(total, key, column, values, inside, block, rank, stride, WORDS: tl.constexpr):
    """The same for a block of 128 rows of A, which one Philox call covers, or its first words."""
    a, b, c, d = words(key, column, block)
    first = block * BLOCK
    total = _add_word(total, a, values, inside, first, rank, stride)
    if WORDS > 1:
        total = _add_word(total, b, values, inside, first + BITS, rank, stride)
    if WORDS > 2:
        total = _add_word(total, c, values, inside, first + 2 * BITS, rank, stride)
    if WORDS > 3:
        total = _add_word(total, d, values, inside, first + 3 * BITS, rank, stride)
    return total


@triton.jit(do_not_specialize=["key", "column0"])
def _apply(
    weight,
    served,
    values,
    exponents,
    key: tl.uint64,
    column0: tl.int64,
    rows,
    columns,
    rank,
    weight_row,
    weight_column,
    served_row,
    served_column,
    values_row,
    values_column,
    exponents_row,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    tiles = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    offset = (tl.program_id(0) % tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = (row < rows)[:, None]
    column = column0 + offset

    total = tl.zeros([ROWS, COLUMNS], tl.int32)
    values += row[:, None] * values_row
    full = rank // BLOCK
    for block in range(full):
        total = _add_block(total, key, column, values, there, block, rank, values_column, 4)
    if TAIL:
        total = _add_block(total, key, column, values, there, full, rank, values_column, TAIL)

    # 2^e from its bits: exp2 is an approximation on a GPU.
    e = tl.load(exponents + row * exponents_row, mask=row < rows, other=0).to(tl.int32)
    scale = ((e + 127) << 23).to(tl.float32, bitcast=True)
    inside = there & (offset < columns)[None, :]
    place = weight + row[:, None] * weight_row + offset[None, :] * weight_column
    old = widen(tl.load(place, mask=inside, other=0.0))
    new = narrow(old - total.to(tl.float32) * scale[:, None], weight.dtype.element_ty)
    tl.store(place, new, mask=inside)
    if served is not None:
        copy = served + row[:, None] * served_row + offset[None, :] * served_column
        tl.store(copy, narrow(widen(new), served.dtype.element_ty), mask=inside)


def launch(
    weight: Shaped[Tensor, "rows columns"],
    values: Int8[Tensor, "rows r"],
    exponents: Int8[Tensor, "rows"],
    key: tuple[int, int],
    column_start: int = 0,
    served: Shaped[Tensor, "rows columns"] | None = None,
    *,
    blocks: tuple[int, int] = BLOCKS,
) -> None:
    """weight ← weight − (values·2^exponents)·signs in place, and `served` gets the new weight cast.

    Args:
        weight: a row and column part of W, of any strides; float32, or a served copy in bfloat16 or
            float16, which is widened, changed and rounded to nearest (even).
        values, exponents: the factor U/√r of these rows (`ThinUpdate`), −126 ≤ exponent ≤ 100.
        key: of the projection, `Projection.key`. column_start: the column of W that weight begins
            with. A row's place in W does not matter: the signs depend on column and factor only.
        blocks: rows and columns of a program's part, powers of two from 16; they change no bit.

    Raises `InputError` for shapes, types or devices that do not fit, before anything is written.
    Cost: weight read and written once, served written once; rows·columns·r integer operations on
    tensor cores; signs of a column block are drawn once for every row block.
    """
    _check(weight, values, exponents, column_start, served)
    require(_apply, weight.device)
    (rows, columns), rank = weight.shape, values.shape[1]
    if weight.numel() == 0:
        return
    grid = triton.cdiv(rows, blocks[0]) * triton.cdiv(columns, blocks[1])
    copy_strides = (0, 0) if served is None else served.stride()
    with torch.cuda.device_of(weight):
        _apply[grid,](
            weight,
            served,
            values,
            exponents,
            pack(key),
            column_start,
            rows,
            columns,
            rank,
            *weight.stride(),
            *copy_strides,
            *values.stride(),
            *exponents.stride(),
            triton.cdiv(rank % BLOCK.value, BITS.value),
            *blocks,
            num_warps=8,
        )


def reference(
    weight: Shaped[Tensor, "rows columns"],
    values: Int8[Tensor, "rows r"],
    exponents: Int8[Tensor, "rows"],
    key: tuple[int, int],
    column_start: int = 0,
) -> Shaped[Tensor, "rows columns"]:
    """The new weight by the definition: an exact product in float64, one subtraction in float32."""
    cut = slice(column_start, column_start + weight.shape[1])
    A = signs(key, slice(0, values.shape[1]), cut, weight.device).double()
    product = values.double() * torch.exp2(exponents.double())[:, None] @ A
    return (weight.float() - product.float()).to(weight.dtype)


def _check(
    weight: Tensor, values: Tensor, exponents: Tensor, column_start: int, served: Tensor | None
) -> None:
    def need(good: bool, what: str, came: object) -> None:
        if not good:
            raise InputError(f"kernel apply: expected {what}, got {came}")

    tensors = [weight, values, exponents] + ([] if served is None else [served])
    need(weight.dim() == 2, "a weight [rows, columns]", list(weight.shape))
    rows, columns = weight.shape
    need(not overlaps(weight), "a weight that is not expanded", weight.stride())
    need(weight.dtype in TYPES, f"a weight in one of {TYPES}", weight.dtype)
    need(
        values.dtype == exponents.dtype == torch.int8,
        "values and exponents in int8 (the kernel is for the int8 wire)",
        (values.dtype, exponents.dtype),
    )
    need(
        values.dim() == 2 and values.shape[0] == rows and exponents.shape == (rows,),
        f"values [{rows}, r] and exponents [{rows}]",
        (list(values.shape), list(exponents.shape)),
    )
    need(1 <= values.shape[1] <= MAX_RANK, f"a rank in 1..{MAX_RANK}", values.shape[1])
    need(0 <= column_start <= INDICES - columns, "columns inside 0:2**32", (column_start, columns))
    if served is not None:
        need(served.dtype in TYPES, f"a served copy in one of {TYPES}", served.dtype)
        need(not overlaps(served), "a served copy that is not expanded", served.stride())
        need(served.shape == weight.shape, f"a served copy {[rows, columns]}", list(served.shape))
    need(
        len({x.device for x in tensors}) == 1, "tensors on one device", [x.device for x in tensors]
    )
