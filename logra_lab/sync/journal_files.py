"""What lies in a journal's folder, and which of it is whole. Reads headers, writes nothing.

    base-00000000.safetensors        float32 targets at version 0, sealed
    00000001.thin, 00000002.thin, …  the update that leads to each version, sealed

Every file is published by a rename, so that a crash between any two system calls leaves whole
files, temporary ones, and some that a newer base has made unnecessary. A file system that loses
more may also cut off the last record. A file that was changed is an error, wherever it is.
"""

import json
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from logra_lab.errors import InputError
from logra_lab.sync import sealed
from logra_lab.sync.errors import (
    DigestMismatch,
    PayloadError,
    ShapeMismatch,
    SyncError,
    TornFile,
    VersionGap,
    WrongRun,
)

BASE_FORMAT, UPDATE_FORMAT = "journal-base-1", "thin-update-1"
Shapes = dict[str, tuple[int, int]]

_NAME = re.compile(r"(base-)?(\d{8,})\.(?(1)safetensors|thin)")
_TEMPORARY = re.compile(r".+\.tmp|\.tmp\w{6}")  # ours; and that of safetensors, which renames too


@dataclass(frozen=True)
class Entry:
    """A base or an update on disk, by its header."""

    path: Path
    version: int
    size: int
    run: str
    digest: str
    shapes: Shapes
    wire: str = "float32"
    rank: int = 0
    update: str | None = None  # of a base: digest of the kept update that led there


@dataclass
class Contents:
    """Kept files by version; what the next write removes; in words, the torn ones among these."""

    run: str
    shapes: Shapes
    bases: dict[int, Entry]
    updates: dict[int, Entry]
    leftovers: list[Path]
    dropped: list[str]

    @property
    def versions(self) -> list[int]:
        return sorted({*self.bases, *self.updates})


def base_path(folder: Path, version: int) -> Path:
    return folder / f"base-{version:08d}.safetensors"


def update_path(folder: Path, version: int) -> Path:
    return folder / f"{version:08d}.thin"


def scan(folder: Path) -> Contents:
    """The journal in a folder, by its headers.

    Raises what `Journal.open` does, naming the file. Cost: one header a file.
    """
    for _ in range(3):
        try:
            return _scan(folder)
        except FileNotFoundError:  # between list and read: another process has put a new base
            continue
        except OSError as error:
            raise SyncError(f"journal {folder} cannot be read: {error}") from error
    raise SyncError(f"journal {folder}: its files keep changing; try again")


def verify(path: Path) -> None:
    """Compare a file's digest. Raises `DigestMismatch`, or `TornFile` for only a beginning."""
    try:
        sealed.read_meta(path)
    except PayloadError as error:
        raise _damage(path, error) from error


def read_base(path: Path) -> Entry:
    """The header of a base."""
    meta = _meta(path, BASE_FORMAT)
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  no dict
    except SafetensorError as error:
        raise DigestMismatch(f"{path}: {error}; {_RESTORE}") from error
    shapes = {}
    for name, found in slices.items():
        dtype, shape = found.get_dtype(), found.get_shape()
        if dtype != "F32" or len(shape) != 2 or 0 in shape:
            verify(path)
            raise PayloadError(f"{path}: layer {name!r} is {dtype} {shape}, expected F32 [d, k]")
        shapes[name] = (shape[0], shape[1])
    if not shapes:
        verify(path)
        raise PayloadError(f"{path}: a base without layers")
    return replace(_entry(path, meta, shapes), update=meta.get("update"))


def read_update(path: Path) -> Entry:
    """The header of an update."""
    meta = _meta(path, UPDATE_FORMAT)
    try:
        shapes = {name: (d, k) for name, d, k, _ in meta["layers"]}
        return _entry(path, meta, shapes, str(meta["wire"]), int(meta["rank"]))
    except (KeyError, TypeError, ValueError) as error:
        verify(path)
        raise PayloadError(f"{path}: header entry {error} is not that of an update") from error


def _scan(folder: Path) -> Contents:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise InputError(f"journal {folder}: {error.strerror}; expected a folder") from error
    files: dict[bool, dict[int, Path]] = {True: {}, False: {}}
    for name in names:
        if match := _NAME.fullmatch(name):
            files[match[1] is not None][int(match[2])] = folder / name
    leftovers = [folder / name for name in names if _TEMPORARY.fullmatch(name)]
    if not files[True]:
        what = "updates but no base" if files[False] else "no journal"
        raise InputError(f"{folder}: there is {what} here; expected base-*.safetensors in it")

    torn: list[tuple[int, Path, TornFile]] = []
    bases = _read(files[True], torn)
    if not bases:
        raise TornFile(f"{torn[0][2]}; there is no other base: create the journal in a new folder")
    oldest = bases[min(bases)]
    # A crash in `Journal.rebase` leaves updates that lead to versions which the base contains.
    leftovers += [path for version, path in files[False].items() if version <= oldest.version]
    later = {v: path for v, path in files[False].items() if v > oldest.version}
    updates = _read(later, torn, oldest)
    last = max(*bases, *updates, oldest.version)
    for version, path, short in torn:
        if version < last:
            raise short
        leftovers.append(path)
    for version, entry in sorted(updates.items()):
        if version - 1 not in bases and version - 1 not in updates:
            raise VersionGap(
                f"{entry.path}: it leads from version {version - 1}, but "
                f"{update_path(folder, version - 1).name} is missing; restore it, or put a new base"
            )
    dropped = [str(short) for *_, short in torn]
    return Contents(oldest.run, oldest.shapes, bases, updates, leftovers, dropped)


def _read(
    paths: Mapping[int, Path], torn: list[tuple[int, Path, TornFile]], like: Entry | None = None
) -> dict[int, Entry]:
    """Entries of whole files, of one run and model; the torn ones are added to `torn`."""
    found = {}
    for version, path in paths.items():
        try:
            entry = read_update(path) if path.suffix == ".thin" else read_base(path)
        except TornFile as error:
            torn.append((version, path, error))
            continue
        if entry.version != version:
            verify(path)
            raise VersionGap(f"{path}: it holds version {entry.version}; give it its name back")
        like = like or entry
        _check_fits(entry, like)
        found[version] = replace(entry, shapes=like.shapes)  # one copy for all
    return found


def _meta(path: Path, kind: str) -> dict[str, Any]:
    """The metadata of a sealed file of this format, with run and version of the right types."""
    try:
        meta = sealed.read_meta(path, verify=False)
    except PayloadError as error:
        raise _damage(path, error) from error
    version, run = meta.get("version"), meta.get("run")
    if meta.get("format") != kind or type(version) is not int or type(run) is not str:
        verify(path)
        raise PayloadError(f"{path}: expected {kind} with run and version, got {meta!r:.200}")
    return meta


def _entry(
    path: Path, meta: dict[str, Any], shapes: Shapes, wire: str = "float32", rank: int = 0
) -> Entry:
    size = path.stat().st_size
    return Entry(path, meta["version"], size, meta["run"], meta["sha256"], shapes, wire, rank)


def _check_fits(entry: Entry, like: Entry) -> None:
    """Of one run and one model; a changed byte is named before what it seems to say."""
    if entry.run == like.run and entry.shapes == like.shapes:
        return
    verify(entry.path)
    verify(like.path)
    if entry.run != like.run:
        raise WrongRun(f"{entry.path}: of run {entry.run!r}, {like.path.name} of {like.run!r}")
    check_shapes(entry.shapes, like.shapes, str(entry.path))


def check_shapes(found: Shapes, expected: Shapes, where: str) -> None:
    """Raise `ShapeMismatch` naming the first layer that differs."""
    odd = sorted({name for name, _ in found.items() ^ expected.items()})
    if odd:
        raise ShapeMismatch(
            f"{where}: {len(odd)} layers differ from the journal's, first {odd[0]!r}: "
            f"{found.get(odd[0], 'absent')}, expected {expected.get(odd[0], 'absent')}"
        )


_RESTORE = "restore the file (a byte has changed), or start a journal anew"


def _damage(path: Path, error: PayloadError) -> PayloadError:
    """A file is torn when it is the beginning of a whole one; otherwise something changed it."""
    if isinstance(error, TornFile) and _is_beginning(path):
        return error
    return DigestMismatch(f"{error}; {_RESTORE}")


def _is_beginning(path: Path) -> bool:
    """Of a file that is too short: whether its header's length is the one it was written with."""
    with open(path, "rb") as file:
        head = file.read(8 + (4 << 20))  # holds any header
    try:
        # As Latin-1 a character is a byte, and JSON's structure is the same.
        _, end = json.JSONDecoder().raw_decode(head[8:].decode("latin-1"))
    except ValueError:
        return True  # cut off before the header's end
    return struct.unpack("<Q", head[:8])[0] == -(-end // 8) * 8  # padded to 8 bytes
