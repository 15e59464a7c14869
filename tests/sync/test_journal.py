"""The journal: weights of any version to the bit, crashes at any moment, damage of any byte."""

import errno
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import textwrap
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from logra_lab.errors import InputError
from logra_lab.sync.errors import (
    DigestMismatch,
    PayloadError,
    ShapeMismatch,
    SyncError,
    TornFile,
    VersionGap,
    WrongRun,
)
from logra_lab.sync.journal import Journal
from logra_lab.sync.receiver import Place, Receiver
from logra_lab.sync.update import ThinUpdate
from logra_lab.sync.wire import ThinLayer

sign = runpy.run_path(str(Path(__file__).parents[1] / "reference.py"))["sign"]

RUN, RANK = "run-1", 3
LAYERS = (
    ThinLayer("a.q_proj", 3, 5, "a.q_proj"),
    ThinLayer("a.k_proj", 2, 5, "a.q_proj"),  # reads the same input, so it shares A
    ThinLayer("a.o_proj", 4, 3, "a.o_proj"),
)


def first_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {x.name: torch.randn(x.d, x.k, generator=generator) for x in LAYERS}


def make(version, *, run=RUN, scale=0.3, seed=5, layers=LAYERS):
    """The update that leads to `version`; the same arguments give the same bytes."""
    generator = torch.Generator().manual_seed(1000 * seed + version)
    U = scale * torch.randn(sum(x.d for x in layers), RANK, generator=generator)
    return ThinUpdate.round(U, layers, run=run, base=version - 1, seed=seed, draw=version)


def by_hand(weights, updates):
    """W − (integers · 2^e) @ signs, entry by entry: the product exact, one float32 rounding a step
    (section 4 of the method), with the scalar sign of tests/reference.py."""
    weights = {name: w.numpy().copy() for name, w in weights.items()}
    for update in updates:
        row = 0
        for layer in update.layers:
            for i in range(layer.d):
                q, e = update.values[row].tolist(), int(update.exponents[row])
                for j in range(layer.k):
                    signs = [
                        sign(c, j, seed=update.seed, draw=update.draw, path=layer.site)
                        for c in range(RANK)
                    ]
                    exact = sum(a * b for a, b in zip(q, signs, strict=True)) * 2.0**e
                    w = weights[layer.name]
                    w[i, j] = np.float32(w[i, j]) - np.float32(exact)
                row += 1
    return {name: torch.from_numpy(w) for name, w in weights.items()}


def fill(folder, last, version=0):
    """A journal with a base at `version` and updates up to `last`."""
    weights = by_hand(first_weights(), [make(v) for v in range(1, version + 1)])
    journal = Journal.create(folder, RUN, version, weights)
    for v in range(version + 1, last + 1):
        assert journal.append(make(v))
    return journal


@pytest.fixture(scope="module")
def truth():
    """Weights of versions 0 to 8, by hand."""
    return [by_hand(first_weights(), [make(v) for v in range(1, n + 1)]) for n in range(9)]


def same(weights, expected):
    return weights.keys() == expected.keys() and all(
        torch.equal(w.view(torch.int32), expected[name].view(torch.int32))
        for name, w in weights.items()
    )


def names(folder):
    return sorted(os.listdir(folder))


# --- what it is for --------------------------------------------------------------------------


def test_every_version_is_that_of_a_loop_over_entries_to_the_bit(tmp_path, truth):
    fill(tmp_path / "j", 8)
    journal = Journal.open(tmp_path / "j")
    assert journal.versions() == list(range(9))
    assert (journal.run, journal.dropped) == (RUN, [])
    for version, expected in enumerate(truth):
        found, weights = journal.weights(version)
        assert found == version
        assert same(weights, expected)
    assert not same(truth[7], truth[8])  # each step changes something
    assert same(journal.weights()[1], truth[8])
    journal.verify()


def test_weights_are_a_copy_and_not_a_view_of_the_mapped_file(tmp_path, truth):
    """A view would read whatever becomes of the file, or die by SIGBUS where it is cut."""
    journal = fill(tmp_path, 1)
    _, weights = journal.weights(0)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path) not in maps.read_text()
    for weight in weights.values():
        weight.fill_(7)
    assert same(journal.weights(0)[1], truth[0])


def test_bytes_that_travelled_are_kept_as_they_are_and_the_size_is_that_of_the_files(tmp_path):
    journal = fill(tmp_path, 0)
    data = make(1).to_bytes()
    assert journal.append(data)
    assert (tmp_path / "00000001.thin").read_bytes() == data
    assert journal.size == sum(path.stat().st_size for path in tmp_path.iterdir())
    assert Journal.open(tmp_path).size == journal.size
    assert journal.update(1).digest == make(1).digest


def test_a_base_of_views_and_of_transposed_weights_is_what_they_show(tmp_path):
    buffer = torch.arange(30.0).reshape(5, 6)
    weights = {"a": buffer[:2], "b": buffer[2:], "c": torch.arange(6.0).reshape(2, 3).T}
    found = Journal.create(tmp_path, RUN, 3, weights).weights()
    assert found[0] == 3
    assert all(torch.equal(found[1][name], weights[name]) for name in weights)


# --- what may be appended --------------------------------------------------------------------


def test_a_trainer_that_resumes_may_repeat_its_steps_but_not_take_others(tmp_path):
    journal = fill(tmp_path, 3)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert [journal.append(make(v)) for v in (1, 3, 2)] == [False] * 3
    with pytest.raises(DigestMismatch, match="version 3 is held with digest"):
        journal.append(make(3, scale=0.31))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert journal.append(make(4))


OTHER = (*LAYERS[:2], ThinLayer("a.o_proj", 4, 4, "a.o_proj"))


@pytest.mark.parametrize(
    ("update", "error", "said"),
    [
        (make(4), VersionGap, "from version 3.*ends with 2"),
        (make(3, run="run-2"), WrongRun, "of run 'run-2'.*of 'run-1'"),
        (make(3, layers=OTHER), ShapeMismatch, r"'a.o_proj': \(4, 4\), expected \(4, 3\)"),
        (make(3, layers=LAYERS[:2]), ShapeMismatch, "'a.o_proj': absent"),
        (make(3).to_bytes()[:-1], TornFile, "declares"),
        (make(3).to_bytes() + b"x", PayloadError, "declares"),
        (b"", TornFile, "too short"),
    ],
    ids=["gap", "run", "shape", "layer", "cut", "long", "empty"],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(tmp_path, update, error, said):
    journal = fill(tmp_path, 2)
    before = names(tmp_path)
    with pytest.raises(error, match=said):
        journal.append(update)
    assert names(tmp_path) == before
    assert journal.append(make(3))


def test_updates_behind_the_base_are_a_gap_because_nothing_says_whether_they_are_the_same(tmp_path):
    journal = fill(tmp_path, 6, version=4)
    with pytest.raises(VersionGap, match="from version 1"):
        journal.append(make(2))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({}, "got none"),
        ({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, r"'a' is torch.bfloat16 \[2, 3\]"),
        ({"a": torch.zeros(2, 3, dtype=torch.float64)}, "float64"),
        ({"a": torch.zeros(3)}, r"\[3\]"),
        ({"a": torch.zeros(0, 3)}, r"\[0, 3\]"),
    ],
)
def test_a_base_is_float32_matrices(tmp_path, weights, said):
    with pytest.raises(InputError, match=said):
        Journal.create(tmp_path / "new", RUN, 0, weights)
    assert not (tmp_path / "new").exists()


def test_create_and_open_say_what_is_there_instead(tmp_path):
    fill(tmp_path / "j", 1)
    with pytest.raises(InputError, match="a journal already"):
        Journal.create(tmp_path / "j", RUN, 0, first_weights())
    with pytest.raises(InputError, match="1 to 128 characters"):
        Journal.create(tmp_path / "k", "", 0, first_weights())
    with pytest.raises(InputError, match="No such file"):
        Journal.open(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no journal here"):
        Journal.open(tmp_path / "empty")
    (tmp_path / "j" / "base-00000000.safetensors").unlink()
    with pytest.raises(InputError, match="updates but no base"):
        Journal.open(tmp_path / "j")


# --- bounded ---------------------------------------------------------------------------------


def test_rebasing_keeps_the_folder_bounded_and_the_later_updates(tmp_path, truth):
    journal = fill(tmp_path, 0)
    sizes = []
    for version in range(1, 9):
        journal.append(make(version))
        if version % 3 == 0:
            journal.rebase(version - 1, truth[version - 1])
            assert names(tmp_path) == [
                f"{version:08d}.thin",
                f"base-{version - 1:08d}.safetensors",
            ]
            assert journal.versions() == [version - 1, version]
            assert same(journal.weights(version)[1], truth[version])
        sizes.append(journal.size)
    assert max(sizes) <= sizes[0] + 3 * (tmp_path / "00000008.thin").stat().st_size
    assert same(Journal.open(tmp_path).weights()[1], truth[8])


def test_a_journal_can_be_compacted_from_itself(tmp_path, truth):
    journal = fill(tmp_path, 4)
    journal.rebase(*journal.weights())
    assert names(tmp_path) == ["base-00000004.safetensors"]
    assert same(journal.weights()[1], truth[4])
    assert journal.append(make(5))
    assert same(journal.weights()[1], truth[5])


def test_a_base_beyond_the_last_update_bridges_the_steps_that_were_not_recorded(tmp_path, truth):
    journal = fill(tmp_path, 2)
    journal.rebase(6, truth[6])
    assert journal.append(make(7))
    assert journal.versions() == [6, 7]
    assert same(journal.weights()[1], truth[7])


def test_a_base_of_another_model_is_refused(tmp_path):
    journal = fill(tmp_path, 2)
    with pytest.raises(ShapeMismatch, match=r"the base at version 2: .*'a.k_proj': absent"):
        journal.rebase(2, {k: v for k, v in first_weights().items() if k != "a.k_proj"})
    assert journal.versions() == [0, 1, 2]


def test_a_trainer_that_goes_back_cuts_and_then_takes_other_steps(tmp_path, truth):
    journal = fill(tmp_path, 4)
    other = make(3, scale=0.7)
    with pytest.raises(VersionGap, match="does not hold version 9"):
        journal.cut(9)
    journal.cut(2)
    assert journal.versions() == [0, 1, 2]
    assert journal.append(other)
    assert same(Journal.open(tmp_path).weights()[1], by_hand(truth[2], [other]))


# --- damage ----------------------------------------------------------------------------------


def put(path, place, byte):
    with open(path, "rb+") as file:
        file.seek(place)
        file.write(bytes([byte]))


def test_a_flip_of_any_byte_of_any_file_is_found_and_the_file_named(tmp_path):
    """Both one bit and all bits of each byte; headers, padding, numbers and digests alike."""
    fill(tmp_path, 2)
    tried = 0
    for path in sorted(tmp_path.iterdir()):
        data = path.read_bytes()
        for place in range(len(data)):
            for flip in (1 << place % 8, 255):
                put(path, place, data[place] ^ flip)
                with pytest.raises(DigestMismatch, match=path.name):
                    Journal.open(tmp_path).verify()
                tried += 1
            put(path, place, data[place])
    assert tried == 2 * sum(path.stat().st_size for path in tmp_path.iterdir())
    Journal.open(tmp_path).verify()


def test_damage_is_found_by_whoever_uses_the_file_not_only_by_verify(tmp_path, truth):
    fill(tmp_path, 3)
    served = {name: torch.zeros_like(w) for name, w in truth[0].items()}
    for name in ("base-00000000.safetensors", "00000002.thin"):
        path = tmp_path / name
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # the last number
        journal = Journal.open(tmp_path)
        with pytest.raises(DigestMismatch, match=name):
            journal.weights()
        receiver = Receiver([Place.whole(name, w) for name, w in served.items()])
        with pytest.raises(DigestMismatch, match=name):
            journal.replay_into(receiver)
        assert receiver.version == (None if name.startswith("base") else 1)  # never half a step
        path.write_bytes(data)


def test_a_last_record_cut_off_anywhere_is_reported_dropped_and_replaced(tmp_path, truth):
    fill(tmp_path, 3)
    path = tmp_path / "00000003.thin"
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        journal = Journal.open(tmp_path)
        assert journal.versions() == [0, 1, 2]
        assert len(journal.dropped) == 1
        assert str(path) in journal.dropped[0]
        assert path.stat().st_size == size  # opening writes nothing
        if size % 97 == 0:
            assert same(journal.weights()[1], truth[2])
            assert journal.append(data)
            assert path.read_bytes() == data
            assert Journal.open(tmp_path).dropped == []


def test_only_the_last_record_may_be_cut_off(tmp_path, truth):
    fill(tmp_path, 3)
    path = tmp_path / "00000002.thin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TornFile, match=r"00000002\.thin"):
        Journal.open(tmp_path)


def test_a_cut_base_is_dropped_where_an_older_one_reaches_as_far_and_an_error_elsewhere(
    tmp_path, truth
):
    journal = fill(tmp_path, 3)
    base = tmp_path / "base-00000003.safetensors"
    base.write_bytes((tmp_path / "base-00000000.safetensors").read_bytes()[:-4])
    journal = Journal.open(tmp_path)
    assert journal.versions() == [0, 1, 2, 3]
    assert base.name in journal.dropped[0]
    assert same(journal.weights()[1], truth[3])
    assert journal.append(make(4))
    assert not base.exists()
    only = tmp_path / "base-00000000.safetensors"
    only.write_bytes(only.read_bytes()[:-1])
    with pytest.raises(TornFile, match=r"base-00000000.*no other base"):
        Journal.open(tmp_path)


@pytest.mark.parametrize("missing", [1, 2])
def test_a_missing_record_in_the_middle_is_a_gap(tmp_path, missing):
    fill(tmp_path, 3)
    (tmp_path / f"{missing:08d}.thin").unlink()
    with pytest.raises(VersionGap, match=rf"0000000{missing}\.thin is missing"):
        Journal.open(tmp_path)


def test_files_of_other_runs_models_and_versions_are_told_apart(tmp_path):
    fill(tmp_path, 2)
    path = tmp_path / "00000002.thin"
    for data, error, said in [
        (make(3).to_bytes(), VersionGap, "holds version 3"),
        (make(2, run="run-2").to_bytes(), WrongRun, "of run 'run-2'"),
        (make(2, layers=OTHER).to_bytes(), ShapeMismatch, "a.o_proj"),
        ((tmp_path / "base-00000000.safetensors").read_bytes(), PayloadError, "thin-update-1"),
        (safetensors.torch.save(first_weights()), PayloadError, "no digest"),
    ]:
        path.write_bytes(data)
        with pytest.raises(error, match=rf"00000002\.thin.*{said}"):
            Journal.open(tmp_path)


# --- catching up -----------------------------------------------------------------------------


def engine(truth, dtype):
    served = {name: torch.zeros_like(w, dtype=dtype) for name, w in truth[0].items()}
    receiver = Receiver([Place.whole(name, w) for name, w in served.items()])
    loads = []
    load = receiver.load
    receiver.load = lambda run, version, weights: (
        loads.append(version),
        load(run, version, weights),
    )
    return receiver, served, loads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [None, *range(7)])
def test_an_engine_catches_up_from_every_version_to_every_version(tmp_path, truth, dtype, start):
    """Bases at 2 (kept by hand beside the newer one) and 4: as between the two halves of rebase."""
    fill(tmp_path, 6, version=2)
    Journal.create(tmp_path / "b", RUN, 4, truth[4])
    os.rename(tmp_path / "b/base-00000004.safetensors", tmp_path / "base-00000004.safetensors")
    journal = Journal.open(tmp_path)
    for target in range(2, 7):
        receiver, served, loads = engine(truth, dtype)
        if start is not None:
            receiver.load(RUN, start, truth[start])
            loads.clear()
        assert journal.replay_into(receiver, target) == target
        cast = {name: w.to(dtype).float() for name, w in truth[target].items()}
        assert same({name: w.float() for name, w in served.items()}, cast)
        assert (receiver.run, receiver.version) == (RUN, target)
        reachable = start is not None and 2 <= start <= target
        assert loads == ([] if reachable else [4 if target >= 4 else 2])
        assert journal.replay_into(receiver, target) == target
        assert len(loads) == (not reachable)  # nothing more to do


def test_versions_that_are_not_held_are_a_gap(tmp_path, truth):
    journal = fill(tmp_path, 4, version=2)
    receiver, _, _ = engine(truth, torch.float32)
    for version in (1, 5):
        with pytest.raises(VersionGap, match=f"hold version {version}, but 2 to 4"):
            journal.weights(version)
        with pytest.raises(VersionGap, match=f"hold version {version}, but 2 to 4"):
            journal.replay_into(receiver, version)
    assert receiver.version is None


def test_an_engine_that_took_another_step_is_brought_back_over_a_base(tmp_path, truth):
    journal = fill(tmp_path, 3)
    receiver, served, loads = engine(truth, torch.float32)
    journal.replay_into(receiver, 1)
    receiver.apply(make(2, scale=0.7))  # a step that the trainer took back
    journal.replay_into(receiver)
    assert same(served, truth[3])
    assert loads == [0, 0]


def test_a_base_says_which_update_led_to_it_so_that_an_engine_that_took_another_is_brought_back(
    tmp_path, truth
):
    """The engine took a step 2 that the trainer took back; the trainer's own step 2 became a base,
    after which no update to version 2 is held."""
    journal = fill(tmp_path, 2)
    receiver, served, loads = engine(truth, torch.float32)
    other, other_served, other_loads = engine(truth, torch.float32)
    journal.replay_into(receiver, 1)
    journal.replay_into(other, 2)  # the same step 2
    receiver.apply(make(2, scale=0.7))
    journal.rebase(2, truth[2])
    journal = Journal.open(tmp_path)
    journal.rebase(2, truth[2])  # once more: what led there is not forgotten
    journal.append(make(3))
    for follower in (receiver, other):
        Journal.open(tmp_path).replay_into(follower)
    assert same(served, truth[3])
    assert loads == [0, 2]
    assert same(other_served, truth[3])
    assert other_loads == [0]


def test_an_engine_of_another_run_has_to_forget_it_first(tmp_path, truth):
    journal = fill(tmp_path, 2)
    receiver, served, _ = engine(truth, torch.float32)
    receiver.load("run-2", 1, truth[1])
    with pytest.raises(WrongRun, match=r"'run-2'.*'run-1'.*forget"):
        journal.replay_into(receiver)
    assert same(served, truth[1])
    receiver.forget("it changes runs")
    journal.replay_into(receiver)
    assert same(served, truth[2])


def test_shards_read_their_own_rows_and_columns_of_the_base_and_get_the_same_bits(tmp_path, truth):
    journal = fill(tmp_path, 3)
    for rows, columns in [(slice(0, 2), slice(0, 3)), (slice(2, 4), slice(1, 3))]:
        shard = torch.zeros(2, columns.stop - columns.start)
        receiver = Receiver([Place("a.o_proj", 4, 3, rows, columns, shard)])
        with journal.base(0) as slices:
            receiver.load(RUN, 0, {"a.o_proj": Only(slices["a.o_proj"], (rows, columns))})
        assert torch.equal(shard, truth[0]["a.o_proj"][rows, columns])


class Only:
    """A slice of the base that may be read in one place."""

    def __init__(self, part, allowed):
        self.part, self.allowed = part, allowed

    def get_shape(self):
        return self.part.get_shape()

    def __getitem__(self, index):
        assert index == self.allowed
        return self.part[index]


def test_a_tensor_parallel_pair_catches_up_to_the_bits_of_the_whole(tmp_path, truth):
    journal = fill(tmp_path, 3)
    for part in (0, 1):
        places, served = [], {}
        for layer in LAYERS:
            half = layer.k // 2
            columns = (slice(0, half), slice(half, layer.k))[part]
            served[layer.name] = torch.zeros(layer.d, columns.stop - columns.start)
            places.append(
                Place(layer.name, layer.d, layer.k, slice(0, layer.d), columns, served[layer.name])
            )
        receiver = Receiver(places)
        journal.replay_into(receiver)
        for place in places:
            assert torch.equal(place.served, truth[3][place.layer][:, place.columns])


def test_a_reader_is_told_when_another_process_put_a_new_base_meanwhile(tmp_path, truth):
    writer = fill(tmp_path, 3)
    reader = Journal.open(tmp_path)
    writer.rebase(3, truth[3])
    for action in (reader.weights, reader.verify, lambda: reader.update(2)):
        with pytest.raises(SyncError, match="gone since the journal was opened"):
            action()
    assert same(Journal.open(tmp_path).weights()[1], truth[3])


def test_a_second_writer_is_noticed(tmp_path):
    first = fill(tmp_path, 1)
    second = Journal.open(tmp_path)
    first.append(make(2))
    with pytest.raises(SyncError, match="by another process"):
        second.append(make(2))
    assert second.append(make(2)) is False  # it has looked again


# --- crashes ---------------------------------------------------------------------------------

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.link", "os.truncate"}


class Watch:
    """Counts system calls on a folder and does something before the n-th one.

    Python reports its calls to audit hooks by itself, however the code spells them; fsync and
    safetensors' own writer are not among them and are wrapped.
    """

    folder: str | None = None

    def __init__(self):
        sys.addaudithook(self.hook)

    def hook(self, event, arguments):
        if self.folder is not None and event in EVENTS:
            path = arguments[0]
            if isinstance(path, str | Path) and str(path).startswith(self.folder):
                self.count()

    def count(self):
        self.seen += 1
        if self.seen == self.at:
            self.folder, folder = None, self.folder  # what follows is not counted
            self.act(folder)

    def start(self, folder, at, act):
        self.seen, self.at, self.act = 0, at, act
        self.folder = str(folder)

    def wrap(self, patch):
        fsync, save_file = os.fsync, safetensors.torch.save_file

        def counted_fsync(descriptor):
            if self.folder is not None:
                self.count()
            fsync(descriptor)

        def counted_save(tensors, path, metadata):
            """Its two moments: half of its own temporary file, and all of it, not yet renamed."""
            if self.folder is not None:
                data = safetensors.torch.save(tensors, metadata)
                rest = Path(path).with_name(".tmpAb3xY9")
                for part in (data[: len(data) // 2], data):
                    folder, self.folder = self.folder, None
                    rest.write_bytes(part)
                    self.folder = folder
                    self.count()
                folder, self.folder = self.folder, None
                rest.unlink()
                self.folder = folder
            save_file(tensors, path, metadata)

        patch(os, "fsync", counted_fsync)
        patch(safetensors.torch, "save_file", counted_save)


watch = Watch()


def die(_folder):
    os._exit(9)


def crash_at(call, folder, action):
    """Do `action` in a forked child that dies, with no clean-up, before its call-th system call."""
    child = os.fork()
    if child == 0:
        try:
            watch.wrap(setattr)
            watch.start(folder, call, die)
            action()
            os._exit(0)
        except Exception as error:  # noqa: BLE001  a forked child must not go on as pytest
            os.write(2, repr(error).encode())
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), "the child failed by something else than the crash"
    return status == 9


def base_at_third(folder):
    Journal.create(folder / "b", RUN, 3, WEIGHTS[3])
    os.rename(folder / "b/base-00000003.safetensors", folder / "base-00000003.safetensors")
    os.rmdir(folder / "b")


def torn_third(folder):
    path = folder / "00000003.thin"
    path.write_bytes(path.read_bytes()[:-5])


ACTIONS = {
    # what: (files before, what the child does, versions that may be found then, least calls)
    "append": (3, None, lambda j: j.append(DATA[4]), [[0, 1, 2, 3], [0, 1, 2, 3, 4]], 5),
    "append after a torn record": (
        3, torn_third, lambda j: j.append(DATA[3]), [[0, 1, 2], [0, 1, 2, 3]], 8,
    ),
    "rebase on the last": (
        3, None, lambda j: j.rebase(3, WEIGHTS[3]), [[0, 1, 2, 3], [3]], 12,
    ),
    "rebase in the middle": (
        3, None, lambda j: j.rebase(2, WEIGHTS[2]), [[0, 1, 2, 3], [2, 3]], 12,
    ),
    "rebase further on": (
        3, None, lambda j: j.rebase(6, WEIGHTS[6]), [[0, 1, 2, 3], [0, 1, 2, 3, 6], [6]], 12,
    ),
    "cut": (
        3, None, lambda j: j.cut(1), [[0, 1, 2, 3], [0, 1, 2], [0, 1]], 4,
    ),
    "cut across a base": (
        4, base_at_third, lambda j: j.cut(1),
        [[0, 1, 2, 3, 4], [0, 1, 2, 3], [0, 1, 3], [0, 1]], 6,
    ),
}  # fmt: skip
DATA = {v: make(v).to_bytes() for v in range(1, 9)}
WEIGHTS = {}


@pytest.fixture(autouse=True)
def _weights(truth):
    WEIGHTS.update(enumerate(truth))


@pytest.mark.parametrize("what", ACTIONS)
def test_a_crash_before_any_system_call_leaves_a_journal_that_opens_and_goes_on(
    tmp_path, truth, what
):
    last, prepare, action, allowed, least = ACTIONS[what]
    reached = set()
    for call in range(1, 100):
        folder = tmp_path / str(call)
        fill(folder, last)
        if prepare:
            prepare(folder)
        journal = Journal.open(folder)
        died = crash_at(call, folder, lambda journal=journal: action(journal))
        after = Journal.open(folder)
        assert after.versions() in allowed
        reached.add(tuple(after.versions()))
        after.verify()
        for version in after.versions():
            assert same(after.weights(version)[1], truth[version])
        action(after)  # done again, it comes to the same end, with nothing left over
        assert after.versions() == allowed[-1]
        assert same(after.weights()[1], truth[after.versions()[-1]])
        after.append(DATA[after.versions()[-1] + 1])
        kept = [*after.contents.bases.values(), *after.contents.updates.values()]
        assert names(folder) == sorted(entry.path.name for entry in kept)
        if not died:
            break
    else:
        pytest.fail("the child never came to its end")
    assert call > least
    assert reached == {tuple(versions) for versions in allowed}  # each state was met


def test_a_crash_in_create_leaves_no_journal_or_a_whole_one(tmp_path, truth):
    for call in range(1, 50):
        folder = tmp_path / str(call)
        died = crash_at(call, folder, lambda f=folder: Journal.create(f, RUN, 0, truth[0]))
        try:
            journal = Journal.open(folder)
        except InputError:
            journal = Journal.create(folder, RUN, 0, truth[0])
        assert same(journal.weights()[1], truth[0])
        journal.append(make(1))
        assert names(folder) == ["00000001.thin", "base-00000000.safetensors"]
        if not died:
            break
    assert call > 6


WRITER = """
    import runpy, sys
    from pathlib import Path
    from logra_lab.sync.journal import Journal
    test = runpy.run_path(sys.argv[1], run_name="writer")
    journal = Journal.open(sys.argv[2])
    print(journal.versions()[-1], flush=True)
    for version in range(journal.versions()[-1] + 1, 100_000):
        journal.append(test["make"](version))
        if version % 7 == 0:
            journal.rebase(*journal.weights())
"""


def test_a_writer_killed_in_the_middle_of_appends_and_rebases_goes_on_and_loses_nothing(tmp_path):
    folder = tmp_path / "j"
    Journal.create(folder, RUN, 0, first_weights())
    ends = [0]
    for kill_after in (25, 20):
        command = [sys.executable, "-c", textwrap.dedent(WRITER), __file__, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            try:
                assert int(writer.stdout.readline()) == ends[-1]
                while newest(folder) < ends[-1] + kill_after:
                    assert writer.poll() is None
            finally:
                writer.kill()
        assert writer.returncode == -signal.SIGKILL
        seen = newest(folder)
        journal = Journal.open(folder)
        journal.verify()
        ends.append(journal.versions()[-1])
        assert ends[-1] >= seen
        assert len(names(folder)) < 20  # 7 updates, a base or two, what the kill left over
    assert all(a < b for a, b in pairwise(ends))
    clean = Journal.create(tmp_path / "clean", RUN, 0, first_weights())
    for version in range(1, ends[-1] + 1):
        clean.append(make(version))
    assert same(journal.weights()[1], clean.weights()[1])


def newest(folder):
    """The last version whose record has its name, by the names alone."""
    found = [name.removeprefix("base-") for name in names(folder) if not name.startswith(".tmp")]
    return max(int(name[:8]) for name in found if not name.endswith(".tmp"))


# --- refused writes --------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("what", ACTIONS)
def test_a_write_that_the_system_refuses_is_one_error_and_the_object_says_what_is_there(
    tmp_path, truth, monkeypatch, what, code
):
    def refuse(folder):
        raise OSError(code, os.strerror(code), folder)

    last, prepare, action, allowed, _ = ACTIONS[what]
    watch.wrap(monkeypatch.setattr)
    for call in range(1, 100):
        folder = tmp_path / str(call)
        fill(folder, last)
        if prepare:
            prepare(folder)
        journal = Journal.open(folder)
        watch.start(folder, call, refuse)
        try:
            action(journal)
            done = watch.folder is not None  # it came to its end and nothing was refused
        except SyncError as error:
            assert os.strerror(code) in str(error)  # noqa: PT017  the call may also succeed
            assert "bytes free" in str(error)  # noqa: PT017
            done = False
        finally:
            watch.folder = None
        assert journal.versions() == Journal.open(folder).versions()
        assert journal.versions() in allowed
        action(journal)
        assert journal.versions() == allowed[-1]
        assert same(journal.weights()[1], truth[journal.versions()[-1]])
        if done:
            return
    pytest.fail("the action never came to its end")


def test_a_real_limit_of_the_system_inside_either_writer(tmp_path, truth):
    """RLIMIT_FSIZE makes the kernel itself refuse, also in safetensors' compiled writer."""
    journal = fill(tmp_path, 3)
    before = names(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for limit in (0, 10, 300):
        errors = []
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            for action in (
                lambda: journal.append(DATA[4]),
                lambda: journal.rebase(3, truth[3]),
                lambda: Journal.create(tmp_path / "new", RUN, 0, truth[0]),
            ):
                try:
                    action()
                except SyncError as error:
                    errors.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert len(errors) == 3
        assert all("File too large" in text for text in errors)
        os.rmdir(tmp_path / "new")  # empty: nothing half-written
        assert names(tmp_path) == before
    signal.signal(signal.SIGXFSZ, handler)
    assert journal.append(DATA[4])
    assert same(journal.weights()[1], truth[4])


def test_where_the_folder_is_a_file(tmp_path, truth):
    (tmp_path / "file").write_text("")
    with pytest.raises(SyncError, match=r"cannot be created.*File exists"):
        Journal.create(tmp_path / "file", RUN, 0, truth[0])
    with pytest.raises(InputError, match="Not a directory"):
        Journal.open(tmp_path / "file")


def test_a_folder_that_may_only_be_read_is_read_and_not_written(truth):
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        os.chmod(name, 0o755)
        fill(Path(name) / "j", 2)
        if user == 0:  # root may write everywhere
            os.seteuid(65534)
        else:
            os.chmod(Path(name) / "j", 0o555)
        try:
            journal = Journal.open(Path(name) / "j")
            assert same(journal.weights()[1], truth[2])
            for action in (lambda: journal.append(make(3)), lambda: journal.rebase(2, truth[2])):
                with pytest.raises(SyncError, match="Permission denied"):
                    action()
            assert journal.versions() == [0, 1, 2]
        finally:
            os.seteuid(user)
            os.chmod(Path(name) / "j", 0o755)
