"""What a group's engines should hold: a base, and the updates since, in Ray's object store.

Applied in order they give any engine the bits of those that got each update when it was made, so
that a newcomer needs nobody else, and the trainers may be ahead meanwhile.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from torch import Tensor

from logra_lab.sync.base_file import check_base
from logra_lab.sync.errors import (
    DigestMismatch,
    NeedsFullSync,
    ShapeMismatch,
    VersionGap,
    WrongRun,
)
from logra_lab.sync.update import ThinUpdate


class History:
    """Begins with the version unknown; `begin` sets a base, `append` adds an update.

    Attributes: `run` and `version`, None while unknown; `chain`, references to sealed updates.
    """

    def __init__(self) -> None:
        self.run = ""
        self.version: int | None = None
        self.chain: list[Any] = []
        self.base_version = 0
        self._base: Any = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._last = ""
        self._why = "they have not had a full sync yet"

    @property
    def steps(self) -> tuple[Any, str, int, list[Any]]:
        """The arguments of `EngineActor.catch_up`."""
        return self._base, self.run, self.base_version, self.chain

    def require_version(self) -> int:
        if self.version is None:
            raise NeedsFullSync(f"the engines' weights are of unknown version: {self._why}")
        return self.version

    def begin(self, base: str | Path | Mapping[str, Tensor], run: str, version: int) -> None:
        """Start anew from tensors by layer name, which are copied, or a sealed file.

        Raises as `check_base`, but for the digest, which the engines check, with nothing changed.
        """
        import ray

        if isinstance(base, Mapping):
            shapes = {name: tuple(weight.shape) for name, weight in base.items()}
            self._base = ray.put(
                {n: w.detach().float().cpu().contiguous().numpy() for n, w in base.items()}
            )
        else:
            check_base(Path(base), run, version, verify=False)
            with safe_open(base, framework="pt") as file:
                shapes = {n: tuple(file.get_slice(n).get_shape()) for n in file.keys()}  # noqa: SIM118
            self._base = str(Path(base).resolve())
        self.run, self.version, self.base_version = run, version, version
        self.chain, self._shapes, self._last = [], shapes, ""

    def put(self, data: bytes) -> Any:
        """Sealed bytes in the object store."""
        import ray

        return ray.put(np.frombuffer(data, dtype=np.uint8))

    def append(self, update: ThinUpdate, reference: Any) -> None:
        self.chain.append(reference)
        self.version, self._last = update.version, update.digest

    def forget(self, why: str) -> None:
        self.version, self._why = None, why

    def fits(self, update: ThinUpdate) -> bool:
        """Whether the update leads on from here; False when it was the last one.

        Raises `NeedsFullSync`, `WrongRun`, `DigestMismatch`, `VersionGap`, `ShapeMismatch`.
        """
        version = self.require_version()
        if update.run != self.run:
            raise WrongRun(f"the update is of run {update.run!r}, the weights of {self.run!r}")
        if update.version == version and self._last:
            if update.digest == self._last:
                return False
            raise DigestMismatch(f"version {version} was reached by another update than this one")
        if update.base != version:
            raise VersionGap(
                f"the update leads from version {update.base} to {update.version}, the engines are "
                f"at version {version}: sync in full"
            )
        theirs = {layer.name: (layer.d, layer.k) for layer in update.layers}
        if theirs != self._shapes:
            odd = sorted({name for name, _ in theirs.items() ^ self._shapes.items()})
            raise ShapeMismatch(
                f"update and base differ in {len(odd)} layers, first {odd[0]!r:.80}: "
                f"{theirs.get(odd[0])} and {self._shapes.get(odd[0])}"
            )
        return True
