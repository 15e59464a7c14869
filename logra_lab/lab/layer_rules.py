"""Four ways from a layer's gradient to a change of its weight: dense Adam, LoRA, GaLore, LoGRA.

GaLore here is what a comparison needs (arXiv:2403.03507): the dense gradient, projected onto its
own leading singular vectors, Adam in that subspace, the subspace found anew every `every` steps.
Each rule gets G and gives the change of W; LoGRA's uses only G Aᵀ of it, which a real layer has
from Hᵀ(X Aᵀ) without G.
"""

import math
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.projection import Projection
from logra_lab.rowadam import row_adam

METHODS = ("dense Adam", "LoRA", "GaLore", "LoGRA")


class Rule(Protocol):
    """A method on one layer. `kept`: the tensors between steps, without the gradient's own."""

    def step(self, G: Tensor, lr: float) -> Tensor: ...
    def kept(self) -> list[Tensor]: ...


class Adam:
    """Adam on a tensor (arXiv:1412.6980): `step` gives the change, −lr·m̂/(√v̂ + ε)."""

    def __init__(self, beta1: float = 0.9, beta2: float = 0.95, eps: float = 1e-8) -> None:
        self.beta1, self.beta2, self.eps, self.t = beta1, beta2, eps, 0

    def step(self, G: Tensor, lr: float) -> Tensor:
        if self.t == 0:
            self.m, self.v = torch.zeros_like(G), torch.zeros_like(G)
        self.t += 1
        self.m.lerp_(G, 1 - self.beta1)
        self.v.lerp_(G.square(), 1 - self.beta2)
        m = self.m / (1 - self.beta1**self.t)
        v = self.v / (1 - self.beta2**self.t)
        return -lr * m / (v.sqrt() + self.eps)

    def kept(self) -> list[Tensor]:
        return [self.m, self.v]


class LoRA:
    """W = B A, Adam on both factors; B = 0 at first, A uniform (arXiv:2106.09685; α = r)."""

    def __init__(self, d: int, k: int, r: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.B, self.A = torch.zeros(d, r), torch.rand(r, k, generator=generator) * 2 - 1
        self.A *= 1 / math.sqrt(k)  # peft: Kaiming's uniform bound with a = √5
        self.for_A, self.for_B = Adam(), Adam()

    def step(self, G: Tensor, lr: float) -> Tensor:
        before = self.B @ self.A
        dB, dA = G @ self.A.T, self.B.T @ G
        self.B += self.for_B.step(dB, lr)
        self.A += self.for_A.step(dA, lr)
        return self.B @ self.A - before

    def kept(self) -> list[Tensor]:
        return [self.A, self.B, *self.for_A.kept(), *self.for_B.kept()]


class GaLore:
    """Adam on G's component along its r leading singular vectors of the shorter side."""

    def __init__(self, r: int, every: int) -> None:
        self.r, self.every, self.t, self.adam = r, every, 0, Adam()

    def step(self, G: Tensor, lr: float) -> Tensor:
        d, k = G.shape
        if self.t % self.every == 0:
            left, _, right = torch.linalg.svd(G, full_matrices=False)
            self.Q = left[:, : self.r].clone() if d <= k else right[: self.r].T.clone()
        self.t += 1
        if d <= k:
            return self.Q @ self.adam.step(self.Q.T @ G, lr)
        return self.adam.step(G @ self.Q, lr) @ self.Q.T

    def kept(self) -> list[Tensor]:
        return [self.Q, *self.adam.kept()]


class LoGRA:
    """The library's RowAdam on S = G Aᵀ; a step of length lr, ‖D A‖ = lr.

    `moment=False` steps along S A itself, for comparison: what RowAdam adds is then missing.
    """

    def __init__(
        self, r: int, *, kind: str = "sign", redraw: bool = True, moment: bool = True, seed: int = 0
    ) -> None:
        self.r, self.kind, self.redraw, self.moment = r, kind, redraw, moment
        self.seed, self.t = seed, 0

    def projection(self, k: int, t: int) -> Projection:
        draw = t if self.redraw else 0
        return Projection("layer", k, self.r, seed=self.seed, draw=draw, kind=self.kind)

    def step(self, G: Tensor, lr: float) -> Tensor:
        self.t += 1
        if self.t == 1:
            self.v = G.new_zeros(len(G))
        A = _matrix(self.projection(G.shape[1], self.t))
        self.S = G @ A.T
        D = self.S
        if self.moment:
            D, self.v = row_adam(self.S, self.v, self.t, variant="plain")
        change = D @ A
        return change * (-lr / torch.linalg.vector_norm(change))

    def kept(self) -> list[Tensor]:
        return [self.S, self.v]  # S is its gradient buffer too


@lru_cache(maxsize=1024)
def _matrix(projection: Projection) -> Tensor:
    """A, kept here because a race is run again for every rate; a training run keeps none."""
    return projection.matrix()


def state_numbers(method: str, d: int, k: int, r: int) -> dict[str, int]:
    """Numbers held between forward and weights: a full gradient, and all the rest."""
    rest = {
        "dense Adam": 2 * d * k,
        "LoRA": 3 * r * (d + k),  # adapters and two moments
        "GaLore": r * min(d, k) + 2 * r * max(d, k),
        "LoGRA": d,
    }
    if method not in rest:
        raise InputError(f"method {method!r} is unknown; expected one of {METHODS}")
    gradient = {"LoRA": r * (d + k), "LoGRA": d * r}.get(method, d * k)
    return {"gradient": gradient, "state": rest[method]}


def equal_ranks(d: int, k: int, r: int) -> dict[str, int]:
    """Ranks whose bytes are at most those of LoGRA's sketch and moments at rank r.

    GaLore's dense gradient is not counted, in its favour: with it no rank would fit.
    """
    budget = d * r + d
    ranks = {"LoRA": budget // (4 * (d + k)), "GaLore": budget // (min(d, k) + 2 * max(d, k))}
    for method, rank in ranks.items():
        if rank < 1:
            raise InputError(f"{method} of rank 1 needs more than LoGRA of rank {r}: raise it")
    return ranks
