"""`logra-lab bench NAME`: the project's numbers, each with the bound it is held to.

A bench module has `run(quick) -> dict[str, Figure]`. The JSON and the table show the same:
`{"bench", "machine", "versions", "figures": {key: {value, unit, low, high, bound, holds}}}`.
Times are ratios from interleaved runs; `--quick` only tries the machinery.
"""

import importlib
import json
import operator
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from logra_lab.atomic import check_writable

_COMPARE = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True)
class Figure:
    """A measured value, the spread it came from, and the bound it should hold (``"<= 0.78"``)."""

    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    bound: str | None = None
    holds: bool | None = None


def figure(
    value: float | Sequence[float], unit: str, bound: str | None = None, *, every: bool = False
) -> Figure:
    """A figure from one value, or from several: their median with minimum and maximum.

    `bound` is ``"<= 0.78"`` or a range ``"0.95 .. 1.05"``; it is held by the median, or with
    `every` by each value.
    """
    values = [float(value)] if isinstance(value, (int, float)) else [float(v) for v in value]
    middle = statistics.median(values)
    holds = None
    if bound is not None:
        holds = all(_within(v, bound) for v in (values if every else [middle]))
    several = len(values) > 1
    low, high = (min(values), max(values)) if several else (None, None)
    return Figure(middle, unit, low, high, bound, holds)


def _within(value: float, bound: str) -> bool:
    first, second, *third = bound.split()
    if second == "..":
        return float(first) <= value <= float(third[0])
    return bool(_COMPARE[first](value, float(second)))


def main(name: str, *, json_path: str | None, quick: bool) -> int:
    """Run a bench; print its table and, if asked, write its JSON (``-`` for standard output)."""
    from rich.console import Console
    from rich.table import Table

    from logra_lab.rl.environment import hardware, versions

    check_writable("--json", json_path)
    figures: dict[str, Figure] = importlib.import_module(f"logra_lab.bench.{name}").run(quick)
    result = {
        "bench": name,
        "quick": quick,
        "machine": hardware(),
        "versions": versions(),
        "figures": {key: asdict(value) for key, value in figures.items()},
    }
    title = f"bench {name}" + ", quick: sizes too small for its bounds" * quick
    table = Table("figure", "value", "low", "high", "unit", "bound", "holds", title=title)
    table.columns[0].overflow = "fold"  # names that are cut look alike
    for key, f in figures.items():
        verdict = "" if quick else {True: "yes", False: "NO", None: ""}[f.holds]
        table.add_row(key, *(_short(x) for x in (f.value, f.low, f.high)), f.unit, f.bound, verdict)
    Console(stderr=json_path == "-").print(table)
    text = json.dumps(result, indent=2) + "\n"
    if json_path == "-":
        sys.stdout.write(text)
    elif json_path is not None:
        Path(json_path).write_text(text)
    return 0


def say(text: str) -> None:
    """Progress of a bench, on standard error."""
    print(text, file=sys.stderr, flush=True)


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
