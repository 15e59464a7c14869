"""README's tables of measured numbers, generated from the result files in `data/results/`.

`python -m logra_lab.bench.readme` rewrites the part between the markers; a test keeps it current.
"""

import json
from pathlib import Path

from logra_lab.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def table(folder: Path = ROOT / "data" / "results") -> str:
    """Every figure in the folder's result files, bound and verdict beside it, as Markdown: for each
    bench a fold, whose line says how many bounds it holds and names those it does not.

    Raises `InputError` for a file made with --quick: it measures nothing.
    """
    return "\n\n".join(_fold(path) for path in sorted(folder.glob("*.json")))


def _fold(path: Path) -> str:
    result = json.loads(path.read_text())
    if result["quick"]:
        raise InputError(f"{path} was made with --quick; run the full bench")
    figures, name = result["figures"], result["bench"]
    bounded = [f["holds"] for f in figures.values() if f["bound"]]
    missed = ", ".join(f"<code>{key}</code>" for key, f in figures.items() if f["holds"] is False)
    verdict = f"{sum(bounded)} of {len(bounded)} bounds held" + f" (not: {missed})" * bool(missed)
    lines = [
        f"<details><summary><code>logra-lab bench {name}</code>: {len(figures)} figures, {verdict}"
        "</summary>",
        "",
        "| figure | measured | range | bound | holds |",
        "|---|---|---|---|---|",
    ]
    for key, f in figures.items():
        spread = "" if f["low"] is None else f"{f['low']:.3g} to {f['high']:.3g}"
        holds = {True: "yes", False: "**no**", None: ""}[f["holds"]]
        lines.append(
            f"| `{key}` | {f['value']:.3g} {f['unit']} | {spread} | {f['bound'] or ''} | {holds} |"
        )
    return "\n".join([*lines, "", "</details>"])


def rendered(text: str) -> str:
    """The README with its tables renewed."""
    if BEGIN not in text or END not in text:
        raise InputError(f"README.md has no {BEGIN} … {END}: put both where the tables belong")
    head, rest = text.split(BEGIN, 1)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(rendered(readme.read_text()))
