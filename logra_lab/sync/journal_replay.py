"""Reading a journal: the weights of any version it holds, and a receiver brought up to date."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from safetensors import safe_open
from torch import Tensor

from logra_lab.sync import journal_files as files
from logra_lab.sync.errors import DigestMismatch, PayloadError, SyncError, VersionGap, WrongRun
from logra_lab.sync.receiver import Receiver
from logra_lab.sync.update import Slot, ThinUpdate, apply


class Replay:
    """What can be done with a journal without writing to it; use `Journal`."""

    def __init__(self, folder: Path, contents: files.Contents) -> None:
        self.folder, self.contents = folder, contents

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """The journal in `folder`; nothing is written. `dropped` says what was torn.

        A torn last record and temporary files stay on disk, unused, until the next write removes
        them. Raises `InputError` (no journal), `VersionGap` (a record is missing), `WrongRun`,
        `ShapeMismatch`, `DigestMismatch`, `TornFile` (not the last one). Cost: one header a file.
        """
        return cls(Path(folder), files.scan(Path(folder)))

    @property
    def run(self) -> str:
        return self.contents.run

    @property
    def dropped(self) -> list[str]:
        """The torn records that `open` left out, in words."""
        return self.contents.dropped

    @property
    def size(self) -> int:
        """Bytes of the kept files."""
        kept = [*self.contents.bases.values(), *self.contents.updates.values()]
        return sum(entry.size for entry in kept)

    def versions(self) -> list[int]:
        """The versions whose weights it holds, in order."""
        return self.contents.versions

    def update(self, version: int) -> ThinUpdate:
        """The update that leads to `version`, read and checked; `VersionGap` if it is not held."""
        if version not in self.contents.updates:
            raise VersionGap(f"{self.folder} holds no update to version {version}")
        entry = self.contents.updates[version]
        with _reading(entry.path):
            data = entry.path.read_bytes()
            try:
                update = ThinUpdate.from_bytes(data, max_bytes=len(data))
            except PayloadError as error:
                files.verify(entry.path)  # names a changed byte before what it seems to say
                raise PayloadError(f"{entry.path}: {error}") from error
        if update.digest != entry.digest:
            raise SyncError(f"{entry.path} was replaced since the journal was opened: open it anew")
        return update

    @contextmanager
    def base(self, version: int) -> Iterator[dict[str, Any]]:
        """The base at `version`, checked, as slices of an open file: only what is taken is read."""
        path = self.contents.bases[version].path
        with _reading(path):
            files.verify(path)
            with safe_open(path, "pt") as file:
                yield {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no dict

    def route(self, version: int | None, target: int) -> tuple[int | None, range]:
        """How weights of `version` (None: unknown) become those of `target`: the base to load
        first, or None, and the versions of the updates to apply then.

        Raises `VersionGap` when the target is not held.
        """
        self._require(target)
        if version is not None and version <= target:
            updates = range(version + 1, target + 1)
            if all(v in self.contents.updates for v in updates):
                return None, updates
        base = max(v for v in self.contents.bases if v <= target)
        return base, range(base + 1, target + 1)

    def weights(self, version: int | None = None) -> tuple[int, dict[str, Tensor]]:
        """(version, float32 weights by layer); the last version by default.

        With the int8 wire they are the trainer's bits, on any device. Raises `VersionGap`,
        `DigestMismatch`. Memory: one copy of the targets.
        """
        target = self.versions()[-1] if version is None else version
        base, updates = self.route(None, target)
        assert base is not None  # the version at hand is unknown
        with self.base(base) as slices:
            weights = {name: slices[name][:].clone() for name in self.contents.shapes}
        slots = [Slot.whole(name, weight) for name, weight in weights.items()]
        for v in updates:
            apply(self.update(v), slots)
        return target, weights

    def replay_into(self, receiver: Receiver, version: int | None = None) -> int:
        """Bring a receiver to a version (the last by default) and return that.

        Only the missing updates are applied; when the receiver's version is unknown, later, not
        held, or was reached by another update than the one kept here, a base is loaded first, of
        which a sharded receiver reads its own shards. Raises `WrongRun` for a receiver that holds
        another run (`forget` that first), and what `Receiver.apply` raises.
        """
        target = self.versions()[-1] if version is None else version
        if receiver.version is not None and receiver.run != self.run:
            raise WrongRun(
                f"the receiver holds run {receiver.run!r}, {self.folder} is of {self.run!r}: "
                "receiver.forget(...) first if it shall change runs"
            )
        start = None if self._parted(receiver) else receiver.version
        base, updates = self.route(start, target)
        if base is not None:
            with self.base(base) as slices:
                receiver.load(self.run, base, slices)
        for v in updates:
            receiver.apply(self.update(v))
        return target

    def verify(self) -> None:
        """Read every kept file and check all of its bytes. Raises `DigestMismatch`, `TornFile`,
        `PayloadError`, naming the file."""
        for entry in self.contents.bases.values():
            with _reading(entry.path):
                files.verify(entry.path)
        for version in sorted(self.contents.updates):
            self.update(version)

    def _parted(self, receiver: Receiver) -> bool:
        """Whether the receiver came to its version by another update than the one kept here."""
        if receiver.version not in self.contents.updates:
            base = self.contents.bases.get(-1 if receiver.version is None else receiver.version)
            came = receiver.last if base else None  # None: by a full sync
            return came is not None and base is not None and came != base.update
        update = self.update(receiver.version)
        try:
            receiver.check(update)
        except DigestMismatch:
            return True
        except VersionGap:  # it came by a full sync, which carries no digest of an update
            return False
        return False

    def _require(self, version: int) -> None:
        if version not in (held := self.versions()):
            raise VersionGap(
                f"{self.folder} does not hold version {version}, but {held[0]} to {held[-1]}"
            )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise SyncError(f"{path} is gone since the journal was opened: open it anew") from error
    except OSError as error:
        raise SyncError(f"{path} cannot be read: {error.strerror}") from error
