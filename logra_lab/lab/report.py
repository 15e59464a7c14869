"""What a run leaves behind: files that say how they ended, a summary and a table."""

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
from papermill.execute import remove_error_markers
from rich.console import Console
from rich.markup import escape
from rich.table import Table

BANNER_TAG = "logra-lab-verdict"


@dataclass(frozen=True)
class Result:
    """One notebook's line in the table; `status` is passed, failed or interrupted."""

    notebook: str
    status: str
    reason: str
    seconds: float
    peak_bytes: int
    takes_s: float  # stated in the notebook for the laptop preset
    needs_bytes: int  # stated in the notebook

    def remark(self, preset: str) -> str:
        """Whether the notebook's own "you need / it takes" line holds here."""
        said = []
        if preset == "laptop" and self.seconds > 1.5 * self.takes_s:
            said.append(f"took {spell(self.seconds)}, it states {spell(self.takes_s)}")
        if self.peak_bytes > self.needs_bytes:
            said.append(f"used more memory than it states ({self.needs_bytes / 2**20:,.0f} MiB)")
        return "; ".join(said)


def spell(seconds: float) -> str:
    """Seconds for people: 4.2 s, 3 min 10 s."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def write_json(path: Path, content: Any) -> None:
    """Write through a neighbour, so that no reader ever sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def complete_record(path: Path, result: Result, preset: str, parameters: dict[str, Any]) -> None:
    """Add to the notebook's record how it was made; a failed one gets a record that says so."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    content["run"] = {
        **asdict(result),
        "preset": preset,
        "parameters": parameters,
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "machine": {"system": platform.platform(), "cores": os.cpu_count()},
    }
    write_json(path, content)


def mark_failed(output: Path, source: Path, result: Result, cell: int | None) -> None:
    """Rewrite the executed file so that it says it failed.

    After a killed kernel papermill's own marks read `exception: None` and every cell
    `completed`; a file like that must not lie around.
    """
    node = nbformat.read(output if output.is_file() else source, as_version=4)
    node = remove_error_markers(node)  # papermill's, which this file's banner replaces
    for index, one in enumerate(node.cells):
        marks = one.metadata.setdefault("papermill", {})
        if index == cell:
            marks.update(status="failed", exception=True)
        elif one.cell_type == "code" and one.get("execution_count") is None:
            marks.update(status="pending", exception=None)
    node.metadata.setdefault("papermill", {})["exception"] = True
    node.metadata["logra_lab"] = {"status": result.status, "reason": result.reason}
    banner = nbformat.v4.new_markdown_cell(
        f"> **This run {result.status if result.status != 'interrupted' else 'was interrupted'}.** "
        f"{result.reason}",
        metadata={"tags": [BANNER_TAG]},
    )
    node.cells.insert(0, banner)
    output.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(node, output)


def write_summary(
    run_dir: Path, preset: str, results: Sequence[Result], waiting: Sequence[str]
) -> None:
    """`course.json`: what has a result so far, and which notebooks have none yet."""
    summary = {
        "preset": preset,
        "finished": not waiting,
        "passed": not waiting and all(result.status == "passed" for result in results),
        "waiting": list(waiting),
        "notebooks": [{**asdict(result), "remark": result.remark(preset)} for result in results],
    }
    write_json(run_dir / "course.json", summary)


def past_seconds(runs: Path, notebook: str, preset: str) -> float | None:
    """Seconds the newest passed execution at this preset took on this machine, if there is one."""
    for path in sorted(runs.glob(f"*/records/{notebook}.json"), key=_modified, reverse=True):
        try:
            run = json.loads(path.read_text(encoding="utf-8"))["run"]
        except (KeyError, ValueError):  # written by hand or by a run that was cut off
            continue
        if run["preset"] == preset and run["status"] == "passed":
            return float(run["seconds"])
    return None


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def print_table(
    console: Console, run_dir: Path, preset: str, results: Sequence[Result], waiting: Sequence[str]
) -> None:
    """The closing table, the full reason of every failure, and where everything is."""
    table = Table(title=f"{run_dir.name} (preset {preset})")
    for heading, justify in (("notebook", "left"), ("result", "left"), ("time", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("peak memory", justify="right")
    colours = {"passed": "green", "failed": "red", "interrupted": "yellow"}
    for result in results:
        colour = colours[result.status]
        table.add_row(
            result.notebook,
            f"[{colour}]{result.status}[/{colour}]",
            spell(result.seconds),
            f"{result.peak_bytes / 2**20:,.0f} MiB",
        )
    for name in waiting:
        table.add_row(name, "not run", "", "")
    console.print(table)
    for result in results:
        if result.reason:
            said = f"[bold]{result.notebook}[/bold]: {_clean(result.reason)}"
            console.print(said, soft_wrap=True, highlight=False)
        if remark := result.remark(preset):
            console.print(f"note on {result.notebook}: {remark}")
    for folder, what in (
        ("index.html", "the course as a page"),
        ("notebooks", "executed notebooks"),
        ("html", "the same as HTML"),
        ("figures", "figures"),
        ("records", "numbers"),
        ("logs", "full output"),
        ("course.json", "summary"),
    ):
        console.print(f"  {what:<20} {run_dir / folder}", soft_wrap=True, highlight=False)


def _clean(text: str) -> str:
    return escape(re.sub(r"\x1b\[[0-9;]*m", "", text))
