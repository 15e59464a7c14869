"""`index.html` of a run: the course as one page, made from what the run left on disk.

Everything it shows lies inside the run's folder, and nothing is fetched from elsewhere. It is
written again after every notebook, and says at the top when something failed or is still to come.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from nbconvert.filters import markdown2html
from PIL import Image

from logra_lab.lab import compared
from logra_lab.lab.published import SOURCE
from logra_lab.lab.render import description, to_pages
from logra_lab.lab.report import BANNER_TAG, spell


@dataclass(frozen=True)
class Picture:
    """A figure of the run: its path from the page, its size in pixels, and what it shows."""

    path: str
    width: int
    height: int
    alt: str
    caption: str


def write_index(run_dir: Path, notebooks: Path) -> Path:
    """Write `index.html` of the run from its `course.json`, records, figures and notebooks.

    Args:
        notebooks: the folder of the sources: titles of what has not run, and `GLOSSARY.md`.

    Returns: the path of the page.
    """
    summary = json.loads((run_dir / "course.json").read_text(encoding="utf-8"))
    records = {
        name: json.loads((run_dir / "records" / f"{name}.json").read_text(encoding="utf-8"))
        for name in (entry["notebook"] for entry in summary["notebooks"])
    }
    chapters = [
        *(_chapter(run_dir, entry, records[entry["notebook"]]) for entry in summary["notebooks"]),
        *(_waiting(notebooks, name) for name in summary["waiting"]),
    ]
    glossary = notebooks / "GLOSSARY.md"
    environment = Environment(
        loader=PackageLoader("logra_lab.lab", "pages"), autoescape=True, undefined=StrictUndefined
    )
    text = environment.get_template("index.html.j2").render(
        source=SOURCE,
        run=_run(run_dir.name, summary, records),
        chapters=chapters,
        compared=compared.rows({name: r for name, r in records.items() if "numbers" in r}),
        glossary=_rendered(glossary) if glossary.is_file() else None,
    )
    path = run_dir / "index.html"
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def _run(name: str, summary: dict[str, Any], records: dict[str, Any]) -> dict[str, Any]:
    entries, waiting = summary["notebooks"], summary["waiting"]
    bad = [entry for entry in entries if entry["status"] != "passed"]
    trouble = [f"{entry['notebook']} {entry['status']}: {entry['reason']}" for entry in bad]
    if waiting:
        trouble.append(f"not run: {', '.join(waiting)}")
    last = records[entries[-1]["notebook"]] if entries else {}
    made = last.get("run", {})
    parts = [f"{key} {value}" for key, value in made.get("versions", {}).items()]
    machine = made.get("machine", {})
    if machine:
        parts += [machine["system"], f"{machine['cores']} CPU cores"]
    return {
        "name": name,
        "preset": summary["preset"],
        "passed": sum(entry["status"] == "passed" for entry in entries),
        "count": len(entries) + len(waiting),
        "seconds": spell(sum(entry["seconds"] for entry in entries)),
        "written": last["written"][:16].replace("T", " ") + " UTC" if "written" in last else "",
        "headline": "This run failed." if bad else "This run is not finished.",
        "trouble": trouble,
        "machine": " · ".join(parts),
    }


def _chapter(run_dir: Path, entry: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    name = entry["notebook"]
    node = nbformat.read(run_dir / "notebooks" / f"{name}.ipynb", as_version=4)
    links = [
        (f"html/{name}.html", "page"),
        (f"notebooks/{name}.ipynb", "executed notebook"),
        (f"records/{name}.json", "numbers"),
    ]
    # What a failed notebook declared may be missing, old, or no image at all.
    declared = record.get("figures", []) if entry["status"] == "passed" else []
    figures = [run_dir / "records" / path for path in declared]
    return {
        **_head(name, node),
        "status": entry["status"],
        "reason": entry["reason"],
        "seconds": spell(entry["seconds"]),
        "takes": spell(entry["takes_s"]),
        "peak": _mebibytes(entry["peak_bytes"]),
        "needs": _mebibytes(entry["needs_bytes"]),
        "links": [(link, text) for link, text in links if (run_dir / link).is_file()],
        "figures": [_picture(run_dir, path) for path in figures if path.suffix == ".png"],
    }


def _waiting(notebooks: Path, name: str) -> dict[str, Any]:
    node = nbformat.read(notebooks / f"{name}.ipynb", as_version=4)
    nothing = dict.fromkeys(("reason", "seconds", "takes", "peak", "needs"), "")
    return {**_head(name, node), "status": "not run", **nothing, "links": [], "figures": []}


def _head(name: str, node: nbformat.NotebookNode) -> dict[str, str]:
    """Number, title and the claim under it, from the notebook's first cell of text."""
    texts = [
        cell.source
        for cell in node.cells
        if cell.cell_type == "markdown" and BANNER_TAG not in cell.metadata.get("tags", [])
    ]
    title, _, rest = texts[0].partition("\n")
    claim = rest.strip().partition("\n\n")[0]
    return {
        "name": name,
        "number": name.partition("_")[0],
        "title": title.lstrip("# "),
        "claim": Markup(_inline(claim)),
    }


def _inline(text: str) -> str:
    return to_pages(re.sub(r"^<p>|</p>$", "", markdown2html(text).strip()), "html/", "")


def _picture(run_dir: Path, path: Path) -> Picture:
    with Image.open(path) as image:
        width, height = image.size
    where = path.resolve().relative_to(run_dir.resolve()).as_posix()
    return Picture(where, width, height, description(path), path.stem.replace("_", " "))


def _mebibytes(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _rendered(path: Path) -> Markup:
    """The glossary, its headings one level down; links to notebooks lead to their pages."""
    html = markdown2html(path.read_text(encoding="utf-8"))
    html = re.sub(r'<a class="anchor-link".*?</a>', "", html)
    html = to_pages(html, "html/", "")
    return Markup(re.sub(r"<(/?)h([1-5])", lambda m: f"<{m[1]}h{int(m[2]) + 1}", html))
