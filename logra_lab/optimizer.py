"""The LoGRA step: sketch → direction → size → predicted KL → scale → apply.

`LoGRA.step` is the method on one page. It decides everything before it changes anything: a
skipped step leaves weights, moments, draw and t as they were, and empties the sketch.
"""

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from logra_lab import kl
from logra_lab.errors import InputError, LograError
from logra_lab.philox import SCHEME_VERSION
from logra_lab.probe import METHODS, Forward, predict
from logra_lab.projection import canonical_path
from logra_lab.ranks import ALONE, Ranks
from logra_lab.rowadam import VARIANTS, NonFiniteSketch, row_adam_
from logra_lab.sketch import TARGETS, Layer, Sketch
from logra_lab.sync.update import Slot, ThinUpdate, apply
from logra_lab.sync.wire import WIRES, ThinLayer

_SAFE_RANK = int((1.05**2 - 1) * 4 * 63.5**2)  # see `LoGRA._as_sent`


class ZeroSketch(LograError):
    """Nothing to step along."""


@dataclass(frozen=True)
class KLControl:
    """How the step is governed. method: of `probe.predict`; ``off`` runs no probe (no budget then).

    With `budget=None` the step keeps its proposed size; a probe then only reports.
    """

    budget: kl.Budget | None = None
    alpha_max: float = 3.0
    method: str = "auto"
    temperature: float = 1.0
    subtract_mismatch: bool = False
    measure: bool = True  # realised KL after the step, on the probe's positions

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"KL probe {self.method!r} is unknown; expected one of {METHODS}")
        if self.budget is not None and self.method == "off":
            raise InputError("a KL budget needs a probe: method='off' goes with budget=None only")
        if not (self.alpha_max > 0 and self.temperature > 0):
            raise InputError(f"{self}: alpha_max and temperature must be positive")


@dataclass(frozen=True)
class StepReport:
    """What a step did. `skipped` is None or the reason; KL in nats per generated token.

    `update` is what was applied, for engines and journals; None when skipped.
    """

    t: int
    skipped: str | None = None
    sketch_norm: float = 0.0
    update_norm: float = 0.0  # √Σ‖U_l A_l‖², before U is rounded to the wire type
    update_ratio: float = 0.0  # the same over √Σ‖W_l‖²
    alpha: float | None = None
    kl_method: str | None = None
    kl_predicted_full: float | None = None
    kl_predicted: float | None = None
    kl_realised: float | None = None
    kl_budget: float | None = None
    mismatch: float | None = None
    update: ThinUpdate | None = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The plain values, without the update."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "update"}


class LoGRA:
    """Post-train a model's target linears from rank-r gradient sketches.

    >>> opt = LoGRA(model, rank=64)          # freezes the model and attaches the sketches
    >>> loss_of(model).backward()            # any number of microbatches
    >>> report = opt.step()                  # or opt.step(probe) under a KL budget

    Args:
        rank, seed, targets, share_inputs, projection: see `Sketch`.
        refresh: redraw A after each update (default), or keep the draw 0.
        update_ratio: ρ, the proposed ‖update‖ over ‖weights‖, all targets together.
        beta2, eps, variant: see `rowadam`. control: see `KLControl`.
        wire: the type in which U is applied here and sent: ``int8`` (default), or a float
            type for studies; see `sync.wire.WIRES`.
        ranks: who else holds rows of the targets, see `Sketch`; then every method is a collective.

    Raises `InputError` for what `Sketch` refuses and for weights below float32 (a step is far
    smaller than half a unit in the last place of bfloat16, and would be lost).
    Memory: Σd·r sketch numbers, which become D and U in place, their int8 image while a step is
    applied, and Σd moments. Over ranks each holds its rows, and all the int8 image.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        rank: int = 64,
        seed: int = 0,
        targets: Sequence[str] = TARGETS,
        share_inputs: bool = True,
        projection: str = "sign",
        refresh: bool = True,
        update_ratio: float = 6e-5,
        beta2: float = 0.95,
        eps: float = 1e-8,
        variant: str = "norm_preserving",
        control: KLControl | None = None,
        wire: str = "int8",
        ranks: Ranks = ALONE,
    ) -> None:
        if wire not in WIRES:
            raise InputError(f"wire {wire!r} is unknown: expected one of {list(WIRES)}")
        if wire == "int8" and projection != "sign":
            raise InputError(
                f"projection {projection!r} has no exact sums: choose wire='float32' (int8 goes "
                "with signs)"
            )
        if not -(1 << 63) <= seed < 1 << 63:
            raise InputError(f"seed {seed}: expected an integer of 64 bits, as updates carry it")
        if not (update_ratio > 0 and math.isfinite(update_ratio)):
            raise InputError(f"update_ratio is {update_ratio}: expected a positive number")
        if not (0 <= beta2 < 1 and eps >= 0):
            raise InputError(f"beta2 {beta2}, eps {eps}: expected 0 ≤ beta2 < 1 and eps ≥ 0")
        if variant not in VARIANTS:
            raise InputError(f"RowAdam variant {variant!r} is unknown; expected one of {VARIANTS}")
        self.refresh, self.rho, self.beta2, self.eps = refresh, update_ratio, beta2, eps
        self.variant, self.control = variant, control or KLControl(method="off")
        self.wire, self.run = wire, uuid.uuid4().hex[:12]
        self.t = 0
        self.sketch = Sketch(
            model,
            rank,
            seed=seed,
            draw=self.draw,
            targets=targets,
            share_inputs=share_inputs,
            projection=projection,
            ranks=ranks,
        )
        for path, layer in self.sketch.layers.items():
            if layer.module.weight.dtype not in (torch.float32, torch.float64):
                self.sketch.remove()
                raise InputError(
                    f"layer {path!r} is {layer.module.weight.dtype}: updates need float32 weights; "
                    "load the model with dtype=torch.float32 (autocast may compute in bfloat16)"
                )
        self.v = torch.zeros(self.sketch.flat.shape[0], dtype=self.sketch.flat.dtype)
        self.v = self.v.to(self.sketch.flat.device)
        self.mismatch = kl.Mismatch()
        self.fd_hint: tuple[float, bool] | None = None

    @property
    def draw(self) -> int:
        """Draw of the update being accumulated: its 1-based number, or 0 when A is fixed."""
        return self.t + 1 if self.refresh else 0

    @torch.no_grad()
    def step(
        self,
        probe: Forward | Sequence[Forward] | None = None,
        *,
        gap: float | None = None,
    ) -> StepReport:
        """Apply one update from the accumulated sketch, or skip it and say why.

        Args:
            probe: logits of generated positions, see `probe.predict`; needed under a budget.
            gap: mean logp_rollout − logp_trainer, for `subtract_mismatch`.
        """
        control, sketch, t = self.control, self.sketch, self.t + 1
        if control.budget is not None and probe is None:
            raise InputError("a KL budget needs a probe: call step(probe) with a logits function")
        try:
            sketch_norm, update_norm, weight_norm, v = self._propose(t)
            mismatch = kl.Mismatch(self.mismatch.m)
            if control.subtract_mismatch and gap is not None:
                mismatch.update(gap)
            delta = None if control.budget is None else mismatch.budget(control.budget(t))
            seen, alpha = None, 1.0
            if probe is not None and control.method != "off":
                seen = predict(
                    sketch,
                    self._as_sent(sketch.flat),
                    probe,
                    temperature=control.temperature,
                    method=control.method,
                    hint=self.fd_hint,
                )
                alpha = kl.step_scale(seen.kl, delta, control.alpha_max)
            before = seen and control.measure and (seen.logits or self._logits(probe))
            update = self._round(sketch.flat.mul_(alpha))  # the sketch's own memory, twice reused
        except (NonFiniteSketch, ZeroSketch, kl.BadPrediction) as reason:
            sketch.zero_()
            return StepReport(t=self.t, skipped=str(reason))
        except BaseException:
            sketch.zero_()  # it may hold half a proposal
            raise

        apply(update, self.slots())
        self.v, self.t, self.mismatch = v, t, mismatch
        sketch.zero_()
        sketch.redraw(self.draw)
        self.fd_hint = seen.hint if seen else None
        return StepReport(
            t=t,
            sketch_norm=sketch_norm,
            update_norm=alpha * update_norm,
            update_ratio=alpha * update_norm / weight_norm,
            alpha=alpha,
            kl_method=seen.method if seen else None,
            kl_predicted_full=seen.kl if seen else None,
            kl_predicted=alpha**2 * seen.kl if seen else None,
            kl_realised=self._realised(before, probe) if before else None,
            kl_budget=delta,
            mismatch=mismatch.m if control.subtract_mismatch else None,
            update=update,
        )

    def slots(self) -> list[Slot]:
        """Where an update goes: the target weights, under the names that updates use."""
        return [
            Slot(canonical_path(path), layer.weight, layer.held, slice(0, layer.site.k))
            for path, layer in self.sketch.layers.items()
            if len(layer.weight)
        ]

    def _as_sent(self, D: Tensor) -> Tensor:
        """What the probe looks at: D, or its rounded image if that differs in norm by over 5 %.

        A row of int8 has a peak above 63.5·2^e, and stochastic rounding adds at most 4^e/4 a number
        to its squared norm in the mean: below 5 % of the norm for every rank up to 1,653, where
        nothing need be computed.
        """
        if self.wire != "int8" or self.sketch.rank <= _SAFE_RANK:
            return D
        update = self._round(D)
        layers = self.sketch.layers.values()
        parts = [update.factor(canonical_path(x.path), x.held, D.dtype) for x in layers]
        rounded = torch.cat(parts).mul_(math.sqrt(self.sketch.rank))
        before, after = (
            math.sqrt(x) for x in self.sketch.ranks.totals(_square(D), _square(rounded))
        )
        return rounded if abs(after / before - 1) > 0.05 else D

    def _round(self, U: Tensor) -> ThinUpdate:
        """The update of factor U, of which this rank rounds its rows and gets the others'."""
        sketch = self.sketch
        return ThinUpdate.round(
            U,
            [
                ThinLayer(canonical_path(x.path), x.d, x.site.k, canonical_path(x.site.path))
                for x in sketch.layers.values()
            ],
            run=self.run,
            base=self.t,
            seed=sketch.seed,
            draw=self.draw,
            wire=self.wire,
            kind=sketch.kind,
            ranks=sketch.ranks,
        )

    def _propose(self, t: int) -> tuple[float, float, float, Tensor]:
        """Turn the sketch into the proposal of size ρ, in place; return the norms and the next v.

        √Σ‖D_l A_l‖² comes from the r × r Gram matrices, so no D A is formed.
        """
        sketch = self.sketch
        sketch.settle()
        sketch_norm = math.sqrt(self.sketch.ranks.totals(_square(sketch.flat))[0])
        if sketch_norm == 0:
            raise ZeroSketch("the sketch is zero in every layer: no gradient arrived")
        D = sketch.flat
        rows = {f"layer {path!r}": len(layer.S) for path, layer in sketch.layers.items()}
        settings: dict[str, Any] = {
            "beta2": self.beta2,
            "eps": self.eps,
            "variant": self.variant,
            "ranks": sketch.ranks,
        }
        v = row_adam_(D, self.v, rows, t, **settings)  # in the sketch's own memory
        update, weight = 0.0, 0.0
        for site in sketch.sites:
            # ⟨D (A Aᵀ), D⟩ = ⟨A Aᵀ, DᵀD⟩, summed over the readers of one A before it meets the Gram
            DtD = torch.zeros(sketch.rank, sketch.rank, dtype=D.dtype, device=D.device)
            for path in site.readers:
                layer = sketch.layers[path]
                DtD.addmm_(D[layer.rows].T, D[layer.rows])
                weight += _square(layer.weight)
            gram = site.projection.gram(D.dtype, D.device)
            update += torch.sum(gram.mul_(DtD), dtype=torch.float64).item()
        update, weight = self.sketch.ranks.totals(update, weight)
        if not (math.isfinite(update) and math.isfinite(weight)):
            raise NonFiniteSketch(f"the update has norm² {update}, the weights {weight}")
        if update <= 0 or weight <= 0:
            raise ZeroSketch(f"nothing to scale: ‖D A‖² is {update}, ‖W‖² is {weight}")
        D.mul_(self.rho * math.sqrt(weight / update))
        return sketch_norm, self.rho * math.sqrt(weight), math.sqrt(weight), v

    def _logits(self, probe: Any) -> list[Tensor]:
        with self.sketch.paused():
            return [forward() for forward in ([probe] if callable(probe) else probe)]

    def _realised(self, before: list[Tensor], probe: Any) -> float:
        temperature = self.control.temperature
        values = [
            kl.realised_kl(old, new, temperature)
            for old, new in zip(before, self._logits(probe), strict=True)
        ]
        seen = torch.cat(values).double()
        total, count = self.sketch.ranks.totals(seen.sum().item(), len(seen))
        return total / count

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, whole on every rank; with the weights, all that a run needs."""
        return {
            "t": self.t,
            "run": self.run,
            "v": torch.cat([self.sketch.ranks.gather(v, layer.d) for v, layer in self._rows()]),
            "mismatch": self.mismatch.m,
            "fd_hint": None if self.fd_hint is None else list(self.fd_hint),
            "fixed": self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; `InputError` names any difference in layers, rank, seed or scheme."""
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise InputError(
                f"optimizer state lacks {sorted(missing)}: it is no `state_dict()` of LoGRA, "
                "or the file is damaged; resume from another checkpoint"
            )
        mine, theirs = self._identity(), state["fixed"]
        for key, value in mine.items():
            if theirs.get(key) != value:
                raise InputError(
                    f"checkpoint does not fit: {key} is {_short(theirs.get(key))} there and "
                    f"{_short(value)} here; resume with the settings of the checkpoint"
                )
        whole = state["v"].split([layer.d for layer in self.sketch.layers.values()])
        for (v, layer), rows in zip(self._rows(), whole, strict=True):
            v.copy_(rows[layer.held])
        self.t, self.run = state["t"], state["run"]
        self.fd_hint = None if state["fd_hint"] is None else tuple(state["fd_hint"])
        self.mismatch = kl.Mismatch(state["mismatch"])
        self.sketch.zero_()
        self.sketch.redraw(self.draw)

    def _rows(self) -> list[tuple[Tensor, Layer]]:
        """Each layer with its part of v."""
        layers = list(self.sketch.layers.values())
        return list(zip(self.v.split([len(layer.S) for layer in layers]), layers, strict=True))

    def _identity(self) -> dict[str, Any]:
        sketch = self.sketch
        return {
            "layers": [f"{path}:{layer.d}" for path, layer in sketch.layers.items()],
            "sites": [site.path for site in sketch.sites],
            "scheme": SCHEME_VERSION,
            "rank": sketch.rank,
            "seed": sketch.seed,
            "projection": sketch.kind,
            "refresh": self.refresh,
            "variant": self.variant,
            "wire": self.wire,
        }


def frobenius(matrix: Float[Tensor, "d *k"]) -> float:
    """‖matrix‖ from row norms added in float64: over all entries at once, torch's float32 sum is
    off by 6e-4 at 4096 × 4096 (2.13, CPU). Cost: one read, no [d, k] temporary."""
    return math.sqrt(_square(matrix))


def _square(matrix: Float[Tensor, "d *k"]) -> float:
    return torch.linalg.vector_norm(matrix.flatten(1), dim=1).double().square().sum().item()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else text[:117] + "..."
