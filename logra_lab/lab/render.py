"""An executed notebook as one HTML page that a reader needs nothing else for.

No script, style sheet or image is fetched; the page follows the reader's light or dark setting;
images have texts; and where a widget stood a note says how to get it, since a page has no kernel.
"""

import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import nbformat
from nbconvert import HTMLExporter
from PIL import Image

_WIDGET = "application/vnd.jupyter.widget"
_NOTE = (
    "*A widget stands here in a running notebook (`make lab`). What it is about, this page shows "
    "in figures and tables.*"
)
_SAVED = re.compile(r"""\bsave\([^"']*["']([A-Za-z0-9_-]+)["']""")


def write_html(executed: Path, target: Path) -> str | None:
    """Render an executed notebook; texts of its images come from the figures of the same run.

    Returns what went wrong, as a notebook that cannot be rendered has failed.
    """
    template = (files("logra_lab.lab") / "pages" / "notebook.html.j2").read_text(encoding="utf-8")
    exporter = HTMLExporter(raw_template=template, embed_images=True)
    sheets = (Path(folder) / "static" / "theme-dark.css" for folder in exporter.template_paths)
    try:
        node = nbformat.read(executed, as_version=4)
        _without_widgets(node)
        _with_texts(node, executed.parents[1] / "figures" / executed.stem)
        node.metadata["title"] = _title(node, executed.stem)
        index = target.parents[1] / "index.html"
        resources = {
            "logra_lab_dark": next(s for s in sheets if s.is_file()).read_text(encoding="utf-8"),
            "logra_lab_index": "../index.html" if index.is_file() else "",
        }
        body = to_pages(exporter.from_notebook_node(node, resources)[0])
    except Exception as error:  # noqa: BLE001  the template engine raises whatever it likes
        return f"HTML export failed with {type(error).__name__}: {error}"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(body, encoding="utf-8")
    return None


def to_pages(html: str, folder: str = "", index: str = "../index.html") -> str:
    """Links between notebooks lead to their pages in `folder`, and the glossary's to `index`; those
    to job notebooks, of which a run has no page, become words."""
    html = re.sub(r'<a href="jobs/[^"]*"[^>]*>(.*?)</a>', r"\1", html)
    html = re.sub(r'href="(\d\d_\w+)\.ipynb', rf'href="{folder}\1.html', html)
    return re.sub(r'href="GLOSSARY\.md(#[^"]*)?"', f'href="{index}#glossary"', html)


def _without_widgets(node: nbformat.NotebookNode) -> None:
    if "widgets" in node.metadata:
        node.metadata.pop("widgets")
    for cell in node.cells:
        for output in cell.get("outputs", []):
            if any(mime.startswith(_WIDGET) for mime in output.get("data", {})):
                output["data"] = {"text/markdown": _NOTE}


def _with_texts(node: nbformat.NotebookNode, figures: Path) -> None:
    """Each image says what it shows: what `save` wrote into its figure, or else where it stands."""
    heading = ""
    for cell in node.cells:
        if cell.cell_type == "markdown":
            heading = (re.findall(r"^#+ (.*)$", cell.source, re.MULTILINE) or [heading])[-1]
        texts = _descriptions(cell.source, figures)
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                text = next(texts, None) or f"figure in the section “{heading}”"
                output.setdefault("metadata", {})["alt"] = text


def _descriptions(source: str, figures: Path) -> Iterator[str]:
    for name in _SAVED.findall(source):
        if (path := figures / f"{name}.png").is_file():
            yield description(path)


def description(path: Path) -> str:
    """What `style.save` wrote into a figure about what it shows."""
    with Image.open(path) as image:
        return str(image.info.get("Description", "")) or f"figure “{path.stem.replace('_', ' ')}”"


def _title(node: nbformat.NotebookNode, name: str) -> str:
    texts = (cell.source for cell in node.cells if cell.cell_type == "markdown")
    found = (re.search(r"^# (.*)$", text, re.MULTILINE) for text in texts)
    return next((match[1] for match in found if match), name)
