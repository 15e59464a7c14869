"""An IPython extension inside the kernel: it sees the failures that never raise in a cell.

A thread that dies, an asyncio task nobody awaits and a `!command` with a bad status all leave
a notebook that looks healthy. The guard collects them; `settle`, which the runner calls after
the last cell, waits for what is still running and writes the findings to a file.
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast

from logra_lab.lab.context import Context, run_context
from logra_lab.lab.streams import bound_output

# Coroutines of the machinery itself run on the same loop as those of the cells.
_MACHINERY = ("ipykernel", "IPython", "tornado", "zmq", "jupyter_client", "anyio", "asyncio")


class Guard:
    """Failures seen outside the cells' own exceptions, in the order they were seen."""

    def __init__(self, context: Context, shell: Any) -> None:
        self.context = context
        self.shell = shell
        self.failures: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.threads_before = set(threading.enumerate())
        self.in_cell = False

    def install(self) -> None:
        """Hook into threads, shell commands and the event loop of this process."""
        threading.excepthook = self._thread_failed
        self.shell.system = self._checked_system(self.shell.system)
        self.shell.events.register("pre_run_cell", self._cell_starts)
        self.shell.events.register("post_run_cell", self._cell_ends)

    def _note(self, what: str) -> None:
        self.failures.append(f"cell [{self.shell.execution_count}]: {what}")

    def _thread_failed(self, args: threading.ExceptHookArgs) -> None:
        name = args.thread.name if args.thread else "?"
        self._note(f"thread {name} failed with {args.exc_type.__name__}: {args.exc_value}")
        sys.__excepthook__(args.exc_type, args.exc_value or args.exc_type(), args.exc_traceback)

    def _checked_system(self, system: Callable[[str], None]) -> Callable[[str], None]:
        def run(command: str) -> None:
            system(command)
            # A list when IPython ran it through cmd.exe, a negative number for a signal.
            status = self.shell.user_ns.get("_exit_code", 0)
            if status:
                self._note(f"the shell command {command!r} ended with exit status {status}")

        return run

    def _cell_starts(self, _info: Any) -> None:
        self.in_cell = True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # a cell without `await` may run outside the loop
            return
        if loop.get_task_factory() is None:
            loop.set_task_factory(cast(Any, self._make_task))
            loop.set_exception_handler(self._loop_failed)

    def _cell_ends(self, _result: Any) -> None:
        self.in_cell = False

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **kwargs: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=loop, **kwargs)
        frame = getattr(coro, "cr_frame", None)
        module = frame.f_globals.get("__name__", "") if frame else ""
        if self.in_cell and not module.startswith(_MACHINERY):
            self.tasks.append(task)
        return task

    def _loop_failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        said = f"{type(error).__name__}: {error}" if error else context["message"]
        self._note(f"the event loop reported {said}")

    async def settle(self, limit_s: float = 5.0) -> None:
        """Wait for threads and tasks of the cells, then write what went wrong."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline and (self._running_tasks() or self._running_threads()):
            await asyncio.sleep(0.02)
        for task in self.tasks:
            # asyncio sets this mark until somebody retrieves the exception; reading it through
            # task.exception() would clear it for failures the notebook handled itself.
            if task.done() and getattr(task, "_log_traceback", False):
                error = task.exception()
                said = f"{type(error).__name__}: {error}"
                self._note(f"the asyncio task {task.get_name()} failed with {said}")
        for name in [*self._running_tasks(), *self._running_threads()]:
            self._note(f"{name} was still running at the end; join or await it")
        findings = {
            "executable": sys.executable,
            "failures": self.failures,
            "peak_bytes": peak_bytes(),
        }
        Path(self.context.guard).write_text(json.dumps(findings), encoding="utf-8")

    def _running_tasks(self) -> list[str]:
        return [f"the asyncio task {task.get_name()}" for task in self.tasks if not task.done()]

    def _running_threads(self) -> list[str]:
        # Daemon threads and the idle workers of executors wait for the end of the process.
        return [
            f"the thread {thread.name}"
            for thread in threading.enumerate()
            if thread not in self.threads_before
            and not thread.daemon
            and not thread.name.startswith(("ThreadPoolExecutor", "ExecutorManagerThread"))
            and not type(thread).__module__.startswith("concurrent.futures")
        ]


def peak_bytes() -> int:
    """This process's own peak resident memory where the system keeps it (Linux), else 0.

    Not `ru_maxrss`: Linux carries the size of the parent across fork and exec into it.
    """
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.is_file() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


_guard: Guard | None = None


def load_ipython_extension(shell: Any) -> None:
    """Called by IPython at the start of a kernel that the runner launched."""
    global _guard
    context = run_context()
    if context is None:
        return
    _guard = Guard(context, shell)
    _guard.install()
    bound_output(shell, Path(context.log))


async def settle() -> None:
    """What the runner executes, silently, after the last cell."""
    if _guard is None:
        raise RuntimeError("the guard extension is not loaded in this kernel")
    await _guard.settle()
