"""The order and the rules of the caller's side, with an engine that only keeps a protocol."""

import pytest

from logra_lab.sync.errors import NeedsFullSync, PrefixCacheBusy, SyncError, VersionGap
from logra_lab.sync.vllm_client import VLLMClient
from logra_lab.sync.wording import worded


class Engine:
    """Answers as vLLM's `LLM` with two ranks does, and writes down what it is asked."""

    def __init__(self):
        self.calls, self.version, self.failures, self.busy = [], None, [None, None], False
        self.llm_engine = self

    def has_unfinished_requests(self):
        return self.busy

    def collective_rpc(self, name, args=()):
        self.calls.append(name)
        if name == "logra_forget":
            self.version = None
        return [
            {"failure": f, "applied": f is None, "run": "r", "version": self.version, "why": "torn"}
            for f in self.failures
        ]

    def finish_weight_update(self):
        self.calls.append("finish")
        if self.failures == [None, None]:
            self.version = 1 if self.version is None else self.version + 1

    def reset_prefix_cache(self):
        self.calls.append("reset")
        return True

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append(name)


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def client(engine):
    made = VLLMClient(engine, mode="exact", targets=["q_proj"])
    engine.calls.clear()
    return made


def test_weights_then_cache_then_version(client, engine):
    """A1: drain, update, finish, reset, bump; in this order."""
    assert client._transfer({"update": b""})
    order = ["start_weight_update", "update_weights", "finish", "logra_report", "reset"]
    assert engine.calls == [*order, "update_weight_version"]
    assert client.version == client.require_version() == 1


def test_a_refusal_keeps_the_version_and_resets_nothing(client, engine):
    client._transfer({"update": b""})
    engine.calls.clear()
    other = worded(SyncError("another rank refused the update"))
    engine.failures = [other, worded(VersionGap("from 5"))]
    with pytest.raises(VersionGap, match="from 5"):  # the reason, not its echo from rank 0
        client._transfer({"update": b""})
    assert client.version == 1
    assert "reset" not in engine.calls


def test_a_failure_in_writing_makes_the_version_unknown(client, engine):
    client._transfer({"update": b""})
    engine.failures, engine.version = [worded(OSError("disk")), None], None
    with pytest.raises(SyncError, match="OSError: disk"):
        client._transfer({"update": b""})
    with pytest.raises(NeedsFullSync, match="torn"):
        client.require_version()


def test_an_interrupted_update_leaves_an_engine_that_only_says_so(client, engine, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    client._transfer({"update": b""})
    monkeypatch.setattr(engine, "finish_weight_update", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client._transfer({"update": b""})
    monkeypatch.undo()
    assert client.version is None
    with pytest.raises(SyncError, match="start another"):
        client._transfer({"base": ""})


def test_nothing_is_sent_while_requests_are_in_flight(client, engine):
    engine.busy = True
    for change in (lambda: client._transfer({}), lambda: client.sleep(2), client.reload):
        with pytest.raises(PrefixCacheBusy, match="in flight"):
            change()
    assert engine.calls == []


@pytest.mark.parametrize("lose", [lambda c: (c.sleep(2), c.wake_up()), lambda c: c.reload()])
def test_what_replaces_the_weights_makes_the_version_unknown_on_both_sides(client, engine, lose):
    client._transfer({"update": b""})
    lose(client)
    assert client.version is None
    assert "logra_forget" in engine.calls
    with pytest.raises(NeedsFullSync):
        client.require_version()


def test_level_1_sleep_keeps_the_version_and_refuses_while_it_lasts(client):
    client._transfer({"update": b""})
    client.sleep(1)
    with pytest.raises(SyncError, match="wake_up"):
        client.require_version()
    with pytest.raises(SyncError, match="wake_up"):
        client._transfer({"update": b""})
    client.wake_up()
    assert client.require_version() == 1
