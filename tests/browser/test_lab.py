"""Each notebook in JupyterLab, in Chromium: it runs; its sliders recompute, by key and by mouse."""

import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("selenium")

from selenium.webdriver import ActionChains, Keys  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Seconds for all cells at the smoke preset, and for one move of a slider: ten times what they take
# on two idle cores, since a machine may be busy; only a notebook that hangs waits for them.
LIMIT_S, MOVE_S = 600, 300
# Notebooks whose every move trains a policy: they are run, one slider is moved, once.
HEAVY = ("07", "08", "10")

STATE = """
const panel = window.jupyterapp && window.jupyterapp.shell.currentWidget;
const session = panel && panel.content && panel.content.widgets && panel.sessionContext.session;
if (!session || !panel.sessionContext.isReady) return null;
const code = panel.content.widgets.map(cell => cell.model).filter(one => one.type === 'code');
const outputs = code.flatMap(one => one.outputs.toJSON());
return {
  cells: code.length,
  ran: code.filter(one => one.executionCount && one.executionState !== 'running').length,
  kernel: session.kernel && session.kernel.status,
  errors: outputs.filter(one => one.output_type === 'error').map(
    one => one.traceback.slice(-4).join('\\n') + one.ename + one.evalue),
  at: code.filter(one => !one.executionCount || one.executionState === 'running').slice(0, 1).map(
    one => one.sharedModel.source.slice(0, 200)),
};
"""
# A box with sliders and, below them, one result: how the library builds all widgets but the live
# run, which has buttons, and whose slider acts on a run that somebody has to start.
BOXES = """
return [...document.querySelectorAll('.jp-OutputArea .widget-vbox')].filter(
  box => box.querySelector('.noUi-handle') && box.querySelector('.jp-OutputArea')
    && !box.querySelector('button'));
"""
HANDLES = "return document.querySelectorAll('.jp-OutputArea .noUi-handle').length"
RESULT = """
const area = arguments[0].querySelector('.jp-OutputArea');
const images = [...area.querySelectorAll('img')];
const wrong = area.querySelectorAll('[data-mime-type*="error"], [data-mime-type*="stderr"]');
return {
  text: area.innerText.trim(),
  images: images.map(one => one.src),
  loaded: images.every(one => one.naturalWidth > 0),
  error: [...wrong].map(one => one.innerText).join(' '),
  busy: arguments[0].innerText.includes('computing …'),
  labels: [...arguments[0].querySelectorAll('.widget-readout')].map(one => one.innerText),
};
"""


def wait(until: Any, seconds: float, what: str | Callable[[], str]) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := until():
            return found
        time.sleep(0.2)
    what = what if isinstance(what, str) else what()
    pytest.fail(f"waited {seconds:.0f} s for {what}", pytrace=False)


def ended(browser: Any) -> dict[str, Any] | None:
    """The state of the notebook once an error or the last cell has ended its run."""
    state = browser.execute_script(STATE)
    finished = state and state["ran"] == state["cells"] and state["kernel"] == "idle"
    return state if state and (state["errors"] or finished) else None


def numbers(result: dict[str, Any]) -> Counter[str]:
    """The numbers of a result without those of the sliders' own labels, which always change."""
    return Counter(re.findall(r"\d[\d.,]*", result["text"])) - Counter(
        number for label in result["labels"] for number in re.findall(r"\d[\d.,]*", label)
    )


def settled(browser: Any, box: Any, before: dict[str, Any]) -> dict[str, Any]:
    """The result in the box once its numbers and its figure are others than before."""

    def changed() -> dict[str, Any] | None:
        now = browser.execute_script(RESULT, box)
        assert not now["error"], now["error"]
        if now["busy"] or not now["images"] or not now["loaded"]:
            return None
        same = numbers(now) == numbers(before) or now["images"] == before["images"]
        return None if same else now

    result = wait(changed, MOVE_S, f"other numbers and another figure than {before['text'][:80]!r}")
    assert len(result["images"]) == 1
    return result


def at_end(handle: Any) -> bool:
    now, most = (float(handle.get_attribute(f"aria-value{x}")) for x in ("now", "max"))
    return now >= most


@pytest.fixture
def opened(browser: Any, lab: Any, request: pytest.FixtureRequest) -> Any:
    """The notebook of this test, running in the browser; its kernel ends with the test."""
    browser.get(lab.put(request.param, {"preset": "smoke"}))
    wait(lambda: browser.execute_script(STATE), 60, "the notebook and its kernel")
    browser.execute_script("window.jupyterapp.commands.execute('notebook:run-all-cells')")
    yield browser
    browser.execute_script(
        "const panel = window.jupyterapp.shell.currentWidget;"
        "return panel.sessionContext.shutdown().then(() => panel.context.save())"
    )


@pytest.mark.parametrize("opened", NOTEBOOKS, ids=lambda path: path.stem, indirect=True)
def test_a_notebook_runs_and_its_sliders_change_numbers_and_figure(
    opened: Any, request: pytest.FixtureRequest
) -> None:
    browser, path = opened, request.node.callspec.params["opened"]
    wait(lambda: ended(browser), LIMIT_S, lambda: f"the end of {browser.execute_script(STATE)}")
    state = browser.execute_script(STATE)
    assert state["errors"] == []
    boxes = browser.execute_script(BOXES)
    handles = [(box, one) for box in boxes for one in find(box, ".noUi-handle")]
    assert browser.execute_script(HANDLES) == len(re.findall(r"slider\(", code_of(path)))
    assert handles or "slider(" not in code_of(path)
    heavy = path.name.startswith(HEAVY)
    for box, handle in handles[:1] if heavy else handles:
        by_key = moved_by_key(browser, box, handle)  # the first result takes the place of a hint
        if not heavy:
            by_key = moved_by_key(browser, box, handle)
            moved_by_mouse(browser, box, handle, by_key)
    assert browser.execute_script(STATE)["errors"] == []


def find(element: Any, selector: str) -> list[Any]:
    return element.find_elements(By.CSS_SELECTOR, selector)


def code_of(path: Path) -> str:
    cells = nbformat.read(path, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "code")


def moved_by_key(browser: Any, box: Any, handle: Any) -> dict[str, Any]:
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", handle)
    assert handle.get_attribute("role") == "slider"
    before = browser.execute_script(RESULT, box)
    browser.execute_script("arguments[0].focus()", handle)
    handle.send_keys(Keys.ARROW_LEFT if at_end(handle) else Keys.ARROW_RIGHT)
    return settled(browser, box, before)


def moved_by_mouse(browser: Any, box: Any, handle: Any, before: dict[str, Any]) -> None:
    """Drags the handle to that end of its track where it is not."""
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", handle)
    far = find(box, ".noUi-target")[0].size["width"]
    far = -far if at_end(handle) else far
    ActionChains(browser).drag_and_drop_by_offset(handle, far, 0).perform()
    settled(browser, box, before)
