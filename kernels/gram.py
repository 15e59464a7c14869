"""gram: A Aᵀ from the signs alone, and ⟨D (A Aᵀ), D⟩ = ‖D A‖², so that neither A nor D A exists.

r·A Aᵀ is a matrix of integers. Programs share out the columns of A and add their integer products
atomically: integers add up to the same in any order.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.kernels import require
from logra_lab.kernels.project import draw
from logra_lab.kernels.signs import BLOCK, INDICES, pack
from logra_lab.kernels.signs import reference as signs

# Columns of A that a program multiplies at a time, and how many times.
BLOCKS = (64, 8)
# Rows of D and columns of the Gram matrix that a program multiplies at a time.
NORM_BLOCKS = (32, 32)


@triton.jit(do_not_specialize=["key"])
def _gram(out, key: tl.uint64, columns, rank, COLUMNS: tl.constexpr, TIMES: tl.constexpr):
    tiles = tl.cdiv(rank, BLOCK)
    left, right = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    first = tl.program_id(1) * COLUMNS * TIMES

    total = tl.zeros([BLOCK, BLOCK], tl.int32)
    for n in range(TIMES):
        column = first + n * COLUMNS + tl.arange(0, COLUMNS)
        # A zero for a column that is not there takes it out of every product.
        a = tl.where((column < columns)[:, None], draw(key, column, left, tl.int8), 0).to(tl.int8)
        total = tl.dot(tl.trans(a), draw(key, column, right, tl.int8), total, out_dtype=tl.int32)

    i = (left * BLOCK + tl.arange(0, BLOCK))[:, None]
    j = (right * BLOCK + tl.arange(0, BLOCK))[None, :]
    place = out + i.to(tl.int64) * rank + j
    tl.atomic_add(place, total, mask=(i < rank) & (j < rank), sem="relaxed")


@triton.jit
def _norm(
    out,
    d,
    gram,
    rows,
    rank,
    d_row,
    d_column,
    g_row,
    g_column,
    ROWS: tl.constexpr,
    SIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = (row < rows)[:, None]
    d += row[:, None] * d_row

    total = tl.zeros([ROWS, SIDE], tl.float32)
    for right in range(0, rank, SIDE):
        j = (right + tl.arange(0, SIDE))[None, :].to(tl.int64)
        product = tl.zeros([ROWS, SIDE], tl.float32)
        for left in range(0, rank, SIDE):
            i = left + tl.arange(0, SIDE).to(tl.int64)
            D = tl.load(d + i[None, :] * d_column, mask=there & (i < rank)[None, :], other=0.0)
            place = gram + i[:, None] * g_row + j * g_column
            G = tl.load(place, mask=(i < rank)[:, None] & (j < rank), other=0.0)
            product = tl.dot(D, G, product, input_precision="ieee")
        total += product * tl.load(d + j * d_column, mask=there & (j < rank), other=0.0)
    # float64 from here: rows of D are many, and their norms add up.
    tl.store(out + tl.program_id(0), tl.sum(tl.sum(total, 1).to(tl.float64), 0))


def launch(
    key: tuple[int, int],
    columns: int,
    rank: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cuda",
    *,
    blocks: tuple[int, int] = BLOCKS,
) -> Float[Tensor, "r r"]:
    """A Aᵀ: integers (exact up to 2³¹) divided by r, in `dtype`.

    Args:
        key: of the projection, `Projection.key`. columns: k.
        blocks: columns that a program multiplies at a time, a power of two from 32, and how often;
            they change no bit.

    Raises `InputError` for a rank or k that has no signs and for a device without Triton. Cost:
    2·k·r² integer operations on tensor cores; nothing is read, r²·4 bytes are added to k/512 times.
    """
    if not (1 <= rank < INDICES >> 1 and 0 <= columns < INDICES >> 1):
        raise InputError(
            f"kernel gram: expected 1 ≤ rank < 2**31 and 0 ≤ k < 2**31, got {rank}, {columns}"
        )
    require(_gram, torch.device(device))
    sums = torch.zeros(rank, rank, dtype=torch.int32, device=device)
    if columns:
        add(sums, key, columns, blocks)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return sums.to(wide).mul_(1 / rank).to(dtype)


def add(sums: Tensor, key: tuple[int, int], columns: int, blocks: tuple[int, int]) -> None:
    """Add the integers r·A Aᵀ to contiguous int32 sums [r, r]; nothing is checked."""
    rank = sums.shape[0]
    tiles = triton.cdiv(rank, BLOCK.value) ** 2
    with torch.cuda.device_of(sums):
        _gram[tiles, triton.cdiv(columns, blocks[0] * blocks[1])](
            sums, pack(key), columns, rank, *blocks, num_warps=8
        )


def launch_norm(
    D: Float[Tensor, "d r"],
    gram: Float[Tensor, "r r"],
    *,
    blocks: tuple[int, int] = NORM_BLOCKS,
) -> Float[Tensor, ""]:
    """⟨D gram, D⟩ in float64, a number on the device; with gram = A Aᵀ it is ‖D A‖².

    D and gram are float32, of any strides. A row's terms are summed in float32, rows in float64, in
    a fixed order. Raises `InputError` for shapes, types or devices that do not fit. Cost: 2·d·r²
    float32 operations; D is read r/32 times, mostly from the L2 cache; no [d, r] temporary.
    """
    if not (
        D.dim() == 2
        and gram.shape == (D.shape[1], D.shape[1])
        and D.dtype == gram.dtype == torch.float32
        and D.device == gram.device
    ):
        raise InputError(
            "kernel gram: expected D [d, r] and gram [r, r] in float32 on one device, got "
            + " and ".join(f"{list(x.shape)} {x.dtype} {x.device}" for x in (D, gram))
        )
    require(_norm, D.device)
    programs = triton.cdiv(D.shape[0], blocks[0])
    sums = torch.zeros(programs, dtype=torch.float64, device=D.device)
    if D.numel():
        with torch.cuda.device_of(D):
            _norm[programs,](sums, D, gram, *D.shape, *D.stride(), *gram.stride(), *blocks)
    return sums.sum()


def reference(key: tuple[int, int], columns: int, rank: int) -> Float[Tensor, "r r"]:
    """A Aᵀ in float64, by the definition."""
    unit = signs(key, slice(0, rank), slice(0, columns)).double()
    return unit @ unit.T / rank


def reference_norm(D: Float[Tensor, "d r"], key: tuple[int, int], columns: int) -> float:
    """‖D A‖² in float64, with A and D A in memory."""
    unit = signs(key, slice(0, D.shape[1]), slice(0, columns), D.device).double()
    return (D.double() @ unit).square().sum().item() / D.shape[1]
