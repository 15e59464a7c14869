"""A small run as a process of its own, watched from outside through its records, and killed."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from logra_lab.errors import LograError
from logra_lab.lab import launch
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.owner import owner_of
from logra_lab.rl.records import read_steps

LIMIT = 300.0  # seconds for a run of this size to come to its next step; beyond it, it hangs


def command(config: TrainConfig, run_dir: Path, *, resume: bool = False) -> list[str]:
    """The command line of a run."""
    own = {k: json.dumps(v) for k, v in config.model_dump(mode="json").items()}
    return launch.train_command("smoke", run_dir, resume=resume, **own)


@contextmanager
def detached(
    config: TrainConfig, run_dir: Path, *, start: bool = True
) -> Iterator[Callable[..., str]]:
    """Start the run; the function that is given does so again, or attaches, and says which.

    Whatever happens, the run ends with the block.
    """

    def launched(resume: bool = False) -> str:
        return launch.start_or_attach(run_dir, command(config, run_dir, resume=resume)).how

    try:
        if start:
            launched()
        yield launched
    finally:
        owner = owner_of(run_dir)
        if owner is not None and owner.alive:
            for process in family(owner.pid):
                process.kill()


def family(pid: int) -> list[psutil.Process]:
    """A process and all below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def kill_driver(run_dir: Path, limit: float = 60.0) -> list[str]:
    """SIGKILL to the run's process; what of its processes and of Ray's files is there after so many
    seconds."""
    owner = owner_of(run_dir)
    assert owner is not None
    processes = family(owner.pid)
    folders = {f for p in processes for f in _ray_folders(p)}
    processes[0].kill()
    deadline = time.monotonic() + limit
    _, left = psutil.wait_procs(processes[1:], timeout=limit)
    while any(folder.exists() for folder in folders) and time.monotonic() < deadline:
        time.sleep(0.1)
    found = [f"process {p.pid} outlived the driver: {_named(p)}" for p in left if _runs(p)]
    return found + [f"{folder} was left behind" for folder in folders if folder.exists()]


def _ray_folders(process: psutil.Process) -> set[Path]:
    try:
        files = [Path(file.path) for file in process.open_files()]
    except psutil.Error:
        return set()
    return {p for file in files for p in file.parents if p.name.startswith("logra_ray_")}


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _named(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:120]
    except psutil.Error:
        return "?"


def await_step(run_dir: Path, step: int) -> None:
    """Wait until a step is recorded. Raises `LograError` when the run ends, or after the limit."""
    deadline = time.monotonic() + LIMIT
    while not (run_dir / "steps.jsonl").exists() or len(read_steps(run_dir)) < step:
        owner = owner_of(run_dir)
        if time.monotonic() > deadline or owner is None or not owner.alive:
            log = (run_dir / launch.LOG).read_text()[-500:] if run_dir.exists() else ""
            raise LograError(f"{run_dir} came to no step {step} within {LIMIT:g} s: {log}")
        time.sleep(0.02)


def await_end(run_dir: Path) -> list[str]:
    """Wait for the run's own end; what is wrong, if it does not come."""
    if not launch.wait(run_dir, LIMIT):
        return [f"the run did not end within {LIMIT:g} s"]
    return []
