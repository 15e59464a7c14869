"""A training in a thread of the kernel (field cases ipywidgets#2358, #4020): steered, seen."""

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import matplotlib

matplotlib.use("agg")  # before pyplot: there is no display here

import matplotlib.pyplot as plt
import pytest

from logra_lab.lab.live import LiveTraining
from logra_lab.lab.steered import Steered, played
from logra_lab.lab.widgets import slider
from logra_lab.optimizer import KLControl
from logra_lab.rl.config import make_config

LIMIT_S = 20  # of anything that a thread has to do; nothing takes that long


@dataclass
class Learner:
    control: KLControl = field(default_factory=KLControl)


@dataclass
class FakeRun:
    """A run whose steps end when the test says so."""

    gated: bool = True
    fails_at: int | None = None
    step: int = 0
    learner: Learner = field(default_factory=Learner)
    entered: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    may_end: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    closed: bool = False

    @contextmanager
    def open(self, _config):
        try:
            yield self
        finally:
            self.closed = True

    def one_step(self):
        self.entered.release()
        if self.gated:
            assert self.may_end.acquire(timeout=LIMIT_S)
        self.step += 1
        if self.step == self.fails_at:
            raise ValueError("the verifier is on fire")
        numbers = dict.fromkeys(("accuracy", "truncated_share", "kl_predicted", "kl_realised"), 0.5)
        return {
            **numbers,
            "step": self.step,
            "kl_budget": self.learner.control.budget(self.step),
            "skipped": None,
            "alpha": 1.0,
            "response_tokens_mean": 3.0,
        }

    def begins(self):
        assert self.entered.acquire(timeout=LIMIT_S)


CONFIG = make_config(steps=50)


def widget(run, *, threaded=True, config=CONFIG):
    delta = slider("δ", [1e-4, 1e-3, 1e-2], 1e-3)
    return LiveTraining(config, delta, threaded=threaded, open_run=run.open), delta


def images(live):
    return [o for o in live.output.outputs if "image/png" in o.get("data", {})]


def test_stop_ends_the_thread_with_the_step_under_way_and_closes_the_run():
    run = FakeRun()
    live, _ = widget(run)
    live.buttons["Start"].click()
    run.begins()
    run.may_end.release()
    run.begins()  # in the second step
    live.buttons["Stop"].click()
    run.may_end.release()
    live.steered.join(LIMIT_S)
    assert (len(live.steered.lines), live.steered.running, run.closed) == (2, False, True)
    assert not live.buttons["Start"].disabled
    assert live.buttons["Stop"].disabled
    assert len(images(live)) == 1


def test_pause_holds_the_next_step_until_go_on_and_stop_ends_a_paused_run():
    run = FakeRun()
    live, _ = widget(run)
    live.start()
    run.begins()
    live.buttons["Pause"].click()
    assert live.buttons["Pause"].description == "Go on"
    run.may_end.release()
    assert not run.entered.acquire(timeout=0.2)  # no second step
    live.buttons["Pause"].click()
    run.begins()
    live.pause()
    live.stop()
    run.may_end.release()
    live.steered.join(LIMIT_S)
    assert len(live.steered.lines) == 2


def test_a_new_budget_governs_the_next_step_and_stands_in_the_table():
    run = FakeRun()
    live, delta = widget(run)
    live.start()
    run.begins()
    delta.value = 1e-2  # while the first step runs, which keeps its own
    run.may_end.release()
    run.begins()
    live.stop()
    run.may_end.release()
    live.steered.join(LIMIT_S)
    assert [line["kl_budget"] for line in live.steered.lines] == [1e-3, 1e-2]
    assert live.steered.changes == [(1, 1e-3), (2, 1e-2)]
    assert "<td>2</td><td>1.0e-02</td>" in live.table.value


def test_an_exception_of_the_thread_is_shown_and_raised_on_join():
    run = FakeRun(gated=False, fails_at=3)
    live, _ = widget(run)
    live.start()
    with pytest.raises(ValueError, match="on fire"):
        live.steered.join(LIMIT_S)
    live.steered._thread.join(LIMIT_S)
    (shown,) = live.output.outputs
    assert (shown["output_type"], shown["ename"]) == ("error", "ValueError")
    assert "failed after 2 steps" in live.said.value
    assert not live.buttons["Start"].disabled  # and it can be tried again


def test_without_a_reader_it_runs_in_the_callers_thread_to_the_end():
    run = FakeRun(gated=False)
    live, _ = widget(run, threaded=None, config=make_config(steps=3))
    before = threading.active_count(), plt.get_fignums()
    live.start()
    assert (len(live.steered.lines), len(images(live))) == (3, 1)
    assert (threading.active_count(), plt.get_fignums()) == before


def test_a_widget_made_again_ends_the_training_of_the_one_before():
    run = FakeRun()
    first, _ = widget(run)
    first.start()
    run.begins()
    widget(FakeRun())
    run.may_end.release()
    first.steered.join(LIMIT_S)
    assert len(first.steered.lines) == 1


def test_a_played_run_takes_real_steps_under_the_budgets_of_its_script():
    config = make_config(
        steps=4, prompts_per_step=8, train_problems=32, eval_problems=4, rank=4, score_workers=1
    )
    steered = played(config, {1: 2e-3, 3: 1e-5})
    assert [line["kl_budget"] for line in steered.lines] == [2e-3, 2e-3, 1e-5, 1e-5]
    assert steered.changes == [(1, 2e-3), (3, 1e-5)]
    for line in steered.lines:
        # Where α is below its cap the step was scaled to the budget, to float64 rounding.
        allowed = min(line["kl_budget"], config.alpha_max**2 * line["kl_predicted_full"])
        assert line["kl_predicted"] == pytest.approx(allowed, rel=1e-9)


def test_in_a_kernel_the_thread_writes_into_its_own_widget_and_under_no_cell(course):
    made = """
from logra_lab.lab.live import LiveTraining
from logra_lab.lab.widgets import slider
from logra_lab.rl.config import make_config
from transformers.utils import logging
logging.disable_progress_bar()
config = make_config(steps=1000, prompts_per_step=8, train_problems=32, eval_problems=4, rank=4)
live = LiveTraining(config, slider("δ", [1e-4, 1e-3], 1e-3), threaded=True)
live.buttons["Start"].click()
"""
    meanwhile = """
import time
until = time.monotonic() + 60
while len(live.steered.lines) < 2 and live.steered.running and time.monotonic() < until:
    time.sleep(0.01)
"""
    another = "live.delta.value = 1e-4\nseen = len(live.steered.lines)"
    ended = """
live.buttons["Stop"].click()
taken = len(live.steered.lines)
live.steered.join()
assert 2 <= seen <= taken, (seen, taken)
assert len(live.steered.lines) <= taken + 1  # the step under way, and none after it
assert [o["output_type"] for o in live.output.outputs] == ["display_data"]
"""
    outcome = course.one(made, meanwhile, another, ended)
    assert outcome.status == 0, outcome.entry["reason"]
    code = [cell for cell in outcome.node.cells if cell.cell_type == "code"]
    assert [cell.outputs for cell in code if cell.outputs] == [code[-1].outputs]  # the record


def test_a_steered_run_does_nothing_after_a_stop_that_came_first():
    run = FakeRun(gated=False)
    steered = Steered(CONFIG, 1e-3, open_run=run.open)
    steered.stop()
    steered.run()
    assert (steered.lines, run.closed) == ([], True)
