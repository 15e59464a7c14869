"""Every kernel on the shapes of a model: closed forms, the library's way, and the naive torch way.

The library's way is its public call, which computes with the Triton kernel on CUDA and with torch
elsewhere. The naive way draws A with torch's generator, keeps all of it, and multiplies. Bytes are
the least that has to move: every input read once and every output written once, W, S and the
weights of a step both (RowAdam reads S twice, see its kernel). Random signs are no FLOPs.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from logra_lab import kernels, kl, rowadam
from logra_lab.bench.roofline import Case, Part
from logra_lab.projection import Projection
from logra_lab.sketch import accumulate
from logra_lab.sync.operator import arithmetic
from logra_lab.sync.update import Slot, ThinUpdate, apply
from logra_lab.sync.wire import ThinLayer

_STEP = 1e-6  # size of an entry of U: an RMS step of real training


@dataclass(frozen=True)
class Sizes:
    """What the kernels work on.

    Attributes: `layers` of one block; `tokens` n and `rank` r; `rows` of logits over a
    `vocabulary`; `blocks` of such layers in the flat sketch of RowAdam; `dtype` of X, H, logits.
    """

    layers: tuple[ThinLayer, ...]
    tokens: int
    rank: int
    rows: int
    vocabulary: int
    blocks: int
    dtype: torch.dtype

    @property
    def sites(self) -> dict[str, int]:
        """k of each input, by the first layer that reads it."""
        return {layer.site: layer.k for layer in self.layers}

    @property
    def size(self) -> int:
        return self.dtype.itemsize


class Cases:
    """Builds one `Case` for each kernel on `device`; the tensors live as long as they."""

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.sizes, self.device = sizes, device
        self.triton = kernels.backend(device) == "triton"
        self.draws = itertools.count(1)
        torch.manual_seed(0)

    def all(self) -> dict[str, Case]:
        """By the kernels' names."""
        made = (self.signs, self.project, self.accumulate, self.gram, self.squared_norm)
        found = {make.__name__: make() for make in (*made, self.row_adam, self.apply)}
        found["apply_served"] = self.apply(served=True)
        return found | {f"kl_{kind}": self.kl(kind) for kind in ("variance", "realised", "token")}

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or self.sizes.dtype
        return torch.randn(shape, dtype=torch.float32, device=self.device).to(dtype)

    def fresh(self, site: str, k: int) -> Projection:
        """Another draw at every call, so that no signs are left from the last one."""
        return Projection(site, k, self.sizes.rank, draw=next(self.draws))

    def naive_A(self, k: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A [r, k], drawn the usual way."""
        r, one = self.sizes.rank, 1 / math.sqrt(self.sizes.rank)
        bits = torch.randint(0, 2, (r, k), device=self.device, dtype=dtype)
        return bits.mul_(2 * one).sub_(one)

    def signs(self) -> Case:
        """All of √r·A: int8 by the kernel, float32 by torch, as each of them uses it."""
        sites, r = self.sizes.sites, self.sizes.rank
        parts = [Part(r * k * (1 if self.triton else 4), 0) for k in sites.values()]

        dtype = torch.int8 if self.triton else torch.float32
        return Case(
            tuple(parts),
            lambda: [self.fresh(*site).unit(dtype, self.device) for site in sites.items()],
            lambda: [self.naive_A(k) for k in sites.values()],
        )

    def project(self) -> Case:
        """P = X Aᵀ at each input of a block."""
        s, dtype = self.sizes, self.sizes.dtype
        X = {site: self.normal(s.tokens, k) for site, k in s.sites.items()}
        parts = [
            Part(s.size * s.tokens * (k + s.rank), 2 * s.tokens * k * s.rank, dtype)
            for k in s.sites.values()
        ]
        return Case(
            tuple(parts),
            lambda: [self.fresh(site, x.shape[1]).project(x) for site, x in X.items()],
            lambda: [x @ self.naive_A(x.shape[1], dtype).T for x in X.values()],
        )

    def accumulate(self) -> Case:
        """S ← S + Hᵀ P of each layer of a block."""
        s, dtype = self.sizes, self.sizes.dtype
        H = [self.normal(s.tokens, layer.d) for layer in s.layers]
        P = self.normal(s.tokens, s.rank)
        S = [torch.zeros(x.d, s.rank, device=self.device) for x in s.layers]
        parts = [
            Part(
                s.size * s.tokens * (x.d + s.rank) + 8 * x.d * s.rank,
                2 * s.tokens * x.d * s.rank,
                dtype,
            )
            for x in s.layers
        ]

        def naive() -> None:
            for sums, h in zip(S, H, strict=True):
                sums += h.float().T @ P.float()

        def ours() -> None:
            for sums, h in zip(S, H, strict=True):
                accumulate(sums, h, P)

        return Case(tuple(parts), ours, naive)

    def gram(self) -> Case:
        """A Aᵀ at each input of a block, as a step asks for it."""
        s, r = self.sizes, self.sizes.rank
        unit = torch.int8 if self.triton else torch.float32
        parts = [Part(4 * r * r, 2 * k * r * r, unit) for k in s.sites.values()]

        def naive(k: int) -> Tensor:
            A = self.naive_A(k)
            return A @ A.T

        return Case(
            tuple(parts),
            lambda: [self.fresh(*site).gram(device=self.device) for site in s.sites.items()],
            lambda: [naive(k) for k in s.sites.values()],
        )

    def squared_norm(self) -> Case:
        """⟨D gram, D⟩ of each layer of a block, with A Aᵀ ready; the naive way has A ready."""
        s, r = self.sizes, self.sizes.rank
        D = [self.normal(x.d, r, dtype=torch.float32) for x in s.layers]
        grams = {site: self.fresh(site, k).gram(device=self.device) for site, k in s.sites.items()}
        A = {site: self.naive_A(k) for site, k in s.sites.items()}
        parts = [Part(4 * r * (x.d + r), 2 * x.d * r * r) for x in s.layers]
        pairs = list(zip(D, s.layers, strict=True))
        return Case(
            tuple(parts),
            lambda: [torch.ops.logra_lab.squared_norm(d, grams[x.site]) for d, x in pairs],
            lambda: [(d @ A[x.site]).square().sum() for d, x in pairs],
        )

    def row_adam(self) -> Case:
        """Moments and directions of the sketch of all blocks, in place."""
        s = self.sizes
        sizes = {f"{i}.{x.name}": x.d for i in range(s.blocks) for x in s.layers}
        total, rows = sum(sizes.values()), list(sizes.values())
        S = self.normal(total, s.rank, dtype=torch.float32)
        v, tiny = torch.ones(total, device=self.device), torch.finfo(torch.float32).tiny

        def naive() -> list[Tensor]:
            found = []
            for part, old in zip(S.split(rows), v.split(rows), strict=True):
                root = ((0.95 * old + 0.05 * part.square().mean(1)) / (1 - 0.95)).sqrt()
                scale = 1 / (root + (1e-8 * root.mean()).clamp_min(tiny))
                moved = part * scale[:, None]
                found.append(moved * (part.norm() / moved.norm()))
            return found

        part = Part(12 * total * s.rank + 20 * total, 3 * total * s.rank)
        return Case((part,), lambda: rowadam.row_adam_(S, v, sizes), naive)

    def apply(self, served: bool = False) -> Case:
        """W ← W − U A of each layer of a block, float32 weights, the int8 wire; `served`: with a
        bfloat16 copy of the new W written in the same pass, and counted in what moves."""
        s, r = self.sizes, self.sizes.rank
        W = {x.name: self.normal(x.d, x.k, dtype=torch.float32) for x in s.layers}
        U = self.normal(sum(x.d for x in s.layers), r, dtype=torch.float32).mul_(_STEP)
        update = ThinUpdate.round(U, s.layers, run="bench", base=0, seed=0, draw=1)
        copies = {name: w.bfloat16() for name, w in W.items()} if served else {}
        slots = [Slot.whole(name, weight, copies.get(name)) for name, weight in W.items()]
        unit = arithmetic(torch.int8, torch.float32, torch.device(self.device))
        unit = torch.int8 if self.triton else unit
        size = 10 if served else 8  # bytes that move for an entry of W
        parts = [Part(size * x.d * x.k + x.d * (r + 1), 2 * x.d * x.k * r, unit) for x in s.layers]

        def naive() -> None:
            for x, u in zip(s.layers, U.split([x.d for x in s.layers]), strict=True):
                W[x.name] -= u @ self.naive_A(x.k)
                if served:
                    copies[x.name].copy_(W[x.name])

        moved = size * sum(x.d * x.k for x in s.layers)
        return Case(tuple(parts), lambda: apply(update, slots), naive, moved)

    def kl(self, kind: str) -> Case:
        """½ Var_p(ż), KL(p ‖ p_new), or log-probability and entropy, of rows of logits.

        FLOPs an entry, e^x counted as one: softmax 3 (z − max, e^x, sum); variance 6 more (mean 2,
        centre, square, weigh, sum); realised 9 more (the other softmax, x, e^x − 1 − x, sum);
        entropy 2.
        """
        s = self.sizes
        z, other = (self.normal(s.rows, s.vocabulary) for _ in range(2))
        labels = torch.arange(s.rows, device=self.device) % s.vocabulary
        read = s.size * z.numel() * (1 if kind == "token" else 2)
        written = s.rows * (8 + 8 if kind == "token" else 4)  # labels are read
        flops = {"variance": 9, "realised": 12, "token": 5}[kind] * z.numel()

        def variance() -> Tensor:
            p, u = torch.softmax(z.float(), -1), other.float()
            return 0.5 * (p * (u - (p * u).sum(-1, keepdim=True)).square()).sum(-1)

        def realised() -> Tensor:
            p, q = (F.log_softmax(x.float(), -1) for x in (z, other))
            return F.kl_div(q, p, log_target=True, reduction="none").sum(-1)

        def token() -> tuple[Tensor, Tensor]:
            p = F.log_softmax(z.float(), -1)
            return p.gather(1, labels[:, None]), -(p.exp() * p).sum(-1)

        ours: dict[str, Callable[[], object]] = {
            "variance": lambda: kl.variance_kl(z, other),
            "realised": lambda: kl.realised_kl(z, other),
            "token": lambda: kl.logprob_entropy(z, labels),
        }
        naive = {"variance": variance, "realised": realised, "token": token}[kind]
        return Case((Part(read + written, flops),), ours[kind], naive, read)
