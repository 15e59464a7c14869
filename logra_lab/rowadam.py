"""RowAdam: from a sketch S to a direction D, with one second moment per output row.

The moment belongs to an output row, not to a sketch column, so it survives a redraw of A.

    v_i ← β₂ v_i + (1 − β₂) · mean_j S_ij²        v̂_i = v_i / (1 − β₂ᵗ)
    plain:            D_i = S_i / (√v̂_i + ε)
    norm_preserving:  D_i ∝ S_i / (√v̂_i + max(ε·mean √v̂, tiny)),  scaled to ‖D‖ = ‖S‖ per layer

Source: LoGRA (arXiv:2610.06647); the second variant is the one of its main runs.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from logra_lab import kernels
from logra_lab.errors import InputError, LograError
from logra_lab.ranks import ALONE, Ranks

VARIANTS = ("norm_preserving", "plain")


class NonFiniteSketch(LograError):
    """A sketch holds inf or nan; the message names the layer. Nothing was changed."""


def row_moment(
    v: Float[Tensor, "d"], S: Float[Tensor, "d r"], beta2: float = 0.95
) -> Float[Tensor, "d"]:
    """The next v. Returned, not stored, so that a skipped step leaves the old one."""
    mean_square = torch.linalg.vector_norm(S, dim=1).square() / S.shape[1]
    return torch.lerp(mean_square, v, beta2)


def row_scales(
    v: Float[Tensor, "d"],
    S: Float[Tensor, "d r"],
    layers: Mapping[str, int],
    t: int,
    *,
    beta2: float = 0.95,
    eps: float = 1e-8,
    variant: str = "norm_preserving",
    ranks: Ranks = ALONE,
) -> Float[Tensor, "d"]:
    """Row factors s with D = s[:, None] * S, for the already updated moments v of update t ≥ 1.

    `layers` maps the name of each to its rows, in the order of S; `ranks` say who holds the others
    (a layer may have no row here). A zero sketch gets finite factors and so a zero direction.
    Raises `NonFiniteSketch` naming the layer, on every rank, also for moments that are not finite,
    and `InputError` for an unknown variant or t < 1. Cost: one read of S, no [d, r] temporary; over
    ranks, sums of three and of two numbers a layer.
    """
    _check(variant, t)
    row_square = torch.linalg.vector_norm(S, dim=1).double().square()
    root = (v.double() / (1 - beta2**t)).sqrt()
    sizes = torch.tensor(list(layers.values()), device=S.device)
    layer_of = torch.arange(len(sizes), device=S.device).repeat_interleave(sizes)

    def by_layer(*rows: Tensor) -> Tensor:
        sums = torch.zeros(len(rows), len(sizes), dtype=torch.float64, device=S.device)
        return ranks.sum(sums.index_add_(1, layer_of, torch.stack(rows)))

    square, roots, count = by_layer(row_square, root, torch.ones_like(root))
    norm = square.sqrt() + 0 * roots  # nan where a moment is not finite, or negative
    for name, value in zip(layers, norm.tolist(), strict=True):
        if not math.isfinite(value):
            raise _not_finite(name, value)
    if variant == "plain":
        return (1 / (root + eps)).to(S.dtype)
    # In float64: 1/tiny of float32 must survive being squared.
    tiny = torch.finfo(torch.float32).tiny
    s = 1 / (root + (eps * roots / count).clamp_min(tiny)[layer_of])
    scale_square, new_square = by_layer(s.square(), s.square() * row_square)
    rms = (scale_square / count).sqrt()
    new_norm = new_square.sqrt() / rms
    factor = torch.where(new_norm > 0, norm / new_norm, 1.0) / rms
    return (s * factor[layer_of]).to(S.dtype)


def row_adam_(
    S: Float[Tensor, "d r"],
    v: Float[Tensor, "d"],
    layers: Mapping[str, int],
    t: int = 1,
    *,
    beta2: float = 0.95,
    eps: float = 1e-8,
    variant: str = "norm_preserving",
    ranks: Ranks = ALONE,
) -> Float[Tensor, "d"]:
    """One RowAdam step on the sketches of many layers, S ← D in place; returns the new v.

    `layers`, `ranks`: see `row_scales`. Raises `NonFiniteSketch` naming
    the layer, and `InputError`, with S as it was. Cost: three reads of S and one write; on CUDA,
    float32, the Triton kernel takes two reads and one write, and waits once for all layers.
    """
    _check(variant, t)
    if sum(layers.values()) != len(S):
        raise InputError(f"RowAdam: the layers have {sum(layers.values())} rows, S has {len(S)}")
    settings: dict[str, Any] = {"beta2": beta2, "eps": eps, "variant": variant}
    if S.dtype == torch.float32 and ranks.size == 1 and kernels.backend(S.device) == "triton":
        from logra_lab.kernels import row_adam as kernel  # needs Triton

        new_v, norms = kernel.row_adam(S, v, list(layers.values()), t, **settings)
        for name, norm in zip(layers, norms.tolist(), strict=True):
            if not math.isfinite(norm):
                raise _not_finite(name, norm)
        return new_v
    new_v = row_moment(v, S, beta2)
    if layers:
        S.mul_(row_scales(new_v, S, layers, t, ranks=ranks, **settings)[:, None])
    return new_v


def row_adam(
    S: Float[Tensor, "d r"],
    v: Float[Tensor, "d"],
    t: int = 1,
    *,
    beta2: float = 0.95,
    eps: float = 1e-8,
    variant: str = "norm_preserving",
    name: str = "layer",
) -> tuple[Float[Tensor, "d r"], Float[Tensor, "d"]]:
    """One RowAdam step on one layer: (D, new v), leaving S and v as they were."""
    D = S.clone()
    new_v = row_adam_(D, v, {name: len(S)}, t, beta2=beta2, eps=eps, variant=variant)
    return D, new_v


def _check(variant: str, t: int) -> None:
    if variant not in VARIANTS:
        raise InputError(f"RowAdam variant {variant!r} is unknown; expected one of {VARIANTS}")
    if t < 1:
        raise InputError(f"RowAdam: expected an update number t ≥ 1, got {t}")


def _not_finite(name: str, norm: float) -> NonFiniteSketch:
    return NonFiniteSketch(
        f"the sketch of {name} is not finite (norm {norm}, which is nan for spoilt moments too): "
        "weights and state are unchanged; look for inf or nan in the loss, or a learning signal "
        "that exploded"
    )
