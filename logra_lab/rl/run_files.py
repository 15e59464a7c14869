"""Reading a run folder: its manifest and its steps, also those of a run that was killed."""

import json
from pathlib import Path
from typing import Any

from logra_lab.errors import InputError, LograError
from logra_lab.rl.metrics import from_json


class RecordError(LograError):
    """A run's record could not be written, or one of its files is damaged."""


def read_manifest(run_dir: str | Path) -> dict[str, Any]:
    """The manifest of a run. Raises `InputError` when there is none or it is not JSON."""
    path = Path(run_dir) / "manifest.json"
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; {run_dir} is not the folder of a run") from None
    except ValueError as error:
        raise InputError(f"{path}: not JSON ({error}); restore it from a copy") from error


def read_steps(run_dir: str | Path) -> list[dict[str, Any]]:
    """The logged steps in order, non-finite numbers as floats; a torn last line is left out.

    Raises `InputError` when there is no such file and `RecordError` for damage before the end.
    """
    return [from_json(step) for step in raw_steps(Path(run_dir))]


def raw_steps(run_dir: Path) -> list[dict[str, Any]]:
    """The steps as they stand in the file, non-finite numbers as text."""
    path = run_dir / "steps.jsonl"
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; {run_dir} is not the folder of a run") from None
    if not lines[-1]:
        lines.pop()
    steps = []
    for number, line in enumerate(lines, 1):
        try:
            step = json.loads(line)
            if not isinstance(step, dict) or "step" not in step:
                raise ValueError("no step")
        except ValueError as error:
            if number == len(lines):  # torn by a kill or a power cut
                break
            raise RecordError(
                f"{path}, line {number}: expected a step as a JSON object ({error}); the file is "
                "damaged: restore it, or cut it before this line and resume from an earlier step"
            ) from error
        steps.append(step)
    return steps
