"""What travels: the wire types, the layers of an update, and a factor rounded to a wire type.

int8: row i of U/√r becomes integers in [−127, 127] times 2^e, e the smallest that fits. Rounding is
stochastic, floor(u/2^e + w/2³²) with 32 random bits w for each entry, so that the update stays
unbiased. The bits belong to (seed, version, layer, row, column); only the owner of a row rounds.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int8, Int32
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.philox import rounding_words
from logra_lab.ranks import ALONE, Ranks

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


def round_factor(
    U: Float[Tensor, "held r"],
    layers: Sequence[ThinLayer],
    *,
    wire: str,
    stream: str,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Tensor | None]:
    """U/√r in a wire type, and for int8 the exponents of its rows: all rows of all layers.

    U holds the rows that this one of the `ranks` owns, and only the owner of a row rounds it.
    `stream` names the random bits, with the layer's name. Raises `InputError` for a factor that is
    not finite, too large (2^107 for int8), or of another shape, and for layers that contradict
    each other. Cost: one pass over U; temporaries of a few MiB.
    """
    if wire not in WIRES:
        raise InputError(f"wire {wire!r} is unknown: expected one of {list(WIRES)}")
    _check_layers(layers)
    held = [ranks.rows(layer.d) for layer in layers]
    sizes = [span.stop - span.start for span in held]
    if U.shape[0] != sum(sizes) or not 1 <= U.shape[1] <= MAX_RANK:
        raise InputError(f"factor of shape {list(U.shape)}: the layers have {sum(sizes)} rows")
    values = torch.empty(U.shape, dtype=WIRES[wire], device=U.device)
    exponents = torch.empty(len(U), dtype=torch.int8, device=U.device) if wire == "int8" else None
    problem = _round_rows(U, layers, held, wire, stream, values, exponents)
    if ranks.totals(problem is not None)[0]:  # on any rank: all refuse
        raise InputError(problem or "the factor of another rank is not finite, or too large")
    if ranks is ALONE:
        return values, exponents
    gathered = [_gather(values, sizes, layers, ranks)]
    if exponents is not None:
        gathered.append(_gather(exponents, sizes, layers, ranks))
    return gathered[0], gathered[1] if exponents is not None else None


def _gather(held: Tensor, sizes: list[int], layers: Sequence[ThinLayer], ranks: Ranks) -> Tensor:
    parts = zip(held.split(sizes), layers, strict=True)
    return torch.cat([ranks.gather(part, layer.d) for part, layer in parts])


def _round_rows(
    U: Tensor,
    layers: Sequence[ThinLayer],
    held: Sequence[slice],
    wire: str,
    stream: str,
    values: Tensor,
    exponents: Tensor | None,
) -> str | None:
    """Fill values and exponents some rows at a time; what is wrong with U, if anything is."""
    largest = torch.finfo(torch.float64 if wire == "int8" else WIRES[wire]).max
    start, step = 0, max(1, _ROWS // U.shape[1])
    for layer, here in zip(layers, held, strict=True):
        for row in range(here.start, here.stop, step):
            span = slice(row, min(row + step, here.stop))
            place = slice(start, start := start + span.stop - span.start)
            u = U[place].to(torch.float64, copy=True).mul_(1 / math.sqrt(U.shape[1]))
            peak = u.abs().amax(dim=1)
            if not (peak <= largest).all():  # nor is nan
                return f"the factor of layer {layer.name!r} is not finite, or too large for {wire}"
            if exponents is None:
                values[place] = u
            elif (top := _exponents(peak)).max() > MAX_EXPONENT:
                size = int(top.max()) + 7
                return f"a factor of size 2^{size}: the update is far too large"
            else:
                text = f"{stream}:{layer.name}"
                values[place], exponents[place] = _stochastic(u, top, text, span), top
    return None


def payload_bytes(shapes: Iterable[tuple[int, int]], rank: int, wire: str = "int8") -> int:
    """Numbers of an update in bytes, Σ d·(r + 1) for int8; the header adds up to 256 a layer."""
    size = torch.empty((), dtype=WIRES[wire]).element_size() * rank + (wire == "int8")
    return size * sum(d for d, _ in shapes)


def _exponents(peak: Float[Tensor, "n"]) -> Int32[Tensor, "n"]:
    """The smallest e with max|u| ≤ 127·2^e, row by row."""
    mantissa, e = torch.frexp(peak)  # the peak is mantissa·2^e, mantissa in [½, 1)
    e = torch.where(mantissa <= 127 / 128, e - 7, e - 6)
    return torch.where(mantissa == 0, MIN_EXPONENT, e).clamp_min(MIN_EXPONENT)


def _stochastic(u: Tensor, e: Tensor, text: str, rows: slice) -> Int8[Tensor, "n r"]:
    """floor(u/2^e + w/2³²) in float64, where u/2^e is exact."""
    words = rounding_words(text, rows, u.shape[1], u.device)
    q = u.mul_(power_of_two(-e)[:, None]).add_(words.double().mul_(2.0**-32)).floor_()
    return q.to(torch.int8)


def power_of_two(e: Tensor) -> Float[Tensor, "n"]:
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
