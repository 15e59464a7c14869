"""The thin update: the one object between trainer, engines and disk, and the one way to apply it.

    U = α D  →  ThinUpdate: integers [Σd, r], one exponent a row, and what determines A
             →  W ← W − U A, on the trainer, in every engine, from the journal

With the int8 wire, every entry of the product U A is an exact sum of integers times a power of
two, so that its value depends on no order, block, shard or device, and the subtraction is the only
rounding: all who apply an update to equal weights get equal bits.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.philox import SCHEME_VERSION
from logra_lab.projection import KINDS, Projection
from logra_lab.ranks import ALONE, Ranks
from logra_lab.sync import operator, sealed
from logra_lab.sync.errors import ShapeMismatch
from logra_lab.sync.payload import PLAIN, checked
from logra_lab.sync.wire import ThinLayer, power_of_two, round_factor


@dataclass(frozen=True, eq=False)
class ThinUpdate:
    """One step, W ← W − U A for all layers at once, as numbers and integers.

    Attributes:
        run: id of the training run. base, version: the step leads from `base` to `version`.
        seed, draw, rank, kind, scheme: determine A; see `Projection` and `SCHEME_VERSION`.
        wire: type of `values`. layers: in the order of their rows.
        values: U/√r [Σd, r], so that A's entries are ±1: integers of the int8 wire, else floats.
        exponents: of the int8 wire, [Σd]: row i stands for values[i]·2^exponents[i].
    """

    run: str
    base: int
    version: int
    seed: int
    draw: int
    rank: int
    wire: str
    kind: str
    scheme: int
    layers: tuple[ThinLayer, ...]
    values: Tensor
    exponents: Tensor | None

    @classmethod
    def round(
        cls,
        U: Float[Tensor, "rows r"],
        layers: Sequence[ThinLayer],
        *,
        run: str,
        base: int,
        seed: int,
        draw: int,
        wire: str = "int8",
        kind: str = "sign",
        ranks: Ranks = ALONE,
    ) -> "ThinUpdate":
        """The update base → base + 1 with factor U, rows laid out as `layers`, in a wire type.

        int8: row i becomes integers in [−127, 127] times 2^e, e the smallest that fits, rounded
        stochastically without bias by the bits of (seed, version, layer, row, column). Over
        `ranks`, U holds this rank's rows of every layer, and all get the whole update. Raises
        `InputError` for a factor that is not finite, too large (2^107), or of another shape.
        Cost: one pass over U; temporaries of a few MiB.
        """
        if kind not in KINDS or (wire == "int8" and kind != "sign"):
            raise InputError(
                f"projection {kind!r} with wire {wire!r}: expected one of {KINDS}, and signs for "
                "int8 (others have no exact sums: use wire='float32')"
            )
        stream = f"{seed}:{base + 1}"
        values, exponents = round_factor(U, layers, wire=wire, stream=stream, ranks=ranks)
        return cls(
            run=run,
            base=base,
            version=base + 1,
            seed=seed,
            draw=draw,
            rank=U.shape[1],
            wire=wire,
            kind=kind,
            scheme=SCHEME_VERSION,
            layers=tuple(layers),
            values=values,
            exponents=exponents,
        )

    def to(self, device: torch.device | str) -> "ThinUpdate":
        """The same update with its numbers on a device."""
        exponents = None if self.exponents is None else self.exponents.to(device)
        return replace(self, values=self.values.to(device), exponents=exponents)

    @cached_property
    def places(self) -> dict[str, tuple[int, ThinLayer]]:
        """First row in `values` and shape of every layer, by name."""
        found, start = {}, 0
        for layer in self.layers:
            found[layer.name] = (start, layer)
            start += layer.d
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers; the header adds up to 256 a layer."""
        return self.values.nbytes + (0 if self.exponents is None else self.exponents.nbytes)

    def factor(
        self, name: str, rows: slice | None = None, dtype: torch.dtype = torch.float32
    ) -> Float[Tensor, "rows r"]:
        """U/√r of some rows of a layer, as the numbers that are applied; exact for int8."""
        start, layer = self.places[name]
        first, last = (0, layer.d) if rows is None else (rows.start, rows.stop)
        span = slice(start + first, start + last)
        values = self.values[span].to(dtype)
        if self.exponents is not None:
            values.mul_(power_of_two(self.exponents[span])[:, None])
        return values

    def _part(self, slot: "Slot", device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Values and exponents of a slot's rows, on its device."""
        start = self.places[slot.layer][0]
        rows = slice(start + slot.rows.start, start + slot.rows.stop)
        exponents = None if self.exponents is None else self.exponents[rows].to(device)
        return self.values[rows].to(device), exponents

    def projection(self, layer: ThinLayer) -> Projection:
        return Projection(layer.site, layer.k, self.rank, self.seed, self.draw, self.kind)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the sealed bytes: the identity of this update."""
        return sealed.digest_of(self.to_bytes())

    def to_bytes(self) -> bytes:
        """Sealed safetensors: `values`, `exponents`, and the rest as JSON in the header."""
        order = {layer.name: i for i, layer in enumerate(self.layers)}
        meta = {
            "format": "thin-update-1",
            **{name: getattr(self, name) for name in PLAIN},
            "layers": [[x.name, x.d, x.k, order[x.site]] for x in self.layers],
        }
        tensors = {"values": self.values.cpu()}
        if self.exponents is not None:
            tensors["exponents"] = self.exponents.cpu()
        return sealed.pack(tensors, meta)

    @classmethod
    def from_bytes(cls, data: bytes, *, max_bytes: int = 8 << 30) -> "ThinUpdate":
        """Read what `to_bytes` wrote. Raises `PayloadError` for anything else, naming the field,
        and `DigestMismatch`. Cost: one copy of the numbers."""
        meta, tensors = sealed.unpack(data, max_bytes=max_bytes)
        update = cls(**checked(meta, tensors))
        update.__dict__["digest"] = sealed.digest_of(data)  # known now: no need to serialise again
        return update


@dataclass(frozen=True)
class Slot:
    """Where a layer, or a shard of it, lives.

    Attributes:
        weight: [rows, columns] of W: float32 (float64), or a served copy where drift is accepted.
        rows, columns: the part of W [d, k] that `weight` holds.
        served: a tensor of the same shape that gets the new weight cast to its type, or None.
    """

    layer: str
    weight: Tensor
    rows: slice
    columns: slice
    served: Tensor | None = None

    @classmethod
    def whole(cls, layer: str, weight: Tensor, served: Tensor | None = None) -> "Slot":
        return cls(layer, weight, slice(0, weight.shape[0]), slice(0, weight.shape[1]), served)


def check(update: ThinUpdate, slots: Sequence[Slot]) -> None:
    """Raise `ShapeMismatch` unless `apply` can write every slot."""
    for slot in slots:
        _check_slot(update, slot)


@torch.no_grad()
def apply(update: ThinUpdate, slots: Sequence[Slot]) -> None:
    """W ← W − U A in every slot, in place: trainer, engines and replay all come here.

    Everything is checked before the first write (`ShapeMismatch`). Each A is regenerated once for
    all slots that share it, in blocks; no [d, k] temporary exists. int8: the same bits whatever the
    slots' shapes, blocks and order, by the Triton kernel on CUDA and by torch elsewhere.

    Works under FakeTensorMode and torch.compile, and on tensors of inference mode. No KL probe
    reaches it: probes perturb outputs of layers, never W, and a tangent is refused (`InputError`).
    """
    check(update, slots)
    groups: dict[tuple[Any, ...], list[Slot]] = defaultdict(list)
    for slot in slots:
        site, weight = update.places[slot.layer][1].site, slot.weight
        span = (slot.columns.start, slot.columns.stop)
        groups[site, *span, weight.dtype, weight.device, slot.served is None].append(slot)
    for (site, start, stop, _, device, _), group in groups.items():
        k = update.places[group[0].layer][1].k
        parts = [update._part(slot, device) for slot in group]
        operator.apply(
            [slot.weight for slot in group],
            [values for values, _ in parts],
            [exponents for _, exponents in parts if exponents is not None],
            [slot.served for slot in group if slot.served is not None],
            slice(start, stop),
            (site, k, update.rank, update.seed, update.draw, update.kind),
        )


def _check_slot(update: ThinUpdate, slot: Slot) -> None:
    if slot.layer not in update.places:
        raise ShapeMismatch(f"the update has no layer {slot.layer!r}; is it for another model?")
    layer = update.places[slot.layer][1]
    shape = (slot.rows.stop - slot.rows.start, slot.columns.stop - slot.columns.start)
    inside = 0 <= slot.rows.start < slot.rows.stop <= layer.d
    inside = inside and 0 <= slot.columns.start < slot.columns.stop <= layer.k
    shapes = {tuple(x.shape) for x in (slot.weight, slot.served) if x is not None}
    if not inside or shapes != {shape}:
        raise ShapeMismatch(
            f"layer {slot.layer!r}: the update is for {layer.d} × {layer.k}, the weight at hand is "
            f"{' and '.join(map(str, sorted(shapes)))} for rows {slot.rows.start}:"
            f"{slot.rows.stop}, columns {slot.columns.start}:{slot.columns.stop}"
        )
