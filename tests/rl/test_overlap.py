"""One-step-off-policy overlap: the next batch is generated while this one is trained on.

With a trainer and a copy of the model in this process, the copy generating in a thread: what the
group of engines does with actors.
"""

import runpy
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from logra_lab.rl.engines import CopyEngine
from logra_lab.rl.loop import load_tasks
from logra_lab.rl.policies import load_policy
from logra_lab.rl.run import Run
from logra_lab.rl.trainer import Trainer
from logra_lab.sketch import TARGETS, find_targets

shared = runpy.run_path(str(Path(__file__).with_name("training.py")))
tiny_config, Judge, alternate = (shared[n] for n in ("tiny_config", "Judge", "alternate"))


class Background(CopyEngine):
    """A copy engine with `start`; an update waits for the batch that is being generated."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.lock = threading.Lock()

    def start(self, prompts, keys):
        future = Future()
        self.lock.acquire()

        def work():
            try:
                future.set_result(super(Background, self).generate(prompts, keys))
            except BaseException as error:  # noqa: BLE001  for whoever asks
                future.set_exception(error)
            finally:
                self.lock.release()

        threading.Thread(target=work).start()
        return future

    def generate(self, prompts, keys):
        with self.lock:
            return super().generate(prompts, keys)

    def sync(self, update):
        with self.lock:
            return super().sync(update)


def overlapped(rule=None, **settings):
    config = tiny_config(
        engine="hf", engines=1, overlap=True, steps=4, kl_start=1e-2, update_ratio=2e-2, **settings
    )
    policy = load_policy("small")
    engine = Background(policy, max_new_tokens=config.max_new_tokens, targets=config.targets)
    tasks = load_tasks(config)
    run = Run(config, policy, *tasks, Judge(rule), (Trainer(policy, config), engine))
    return run, gaps_of(run)


def gaps_of(run):
    """The rollout gap that each step of the learner is told."""
    told, step = [], run.learner.step

    def noted(probe, *, gap):
        told.append(gap)
        return step(probe, gap=gap)

    run.learner.step = noted
    return told


def test_staleness_is_one_and_the_mismatch_sees_no_gap_of_older_weights():
    run, told = overlapped(alternate, subtract_mismatch=True)
    lines = [run.one_step() for _ in range(4)]
    assert [line["staleness"] for line in lines] == [0, 1, 1, 1]
    assert [line["engine_version"] for line in lines] == [0, 0, 1, 2]
    assert [line["version"] for line in lines] == [1, 2, 3, 4]
    assert [gap is None for gap in told] == [False, True, True, True]
    assert run.ahead is None  # nothing is generated beyond the last step


def test_the_ratio_is_against_the_weights_that_generated():
    """Against the trainer's own log-probabilities it would be 1 in every step."""
    run, _ = overlapped(alternate)
    ratios = [run.one_step()["ratio_max"] for _ in range(3)]
    assert ratios[0] == pytest.approx(1, abs=1e-4)
    assert min(ratios[1:]) > 1.01


def test_a_batch_begun_before_a_skipped_step_is_not_stale():
    rewards = iter([shared["WRONG"]] * 24)  # the first batch teaches nothing
    run, told = overlapped(lambda t, p, i: next(rewards, None) or alternate(t, p, i))
    lines = [run.one_step() for _ in range(3)]
    assert lines[0]["skipped"]
    assert [line["staleness"] for line in lines] == [0, 0, 1]
    assert [gap is None for gap in told] == [False, True]


def test_two_updates_a_batch_are_two_versions_of_staleness():
    run, told = overlapped(alternate, updates_per_batch=2)
    lines = [run.one_step() for _ in range(3)]
    assert [line["version"] for line in lines] == [2, 4, 6]
    assert [line["staleness"] for line in lines] == [0, 2, 2]
    assert [len(line["updates"]) for line in lines] == [2, 2, 2]
    assert [gap is None for gap in told] == [False, True, True, True, True, True]


def test_samples_are_those_of_the_weights_at_the_start_of_the_batch():
    """The thread generates while weights change; rows of the new ones would be another rollout."""
    run, _ = overlapped(alternate)
    run.one_step()
    ahead = run.ahead.result()
    policy = load_policy("small")
    fresh = Background(policy, max_new_tokens=8, targets=TARGETS)
    linears = find_targets(policy.model, TARGETS).items()
    fresh.full_sync({name: module.weight.data for name, module in linears}, "r", 0)
    prompts = [run.policy.encode(p.prompt) for p in run.ahead.problems]
    again = fresh.generate(prompts, run.sampling_keys(run.ahead.problems, 2))
    assert again.response_ids == ahead.response_ids
