"""A sealed base on disk: is it whole, and what it is said to be?"""

from pathlib import Path

from logra_lab.errors import InputError
from logra_lab.sync import sealed
from logra_lab.sync.errors import VersionGap, WrongRun


def check_base(path: Path, run: str, version: int, *, verify: bool = True) -> None:
    """Compare a base's bytes with its digest, and its own words, if any, with a run and version.

    Raises `InputError` (it cannot be read), `WrongRun`, `VersionGap`, and what `sealed.read_meta`
    raises. Cost: the file is read once; without `verify`, its header only.
    """
    try:
        meta = sealed.read_meta(path, verify=verify)
    except OSError as error:
        raise InputError(f"base {path} cannot be read: {error.strerror}") from error
    if meta.get("run", run) != run:
        raise WrongRun(f"base {path} is of run {meta['run']!r}, expected {run!r}")
    if meta.get("version", version) != version:
        raise VersionGap(f"base {path} is of version {meta['version']}, expected {version}")
