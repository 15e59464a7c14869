"""Checkpoints: what may go in, what comes back; crashes, full disks and damage."""

import errno
import os
import subprocess
import sys
import textwrap
import zipfile
from enum import StrEnum
from pathlib import Path

import numpy as np
import pytest
import torch

from logra_lab import atomic
from logra_lab.errors import InputError
from logra_lab.rl import checkpoint
from logra_lab.rl.checkpoint import CheckpointError, load, previous_path, save


def state_of(step: int) -> dict:
    return {"step": step, "weights": {"w": torch.arange(6.0).reshape(2, 3) + step}, "log": [1, "a"]}


def step_in(path: Path) -> int | None:
    return load(path)["step"] if path.exists() else None


# --- values ---------------------------------------------------------------------------------


def test_values_come_back_as_written_and_tuples_as_lists(tmp_path):
    tensors = {
        str(dtype): torch.tensor([[0, 1], [2, 3]]).to(dtype)
        for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool)
    }
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    state = {
        "a": (1, (2.5, None)),
        "b": {3: "é\0"},
        "c": True,
        "n": 2**2038,
        "t": tensors,
        "odd": odd,
    }
    save(tmp_path / "c.pt", state)
    back = load(tmp_path / "c.pt")
    assert back["a"] == [1, [2.5, None]]
    assert back["b"] == {3: "é\0"}
    assert back["n"] == 2**2038
    assert back["c"] is True
    for name, tensor in tensors.items():
        assert back["t"][name].dtype == tensor.dtype
        assert torch.equal(back["t"][name], tensor)
    assert torch.equal(back["odd"].view(torch.int32), odd.view(torch.int32))  # to the bit


class Colour(StrEnum):
    red = "red"


@pytest.mark.parametrize(
    "value",
    [
        Colour.red,
        np.float64(1.0),  # a subclass of float that pickles as numpy's own class
        np.zeros(2),
        {1, 2},
        b"bytes",
        1j,
        torch.float32,
        torch.device("cpu"),
        Path("x"),
        lambda: 0,
        2**2040,  # pickle's LONG4, which the weights-only reader does not know
        torch.zeros(2, device="meta"),
        torch.zeros(2, 2).to_sparse(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused_by_key_path_before_a_byte_is_written(tmp_path, value):
    path = tmp_path / "c.pt"
    save(path, state_of(1))
    with pytest.raises(InputError, match=r"state\['outer'\]\[1\]\['inner'\]"):
        save(path, {"outer": [0, {"inner": value}]})
    assert step_in(path) == 1
    assert os.listdir(tmp_path) == ["c.pt"]


def test_keys_other_than_str_and_int_and_a_state_that_is_no_dict_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"state\['a'\].*\(1, 2\)"):
        save(tmp_path / "c.pt", {"a": {(1, 2): 0}})
    with pytest.raises(InputError, match="expected a dict, got list"):
        save(tmp_path / "c.pt", [1])


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path):
    big = torch.zeros(1_000_000)
    save(tmp_path / "c.pt", {"row": big[:10]})
    assert (tmp_path / "c.pt").stat().st_size < 10_000


def test_the_file_is_an_ordinary_torch_file_and_a_sound_zip(tmp_path):
    save(tmp_path / "c.pt", state_of(3))
    plain = torch.load(tmp_path / "c.pt", weights_only=True)
    assert plain["step"] == 3
    assert torch.equal(plain["weights"]["w"], state_of(3)["weights"]["w"])
    with zipfile.ZipFile(tmp_path / "c.pt") as archive:
        assert archive.testzip() is None
        assert archive.comment.startswith(b"logra-lab checkpoint 1 sha256:")


# --- rotation and crashes -------------------------------------------------------------------


def test_the_checkpoint_before_is_kept_as_prev(tmp_path):
    path = tmp_path / "c.pt"
    for step in (1, 2, 3):
        save(path, state_of(step))
    assert (step_in(path), step_in(previous_path(path))) == (3, 2)
    assert sorted(os.listdir(tmp_path)) == ["c.pt", "c.pt.prev"]


CALLS = ("open", "fsync", "link", "replace", "unlink")


def crash_at(call: int, path: Path, step: int, links: bool = True) -> bool:
    """Save in a forked child that dies, without any clean-up, just before its call-th system call.

    True when the child died there, False when the save came to its end before.
    """
    child = os.fork()
    if child == 0:
        try:
            seen = 0

            def counted(real):
                def wrapper(*arguments, **named):
                    nonlocal seen
                    seen += 1
                    if seen == call:
                        os._exit(9)
                    return real(*arguments, **named)

                return wrapper

            for name in CALLS:
                setattr(os, name, counted(getattr(os, name)))
            if not links:
                os.link = counted(no_links)
            checkpoint._Sink.write = counted(checkpoint._Sink.write)
            atomic.open = counted(open)
            save(path, state_of(step))
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), "the child failed by something else than the crash"
    return status == 9


def no_links(*_):
    raise OSError(errno.EPERM, "no hard links here")


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_crash_before_any_system_call_leaves_whole_checkpoints_and_the_next_save_works(
    tmp_path, before, links
):
    died = 0
    for call in range(1, 200):
        folder = tmp_path / str(call)
        folder.mkdir()
        path = folder / "c.pt"
        for step in range(1, before + 1):
            save(path, state_of(step))
        if not crash_at(call, path, before + 1, links):
            break
        died += 1
        now, prev = step_in(path), step_in(previous_path(path))  # load raises if not whole
        assert now in ((before, before + 1) if before else (None, 1))
        assert prev in ((before - 1, before) if before >= 2 else (None, before or None))
        assert prev is None or prev <= now
        save(path, state_of(7))
        after = step_in(path), step_in(previous_path(path))
        assert after == (7, now)
        assert sorted(os.listdir(folder)) == ["c.pt", "c.pt.prev"][: 1 if now is None else 2]
    else:
        pytest.fail("the save never came to its end")
    # Writes of the archive, fsync, then the names: two renames and folder syncs with a previous.
    assert died >= (12 if before else 8)


def test_a_damaged_checkpoint_does_not_displace_a_good_prev_before_its_successor_is_in_place(
    tmp_path,
):
    for call in range(1, 200):
        folder = tmp_path / str(call)
        folder.mkdir()
        path = folder / "c.pt"
        save(path, state_of(1))
        save(path, state_of(2))
        path.write_bytes(path.read_bytes()[:-9])
        if not crash_at(call, path, 3):
            return
        whole = []
        for candidate in (path, previous_path(path)):
            try:
                whole.append(step_in(candidate))
            except CheckpointError:
                continue
        assert whole
        assert set(whole) <= {1, 3}
    pytest.fail("the save never came to its end")


# --- refused writes -------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 500, 3000, 5000, 10_000])
def test_a_full_disk_inside_torchs_writer_is_a_checkpoint_error(tmp_path, monkeypatch, limit):
    """torch's writer turns some of these into a RuntimeError about positions."""
    path = tmp_path / "c.pt"
    save(path, state_of(1))
    save(path, state_of(2))
    written = 0
    real = checkpoint._Sink.write

    class FullFile:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            nonlocal written
            written += len(data)
            if written > limit:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

    def write(self, data):
        if not isinstance(self.file, FullFile):
            self.file = FullFile(self.file)
        return real(self, data)

    monkeypatch.setattr(checkpoint._Sink, "write", write)
    big = {"w": torch.zeros(5000)}
    with pytest.raises(CheckpointError) as caught:
        save(path, big)
    message = str(caught.value)
    assert str(path) in message
    assert "No space left" in message
    assert "20000 bytes of tensors needed" in message
    assert "bytes free" in message
    assert (step_in(path), step_in(previous_path(path))) == (2, 1)
    assert sorted(os.listdir(tmp_path)) == ["c.pt", "c.pt.prev"]


@pytest.mark.parametrize("name", ["fsync", "replace", "link"])
def test_a_full_disk_at_a_later_system_call_is_a_checkpoint_error(tmp_path, monkeypatch, name):
    path = tmp_path / "c.pt"
    save(path, state_of(1))

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, name, full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(path, state_of(2))
    monkeypatch.undo()
    assert step_in(path) == 1
    assert not (tmp_path / "c.pt.tmp").exists()
    save(path, state_of(3))
    assert (step_in(path), step_in(previous_path(path))) == (3, 1)


def test_the_kernel_refusing_the_write_is_a_checkpoint_error(tmp_path):
    """A real refusal: RLIMIT_FSIZE makes write(2) return EFBIG past 64 KiB (setrlimit(2))."""
    script = textwrap.dedent(
        """
        import os, resource, sys, torch
        from pathlib import Path
        from logra_lab.rl.checkpoint import CheckpointError, load, save
        path = Path(sys.argv[1])
        save(path, {"step": 1})
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
        try:
            save(path, {"step": 2, "w": torch.zeros(1_000_000)})
        except CheckpointError as error:
            assert "4000000 bytes of tensors needed" in str(error) and str(path) in str(error)
            assert "File too large" in str(error), error
        else:
            raise SystemExit("no error")
        assert load(path) == {"step": 1}
        assert os.listdir(path.parent) == [path.name], os.listdir(path.parent)
        """
    )
    command = [sys.executable, "-c", script, str(tmp_path / "c.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_missing_folder_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="No such file or directory"):
        save(tmp_path / "nowhere" / "c.pt", state_of(1))


def test_an_interrupt_while_writing_leaves_the_checkpoint_and_no_temporary_file(
    tmp_path, monkeypatch
):
    path = tmp_path / "c.pt"
    save(path, state_of(1))

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(path, state_of(2))
    assert step_in(path) == 1
    assert os.listdir(tmp_path) == ["c.pt"]


# --- damage ---------------------------------------------------------------------------------


def spread(length: int) -> list[int]:
    """Every third position, and each of the last 150 (the end record and the digest)."""
    return [*range(0, length - 150, 3), *range(length - 150, length)]


def test_a_flipped_byte_anywhere_is_found(tmp_path):
    path = tmp_path / "c.pt"
    save(path, state_of(1))
    good = path.read_bytes()
    for position in spread(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"c\.pt: (it|its) "):
            load(path)
    path.write_bytes(good)
    assert step_in(path) == 1


def test_a_cut_anywhere_and_added_bytes_are_found(tmp_path):
    path = tmp_path / "c.pt"
    save(path, state_of(1))
    good = path.read_bytes()
    for length in spread(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointError, match=r"cut short|damaged"):
            load(path)
    for longer in (good + b"\0", good + b"x" + good):
        path.write_bytes(longer)
        with pytest.raises(CheckpointError):
            load(path)


def test_the_error_names_the_previous_checkpoint_only_when_there_is_one(tmp_path):
    path = tmp_path / "c.pt"
    save(path, state_of(1))
    path.write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"no previous checkpoint c\.pt\.prev was kept"):
        load(path)
    path.unlink()
    save(path, state_of(1))
    save(path, state_of(2))
    path.unlink()
    with pytest.raises(
        CheckpointError, match=r"no such file.*previous checkpoint is .*c\.pt\.prev"
    ):
        load(path)
    assert step_in(previous_path(path)) == 1


def test_a_file_made_by_torch_save_alone_is_refused_and_never_unpickled(tmp_path):
    torch.save({"step": 1}, tmp_path / "c.pt")
    with pytest.raises(CheckpointError, match="not written by save"):
        load(tmp_path / "c.pt")
