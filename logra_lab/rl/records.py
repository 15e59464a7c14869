"""The record of a run: `manifest.json` (what ran, on what, how it ended) and `steps.jsonl`.

A step is one line, flushed as it is logged; every value is defined in `METRICS`. The manifest is
replaced atomically. Both are strict JSON; non-finite numbers are the strings "NaN", "Infinity"
and "-Infinity" (`logra_lab.rl.metrics`). After a kill, the manifest still says "running" and the
last line may be torn: `read_steps` leaves it out, and resuming cuts it off.
"""

import json
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch

from logra_lab.atomic import write_atomically
from logra_lab.errors import InputError
from logra_lab.rl import environment
from logra_lab.rl.export import ExportRefused, export_policy
from logra_lab.rl.metrics import METRICS, Metric, check_names, dumps
from logra_lab.rl.run_files import RecordError, raw_steps, read_manifest, read_steps

__all__ = [
    "METRICS",
    "ExportRefused",
    "Metric",
    "RecordError",
    "RunRecord",
    "export_policy",
    "read_manifest",
    "read_steps",
]

Status = Literal["running", "finished", "interrupted", "failed"]


class RunRecord:
    """The open record of one run; a context manager that writes how the run ended.

    Leaving the block normally gives status "finished", by KeyboardInterrupt "interrupted", by
    anything else "failed" with the error's type and message. Use `RunRecord.open`. Wall time adds
    up over sessions and, like peak memory (MiB), is as of the manifest's last rewriting.
    """

    def __init__(self, run_dir: Path, manifest: dict[str, Any], last: int) -> None:
        self.run_dir = run_dir
        self.manifest = manifest
        self._steps = FileIO(run_dir / "steps.jsonl", "a")  # appends where the file ends, always
        self._last = last
        self._earlier_seconds = float(manifest["wall_seconds"])
        self._earlier_peak = float(manifest.get("peak_memory_mib", 0.0))
        self._began = time.monotonic()

    @classmethod
    def open(
        cls,
        run_dir: str | Path,
        config: Mapping[str, Any],
        *,
        seeds: Mapping[str, int],
        verifier: Any,
        resume_step: int | None = None,
        device: torch.device | str = "cpu",
    ) -> "RunRecord":
        """Begin a record in `run_dir`, or go on with one after step `resume_step`.

        `config` is kept as given; `verifier` needs name, version and owner; `device` is the
        policy's, and the manifest says whose kernels compute there. Resuming cuts off the
        lines and evaluations after `resume_step`, adds a session to the manifest and lists the
        settings that changed. Raises `InputError` when there is a record and `resume_step` is
        None, or none and it is given; `RecordError` when the system refuses a write.
        """
        run_dir, described = Path(run_dir), _described(config, seeds, verifier, device)
        try:
            if resume_step is None:
                return cls._begin(run_dir, described)
            return cls._resume(run_dir, described, resume_step)
        except OSError as error:
            raise RecordError(f"run record {run_dir}: {error.strerror or error}") from error

    @classmethod
    def _begin(cls, run_dir: Path, described: dict[str, Any]) -> "RunRecord":
        manifest = {
            **described,
            "start": _now(),
            "end": None,
            "wall_seconds": 0.0,
            "evaluations": [],
            "sessions": [{"start": _now(), "after_step": 0}],
        }
        dumps(manifest, where="manifest")  # bad input is refused before the folder is made
        run_dir.mkdir(parents=True, exist_ok=True)
        if (run_dir / "manifest.json").exists():
            raise _exists(run_dir)
        try:  # exclusive creation: of two runs started at once, one gets the folder
            FileIO(run_dir / "steps.jsonl", "x").close()
        except FileExistsError:
            raise _exists(run_dir) from None
        record = cls(run_dir, manifest, 0)
        record._write()
        return record

    @classmethod
    def _resume(cls, run_dir: Path, described: dict[str, Any], resume_step: int) -> "RunRecord":
        manifest = read_manifest(run_dir)
        kept = [step for step in raw_steps(run_dir) if step["step"] <= resume_step]
        described = json.loads(dumps(described, where="manifest"))
        session = {
            "start": _now(),
            "after_step": resume_step,
            "last_step_kept": kept[-1]["step"]
            if kept
            else 0,  # less than after_step when a power cut took lines
            "ended_before": manifest["status"],
            "changed": _changes(manifest["config"], described["config"]),
        }
        manifest.update(described, end=None)
        manifest["sessions"].append(session)
        manifest["evaluations"] = [e for e in manifest["evaluations"] if e["step"] <= resume_step]
        lines = "".join(dumps(step) + "\n" for step in kept).encode()
        write_atomically(run_dir / "steps.jsonl", lambda file: file.write(lines))
        record = cls(run_dir, manifest, resume_step)
        record._write()
        return record

    def log(self, **values: Any) -> None:
        """Append one step. Names must be in `METRICS`; `step` must be greater than the last one.

        Raises `InputError` for an unknown name, a value that is not plain, or a step out of order
        (nothing is written), and `RecordError` when the system refuses the write.
        """
        check_names(values)
        step = values.get("step")
        if type(step) is not int or step <= self._last:
            raise InputError(f"log: expected an int step > {self._last}, got {step!r}")
        line = (dumps(values, where="metrics") + "\n").encode()
        before = os.fstat(self._steps.fileno()).st_size
        problem: str | None = "no room for the whole line"
        try:  # the file is unbuffered: a line is with the system when this returns
            whole = self._steps.write(line) == len(line)
        except OSError as error:
            whole, problem = False, error.strerror
        if not whole:
            self._steps.truncate(before)  # half a line would damage the next one
            raise RecordError(f"{self._steps.name}: {problem}; free some room, then resume")
        self._last = step

    def add_evaluation(
        self, *, task: str, size: int, seed: int, step: int, result: Mapping[str, Any]
    ) -> None:
        """Add what was evaluated after `step` (0: before training) to the manifest."""
        entry = {"task": task, "size": size, "seed": seed, "step": step, "result": result}
        self.manifest["evaluations"].append(json.loads(dumps(entry, where="evaluation")))
        self._write()

    def close(self, status: Status = "finished", error: str | None = None) -> None:
        """Write how the run ended; a second call does nothing."""
        if self._steps.closed:
            return
        self._steps.close()
        self.manifest["end"] = self.manifest["sessions"][-1]["end"] = _now()
        self._write(status, error)

    def __enter__(self) -> "RunRecord":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        stopped = isinstance(error, KeyboardInterrupt)
        try:
            self.close(
                "interrupted" if stopped else "failed",
                None if stopped else f"{type(error).__name__}: {error}",
            )
        except RecordError as problem:  # the first error is the one to tell
            error.add_note(f"and the manifest could not be written: {problem}")

    def _write(self, status: Status = "running", error: str | None = None) -> None:
        here = time.monotonic() - self._began
        self.manifest.update(
            status=status,
            error=error,
            wall_seconds=self._earlier_seconds + here,
            peak_memory_mib=max(self._earlier_peak, environment.peak_memory_mib()),
            peak_gpu_memory_mib=environment.peak_gpu_memory_mib(),
        )
        data = (dumps(self.manifest, indent=2, where="manifest") + "\n").encode()
        path = self.run_dir / "manifest.json"
        try:
            write_atomically(path, lambda file: file.write(data))
        except OSError as problem:
            raise RecordError(f"{path}: {problem.strerror or problem}") from problem


def _described(
    config: Mapping[str, Any],
    seeds: Mapping[str, int],
    verifier: Any,
    device: torch.device | str,
) -> dict[str, Any]:
    reward = {name: getattr(verifier, name) for name in ("name", "version", "owner")}
    return {
        "config": dict(config),
        "seeds": dict(seeds),
        "reward": reward,
        "versions": environment.versions(),
        "hardware": environment.hardware(),
        **environment.compute(device, config),
        "threads": torch.get_num_threads(),
    }


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Top-level settings that differ, as [before, after]; a missing one is null."""
    names = sorted({*before, *after})
    return {n: [before.get(n), after.get(n)] for n in names if before.get(n) != after.get(n)}


def _exists(run_dir: Path) -> InputError:
    return InputError(
        f"run {run_dir}: there is a record already; name another run, resume this one, or delete it"
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
