"""One scoring process: the parent's handle on it (`Worker`) and what it runs (`main`).

Protocol, over a socket pair of pickled messages: the parent sends (verifier, seconds), the worker
answers "ready" or the reason why not; then the parent sends lists of (index, text, problem), and
the worker answers each item as (index, outcome, reward, detail) as soon as it is judged, so that
the parent can time every item although they travel in lists.
"""

import importlib
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from numbers import Real
from time import monotonic
from typing import Any

from logra_lab.errors import InputError
from logra_lab.rl.outcomes import REWARDS, Outcome, Problem, Score, Verifier

START_LIMIT_S = 120.0  # imports of the verifier on a busy machine
_PARENT_POLL_S = 0.5
_LAUNCH = (
    "import sys; fd, parent = int(sys.argv[1]), int(sys.argv[2]); sys.path[:] = sys.argv[3:]; "
    "from logra_lab.rl.worker import main; main(fd, parent)"
)


class Worker:
    """Handle on one worker process; `pending` are the items given and not yet answered."""

    def __init__(self, verifier: Verifier, timeout_s: float) -> None:
        self.verifier = verifier
        self.connection, theirs = Pipe()
        path = [os.path.abspath(p) for p in sys.path]
        try:
            # A session of its own: Ctrl-C reaches only the parent, and killing the group takes
            # along what the verifier started.
            self.process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(theirs.fileno()), str(os.getpid()), *path],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            theirs.close()
        self.pid = self.process.pid
        self.ready = False
        self.pending: deque[tuple[int, str, Problem]] = deque()
        self.deadline = monotonic() + START_LIMIT_S
        self._send((verifier, timeout_s))

    def _send(self, message: Any) -> None:
        try:
            self.connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            return  # a dead worker: `receive` meets the end of its stream and reports it

    def wait_ready(self) -> None:
        """Wait for the start to finish. Raises InputError when the verifier cannot be loaded."""
        if not self.connection.poll(max(0.0, self.deadline - monotonic())):
            raise InputError(f"scoring worker: no start within {START_LIMIT_S:.0f} s")
        if not self.receive({}, 0.0):
            raise InputError(f"scoring worker: {self.died().detail}")

    def give(self, items: list[tuple[int, str, Problem]], timeout_s: float) -> None:
        """Hand over items to an idle worker; the clock of the first one starts."""
        self.pending.extend(items)
        try:
            self._send(items)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise InputError(
                f"problem {items[0][2].id!r} or one of the {len(items)} from it on cannot be sent "
                f"to a scoring process ({error}); Problem.meta must hold plain picklable values"
            ) from error
        self.deadline = monotonic() + timeout_s

    def receive(self, scores: dict[int, Score], timeout_s: float) -> bool:
        """Take every answer that has arrived into `scores`; False if the process is gone."""
        try:
            while self.connection.poll():
                message = self.connection.recv()
                if not self.ready:
                    self._started(message)
                    continue
                index, outcome, reward, detail = message
                scores[index] = Score(Outcome(outcome), reward, detail)
                self.pending.popleft()
                self.deadline = monotonic() + timeout_s
        except (EOFError, ConnectionResetError):
            return False
        return True

    def _started(self, message: str) -> None:
        if message != "ready":
            raise InputError(
                f"verifier {self.verifier.name!r} cannot be loaded in a scoring process: "
                f"{message}; its module must be importable from the current sys.path"
            )
        self.ready = True

    def timed_out(self, timeout_s: float) -> Score:
        """The score of an item that used up its time."""
        return Score(Outcome.timeout, REWARDS[Outcome.timeout], f"over {timeout_s:g} s")

    def died(self) -> Score:
        """The score of the item at which the process ended, with how it ended."""
        self.kill()
        code = self.process.returncode
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return Score(Outcome.error, REWARDS[Outcome.error], f"the verifier's process died: {how}")

    def kill(self) -> None:
        """End the process and its children; safe to call twice."""
        if self.process.returncode is None:
            try:
                os.killpg(self.pid, signal.SIGKILL)  # the pid stays ours until it is waited for
            except ProcessLookupError:
                self.process.kill()  # between fork and setsid there is no group yet
            self.process.wait()
        self.connection.close()


def main(fd: int, parent: int) -> None:
    """Run in the worker process: load the verifier, then judge items until the parent closes."""
    threading.Thread(target=_die_with, args=(parent,), daemon=True).start()
    connection = Connection(fd)
    try:
        verifier, timeout_s = connection.recv()
        for module in verifier.preload:
            importlib.import_module(module)
    # Whatever the import raised goes to the parent, which raises it as InputError.
    except Exception as error:  # noqa: BLE001
        connection.send(_describe(error))
        return
    connection.send("ready")
    while True:
        try:
            items = connection.recv()
        except EOFError:
            return
        for index, text, problem in items:
            # If both the parent and the watching thread cannot act (parent gone, interpreter lock
            # held by one endless C call), this signal's default action ends the process.
            signal.setitimer(signal.ITIMER_PROF, 2 * timeout_s + 1)
            score = judge(verifier, text, problem)
            connection.send((index, score.outcome.value, score.reward, score.detail))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os.killpg(0, signal.SIGKILL)


def judge(verifier: Verifier, text: str, problem: Problem) -> Score:
    """Call the verifier once and map what it returns; whatever it raises becomes outcome error."""
    try:
        return as_score(verifier.check(text, problem))
    # SystemExit and KeyboardInterrupt too: a verifier must not end the worker silently. Nothing is
    # lost: the message travels with the score, and too many errors stop the run.
    except BaseException as error:  # noqa: BLE001
        return Score(Outcome.error, REWARDS[Outcome.error], _describe(error))


def as_score(value: object) -> Score:
    """Map a verifier's return value (see `Verifier`). Raises TypeError or ValueError otherwise."""
    if isinstance(value, Outcome):
        return Score(value, REWARDS[value])
    # numpy's bool is neither a bool nor a number; its class is called bool (bool_ before numpy 2).
    if type(value).__name__ in ("bool", "bool_"):
        outcome = Outcome.correct if value else Outcome.wrong
        return Score(outcome, REWARDS[outcome])
    if not isinstance(value, Real):
        raise TypeError(
            f"a verifier returns an Outcome, a bool or a number in [0, 1], not {value!r:.200}"
        )
    reward = float(value)
    if math.isnan(reward) or not 0.0 <= reward <= 1.0:
        raise ValueError(f"a verifier's reward must lie in [0, 1], got {reward}")
    return Score(Outcome.correct if reward == 1.0 else Outcome.wrong, reward)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
