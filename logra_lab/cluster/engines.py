"""Several engines behind the interface of one: data parallel, and none missed when one dies.

    generate   the batch in pieces, to whichever engine is free; together again in prompt order
    sync       one thin update to all at once; `transport` carries the bytes
    full_sync  base weights once through the object store, to engines of another version

A row's random numbers come from its key, so it does not matter who serves it. The group keeps the
last base and the updates since: an engine that lost its version, or was replaced, gets them in
order and is where the others are, to the bit, without asking the trainers (who may be ahead).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from logra_lab.cluster.engine_actor import EngineActor
from logra_lab.cluster.history import History
from logra_lab.cluster.meter import Meter
from logra_lab.cluster.node import Cluster, ClusterError
from logra_lab.cluster.pieces import cut, unpack
from logra_lab.cluster.seats import EngineLost, Seat, Seats, Task
from logra_lab.cluster.transports import make_transport
from logra_lab.errors import InputError, LograError
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.rollout import Rollout
from logra_lab.sync.errors import NeedsFullSync
from logra_lab.sync.update import ThinUpdate

PIECE_TRIES = 3  # a piece that costs so many engines is taken to be the reason
REBASE_AFTER = 100  # updates: a newcomer has to apply them all, and the object store holds them


class EngineGroup:
    """`config.engines` engines on a cluster, as one `Engine`.

    Args:
        config: the run's; the policy travels by its name. cluster: with places for the engines.
        weights: the trained matrices as they are after the update that is being published; with it
            the group makes a new base after REBASE_AFTER updates, and without keeps all of them.

    Raises what making one engine raises. Memory: base (float32) and updates in Ray's object store.
    Methods may be called from one thread; a batch started in the background (`start`) is finished
    before weights change.
    """

    def __init__(
        self,
        config: TrainConfig,
        cluster: Cluster,
        weights: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        import ray

        if cluster.needs.engines < 1:
            raise InputError("the cluster has no places for engines: set engines to at least 1")
        self.config, self.weights = config, weights
        self.history = History()
        self._lock = threading.Lock()
        self._epoch = 0  # counts the times at which all weights came into doubt
        # One thread each: without this, several engines on a laptop would take each other's cores.
        environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        remote = ray.remote(max_restarts=0, runtime_env={"env_vars": environment})(EngineActor)
        settings = config.model_dump(mode="json")
        self.seats = Seats(cluster, remote, settings, config.engine_timeout)
        self.transport = make_transport(config.transport, self.seats)
        self.meter = Meter(self.seats)
        try:
            self._first_start()
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int | None:
        """Of the weights with which rows are generated; an engine that starts is not there yet."""
        return self.history.version

    def generate(self, prompt_ids: list[list[int]], keys: list[str]) -> Rollout:
        """One response a prompt; keys[i] alone seeds row i. Raises as `HFEngine.generate`,
        `NeedsFullSync`, and `ClusterError` when engines fail beyond the limits of this module."""
        with self._lock:
            return self._generate(prompt_ids, keys)

    def start(self, prompt_ids: list[list[int]], keys: list[str]) -> "Future[Rollout]":
        """`generate` in the background: `.result()` waits for it, and raises what it raises.

        All rows are of the version at this call: `sync` and `full_sync` wait until it is done.
        """
        future: Future[Rollout] = Future()
        self._lock.acquire()

        def work() -> None:
            try:
                future.set_result(self._generate(prompt_ids, keys))
            except BaseException as error:  # noqa: BLE001  for whoever asks for the result
                future.set_exception(error)
            finally:
                self._lock.release()

        threading.Thread(target=work, name="logra_lab engines", daemon=True).start()
        return future

    def sync(self, update: ThinUpdate) -> bool:
        """Apply an update everywhere; False when it was the last one already.

        Engines that did not take it, or died, are brought to its version before they generate
        again. Raises `NeedsFullSync`, `WrongRun`, `VersionGap`, `ShapeMismatch`, `DigestMismatch`
        before anything is sent; and when all engines have refused the first one's own error, with
        the version unknown.
        """

        with self._lock:
            if not self.history.fits(update):
                return False
            self._settle()
            data = update.to_bytes()
            reference = self.history.put(data)
            members = [s for s in self.seats.all if s.free and s.version == update.base]
            start = time.monotonic()
            refused = self.transport.send(update, data, reference, members, self._note)
            self.meter.sending += time.monotonic() - start
            for seat, error in refused.items():
                seat.version = None
                self.seats.faults.append(f"engine {seat.index} refused {update.version}: {error}")
            if members and len(refused) == len(members):  # the update may be what is wrong
                error = next(iter(refused.values()))
                self._doubt(f"no engine took update {update.version}: {error}")
                raise error
            self.history.append(update, reference)
            if self.weights is not None and len(self.history.chain) >= REBASE_AFTER:
                self.history.begin(self.weights(), update.run, update.version)
            return True

    def full_sync(self, base: str | Path | Mapping[str, Tensor], run: str, version: int) -> None:
        """Take all targets from tensors by layer name, or from a sealed file that every node reads.

        Only engines of another version are sent anything. Raises as `CopyEngine.full_sync`.
        """
        with self._lock:
            self._settle()
            before = self.history.run
            self.history.begin(base, run, version)
            if run != before:
                self._unknown()
            asked = self._mend()
            errors: list[LograError] = []

            def note(seat: Seat, task: Task, answer: Any) -> None:
                refused = isinstance(answer, LograError) and not isinstance(answer, EngineLost)
                if refused and seat in asked:  # the engine itself is sound
                    errors.append(answer)
                else:
                    self._note(seat, task, answer)

            self.seats.all_done(asked, note)
            if errors:
                self._doubt(str(errors[0]))
                raise errors[0]

    def forget(self, why: str) -> None:
        """The weights are no longer known: nothing is generated until a full sync."""
        with self._lock:
            self._settle()
            self._doubt(why)

    def digests(self) -> list[list[str] | None]:
        """SHA-256 of each engine's served weights, by rank; None for one that is starting."""
        with self._lock:
            self._settle()
            found: list[list[str] | None] = [None] * len(self.seats.all)

            def note(seat: Seat, task: Task, answer: Any) -> None:
                self._note(seat, task, answer)
                if task.kind == "digests" and isinstance(answer, list):
                    found[seat.index] = answer

            asked = [seat for seat in self.seats.all if seat.free]
            for seat in asked:
                self.seats.ask(seat, "digests")
            self.seats.all_done(asked, note)
            return found

    def stats(self) -> dict[str, Any]:
        """What happened since the last call, as plain values.

        seconds since then, and of them those in which the group generated; by engine busy seconds,
        idle share of all the time and of the time in which the group generated, rows, pieces,
        restarts, version, MiB; faults: what went wrong and was mended, in words.
        """
        about = {"version": self.version, "transport": self.transport.name}
        return about | self.meter.report()

    def close(self) -> None:
        """End all engines; may be called twice. A batch in the background ends with an error."""
        self.seats.closed = True
        with self._lock:
            self.transport.close()
            self.seats.close()

    def _generate(self, prompts: list[list[int]], keys: list[str]) -> Rollout:
        """Pieces to whoever is free, until all have come back."""
        self._check(prompts, keys)
        self._settle()
        start = time.monotonic()
        pieces = cut(len(prompts), len(self.seats.all))
        todo = deque(enumerate(pieces))
        tries, answers = [0] * len(pieces), dict[int, dict[str, Any]]()
        while len(answers) < len(pieces):
            self._mend()
            for seat in self.seats.all:
                if todo and seat.free and seat.version == self.version:
                    number, rows = todo.popleft()
                    tries[number] += 1
                    part = slice(rows.start, rows.stop)
                    about = (number, rows)
                    self.seats.ask(seat, "generate", prompts[part], keys[part], about=about)
            for seat, task, answer in self.seats.wait():
                self._note(seat, task, answer)
                if task.kind != "generate":
                    continue
                number, rows = task.about
                if isinstance(answer, dict):
                    answers[number] = answer["rollout"]
                elif isinstance(answer, EngineLost | NeedsFullSync):
                    if tries[number] >= PIECE_TRIES:
                        raise ClusterError(
                            f"rows {rows.start} to {rows.stop - 1} of the batch cost "
                            f"{PIECE_TRIES} engines, the last: {answer}"
                        ) from answer
                    todo.appendleft((number, rows))
                    self.meter.redone += 1
                else:
                    answer.add_note(f"in rows {rows.start} to {rows.stop - 1} of the batch")
                    raise answer
        self.meter.generating += time.monotonic() - start
        return unpack(prompts, [answers[number] for number in range(len(pieces))])

    def _mend(self) -> list[Seat]:
        """Ask every free engine that is behind, or of unknown version, to catch up."""
        behind = [seat for seat in self.seats.all if seat.free and seat.version != self.version]
        for seat in behind:
            seat.version = None
            self.seats.ask(seat, "catch_up", *self.history.steps, about=self._epoch)
        return behind

    def _note(self, seat: Seat, task: Task, answer: Any) -> None:
        """What every answer means for its seat, whoever waited for it."""
        if task.kind == "generate" and isinstance(answer, dict):
            seat.failures = 0
            seat.tally.generating += answer["seconds"]
            seat.tally.pieces += 1
            seat.tally.rows += len(answer["rollout"]["lengths"])
        elif isinstance(answer, EngineLost):
            return
        elif task.kind in ("open", "catch_up") and isinstance(answer, LograError):
            self.seats.replace(seat, f"{task.kind!r} failed: {answer}")
        elif isinstance(answer, NeedsFullSync) or (
            task.kind == "catch_up" and task.about != self._epoch
        ):
            seat.version = None

    def _settle(self) -> None:
        """Wait for pieces that an interrupted batch left behind; starts may go on."""
        at_work = [s for s in self.seats.all if s.task is not None and s.task.kind == "generate"]
        self.seats.all_done(at_work, self._note)
        for ended in self.seats.wait(0):
            self._note(*ended)

    def _first_start(self) -> None:
        """Wait until all are open; the first error is this constructor's."""

        def note(seat: Seat, task: Task, answer: Any) -> None:
            if isinstance(answer, EngineLost):
                raise ClusterError(f"an engine did not start: {answer}") from answer
            if isinstance(answer, LograError):
                raise answer

        self.seats.all_done(self.seats.all, note)

    def _doubt(self, why: str) -> None:
        self.history.forget(why)
        self._unknown()

    def _unknown(self) -> None:
        """No engine is known to be where it should be, nor will be by what it was asked before."""
        self._epoch += 1
        for seat in self.seats.all:
            seat.version = None

    def _check(self, prompts: list[list[int]], keys: list[str]) -> None:
        if not prompts:
            raise InputError("no prompts to generate from: expected at least one")
        if len(keys) != len(prompts):
            raise InputError(f"{len(prompts)} prompts but {len(keys)} keys: expected one each")
        self.history.require_version()
