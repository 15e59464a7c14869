"""Sweeps: what is finished is not run again, what fails is said, and no more runs than may."""

import json
import threading

import nbformat
import pytest

from logra_lab.errors import InputError
from logra_lab.lab.sweep import SweepError, job_digest, run_sweep

LIMIT_S = 20


@pytest.fixture
def job(tmp_path, make_book):
    """A job notebook with the parameters `preset` and `steps`; it records steps squared."""
    last = "from logra_lab.lab.record import record\nrecord(square=steps**2)"
    path = tmp_path / "jobs" / "square.ipynb"
    path.parent.mkdir()
    nbformat.write(make_book(last=last), path)
    return path


class Counted:
    """Stands for the execution of a job: what ran, how often, and how many at a time."""

    def __init__(self, fails=()):
        self.ran, self.fails = [], list(fails)
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.together = None

    def __call__(self, _job, settings, _path, threads):
        with self.lock:
            self.ran.append(settings["steps"])
            self.now += 1
            self.most = max(self.most, self.now)
        if self.together is not None:
            self.together.wait(LIMIT_S)
        with self.lock:
            self.now -= 1
            if settings["steps"] in self.fails:
                self.fails.remove(settings["steps"])
                raise SweepError(f"steps {settings['steps']} is cursed")
        return {"square": settings["steps"] ** 2, "threads": threads}, 0.1


def sweep(job, tmp_path, steps, runs, **more):
    rows = [{"preset": "smoke", "steps": n} for n in steps]
    more.setdefault("say", lambda _line: None)
    return run_sweep(job, rows, tmp_path / "found", run_job=runs, **more)


def test_finished_rows_are_not_run_again_and_an_added_one_is(job, tmp_path):
    runs = Counted()
    sweep(job, tmp_path, [1, 2], runs)
    again = sweep(job, tmp_path, [3, 2, 1], runs)
    assert sorted(runs.ran) == [1, 2, 3]
    assert [(r.settings["steps"], r.numbers["square"], r.fresh) for r in again] == [
        (3, 9, True),
        (2, 4, False),
        (1, 1, False),
    ]


def test_an_edited_job_notebook_or_setting_makes_another_job(job):
    row = {"preset": "smoke", "steps": 1}
    before = job_digest(job, row)
    assert job_digest(job, dict(reversed(row.items()))) == before  # order says nothing
    assert job_digest(job, {**row, "steps": 2}) != before
    node = nbformat.read(job, as_version=4)
    node.cells[-1].source += "  # edited"
    nbformat.write(node, job)
    assert job_digest(job, row) != before


def test_other_code_of_the_library_makes_another_job(job, monkeypatch):
    row = {"preset": "smoke", "steps": 1}
    before = job_digest(job, row)
    monkeypatch.setattr("logra_lab.lab.sweep._source_digest", lambda: b"edited")
    assert job_digest(job, row) != before


def test_a_job_that_fails_once_is_tried_again_and_one_that_fails_twice_is_named(job, tmp_path):
    said = []
    runs = Counted(fails=[2])
    assert [r.numbers["square"] for r in sweep(job, tmp_path, [2], runs)] == [4]
    assert runs.ran == [2, 2]

    runs = Counted(fails=[3, 3])
    with pytest.raises(
        SweepError, match=r"(?s)1 of 3 jobs failed 2 times.*'steps': 3.*cursed"
    ) as info:
        sweep(job, tmp_path, [3, 4, 2], runs, say=said.append)
    assert "'steps': 4" not in str(info.value)
    assert sum(line.startswith("FAILED") for line in said) == 1
    assert sorted(runs.ran) == [3, 3, 4]  # the others ran all the same
    sweep(job, tmp_path, [3, 4, 2], runs)
    assert sorted(runs.ran) == [3, 3, 3, 4]  # and only the failed one is tried in the next sweep


@pytest.mark.parametrize("workers", [1, 3])
def test_exactly_so_many_jobs_run_at_a_time(job, tmp_path, workers):
    runs = Counted()
    runs.together = threading.Barrier(workers)  # breaks, and fails, unless so many meet
    sweep(job, tmp_path, range(1, 2 * workers + 1), runs, workers=workers)
    assert runs.most == workers


def test_bad_rows_are_refused_before_anything_runs(job, tmp_path):
    runs = Counted()
    for rows, what in (
        ([], "0 rows"),
        ([{"steps": 1}, {"steps": 1}], "none twice"),
        ([{"stpes": 1}], "did you mean 'steps'"),
        ([{"steps": "many"}], "'steps' is a int"),
    ):
        with pytest.raises(InputError, match=what):
            run_sweep(job, rows, tmp_path / "found", run_job=runs, say=lambda _line: None)
    assert runs.ran == []


def test_real_jobs_run_in_kernels_of_their_own_with_their_share_of_threads(
    tmp_path, make_book, monkeypatch
):
    source = "import os\nthreads = os.environ['OMP_NUM_THREADS']\nif steps == 2: os._exit(3)"
    last = "from logra_lab.lab.record import record\nrecord(pid=os.getpid(), threads=threads)"
    path = tmp_path / "job.ipynb"
    nbformat.write(make_book(source, last=last), path)
    monkeypatch.setattr("logra_lab.lab.sweep.usable_cores", lambda: 4)
    rows = [{"preset": "smoke", "steps": n} for n in (1, 2, 3)]
    with pytest.raises(SweepError, match="1 of 3 jobs failed 2 times") as info:
        run_sweep(path, rows, tmp_path / "found", workers=2, say=lambda _line: None)
    assert "the kernel died in cell [3]" in str(info.value)
    found = [json.loads(file.read_text()) for file in (tmp_path / "found").glob("*.json")]
    assert sorted(one["settings"]["steps"] for one in found) == [1, 3]
    assert len({one["numbers"]["pid"] for one in found}) == 2
    assert {one["numbers"]["threads"] for one in found} == {"2"}


def test_a_sweep_can_run_inside_a_notebook_under_the_course_runner(course, make_book):
    jobs = course.root / "notebooks" / "jobs"
    jobs.mkdir(parents=True)
    nbformat.write(make_book(), jobs / "job.ipynb")
    run = """
from pathlib import Path
from logra_lab.lab.context import kept_folder
from logra_lab.lab.sweep import run_sweep
rows = [{"preset": "smoke", "steps": n} for n in (1, 2)]
found = run_sweep(Path("jobs/job.ipynb"), rows, kept_folder("sweep"), workers=2)
assert [one.numbers for one in found] == [{"answer": 42, "share": 0.5}] * 2
"""
    outcome = course.one(run)
    assert outcome.status == 0, outcome.entry["reason"]
    # The job is none of the course's notebooks, and its results outlive the execution.
    assert [notebook.name for notebook, _ in course.plan().notebooks] == ["01_one"]
    again = course.one(run.replace("] * 2", "] * 2\nassert not any(one.fresh for one in found)"))
    assert again.status == 0, again.entry["reason"]
