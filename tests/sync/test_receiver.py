"""The version rules, and what an engine serves after many steps.

A5, A6 and A7 are cases of the field reports: sleep and reload, delta chains, and bfloat16 weights
that swallow small steps.
"""

import hashlib
import math
import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from logra_lab.errors import InputError
from logra_lab.projection import Projection
from logra_lab.sync.errors import (
    DigestMismatch,
    NeedsFullSync,
    ShapeMismatch,
    SyncError,
    VersionGap,
    WrongRun,
)
from logra_lab.sync.receiver import Place, Receiver
from logra_lab.sync.update import Slot, ThinUpdate, apply
from logra_lab.sync.wire import ThinLayer

reference = runpy.run_path(str(Path(__file__).parents[1] / "reference.py"))
LAYERS = (ThinLayer("q", 6, 8, "q"), ThinLayer("k", 5, 8, "q"), ThinLayer("o", 7, 11, "o"))


def weights(layers=LAYERS, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {x.name: torch.randn(x.d, x.k, generator=g) * 0.05 for x in layers}


def update(base, *, seed=None, layers=LAYERS, run="run", scale=1e-2, draw=None, r=4, wire="int8"):
    g = torch.Generator().manual_seed(base if seed is None else seed)
    U = torch.randn(sum(x.d for x in layers), r, generator=g) * scale
    draw = base + 1 if draw is None else draw
    return ThinUpdate.round(U, layers, run=run, base=base, seed=3, draw=draw, wire=wire)


class Trainer:
    """float32 weights and the steps that made them; resumes at any version."""

    def __init__(self, run="run", version=0, layers=LAYERS):
        self.run, self.version, self.layers, self.weights = run, version, layers, weights(layers)

    def step(self, **rest):
        thin = update(self.version, run=self.run, layers=self.layers, **rest)
        apply(thin, [Slot.whole(name, w) for name, w in self.weights.items()])
        self.version += 1
        return thin


def engine(dtype=torch.bfloat16, mode="exact", layers=LAYERS):
    served = [torch.full((x.d, x.k), 7, dtype=dtype) for x in layers]
    pairs = zip(layers, served, strict=True)
    return Receiver([Place.whole(x.name, w) for x, w in pairs], mode=mode)


def loaded(trainer, **rest):
    receiver = engine(**rest)
    receiver.load(trainer.run, trainer.version, trainer.weights)
    return receiver


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def memory(receiver):
    """All bytes that an update may write, served and shadows."""
    held = [t for slot in receiver.slots for t in (slot.weight, slot.served) if t is not None]
    return b"".join(raw(t) for t in held)


def state(receiver):
    return memory(receiver), receiver.run, receiver.version


def nearest_bfloat16(x):
    """Round to nearest even on the bits of a float32: the upper half of the word."""
    word = x.contiguous().numpy().view(np.uint32)
    return ((word + 0x7FFF + (word >> 16 & 1)) >> 16).astype(np.uint16).tobytes()


def serves(receiver, expected):
    """Whether every served bfloat16 weight is the cast of `expected`, bit for bit."""
    return all(raw(p.served) == nearest_bfloat16(expected[p.layer]) for p in receiver.places)


# Rules


def test_rules_in_order_catch_an_engine_that_takes_what_it_should_not():
    """A6: v0 → v1 twice; v2 → v3 at v1; another run; then on as if nothing had happened."""
    trainer = Trainer()
    receiver = loaded(trainer)
    first = trainer.step()
    assert receiver.apply(first) is True
    once = state(receiver)
    assert once[1:] == ("run", 1)
    assert serves(receiver, trainer.weights)
    assert receiver.apply(first) is False  # acknowledged, and nothing moves
    assert receiver.apply(ThinUpdate.from_bytes(first.to_bytes())) is False
    assert state(receiver) == once
    second, third = trainer.step(), trainer.step()
    refusals = {
        VersionGap: [third],
        WrongRun: [replace(second, run="other"), replace(first, run="other")],
        DigestMismatch: [update(0, seed=9), update(0, draw=0), update(0, wire="float32")],
    }
    for kind, updates in refusals.items():
        for wrong in updates:
            with pytest.raises(SyncError) as caught:
                receiver.apply(wrong)
            assert caught.type is kind
            with pytest.raises(kind):
                receiver.check(wrong)
            assert state(receiver) == once
    assert receiver.apply(second) is True
    assert receiver.apply(third) is True
    assert (receiver.require_version(), receiver.version) == (3, 3)
    assert serves(receiver, trainer.weights)
    with pytest.raises(VersionGap, match="version 0 to 1"):
        receiver.apply(first)  # a chain that begins anew


def test_resumed_trainer_catches_a_version_that_starts_at_one_again():
    """A6: trainer resumed at step 7, fresh engine: full sync first, then rollouts of version 7."""
    trainer = Trainer(version=7)
    receiver = engine()
    with pytest.raises(NeedsFullSync):
        receiver.require_version()
    with pytest.raises(NeedsFullSync):
        receiver.apply(update(7))
    receiver.load("run", 7, trainer.weights)
    assert receiver.require_version() == 7
    with pytest.raises(VersionGap):
        receiver.apply(update(0))
    with pytest.raises(VersionGap):
        receiver.apply(update(6))  # made 7, yet nobody can tell whether this one did
    assert receiver.apply(trainer.step()) is True
    assert receiver.require_version() == 8
    assert serves(receiver, trainer.weights)


def wrong_layers():
    q, k, o = LAYERS
    return {
        "second has fewer rows": (q, replace(k, d=4), o),
        "second has more rows": (q, replace(k, d=6), o),
        "second has other inputs": (q, ThinLayer("k", 5, 9, "k"), o),
        "second is missing": (q, o),
        "one too many": (*LAYERS, ThinLayer("v", 5, 8, "q")),
        "second has another name": (q, replace(k, name="v"), o),
        "rows and columns swapped": (q, ThinLayer("k", 8, 5, "k"), o),
    }


@pytest.mark.parametrize("mode", ["exact", "plain"])
@pytest.mark.parametrize("case", wrong_layers())
def test_second_layer_of_three_catches_a_check_after_the_first_write(case, mode):
    """A6: and the engine goes on afterwards, its version known."""
    trainer = Trainer()
    receiver = loaded(trainer, mode=mode)
    before = state(receiver)
    with pytest.raises(ShapeMismatch):
        receiver.apply(update(0, layers=wrong_layers()[case]))
    assert state(receiver) == before
    assert receiver.apply(trainer.step()) is True


def test_names_of_any_length_catch_messages_that_quote_them():
    layers = (ThinLayer("a" * 10_000, 6, 8, "a" * 10_000), LAYERS[2])
    with pytest.raises(ShapeMismatch) as caught:
        loaded(Trainer()).apply(update(0, layers=layers))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("mode", ["exact", "plain"])
@pytest.mark.parametrize("failing", [1, 2])
def test_failure_while_writing_catches_an_engine_that_goes_on(failing, mode, monkeypatch):
    """Two groups share an A (q and k; o): the first or the second write fails. Then only a full
    sync helps, whatever else is tried."""
    trainer = Trainer()
    receiver = loaded(trainer, mode=mode)
    thin, calls = trainer.step(), []
    subtract = Projection.subtract_

    def fails(self, *args):
        calls.append(self.path)
        if len(calls) == failing:
            raise RuntimeError("the device is gone")
        subtract(self, *args)

    before = memory(receiver)
    with monkeypatch.context() as patch:
        patch.setattr(Projection, "subtract_", fails)
        with pytest.raises(RuntimeError, match="the device is gone"):
            receiver.apply(thin)
    assert calls == ["q", "o"][:failing]
    assert (memory(receiver) == before) == (failing == 1)
    assert receiver.version is receiver.run is None
    for retry in (thin, trainer.step(), update(0, run="other")):
        with pytest.raises(NeedsFullSync, match="failed between"):
            receiver.apply(retry)
        with pytest.raises(NeedsFullSync, match="failed between"):
            receiver.require_version()
    receiver.load("run", trainer.version, trainer.weights)
    assert receiver.require_version() == 2
    assert serves(receiver, trainer.weights)
    assert receiver.apply(trainer.step()) is True


def test_failed_full_sync_catches_an_engine_that_keeps_its_old_version():
    """A base whose last layer cannot be read: the first is written already."""

    class Torn:
        def get_shape(self):
            return [7, 11]

        def __getitem__(self, _):
            raise OSError("unexpected end of file")

    trainer = Trainer()
    receiver = loaded(trainer)
    trainer.step()
    with pytest.raises(OSError, match="unexpected end"):
        receiver.load("run", 1, trainer.weights | {"o": Torn()})
    with pytest.raises(NeedsFullSync, match="failed between"):
        receiver.require_version()
    receiver.load("run", 1, trainer.weights)
    assert receiver.require_version() == 1


@pytest.mark.parametrize(
    "bad",
    [{"k": torch.zeros(5, 9)}, {"k": torch.zeros(8, 5)}, {"o": torch.zeros(7, 11, 1)}, {"o": None}],
)
def test_wrong_base_catches_a_load_that_writes_before_it_looks(bad):
    trainer = Trainer()
    receiver = loaded(trainer)
    before = state(receiver)
    base = {name: w for name, w in (weights(seed=5) | bad).items() if w is not None}
    with pytest.raises(ShapeMismatch, match=next(iter(bad))):
        receiver.load("run", 9, base)
    assert state(receiver) == before
    assert receiver.apply(trainer.step()) is True


def test_base_from_a_file_catches_a_receiver_that_needs_tensors(tmp_path):
    """Slices of an open safetensors file, read part by part into shards."""
    trainer = Trainer()
    path = tmp_path / "base.safetensors"
    safetensors.torch.save_file(trainer.weights, path)
    parts = [(slice(0, 2), slice(0, 8)), (slice(2, 6), slice(0, 3)), (slice(2, 6), slice(3, 8))]
    fused = torch.full((6, 8), 7, dtype=torch.bfloat16)
    places = [Place("q", 6, 8, *at, fused[at]) for at in parts]
    receiver = Receiver(places)
    with safetensors.safe_open(path, "pt") as file:
        receiver.load("run", 4, {name: file.get_slice(name) for name in file.keys()})  # noqa: SIM118
    assert raw(fused) == nearest_bfloat16(trainer.weights["q"])
    with safetensors.safe_open(path, "pt") as file, pytest.raises(ShapeMismatch):
        receiver.load("run", 4, {"q": file.get_slice("k")})
    assert receiver.version == 4


def test_full_sync_catches_a_duplicate_that_is_taken_for_the_last_update():
    """A second base at the same version forgets the update that led there."""
    trainer = Trainer()
    receiver = loaded(trainer)
    first = trainer.step()
    receiver.apply(first)
    receiver.load("new run", 1, trainer.weights)
    with pytest.raises(WrongRun):
        receiver.apply(first)
    with pytest.raises(VersionGap):
        receiver.apply(replace(first, run="new run"))
    assert receiver.apply(update(1, run="new run")) is True


def test_unknown_mode_is_bad_input():
    with pytest.raises(InputError, match="fast"):
        engine(mode="fast")


class Engine:
    """A fake engine with vLLM's sleep levels (1: weights offloaded, 2: discarded)."""

    def __init__(self, trainer):
        self.receiver = loaded(trainer)

    def sleep(self, level):
        if level == 2:
            for place in self.receiver.places:
                place.served.fill_(float("nan"))
            self.receiver.forget("its weights were discarded (sleep level 2)")

    def reload(self, base):
        for place in self.receiver.places:
            place.served.copy_(base[place.layer])
        self.receiver.forget("its weights were loaded from disk")

    def generate(self):
        return self.receiver.require_version()


@pytest.mark.parametrize("event", ["sleep", "reload"])
def test_a5_sleep_and_reload_catch_an_update_on_top_of_other_weights(event):
    trainer = Trainer()
    base = weights()
    rollout = Engine(trainer)
    for version in (1, 2, 3):
        assert rollout.receiver.apply(trainer.step()) is True
        assert rollout.generate() == version
    rollout.sleep(1)
    assert rollout.generate() == 3  # level 1 brings the same weights back
    rollout.sleep(2) if event == "sleep" else rollout.reload(base)
    for act in (rollout.generate, lambda: rollout.receiver.apply(trainer.step())):
        with pytest.raises(NeedsFullSync, match="discarded" if event == "sleep" else "disk"):
            act()
    rollout.receiver.load("run", trainer.version, trainer.weights)
    assert rollout.generate() == 4
    expected = hashlib.sha256(b"".join(nearest_bfloat16(w) for w in trainer.weights.values()))
    assert rollout.receiver.digest() == expected.hexdigest()


# What is served


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_200_updates_catch_rounding_that_adds_up(dtype):
    """The trainer's weights, cast: exact to the bit. Plain drifts, unless it serves float32."""
    trainer = Trainer()
    exact, plain = loaded(trainer, dtype=dtype), loaded(trainer, dtype=dtype, mode="plain")
    for _ in range(200):
        thin = ThinUpdate.from_bytes(trainer.step(scale=1e-3).to_bytes())
        assert exact.apply(thin)
        assert plain.apply(thin)
    assert exact.version == plain.version == 200
    for place in exact.places:
        w = trainer.weights[place.layer]
        numpy_dtype = {torch.float16: np.float16, torch.float32: np.float32}.get(dtype)
        cast = w.numpy().astype(numpy_dtype).tobytes() if numpy_dtype else nearest_bfloat16(w)
        assert raw(place.served) == cast
    assert (memory(exact) == memory(plain)) == (dtype == torch.float32)
    assert all(odd == (0, 0.0) for odd in exact.difference(trainer.weights).values())
    drift = [odd for odd, _ in plain.difference(trainer.weights).values()]
    assert (sum(drift) > 50) == (dtype != torch.float32)  # of 165 weights
    assert (exact.digest() == plain.digest()) == (dtype == torch.float32)


def test_a7_small_steps_catch_a_served_copy_that_swallows_them():
    """W = 0.5, U A = 2e-4 everywhere, 1000 times: bfloat16 spacing at 0.3 is 2^−9. With k = r = 1,
    A is one sign, and a fixed draw keeps it. Rounding to 2^−19 wanders by σ ≤ ½·2^−19·√1000 = 3e-5.
    Adding to bfloat16 stays at 0.5: the step is below half of 2^−9, its spacing below 0.5.
    """
    layer = ThinLayer("x", 16, 1, "x")
    sign = reference["sign"](0, 0, seed=3, draw=0, path="x")
    engines = {mode: engine(mode=mode, layers=(layer,)) for mode in ("exact", "plain")}
    for receiver in engines.values():
        receiver.load("run", 0, {"x": torch.full((16, 1), 0.5)})
    for base in range(1000):
        U = torch.full((16, 1), 2e-4 * sign)
        thin = ThinUpdate.round(U, [layer], run="run", base=base, seed=3, draw=0)
        for receiver in engines.values():
            receiver.apply(thin)
    target = np.frombuffer(nearest_bfloat16(torch.tensor([0.3])), np.int16).item()
    found = {m: receiver.places[0].served for m, receiver in engines.items()}
    steps = found["exact"].view(torch.int16).int() - target  # neighbours' bits differ by one
    assert steps.abs().max() <= 1
    assert (found["plain"] == 0.5).all()  # negative control
    loop = torch.tensor(0.5, dtype=torch.bfloat16)
    for _ in range(1000):
        loop -= 2e-4
    assert loop == 0.5


def test_shards_catch_receivers_that_differ_by_what_they_hold():
    """Rows over two engines and columns over two: together the bits of one."""
    trainer = Trainer()
    whole = loaded(trainer)
    both = {x.name: torch.zeros(x.d, x.k, dtype=torch.bfloat16) for x in LAYERS}
    cuts = {"q": (4, None), "k": (2, None), "o": (None, 5)}
    ranks = []
    for rank in range(2):
        places = []
        for x in LAYERS:
            row, column = cuts[x.name]
            halves = [(0, n if c is None else c, n) for c, n in ((row, x.d), (column, x.k))]
            at = [
                slice(h[rank], h[rank + 1]) if c is not None else slice(0, h[2])
                for h, c in zip(halves, (row, column), strict=True)
            ]
            places.append(Place(x.name, x.d, x.k, *at, both[x.name][at[0], at[1]]))
        ranks.append(Receiver(places))
        ranks[-1].load("run", 0, trainer.weights)
    for _ in range(5):
        thin = trainer.step()
        for receiver in (whole, *ranks):
            receiver.apply(thin)
    assert serves(whole, trainer.weights)
    for place in whole.places:
        assert raw(both[place.layer]) == raw(place.served)


def test_difference_counts_bits_and_measures_gaps():
    trainer = Trainer()
    receiver = loaded(trainer)
    assert set(receiver.difference(trainer.weights).values()) == {(0, 0.0)}
    served = {place.layer: place.served for place in receiver.places}
    old = served["k"][2, 3].item()
    served["k"][2, 3] = old + 1.0
    served["k"][0, 0] += 0.25
    served["o"][0, 0] = 0.0
    zero = trainer.weights | {"o": trainer.weights["o"].clone()}
    zero["o"][0, 0] = -0.0  # another bit, no gap
    found = receiver.difference(zero)
    assert found["q"] == (0, 0.0)
    assert found["k"][0] == 2
    assert found["k"][1] == served["k"][2, 3].item() - old
    assert found["o"] == (1, 0.0)
    served["q"][0, 0] = torch.nan
    count, gap = receiver.difference(zero)["q"]
    assert (count, math.isnan(gap)) == (1, True)


def test_digest_catches_one_bit_and_the_sign_of_zero():
    receiver = loaded(Trainer())
    seen = {receiver.digest()}
    word = receiver.places[2].served.view(torch.int16)
    word[6, 10] ^= 1
    seen.add(receiver.digest())
    word[6, 10] = 0
    seen.add(receiver.digest())
    word[6, 10] = -(2**15)
    seen.add(receiver.digest())
    assert len(seen) == 4
    served = b"".join(raw(place.served) for place in receiver.places)
    assert receiver.digest() == hashlib.sha256(served).hexdigest()


def test_shadows_catch_an_engine_that_serves_before_it_was_loaded():
    """Before the first full sync: no version, the served weights as they were, no number in the
    shadow that could be taken for a weight."""
    receiver = engine()
    assert receiver.version is None
    assert all((place.served == 7).all() for place in receiver.places)
    assert all(slot.weight.isnan().all() for slot in receiver.slots)
    with pytest.raises(NeedsFullSync, match="not had a full sync yet"):
        receiver.apply(update(0))
    assert all((place.served == 7).all() for place in receiver.places)
