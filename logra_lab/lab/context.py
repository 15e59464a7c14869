"""What the runner hands to a notebook's kernel: where its record, figures and log belong."""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

import logra_lab

VARIABLE = "LOGRA_LAB_CONTEXT"


@dataclass(frozen=True)
class Context:
    """Paths of one execution of one notebook; `token` ties its outputs to this execution."""

    notebook: str
    token: str
    record: str
    figures: str
    log: str
    guard: str


def write_context(context: Context, path: Path) -> dict[str, str]:
    """Write the hand-over file; returns the environment entry that names it."""
    path.write_text(json.dumps(asdict(context)), encoding="utf-8")
    return {VARIABLE: str(path)}


def run_context() -> Context | None:
    """The hand-over of the runner, or None in a notebook somebody opened by hand."""
    path = os.environ.get(VARIABLE)
    return Context(**json.loads(Path(path).read_text(encoding="utf-8"))) if path else None


def project_root() -> Path:
    """The repository of an editable install; otherwise the working directory."""
    root = Path(logra_lab.__file__).resolve().parents[1]
    return root if (root / "notebooks").is_dir() else Path.cwd()


def interactive_folder() -> Path:
    """Where records and figures go when no runner is involved."""
    return project_root() / "runs" / "interactive"


def _home() -> Path:
    context = run_context()
    return Path(context.record).parents[1] if context else interactive_folder()


def kept_folder(name: str) -> Path:
    """A folder for what later executions go on from (finished jobs of a sweep); never emptied.

    Whoever puts results there has to name each by all that it depends on.
    """
    folder = _home() / "kept" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def work_folder(name: str) -> Path:
    """An empty folder for what a notebook makes besides its record and figures (training runs).

    It lies beside the records of this run, or of the interactive ones; what an earlier execution
    left in the folder of that name is removed, as its record and figures are replaced.
    """
    folder = _home() / "training" / name
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def run_folder(name: str) -> Path:
    """A folder for a run that outlives its notebook: opened again, the notebook finds it there.

    Only under the course runner, where every execution stands for itself, it is empty.
    """
    if run_context() is not None:
        return work_folder(name)
    folder = interactive_folder() / "training" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
