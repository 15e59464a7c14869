"""Two probes that predict the KL of a step before the weights change.

Both compute ż = d logits/dt along the whole of a proposed update by perturbing layer *outputs*,
y − t·(X Aᵀ)Uᵀ, never W (adding and subtracting would not restore its bits): forward-mode AD in t,
and a symmetric finite difference; `logra_lab.kl` makes KL(1) of it. They take `forwards`: functions
without arguments that return logits [positions, V] of generated tokens, one function per chunk that
should be in memory at a time. Source: LoGRA (arXiv:2610.06647).
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from logra_lab import operators
from logra_lab.errors import InputError, LograError
from logra_lab.kl import BadPrediction, variance_kl
from logra_lab.sketch import Layer, Sketch

Forward = Callable[[], Tensor]
METHODS = ("auto", "jvp", "fd", "off")
# Finite difference: keep the change of a logit near this share of the logits' own spread. Smaller
# drowns in rounding, larger sees the third derivative, whose share a second, halved step removes.
# A model on which that second step has changed nothing is not asked for it again.
_FD_TARGET = {torch.float64: 3e-4, torch.float32: 4e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_FD_TRIES, _FD_DRIFT = 4, 3e-3

# What torch says where forward-mode AD does not reach: missing rules, functorch's own refusals.
_NO_FORWARD_MODE = ("forward ad", "forward mode", "forward-mode", "jvp", "functorch")


class ProbeError(LograError):
    """A probe could not see the update (zero tangent for a non-zero direction)."""


@dataclass(frozen=True)
class Prediction:
    """KL(1) of the whole proposal, its positions, and how it was computed."""

    kl: float
    tokens: int
    method: str
    logits: list[Tensor] | None = None  # of the unperturbed policy, where the probe has them
    hint: tuple[float, bool] | None = None  # for the next finite difference


def predict(
    sketch: Sketch,
    factor: Float[Tensor, "rows r"],
    forwards: Forward | Sequence[Forward],
    *,
    temperature: float = 1.0,
    method: str = "auto",
    hint: tuple[float, bool] | None = None,
) -> Prediction:
    """KL(1) of W ← W − factor·A, over every position that `forwards` return.

    Args:
        factor: rows laid out as `sketch.flat`.
        hint: the last finite difference's, so that it need not search for its step size.
        method: ``jvp`` (exact; needs ops with a forward-mode rule, so attention runs on its math
            path), ``fd`` (works with every kernel), ``auto`` (jvp, else fd with one warning).

    Over ranks each gives its positions and all get the mean over all; every rank has to give the
    same number of forwards, of which some may return no position.

    Raises `ProbeError` when the tangent is zero although the factor is not. The sketch and the
    weights are untouched; `BadPrediction` when there are no positions. Cost: jvp about two
    forwards; fd two where the policy is smooth at the step and four elsewhere, and more while
    the first call looks for its step size (`hint` saves the next one that).
    """
    if method not in METHODS or method == "off":
        raise InputError(f"KL probe {method!r} is unknown; expected one of {METHODS[:3]}")
    chunks = [forwards] if callable(forwards) else list(forwards)
    with torch.no_grad(), sketch.paused():
        if method == "fd":
            result = _finite_difference(sketch, factor, chunks, temperature, hint)
        else:
            try:
                result = _forward_mode(sketch, factor, chunks, temperature)
            except RuntimeError as error:  # NotImplementedError is one
                text = str(error).lower()
                unsupported = any(word in text for word in _NO_FORWARD_MODE)
                if method == "jvp" or not unsupported:
                    raise
                warnings.warn(
                    f"no forward-mode rule ({str(error).splitlines()[0]}): predicting KL by finite "
                    "difference instead; pass method='fd' to choose it without this warning",
                    stacklevel=2,
                )
                result = _finite_difference(sketch, factor, chunks, temperature, hint)
    if result.tokens == 0:
        raise BadPrediction("`forwards` return no position: the probe needs generated tokens")
    if result.kl == 0 and sketch.ranks.totals(factor.any().item())[0]:
        raise ProbeError(
            f"the {result.method} probe sees no change of the logits although the update is not "
            "zero: an operation drops tangents, or `forwards` bypass the sketched model"
        )
    return result


def _forward_mode(
    sketch: Sketch, factor: Tensor, chunks: Sequence[Forward], temperature: float
) -> Prediction:
    total, tokens, logits = 0.0, 0, []
    one = torch.ones((), dtype=factor.dtype, device=factor.device)
    for forward in chunks:

        def along(t: Tensor, forward: Forward = forward) -> Tensor:
            with perturbed(sketch, factor, t):
                return forward()

        with sdpa_kernel([SDPBackend.MATH]):
            z, z_dot = torch.func.jvp(along, (one * 0,), (one,))  # type: ignore[misc]
        _check_rows(z)
        total += variance_kl(z, z_dot, temperature).sum(dtype=torch.float64).item()
        tokens += z.shape[0]
        logits.append(z)
    total, everywhere = sketch.ranks.totals(total, tokens)
    return Prediction(total / max(everywhere, 1), int(everywhere), "jvp", logits)


def _finite_difference(
    sketch: Sketch,
    factor: Tensor,
    chunks: Sequence[Forward],
    temperature: float,
    hint: tuple[float, bool] | None,
) -> Prediction:
    def run(h: float) -> tuple[float, float, int, float]:
        total, spread, tokens, target = 0.0, 0.0, 0, 1.0
        for forward in chunks:
            with perturbed(sketch, factor, h):
                plus = forward()
            _check_rows(plus)
            with perturbed(sketch, factor, -h):
                minus = forward()
            target = _FD_TARGET[plus.dtype]
            if plus.shape[0] == 0:
                continue
            # p at the midpoint differs from p at 0 by O(h²), as the difference itself does
            middle = plus.add(minus).mul_(0.5)
            kl = variance_kl(middle, plus.sub_(minus), temperature)
            total += kl.sum(dtype=torch.float64).item() / (2 * h) ** 2
            spread += (
                middle.to(torch.promote_types(middle.dtype, torch.float32)).var(dim=-1).sum().item()
            )
            tokens += plus.shape[0]
        # what follows is decided by sums over all ranks, so that all run as many forwards
        total, spread, everywhere = sketch.ranks.totals(total, spread, tokens)
        count = max(everywhere, 1)
        return total / count, math.sqrt(spread / count), int(everywhere), target

    h, smooth = hint or (0.1, False)
    kl, spread, tokens, target = run(h)
    for _ in range(_FD_TRIES):
        if kl != 0 or tokens == 0:
            break
        h, smooth = 32 * h, False  # rounding may have swallowed a small change whole
        kl, spread, tokens, target = run(h)
    suited = h
    for again in range(_FD_TRIES):
        if again:
            kl, spread, tokens, target = run(h)
        # √(2 KL)·T is the spread of ż under p; relative to the logits' spread it judges h
        change = h * math.sqrt(2 * kl) * temperature / max(spread, 1e-30) if kl >= 0 else math.nan
        if not (math.isfinite(change) and change > 0):
            return Prediction(kl, tokens, "fd")
        suited = h * target / change
        if target / 2 < change < target * 2:
            break
        h, smooth = suited, False
    if not smooth and target < 1e-2:  # half the step tells the error in h², and takes it off
        half = run(h / 2)[0]
        for _ in range(_FD_TRIES):
            if kl > 0 and abs(half / kl - 1) < _FD_DRIFT:
                break
            h, kl, suited = h / 2, half, h / 2  # the h⁴ that is left would still be felt
            half = run(h / 2)[0]
        smooth = abs(half / kl - 1) < (3e-7 if target < 1e-3 else 3e-5)  # float64, others
        kl = (4 * half - kl) / 3
    return Prediction(kl, tokens, "fd", hint=(suited, smooth))


class _Moved(torch.autograd.Function):
    """y − t·P Uᵀ in one pass; along a tangent of t, one addition to the tangent of y.

    P and U are constants: no tangent of theirs is looked at.
    """

    @staticmethod
    def forward(y: Tensor, P: Tensor, U: Tensor, t: Tensor | float) -> Tensor:
        flat = y.reshape(-1, y.shape[-1])
        step = float(t)
        if step == 0:
            return y.view_as(y)
        moved = torch.addmm(flat, P.reshape(-1, P.shape[-1]), U.T, alpha=-step)
        return moved.reshape(y.shape)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        _, P, U, _ = inputs
        ctx.save_for_forward(P, U)

    @staticmethod
    def jvp(ctx, y_dot, P_dot, U_dot, t_dot):  # type: ignore[no-untyped-def, override]
        P, U = ctx.saved_tensors
        P = P.reshape(-1, P.shape[-1])
        if t_dot is None:  # t is a number
            return y_dot.clone()
        if y_dot is None:
            return (P @ U.T).mul_(-t_dot).reshape(*ctx.saved_tensors[0].shape[:-1], U.shape[0])
        flat = y_dot.reshape(-1, y_dot.shape[-1])
        return torch.addmm(flat, P * t_dot, U.T, alpha=-1).reshape(y_dot.shape)


@contextmanager
def perturbed(sketch: Sketch, factor: Tensor, t: Tensor | float) -> Iterator[None]:
    """Every target computes y − t·(X Aᵀ)Uᵀ inside: the policy after t of the update.

    P is computed from X detached: at t = 0 the term's derivative is (X Aᵀ)Uᵀ, whatever moves X.
    """

    def hook(layer: Layer):  # type: ignore[no-untyped-def]
        def perturb(module, args, kwargs, y):  # type: ignore[no-untyped-def]
            x = args[0] if args else kwargs["input"]
            U = sketch.ranks.gather(factor[layer.rows], layer.d)
            with torch.autocast(y.device.type, enabled=False):
                P = layer.site.project(x, y.dtype, layer.path)
                return operators.apply(_Moved, y, P, U.to(y.dtype), t)

        return perturb

    handles = [
        layer.module.register_forward_hook(hook(layer), with_kwargs=True)
        for layer in sketch.layers.values()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_rows(z: Tensor) -> None:
    """The mean is over rows: [batch, length, V] would be divided by the batch alone."""
    if z.dim() != 2:
        raise InputError(
            f"a probe's forward returned logits of shape {list(z.shape)}: expected [positions, V], "
            "rows of generated tokens only; pick them, or flatten with logits.flatten(0, 1)"
        )
