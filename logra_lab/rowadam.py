"""RowAdam: from a sketch S to a direction D, with one second moment per output row.

The moment belongs to an output row, not to a sketch column, so it survives a redraw of A.

    v_i ← β₂ v_i + (1 − β₂) · mean_j S_ij²        v̂_i = v_i / (1 − β₂ᵗ)
    plain:            D_i = S_i / (√v̂_i + ε)
    norm_preserving:  D_i ∝ S_i / (√v̂_i + max(ε·mean √v̂, tiny)),  scaled to ‖D‖ = ‖S‖ per layer

Source: LoGRA (arXiv:2610.06647); the second variant is the one of its main runs.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad

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
    _check_finite(layers, norm)
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

    On one process an operator, for FakeTensorMode and torch.compile. It has no derivative, and no
    KL probe reaches it: the probe comes after the step; a tangent or a gradient is refused.
    """
    _check(variant, t)
    if sum(layers.values()) != len(S):
        raise InputError(f"RowAdam: the layers have {sum(layers.values())} rows, S has {len(S)}")
    if kernels.overlaps(S):
        raise InputError(f"RowAdam: entries of S share memory (strides {S.stride()}); copy it")
    if torch.is_grad_enabled() and (S.requires_grad or v.requires_grad):
        raise InputError("RowAdam: S or v requires a gradient: an update has none")
    if any(forward_ad.unpack_dual(x).tangent is not None for x in (S, v)):
        raise InputError("RowAdam: S or v has a tangent: an update has none")
    if ranks.size > 1:
        return _by_torch(S, v, layers, t, beta2, eps, variant, ranks)
    names, sizes = list(layers), list(layers.values())
    return torch.ops.logra_lab.row_adam_(S, v, names, sizes, t, beta2, eps, variant)


@torch.library.custom_op(
    "logra_lab::row_adam_",
    mutates_args=("S",),
    schema="(Tensor(a!) S, Tensor v, str[] names, SymInt[] sizes, SymInt t, float beta2, "
    "float eps, str variant) -> Tensor",
)
def _row_adam_(
    S: Tensor,
    v: Tensor,
    names: list[str],
    sizes: list[int],
    t: int,
    beta2: float,
    eps: float,
    variant: str,
) -> Tensor:
    """The step, with its refusal inside: whether S is finite can be read here, where S is real.

    Outside, a fake tensor has no values, and a compiled graph would end where they are read.
    """
    if not (S.dtype == torch.float32 and kernels.backend(S.device) == "triton"):
        layers = dict(zip(names, sizes, strict=True))
        return _by_torch(S, v, layers, t, beta2, eps, variant, ALONE)
    from logra_lab.kernels import row_adam as kernel  # needs Triton

    new_v, norms = kernel.launch(S, v, sizes, t, beta2=beta2, eps=eps, variant=variant)
    _check_finite(names, norms)
    return new_v


@_row_adam_.register_fake
def _(S: Tensor, v: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(v)


def _by_torch(
    S: Tensor,
    v: Tensor,
    layers: Mapping[str, int],
    t: int,
    beta2: float,
    eps: float,
    variant: str,
    ranks: Ranks,
) -> Tensor:
    new_v = row_moment(v, S, beta2)
    if layers:
        settings: dict[str, Any] = {"beta2": beta2, "eps": eps, "variant": variant}
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


def _check_finite(layers: Iterable[str], norms: Float[Tensor, "layers"]) -> None:
    for name, norm in zip(layers, norms.tolist(), strict=True):
        if not math.isfinite(norm):
            raise NonFiniteSketch(
                f"the sketch of {name} is not finite (norm {norm}, which is nan for spoilt moments "
                "too): weights and state are unchanged; look for inf or nan in the loss, or a "
                "learning signal that exploded"
            )
