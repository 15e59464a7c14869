"""Did a notebook pass? Papermill returning is not enough; neither is an exception-free file.

It passed when nothing was raised, every code cell ran, the guard inside the kernel saw no other
failure, and the record with every figure it names was written by this execution.
"""

import json
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from papermill.execute import remove_error_markers

from logra_lab.lab.context import Context
from logra_lab.lab.kernel import Execution
from logra_lab.lab.notebook import outputs_record

WIDGET_STATE_LIMIT = 200_000  # bytes; more than that is data, which does not belong into traits


def reason_of_failure(
    execution: Execution,
    output: Path,
    context: Context,
    parameters: dict[str, Any],
    limit_s: float,
    started: float,
) -> str | None:
    """One line that names what went wrong, or None if the notebook passed.

    `started` is the wall-clock time before the kernel was launched, in seconds since the epoch.
    """
    if execution.error is not None:
        return _named(execution, output, limit_s)
    node = nbformat.read(output, as_version=4)
    missing = [
        index
        for index, cell in enumerate(node.cells)
        if cell.cell_type == "code" and cell.execution_count is None
    ]
    if missing:
        where = _where(node, missing[0])
        return f"{where} never ran (the kernel left early, for example by sys.exit)"
    return (
        _guarded(Path(context.guard), execution)
        or _recorded(node, context, started)
        or _written(node, parameters)
    )


def _named(execution: Execution, output: Path, limit_s: float) -> str:
    error = execution.error
    if execution.cell is None:
        return f"the kernel did not start: {type(error).__name__}: {error}"
    # Papermill's own markers are cells that would shift the numbers.
    where = _where(remove_error_markers(nbformat.read(output, as_version=4)), execution.cell)
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted in {where}"
    if isinstance(error, CellTimeoutError):
        return f"{where} ran past its limit of {limit_s:g} s; raise it with --timeout"
    if isinstance(error, DeadKernelError):
        return f"the kernel died in {where} (killed, out of memory, or crashed)"
    if isinstance(error, PapermillExecutionError):
        return f"{where} raised {error.ename}: {error.evalue}"
    return f"{where}: {type(error).__name__}: {error}"


def _where(node: nbformat.NotebookNode, index: int) -> str:
    """The cell as the executed file numbers it, with its first line."""
    number = sum(cell.cell_type == "code" for cell in node.cells[: index + 1])
    first = node.cells[index].source.strip().partition("\n")[0][:60]
    return f"cell [{number}] (`{first}`)"


def _guarded(path: Path, execution: Execution) -> str | None:
    if not path.is_file():
        return "the guard in the kernel left no findings; the kernel ended before its last check"
    findings = json.loads(path.read_text(encoding="utf-8"))
    # Sampling from outside misses short peaks of the kernel; it knows its own.
    execution.peak_bytes = max(execution.peak_bytes, findings["peak_bytes"])
    if findings["executable"] != sys.executable:
        return f"the kernel ran {findings['executable']}, the runner is {sys.executable}"
    return "; ".join(findings["failures"]) or None


def _recorded(node: nbformat.NotebookNode, context: Context, started: float) -> str | None:
    path = Path(context.record)
    if not path.is_file():
        return "no record was written; the last cell has to call record(...)"
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["token"] != context.token or not outputs_record(node, context.token):
        return "the record is not the last cell's own, from this execution"
    for file in [path, *(path.parent / figure for figure in content["figures"])]:
        if not file.is_file() or file.stat().st_size == 0:
            return f"the declared file {file.name} does not exist or is empty"
        if file.stat().st_mtime < started:
            return f"the declared file {file.name} is older than this execution"
    return None


def _written(node: nbformat.NotebookNode, parameters: dict[str, Any]) -> str | None:
    used = node.metadata.papermill.parameters
    if json.dumps(used, sort_keys=True) != json.dumps(parameters, sort_keys=True):
        return f"the executed file states the parameters {used}, given were {parameters}"
    state = len(json.dumps(node.metadata.get("widgets", {})))
    if state > WIDGET_STATE_LIMIT:
        return f"its widgets hold {state:,} bytes of state; keep data out of widget traits"
    return None
