"""Runs as processes of their own: they outlive who started them, are found again, and stopped."""

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from logra_lab.errors import InputError
from logra_lab.lab.launch import LOG, start_or_attach, stop, train_command, wait, workers
from logra_lab.rl.owner import NAME, Owner, mark, owned, owner_of

LIMIT_S = 60
# A run as far as launching is concerned: says that it is there, and ends, saved, when asked.
RUN = """
import os, signal, sys, pathlib
def end(*_):
    pathlib.Path(sys.argv[1], "saved").touch()
    sys.exit(130)
signal.signal(signal.SIGINT, end) if signal.getsignal(signal.SIGINT) != signal.SIG_IGN else None
print("it runs", os.getsid(0) == os.getpid(), os.environ.get("FORCE_COLOR"), flush=True)
pathlib.Path(sys.argv[1], "ready").touch()
while True:
    signal.pause()
"""


def until(condition):
    for _ in range(100 * LIMIT_S):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen in time")


@pytest.fixture
def folder(tmp_path):
    """The folder of a run; whoever has it at the end of the test is ended."""
    run = tmp_path / "run"
    yield run
    owner = owner_of(run)
    if owner is not None and owner.alive and owner.pid != os.getpid():
        os.kill(owner.pid, signal.SIGKILL)


def command(folder):
    return [sys.executable, "-c", RUN, str(folder)]


def started(folder):
    launched = start_or_attach(folder, command(folder))
    until((folder / "ready").exists)
    return launched


def test_a_second_start_attaches_and_a_stop_reaches_the_run_which_saves(folder):
    first = started(folder)
    assert (first.how, first.owner.alive) == ("started", True)
    again = start_or_attach(folder, command(folder))
    assert (again.how, again.owner) == ("attached", first.owner)
    assert stop(folder, LIMIT_S)
    assert (folder / "saved").exists()
    assert not first.owner.alive  # also as long as nobody has reaped it
    assert stop(folder, LIMIT_S)  # nothing to stop is no error


def test_a_run_has_a_session_of_its_own_and_plain_words_in_its_log(folder, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as kernels set it
    started(folder)
    assert (folder / LOG).read_text() == "it runs True None\n"


def test_it_can_be_stopped_when_whoever_started_it_ignores_interrupts_as_kernels_do(folder):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        started(folder)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stop(folder, LIMIT_S)
    assert (folder / "saved").exists()


def test_the_kernel_that_started_it_is_killed_and_another_one_attaches(folder):
    kernel = (
        "import os, signal, sys; from logra_lab.lab.launch import start_or_attach;"
        "start_or_attach(sys.argv[1], sys.argv[2:]); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", kernel, str(folder), *command(folder)])
    assert done.returncode == -signal.SIGKILL
    until((folder / "ready").exists)
    found = start_or_attach(folder, command(folder))
    assert (found.how, found.owner.alive) == ("attached", True)
    assert stop(folder, LIMIT_S)
    assert (folder / "saved").exists()


def test_of_two_that_start_at_once_one_attaches(folder):
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: start_or_attach(folder, command(folder)), range(4)))
    assert sorted(x.how for x in found) == ["attached"] * 3 + ["started"]
    assert len({x.owner for x in found}) == 1


def test_a_killed_run_is_not_attached_to_and_goes_on_only_when_asked_to_resume(folder):
    os.kill(started(folder).owner.pid, signal.SIGKILL)
    assert wait(folder, LIMIT_S)
    (folder / "manifest.json").write_text("{}")
    (folder / "ready").unlink()
    ended = start_or_attach(folder, command(folder))
    assert (ended.how, ended.owner) == ("ended", None)
    assert start_or_attach(folder, [*command(folder), "--resume"]).how == "started"
    until((folder / "ready").exists)


def test_a_number_that_was_given_to_another_process_is_not_the_run(tmp_path):
    mine = Owner.of(os.getpid())
    assert mine.alive
    assert not Owner(mine.pid, mine.began - 60, mine.host).alive
    assert Owner(mine.pid, mine.began, "another-machine").alive is None
    mark(tmp_path, Owner(mine.pid, mine.began, "another-machine"))
    with pytest.raises(InputError, match="on another-machine: attach there"):
        start_or_attach(tmp_path, ["true"])
    with pytest.raises(InputError, match="stop it there"):
        stop(tmp_path)


def test_a_program_that_is_not_there_is_said_before_anything_starts(tmp_path):
    with pytest.raises(InputError, match="no program 'logra-labb'"):
        start_or_attach(tmp_path, ["logra-labb", "train"])
    assert owner_of(tmp_path) is None


def test_an_owned_folder_says_whose_it_is_and_is_gone_if_nothing_came_into_it(tmp_path):
    folder = tmp_path / "run"
    with owned(folder):
        assert json.loads((folder / NAME).read_text())["pid"] == os.getpid()
        assert owner_of(folder).alive
    assert not folder.exists()
    with owned(folder):
        (folder / "steps.jsonl").touch()
    assert [x.name for x in folder.iterdir()] == ["steps.jsonl"]


def test_a_run_that_another_process_has_is_not_begun_beside_it_and_stays_its_own(tmp_path):
    """Both would write its records, checkpoints and journal."""
    other = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
    try:
        mark(tmp_path, Owner.of(other.pid))
        with pytest.raises(InputError, match=f"under way in process {other.pid}"), owned(tmp_path):
            raise AssertionError
        assert owner_of(tmp_path).pid == other.pid
    finally:
        other.communicate()
    with owned(tmp_path):  # it has ended, and left its mark
        assert owner_of(tmp_path).pid == os.getpid()
    mark(tmp_path, Owner.of(os.getppid()))  # a shell or `timeout` that was started, and started us
    with owned(tmp_path):
        assert owner_of(tmp_path).pid == os.getpid()


def test_workers_are_the_actors_of_a_kind_below_the_run_and_no_other(tmp_path):
    mark(tmp_path, Owner.of(os.getpid()))
    names = ("ray::EngineActor.generate", "ray::TrainerRank", "ray::EngineActor", "python")
    wait_for_end = "import sys; sys.stdin.read()"
    children = [
        subprocess.Popen([name, "-c", wait_for_end], executable=sys.executable, stdin=-1)
        for name in names
    ]
    try:
        until(lambda: len(workers(tmp_path)) == 2)
        assert workers(tmp_path) == [children[0].pid, children[2].pid]
        assert workers(tmp_path, "TrainerRank") == [children[1].pid]
        assert workers(tmp_path.parent) == []
    finally:
        for child in children:
            child.communicate()


def test_the_command_is_that_of_a_shell_with_every_setting(tmp_path):
    made = train_command("smoke", tmp_path, resume=True, trainers=2, kl_end=None, engine="hf")
    assert made[:5] == [sys.executable, "-m", "logra_lab", "train", "--preset"]
    assert made[5:9] == ["smoke", "--run-dir", str(tmp_path), "--resume"]
    pairs = ["trainers=2", "kl_end=null", "engine=hf"]
    assert made[9:] == [x for pair in pairs for x in ("--set", pair)]
