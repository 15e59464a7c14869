"""accumulate: S ← S + Hᵀ P in float32, for some rows of S: the sketch of one microbatch.

16-bit H and P meet on tensor cores, whose products are exact and whose sums are float32, without
the float32 copies that `addmm` needs. Where S has fewer tiles than the GPU has processors, its
tokens are cut into parts whose sums are added in a fixed order, so that results repeat to the bit.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.kernels import overlaps, require
from logra_lab.kernels.apply import TYPES, widen
from logra_lab.kernels.project import in_three, interpreted
from logra_lab.operators import apply

# Rows and columns of S that a program makes, and the tokens that it multiplies at a time: on tensor
# cores and, as float32 numbers that wait in registers, without them.
BLOCKS = {False: (64, 128, 32), True: (64, 64, 16)}


@triton.jit
def _accumulate(
    out,
    h,
    p,
    rows,
    rank,
    tokens,
    inner,
    part_tokens,
    out_part,
    out_row,
    out_column,
    h_outer,
    h_inner,
    h_column,
    p_outer,
    p_inner,
    p_column,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    tiles = tl.cdiv(rank, COLUMNS)
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % tiles).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1).to(tl.int64)
    last = tl.minimum((part + 1) * part_tokens, tokens)
    h += row[None, :] * h_column
    p += column[None, :] * p_column

    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(part * part_tokens, last, TOKENS):
        token = start + tl.arange(0, TOKENS).to(tl.int64)
        there, a, b = (token < last)[:, None], token // inner, token % inner
        H = tl.load(
            h + (a * h_outer + b * h_inner)[:, None],
            mask=there & (row < rows)[None, :],
            other=0.0,
        )
        P = tl.load(
            p + (a * p_outer + b * p_inner)[:, None],
            mask=there & (column < rank)[None, :],
            other=0.0,
        )
        if WIDE:
            total = tl.dot(tl.trans(widen(H)), widen(P), total, input_precision="ieee")
        else:
            total = tl.dot(tl.trans(H), P, total)

    place = out + part * out_part + row[:, None] * out_row + column[None, :] * out_column
    inside = (row < rows)[:, None] & (column < rank)[None, :]
    if ADD:
        total += tl.load(place, mask=inside, other=0.0)
    tl.store(place, total, mask=inside)


def launch(
    S: Float[Tensor, "rows r"],
    H: Float[Tensor, "*batch d"],
    P: Float[Tensor, "*batch r"],
    start: int = 0,
    *,
    parts: int | None = None,
    blocks: tuple[int, int, int] | None = None,
) -> None:
    """S ← S + (Hᵀ P)[start : start + rows] in place.

    Args:
        S: float32, of any strides but 0: the whole sketch or the rows of one shard.
        H, P: gradient of the output and projected input, of the same leading shape; float32,
            bfloat16 or float16 each, of any strides (see `project.launch`).
        parts: into how many the tokens are cut; by default as many as fill the GPU.
        blocks: rows and columns of S that a program makes and tokens that it multiplies at a time,
            powers of two from 16. Like `parts` they order the float32 sum.

    Raises `InputError` for shapes, types or devices that do not fit, before anything is written.
    Cost: 2·n·rows·r operations, on tensor cores where H and P share a 16-bit type; H read r/128
    times and P rows/64 times, mostly from the L2 cache. Memory: with parts, that many copies of S,
    together at most one tile for every processor.
    """
    _check(S, H, P, start)
    require(_accumulate, S.device)
    (rows, rank), tokens = S.shape, P.shape[:-1].numel()
    if S.numel() == 0 or tokens == 0:
        return
    h, p = in_three(H[..., start : start + rows]), in_three(P)
    wide = H.dtype != P.dtype or H.dtype == torch.float32
    blocks = blocks or BLOCKS[wide]
    tiles = triton.cdiv(rows, blocks[0]) * triton.cdiv(rank, blocks[1])
    parts = parts or min(triton.cdiv(tokens, 16 * blocks[2]), max(1, _processors(S) // tiles))
    sums = S[None] if parts == 1 else S.new_empty(parts, rows, rank)
    with torch.cuda.device_of(S):
        _accumulate[tiles, parts](
            sums,
            h,
            p,
            rows,
            rank,
            tokens,
            h.shape[1],
            triton.cdiv(tokens, parts),
            *sums.stride(),
            *h.stride(),
            *p.stride(),
            parts == 1,
            wide or interpreted(_accumulate),
            *blocks,
            num_warps=4,
        )
    if parts > 1:
        S.add_(sums.sum(0))


def reference(
    S: Float[Tensor, "rows r"],
    H: Float[Tensor, "*batch d"],
    P: Float[Tensor, "*batch r"],
    start: int = 0,
) -> Float[Tensor, "rows r"]:
    """The new S in float64, by the definition."""
    h = H.double().flatten(0, -2) if H.dim() > 1 else H.double()[None]
    return S.double() + h[:, start : start + S.shape[0]].T @ P.double().reshape(-1, S.shape[1])


@torch.library.custom_op("logra_lab::accumulate", mutates_args=("S",))
def _op(S: Tensor, H: Tensor, P: Tensor, start: int = 0) -> None:
    launch(S, H, P, start)


@_op.register_fake
def _(S: Tensor, H: Tensor, P: Tensor, start: int = 0) -> None:
    _check(S, H, P, start)


class _Accumulate(torch.autograd.Function):
    """The operator with its derivatives: by itself it would drop tangents silently."""

    @staticmethod
    def forward(S: Tensor, H: Tensor, P: Tensor, start: int) -> Tensor:
        torch.ops.logra_lab.accumulate(S, H, P, start)
        return S

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        S, H, P, ctx.start = inputs
        ctx.mark_dirty(S)
        ctx.save_for_backward(H, P)
        ctx.save_for_forward(H, P)
        ctx.rows = slice(ctx.start, ctx.start + S.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (g,), (H, P) = grads, ctx.saved_tensors
        need_H, need_P = ctx.needs_input_grad[1:3]
        to_H = torch.zeros_like(H) if need_H else None
        if to_H is not None:
            to_H[..., ctx.rows] = (P.to(g.dtype) @ g.T).to(H.dtype)
        to_P = (H[..., ctx.rows].to(g.dtype) @ g).to(P.dtype) if need_P else None
        return g, to_H, to_P, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (S_dot, H_dot, P_dot, _), (H, P) = tangents, ctx.saved_tensors
        if S_dot is None:
            S_dot = P.new_zeros(ctx.rows.stop - ctx.rows.start, P.shape[-1], dtype=torch.float32)
        if H_dot is not None:
            S_dot = _Accumulate.apply(S_dot, H_dot, P, ctx.start)
        if P_dot is not None:
            S_dot = _Accumulate.apply(S_dot, H, P_dot, ctx.start)
        return S_dot


def accumulate(
    S: Float[Tensor, "rows r"],
    H: Float[Tensor, "*batch d"],
    P: Float[Tensor, "*batch r"],
    start: int = 0,
) -> Float[Tensor, "rows r"]:
    """`launch` for autograd, forward mode, FakeTensorMode and torch.compile; returns S."""
    return apply(_Accumulate, S, H, P, start)


def _processors(S: Tensor) -> int:
    if S.device.type != "cuda":
        return 1  # interpreted, one program after the other
    return torch.cuda.get_device_properties(S.device).multi_processor_count


def _check(S: Tensor, H: Tensor, P: Tensor, start: int) -> None:
    def need(good: bool, what: str, came: object) -> None:
        if not good:
            raise InputError(f"kernel accumulate: expected {what}, got {came}")

    need(S.dim() == 2 and S.dtype == torch.float32, "S [rows, r] in float32", (S.shape, S.dtype))
    need(not overlaps(S), "an S that is not expanded", S.stride())
    need(H.dtype in TYPES and P.dtype in TYPES, f"H and P in {TYPES}", (H.dtype, P.dtype))
    need(
        H.dim() == P.dim() >= 1 and H.shape[:-1] == P.shape[:-1] and P.shape[-1] == S.shape[1],
        f"H [*batch, d] and P [*batch, {S.shape[1]}]",
        (list(H.shape), list(P.shape)),
    )
    need(
        0 <= start <= H.shape[-1] - S.shape[0],
        f"rows of S inside 0:{H.shape[-1]}",
        (start, start + S.shape[0]),
    )
    need(H.device == P.device == S.device, f"tensors on {S.device}", (H.device, P.device))
