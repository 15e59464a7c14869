"""The pages of a run: whole, valid, legible without sight, nothing fetched, failures at the top."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from logra_lab.lab import compared
from logra_lab.lab.page import write_index
from logra_lab.lab.published import PUBLISHED
from logra_lab.lab.render import to_pages

FIGURE = (
    "import matplotlib.pyplot as plt\nfrom logra_lab.lab.style import save\n"
    "fig, ax = plt.subplots()\nax.plot([1, 2], label='a < b')\n"
    "ax.set(xlabel='step (count)', ylabel='KL (nats)')\nsave(fig, 'kl_by_step')\nplt.show()"
)
WIDGET = (
    "import ipywidgets as widgets\nfrom IPython.display import display\n"
    "display(widgets.IntSlider(value=3, description='rank'))"
)
VOID = {"meta", "link", "img", "br", "hr", "input", "col", "wbr", "source"}


class Page(HTMLParser):
    """Parses strictly: every tag is closed where it was opened, ids are unique."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        assert text.lstrip().lower().startswith("<!doctype html>")
        self.feed(text)
        self.close()
        self.text = " ".join(self.text.split())
        assert self.open == [], f"never closed: {self.open}"
        ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]
        assert len(ids) == len(set(ids)), f"ids twice: {sorted(i for i in ids if ids.count(i) > 1)}"
        self.ids = set(ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in <{tag}>: {names}"
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> at line {self.getpos()[0]}"

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.text += data

    def all(self, name: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.tags if tag == name]

    def fetched(self) -> list[str]:
        """What a browser loads by itself; a link that a reader may follow is none of it."""
        return [
            attributes[key]
            for tag, attributes in self.tags
            for key in ("src", "href", "srcset", "data", "poster")
            if key in attributes and tag != "a"
        ]


@pytest.fixture(scope="module")
def run(shared_course) -> Path:
    """A run of one notebook with a figure and a widget."""
    outcome = shared_course.one(FIGURE, WIDGET)
    assert outcome.status == 0, outcome.entry["reason"]
    return outcome.run


def parsed(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def outside(text: str, page: Page) -> list[str]:
    """Addresses that would be fetched: of tags, of style sheets, of scripts."""
    urls = [url for url in page.fetched() if re.match(r"(https?:)?//", url)]
    code = re.findall(r"<(?:style|script)[^>]*>(.*?)</(?:style|script)>", text, re.DOTALL)
    return urls + [u for part in code for u in re.findall(r"(?:url\(|import )\W*https?:\S+", part)]


@pytest.mark.parametrize("name", ["index.html", "html/01_one.html"])
def test_pages_are_valid_fetch_nothing_and_name_what_images_show(run, name):
    text = (run / name).read_text(encoding="utf-8")
    page = parsed(run / name)
    assert outside(text, page) == []
    assert page.all("html") == [{"lang": "en"}]
    assert [a["content"] for a in page.all("meta") if a.get("name") == "viewport"]
    assert "prefers-color-scheme: dark" in text
    (image,) = page.all("img")
    assert image["alt"] == "Chart. KL (nats) against step (count) (a < b)"


def test_every_link_and_image_of_the_index_leads_somewhere_inside_the_run(run):
    page = parsed(run / "index.html")
    links = [attributes["href"] for attributes in page.all("a")]
    assert {"html/01_one.html", "notebooks/01_one.ipynb", "records/01_one.json"} <= set(links)
    for link in [*links, *page.fetched()]:
        if link.startswith("#"):
            assert link[1:] in page.ids, link
        else:
            assert ".." not in link
            assert (run / link).is_file(), link
    back = [a["href"] for a in parsed(run / "html" / "01_one.html").all("a") if "class" in a]
    assert (run / "html" / back[0]).resolve() == (run / "index.html").resolve()


def test_tables_say_what_their_rows_and_columns_are(run):
    page = parsed(run / "index.html")
    assert len(page.all("table")) == len(page.all("caption")) == 2
    assert {a.get("scope") for a in page.all("th")} == {"row", "col"}


def test_a_page_has_no_dead_widget_but_says_where_there_is_one(run):
    text = (run / "html" / "01_one.html").read_text(encoding="utf-8")
    assert "application/vnd.jupyter.widget" not in text
    shown = parsed(run / "html" / "01_one.html").text
    assert shown.count("IntSlider(") == 1  # in the code, and not as the text of an output
    assert "A widget stands here in a running notebook" in text
    assert "widget-view+json" in (run / "notebooks" / "01_one.ipynb").read_text()  # it keeps them


def test_a_failed_run_says_so_at_the_top_and_escapes_what_failed(course, make_book):
    course.write("01_one", make_book("raise ValueError('1 < 2 & <b>bold</b>')"))
    course.write("02_two", make_book())
    assert course.run()[0] == 1
    text = (course.root / "runs/r/index.html").read_text(encoding="utf-8")
    page = Page(text)
    top = page.text[: page.text.index("Notebooks")]
    assert "This run failed." in top
    assert "01_one failed: cell [3]" in top
    assert "1 < 2 & <b>bold</b>" in top
    assert "1 of 2 notebooks passed" in top
    assert page.all("b") != []
    assert "<b>bold</b>" not in text


def test_an_unfinished_run_says_so_at_the_top(run, course, make_book, tmp_path):
    run = shutil.copytree(run, tmp_path / "copy")
    summary = json.loads((run / "course.json").read_text())
    course.write("02_two", make_book())
    (run / "course.json").write_text(json.dumps({**summary, "waiting": ["02_two"]}))
    page = parsed(write_index(run, course.root / "notebooks"))
    top = page.text[: page.text.index("Notebooks")]
    assert "This run is not finished." in top
    assert "not run: 02_two" in top


def test_a_finished_run_raises_no_alarm(run):
    page = parsed(run / "index.html")
    assert not [a for _, a in page.tags if a.get("role") == "alert"]
    assert "1 of 1 notebooks passed" in page.text


def test_the_index_is_there_before_the_first_notebook_has_ended(course, make_book):
    # A reader who opens it while the run goes on, or after a power cut, must not see an old one.
    index = "Path('../runs/r/index.html').resolve().read_text()"
    cell = f"from pathlib import Path\nassert 'not run: 01_one' in {index}"
    course.write("01_one", make_book(cell))
    status, summary, _ = course.run()
    assert status == 0, summary["notebooks"][0]["reason"]


def test_the_glossary_stands_in_the_page_with_its_links_turned_to_pages(
    run, course, make_book, tmp_path
):
    run = shutil.copytree(run, tmp_path / "copy")
    course.write("01_one", make_book())
    (course.root / "notebooks" / "GLOSSARY.md").write_text(
        "# Glossary\n\n* **sketch**: thin. See [one](01_one.ipynb).\n"
    )
    page = parsed(write_index(run, course.root / "notebooks"))
    assert "glossary" in page.ids
    assert "html/01_one.html" in [a["href"] for a in page.all("a")]
    assert len(page.all("h1")) == 1


def by_claim(records: dict[str, Any]) -> dict[str, compared.Row]:
    rows = compared.rows(records)
    assert len({row.claim for row in rows}) == len(rows)
    return {row.claim: row for row in rows}


def test_without_a_record_the_table_says_so_and_shows_no_figure():
    rows = by_claim({})
    row = rows["7B, peak Pass@1 on MATH-500"]
    assert (row.here, row.scale, row.status) == ("–", "–", "not in this run (07_ppo)")
    assert f"{PUBLISHED['pass_7b_logra']}" in row.published


def test_a_record_without_the_number_is_called_unreadable_not_empty():
    record = {"numbers": {"steps": 1}, "run": {"preset": "smoke"}}
    row = by_claim({"07_ppo": record})["7B, peak Pass@1 on MATH-500"]
    assert row.here == "unreadable: KeyError 'means' in 07_ppo"
    assert row.status == "unknown"


def test_the_records_of_a_real_run_fill_the_table(smoke_course):
    run_dir = smoke_course[1]
    records = {path.stem: json.loads(path.read_text()) for path in run_dir.glob("records/*.json")}
    for row in compared.rows(records):
        nothing = (compared.NOT_TRIED, f"{compared.NOT_RUN} (its preset does not vary it)")
        assert row.status in (compared.SMALLER, compared.FORMULA, *nothing), row
        assert (row.here == "–") == (row.status in nothing), row


def test_the_pages_of_a_real_run_are_valid_and_fetch_nothing(smoke_course):
    run_dir = smoke_course[1]
    for path in [run_dir / "index.html", *sorted((run_dir / "html").glob("*.html"))]:
        page = parsed(path)
        assert outside(path.read_text(encoding="utf-8"), page) == [], path.name
        assert all(image["alt"] for image in page.all("img")), path.name


def test_links_between_notebooks_lead_to_pages_that_a_run_has():
    html = (
        '<a href="07_ppo.ipynb">x</a> <a href="GLOSSARY.md#rank">g</a> '
        '<a href="jobs/ablation.ipynb">job</a> <a href="https://arxiv.org/abs/1">a</a>'
    )
    assert to_pages(html) == (
        '<a href="07_ppo.html">x</a> <a href="../index.html#glossary">g</a> '
        'job <a href="https://arxiv.org/abs/1">a</a>'
    )
    assert to_pages(html, "html/", "").startswith(
        '<a href="html/07_ppo.html">x</a> <a href="#glossary">'
    )
