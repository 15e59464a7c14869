"""Base and updates on disk: any step's weights again, to the bit, and a bounded folder.

    journal = Journal.create(folder, run, 0, weights)      base-00000000.safetensors
    journal.append(update)                                 00000001.thin, 00000002.thin, …
    journal.rebase(100, weights)                           base-00000100.safetensors, nothing older
    Journal.open(folder).replay_into(receiver)             a restarted engine catches up

Every file is sealed (SHA-256 over all its bytes) and appears by a rename, so that a crash between
any two system calls leaves a journal that opens. One process writes; any number may read.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from logra_lab.atomic import sync_folder, write_atomically
from logra_lab.errors import InputError
from logra_lab.philox import SCHEME_VERSION
from logra_lab.sync import journal_files as files
from logra_lab.sync import sealed
from logra_lab.sync.errors import DigestMismatch, SyncError, VersionGap, WrongRun
from logra_lab.sync.journal_replay import Replay
from logra_lab.sync.update import ThinUpdate


class Journal(Replay):
    """A folder with base checkpoints and the thin updates that follow them; see `open`, `create`.

    Opening reads headers; whatever is used is checked against its digest first.
    """

    @classmethod
    def create(
        cls, folder: str | Path, run: str, version: int, weights: Mapping[str, Tensor]
    ) -> "Journal":
        """A new journal whose base is `weights`: float32 [d, k] by layer name.

        Raises `InputError` (there is a journal already; run, version or weights are none),
        `SyncError` when the system refuses a write. Cost: 4·Σd·k bytes on disk.
        """
        folder = Path(folder)
        if not 0 < len(run) <= 128 or version < 0:
            raise InputError(
                f"journal of run {run!r:.140} at version {version}: expected 1 to 128 characters, "
                "and 0 or more"
            )
        plain = _plain(weights)
        if folder.is_dir() and any(folder.glob("*.thin")) | any(folder.glob("base-*.safetensors")):
            raise InputError(f"{folder}: there is a journal already; open it, or name a new folder")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write_base(folder, run, version, plain)
        except (OSError, SafetensorError) as error:
            raise SyncError(f"journal {folder} cannot be created: {error}") from error
        return cls.open(folder)

    def append(self, update: ThinUpdate | bytes) -> bool:
        """Add the update that follows the last version; False when it is here already.

        A resumed trainer may so repeat its last steps. Raises `WrongRun`, `VersionGap`,
        `ShapeMismatch`, `DigestMismatch` (another update made this version), `PayloadError`, and
        `SyncError` when the system refuses a write: the journal is as before. Cost: one file.
        """
        data = update if isinstance(update, bytes) else update.to_bytes()
        update = ThinUpdate.from_bytes(data, max_bytes=len(data))
        if update.run != self.run:
            raise WrongRun(f"the update is of run {update.run!r}, {self.folder} of {self.run!r}")
        version, last = update.version, self.versions()[-1]
        held = self.contents.updates.get(version)
        if held is not None:
            if held.digest == update.digest:
                return False
            raise DigestMismatch(
                f"version {version} is held with digest {held.digest[:16]}…, this update has "
                f"{update.digest[:16]}…: if the trainer went back, cut({update.base}) first"
            )
        if update.base != last:
            raise VersionGap(
                f"the update leads from version {update.base}, {self.folder} ends with {last}: "
                "append what is missing, or rebase on the trainer's weights"
            )
        shapes = {layer.name: (layer.d, layer.k) for layer in update.layers}
        files.check_shapes(shapes, self.contents.shapes, f"the update to version {version}")
        path = files.update_path(self.folder, version)
        with self._writing(f"version {version} ({len(data)} bytes)"):
            if path.exists():
                raise SyncError(f"{path}: written by another process; only one may, open it again")
            write_atomically(path, lambda file: file.write(data))
        self.contents.updates[version] = files.Entry(
            path, version, len(data), self.run, update.digest, shapes, update.wire, update.rank
        )
        return True

    def rebase(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Put a new base at `version`, whole, then remove what is older.

        Later updates stay. `rebase(*journal.weights())` keeps the last version only. Raises
        `InputError`, `ShapeMismatch`, and `SyncError` when the system refuses a write.
        """
        plain = _plain(weights)
        files.check_shapes(_shapes(plain), self.contents.shapes, f"the base at version {version}")
        if version < 0:
            raise InputError(f"base at version {version}: expected 0 or more")
        bases, updates = self.contents.bases, self.contents.updates
        with self._writing(f"the base at version {version}"):
            led = updates[version].digest if version in updates else None
            if version in bases:
                led = led or bases[version].update
            bases[version] = _write_base(self.folder, self.run, version, plain, led)
            # Older bases first, for good: the updates after them are then known to be of no use.
            self._remove(bases, [v for v in sorted(bases) if v < version])
            self._remove(updates, [v for v in sorted(updates) if v <= version])

    def cut(self, version: int) -> None:
        """Make `version` the last one: for a trainer that resumes there and may go another way.

        Raises `VersionGap` when the version is not held, `SyncError` as `append` does.
        """
        self._require(version)
        bases, updates = self.contents.bases, self.contents.updates
        with self._writing(f"the cut after version {version}"):
            for kept in (updates, bases):  # no update is left without its base
                self._remove(kept, [v for v in sorted(kept, reverse=True) if v > version])

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Removes leftovers first; afterwards the object says what is on disk, come what may."""
        try:
            if self.contents.leftovers:
                for path in self.contents.leftovers:
                    path.unlink(missing_ok=True)
                sync_folder(self.folder)
                self.contents.leftovers.clear()
            yield
        except BaseException as error:
            self.contents = files.scan(self.folder)
            if not isinstance(error, OSError | SafetensorError):
                raise
            free = shutil.disk_usage(self.folder).free
            raise SyncError(
                f"journal {self.folder}: {what} could not be written: {error}; {free} bytes free; "
                f"it holds versions {self.versions()[0]} to {self.versions()[-1]}: make room or "
                "allow writing, then repeat"
            ) from error

    def _remove(self, kept: dict[int, files.Entry], versions: list[int]) -> None:
        for version in versions:
            kept[version].path.unlink(missing_ok=True)
            del kept[version]
        if versions:
            sync_folder(self.folder)


def _write_base(
    folder: Path, run: str, version: int, weights: dict[str, Tensor], update: str | None = None
) -> files.Entry:
    path = files.base_path(folder, version)
    meta = {"format": files.BASE_FORMAT, "run": run, "version": version, "scheme": SCHEME_VERSION}
    meta |= {} if update is None else {"update": update}
    digest = sealed.write(path, weights, meta)
    return files.Entry(
        path, version, path.stat().st_size, run, digest, _shapes(weights), update=update
    )


def _shapes(weights: dict[str, Tensor]) -> files.Shapes:
    return {name: (weight.shape[0], weight.shape[1]) for name, weight in weights.items()}


def _plain(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous and on the CPU; a copy only where it is not so already."""
    if not weights:
        raise InputError("a base needs weights: expected float32 [d, k] by layer name, got none")
    for name, weight in weights.items():
        if weight.dtype != torch.float32 or weight.dim() != 2 or not weight.numel():
            raise InputError(
                f"base: layer {name!r} is {weight.dtype} {list(weight.shape)}; expected float32 "
                "[d, k], the trainer's own weights"
            )
    return {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
