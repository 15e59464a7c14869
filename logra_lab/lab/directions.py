"""First steps of several methods from one gradient of a real policy, compared as directions.

A change is {layer path: ΔW [d, k]}, dense here so that unlike methods can be compared; LoGRA
itself never forms one. `at_kl` scales a change until the policy has moved by δ, so that
what is compared is what a method gains for the behaviour it changes.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from logra_lab import kl
from logra_lab.errors import LograError
from logra_lab.lab.layer_rules import Adam, GaLore, LoRA, Rule
from logra_lab.lab.proposals import Proposal, propose
from logra_lab.lab.real_batch import RealBatch
from logra_lab.probe import Forward
from logra_lab.projection import Projection
from logra_lab.rl.policies import Policy
from logra_lab.rowadam import row_moment

Change = Mapping[str, Tensor]
BETA2 = 0.95  # row_moment's default


def cosine(a: Tensor, b: Tensor) -> float:
    """⟨a, b⟩ / ‖a‖‖b‖ in float64."""
    x, y = a.double().flatten(), b.double().flatten()
    return (x @ y / (x.norm() * y.norm())).item()


def sketched(G: Tensor, path: str, rank: int, *, draw: int, kind: str = "sign") -> Tensor:
    """S A = G Aᵀ A of one layer, with an A of its own."""
    A = Projection(path, G.shape[1], rank, draw=draw, kind=kind).matrix(G.dtype)
    return (G @ A.T) @ A


def moment_errors(g: Tensor, rank: int, steps: int, *, kind: str, redraw: bool) -> list[float]:
    """Relative RMS error over rows of RowAdam's v̂_i·r against ‖g_i‖², after each of `steps` looks
    at one and the same g [d, k] through sketches of it."""
    v, true, errors = g.new_zeros(len(g)), g.double().square().sum(1), []
    for t in range(1, steps + 1):
        draw = t if redraw else 1
        A = Projection("moments", g.shape[1], rank, draw=draw, kind=kind).matrix(g.dtype)
        v = row_moment(v, g @ A.T)
        estimate = v.double() * rank / (1 - BETA2**t)
        errors.append((estimate / true - 1).square().mean().sqrt().item())
    return errors


def kept_by_svd(g: Tensor, rank: int) -> tuple[float, float]:
    """Cosine of g and its projection onto `rank` leading singular vectors, from the singular values
    (√ of their share of Σσ²) and measured: GaLore's view of a gradient that it has formed."""
    left, values, _ = torch.linalg.svd(g, full_matrices=False)
    closed = (values[:rank].square().sum() / values.square().sum()).sqrt().item()
    Q = left[:, :rank]
    return closed, cosine(Q @ (Q.T @ g), g)


def of_proposal(proposal: Proposal) -> dict[str, Tensor]:
    """−U_l A_l of each layer."""
    return {
        path: -proposal.U[layer.rows] @ layer.site.projection.matrix()
        for path, layer in proposal.sketch.layers.items()
    }


def first_steps(
    batch: RealBatch, G: Change, rank: int, *, draw: int = 1, rho: float
) -> dict[str, dict[str, Tensor]]:
    """Each method's first change from G, up to its length; G is the batch's own gradient."""

    def each(make: Callable[[Tensor], Rule]) -> dict[str, Tensor]:
        return {path: make(g).step(g, 1.0) for path, g in G.items()}

    changes = {
        "the gradient": {path: -g for path, g in G.items()},
        "dense Adam": each(lambda g: Adam()),
        "GaLore": each(lambda g: GaLore(rank, 1)),
        "LoRA": each(lambda g: LoRA(g.shape[0], g.shape[1], rank, draw)),
    }
    for name, variant in (("plain", "plain"), ("norm-preserving", "norm_preserving")):
        proposal = propose(batch, rank, rho=rho, variant=variant, draw=draw)
        changes[f"LoGRA, {name}"] = of_proposal(proposal)
    return changes


@contextmanager
def moved(policy: Policy, change: Change, scale: float) -> Iterator[None]:
    """The policy at W + scale·ΔW inside; afterwards the weights are back, to the bit."""
    modules = dict(policy.model.named_modules())
    weights = {path: modules[path].weight.data for path in change}
    saved = {path: weight.clone() for path, weight in weights.items()}
    try:
        for path, weight in weights.items():
            weight.add_(change[path], alpha=scale)
        yield
    finally:
        for path, weight in weights.items():
            weight.copy_(saved[path])


@torch.no_grad()
def at_kl(
    batch: RealBatch, change: Change, forward: Forward, delta: float, *, within: float = 0.02
) -> float:
    """The scale at which the realised KL of `forward`'s positions is δ, to `within`.

    KL ∝ scale² gives the next guess; a bracket keeps it where that does not hold.
    Raises `LograError` when no scale is found in forty tries.
    """
    policy, temperature = batch.policy, batch.config.temperature
    z = forward()
    length = math.hypot(*(g.norm().item() for g in change.values()))
    low, high, scale = 0.0, math.inf, 0.1 / length
    for _ in range(40):
        with moved(policy, change, scale):
            found = kl.realised_kl(z, forward(), temperature).double().mean().item()
        if abs(found / delta - 1) < within:
            return scale
        low, high = (scale, high) if found < delta else (low, scale)
        guess = scale * min(10.0, math.sqrt(delta / max(found, 1e-30)))
        middle = math.sqrt(low * high) if low > 0 else high / 2
        scale = guess if low < guess < high else middle
    raise LograError(f"no scale of this change has a KL of {delta}: the last one had {found}")


@torch.no_grad()
def gain(batch: RealBatch, change: Change, scale: float) -> float:
    """How much the PPO loss of `batch` falls when its policy moves so far."""
    before = batch.mean_loss()
    with moved(batch.policy, change, scale):
        return before - batch.mean_loss()
