"""The projection A: a pure function of (seed, draw, path), regenerated wherever it is needed.

Nothing stores A. Every consumer (the forward pass, the KL probe, the weight update, an engine on
another machine) rebuilds the entries it needs from a few integers, and gets the same bits.

    A[i, j] = ±1/√r,   sign from Philox4x32-10 with
        key     = the 8 bytes of blake2b(f"{seed}:{draw}:{path}", digest_size=8), little-endian
        counter = (j, i // 128, domain, scheme version)
        bit       i % 32 of output word (i % 128) // 32;   1 means +

One Philox call gives 128 signs of one column. The signs depend on neither r nor k: a smaller rank
is a prefix of a larger one, and any slice is cut without drawing the rest.
The generator is in `philox`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor

from logra_lab import kernels, operators
from logra_lab.errors import InputError
from logra_lab.philox import (
    DOMAIN_GAUSSIAN,
    DOMAIN_SIGNS,
    SCHEME_VERSION,
    key_of,
    philox4x32,
    stream,
)

KINDS = ("sign", "gaussian")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Wrappers that torch inserts into module paths; a layer keeps its key with and without them.
WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}

_BLOCK = 128  # signs per Philox call
_BLOCK_NUMBERS = 1 << 18  # entries of A that exist at a time: 1 MiB of float32, about an L2 cache
_WIDE_NUMBERS = 1 << 20  # entries of a 16-bit X that are held in float32 at a time


def canonical_path(path: str) -> str:
    """The module path without wrapper parts: ``_orig_mod.layers.0`` → ``layers.0``."""
    return ".".join(part for part in path.split(".") if part not in WRAPPERS)


@dataclass(frozen=True)
class Projection:
    """A [r, k] for one layer input at one draw; immutable, a few integers, rebuilt on demand.

    Args:
        path: module path of the (first) layer that reads the input, see `canonical_path`.
        k: input features. rank: rows r, 1 ≤ r ≤ k.
        seed, draw: the run's seed and the update number (a constant when A is held fixed).
        kind: ``"sign"`` (the contract above) or ``"gaussian"`` (entries N(0, 1/r), an ablation:
            logarithms and cosines may differ in the last bit between devices).

    Raises `InputError` for a rank outside 1..k or an unknown kind. Memory: r·k/8 bytes of packed
    sign bits while the object lives; A itself exists only inside a call.
    """

    path: str
    k: int
    rank: int
    seed: int = 0
    draw: int = 0
    kind: str = "sign"

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= self.k:
            raise InputError(
                f"rank {self.rank} does not fit layer {self.path!r}: expected 1 ≤ rank ≤ "
                f"{self.k} (its input features); choose a smaller rank or other targets"
            )
        if self.kind not in KINDS:
            raise InputError(f"projection {self.kind!r} is unknown; expected one of {KINDS}")
        operators.ALIVE[self._fields] = self

    @property
    def _fields(self) -> tuple[str, int, int, int, int, str]:
        return self.path, self.k, self.rank, self.seed, self.draw, self.kind

    @property
    def scale(self) -> float:
        """1/√r: A = scale · unit, so that E[AᵀA] = I."""
        return 1 / math.sqrt(self.rank)

    @property
    def key(self) -> tuple[int, int]:
        return key_of(f"{self.seed}:{self.draw}:{self.path}")

    @cached_property
    def words(self) -> Int32[Tensor, "words k"]:
        """Packed sign bits: row i of A is bit i % 32 of word i // 32."""
        return self.words_of(0, self.k)

    def words_of(self, start: int, stop: int) -> Int32[Tensor, "words columns"]:
        """Packed sign bits of columns start to stop (any below 2³²), without drawing the rest."""
        column = torch.arange(start, stop)
        block = torch.arange(-(-self.rank // _BLOCK))[:, None]
        four = philox4x32((column, block, DOMAIN_SIGNS, SCHEME_VERSION), self.key)
        words = four.transpose(0, 1).flatten(0, 1)[: -(-self.rank // 32)]
        return ((words ^ 0x80000000) - 0x80000000).to(torch.int32)  # same bits, signed

    def unit(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Shaped[Tensor, "r k"]:
        """√r · A: signs ±1 (exact in int8 and every float type) or standard normals.

        An operator, for FakeTensorMode and torch.compile; it takes no tensor, so that there is
        nothing to differentiate. The Triton kernel `signs` draws them on CUDA.
        """
        return torch.ops.logra_lab.signs(dtype, torch.device(device), *self._fields)

    def blocks(
        self,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        width: int | None = None,
        columns: slice | None = None,
    ) -> Iterator[tuple[slice, Float[Tensor, "r w"]]]:
        """√r · A, some columns at a time: (columns counted from the first one, block).

        Every block lies in one buffer, of 1 MiB in float32 by default, which stays in cache and
        which the next block overwrites: use it before going on. `columns` is a part of A, which is
        cut without drawing the rest.
        """
        first, last = (0, self.k) if columns is None else (columns.start, columns.stop)
        width = width or max(64, _BLOCK_NUMBERS // self.rank)
        cuts = [slice(i, min(i + width, last - first)) for i in range(0, last - first, width)]
        if self.kind == "gaussian":
            normals = self._normals().to(device, dtype)[:, first:last]
            yield from ((cut, normals[:, cut]) for cut in cuts)
            return
        # Fake tensors (FakeTensorMode) neither meet the kept words nor become them.
        kept = (first, last) == (0, self.k) and type(torch.empty(0)) is Tensor
        words = (self.words if kept else self.words_of(first, last)).to(device)
        shift = torch.arange(31, -1, -1, dtype=torch.int32, device=device)[:, None]
        buffer = torch.empty(
            words.shape[0], 32, min(width, last - first), dtype=torch.int32, device=device
        )
        for cut in cuts:
            bits = buffer[..., : cut.stop - cut.start]
            # The wanted bit becomes the sign bit of a float32 whose other bits spell 1.0. A word's
            # rows at a time: for that few torch wakes no threads, which costs more than the work.
            for word, rows in zip(words[:, cut], bits, strict=True):
                torch.bitwise_left_shift(word, shift, out=rows)
                rows.bitwise_and_(-0x80000000).bitwise_xor_(0xBF800000 - (1 << 32))
            signs = bits.view(torch.float32).reshape(-1, bits.shape[-1])
            yield cut, signs[: self.rank].to(dtype)

    def matrix(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Float[Tensor, "r k"]:
        """A itself, for teaching and tests."""
        return self.unit(dtype, device).mul_(self.scale)

    def project(
        self, x: Float[Tensor, "*batch k"], tokens: Float[Tensor, "*batch"] | None = None
    ) -> Float[Tensor, "*batch r"]:
        """P = X Aᵀ in the type of X, every token times its factor in `tokens`.

        Summed in float32 (float64 for float64) and rounded once, by the Triton kernel on CUDA and
        by torch elsewhere. Works in autograd, forward mode, FakeTensorMode and torch.compile.
        Raises `InputError` for other shapes and types: X in float32, bfloat16, float16 or float64,
        tokens in one of the first three or in X's. Cost: 2·n·k·r FLOPs; A exists one block at a
        time.
        """
        leading = x.shape[:-1]
        if x.shape[-1:] != (self.k,) or (tokens is not None and tokens.shape != leading):
            raise InputError(
                f"projection {self.path!r}: expected X [*batch, {self.k}] and a factor for each "
                f"token, got {list(x.shape)} and {None if tokens is None else list(tokens.shape)}"
            )
        self._check_type("X", x.dtype, *FLOATS, torch.float64)
        if tokens is not None:
            self._check_type("token factors", tokens.dtype, *FLOATS, x.dtype)
            if tokens.device != x.device:
                raise InputError(f"token factors are on {tokens.device}, X on {x.device}")
        return operators.apply(operators.Project, x, tokens, False, *self._fields)

    def gram(
        self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Float[Tensor, "r r"]:
        """A Aᵀ, so that ‖D A‖² = ⟨D (A Aᵀ), D⟩ costs r×r numbers instead of D A; for signs
        integers over r, the same by the Triton kernel (CUDA) and by torch."""
        return torch.ops.logra_lab.gram(dtype, torch.device(device), *self._fields)

    def squared_norm(self, D: Float[Tensor, "d r"]) -> Float[Tensor, ""]:
        """‖D A‖² = ⟨D (A Aᵀ), D⟩ in float64, differentiable. Raises `InputError` for another
        shape or type. Cost: 2·d·r² + 2·k·r² FLOPs."""
        if D.dim() != 2 or D.shape[1] != self.rank:
            raise InputError(
                f"projection {self.path!r}: expected D [d, {self.rank}], got {list(D.shape)}"
            )
        self._check_type("D", D.dtype, *FLOATS, torch.float64)
        return operators.apply(operators.SquaredNorm, D, self.gram(D.dtype, D.device))

    def _check_type(self, name: str, came: torch.dtype, *expected: torch.dtype) -> None:
        if came not in expected:
            raise InputError(
                f"projection {self.path!r}: expected {name} in one of {expected}, got {came}"
            )

    def _by_kernel(self, dtype: torch.dtype, device: torch.device) -> bool:
        covered = self.kind == "sign" and dtype != torch.float64
        return covered and kernels.backend(device) == "triton"

    def _times(self, x: Tensor, tokens: Tensor | None) -> Tensor:
        """X Aᵀ in the type of X by torch, block after block of A."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        rows = x.reshape(-1, self.k)
        P = rows.new_empty(rows.shape[0], self.rank, dtype=wide)
        for cut, block in self.blocks(wide, x.device):
            step = max(1, rows.shape[0] if x.dtype == wide else _WIDE_NUMBERS // block.shape[1])
            for some, sums in zip(rows.split(step), P.split(step), strict=True):
                sums.addmm_(some[:, cut].to(wide), block.T, beta=int(cut.start > 0))
        P.mul_(self.scale)
        if tokens is not None:
            P.mul_(tokens.reshape(-1, 1).to(wide))
        return P.to(x.dtype).reshape(*x.shape[:-1], self.rank)

    def _back(self, p: Tensor, tokens: Tensor | None) -> Tensor:
        """P A in the type of P: what carries gradients back through `project`."""
        wide = torch.float64 if p.dtype == torch.float64 else torch.float32
        rows = p.reshape(-1, self.rank).to(wide) * self.scale
        if tokens is not None:
            rows.mul_(tokens.reshape(-1, 1).to(wide))
        out = p.new_empty(rows.shape[0], self.k)
        for cut, block in self.blocks(wide, p.device):
            out[:, cut] = rows @ block
        return out.reshape(*p.shape[:-1], self.k)

    def subtract_(
        self,
        updates: Sequence[tuple[Tensor, Tensor, Tensor | None, Tensor | None]],
        columns: slice | None = None,
    ) -> None:
        """W ← W − F·(√r A) in place for each (W [d, k], F [d, r], scale, served): one A for all.

        F = U/√r, either in floats (scale None) or as int8 integers with a power of two a row,
        scale [d], for float32 W. The product of a block is formed first and then subtracted, so
        that only the subtraction rounds; `served`, if there is one, gets the new W cast to its
        type. `columns` is the part of A that W holds. Cost: 2·d·k·r operations (integer ones for
        int8) and one pass over W; A and the product exist one block of 1 MiB at a time.
        """
        factor = updates[0][1]
        integer = factor.dtype == torch.int8
        buffer = factor.new_empty(_BLOCK_NUMBERS, dtype=torch.int32 if integer else factor.dtype)
        for cut, block in self.blocks(factor.dtype, factor.device, columns=columns):
            step = max(1, _BLOCK_NUMBERS // block.shape[1])
            for weight, F, scale, served in updates:
                for start in range(0, F.shape[0], step):
                    rows = slice(start, min(start + step, F.shape[0]))
                    size = (rows.stop - rows.start) * block.shape[1]
                    product = buffer[:size].view(-1, block.shape[1])
                    part = weight[rows, cut]
                    if scale is None:
                        # Some kernels sum zeros to −0, and −0 − (−0) is +0: adding 0 makes it one.
                        part.sub_(torch.mm(F[rows], block, out=product).add_(0.0))
                    else:  # the integer times a power of two is exact: fused or not is the same
                        torch._int_mm(F[rows], block, out=product)
                        part.addcmul_(product, scale[rows, None], value=-1)
                    if served is not None:
                        served[rows, cut].copy_(part)

    def _normals(self) -> Tensor:
        """Box–Muller on 2 × 2 words per call: rows 4b to 4b+3 of a column; same prefix rule."""
        blocks = -(-self.rank // 4)
        column = torch.arange(self.k).expand(blocks, -1)
        block = torch.arange(blocks)[:, None].expand_as(column)
        counter = torch.stack([column, block, *stream(DOMAIN_GAUSSIAN, column)])
        u = (philox4x32(counter, self.key).double() + 0.5) / 2**32  # in (0, 1): log is finite
        radius, angle = (-2 * u[0::2].log()).sqrt(), 2 * math.pi * u[1::2]
        pairs = torch.stack([radius * angle.cos(), radius * angle.sin()])  # [2, 2, blocks, k]
        return pairs.permute(2, 1, 0, 3).reshape(4 * blocks, self.k)[: self.rank]
