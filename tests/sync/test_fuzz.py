"""Ten thousand damaged and hostile updates: refused by type or applied, never half, never a crash.

Each counter of the fuzzer has a negative control: a reader or receiver with one check taken out.
"""

import json
import random

import torch

from logra_lab.bench import fuzz as fuzzing
from logra_lab.bench.fuzz import BASE, fuzz
from logra_lab.bench.mutations import REWRITES, mutate, seal, split
from logra_lab.sync import sealed, update
from logra_lab.sync.errors import SyncError
from logra_lab.sync.receiver import Receiver
from logra_lab.sync.update import ThinUpdate


def test_fuzz_catches_crashes_partial_writes_and_memory_beyond_twice_the_payload():
    found = fuzz(10_000)
    assert found["tried"] == 10_000 == found["refused"] + found["accepted"]
    assert found["partial"] == found["crashes"] == found["oversized"] == 0
    # Some are harmless: other numbers under a right digest, members in another order.
    assert found["refused"] > 5_000
    assert found["accepted"] > 100


def test_fuzz_repeats_itself_and_another_seed_is_another_run():
    assert fuzz(300, seed=1) == fuzz(300, seed=1) != fuzz(300, seed=2)


def test_sealing_catches_a_fuzzer_whose_seal_is_wrong():
    """The reader's own digest is the independent computation; nothing behind it is tested else."""
    for wire in ("int8", "float32"):
        data = fuzzing._payload(wire, "run")
        assert seal(*split(data)) == data
        header, body = split(data)
        other = seal(header, body[:-1] + bytes([body[-1] ^ 1]))
        assert other != data
        ThinUpdate.from_bytes(other)


def test_every_mutation_catches_one_that_changes_nothing():
    payloads = [fuzzing._payload(wire, "fuzz") for wire in ("int8", "float32")]
    rng = random.Random(0)
    same = sum(mutate(rng, payloads) in payloads for _ in range(1000))
    assert same < 150  # swaps of equal bytes, cuts of nothing, shuffles into the old order
    for rewrite in REWRITES:
        rng = random.Random(0)
        header, body = split(payloads[0])
        out = {rewrite(rng, header, body, split(payloads[1])) for _ in range(50)}
        assert len(out - {(header, body)}) >= 2, rewrite.__name__


def test_crash_counter_catches_a_reader_without_checks_of_numbers(monkeypatch):
    """Negative control: what the header says is believed."""

    def believed(meta, tensors):
        layers = [update.ThinLayer(n, d, k, meta["layers"][s][0]) for n, d, k, s in meta["layers"]]
        plain = {name: meta[name] for name in update.PLAIN}
        numbers = {"values": tensors["values"], "exponents": tensors.get("exponents")}
        return plain | {"layers": tuple(layers)} | numbers

    monkeypatch.setattr(update, "checked", believed)
    assert fuzz(400)["crashes"] > 10


def test_crash_counter_catches_errors_of_json_that_pass_through(monkeypatch):
    """Negative control: the header is parsed as if it had to be one."""
    monkeypatch.setattr(sealed, "_parse_header", lambda data, size: json.loads(split(data)[0]))
    assert fuzz(200)["crashes"] > 50


def test_partial_counter_catches_a_receiver_that_checks_layer_by_layer(monkeypatch):
    """Negative control: shapes are looked at when their turn comes, after the first write."""

    def eager(self, thin):
        if thin.run != self.run or thin.base != self.version:
            raise SyncError("not mine")
        return True

    monkeypatch.setattr(Receiver, "check", eager)
    monkeypatch.setattr(update, "check", lambda *_: None)
    assert fuzz(1500)["partial"] > 0


def test_partial_counter_catches_a_receiver_that_moves_its_version_first(monkeypatch):
    def hasty(self, thin):
        self.version = thin.version
        if thin.base != BASE:
            raise SyncError("too late")
        return True

    monkeypatch.setattr(Receiver, "check", hasty)
    assert fuzz(1500)["partial"] > 0


def test_memory_counter_catches_a_reader_that_copies_once_more(monkeypatch):
    """Negative control: 100 kB from torch, then as much from Python, for each payload."""
    unpack = sealed.unpack

    def from_torch(data, **limits):
        torch.zeros(100_000, dtype=torch.int8)
        return unpack(data, **limits)

    def from_python(data, **limits):
        bytearray(100_000)
        return unpack(data, **limits)

    for wasteful in (from_torch, from_python):
        monkeypatch.setattr(sealed, "unpack", wasteful)
        assert fuzz(20)["oversized"] == 20
