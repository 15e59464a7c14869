"""Which process a run folder belongs to, so that others can watch it, attach to it and stop it.

`process.json` is there from the start of a run until its process ends by itself. A process that
was killed leaves it behind; then the pid is nobody's, or was given to another process, which began
at another time.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from logra_lab.atomic import write_atomically
from logra_lab.errors import InputError

NAME = "process.json"  # in a run's folder
_SAME = 2.0  # s: a set clock shifts what the system says; no number is used again that soon


@dataclass(frozen=True)
class Owner:
    """A process by its number, its beginning (s since 1970) and its machine."""

    pid: int
    began: float
    host: str

    @classmethod
    def of(cls, pid: int) -> "Owner":
        return cls(pid, psutil.Process(pid).create_time(), socket.gethostname())

    @property
    def alive(self) -> bool | None:
        """Whether it runs; None on another machine, where nobody here can tell."""
        if self.host != socket.gethostname():
            return None
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.began) < _SAME
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def owner_of(run_dir: str | Path) -> Owner | None:
    """Who has the run; None where nobody had, or whoever had ended by itself."""
    with suppress(
        FileNotFoundError, NotADirectoryError, ValueError, TypeError
    ):  # or the file is another program's
        return Owner(**json.loads((Path(run_dir) / NAME).read_bytes()))
    return None


def mark(run_dir: Path, owner: Owner) -> None:
    """Say that the run belongs to `owner`; makes the folder where it is missing.

    Raises `InputError` where the system refuses it.
    """
    data = json.dumps(asdict(owner)).encode() + b"\n"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        write_atomically(run_dir / NAME, lambda file: file.write(data))
    except OSError as error:
        raise InputError(
            f"run {run_dir}: {error.strerror}; name a folder that can be written, or a new one"
        ) from error


@contextmanager
def owned(run_dir: Path) -> Iterator[None]:
    """The run belongs to this process inside the block; a folder with nothing in it goes again.

    Raises `InputError` where another process of this machine has the run: two would write the same
    records, checkpoints and journal.
    """
    here = psutil.Process()
    mine, other = Owner.of(here.pid), owner_of(run_dir)
    starters = {here.pid, *(parent.pid for parent in here.parents())}  # by whom it may be marked
    if other is not None and other.alive and other.pid not in starters:
        raise InputError(
            f"run {run_dir} is under way in process {other.pid}: wait for its end, or stop it "
            f"(kill -INT {other.pid} saves it after its step), then go on with --resume"
        )
    mark(run_dir, mine)
    try:
        yield
    finally:
        if owner_of(run_dir) == mine:
            (run_dir / NAME).unlink()
        with suppress(OSError):  # there is something in it
            run_dir.rmdir()
