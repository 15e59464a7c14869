"""A training run that is steered from outside: paused, given another KL budget, stopped.

`Steered.run` takes the steps where it is called; `start` does so in a thread, which the other
methods then speak to. Everything takes effect between two steps: a step is all or nothing.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, cast

from logra_lab import kl
from logra_lab.lab.widgets import COMPUTING
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.learners import LoGRALearner
from logra_lab.rl.loop import load_tasks
from logra_lab.rl.policies import load_policy
from logra_lab.rl.run import Run
from logra_lab.rl.scoring import ScoringPool


@contextmanager
def opened(config: TrainConfig) -> Iterator[Run]:
    """A run of `config` from its policy, with its task's verifier; nothing is recorded on disk."""
    train, held_out = load_tasks(config)
    with ScoringPool(train.verifier, config.score_workers, config.score_timeout) as scorer:
        run = Run(config, load_policy(config.policy), train, held_out, scorer)
        try:
            yield run
        finally:
            run.publisher.close()


class Steered:
    """One LoGRA run under a budget that may change.

    Attributes:
        delta: the budget from the next step on, nats per generated token; set it at any time.
        changes: (step, δ): the first step that was taken under each budget.
        lines: the record of every step so far, see `logra_lab.rl.metrics`.
        error: what ended the thread, if something did.
    """

    def __init__(
        self,
        config: TrainConfig,
        delta: float,
        *,
        on_step: Callable[["Steered"], None] = lambda _: None,
        on_end: Callable[["Steered"], None] = lambda _: None,
        open_run: Callable[[TrainConfig], AbstractContextManager[Run]] = opened,
    ) -> None:
        self.config, self.delta = config, delta
        self.lines: list[dict[str, Any]] = []
        self.changes: list[tuple[int, float]] = []
        self.error: BaseException | None = None
        self._on_step, self._on_end, self._open = on_step, on_end, open_run
        self._stop, self._go = threading.Event(), threading.Event()
        self._go.set()
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Take the steps of the configuration, here and now, or as many as come before a stop."""
        try:
            with self._open(self.config) as run:
                while run.step < self.config.steps:
                    self._go.wait()
                    if self._stop.is_set():
                        break
                    with COMPUTING:
                        self._govern(run)
                        self.lines.append(run.one_step())
                    self._on_step(self)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self._on_end(self)

    def _govern(self, run: Run) -> None:
        if not self.changes or self.changes[-1][1] != self.delta:
            learner = cast(LoGRALearner, run.learner)
            learner.control = replace(learner.control, budget=kl.Budget(self.delta))
            self.changes.append((run.step + 1, self.delta))

    def start(self) -> None:
        """The same in a thread; `join` raises what went wrong in it."""

        def work() -> None:
            try:
                self.run()
            except BaseException:  # noqa: BLE001  kept in `error`, which `join` raises
                return

        # In the caller's context: a widget's messages from a thread need the request they answer.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(work,), daemon=True, name="live training"
        )
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether a thread is taking steps, or waits to go on."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def paused(self) -> bool:
        return not self._go.is_set()

    def pause(self) -> None:
        """Wait after the step under way, until `go_on` or `stop`."""
        self._go.clear()

    def go_on(self) -> None:
        self._go.set()

    def stop(self) -> None:
        """End after the step under way."""
        self._stop.set()
        self._go.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread, and raise what ended it if something did."""
        if self._thread is not None:
            self._thread.join(timeout)
        if self.error is not None:
            raise self.error


def played(config: TrainConfig, script: Mapping[int, float]) -> Steered:
    """A whole run in this thread, with the budgets a reader might have chosen: step → δ from there.

    >>> played(config, {1: 5e-3, 9: 5e-4})  # what moving the slider after step 8 would have done
    """

    def next_budget(steered: Steered) -> None:
        steered.delta = script.get(len(steered.lines) + 1, steered.delta)

    steered = Steered(config, script[1], on_step=next_budget)
    steered.run()
    return steered
