"""What a notebook declares, read without running it: parameters, needs, and its `record(...)`."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Optional

import nbformat
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from logra_lab.errors import InputError
from logra_lab.lab.record import MIME

_TYPES = {
    **{kind.__name__: kind for kind in (str, int, float, bool, list, tuple, dict)},
    "Literal": Literal,
    "Optional": Optional,
}
_TAKES = re.compile(r"it takes\W*(?:about|around|up to)?\s*([\d.]+)\s*(s|sec|min)", re.IGNORECASE)
_NEEDS = re.compile(r"you need\b.*?([\d.]+)\s*(MB|MiB|GB|GiB)", re.IGNORECASE | re.DOTALL)
_BYTES = {"mb": 10**6, "mib": 2**20, "gb": 10**9, "gib": 2**30}


@dataclass(frozen=True)
class Parameter:
    """One line of the parameters cell: `name: type = literal  # what it is`."""

    name: str
    annotation: str
    default: Any
    adapter: TypeAdapter[Any]


@dataclass(frozen=True)
class Notebook:
    """A notebook that may run: its frame has been checked."""

    path: Path
    parameters: dict[str, Parameter]
    takes_s: float  # at the laptop preset, from its "you need / it takes" line
    needs_bytes: int

    @property
    def name(self) -> str:
        """The file's stem, as in records and tables."""
        return self.path.stem


def read_notebook(path: Path) -> Notebook:
    """Check the frame of a notebook and read what it declares.

    Raises:
        InputError: not a notebook; no or more than one cell tagged `parameters`; a parameter
            without a type, with a value that is not a literal of that type, or without
            `preset: str`; no "you need / it takes" line; a last code cell without `record(...)`.
    """
    try:
        node = nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError) as error:
        raise InputError(f"{path.name}: not a readable notebook ({error})") from error
    code = [cell for cell in node.cells if cell.cell_type == "code"]
    tagged = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise InputError(
            f"{path.name}: expected one code cell with the tag 'parameters', found {len(tagged)}; "
            "set the tag in the cell's metadata"
        )
    parameters = _read_parameters(path.name, tagged[0].source)
    if "preset" not in parameters or parameters["preset"].annotation != "str":
        raise InputError(f'{path.name}: the parameters cell must hold `preset: str = "laptop"`')
    if not _calls_record(code[-1].source):
        raise InputError(f"{path.name}: the last code cell must call record(...)")
    text = "\n".join(cell.source for cell in node.cells if cell.cell_type == "markdown")
    takes, needs = _TAKES.search(_plain(text)), _NEEDS.search(_plain(text))
    if takes is None or needs is None:
        raise InputError(
            f"{path.name}: no line like 'You need 2 CPU cores and 2 GB of memory; it takes about "
            "3 minutes'; the runner compares both numbers with what it measures"
        )
    return Notebook(
        path=path,
        parameters=parameters,
        takes_s=float(takes[1]) * (60 if takes[2].lower() == "min" else 1),
        needs_bytes=int(float(needs[1]) * _BYTES[needs[2].lower()]),
    )


def _plain(text: str) -> str:
    return re.sub(r"[*_`]+", "", text)  # markdown emphasis


def _calls_record(source: str) -> bool:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # magics: the last cell is to be plain Python
        return False
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return any(isinstance(func, ast.Name) and func.id == "record" for func in calls)


def _read_parameters(where: str, source: str) -> dict[str, Parameter]:
    parameters: dict[str, Parameter] = {}
    try:
        lines = ast.parse(source).body
    except SyntaxError as error:
        raise InputError(f"{where}: parameters cell, line {error.lineno}: {error.msg}") from error
    for line in lines:
        if not (isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)):
            raise InputError(
                f"{where}: parameters cell, line {line.lineno}: expected `name: type = literal`, "
                f"found `{ast.unparse(line)}`; compute in a later cell"
            )
        name, annotation = line.target.id, ast.unparse(line.annotation)
        try:
            # Only the names of plain types can occur: anything else is a NameError.
            kind = eval(annotation, {"__builtins__": {}}, dict(_TYPES))
            default = ast.literal_eval(line.value) if line.value else None
            adapter = TypeAdapter(kind, config=ConfigDict(strict=True))
        except (NameError, AttributeError, TypeError, ValueError, PydanticUserError) as error:
            raise InputError(f"{where}: parameter {name!r}: {error}") from error
        if name in parameters:
            raise InputError(f"{where}: parameter {name!r} is declared twice")
        parameters[name] = Parameter(name, annotation, default, adapter)
        _check(where, parameters[name], default)
    return parameters


def _check(where: str, parameter: Parameter, value: Any) -> Any:
    try:
        return parameter.adapter.validate_python(value)
    except ValidationError as error:
        raise InputError(
            f"{where}: parameter {parameter.name!r} is a {parameter.annotation}; "
            f"got {value!r} ({error.errors()[0]['msg']})"
        ) from error


def bind(notebook: Notebook, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check values for the notebook's parameters; unnamed ones keep their defaults.

    Raises:
        InputError: an unknown name (with the nearest declared one) or a value of another type.
    """
    bound = {}
    for name, value in values.items():
        if name not in notebook.parameters:
            near = get_close_matches(name, notebook.parameters, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(
                f"{notebook.path.name} has no parameter {name!r}{hint} It declares: "
                f"{', '.join(notebook.parameters)} (--only picks the notebooks to run)"
            )
        bound[name] = _check(notebook.path.name, notebook.parameters[name], value)
    return bound


def parse_values(notebook: Notebook, texts: Mapping[str, str]) -> dict[str, Any]:
    """The same for values typed on a command line, read as literals of the declared types."""
    values: dict[str, Any] = {}
    for name, text in texts.items():
        parameter = notebook.parameters.get(name)
        if parameter is None or parameter.annotation == "str":
            values[name] = text
            continue
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = {"true": True, "false": False}.get(text.lower(), text)
    return bind(notebook, values)


def outputs_record(node: nbformat.NotebookNode, token: str) -> bool:
    """Whether the last code cell of an executed notebook shows the record of this execution."""
    last = [cell for cell in node.cells if cell.cell_type == "code"][-1]
    shown = [output.get("data", {}).get(MIME) for output in last.get("outputs", [])]
    return any(isinstance(mark, dict) and mark.get("token") == token for mark in shown)
