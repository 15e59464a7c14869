"""Numbers that a notebook states in words, and what backs each of them.

Prose is written once and read at every preset, so it may hold few numbers. Free are the names
of things (float32, 7B, Pass@4, "95 % intervals"), integers up to ten, powers of two written
as such, values of the parameters cell, numbers that stand in the code or among the references, and
published ones in a cell that calls them so. A number with a unit of a result (%, ×, GiB, s, ...)
is a claim: the code's own numbers do not back it. Everything else is declared where it stands,
in Markdown as an HTML comment, in code as a comment:

    <!-- numbers: 0.996 = 1 - 2**-8; 1.5 = 100 * record["rounding"]; 17 = "NeMo-RL PR 4018" -->
    # numbers: 64 = laptop.k / rank

The right side is Python: over the parameters, `laptop` (that preset), `record` (this notebook's
numbers), `results` (the files in data/results/), `published`, and `math`'s functions. It has to
round to what is shown, and is more than that number. A string is a source: words of the notebook's
text that name one.
"""

import ast
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat

from logra_lab.errors import InputError
from logra_lab.lab.context import project_root
from logra_lab.lab.notebook import Notebook, read_notebook
from logra_lab.lab.presets import preset
from logra_lab.lab.published import PUBLISHED, SOURCE

_POWERS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_NUMBER = re.compile(
    r"(?<![\w@.,^])(?<![A-Za-z]-)"  # not inside a name: float32, Qwen2.5, MATH-500, Pass@4
    r"(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?)"
    r"(?P<power>e[+-]?\d+|(?:\s?[·×]\s?10)?[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)?"
    r"(?!\w|\.\d)"
)
# What makes a number a result; sizes (64 × 64) are none. In "2 to 3 %" both are percentages.
_UNIT = re.compile(
    r"(?:\s?(?:to|→|and|or|against|±)\s?[\d.,e-]+)?\s?"
    r"(%|times\b|× (?!\d)|points?\b|[kKMG]i?B\b|bytes\b|s\b|ms\b|seconds\b|minutes\b|nats\b)"
)
_DECLARED = re.compile(r"(?:<!--|#) *numbers: *(.*?) *(?:-->|$)", re.DOTALL | re.MULTILINE)
_NOT_PROSE = re.compile(
    r"<!--.*?-->|^```.*?^```|^(?: {4}|\t).*?$|`[^`\n]*`|\$[^$\n]*[A-Za-z\\][^$\n]*\$"
    r"|\]\([^)]*\)|https?://\S+|arXiv:[\d.]+|^\*\*You need\*\*.*?$"
    r"|\b\d\d % (?:bootstrap |confidence )?intervals?",
    re.DOTALL | re.MULTILINE,
)
_REFERENCES = re.compile(r"^## References\b.*", re.DOTALL | re.MULTILINE)
_PUBLISHED = re.compile(rf"published|{SOURCE}", re.IGNORECASE)
# Arguments that set how a figure looks, and nothing that prose could mean.
_LOOKS = {"figsize", "fontsize", "lw", "linewidth", "ms", "alpha", "padding", "capsize", "s", "rot"}
_BINARY, _DECIMAL = (1.0, 2.0**-10, 2.0**-20, 2.0**-30), (1.0, 1e-3, 1e-6, 1e-9)
_SCALES: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("KiB", "MiB", "GiB"), _BINARY),
    **dict.fromkeys(("kB", "KB", "MB", "GB"), _DECIMAL),
    **dict.fromkeys(("%", "point", "points"), (1.0, 100.0)),
    "s": (1.0, 1e-3),
    "ms": (1.0, 1e3),
}


def unbacked(path: Path, record: Mapping[str, Any] | None = None) -> list[str]:
    """What the notebook at `path` states without backing, one line each; empty if all is well.

    Without `record` the source is read and declarations that need a record are left aside. With
    the numbers that a run recorded, `path` is the executed notebook: those declarations are
    evaluated, and the numbers in Markdown that its code displayed have to be in the record (also as
    a percentage or in another unit), to the digits shown.

    Raises: InputError when the notebook's frame is wrong.
    """
    notebook, node = read_notebook(path), nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in node.cells if cell.cell_type == "markdown")
    code = "\n".join(cell.source for cell in node.cells if cell.cell_type == "code")
    plain = [p.default for p in notebook.parameters.values()]
    given = set(_flat(plain))
    references = set(_in_words(" ".join(_REFERENCES.findall(text))))
    inputs = given | set(_literals(code)) | references
    scope = _scope(notebook, record)
    found = []
    for number, cell in enumerate(node.cells):
        declared, wrong = _declarations(cell.source, scope, text)
        found += [f"cell {number}: {line}" for line in wrong]
        published = set(PUBLISHED.values()) if _PUBLISHED.search(cell.source) else set()
        prose = _prose(cell)
        for value, shown, unit, where in (_one(prose, m) for m in _NUMBER.finditer(prose)):
            free = given | published if unit else inputs | published
            if not (value in free or shown in declared or _small(value, shown, unit)):
                found.append(f"cell {number}: {where}")
        if record is not None:
            displayed = _unrecorded(cell, record, given, inputs, declared)
            found += [f"output of cell {number}: {line}" for line in displayed]
    return found


def _scope(notebook: Notebook, record: Mapping[str, Any] | None) -> dict[str, Any]:
    files = (project_root() / "data" / "results").glob("*.json")
    return {
        **{name: getattr(math, name) for name in ("sqrt", "log", "exp", "cos", "pi")},
        **{"min": min, "max": max, "sum": sum},
        **{p.name: p.default for p in notebook.parameters.values()},
        "laptop": preset("laptop"),
        "published": PUBLISHED,
        "results": {f.stem: json.loads(f.read_text(encoding="utf-8"))["figures"] for f in files},
        **({} if record is None else {"record": record}),
    }


def _declarations(source: str, scope: dict[str, Any], text: str) -> tuple[set[str], list[str]]:
    """The numbers declared in a cell, and what is wrong with their declarations."""
    declared, wrong = set(), []
    for entry in (e for block in _DECLARED.findall(source) for e in block.split(";") if e.strip()):
        shown, _, expression = (part.strip() for part in entry.partition("="))
        declared.add(shown)
        match = _NUMBER.fullmatch(shown)
        try:
            tree = ast.parse(expression, mode="eval")
            names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            if "record" in names and "record" not in scope:
                continue
            value = eval(expression, {"__builtins__": {}}, scope)
        except Exception as error:  # noqa: BLE001  an author's expression may raise anything
            wrong.append(f"declaration `{entry.strip()}`: {type(error).__name__}: {error}")
            continue
        if isinstance(value, str):
            if shown in value or value not in _DECLARED.sub("", text):
                wrong.append(f"declaration `{entry.strip()}`: the text names no such source")
        elif isinstance(tree.body, ast.Constant):
            wrong.append(f"declaration `{entry.strip()}`: a number does not back itself")
        elif match is None or not _rounds(float(value), match):
            wrong.append(f"declaration `{entry.strip()}`: the right side is {value:.6g}")
    return declared, wrong


def _prose(cell: nbformat.NotebookNode) -> str:
    """Markdown without formulas, code, links and references; of code, the sentences in strings."""
    if cell.cell_type == "markdown":
        return _NOT_PROSE.sub(" ", _REFERENCES.sub("", cell.source))
    strings = [
        # An interpolated value is computed: it ends a number as it ends a word.
        "".join(str(p.value) if isinstance(p, ast.Constant) else " … " for p in node.values)
        if isinstance(node, ast.JoinedStr)
        else node.value
        for node in _outermost(ast.parse(_without_magics(cell.source)))
    ]
    sentences = [text for text in strings if len(re.findall(r"[A-Za-z]{2,}", text)) >= 4]
    return "\n".join(re.sub(r"`[^`\n]*`|arXiv:[\d.]+", " ", text) for text in sentences)


def _without_magics(source: str) -> str:
    return re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE)


def _outermost(tree: ast.AST) -> Iterator[Any]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        ):
            yield node
        else:
            yield from _outermost(node)


def _literals(code: str) -> Iterator[float]:
    pending: list[ast.AST] = [ast.parse(_without_magics(code))]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            yield float(node.value)
        if not (isinstance(node, ast.keyword) and node.arg in _LOOKS):
            pending += ast.iter_child_nodes(node)


def _one(text: str, match: re.Match[str]) -> tuple[float, str, str, str]:
    """Value, as written, unit of a result if there is one, and where it stands."""
    found = _UNIT.match(text, match.end())
    unit = found[1].strip() if found else ""
    around = " ".join(text[max(0, match.start() - 30) : match.end() + 20].split())
    return _value(match), match[0], unit, f"{match[0]} {unit}".strip() + f" in “{around}”"


def _value(match: re.Match[str]) -> float:
    digits, power = match["digits"].replace(",", ""), match["power"] or ""
    if power.startswith("e"):
        return float(digits + power)
    exponent = int(power.strip(" ·×").removeprefix("10").translate(_POWERS) or 1)
    if "10" in power:
        return float(f"{digits}e{exponent}")
    return float(f"1e{exponent}") if digits == "10" else float(digits) ** exponent


def _small(value: float, shown: str, unit: str) -> bool:
    """Counts, indices, signs and 2²⁴ belong to the language; with a unit only none, one and all."""
    if unit:
        return value in (0, 1, 100)
    return value in range(11) or re.fullmatch("2[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+", shown) is not None


def _rounds(value: float, match: re.Match[str]) -> bool:
    """Whether `value` rounds to the digits shown, half a unit of the last one included."""
    shown = _value(match)
    last = 10.0 ** -len(match["digits"].partition(".")[2])
    digits = float(match["digits"].replace(",", ""))
    scale = shown / digits if digits and shown else 1.0
    return abs(value - shown) <= 0.5000001 * last * scale


def _in_words(text: str) -> Iterator[float]:
    return (_value(match) for match in _NUMBER.finditer(text))


def _flat(content: Any) -> Iterator[float]:
    if isinstance(content, bool) or content is None:
        return
    if isinstance(content, int | float):
        yield float(content)
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield from _in_words(str(key))
            yield from _flat(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _flat(value)


def _unrecorded(
    cell: nbformat.NotebookNode,
    record: Mapping[str, Any],
    given: set[float],
    inputs: set[float],
    declared: set[str],
) -> Iterator[str]:
    known = list(_flat(record))
    for output in cell.get("outputs", []):
        text = _NOT_PROSE.sub(" ", output.get("data", {}).get("text/markdown", ""))
        for match in _NUMBER.finditer(text):
            value, shown, unit, where = _one(text, match)
            free = given if unit else inputs
            if value in free or shown in declared or _small(value, shown, unit):
                continue
            scales = _SCALES.get(unit, (1.0,))
            if not any(_rounds(abs(one) * scale, match) for one in known for scale in scales):
                yield where


def explain(found: list[str]) -> str:
    """The complaints, and what an author does about them."""
    if not found:
        raise InputError("nothing to explain: every number is backed")
    return "\n".join(
        [
            "numbers in words that nothing backs:",
            *found,
            "Print the number from code and record(...) it, or leave it out, or declare it beside "
            'the words: <!-- numbers: 0.996 = 1 - 2**-8; 17 = "NeMo-RL PR 4018" --> in Markdown, '
            "# numbers: 64 = laptop.k / rank in code. What may stand on the right, and which "
            "numbers are free, says logra_lab/lab/prose.py. What the code displays as Markdown has "
            "to be in the notebook's record.",
        ]
    )
