"""`record(...)`: the last cell of every notebook states its numbers, and a file keeps them.

The runner counts a notebook as passed only if this cell ran and the file, with every figure it
names, is new. Interactively the same call writes to `runs/interactive/`.
"""

import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from logra_lab.errors import InputError
from logra_lab.lab.context import interactive_folder, run_context

MIME = "application/vnd.logra-lab.record+json"

_artefacts: list[Path] = []


def declare(path: Path) -> None:
    """Register a file the notebook made; `record` lists it and the runner checks that it is new."""
    resolved = Path(path).resolve()
    if resolved not in _artefacts:
        _artefacts.append(resolved)


def record(numbers: Mapping[str, Any] | None = None, /, **more: Any) -> Path:
    """Write the notebook's numbers as JSON and show them; to be called in the last code cell.

    Values are numbers, strings, booleans, None, or (nested) lists and mappings of them; tensors
    and arrays of one element count as numbers, longer ones as lists.

    Returns: the path of the record.
    Raises:
        InputError: no numbers, a name given twice, a value that JSON cannot hold, or a number
            that is not finite (a result that is NaN is no result; use None for "not measured").
    """
    given = dict(numbers or {})
    twice = sorted(given.keys() & more.keys())
    if twice:
        raise InputError(f"record: {twice[0]!r} is given twice, in the mapping and by keyword")
    values = {name: _plain(name, value) for name, value in {**given, **more}.items()}
    if not values:
        raise InputError("record: no numbers given; pass the results, as in record(after=0.91)")
    context = run_context()
    path = Path(context.record) if context else _interactive_path()
    content = {
        "notebook": context.notebook if context else path.stem,
        "token": context.token if context else None,
        "written": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "numbers": values,
        "figures": [os.path.relpath(artefact, path.parent) for artefact in _artefacts],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)
    _show(path, content)
    return path


def _plain(name: str, value: Any) -> Any:
    if hasattr(value, "tolist"):  # tensors and arrays of any library
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"record: {name} is {value}; expected a finite number, or None")
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{name}[{i}]", item) for i, item in enumerate(value)]
    raise InputError(
        f"record: {name} is a {type(value).__name__}; expected a number, a string, or lists and "
        "mappings of them"
    )


def _interactive_path() -> Path:
    # JupyterLab names the notebook of a kernel here; a plain IPython session has no name.
    session = Path(os.environ.get("JPY_SESSION_NAME", "session")).stem
    return interactive_folder() / "records" / f"{session}.json"


def _show(path: Path, content: dict[str, Any]) -> None:
    from IPython import get_ipython
    from IPython.display import display

    lines = [f"{name:<28} {_short(value)}" for name, value in content["numbers"].items()]
    text = "\n".join([*lines, f"recorded in {path.parent.name}/{path.name}"])
    if get_ipython() is None:
        print(text)
        return
    display({MIME: {"token": content["token"]}, "text/plain": text}, raw=True)


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
