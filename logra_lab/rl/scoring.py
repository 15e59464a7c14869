"""Score responses in worker processes that can be killed, with a time limit for each response.

Works the same from a script, a thread and a notebook kernel. The workers are plain
``python -c`` processes that import the verifier's module and nothing of the caller: with
multiprocessing's spawn method every worker would re-run the caller's main script (and import torch
with it), and a script without a ``__main__`` guard would not start at all.

A verifier that hangs is killed with its children and replaced; one that raises, or whose process
dies, gives outcome error. Neither is a reward of 0. No process outlives the pool or its parent.
"""

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from time import monotonic
from types import TracebackType

from logra_lab.errors import InputError, LograError
from logra_lab.rl.outcomes import REWARDS, Outcome, Problem, Score, Verifier
from logra_lab.rl.worker import START_LIMIT_S, Worker

MIN_BATCH_FOR_SHARE = 8  # below this a share of errors says little
MAX_CHUNK = 32  # items a message: large enough that cheap verifiers are not bound by messages

Item = tuple[int, str, Problem]


class ScoringError(LograError):
    """Too many verifier errors in a batch: the reward function or its data is broken."""


class ScoringPool:
    """A pool of `workers` processes that judge responses with `verifier`; a context manager.

    It starts at once (about 0.2 s plus the verifier's imports), is reused by every `score` and may
    be called from several threads, one batch at a time. `timeout_s` is the wall time of one
    response. More than `max_error_share` errors in a batch of at least 8 raise ScoringError.

    Raises InputError for settings out of range and for a verifier that workers cannot import.
    """

    def __init__(
        self,
        verifier: Verifier,
        workers: int = 2,
        timeout_s: float = 5.0,
        max_error_share: float = 0.2,
    ) -> None:
        if workers < 1:
            raise InputError(f"scoring pool: workers must be at least 1, got {workers}")
        if not 0 < timeout_s < float("inf"):
            raise InputError(f"scoring pool: timeout_s must be positive, got {timeout_s}")
        if not 0 <= max_error_share <= 1:
            raise InputError(f"scoring pool: max_error_share is a share, got {max_error_share}")
        self.verifier = verifier
        self.timeout_s = timeout_s
        self.max_error_share = max_error_share
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        # Runs on close, on garbage collection and at interpreter exit, whichever comes first.
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)
        try:
            self._workers.extend(Worker(verifier, timeout_s) for _ in range(workers))
            for worker in self._workers:
                worker.wait_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "ScoringPool":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill the workers. A closed pool refuses to score."""
        self._finalizer()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers alive now (they change when one is replaced)."""
        return [w.pid for w in self._workers]

    def score(
        self, texts: Sequence[str], problems: Sequence[Problem], finish: Sequence[str]
    ) -> list[Score]:
        """Judge `texts[i]` against `problems[i]`; truncated ones (`finish[i] == "length"`) are
        unparsable with reward 0.0 without calling the verifier. The order is kept.

        Raises InputError for lengths that differ or an unknown finish reason, ScoringError for too
        many errors. Cost: well under 0.1 ms a response for a cheap verifier.
        """
        if not len(texts) == len(problems) == len(finish):
            raise InputError(
                "score: texts, problems and finish must have one entry a response, got "
                f"{len(texts)}, {len(problems)} and {len(finish)}"
            )
        unknown = set(finish) - {"stop", "length"}
        if unknown:
            raise InputError(f'score: finish must be "stop" or "length", got {sorted(unknown)}')
        scores = {
            i: Score(Outcome.unparsable, REWARDS[Outcome.unparsable], "truncated")
            for i, reason in enumerate(finish)
            if reason == "length"
        }
        items = [(i, texts[i], problems[i]) for i in range(len(texts)) if i not in scores]
        with self._lock:
            if not self._finalizer.alive:
                raise LograError("score: this scoring pool is closed; make a new one")
            scores.update(self._judge(items))
        result = [scores[i] for i in range(len(texts))]
        self._check_errors(result)
        return result

    def _check_errors(self, scores: list[Score]) -> None:
        errors = [s.detail for s in scores if s.outcome is Outcome.error]
        if len(scores) >= MIN_BATCH_FOR_SHARE and len(errors) > self.max_error_share * len(scores):
            raise ScoringError(
                f"verifier {self.verifier.name!r} failed on {len(errors)} of {len(scores)} "
                f"responses (at most {self.max_error_share:.0%} allowed); the first error: "
                f"{errors[0]}. Correct the verifier or the task's data"
            )

    def _judge(self, items: list[Item]) -> dict[int, Score]:
        scores: dict[int, Score] = {}
        size = max(1, min(MAX_CHUNK, -(-len(items) // (2 * len(self._workers)))))
        waiting = deque(items[i : i + size] for i in range(0, len(items), size))
        try:
            while len(scores) < len(items):
                for worker in [w for w in self._workers if w.ready and not w.pending]:
                    if waiting and worker.process.poll() is not None:
                        self._replace(worker)  # died between batches: no item is to blame
                    elif waiting:
                        worker.give(waiting.popleft(), self.timeout_s)
                self._collect(scores, waiting)
        except BaseException:
            # An interrupted batch leaves answers under way, which must not meet the next batch.
            for worker in [w for w in self._workers if w.pending]:
                self._replace(worker)
            raise
        return scores

    def _collect(self, scores: dict[int, Score], waiting: deque[list[Item]]) -> None:
        """Take what has arrived, then deal with the workers whose time is up or that died."""
        active = [w for w in self._workers if w.pending or not w.ready]
        limit = max(0.0, min(w.deadline for w in active) - monotonic())
        wait([w.connection for w in active], limit)
        for worker in active:
            alive = worker.receive(scores, self.timeout_s)
            lost = list(worker.pending)
            idle = worker.ready and not lost
            if alive and (idle or monotonic() < worker.deadline):
                continue
            if lost:
                scores[lost[0][0]] = worker.timed_out(self.timeout_s) if alive else worker.died()
            elif not worker.ready:
                why = f"no start within {START_LIMIT_S:.0f} s" if alive else worker.died().detail
                raise ScoringError(f"a scoring worker could not be replaced: {why}")
            if lost[1:]:
                waiting.appendleft(lost[1:])
            self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.kill()
        self._workers[self._workers.index(worker)] = Worker(self.verifier, self.timeout_s)


def _kill_all(workers: list[Worker]) -> None:
    for worker in workers:
        worker.kill()
    workers.clear()
