"""The report of a run in Chromium: images are there, nothing overflows a phone, light and dark."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from logra_lab.lab.course import prepare, run_course

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("index.html", "html/01_one_matrix.html")
IMAGES = "return [...document.images].map(one => [one.alt, one.naturalWidth])"
# WCAG's relative luminance of a colour that a browser reports.
CONTRAST = """
const light = text => {
  const part = c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = text.match(/[\\d.]+/g).map(Number);
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const ground = element => {
  const colour = getComputedStyle(element).backgroundColor;
  return colour.endsWith(', 0)') && element.parentElement ? ground(element.parentElement) : colour;
};
return [...document.querySelectorAll(arguments[0])].filter(one => one.offsetParent).map(one => {
  const pair = [light(getComputedStyle(one).color), light(ground(one))].sort((a, b) => b - a);
  return [one.innerText.slice(0, 40), (pair[0] + 0.05) / (pair[1] + 0.05)];
});
"""

# What is wider than its place, and no parent of it scrolls.
CUT = """
const scrolls = one => one && one !== document.body
  && (['auto', 'scroll'].includes(getComputedStyle(one).overflowX) || scrolls(one.parentElement));
return [...document.querySelectorAll('pre, table, img, .highlight')].filter(
  one => one.scrollWidth > one.clientWidth || one.getBoundingClientRect().right > innerWidth
).filter(one => !scrolls(one)).map(one => one.tagName + ' ' + one.innerText.slice(0, 60));
"""


@pytest.fixture(scope="module")
def run_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of --course, or one of the first notebook with a layer in it."""
    if (given := request.config.getoption("--course")) is not None:
        return given.resolve()
    runs = tmp_path_factory.mktemp("runs")
    plan = prepare(ROOT / "notebooks", runs, preset="smoke", only=["01"], name="r")
    assert run_course(plan, Console(quiet=True)) == 0
    return runs / "r"


def show(browser: Any, page: Path, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("browser")  # forget what other pages said
    browser.get(page.as_uri())


@pytest.fixture(autouse=True)
def _as_before(browser: Any) -> Any:
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_its_images_and_fits_its_width(browser, run_dir, name, width, scheme):
    show(browser, run_dir / name, width, scheme)
    images = browser.execute_script(IMAGES)
    assert len(images) >= 3
    assert all(alt and wide > 0 for alt, wide in images), images
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(CUT) == []
    assert browser.get_log("browser") == []  # nothing was missing, nothing was refused


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_text_stands_out_from_its_ground_in_light_and_dark(browser, run_dir, name, scheme):
    # 4.5 to 1: WCAG 2.2, success criterion 1.4.3. Highlighted code is the notebook theme's.
    show(browser, run_dir / name, 1280, scheme)
    found = browser.execute_script(CONTRAST, "h1, h2, h3, p, th, td, li, a, summary, figcaption")
    assert len(found) > 20
    assert [one for one in found if one[1] < 4.5 and one[0].strip()] == []
    ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    levels = [int(part) for part in ground.strip("rgba()").split(",")[:3]]
    assert (max(levels) < 80) if scheme == "dark" else (min(levels) > 200), ground


def test_further_figures_open_by_keyboard(browser, run_dir):
    show(browser, run_dir / "index.html", 1280, "light")
    summary = browser.find_element("css selector", "details summary")
    browser.execute_script("arguments[0].focus()", summary)
    summary.send_keys(" ")
    assert browser.execute_script("return arguments[0].parentElement.open", summary)
