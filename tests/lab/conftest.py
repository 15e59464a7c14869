"""Notebooks built in the test, and a course that runs them in a temporary folder."""

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from rich.console import Console

from logra_lab.lab.course import prepare, run_course

PARAMETERS = 'preset: str = "laptop"  # sizes\nsteps: int = 3  # how many'
RECORD = "from logra_lab.lab.record import record\nrecord(answer=42, share=0.5)"
TAKES = "**You need** 1 CPU core and 900 MB of memory; **it takes** about 2 minutes."


@dataclass
class Outcome:
    """What one notebook left behind."""

    status: int
    entry: dict[str, Any]
    node: nbformat.NotebookNode
    run: Path
    text: str


def book(*cells: str, parameters: str | None = PARAMETERS, last: str = RECORD, takes: str = TAKES):
    """A notebook with the house frame around the given code cells."""
    tagged = [] if parameters is None else [new_code_cell(parameters)]
    for cell in tagged:
        cell.metadata["tags"] = ["parameters"]
    code = [new_code_cell(source) for source in (*cells, last)]
    return new_notebook(cells=[new_markdown_cell(f"# A claim\n\n{takes}"), *tagged, *code])


@dataclass
class Course:
    """A folder of notebooks and the runs made of it."""

    root: Path

    def write(self, name: str, node: nbformat.NotebookNode) -> Path:
        folder = self.root / "notebooks"
        folder.mkdir(exist_ok=True)
        nbformat.write(node, folder / f"{name}.ipynb")
        return folder / f"{name}.ipynb"

    def plan(self, **kwargs: Any):
        kwargs.setdefault("limit_s", 60)
        folder, runs = self.root / "notebooks", self.root / "runs"
        return prepare(folder, runs, preset="smoke", name="r", **kwargs)

    def run(self, **kwargs: Any) -> tuple[int, dict[str, Any], str]:
        out = io.StringIO()
        status = run_course(self.plan(**kwargs), Console(file=out, width=400))
        summary = json.loads((self.root / "runs/r/course.json").read_text())
        return status, summary, out.getvalue()

    def one(self, *cells: str, limit_s: float = 60, **frame: Any) -> Outcome:
        """Write one notebook, run it, and collect what it left."""
        self.write("01_one", book(*cells, **frame))
        status, summary, text = self.run(limit_s=limit_s)
        run = self.root / "runs" / "r"
        node = nbformat.read(run / "notebooks" / "01_one.ipynb", as_version=4)
        return Outcome(status, summary["notebooks"][0], node, run, text)


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)


@pytest.fixture(scope="session")
def shared_course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    """For one run that several tests read; whoever changes files works on a copy."""
    return Course(tmp_path_factory.mktemp("course"))


@pytest.fixture
def make_book() -> Callable[..., nbformat.NotebookNode]:
    return book
