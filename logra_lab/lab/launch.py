"""A run as a process of its own: the kernel that started it may end, and another one finds it.

The process has its own session and writes to `train.log` in the run's folder, where `process.json`
says who it is. Whoever calls `start_or_attach` with that folder, a second time or in another
kernel, gets the run that is there.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from logra_lab.errors import InputError
from logra_lab.rl.owner import Owner, mark, owner_of

LOG = "train.log"
# A thread of a kernel ignores SIGINT, and its children would inherit that and could not be stopped.
_LISTENING = (
    "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
)
_children: list["subprocess.Popen[bytes]"] = []  # reaped, once ended, when the next one starts


@dataclass(frozen=True)
class Launched:
    """A run and how it was come by: "started", "attached" (it runs already), or "ended" (its
    records are there, and no process: nothing was started)."""

    run_dir: Path
    how: str
    owner: Owner | None


def train_command(
    preset: str, run_dir: str | Path, *, resume: bool = False, **settings: Any
) -> list[str]:
    """The `logra-lab train` command with this interpreter; settings as for `--set`."""
    command = [sys.executable, "-m", "logra_lab", "train", "--preset", preset]
    command += ["--run-dir", str(run_dir)] + ["--resume"] * resume
    texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in settings.items()}
    return command + [x for name, text in texts.items() for x in ("--set", f"{name}={text}")]


def start_or_attach(run_dir: str | Path, command: Sequence[str]) -> Launched:
    """Start `command`, which makes the run in `run_dir`, unless that run is under way or over.

    A run that is over is gone on with if the command says `--resume`. Raises `InputError` when
    another machine has the run, or the program does not exist.
    """
    folder = Path(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".launch.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of two that start at once, the second attaches
        owner = owner_of(folder)
        if owner is not None and owner.alive:
            return Launched(folder, "attached", owner)
        if owner is not None and owner.alive is None:
            raise InputError(
                f"run {folder} belongs to process {owner.pid} on {owner.host}: attach there, or "
                f"delete {folder / 'process.json'} if that machine is no more"
            )
        if (folder / "manifest.json").exists() and "--resume" not in command:
            return Launched(folder, "ended", None)
        return Launched(folder, "started", _start(folder, command))


def stop(run_dir: str | Path, limit_s: float = 60.0) -> bool:
    """Ask the run to end after its step, which it saves; whether it has ended within the limit.

    With `limit_s` 0 it is asked, and not waited for. Asked twice, a run ends at once, unsaved.
    """
    owner = owner_of(run_dir)
    if owner is None or owner.alive is False:
        return True
    if owner.alive is None:
        raise InputError(f"run {run_dir} belongs to a process on {owner.host}: stop it there")
    os.kill(owner.pid, signal.SIGINT)
    return wait(run_dir, limit_s)


def wait(run_dir: str | Path, limit_s: float) -> bool:
    """Wait until no process has the run any more; whether that came within the limit."""
    owner, end = owner_of(run_dir), time.monotonic() + limit_s
    while owner is not None and owner.alive:
        if time.monotonic() >= end:
            return False
        time.sleep(0.1)
    return True


def workers(run_dir: str | Path, kind: str = "EngineActor") -> list[int]:
    """Process numbers of the run's actors of a kind on this machine, oldest first."""
    owner = owner_of(run_dir)
    if owner is None or not owner.alive:
        return []
    found = []
    for process in psutil.Process(owner.pid).children(recursive=True):
        try:
            if "".join(process.cmdline()[:1]).startswith(f"ray::{kind}"):
                found.append((process.create_time(), process.pid))
        except psutil.Error:  # ended meanwhile
            continue
    return [pid for _, pid in sorted(found)]


def _start(folder: Path, command: Sequence[str]) -> Owner:
    _children[:] = [child for child in _children if child.poll() is None]
    program = command[0] if os.sep in command[0] else _found(command[0])
    # A kernel asks its children for colours, which would be noise in a file.
    environment = {n: v for n, v in os.environ.items() if not n.endswith(("COLOR", "COLOR_FORCE"))}
    with open(folder / LOG, "ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", _LISTENING, program, *command[1:]],
            env=environment | {"NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # an interrupt of the kernel is none of the run
        )
    _children.append(child)
    owner = Owner.of(child.pid)
    mark(folder, owner)  # at once: the program takes a while until it can say so itself
    return owner


def _found(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise InputError(f"there is no program {name!r} to start a run with: give its path")
    return found
