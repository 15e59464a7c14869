"""Replace a file as a whole, so that a crash at any moment leaves a complete one.

    write path.tmp, fsync → link path as path.old → rename path.tmp to path, fsync the folder
                          → rename path.old to path.prev, fsync the folder

Between any two of these, `path` holds a complete file (the old or the new one). The file that was
there moves over `.prev` last, so that a damaged `path` never replaces a good `.prev` before its
own successor is in place.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from logra_lab.errors import InputError

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


def previous_path(path: str | Path) -> Path:
    """Where `write_atomically(keep_previous=True)` keeps the file before the one at `path`."""
    return _beside(Path(path), ".prev")


def write_atomically(
    path: Path, write: Callable[[BinaryIO], object], *, keep_previous: bool = False
) -> None:
    """Let `write(file)` fill a temporary file in the folder of `path`, then rename it to `path`.

    Readers see the old or the new content, never a part, also after a power cut (file and folder
    are synced). Raises whatever `write` or the system raises, with the temporary file removed.
    """
    temporary = _beside(path, ".tmp")
    try:
        with open(temporary, "wb+") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        _publish(temporary, path, keep_previous and path.exists())
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _publish(temporary: Path, path: Path, keep_previous: bool) -> None:
    old = _beside(path, ".old")
    if keep_previous:
        _second_name(path, old)
    os.replace(temporary, path)
    sync_folder(path.parent)
    if keep_previous:
        os.replace(old, previous_path(path))
        sync_folder(path.parent)


def _second_name(path: Path, old: Path) -> None:
    """Make `old` the file at `path` too: a hard link, or a copy where the file system has none."""
    old.unlink(missing_ok=True)  # left by a crash; renaming over a link to itself would do nothing
    try:
        os.link(path, old)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        try:
            shutil.copyfile(path, old)
            with open(old, "rb") as copy:
                os.fsync(copy.fileno())
        except OSError:
            old.unlink(missing_ok=True)  # a part of a copy must not keep a full disk full
            raise


def sync_folder(folder: Path) -> None:
    """Make the names in `folder` durable: a rename alone may be lost in a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def check_writable(option: str, path: str | None) -> None:
    """Raise `InputError` where a result could not be written to `path` (None and "-" are no file):
    asked before the work is done, not after."""
    if path is None or path == "-":
        return
    if Path(path).is_dir():
        raise InputError(f"{option} {path}: this is a folder; name a file in it")
    if not Path(path).resolve().parent.is_dir():
        raise InputError(f"{option} {path}: its folder does not exist; make it first")
