"""Every notebook of the course, through the runner, at the smoke preset."""

import json
from pathlib import Path

import nbformat
import pytest

from logra_lab.lab.prose import explain, unbacked

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def test_every_notebook_runs_at_the_smoke_preset(smoke_course: tuple[int, Path]) -> None:
    status, run_dir = smoke_course
    summary = json.loads((run_dir / "course.json").read_text())
    reasons = {entry["notebook"]: entry["reason"] for entry in summary["notebooks"]}
    assert status == 0, reasons
    assert list(reasons) == [path.stem for path in NOTEBOOKS]
    for name in reasons:
        record = json.loads((run_dir / "records" / f"{name}.json").read_text())
        assert record["figures"], f"{name} saved no figure"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_keep_to_the_house_style(path: Path) -> None:
    node = nbformat.read(path, as_version=4)
    nbformat.validate(node)
    code = [cell for cell in node.cells if cell.cell_type == "code"]
    assert 15 <= len(node.cells) <= 40
    for cell in code:
        lines = len(cell.source.splitlines())
        assert lines < 25, f"a cell of {lines} lines: {cell.source[:60]!r}"
    functions = sum(cell.source.count("\ndef ") + cell.source.startswith("def ") for cell in code)
    assert functions <= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs_and_machine_names(path: Path) -> None:
    node = nbformat.read(path, as_version=4)
    for cell in node.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None
    # The name every kernel of this language has, or none at all.
    assert node.metadata.get("kernelspec", {}).get("name", "python3") == "python3"
    assert node.metadata.get("kernelspec", {}).get("display_name", "Python 3") == "Python 3"
    assert "widgets" not in node.metadata
    assert "papermill" not in node.metadata


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_number_in_words_is_an_input_published_or_declared(path: Path) -> None:
    if found := unbacked(path):
        pytest.fail(explain(found), pytrace=False)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_number_a_notebook_displays_in_words_is_in_its_record(
    path: Path, smoke_course: tuple[int, Path]
) -> None:
    run = smoke_course[1]
    record = json.loads((run / "records" / f"{path.stem}.json").read_text())
    assert record["run"]["status"] == "passed", record["run"]["reason"]
    if found := unbacked(run / "notebooks" / path.name, record["numbers"]):
        pytest.fail(explain(found), pytrace=False)
