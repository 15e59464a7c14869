"""A proposed update that can be looked at without being taken: its size, its ż, and what it does.

`LoGRA.step` proposes, scales and applies in one go. A notebook wants to hold the proposal still and
ask what half of it, or the part of it in one kind of layer, would do to the policy. All of that
perturbs layer outputs (`probe.perturbed`); no weight changes.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from logra_lab.errors import InputError
from logra_lab.lab.real_batch import RealBatch
from logra_lab.optimizer import frobenius
from logra_lab.probe import Forward, perturbed
from logra_lab.rowadam import row_adam_
from logra_lab.sketch import Sketch


@dataclass(frozen=True)
class Proposal:
    """U [rows, r], laid out as `sketch.flat`, and the sketch whose projections it goes with."""

    sketch: Sketch
    U: Float[Tensor, "rows r"]

    @property
    def norm(self) -> float:
        """√Σ‖U_l A_l‖² over all layers, from r × r Gram matrices."""
        return math.sqrt(sum(self.squared_norms().values()))

    def squared_norms(self) -> dict[str, float]:
        """‖U_l A_l‖² of each layer by path."""
        return {
            path: layer.site.projection.squared_norm(self.U[layer.rows]).item()
            for path, layer in self.sketch.layers.items()
        }

    def resized(self, norm: float) -> "Proposal":
        """The same direction with √Σ‖U_l A_l‖² = norm."""
        if not self.norm > 0:
            raise InputError("a proposal of norm 0 has no direction: there is nothing to resize")
        return replace(self, U=self.U * (norm / self.norm))

    def only(self, kind: str) -> "Proposal":
        """The part in layers called `kind` (``"q_proj"``), enlarged to the norm of the whole."""
        U = torch.zeros_like(self.U)
        for path, layer in self.sketch.layers.items():
            if path.rpartition(".")[2] == kind:
                U[layer.rows] = self.U[layer.rows]
        return replace(self, U=U).resized(self.norm)

    def random(self, seed: int = 0) -> "Proposal":
        """Normal numbers in U's place, of the same norm: a direction that no gradient chose."""
        noise = torch.randn(self.U.shape, generator=torch.Generator().manual_seed(seed))
        return replace(self, U=noise.to(self.U)).resized(self.norm)

    @torch.no_grad()
    def logits(self, forward: Forward, alpha: float) -> Float[Tensor, "n V"]:
        """Logits after α of the update."""
        with self.sketch.paused(), perturbed(self.sketch, self.U, alpha):
            return forward()

    @torch.no_grad()
    def tangent(self, forward: Forward) -> Float[Tensor, "n V"]:
        """ż, by forward-mode AD in α at α = 0."""

        def along(alpha: Tensor) -> Tensor:
            with perturbed(self.sketch, self.U, alpha):
                return forward()

        zero, one = (self.U.new_tensor(x) for x in (0.0, 1.0))
        with self.sketch.paused(), sdpa_kernel([SDPBackend.MATH]):
            z_dot: Tensor = torch.func.jvp(along, (zero,), (one,))[1]  # type: ignore[misc]
        return z_dot


def propose(
    batch: RealBatch, rank: int, *, rho: float, variant: str, seed: int = 0, draw: int = 1
) -> Proposal:
    """The first update that LoGRA would propose on this batch: RowAdam at t = 1, size ρ‖W‖."""
    sketch = batch.sketch(rank, seed=seed, draw=draw)
    sketch.remove()  # hooks off: the layers stay known, and later backward passes leave no trace
    U = sketch.flat.clone()
    rows = {path: len(layer.S) for path, layer in sketch.layers.items()}
    row_adam_(U, U.new_zeros(len(U)), rows, 1, variant=variant)
    weights = math.hypot(*(frobenius(x.module.weight.detach()) for x in sketch.layers.values()))
    return Proposal(sketch, U).resized(rho * weights)


def shares_by_kind(values: Mapping[str, float]) -> dict[str, float]:
    """Numbers by layer path, summed by the layers' last name, as shares of their sum."""
    total, shares = sum(values.values()), dict[str, float]()
    for path, value in values.items():
        kind = path.rpartition(".")[2]
        shares[kind] = shares.get(kind, 0.0) + value / total
    return shares


def interleaved(jobs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each job, once a round. A slow moment of the machine falls on all jobs alike, so a
    ratio within a round says more than the seconds. Run each job once before: the first is slow."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            job()
            seconds[name].append(time.perf_counter() - start)
    return seconds
