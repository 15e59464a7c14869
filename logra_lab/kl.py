"""KL in closed form, and how it governs a step.

For a proposed update, ż = d logits/dt along the whole of it (every layer at once; `logra_lab.probe`
computes it). With p = softmax(z/T) at a generated position,

    KL(1) ≈ mean over positions of ½ Var_p(ż/T),   KL(α) ≈ α²·KL(1),   α = min(α_max, √(δ/KL(1)))

Source: LoGRA (arXiv:2610.06647); the second-order form of KL is Fisher information along ż.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from logra_lab import kernels
from logra_lab.errors import InputError, LograError

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NUMBERS = 1 << 21  # of a [rows, V] temporary: 8 MiB, which malloc reuses instead of mapping anew


class BadPrediction(LograError):
    """A predicted KL that is negative or not finite; the step has to be skipped."""


@dataclass(frozen=True)
class Budget:
    """δ for update t = 1, 2, …: constant, or a cosine from `start` to `end` at `horizon`, held.

    Units: nats per generated token. Published: 2e-4 → 2e-5 over 300 updates.
    """

    start: float
    end: float | None = None
    horizon: int = 300

    def __post_init__(self) -> None:
        ends = (self.start, self.start if self.end is None else self.end)
        if not all(math.isfinite(x) and x > 0 for x in ends) or self.horizon < 1:
            raise InputError(
                f"KL budget {self}: expected positive finite nats per token and horizon ≥ 1 "
                "(for no control use budget=None)"
            )

    def __call__(self, t: int) -> float:
        if self.end is None:
            return self.start
        if t >= self.horizon:
            return self.end
        phase = (t - 1) / (self.horizon - 1)
        return self.end + 0.5 * (self.start - self.end) * (1 + math.cos(math.pi * phase))


def variance_kl(
    z: Float[Tensor, "n V"], z_dot: Float[Tensor, "n V"], temperature: float = 1.0
) -> Float[Tensor, "n"]:
    """½ Var_p(ż/T) at each position, centred before squaring; p = softmax(z/T).

    An id with p = 0 has no say, whatever its tangent. Raises `InputError` for shapes, types or a
    temperature that do not fit. Differentiable. Cost: one pass on CUDA by the Triton kernel, else
    several over rows of 8 MiB at a time.
    """
    _check_second(z, z_dot, temperature)
    if _by_kernel(z, z_dot):
        from logra_lab.kernels import kl as kernel  # needs Triton

        return kernel.variance(z, z_dot, temperature)
    out = []
    cut = max(1, _NUMBERS // z.shape[-1])
    for rows, tangent in zip(z.split(cut), z_dot.split(cut), strict=True):
        p = torch.softmax(_wide(rows) / temperature, dim=-1)
        u = _wide(tangent) / temperature
        u = torch.where(p > 0, u, 0)
        u = u - (p * u).sum(-1, keepdim=True)
        out.append(0.5 * (p * u * u).sum(-1))
    return torch.cat(out)


def realised_kl(
    z_old: Float[Tensor, "n V"], z_new: Float[Tensor, "n V"], temperature: float = 1.0
) -> Float[Tensor, "n"]:
    """KL(p_old ‖ p_new) at each position.

    Summed as p_old·(e^x − 1 − x) with x = log p_new − log p_old: the same value, since the first
    two terms add to zero, but no term is negative and rounding enters at second order. Infinite
    where an id is newly masked. Raises `InputError` as `variance_kl`; cost as there.
    """
    _check_second(z_old, z_new, temperature)
    if _by_kernel(z_old, z_new):
        from logra_lab.kernels import kl as kernel  # needs Triton

        return kernel.realised(z_old, z_new, temperature)
    out = []
    cut = max(1, _NUMBERS // z_old.shape[-1])
    for old, new in zip(z_old.split(cut), z_new.split(cut), strict=True):
        log_p = torch.log_softmax(_wide(old) / temperature, dim=-1)
        log_q = torch.log_softmax(_wide(new) / temperature, dim=-1)
        x = torch.where(log_p == -math.inf, math.inf, log_q - log_p)
        # Not 0: however unlikely an id is, an infinite x has to show.
        p = log_p.exp().clamp_min(torch.finfo(log_p.dtype).tiny)
        # p_old e^x is p_new; from x = 40 nothing else shows beside it, and e^x may overflow, also
        # in the gradient. That includes an id that was masked before.
        y = x.clamp_max(40)
        term = torch.where(x > 40, log_q.exp(), p * (torch.expm1(y) - y))
        out.append(term.sum(-1))
    return torch.cat(out)


def logprob_entropy(
    z: Float[Tensor, "n V"], labels: Int64[Tensor, "n"], temperature: float = 1.0
) -> tuple[Float[Tensor, "n"], Float[Tensor, "n"]]:
    """log p of each label and the entropy of p = softmax(z/T), in nats; differentiable.

    The log-probability of a label outside 0..V − 1 is nan, and moves with nothing. Raises
    `InputError` as `variance_kl`, and for labels that are not int64; cost as there.
    """
    _check_inputs(z, labels, temperature)
    fitting = labels.shape == z.shape[:1] and labels.dtype == torch.int64
    _need(fitting, f"int64 labels [{len(z)}]", (list(labels.shape), labels.dtype))
    if _by_kernel(z):
        from logra_lab.kernels import kl as kernel  # needs Triton

        return kernel.token(z, labels, temperature)
    logps, entropies = [], []
    cut = max(1, _NUMBERS // z.shape[-1])
    for rows, ids in zip(z.split(cut), labels.split(cut), strict=True):
        log_p = torch.log_softmax(_wide(rows) / temperature, dim=-1)
        known, last = (ids >= 0) & (ids < z.shape[1]), z.shape[1] - 1
        said = log_p.gather(1, ids.clamp(0, last)[:, None])[:, 0]
        logps.append(torch.where(known, said, math.nan))
        entropies.append(-(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1))
    return torch.cat(logps), torch.cat(entropies)


def step_scale(kl_full: float, budget: float | None, alpha_max: float = 3.0) -> float:
    """α = min(α_max, √(δ/KL(1))); 1 without a budget. Raises `BadPrediction`."""
    if not math.isfinite(kl_full) or kl_full < 0:
        raise BadPrediction(f"predicted KL(1) is {kl_full}: expected a finite value ≥ 0")
    if budget is None:
        return 1.0
    return alpha_max if kl_full == 0 else min(alpha_max, math.sqrt(budget / kl_full))


@dataclass
class Mismatch:
    """m ← 0.7 m + 0.3·max(0, mean(logp_rollout − logp_trainer)), m = 0 at first.

    What rollout and trainer already disagree by is taken off the budget, down to half of it. Feed
    it only responses that the current weights generated.
    """

    m: float = 0.0

    def update(self, gap: float) -> None:
        """gap: mean of logp_rollout − logp_trainer over completed responses, nats per token."""
        if not math.isfinite(gap):
            raise BadPrediction(f"the logprob gap is {gap}: expected a finite number of nats")
        self.m = 0.7 * self.m + 0.3 * max(0.0, gap)

    def budget(self, delta: float) -> float:
        return max(delta - self.m, delta / 2)


def _check_inputs(z: Tensor, other: Tensor, temperature: float) -> None:
    """What torch would broadcast, convert or divide by, and the kernel would refuse or read."""
    _need(z.dim() == 2 and z.shape[1] > 0, "logits [n, V] with V ≥ 1", list(z.shape))
    _need(z.dtype in _FLOATS, f"logits in one of {_FLOATS}", z.dtype)
    _need(other.device == z.device, f"a second tensor on {z.device}", other.device)
    _need(0 < temperature < math.inf, "a temperature > 0", temperature)


def _check_second(z: Tensor, other: Tensor, temperature: float) -> None:
    _check_inputs(z, other, temperature)
    _need(other.shape == z.shape, f"a second tensor {list(z.shape)}", list(other.shape))
    _need(other.dtype in _FLOATS, f"a second tensor in one of {_FLOATS}", other.dtype)


def _need(good: bool, what: str, came: object) -> None:
    if not good:
        raise InputError(f"KL, log-probability: expected {what}, got {came}")


def _by_kernel(*logits: Tensor) -> bool:
    wide = any(x.dtype == torch.float64 for x in logits)
    return not wide and kernels.backend(logits[0].device) == "triton"


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
