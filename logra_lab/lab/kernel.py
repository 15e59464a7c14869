"""Execute one notebook with papermill in this interpreter's own kernel.

Papermill's return value is no verdict (see `verdict`); this module only runs the cells, always
leaves a file behind, and ends every process it started.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import papermill
import psutil
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient.util import run_sync
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines

_KERNEL_NAME = "python3"  # what the executed file says; nothing on this machine is looked up by it


@dataclass
class Execution:
    """What is known after the cells stopped: `error` is None when papermill was content."""

    error: BaseException | None = None
    cell: int | None = None  # index of the cell that ran last
    seconds: float = 0.0
    peak_bytes: int = 0


class LocalKernel(AsyncKernelManager):
    """A kernel of `sys.executable`, without any installed kernelspec."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._kernel_spec = KernelSpec(
            argv=[
                sys.executable,
                "-m",
                "ipykernel_launcher",
                "-f",
                "{connection_file}",
                "--IPKernelApp.extensions=logra_lab.lab.guard",
            ],
            display_name="Python 3",
            language="python",
        )


class MemoryMeter(threading.Thread):
    """Peak memory of a process and all its descendants, sampled; shared pages count once."""

    def __init__(self, pid: int, every_s: float = 0.25) -> None:
        super().__init__(daemon=True, name="memory-meter")
        self.root = psutil.Process(pid)
        self.every_s = every_s
        self.peak_bytes = 0
        self.seen: dict[int, psutil.Process] = {pid: self.root}
        self.done = threading.Event()

    def run(self) -> None:
        """Sample until told to stop or until the process is gone."""
        while True:
            try:
                tree = [self.root, *self.root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            self.seen.update({process.pid: process for process in tree})
            self.peak_bytes = max(self.peak_bytes, sum(map(_bytes_of, tree)))
            if self.done.wait(self.every_s):
                return

    def end_processes(self) -> None:
        """Kill whatever of the tree is still alive."""
        self.done.set()
        self.join()
        for process in self.seen.values():
            try:
                process.kill()  # psutil refuses when the pid has been taken by another process
            except psutil.NoSuchProcess:
                continue


def _bytes_of(process: psutil.Process) -> int:
    try:
        info = process.memory_full_info()
        return int(getattr(info, "pss", info.rss))
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # it ended between two looks
        return 0


class _Client(PapermillNotebookClient):
    """Papermill's client, which afterwards lets the guard inside the kernel write its findings."""

    execution: Execution

    def papermill_execute_cells(self) -> None:
        meter = MemoryMeter(self.km.provisioner.pid)
        meter.start()
        try:
            super().papermill_execute_cells()
            if all(c.execution_count for c in self.nb.cells if c.cell_type == "code"):
                code = "import logra_lab.lab.guard as _g; await _g.settle(); del _g"
                run_sync(self.kc.execute_interactive)(
                    code, silent=True, store_history=False, timeout=60, output_hook=lambda _m: None
                )
        finally:
            self.execution.peak_bytes = meter.peak_bytes
            self.meter = meter


class _Engine(Engine):
    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: Any,
        kernel_name: str,
        *,
        execution: Execution,
        env: Mapping[str, str],
        scratch: Path,
        log: Path,
        folder: Path,
        limit_s: float,
        on_cell: Callable[[int, int], None],
        **_unused: Any,
    ) -> None:
        def started(cell: Any, cell_index: int) -> None:
            execution.cell = cell_index
            on_cell(cell_index, len(nb_man.nb.cells))

        client = _Client(
            nb_man,
            km=LocalKernel(
                kernel_name=kernel_name,
                connection_file=str(scratch / "kernel.json"),
                transport="ipc" if os.name == "posix" else "tcp",  # files only this user can open
            ),
            timeout=limit_s,
            startup_timeout=120,
            coalesce_streams=True,
            on_cell_start=started,
            resources={"metadata": {"path": str(folder)}},
        )
        client.owns_km = True  # nbclient then shuts the kernel down with the client
        client.execution = execution
        try:
            with log.open("a", encoding="utf-8") as file:
                client.execute(env=dict(env), stdout=file, stderr=file)
        finally:
            if hasattr(client, "meter"):
                client.meter.end_processes()


papermill_engines.register("logra_lab", _Engine)


@contextmanager
def _clock(execution: Execution) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        execution.seconds = time.perf_counter() - start


def usable_cores() -> int:
    """Physical cores that this process may run on."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return cores


def kernel_env(extra: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """The kernel's environment: no foreign plot backend, sensible threads, nothing in HOME."""
    # With MPLBACKEND=agg every inline figure would silently be missing from the notebook.
    env = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    env.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    # torch takes MKL's number for both, so a user's OMP_NUM_THREADS has to reach MKL.
    env.setdefault("MKL_NUM_THREADS", env["OMP_NUM_THREADS"])
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "OMP_WAIT_POLICY" not in env:
        # A thread that waits spins, and keeps the one it waits for from the core: with one other
        # busy process on two cores a notebook took four times as long. After this it sleeps.
        env.setdefault("GOMP_SPINCOUNT", "10000")
    return {**env, "IPYTHONDIR": str(scratch / "ipython"), **extra}


def execute(
    source: Path,
    output: Path,
    parameters: Mapping[str, Any],
    *,
    env: Mapping[str, str],
    scratch: Path,
    log: Path,
    limit_s: float,
    on_cell: Callable[[int, int], None],
) -> Execution:
    """Run every cell of `source` with its folder as working directory; write `output`.

    Returns what happened, with the exception in `error`; `KeyboardInterrupt` included, because
    the file that is left behind must say so before anything else ends.
    """
    execution = Execution()
    with _clock(execution):
        try:
            papermill.execute_notebook(
                source,
                output,
                parameters=dict(parameters),
                engine_name="logra_lab",
                kernel_name=_KERNEL_NAME,
                language="python",
                progress_bar=False,
                execution=execution,
                env=kernel_env(env, scratch),
                scratch=scratch,
                log=log,
                folder=source.parent,
                limit_s=limit_s,
                on_cell=on_cell,
            )
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  becomes the named reason
            execution.error = error
    return execution
