"""The thin update: the one object between trainer, engines and disk, and the one way to apply it.

    U = α D  →  ThinUpdate: integers [Σd, r], one exponent a row, and what determines A
             →  W ← W − U A, on the trainer, in every engine, from the journal

With the int8 wire, every entry of the product U A is an exact sum of integers times a power of
two, so that its value depends on no order, block, shard or device, and the subtraction is the only
rounding: all who apply an update to equal weights get equal bits.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from jaxtyping import Float, Int8
from torch import Tensor

from logra_lab import kernels
from logra_lab.errors import InputError
from logra_lab.philox import SCHEME_VERSION, rounding_words
from logra_lab.projection import KINDS, Projection, canonical_path
from logra_lab.sync import sealed
from logra_lab.sync.errors import PayloadError, ShapeMismatch

WIRES = {
    "int8": torch.int8,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,  # for float64 models, in tests and studies
}
# 2^e is a normal float32, and 127·r·2^e is finite for every rank below 2^16.
MIN_EXPONENT, MAX_EXPONENT = -126, 100
MAX_RANK = 1 << 16
_ROWS = 1 << 17  # entries that are rounded at a time: their Philox words stay in cache


@dataclass(frozen=True)
class ThinLayer:
    """A layer of an update: W [d, k] at `name`, with the projection drawn under `site`."""

    name: str
    d: int
    k: int
    site: str


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
    ) -> "ThinUpdate":
        """The update base → base + 1 with factor U, rows laid out as `layers`, in a wire type.

        int8: row i becomes integers in [−127, 127] times 2^e, e the smallest that fits, rounded
        stochastically without bias by the bits of (seed, version, layer, row, column). Raises
        `InputError` for a factor that is not finite, too large (2^107), or of another shape.
        Cost: one pass over U; temporaries of a few MiB.
        """
        if wire not in WIRES or kind not in KINDS:
            raise InputError(f"wire {wire!r}, kind {kind!r}: expected {list(WIRES)} and {KINDS}")
        if wire == "int8" and kind != "sign":
            raise InputError(
                f"a {kind} projection has no exact sums: use wire='float32' (int8 needs signs)"
            )
        _check_layers(layers)
        rows = sum(layer.d for layer in layers)
        if U.shape[0] != rows or not 1 <= U.shape[1] <= MAX_RANK:
            raise InputError(f"factor of shape {list(U.shape)}: the layers have {rows} rows")
        values = torch.empty(U.shape, dtype=WIRES[wire], device=U.device)
        exponents = torch.empty(rows, dtype=torch.int8, device=U.device) if wire == "int8" else None
        largest = torch.finfo(torch.float64 if wire == "int8" else WIRES[wire]).max
        start = 0
        for layer in layers:
            step = max(1, _ROWS // U.shape[1])
            for row in range(0, layer.d, step):
                span = slice(row, min(row + step, layer.d))
                place = slice(start + span.start, start + span.stop)
                u = U[place].to(torch.float64, copy=True).mul_(1 / math.sqrt(U.shape[1]))
                if not (u.abs() <= largest).all():  # nor is nan
                    raise InputError(
                        f"the factor of layer {layer.name!r} is not finite, or too large for {wire}"
                    )
                if exponents is None:
                    values[place] = u
                else:
                    text = f"{seed}:{base + 1}:{layer.name}"
                    values[place], exponents[place] = _stochastic(u, text, span)
            start += layer.d
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
            values.mul_(_power_of_two(self.exponents[span])[:, None])
        return values

    def _part(
        self, name: str, rows: slice, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor | None]:
        """Factor and row scale of some rows, as `Projection.subtract_` takes them."""
        if dtype != torch.int8 or self.exponents is None:
            return self.factor(name, rows, dtype).to(device), None
        start = self.places[name][0]
        span = slice(start + rows.start, start + rows.stop)
        return self.values[span].to(device), _power_of_two(self.exponents[span]).to(device)

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
            **{name: getattr(self, name) for name in _PLAIN},
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
        update = _checked(meta, tensors)
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
    """
    check(update, slots)
    groups: dict[tuple[str, int, int, torch.dtype, torch.device], list[Slot]] = defaultdict(list)
    for slot in slots:
        if _by_kernel(update, slot.weight):
            _launch(update, slot)
            continue
        site = update.places[slot.layer][1].site
        kind = _arithmetic(update, slot.weight)
        span = (slot.columns.start, slot.columns.stop)
        groups[site, *span, kind, slot.weight.device].append(slot)
    for (_, start, stop, dtype, device), group in groups.items():
        projection = update.projection(update.places[group[0].layer][1])
        parts = [update._part(x.layer, x.rows, dtype, device) for x in group]
        projection.subtract_(
            [(x.weight, *part, x.served) for x, part in zip(group, parts, strict=True)],
            slice(start, stop),
        )


def _by_kernel(update: ThinUpdate, weight: Tensor) -> bool:
    covered = update.wire == "int8" and weight.dtype != torch.float64
    return covered and kernels.backend(weight.device) == "triton"


def _launch(update: ThinUpdate, slot: Slot) -> None:
    from logra_lab.kernels import apply as kernel  # needs Triton

    start, layer = update.places[slot.layer]
    rows = slice(start + slot.rows.start, start + slot.rows.stop)
    assert update.exponents is not None  # int8
    kernel.launch(
        slot.weight,
        update.values[rows].to(slot.weight.device),
        update.exponents[rows].to(slot.weight.device),
        update.projection(layer).key,
        slot.columns.start,
        slot.served,
    )


def _arithmetic(update: ThinUpdate, weight: Tensor) -> torch.dtype:
    """The type in which the product is summed: int8 stands for integer sums. All are exact for the
    int8 wire; where a CPU multiplies integers, that is the quickest."""
    if weight.dtype == torch.float64:
        return torch.float64
    integer = update.wire == "int8" and weight.dtype == torch.float32
    return torch.int8 if integer and weight.device.type == "cpu" and _vnni() else torch.float32


@cache
def _vnni() -> bool:
    """Whether this CPU has dot products of int8 (elsewhere torch's integer product is slow)."""
    found = torch.cpu.get_capabilities()
    return any(found.get(name, False) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))


def payload_bytes(shapes: Iterable[tuple[int, int]], rank: int, wire: str = "int8") -> int:
    """Numbers of an update in bytes, Σ d·(r + 1) for int8; the header adds up to 256 a layer."""
    size = torch.empty((), dtype=WIRES[wire]).element_size() * rank + (wire == "int8")
    return size * sum(d for d, _ in shapes)


def _stochastic(u: Tensor, text: str, rows: slice) -> tuple[Int8[Tensor, "n r"], Int8[Tensor, "n"]]:
    """floor(u/2^e + w/2³²) in float64, where u/2^e is exact; e smallest with max|u| ≤ 127·2^e."""
    mantissa, e = torch.frexp(u.abs().amax(dim=1))  # the peak is mantissa·2^e, mantissa in [½, 1)
    e = torch.where(mantissa <= 127 / 128, e - 7, e - 6)
    e = torch.where(mantissa == 0, MIN_EXPONENT, e).clamp_min(MIN_EXPONENT)
    if int(e.max()) > MAX_EXPONENT:
        raise InputError(f"a factor of size 2^{int(e.max()) + 7}: the update is far too large")
    words = rounding_words(text, rows, u.shape[1], u.device)
    q = u.mul_(_power_of_two(-e)[:, None]).add_(words.double().mul_(2.0**-32)).floor_()
    return q.to(torch.int8), e.to(torch.int8)


def _power_of_two(e: Tensor) -> Float[Tensor, "n"]:
    """2^e from the exponent bits of float32: torch's own pow and ldexp may be off by one unit."""
    return (e.to(torch.int32) + 127).bitwise_left_shift_(23).view(torch.float32)


def _check_layers(layers: Sequence[ThinLayer]) -> None:
    """A name stands for one layer, and a site for one that comes first among its readers."""
    seen: dict[str, ThinLayer] = {}
    for layer in layers:
        first = layer if layer.site == layer.name else seen.get(layer.site)
        if layer.name in seen or first is None or first.k != layer.k or first.site != layer.site:
            raise InputError(
                f"layer {layer.name!r} with site {layer.site!r}: expected a new name, and as site "
                "itself or an earlier layer that reads the same input"
            )
        seen[layer.name] = layer


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


_PLAIN = ("run", "base", "version", "seed", "draw", "rank", "wire", "kind", "scheme")
_INT64 = 1 << 63


def _checked(meta: Any, tensors: dict[str, Tensor]) -> ThinUpdate:
    """An update from untrusted parts, or `PayloadError` naming what is wrong."""

    def need(good: bool, what: str) -> None:
        if not good:
            raise PayloadError(f"update refused: {what}")

    def natural(value: Any, top: int, least: int = 0) -> bool:
        return type(value) is int and least <= value < top

    need(type(meta) is dict and set(meta) == {"format", "layers", *_PLAIN}, "unknown fields")
    need(meta["format"] == "thin-update-1", f"format {meta['format']!r:.80} is unknown")
    need(type(meta["run"]) is str and 0 < len(meta["run"]) <= 128, "run is no short text")
    need(natural(meta["base"], _INT64 - 1), "base is no version number")
    need(natural(meta["version"], _INT64), "version is no version number")
    need(meta["version"] == meta["base"] + 1, "version is not base + 1")
    need(natural(meta["seed"], _INT64, -_INT64), "seed is no integer of 64 bits")
    need(natural(meta["draw"], _INT64), "draw is no natural number")
    need(natural(meta["rank"], MAX_RANK + 1, 1), "rank is no number in 1..65536")
    need(meta["wire"] in list(WIRES) and meta["kind"] in KINDS, "unknown wire type or projection")
    need(meta["wire"] != "int8" or meta["kind"] == "sign", "int8 goes with signs only")
    need(
        type(meta["scheme"]) is int and meta["scheme"] == SCHEME_VERSION,
        f"projection scheme {meta['scheme']!r:.80}, here is {SCHEME_VERSION}: use one version",
    )
    listed = meta["layers"]
    need(type(listed) is list and len(listed) > 0, "there are no layers")
    for entry in listed:
        good = type(entry) is list and len(entry) == 4 and type(entry[0]) is str
        need(good and entry[0] == canonical_path(entry[0]) != "", f"layer entry {entry!r:.80}")
        need(all(natural(n, 1 << 32, 1) for n in entry[1:3]), f"shape of {entry[0]!r:.80}")
        need(entry[2] >= meta["rank"], f"rank exceeds the inputs of {entry[0]!r:.80}")
        need(natural(entry[3], len(listed)), f"site of {entry[0]!r:.80}")
    need(len({entry[0] for entry in listed}) == len(listed), "a layer is named twice")
    for i, (name, _, k, site) in enumerate(listed):
        first = listed[site]
        need(first[3] == site <= i and first[2] == k, f"site of {name!r:.80} is another's reader")
    rows = sum(entry[1] for entry in listed)
    names = {"values", "exponents"} if meta["wire"] == "int8" else {"values"}
    need(set(tensors) == names, f"tensors {sorted(tensors)!r:.80}, expected {sorted(names)}")
    values, exponents = tensors["values"], tensors.get("exponents")
    need(values.dtype == WIRES[meta["wire"]], f"values are {values.dtype}")
    need(tuple(values.shape) == (rows, meta["rank"]), f"values have shape {list(values.shape)}")
    if exponents is None:
        low, high = values.aminmax()  # nan if one is; isfinite would copy them all
        need(-math.inf < float(low) and float(high) < math.inf, "values are not finite")
    else:
        need(exponents.dtype == torch.int8 and exponents.shape == (rows,), "exponents of rows")
        low, high = exponents.aminmax()
        need(MIN_EXPONENT <= int(low) <= int(high) <= MAX_EXPONENT, "exponents outside −126..100")
        need(int(values.min()) >= -127, "an integer is −128")
    layers = tuple(ThinLayer(name, d, k, listed[site][0]) for name, d, k, site in listed)
    plain = {name: meta[name] for name in _PLAIN}
    return ThinUpdate(**plain, layers=layers, values=values, exponents=exponents)
