"""The places of a group's engines: who sits there, what it is doing, and who takes its place.

An actor has at most one task at a time. `Seats.wait` is the one place where the group waits: it
returns what has ended, by itself or by its time limit. An engine that dies, or is silent beyond its
limit (then it is killed), is replaced at once; its successor starts while the others work.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from logra_lab.cluster.node import Cluster, ClusterError
from logra_lab.errors import LograError

START_SECONDS = 900.0  # for a process, vLLM in it, and the weights; a laptop needs 20
CLOSE_SECONDS = 45.0  # vLLM's processes may take 30 to clean up
MAX_RESTARTS = 3  # of one engine in a row, with nothing finished in between


class EngineLost(LograError):
    """The engine died, hung, or failed in a way that leaves it in doubt; it is being replaced."""


@dataclass
class Task:
    """What an engine was asked: the reference of its answer, and until when to wait for it."""

    kind: str
    reference: Any
    deadline: float
    about: Any = None


@dataclass
class Tally:
    """What an engine has done: seconds of work, and of them of generating."""

    busy: float = 0.0
    generating: float = 0.0
    rows: int = 0
    pieces: int = 0
    restarts: int = 0


@dataclass(eq=False)
class Seat:
    """The place of one engine. `version` is None while unknown, or while it starts."""

    index: int
    actor: Any = None
    hello: Any = None
    opened: bool = False
    task: Task | None = None
    version: int | None = None
    failures: int = 0  # in a row
    lost: str = ""  # why it was given up
    memory: dict[str, float | None] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)

    @property
    def free(self) -> bool:
        return self.opened and self.task is None and not self.lost


class Seats:
    """All seats of a group.

    Args:
        cluster: with the reserved bundles; those of engines begin after the trainers'.
        actor: the remote class. settings: its argument. limit: seconds for a task.
    """

    def __init__(
        self, cluster: Cluster, actor: Any, settings: Mapping[str, Any], limit: float
    ) -> None:
        self.cluster, self.actor, self.settings, self.limit = cluster, actor, settings, limit
        self.all = [Seat(i) for i in range(cluster.needs.engines)]
        self.faults: list[str] = []
        self.closed = False
        for seat in self.all:
            self._fill(seat)

    def ask(self, seat: Seat, kind: str, *args: Any, about: Any = None) -> None:
        """Give a free engine a task: call its method `kind`."""
        assert seat.task is None
        reference = getattr(seat.actor, kind).remote(*args)
        seat.task = Task(kind, reference, time.monotonic() + self.limit, about)

    def wait(self, seconds: float = 1.0) -> list[tuple[Seat, Task, Any]]:
        """The tasks that have ended, each with its answer or its error; waits for the first of them
        for up to so long. Raises `ClusterError` when all engines are given up, or closed."""
        import ray

        if self.closed:
            raise ClusterError("the engines are closed: make a new group")
        busy = {seat.task.reference: seat for seat in self.all if seat.task is not None}
        if not busy:
            if all(seat.lost for seat in self.all):
                raise ClusterError(self._no_engine_left())
            return []
        soonest = min(seat.task.deadline for seat in busy.values() if seat.task is not None)
        timeout = min(seconds, max(0.0, soonest - time.monotonic()))
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=timeout, fetch_local=False)
        if ready:  # and whoever is ready too
            ready, _ = ray.wait(list(busy), num_returns=len(busy), timeout=0, fetch_local=False)
        ended = []
        for reference, seat in busy.items():
            task = seat.task
            assert task is not None
            if reference in ready:
                seat.task = None
                ended.append((seat, task, self._answer(seat, task)))
            elif time.monotonic() > task.deadline:
                seat.task = None
                why = f"no answer to {task.kind!r} within {self._limit(task):g} s: killed"
                ended.append((seat, task, self.replace(seat, why)))
        return ended

    def all_done(self, seats: Iterable[Seat], note: Callable[[Seat, Task, Any], None]) -> None:
        """Wait until these seats' present tasks have ended; `note` gets all that end meanwhile."""
        awaited = [seat.task for seat in seats if seat.task is not None]
        while any(seat.task is task for seat in self.all for task in awaited):
            for ended in self.wait():
                note(*ended)

    def close(self) -> None:
        """End all engines: in order those that have nothing to do, by force the others."""
        import ray

        self.closed = True
        asked = [seat.actor.close.remote() for seat in self.all if seat.free]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=CLOSE_SECONDS)
        for seat in self.all:
            self.kill(seat)

    def replace(self, seat: Seat, why: str) -> EngineLost:
        """End an engine, whatever it is doing, and start another one in its place."""
        error = EngineLost(f"engine {seat.index}: {why}")
        self.faults.append(str(error))
        self.kill(seat)
        seat.failures += 1
        if seat.failures > MAX_RESTARTS:
            seat.lost = why
            self.faults.append(
                f"engine {seat.index} is given up: it failed {seat.failures} times in a row"
            )
        else:
            seat.tally.restarts += 1
            self._fill(seat)
        return error

    def kill(self, seat: Seat) -> None:
        """End the process at a seat. A stopped process hears of no request: SIGKILL reaches it."""
        import ray

        actor, seat.actor = seat.actor, None
        seat.task, seat.version, seat.opened = None, None, False
        if actor is None:
            return
        ready, _ = ray.wait([seat.hello], timeout=0)
        hello: dict[str, Any] = {}
        if ready:
            with suppress(ray.exceptions.RayError):
                hello = ray.get(seat.hello)
        ray.kill(actor, no_restart=True)
        if hello.get("node_id") == self.cluster.node_id:
            kill_actor(hello["pid"])

    def _fill(self, seat: Seat) -> None:
        """Start a process; its task is to open an engine."""
        bundle = self.cluster.needs.trainers + seat.index
        options = self.cluster.options(bundle)
        seat.actor = self.actor.options(**options).remote(self.settings)
        seat.hello = seat.actor.hello.remote()
        deadline = time.monotonic() + START_SECONDS
        seat.task = Task("open", seat.actor.open.remote(), deadline)

    def _answer(self, seat: Seat, task: Task) -> Any:
        """The value of a task that has ended; an error of this package as itself, any other, or
        the end of the process, as `EngineLost`, with a new engine on its way."""
        import ray

        try:
            answer = ray.get(task.reference)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LograError):
                return error.cause
            return self.replace(seat, f"{task.kind!r} failed: {error.cause!r:.300}")
        except ray.exceptions.RayError as error:
            return self.replace(seat, f"died in {task.kind!r}: {_first_line(error)}")
        if task.kind == "open":
            seat.opened = True
        if isinstance(answer, dict):
            seat.version = answer["version"]
            seat.tally.busy += 0.0 if task.kind == "open" else answer["seconds"]
            seat.memory = {name: answer[name] for name in ("host_mib", "gpu_mib")}
        return answer

    def _limit(self, task: Task) -> float:
        return START_SECONDS if task.kind == "open" else self.limit

    def _no_engine_left(self) -> str:
        reasons = "; ".join(f"{seat.index}: {seat.lost}" for seat in self.all)
        return (
            f"no engine is left: each failed {MAX_RESTARTS + 1} times in a row with nothing "
            f"finished in between ({reasons}); the run can be resumed from its last checkpoint"
        )


def kill_actor(pid: int) -> None:
    """SIGKILL to a process of this node, if it is still one of Ray's: the number may be somebody
    else's by now. A stopped process hears of no other request."""
    import psutil

    with suppress(psutil.Error, ProcessLookupError):
        if any("ray::" in part for part in psutil.Process(pid).cmdline()[:1]):
            os.kill(pid, signal.SIGKILL)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [repr(error)])[0][:300]
