"""What can befall a run on Ray: each function does it to the run it is given, for real.

Processes are killed and stopped by signals and starved by the kernel's limits; what has to happen
in the middle of an update is ordered from the rank itself.
"""

import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from logra_lab.cluster.trainer_rank import TrainerRank
from logra_lab.rl.run import Run

STOPPED = 3.0  # seconds of a straggler


def kill_engine(run: Run) -> None:
    """SIGKILL while it generates: stopped first, so that it is in the middle of its piece."""
    pid, seat = _engine(run), run.engine.seats.all[0]
    os.kill(pid, signal.SIGSTOP)

    def kill() -> None:
        while seat.task is None or seat.task.kind != "generate":
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def lose_update(run: Run) -> None:
    """The next update is sent to nobody, and nobody notices."""
    transport = run.engine.transport

    def nothing(*_: Any) -> dict[Any, Any]:
        del transport.send
        return {}

    transport.send = nothing


def stop_engine(run: Run) -> None:
    _stop(_engine(run))


def stop_trainer(run: Run) -> None:
    _stop(run.trainer.places[-1]["pid"])


def kill_trainer(run: Run) -> None:
    """The last rank kills itself in the middle of its update, where the others wait for it."""
    _order(run, -1, _die_in_update)


def spoil_sketch(run: Run) -> None:
    """NaN in the sketch of the last rank, after a backward pass that was sound."""
    _order(run, -1, spoil)


def fill_disk(run: Run) -> None:
    """No file of the first rank may grow beyond 64 KiB from now on."""
    starve(run.trainer.places[0]["pid"])


def starve(pid: int, limit: int = 1 << 16) -> None:
    """The kernel refuses a process every write beyond so many bytes of a file."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def spoil(rank: TrainerRank) -> None:
    """Run in a rank: its next step finds a NaN in its own rows of S."""
    learner, step = rank.learner, rank.learner.step

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        del learner.__dict__["step"]
        learner.sketch.settle()
        learner.sketch.flat[-1, 0] = math.nan
        return step(*args, **kwargs)

    learner.__dict__["step"] = spoilt


def _die_in_update(rank: TrainerRank) -> None:
    rank.learner.__dict__["step"] = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)


def _order(run: Run, rank: int, work: Callable[[TrainerRank], None]) -> None:
    import ray

    ray.get(run.trainer.ranks[rank].__ray_call__.remote(work))


def _engine(run: Run) -> int:
    import ray

    return int(ray.get(run.engine.seats.all[0].hello)["pid"])


def _stop(pid: int) -> None:
    """Stop a process for some seconds."""
    os.kill(pid, signal.SIGSTOP)
    timer = threading.Timer(STOPPED, os.kill, (pid, signal.SIGCONT))
    timer.daemon = True
    timer.start()
