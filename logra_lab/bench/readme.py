"""README's table of measured numbers, generated from the result files in `data/results/`.

`python -m logra_lab.bench.readme` rewrites the part between the markers; a test keeps it current.
"""

import json
from pathlib import Path

from logra_lab.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"


def table(folder: Path = ROOT / "data" / "results") -> str:
    """A Markdown table of every figure in the folder's result files, bound and verdict beside it.

    Raises `InputError` for a file made with --quick: it measures nothing.
    """
    lines = [
        "| `logra-lab bench` | figure | measured | range | bound | holds |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if result["quick"]:
            raise InputError(f"{path} was made with --quick; run the full bench")
        for key, f in result["figures"].items():
            spread = "" if f["low"] is None else f"{f['low']:.3g} to {f['high']:.3g}"
            verdict = {True: "yes", False: "**no**", None: ""}[f["holds"]]
            lines.append(
                f"| {result['bench']} | `{key}` | {f['value']:.3g} {f['unit']} | {spread} | "
                f"{f['bound'] or ''} | {verdict} |"
            )
    return "\n".join(lines)


def rendered(text: str) -> str:
    """The README with its table renewed."""
    if BEGIN not in text or END not in text:
        raise InputError(f"README.md has no {BEGIN} … {END}: put both where the table belongs")
    head, rest = text.split(BEGIN, 1)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END, 1)[1]}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(rendered(readme.read_text()))
