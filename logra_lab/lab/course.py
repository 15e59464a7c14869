"""The course runner: every notebook, in order, headless, with a verdict that can be trusted.

First everything is checked and nothing runs (`prepare`); then everything runs and every failure
is reported (`run_course`). Results lie in one folder a run.
"""

import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console

from logra_lab.errors import InputError
from logra_lab.lab import report
from logra_lab.lab.context import Context, write_context
from logra_lab.lab.kernel import Execution, execute
from logra_lab.lab.notebook import Notebook, bind, parse_values, read_notebook
from logra_lab.lab.page import write_index
from logra_lab.lab.presets import preset as find_preset
from logra_lab.lab.render import write_html
from logra_lab.lab.report import Result, spell
from logra_lab.lab.verdict import reason_of_failure


@dataclass(frozen=True)
class Plan:
    """A checked course: which notebooks run, with which parameters, into which folder."""

    notebooks: list[tuple[Notebook, dict[str, Any]]]
    preset: str
    run_dir: Path
    limit_s: float  # of one cell


def prepare(
    folder: Path,
    runs: Path,
    *,
    preset: str = "laptop",
    name: str | None = None,
    only: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    texts: Mapping[str, str] | None = None,
    limit_s: float = 1800.0,
) -> Plan:
    """Find and check the notebooks of `folder`, in the order of their names.

    Args:
        name: results go to `runs / name`; by default the preset's name.
        only: beginnings of notebook names ("07"); each has to match at least one.
        values, texts: parameters for every notebook that runs, typed or as typed by a user.

    Raises:
        InputError: unknown preset, no notebook, an `only` without a match, a bad run name, a
            notebook whose frame is wrong, an unknown parameter, or a value of the wrong type.
    """
    find_preset(preset)
    name = preset if name is None else name
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InputError(f"run name {name!r}: expected letters, digits, '.', '_' and '-'")
    if not limit_s > 0:
        raise InputError(f"the time limit of a cell is {limit_s:g} s; expected more than 0")
    if "preset" in {**(values or {}), **(texts or {})}:
        raise InputError("the preset is set by --preset, not as a notebook parameter")
    paths = sorted(folder.glob("*.ipynb"))
    if not paths:
        raise InputError(f"no notebooks (*.ipynb) in {folder}")
    for prefix in only:
        if not any(path.name.startswith(prefix) for path in paths):
            names = ", ".join(path.stem for path in paths)
            raise InputError(f"no notebook starts with {prefix!r}; there are: {names}")
    chosen = [path for path in paths if not only or path.name.startswith(tuple(only))]
    notebooks = []
    for notebook in map(read_notebook, chosen):
        given = {**bind(notebook, values or {}), **parse_values(notebook, texts or {})}
        notebooks.append((notebook, {"preset": preset, **given}))
    return Plan(notebooks, preset, (runs / name).resolve(), limit_s)


def run_course(plan: Plan, console: Console | None = None) -> int:
    """Run everything, then report everything.

    Returns the exit status: 0 all passed, 1 at least one failed, 130 interrupted by Ctrl-C.
    """
    console = console or Console()
    results: list[Result] = []
    names = [notebook.name for notebook, _ in plan.notebooks]
    _copy_linked(plan)
    _write_state(plan, results, names)
    with _Progress(plan, console) as progress:
        for notebook, parameters in plan.notebooks:
            result = _run_one(plan, notebook, parameters, progress)
            results.append(result)
            progress.finished(result)
            _write_state(plan, results, names[len(results) :])
            if result.status == "interrupted":
                break
    report.print_table(console, plan.run_dir, plan.preset, results, names[len(results) :])
    if any(result.status == "interrupted" for result in results):
        return 130
    return 0 if all(result.status == "passed" for result in results) else 1


def _copy_linked(plan: Plan) -> None:
    """Texts and job notebooks lie beside the executed notebooks too, which link to them."""
    source, target = plan.notebooks[0][0].path.parent, plan.run_dir / "notebooks"
    for path in [*source.glob("*.md"), *source.glob("jobs/*.ipynb")]:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _write_state(plan: Plan, results: Sequence[Result], waiting: Sequence[str]) -> None:
    report.write_summary(plan.run_dir, plan.preset, results, waiting)
    write_index(plan.run_dir, plan.notebooks[0][0].path.parent)


def _run_one(
    plan: Plan, notebook: Notebook, parameters: dict[str, Any], progress: "_Progress"
) -> Result:
    run, name = plan.run_dir, notebook.name
    output = run / "notebooks" / f"{name}.ipynb"
    page = run / "html" / f"{name}.html"
    with tempfile.TemporaryDirectory(prefix="logra-lab-") as scratch:
        context = Context(
            notebook=name,
            token=uuid.uuid4().hex,
            record=str(run / "records" / f"{name}.json"),
            figures=str(run / "figures" / name),
            log=str(run / "logs" / f"{name}.log"),
            guard=str(Path(scratch) / "guard.json"),
        )
        _clear(output, page, Path(context.record), Path(context.figures), Path(context.log))
        progress.starts(name)
        started = time.time() - 0.01  # file systems cut their times to a tick
        execution = execute(
            notebook.path.resolve(),
            output,
            parameters,
            env=write_context(context, Path(scratch) / "context.json"),
            scratch=Path(scratch),
            log=Path(context.log),
            limit_s=plan.limit_s,
            on_cell=progress.at_cell,
        )
        reason = reason_of_failure(execution, output, context, parameters, plan.limit_s, started)
    if reason is None:
        reason = write_html(output, page)
    result = _result(notebook, execution, reason)
    if reason is not None:
        report.mark_failed(output, notebook.path, result, execution.cell)
        write_html(output, page)
    report.complete_record(Path(context.record), result, plan.preset, parameters)
    return result


def _result(notebook: Notebook, execution: Execution, reason: str | None) -> Result:
    interrupted = isinstance(execution.error, KeyboardInterrupt)
    return Result(
        notebook=notebook.name,
        status="passed" if reason is None else "interrupted" if interrupted else "failed",
        reason=reason or "",
        seconds=round(execution.seconds, 3),
        peak_bytes=execution.peak_bytes,
        takes_s=notebook.takes_s,
        needs_bytes=notebook.needs_bytes,
    )


def _clear(output: Path, *others: Path) -> None:
    """Remove what an earlier run of that name left, so that nothing old can pass for new."""
    for path in (output, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class _Progress:
    """Says every few seconds where the run is and how long it may still take."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.console = console
        self.expected = {
            notebook.name: report.past_seconds(plan.run_dir.parent, notebook.name, plan.preset)
            or notebook.takes_s
            for notebook, _ in plan.notebooks
        }
        self.left = dict(self.expected)
        self.name, self.cell, self.cells = "", 0, 0
        self.since = time.monotonic()
        self.every_s = 1.0 if console.is_terminal else 15.0
        self.live = console.status("")
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._beat, daemon=True, name="progress")

    def __enter__(self) -> "_Progress":
        total = spell(sum(self.expected.values()))
        self.console.print(f"{len(self.expected)} notebooks, about {total} in all")
        self.live.start()
        self.thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.stopped.set()
        self.thread.join()
        self.live.stop()

    def starts(self, name: str) -> None:
        self.name, self.cell, self.cells = name, 0, 0
        self.since = time.monotonic()
        if not self.console.is_terminal:
            self.console.print(self._line())

    def at_cell(self, cell: int, cells: int) -> None:
        self.cell, self.cells = cell, cells

    def finished(self, result: Result) -> None:
        del self.left[result.notebook]
        said = f"{result.notebook}: {result.status} after {spell(result.seconds)}"
        self.console.print(said, highlight=False)

    def _line(self) -> str:
        spent = time.monotonic() - self.since
        own = self.left.get(self.name, 0.0)
        left = f"about {spell(sum(self.left.values()) - min(spent, own))} left in all"
        if spent > own + 1:
            left = f"longer than {spell(own)} (a busy machine?); then {left}"
        where = f"cell {self.cell + 1} of {self.cells}" if self.cells else "starting"
        return f"{self.name}: {where}, {spell(spent)} so far, {left}"

    def _beat(self) -> None:
        while not self.stopped.wait(self.every_s):
            if self.console.is_terminal:
                self.live.update(self._line())
            else:
                self.console.print(self._line(), highlight=False)
