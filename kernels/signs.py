"""signs: the entries ±1 of √r·A, and the random words that round a factor, drawn on the device.

Both are words of Philox4x32-10 (`logra_lab.projection` has the contract) and no stream: any slice
of rows and columns, with indices to 2³² − 1, is drawn without the rest. `words` and `unpack` give
the other kernels their signs in registers; `launch` stores them, for tests and teaching.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Int8, Int64
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.kernels import require
from logra_lab.philox import DOMAIN_ROUNDING, DOMAIN_SIGNS, SCHEME_VERSION, philox4x32

_SIGNS = tl.constexpr(DOMAIN_SIGNS)
_ROUNDING = tl.constexpr(DOMAIN_ROUNDING)
_SCHEME = tl.constexpr(SCHEME_VERSION)
BITS = tl.constexpr(32)  # signs in a word
BLOCK = tl.constexpr(128)  # signs in a Philox call
INDICES = 1 << 32  # a counter's word


@triton.jit
def words(key, column, block, DOMAIN: tl.constexpr = _SIGNS):
    """Four uint32 words at counters (column, block, domain, scheme); integers of any type."""
    c0 = column.to(tl.uint32)
    c1 = tl.to_tensor(block).to(tl.uint32) + tl.zeros_like(c0)
    return tl.philox(key, c0, c1, tl.zeros_like(c0) + DOMAIN, tl.zeros_like(c0) + _SCHEME)


@triton.jit
def unpack(word):
    """uint32 words [w] → signs ±1 [32, w] in int8: bit i makes row i."""
    bit = (word[None, :] >> tl.arange(0, BITS)[:, None].to(tl.uint32)) & 1
    return (2 * bit.to(tl.int32) - 1).to(tl.int8)


@triton.jit
def _store_signs(out, word, row, column, rows, columns, stride):
    """Store the signs of rows `row` to row + 31 where they lie inside 0:rows, 0:columns."""
    row += tl.arange(0, BITS)
    inside = ((row >= 0) & (row < rows))[:, None] & (column < columns)[None, :]
    tl.store(out + row[:, None] * stride + column[None, :], unpack(word), mask=inside)


# Keys and offsets differ at every call: a kernel specialised on them would be compiled anew.
@triton.jit(do_not_specialize=["key", "row0", "column0"])
def _signs(
    out,
    key: tl.uint64,
    row0: tl.int64,
    column0: tl.int64,
    rows,
    columns,
    stride,
    WIDTH: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    block = row0 // BLOCK + tl.program_id(1)
    row = block * BLOCK - row0
    a, b, c, d = words(key, column0 + column, block)
    _store_signs(out, a, row, column, rows, columns, stride)
    _store_signs(out, b, row + BITS, column, rows, columns, stride)
    _store_signs(out, c, row + 2 * BITS, column, rows, columns, stride)
    _store_signs(out, d, row + 3 * BITS, column, rows, columns, stride)


@triton.jit(do_not_specialize=["key", "row0"])
def _rounding(
    out,
    key: tl.uint64,
    row0: tl.int64,
    rows,
    rank,
    ROWS: tl.constexpr,
    QUADS: tl.constexpr,
):
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    quad = (tl.program_id(1).to(tl.int64) * QUADS + tl.arange(0, QUADS))[None, :]
    none = tl.zeros([ROWS, QUADS], tl.int64)
    a, b, c, d = words(key, row0 + row + none, quad + none, _ROUNDING)
    place = out + row * rank + quad * 4
    inside, column = row < rows, quad * 4
    tl.store(place, a.to(tl.int64), mask=inside & (column < rank))
    tl.store(place + 1, b.to(tl.int64), mask=inside & (column + 1 < rank))
    tl.store(place + 2, c.to(tl.int64), mask=inside & (column + 2 < rank))
    tl.store(place + 3, d.to(tl.int64), mask=inside & (column + 3 < rank))


def launch(
    key: tuple[int, int],
    rows: slice,
    columns: slice,
    device: torch.device | str = "cuda",
    *,
    width: int = 128,
) -> Int8[Tensor, "rows columns"]:
    """√r·A[rows, columns]: signs ±1 in int8 under the key of a projection (`Projection.key`).

    `width`, a power of two, is how many columns a program draws; it changes no bit. Raises
    `InputError` for slices outside 0..2³² and for a device without Triton. Cost: one Philox call
    for 128 signs, one byte written a sign.
    """
    require(_signs, torch.device(device))
    shape = _shape(rows, columns)
    out = torch.empty(shape, dtype=torch.int8, device=device)
    if out.numel():
        blocks = (rows.stop - 1) // BLOCK.value - rows.start // BLOCK.value + 1
        with torch.cuda.device_of(out):
            _signs[triton.cdiv(shape[1], width), blocks](
                out, pack(key), rows.start, columns.start, *shape, out.stride(0), width
            )
    return out


def launch_rounding(
    key: tuple[int, int], rows: slice, rank: int, device: torch.device | str = "cuda"
) -> Int64[Tensor, "rows r"]:
    """The 32 random bits of every entry of some rows of a [d, r] factor, as values 0..2³² − 1.

    The same as `logra_lab.philox.rounding_words`, which also says how they are numbered.
    """
    require(_rounding, torch.device(device))
    shape = _shape(rows, slice(0, rank))
    out = torch.empty(shape, dtype=torch.int64, device=device)
    if out.numel():
        grid = triton.cdiv(shape[0], 16), triton.cdiv(rank, 64)
        with torch.cuda.device_of(out):
            _rounding[grid](out, pack(key), rows.start, *shape, 16, 16)
    return out


def reference(
    key: tuple[int, int], rows: slice, columns: slice, device: torch.device | str = "cpu"
) -> Int8[Tensor, "rows columns"]:
    """What `launch` stores, in torch and one entry at a time: a Philox call for every sign."""
    shape = _shape(rows, columns)
    i = torch.arange(rows.start, rows.stop, device=device)[:, None].expand(shape)
    j = torch.arange(columns.start, columns.stop, device=device).expand(shape)
    fixed = [torch.full_like(i, DOMAIN_SIGNS), torch.full_like(i, SCHEME_VERSION)]
    four = philox4x32(torch.stack([j, i // 128, *fixed]), key)
    word = four.gather(0, (i % 128 // 32)[None])[0]
    return (2 * (word >> i % 32 & 1) - 1).to(torch.int8)


def pack(key: tuple[int, int]) -> int:
    """A key as the one integer that `tl.philox` takes: low word first."""
    return key[0] | key[1] << 32


def _shape(rows: slice, columns: slice) -> tuple[int, int]:
    for name, part in (("rows", rows), ("columns", columns)):
        if not 0 <= part.start <= part.stop <= INDICES:
            raise InputError(f"{name} {part.start}:{part.stop} of A: expected a part of 0:2**32")
    return rows.stop - rows.start, columns.stop - columns.start
