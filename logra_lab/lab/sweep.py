"""A sweep: one small notebook, executed by papermill once for each row of settings, in parallel.

A job is finished when its result lies in the sweep's folder, under a digest of everything that it
depends on: the settings, the job notebook and the source of this library. So a sweep that was
interrupted goes on, a row that is added is the only one that runs, and nothing old passes for new.
A job counts by the course's own verdict (`verdict`), not by papermill's; one that fails is tried
once more, and then reported, after all others have run.
"""

import json
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nbformat

from logra_lab.atomic import write_atomically
from logra_lab.errors import InputError, LograError
from logra_lab.lab.context import Context, write_context
from logra_lab.lab.kernel import execute, usable_cores
from logra_lab.lab.notebook import Notebook, bind, read_notebook
from logra_lab.lab.verdict import reason_of_failure

TRIES = 2  # a kernel may die of what other jobs took; what fails twice is the job's own


# Notebook, settings, path of the result, threads → the recorded numbers, and seconds.
RunJob = Callable[[Notebook, dict[str, Any], Path, int], tuple[dict[str, Any], float]]


class SweepError(LograError):
    """Jobs that failed twice, each with its reason; what the others found is kept."""


@dataclass(frozen=True)
class JobResult:
    """A finished job: its row, the numbers it recorded, and whether it was run just now."""

    settings: dict[str, Any]
    numbers: dict[str, Any]
    seconds: float
    fresh: bool


def job_digest(notebook: Path, settings: Mapping[str, Any]) -> str:
    """16 hex digits over settings, the cells of the job notebook, and the library's source."""
    cells = [cell.source for cell in nbformat.read(notebook, as_version=4).cells]
    content = json.dumps([cells, dict(settings)], sort_keys=True, allow_nan=False)
    return blake2b(content.encode() + _source_digest(), digest_size=8).hexdigest()


@lru_cache(maxsize=1)
def _source_digest() -> bytes:
    """Of the code this process has loaded; a kernel that is restarted looks again."""
    digest = blake2b(digest_size=16)
    for package in ("logra_lab", "logra_lab.kernels"):  # found, not imported: torch takes seconds
        spec = find_spec(package)
        if spec is None or spec.origin is None:
            raise LograError(f"the source of {package} is not where Python looks for it")
        for path in sorted(Path(spec.origin).parent.rglob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.digest()


def run_sweep(
    notebook: Path,
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    workers: int | None = None,
    limit_s: float = 1800.0,
    say: Callable[[str], None] = print,
    run_job: RunJob | None = None,
) -> list[JobResult]:
    """Run `notebook` with each row as its parameters; results in the order of the rows.

    Args:
        rows: values of the notebook's parameters; unnamed ones keep their defaults.
        folder: of the results, `DIGEST.json`, with the executed notebook and its log beside each.
        workers: jobs at a time, by default one a core; each gets its share of the cores as threads.
        limit_s: of one cell of a job.
        say: is told of every job that ends, and how long the rest may take.
        run_job: what executes one job and returns its numbers and seconds; for tests.

    Raises `InputError`, before anything runs, for no rows, a row given twice, an unknown parameter
    or a value of another type; `SweepError`, after everything ran, for jobs that failed.
    """
    if workers is not None and workers < 1:
        raise InputError(f"workers {workers}: expected at least one job at a time")
    job, folder = read_notebook(notebook), folder.resolve()
    todo = {job_digest(notebook, row): bind(job, row) for row in rows}
    if not rows or len(todo) < len(rows):
        raise InputError(
            f"a sweep of {len(rows)} rows, {len(todo)} of them different: expected at least one, "
            "and none twice"
        )
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [digest for digest in todo if not _path(folder, digest).is_file()]
    workers = min(workers or usable_cores(), max(len(waiting), 1))
    say(
        f"{len(todo)} jobs, {len(todo) - len(waiting)} of them finished before; {workers} at a time"
    )
    threads = max(1, usable_cores() // workers)
    runs = run_job or partial(_execute, limit_s=limit_s)
    failed: dict[str, str] = {}
    began = time.monotonic()
    with ThreadPoolExecutor(workers, thread_name_prefix="sweep") as pool:
        jobs = {
            pool.submit(_tried, runs, job, todo[digest], _path(folder, digest), threads): digest
            for digest in waiting
        }
        try:
            for done, future in enumerate(as_completed(jobs), 1):
                digest, reason = jobs[future], future.result()
                if reason is not None:
                    failed[digest] = reason
                left = (time.monotonic() - began) / done * (len(jobs) - done)
                row = ", ".join(f"{name} {value}" for name, value in todo[digest].items())
                say(f"{'FAILED' if reason else 'done'}: {row}; about {left:.0f} s left")
        except BaseException:
            pool.shutdown(cancel_futures=True)  # jobs under way end, and keep what they found
            raise
    if failed:
        lines = [f"{todo[digest]}: {reason}" for digest, reason in failed.items()]
        raise SweepError(
            f"{len(failed)} of {len(todo)} jobs failed {TRIES} times; the results of the others "
            f"are kept, and running the sweep again tries these:\n" + "\n".join(lines)
        )
    return [_read(_path(folder, digest), digest in waiting) for digest in todo]


def _path(folder: Path, digest: str) -> Path:
    return folder / f"{digest}.json"


def _tried(
    runs: RunJob,
    job: Notebook,
    settings: dict[str, Any],
    path: Path,
    threads: int,
) -> str | None:
    """Run one job, twice if need be; write its result, or return why there is none."""
    for attempt in range(1, TRIES + 1):
        try:
            numbers, seconds = runs(job, settings, path, threads)
        except LograError as error:
            if attempt == TRIES:
                return str(error)
            continue
        content = {"settings": settings, "numbers": numbers, "seconds": seconds}
        data = (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
        write_atomically(path, lambda file, data=data: file.write(data))  # type: ignore[misc]
        break
    return None


def _read(path: Path, fresh: bool) -> JobResult:
    content = json.loads(path.read_text(encoding="utf-8"))
    return JobResult(content["settings"], content["numbers"], content["seconds"], fresh)


def _execute(
    job: Notebook, settings: dict[str, Any], path: Path, threads: int, *, limit_s: float
) -> tuple[dict[str, Any], float]:
    """One job in a kernel of its own; raises `SweepError` with the verdict's reason."""
    output, log = path.with_suffix(".ipynb"), path.with_suffix(".log")
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="logra-lab-") as scratch_name:
        scratch = Path(scratch_name)
        context = Context(
            notebook=path.stem,
            token=uuid.uuid4().hex,
            record=str(scratch / "records" / "job.json"),
            figures=str(scratch / "figures"),
            log=str(log),
            guard=str(scratch / "guard.json"),
        )
        share = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        started = time.time() - 0.01  # file systems cut their times to a tick
        execution = execute(
            job.path.resolve(),
            output,
            settings,
            env={**write_context(context, scratch / "context.json"), **share},
            scratch=scratch,
            log=log,
            limit_s=limit_s,
            on_cell=lambda _cell, _cells: None,
        )
        reason = reason_of_failure(execution, output, context, settings, limit_s, started)
        if reason is not None:
            raise SweepError(
                f"{reason}; see {log.name} and {output.name} in {os.fspath(path.parent)}"
            )
        numbers = json.loads(Path(context.record).read_text(encoding="utf-8"))["numbers"]
    return numbers, round(execution.seconds, 3)
