"""One linear layer whose best weights are known: dense Adam, LoRA, GaLore and LoGRA learn it.

    loss(W) = 1/2n Σ_rows Σ_i c_i (x·w_i − y_i)²,   y = W* x + noise,   x ~ N(0, I)

The columns of X are standard normal, so the excess of the expected loss over its minimum is known
without a test set: ½ Σ_i c_i ‖w_i − w*_i‖². The weights c_i make the rows unequal.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from logra_lab.lab.layer_rules import Adam, GaLore, LoGRA, LoRA, Rule, equal_ranks


@dataclass(frozen=True)
class Layer:
    """What is to be learned: W* [d, k] from W = 0, row weights c [d], noise of the labels."""

    best: Float[Tensor, "d k"]
    c: Float[Tensor, "d"]
    noise: float

    def excess(self, W: Tensor) -> float:
        return 0.5 * (self.c[:, None] * (W - self.best).square()).sum().item()

    def gradient(self, W: Tensor, n: int, generator: torch.Generator) -> Float[Tensor, "d k"]:
        """G = Hᵀ X of n fresh rows."""
        X = torch.randn(n, self.best.shape[1], generator=generator)
        noise = self.noise * torch.randn(n, len(self.c), generator=generator)
        return (self.c * (X @ (W - self.best).T - noise)).T @ X / n

    def floor_of_rank(self, r: int) -> float:
        """The least excess of any W of rank r (Eckart and Young; √c scales rows, not rank)."""
        values = torch.linalg.svdvals(self.c.sqrt()[:, None] * self.best)
        return 0.5 * values[r:].square().sum().item()

    def floor_of_rows(self, A: Float[Tensor, "r k"]) -> float:
        """The least excess of any W whose rows lie in the row space of A."""
        outside = self.best - torch.linalg.lstsq(A.T, self.best.T).solution.T @ A
        return 0.5 * (self.c[:, None] * outside.square()).sum().item()


def make_layer(
    d: int, k: int, *, rank: int | None = None, spread: float = 100.0, noise: float = 1.0, seed: int
) -> Layer:
    """W* with rows of mean square norm 1, of full rank or of `rank`; c from 1 down to 1/spread."""
    generator = torch.Generator().manual_seed(seed)
    if rank is None:
        best = torch.randn(d, k, generator=generator) / math.sqrt(k)
    else:
        left, right = (torch.randn(m, rank, generator=generator) for m in (d, k))
        best = left @ right.T / math.sqrt(k * rank)
    return Layer(best, spread ** -torch.linspace(0, 1, d), noise)


def race(
    layer: Layer, rule: Rule, lr: float, *, steps: int, n: int, seed: int
) -> Float[Tensor, "steps+1"]:
    """Excess loss before each step and after the last; lr falls linearly to 0."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.zeros_like(layer.best)
    excess = [layer.excess(W)]
    for t in range(steps):
        W += rule.step(layer.gradient(W, n, generator), lr * (1 - t / steps))
        excess.append(layer.excess(W))
    return torch.tensor(excess)


@dataclass(frozen=True)
class Contestant:
    """A method at a rank: `make(seed)` builds its rule; it may try these step sizes."""

    method: str
    rank: int
    make: Callable[[int], Rule]

    @property
    def rates(self) -> list[float]:
        """Four half-decades. Lengths of a step for LoGRA, Adam's rates for the others."""
        start = 0.5 if self.method == "LoGRA" else -1.0
        return [10 ** (start - i / 2) for i in range(4)]


def contestants(size: int, rank: int, every: int) -> dict[str, Contestant]:
    """Who races on a size × size layer: at equal bytes, at equal rank, and LoGRA's own variants."""

    def lora(r: int) -> Contestant:
        return Contestant("LoRA", r, lambda seed: LoRA(size, size, r, seed))

    def galore(r: int) -> Contestant:
        return Contestant("GaLore", r, lambda seed: GaLore(r, every))

    def logra(**settings: Any) -> Contestant:
        return Contestant("LoGRA", rank, lambda seed: LoGRA(rank, seed=seed, **settings))

    equal = equal_ranks(size, size, rank)
    return {
        "dense Adam": Contestant("dense Adam", size, lambda seed: Adam()),
        "LoRA, equal bytes": lora(equal["LoRA"]),
        "LoRA, equal rank": lora(rank),
        "GaLore, equal bytes": galore(equal["GaLore"]),
        "GaLore, equal rank": galore(rank),
        "LoGRA": logra(),
        "LoGRA, Gaussian A": logra(kind="gaussian"),
        "LoGRA, A fixed": logra(redraw=False),
        "sketch, no moment": logra(moment=False),
    }


def tuned(
    one: Contestant, layers: Sequence[Layer], *, steps: int, n: int
) -> tuple[float, list[list[float]], Rule]:
    """The rate with the least mean final excess, its curves (one a layer), and a rule that ran."""
    found: dict[float, tuple[list[list[float]], Rule]] = {}
    for lr in one.rates:
        rules = [one.make(seed) for seed in range(len(layers))]
        found[lr] = (
            [
                race(layer, rule, lr, steps=steps, n=n, seed=seed).tolist()
                for seed, (layer, rule) in enumerate(zip(layers, rules, strict=True))
            ],
            rules[0],
        )

    def final(lr: float) -> float:
        value = sum(curve[-1] for curve in found[lr][0])
        return value if math.isfinite(value) else math.inf

    best = min(one.rates, key=final)
    return best, *found[best]
