"""The receiving side: an engine's weights, the version they are, and what may change them.

    exact: a float32 copy of the targets takes the updates, and the engine serves its cast. Any
           number of steps later the served bits are those of the trainer's weights, cast.
    plain: the served copy takes the updates itself. Cheaper, and it drifts: most of a typical
           step is below half a unit in the last place of bfloat16.

A receiver begins with its version unknown and takes only a full sync (`load`); afterwards an update
is applied when it starts from the receiver's version, acknowledged when it was the last one, and
refused otherwise. All checks come before the first write; if writing itself fails, the version is
unknown again.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.sync.errors import (
    DigestMismatch,
    NeedsFullSync,
    ShapeMismatch,
    VersionGap,
    WrongRun,
)
from logra_lab.sync.update import Slot, ThinUpdate, apply, check

MODES = ("exact", "plain")


@dataclass(frozen=True)
class Place:
    """A served tensor that holds rows × columns of layer W [d, k]; a view into a fused or sharded
    parameter, or all of an ordinary one."""

    layer: str
    d: int
    k: int
    rows: slice
    columns: slice
    served: Tensor

    @classmethod
    def whole(cls, layer: str, served: Tensor) -> "Place":
        d, k = served.shape
        return cls(layer, d, k, slice(0, d), slice(0, k), served)


class Receiver:
    """An engine's targets under the version rules.

    Args:
        places: every shard of every target that this engine (or rank) holds.
        mode: ``exact`` (default; needs a float32 copy where the engine serves another type) or
            ``plain``.

    Attributes: `run` and `version`, None while unknown; `why`, the reason for that; `last`, the
        digest of the update that led to the version, None after a full sync.
    Memory: exact adds 4 bytes a target weight unless float32 is served.
    """

    def __init__(self, places: Sequence[Place], *, mode: str = "exact") -> None:
        if mode not in MODES:
            raise InputError(f"receiver mode {mode!r} is unknown; expected one of {MODES}")
        self.places, self.mode = list(places), mode
        self.run: str | None = None
        self.version: int | None = None
        self.why = "it has not had a full sync yet"
        self.last: str | None = None
        self.slots = [self._slot(place) for place in self.places]

    def _slot(self, place: Place) -> Slot:
        at = (place.layer, place.rows, place.columns)
        shadow = self.mode == "exact" and place.served.dtype not in (torch.float32, torch.float64)
        if not shadow:
            return Slot(at[0], place.served, *at[1:])
        master = torch.empty_like(place.served, dtype=torch.float32).fill_(torch.nan)
        return Slot(at[0], master, *at[1:], served=place.served)

    def require_version(self) -> int:
        """The version of the weights, or `NeedsFullSync`: ask before generating."""
        if self.version is None:
            raise NeedsFullSync(f"the engine's weights are of unknown version: {self.why}")
        return self.version

    def forget(self, why: str) -> None:
        """The weights are no longer known (sleep, reload, a failed write): full sync next."""
        self.run = self.version = self.last = None
        self.why = why

    @torch.no_grad()
    def load(self, run: str, version: int, weights: Mapping[str, Any]) -> None:
        """Full sync: float32 weights by layer; tensors, or slices of an open safetensors file.

        Raises `ShapeMismatch` before anything is written.
        """
        self.check_load(weights)
        with self._writing():
            for place, slot in zip(self.places, self.slots, strict=True):
                slot.weight.copy_(weights[place.layer][place.rows, place.columns])
                if slot.served is not None:
                    slot.served.copy_(slot.weight)
        self.run, self.version = run, version

    def check_load(self, weights: Mapping[str, Any]) -> None:
        """Raise `ShapeMismatch` unless `weights` has every layer in its shape."""
        for place in self.places:
            if place.layer not in weights:
                raise ShapeMismatch(f"the base has no layer {place.layer!r}")
            found = weights[place.layer]
            shape = tuple(found.shape if isinstance(found, Tensor) else found.get_shape())
            if shape != (place.d, place.k):
                raise ShapeMismatch(
                    f"layer {place.layer!r} of the base is {list(shape)}, here "
                    f"{[place.d, place.k]}; is it of another model?"
                )

    def apply(self, update: ThinUpdate) -> bool:
        """Apply an update; False when it is the one applied last, which changes nothing.

        Raises `NeedsFullSync`, `WrongRun`, `VersionGap`, `ShapeMismatch`, `DigestMismatch`, with
        every weight as it was.
        """
        if not self.check(update):
            return False
        digest, run = update.digest, self.run
        with self._writing():
            apply(update, self.slots)
        self.run, self.version, self.last = run, update.version, digest
        return True

    def check(self, update: ThinUpdate) -> bool:
        """Whether `apply` would change the weights; raises as it does."""
        version = self.require_version()
        if update.run != self.run:
            raise WrongRun(f"the update is of run {update.run!r}, the weights of {self.run!r}")
        if update.version == version and self.last is not None:
            if update.digest == self.last:
                return False
            raise DigestMismatch(
                f"version {version} was reached by update {self.last[:16]}…, this is "
                f"{update.digest[:16]}…: two trainers write one run, or one went back"
            )
        if update.base != version:
            raise VersionGap(
                f"the update leads from version {update.base} to {update.version}, the weights are "
                f"of version {version}: replay the journal, or sync in full"
            )
        mine = {place.layer: (place.d, place.k) for place in self.places}
        theirs = {layer.name: (layer.d, layer.k) for layer in update.layers}
        if mine != theirs:
            odd = sorted({name for name, _ in mine.items() ^ theirs.items()})
            raise ShapeMismatch(
                f"update and engine differ in {len(odd)} layers, first {odd[0]!r:.80}: "
                f"{theirs.get(odd[0])} and {mine.get(odd[0])}"
            )
        check(update, self.slots)
        return True

    def digest(self) -> str:
        """SHA-256 over the served bytes, in the order of places."""
        digest = hashlib.sha256()
        for place in self.places:
            digest.update(_bits(place.served).cpu().numpy().data)
        return digest.hexdigest()

    @torch.no_grad()
    def difference(self, weights: Mapping[str, Tensor]) -> dict[str, tuple[int, float]]:
        """By layer: how many served weights differ from the cast of `weights`, and by how much."""
        out: dict[str, tuple[int, float]] = {}
        for place in self.places:
            cast = weights[place.layer][place.rows, place.columns].to(place.served)
            odd = (_bits(cast) != _bits(place.served)).sum().item()
            gap = (cast.double() - place.served.double()).abs_().max().item()
            count, largest = out.get(place.layer, (0, 0.0))
            out[place.layer] = (count + int(odd), gap if gap != gap else max(largest, gap))
        return out

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """The version is unknown from the first write to the last."""
        self.forget("a full sync or an update failed between its first and its last write")
        yield


def _bits(x: Tensor) -> Tensor:
    """The same bits as integers: −0 is not 0, and nan equals itself."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(kinds[x.element_size()])
