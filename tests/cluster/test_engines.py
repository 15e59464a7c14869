"""A group of engines: one engine to whoever uses it, whatever befalls its parts.

Real processes are killed (SIGKILL) and stopped (SIGSTOP), with the small policy and torch alone, so
that the tests are quick; vLLM's are marked slow. What an engine serves afterwards is compared with
an engine in this process that nothing has befallen.
"""

import dataclasses
import json
import os
import runpy
import signal
import time
from pathlib import Path

import pytest
import torch

from logra_lab.cluster.node import ClusterError, Needs, start
from logra_lab.errors import InputError
from logra_lab.rl.config import make_config
from logra_lab.rl.engines import CopyEngine
from logra_lab.rl.policies import load_policy
from logra_lab.rl.publish import Publisher
from logra_lab.sketch import TARGETS, find_targets
from logra_lab.sync.errors import NeedsFullSync, ShapeMismatch, VersionGap, WrongRun
from logra_lab.sync.mapping import target_paths
from logra_lab.sync.sealed import write

support = runpy.run_path(str(Path(__file__).parents[1] / "vllm_support.py"))
needs_vllm = support["needs_vllm"]

both_transports = pytest.mark.parametrize("pair", ["object_store", "group"], indirect=True)

TOKENS = 8
ROWS = 24


class Followed(support["Trainer"]):
    """The small policy's trainer, and the engine in this process that goes with it."""

    def __init__(self):
        policy = load_policy("small")
        super().__init__(policy, run="r")
        self.own = CopyEngine(policy, max_new_tokens=TOKENS, targets=TARGETS)
        self.weights = {n: m.weight.data for n, m in find_targets(policy.model, TARGETS).items()}
        self.prompts = [policy.encode(f"{i}+{2 * i}=") for i in range(ROWS)]
        self.keys = [f"key {i}" for i in range(ROWS)]
        self.own.full_sync(self.weights, "r", 0)

    def step(self, scale=1e-3):
        update = super().step(scale)
        self.own.sync(update)
        return update

    def digest(self):
        return [self.own.receiver.digest()]

    def ask(self, engine):
        return engine.generate(self.prompts, self.keys)


def config(**settings):
    return make_config(**{"engine": "hf", "engines": 2, "max_new_tokens": TOKENS} | settings)


@pytest.fixture(scope="module")
def place(ray_node):
    with start(None, Needs(engines=2)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared(place):
    from logra_lab.cluster.engines import EngineGroup

    group = EngineGroup(config(), place)
    yield group
    group.close()


@pytest.fixture
def pair(request, shared):
    """A trainer and the group, whole, in step, with its counts begun anew; a parameter is the
    transport."""
    from logra_lab.cluster.transports import make_transport

    trainer = Followed()
    name = getattr(request, "param", "object_store")
    if shared.transport.name != name:
        shared.transport.close()
        shared.transport = make_transport(name, shared.seats)
    shared.forget("a test begins")
    shared.full_sync(trainer.weights, "r", 0)
    wait_whole(shared, trainer)
    shared.stats()
    return trainer, shared


def wait_whole(group, trainer, seconds=120):
    """Generate until every engine is at the group's version."""
    deadline = time.monotonic() + seconds
    while any(seat.version != group.version for seat in group.seats.all):
        assert time.monotonic() < deadline, [vars(seat) for seat in group.seats.all]
        trainer.ask(group)


def pid(group, index):
    import ray

    return ray.get(group.seats.all[index].hello, timeout=60)["pid"]


def until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def generating(group, index):
    task = group.seats.all[index].task
    return task is not None and task.kind == "generate"


def equal(a, b):
    """The same tokens; log-probabilities to float32's last bits, which neighbours decide."""
    same = a.response_ids == b.response_ids and (a.finish, a.texts) == (b.finish, b.texts)
    rows = zip(a.logprobs, b.logprobs, strict=True)
    return same and all(torch.allclose(x, y, atol=1e-5, rtol=0) for x, y in rows)


# --- one engine to whoever uses it ---------------------------------------------------------------


def test_rows_come_in_the_order_of_the_prompts_with_the_samples_of_one_engine(pair):
    trainer, group = pair
    rollout = trainer.ask(group)
    assert rollout.prompt_ids == trainer.prompts
    assert equal(rollout, trainer.ask(trainer.own))
    assert equal(rollout, trainer.ask(group))  # served by whoever was free this time


@both_transports
def test_updates_reach_every_engine_bit_for_bit_and_twice_is_once(pair):
    trainer, group = pair
    updates = [trainer.step() for _ in range(3)]
    assert [group.sync(update) for update in updates] == [True] * 3
    assert group.sync(updates[-1]) is False
    assert group.version == 3
    assert group.digests() == [trainer.digest()] * 2
    assert equal(trainer.ask(group), trainer.ask(trainer.own))
    stats = group.stats()
    assert (stats["pieces_redone"], stats["restarts"], stats["faults"]) == (0, 0, [])
    assert stats["transport_seconds"] > 0


def test_order_run_and_version_are_checked_before_anything_is_sent(pair, monkeypatch):
    trainer, group = pair
    first, second = trainer.step(), trainer.step()
    monkeypatch.setattr(group.transport, "send", None)
    with pytest.raises(VersionGap, match="from version 1 to 2, the engines are at version 0"):
        group.sync(second)
    with pytest.raises(WrongRun, match="run 'other', the weights of 'r'"):
        group.sync(trainer.update(1e-3, run="other", base=0))
    group.forget("a reason")
    with pytest.raises(NeedsFullSync, match="a reason"):
        group.sync(first)
    with pytest.raises(NeedsFullSync, match="a reason"):
        trainer.ask(group)


def test_a_full_sync_goes_only_to_engines_of_another_version(pair):
    trainer, group = pair
    asked = record(group)
    group.full_sync(trainer.weights, "r", 0)
    assert asked == []
    group.full_sync(trainer.weights, "r", 1)
    assert asked == [("catch_up", 0), ("catch_up", 1)]
    asked.clear()
    group.full_sync(trainer.weights, "other", 1)  # the number alone says nothing
    assert asked == [("catch_up", 0), ("catch_up", 1)]


def test_a_sealed_file_serves_as_base_and_updates_follow_it(pair, tmp_path):
    trainer, group = pair
    write(tmp_path / "base.safetensors", trainer.weights, {"run": "r", "version": 4})
    with pytest.raises(VersionGap, match=r"base\.safetensors"):
        group.full_sync(tmp_path / "base.safetensors", "r", 5)
    assert group.version == 0
    group.full_sync(tmp_path / "base.safetensors", "r", 4)
    trainer.version = 4
    trainer.own.full_sync(trainer.weights, "r", 4)
    group.sync(trainer.step())
    assert group.digests() == [trainer.digest()] * 2


def test_a_wrong_prompt_is_refused_with_its_rows_and_the_group_goes_on(pair):
    trainer, group = pair
    for prompts, keys, message in (
        ([], [], "no prompts"),
        ([[1]], [], "1 prompts but 0 keys"),
        ([*trainer.prompts[:-1], [10**6]], trainer.keys, "outside|token ids"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            group.generate(prompts, keys)
    assert caught.value.__notes__ == ["in rows 20 to 23 of the batch"]
    assert equal(trainer.ask(group), trainer.ask(trainer.own))


def test_a_batch_in_the_background_is_all_of_the_version_at_its_start(pair):
    trainer, group = pair
    before = trainer.ask(trainer.own)
    handle = group.start(trainer.prompts, trainer.keys)
    group.sync(trainer.step(0.05))
    assert handle.done()  # the update has waited for it
    assert equal(handle.result(), before)
    after = trainer.ask(group)
    assert equal(after, trainer.ask(trainer.own))
    assert not equal(after, before)


def test_stats_are_plain_and_count_every_row_once(pair):
    trainer, group = pair
    trainer.ask(group)
    stats = group.stats()
    assert json.loads(json.dumps(stats)) == stats
    engines = stats["engines"]
    assert sum(e["rows"] for e in engines) == ROWS
    assert all(e["host_mib"] > 50 and e["version"] == 0 for e in engines)
    for e in engines:
        assert 0 <= e["idle_share"] <= 1
        assert e["idle_share"] == pytest.approx(1 - e["busy_seconds"] / stats["seconds"])
    assert sum(e["rows"] for e in group.stats()["engines"]) == 0


# --- what may befall its parts ----------------------------------------------------------------


def record(group):
    """From now on: what the group asks of its engines."""
    asked, ask = [], type(group.seats).ask

    def noted(seat, kind, *args, **kwargs):
        asked.append((kind, seat.index))
        ask(group.seats, seat, kind, *args, **kwargs)

    group.seats.ask = noted
    return asked


@pytest.fixture(autouse=True)
def _unrecorded(request):
    yield
    if "pair" in request.fixturenames:
        vars(request.getfixturevalue("shared").seats).pop("ask", None)


def test_an_engine_killed_while_generating_costs_no_row_and_comes_back_exact(pair):
    trainer, group = pair
    group.sync(trainer.step())
    expected = trainer.ask(trainer.own)
    victim = pid(group, 0)
    os.kill(victim, signal.SIGSTOP)  # so that it is in the middle of its piece for certain
    handle = group.start(trainer.prompts, trainer.keys)
    until(lambda: generating(group, 0))
    os.kill(victim, signal.SIGKILL)
    assert equal(handle.result(timeout=60), expected)
    stats = group.stats()
    assert (stats["pieces_redone"], stats["restarts"]) == (1, 1)
    assert "engine 0: died in 'generate'" in stats["faults"][0]
    group.sync(trainer.step())  # while the new one starts
    wait_whole(group, trainer)
    assert pid(group, 0) != victim
    assert group.digests() == [trainer.digest()] * 2
    assert equal(trainer.ask(group), trainer.ask(trainer.own))


@pytest.mark.slow
def test_an_engine_that_hangs_is_killed_at_the_limit_and_replaced(pair, monkeypatch):
    trainer, group = pair
    monkeypatch.setattr(group.seats, "limit", 5.0)
    victim = pid(group, 1)
    os.kill(victim, signal.SIGSTOP)
    assert equal(trainer.ask(group), trainer.ask(trainer.own))
    assert "engine 1: no answer to 'generate' within 5 s: killed" in group.stats()["faults"]
    until(lambda: not Path(f"/proc/{victim}/exe").exists())
    monkeypatch.setattr(group.seats, "limit", 60.0)
    wait_whole(group, trainer)
    assert group.digests() == [trainer.digest()] * 2


@pytest.mark.slow
def test_when_all_are_dead_the_batch_waits_for_their_successors(pair):
    trainer, group = pair
    for index in range(2):
        os.kill(pid(group, index), signal.SIGKILL)
    assert equal(trainer.ask(group), trainer.ask(trainer.own))
    assert group.stats()["restarts"] == 2


@both_transports
def test_one_engine_that_lost_its_version_is_synced_and_the_other_left_alone(pair):
    import ray

    trainer, group = pair
    ray.get(group.seats.all[1].actor.forget.remote("lost"), timeout=60)
    asked = record(group)
    assert Publisher(group, lambda: trainer.weights).publish(trainer.step()) == []
    assert group.version == 1
    assert equal(trainer.ask(group), trainer.ask(trainer.own))
    wait_whole(group, trainer)
    assert [index for kind, index in asked if kind == "catch_up"] == [1]
    assert "engine 1 refused 1" in group.stats()["faults"][0]
    assert group.digests() == [trainer.digest()] * 2


@both_transports
def test_a_lost_update_shows_at_the_next_one_and_a_full_sync_mends_it(pair):
    trainer, group = pair
    publisher = Publisher(group, lambda: trainer.weights)
    trainer.step()  # and nobody sends it
    (warning,) = publisher.publish(trainer.step())
    assert "did not take update 2" in warning
    assert "full sync next" in warning
    assert publisher.ready("r", 2) == 2
    assert group.digests() == [trainer.digest()] * 2


def test_an_update_for_another_model_is_refused_before_it_becomes_anyones_history(pair):
    trainer, group = pair
    publisher = Publisher(group, lambda: trainer.weights)
    *others, last = trainer.layers
    wrong = trainer.update(1e-3, layers=[*others, dataclasses.replace(last, name="x", site="x")])
    with pytest.raises(ShapeMismatch, match="differ in 2 layers"):
        group.sync(wrong)
    (warning,) = publisher.publish(wrong)
    assert "differ in 2 layers" in warning
    assert publisher.ready("r", 0) == 0
    assert group.digests() == [trainer.digest()] * 2


@both_transports
def test_an_update_that_all_refuse_is_an_error_and_the_version_unknown(pair):
    import ray

    trainer, group = pair
    for seat in group.seats.all:
        ray.get(seat.actor.forget.remote("lost"), timeout=60)
    with pytest.raises(NeedsFullSync):
        group.sync(trainer.step())
    assert group.version is None
    assert Publisher(group, lambda: trainer.weights).ready("r", 1) == 1
    assert group.digests() == [trainer.digest()] * 2


@pytest.mark.slow
@both_transports
def test_an_engine_killed_while_an_update_is_sent_holds_nobody_up(pair, monkeypatch):
    trainer, group = pair
    monkeypatch.setattr("logra_lab.cluster.transports.GROUP_SECONDS", 10.0)
    publisher = Publisher(group, lambda: trainer.weights)
    publisher.publish(trainer.step())  # a group is up, where there is one
    ask, victim = type(group.seats).ask, pid(group, 0)

    def killing(seat, kind, *args, **kwargs):
        if seat.index == 0 and kind in ("sync", "receive"):
            os.kill(victim, signal.SIGKILL)
        ask(group.seats, seat, kind, *args, **kwargs)

    group.seats.ask = killing
    start = time.monotonic()
    publisher.publish(trainer.step())
    assert time.monotonic() - start < 40
    del group.seats.ask
    assert publisher.ready("r", 2) == 2
    assert equal(trainer.ask(group), trainer.ask(trainer.own))
    wait_whole(group, trainer)
    publisher.publish(trainer.step())  # to both: a group is built anew
    assert group.digests() == [trainer.digest()] * 2
    assert group.stats()["restarts"] == 1


@pytest.mark.slow
@both_transports
def test_an_engine_that_hangs_before_an_update_is_killed_and_the_other_served(pair, monkeypatch):
    trainer, group = pair
    monkeypatch.setattr(group.seats, "limit", 5.0)
    os.kill(pid(group, 1), signal.SIGSTOP)
    start = time.monotonic()
    assert group.sync(trainer.step())
    assert time.monotonic() - start < 30
    monkeypatch.setattr(group.seats, "limit", 60.0)
    wait_whole(group, trainer)
    assert group.digests() == [trainer.digest()] * 2


@pytest.mark.slow
def test_a_newcomer_replays_no_more_than_the_updates_since_the_last_base(pair, monkeypatch):
    trainer, group = pair
    monkeypatch.setattr("logra_lab.cluster.engines.REBASE_AFTER", 2)
    monkeypatch.setattr(group, "weights", lambda: trainer.weights)
    for _ in range(5):
        group.sync(trainer.step())
    assert (group.history.base_version, len(group.history.chain)) == (4, 1)
    os.kill(pid(group, 0), signal.SIGKILL)
    wait_whole(group, trainer)
    trainer.ask(group)
    wait_whole(group, trainer)
    assert group.digests() == [trainer.digest()] * 2


@pytest.mark.slow
def test_engines_that_cannot_stay_up_end_in_an_error_that_says_so(place, shared, monkeypatch):
    from logra_lab.cluster.engines import EngineGroup

    shared.close()
    with pytest.raises(InputError, match="policy 'nowhere/at all'"):
        EngineGroup(config(policy="nowhere/at all"), place)
    monkeypatch.setattr("logra_lab.cluster.seats.MAX_RESTARTS", 1)
    trainer, group = Followed(), EngineGroup(config(), place)
    group.full_sync(trainer.weights, "r", 0)
    group.seats.settings = group.seats.settings | {"policy": "nowhere"}
    for index in range(2):
        os.kill(pid(group, index), signal.SIGKILL)
    with pytest.raises(ClusterError, match=r"no engine is left: each failed 2 times .*'nowhere'"):
        trainer.ask(group)
    group.close()
    with pytest.raises(ClusterError, match="closed"):
        trainer.ask(group)


@pytest.mark.slow
def test_closing_does_not_wait_for_a_batch_whose_engine_hangs(place, shared):
    from logra_lab.cluster.engines import EngineGroup

    shared.close()
    trainer, group = Followed(), EngineGroup(config(), place)
    group.full_sync(trainer.weights, "r", 0)
    victims = [pid(group, 0), pid(group, 1)]
    os.kill(victims[0], signal.SIGSTOP)
    handle = group.start(trainer.prompts, trainer.keys)
    until(lambda: generating(group, 0))
    start_of_end = time.monotonic()
    group.close()
    assert time.monotonic() - start_of_end < 60  # in order, and then by force
    assert isinstance(handle.exception(timeout=1), ClusterError)
    until(lambda: not any(Path(f"/proc/{victim}/exe").exists() for victim in victims))


# --- vLLM ------------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.slow
def test_two_vllm_engines_follow_the_trainer_and_one_that_was_killed_rejoins(ray_node):
    """Log-probabilities against Hugging Face's of the trainer's own weights: a served weight that
    is not the trainer's shows there, a digest that is not the engine's does not."""
    from logra_lab.cluster.engines import EngineGroup

    trainer = Followed()
    settings = {"engine": "vllm", "serving_dtype": "bfloat16", "kv_cache_mib": 64}
    order = target_paths(trainer.model.config.num_hidden_layers)
    limit = 0.1  # bfloat16 has 8 bits; a step of these weights moves logprobs by more
    with start(None, Needs(engines=2)) as places:
        group = EngineGroup(config(**settings, transport="group"), places)
        try:
            group.full_sync(trainer.weights, "r", 0)
            for _ in range(2):
                group.sync(trainer.step(0.01))
            assert support["gaps"](trainer, trainer.ask(group)).max() < limit
            handle = group.start(trainer.prompts * 8, [str(i) for i in range(8 * ROWS)])
            until(lambda: generating(group, 0))
            os.kill(pid(group, 0), signal.SIGKILL)
            assert len(handle.result(timeout=300).texts) == 8 * ROWS
            group.sync(trainer.step(0.01))
            wait_whole(group, trainer, seconds=300)
            served = support["cast_digest"](
                {name: trainer.weights[name] for name in order}, torch.bfloat16
            )
            assert group.digests() == [[served]] * 2
            assert support["gaps"](trainer, trainer.ask(group)).max() < limit
            assert group.stats()["restarts"] == 1
        finally:
            group.close()
