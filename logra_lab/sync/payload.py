"""From untrusted header and tensors to the fields of a thin update, or a refusal.

The digest is right when this is reached: what is wrong here was written so.
"""

import math
from typing import Any

import torch
from torch import Tensor

from logra_lab.philox import SCHEME_VERSION
from logra_lab.projection import KINDS, canonical_path
from logra_lab.sync.errors import PayloadError
from logra_lab.sync.wire import MAX_EXPONENT, MAX_RANK, MIN_EXPONENT, WIRES, ThinLayer

PLAIN = ("run", "base", "version", "seed", "draw", "rank", "wire", "kind", "scheme")
_INT64 = 1 << 63


def checked(meta: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The fields of an update from untrusted parts; `PayloadError` names what is wrong."""

    def need(good: bool, what: str) -> None:
        if not good:
            raise PayloadError(f"update refused: {what}")

    def natural(value: Any, top: int, least: int = 0) -> bool:
        return type(value) is int and least <= value < top

    need(type(meta) is dict and set(meta) == {"format", "layers", *PLAIN}, "unknown fields")
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
    plain = {name: meta[name] for name in PLAIN}
    return plain | {"layers": layers, "values": values, "exponents": exponents}
