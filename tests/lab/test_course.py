"""Field cases E1, E3, E5 and F1, the checks before anything runs, and Ctrl-C."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import nbformat
import pytest
from rich.console import Console

from logra_lab.errors import InputError
from logra_lab.lab.course import _Progress
from logra_lab.lab.notebook import read_notebook
from logra_lab.lab.render import write_html


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stpes": 9}, "no parameter 'stpes'; did you mean 'steps'?"),
        ({"steps": "nine"}, "'steps' is a int; got 'nine'"),
        ({"steps": 2.5}, "'steps' is a int; got 2.5"),
        ({"steps": True}, "'steps' is a int; got True"),
        ({"preset": "smoke"}, "--preset"),
    ],
)
def test_unknown_names_and_wrong_types_are_refused_before_anything_runs(
    course, make_book, values, message
):
    course.write("01_one", make_book())
    with pytest.raises(InputError) as caught:
        course.plan(values=values)
    assert message in str(caught.value)
    assert not (course.root / "runs").exists()


def test_a_parameter_must_be_known_to_every_notebook_that_runs(course, make_book):
    course.write("01_one", make_book())
    course.write("02_two", make_book(parameters='preset: str = "laptop"'))
    with pytest.raises(InputError, match=r"02_two\.ipynb has no parameter 'steps'"):
        course.plan(values={"steps": 1})
    assert course.plan(values={"steps": 1}, only=["01"]).notebooks[0][1]["steps"] == 1


def tag_all(node: nbformat.NotebookNode) -> nbformat.NotebookNode:
    for cell in node.cells:
        if cell.cell_type == "code":
            cell.metadata["tags"] = ["parameters"]
    return node


@pytest.mark.parametrize(
    ("frame", "change", "message"),
    [
        ({"parameters": None}, None, "found 0"),
        ({}, tag_all, "found 2"),
        ({"parameters": "preset = 'laptop'"}, None, "name: type = literal"),
        ({"parameters": 'preset: str = "a"\nx: int = 2 * 3'}, None, "parameter 'x'"),
        ({"parameters": 'preset: str = "a"\nx: int = "3"'}, None, "'x' is a int"),
        ({"parameters": 'preset: str = "a"\nx: Path = "3"'}, None, "'Path' is not defined"),
        ({"parameters": 'preset: str = "a"\nx: int = = 3'}, None, "line 2: invalid syntax"),
        ({"parameters": 'preset: str = "a"\nx: int.y = 3'}, None, "no attribute 'y'"),
        ({"parameters": 'preset: str = "a"\nx: list[0] = 3'}, None, "parameter 'x'"),
        ({"parameters": 'preset: str = "a"\npreset: str = "b"'}, None, "declared twice"),
        ({"parameters": "steps: int = 3"}, None, "preset: str"),
        ({"last": "print('done')"}, None, "must call record(...)"),
        ({"takes": "no such line"}, None, "it takes about"),
    ],
)
def test_a_wrong_frame_is_refused_before_anything_runs(course, make_book, frame, change, message):
    node = make_book(**frame)
    course.write("01_one", change(node) if change else node)
    with pytest.raises(InputError) as caught:
        course.plan()
    assert message in str(caught.value)


def test_the_needs_line_is_read_in_its_units(course, make_book):
    line = "*You need* a CPU and 1.5 GiB; *it takes* about 90 s."
    notebook = read_notebook(course.write("01_one", make_book(takes=line)))
    assert notebook.takes_s == 90
    assert notebook.needs_bytes == 1.5 * 2**30


def test_other_bad_input(course, make_book):
    with pytest.raises(InputError, match="no notebooks"):
        course.plan()
    course.write("01_one", make_book())
    with pytest.raises(InputError, match=r"no notebook starts with '7'.*01_one"):
        course.plan(only=["7"])
    (course.root / "notebooks" / "02_two.ipynb").write_text("{")
    with pytest.raises(InputError, match=r"02_two\.ipynb: not a readable notebook"):
        course.plan()


def test_values_reach_the_cells_and_the_executed_file_states_them(course, make_book):
    course.write("01_one", make_book("print('steps is', steps, 'preset is', preset)"))
    status, _, _ = course.run(texts={"steps": "7"})
    assert status == 0
    node = nbformat.read(course.root / "runs/r/notebooks/01_one.ipynb", as_version=4)
    assert node.metadata.papermill.parameters == {"preset": "smoke", "steps": 7}
    text = "".join(o.get("text", "") for c in node.cells for o in c.get("outputs", []))
    assert "steps is 7 preset is smoke" in text


def test_what_the_notebooks_link_to_lies_beside_the_executed_ones(course, make_book):
    sources = course.write("01_one", make_book()).parent
    (sources / "WORDS.md").write_text("# Words\n")
    (sources / "jobs").mkdir()
    nbformat.write(make_book(), job := sources / "jobs" / "one.ipynb")
    assert course.run()[0] == 0
    executed = course.root / "runs/r/notebooks"
    assert (executed / "WORDS.md").read_text() == "# Words\n"
    assert (executed / "jobs/one.ipynb").read_bytes() == job.read_bytes()


def test_a_flood_of_output_stays_small_and_keeps_its_end(course):
    # 60 000 flushed lines overran the message queue and lost the last line (field case E3);
    # then a 200-step log as an engine writes it, from a child process, and the final metric.
    outcome = course.one(
        "import sys\n"
        "for i in range(60_000):\n    print('noise', i, file=sys.stderr, flush=True)\n"
        "print('last line of the flood', file=sys.stderr, flush=True)",
        "import subprocess\n"
        'code = \'for i in range(200): print("INFO engine step", i, "x" * 2000, flush=True)\'\n'
        "!{sys.executable} -c '{code}'\n"
        "print('final metric 0.875')",
    )
    assert outcome.status == 0, outcome.entry["reason"]
    file = outcome.run / "notebooks" / "01_one.ipynb"
    assert file.stat().st_size < 2_000_000
    for cell in outcome.node.cells:
        assert sum(o.output_type == "stream" for o in cell.get("outputs", [])) <= 200
    text = "".join(o.get("text", "") for c in outcome.node.cells for o in c.get("outputs", []))
    assert "last line of the flood" in text
    assert "final metric 0.875" in text
    assert "left out here; all of it in logs/01_one.log" in text
    log = (outcome.run / "logs" / "01_one.log").read_text()
    assert all(f"noise {i}\n" in log for i in (0, 31_234, 59_999))


def test_every_kernel_is_this_interpreter_whatever_the_notebook_says(course, make_book):
    node = make_book("import sys, os\nprint(sys.executable, os.environ.get('MPLBACKEND'))")
    node.metadata["kernelspec"] = {"name": "no_such_kernel", "display_name": "x"}
    course.write("01_one", node)
    status, summary, _ = course.run()
    assert status == 0, summary["notebooks"][0]["reason"]
    executed = nbformat.read(course.root / "runs/r/notebooks/01_one.ipynb", as_version=4)
    text = "".join(o.get("text", "") for c in executed.cells for o in c.get("outputs", []))
    assert sys.executable in text


def test_agg_from_outside_does_not_remove_the_inline_figures(course, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    outcome = course.one("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
    data = [o.get("data", {}) for c in outcome.node.cells for o in c.get("outputs", [])]
    assert any("image/png" in one for one in data)


WIDGET = (
    "import ipywidgets as widgets\n"
    "from IPython.display import display\n"
    "slider = widgets.IntSlider(value=3)\n"
    "slider.value = 7\n"
    "display(slider)"
)
FIGURE = (
    "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\nprint('final table: KL 0.001')"
)


def test_without_widget_output_the_curves_and_numbers_are_still_there(course, tmp_path):
    outcome = course.one(FIGURE, WIDGET)
    assert outcome.status == 0, outcome.entry["reason"]
    node = outcome.node
    assert "7" in json.dumps(node.metadata.widgets)  # headless runs do save widget state
    assert len(json.dumps(node.metadata.widgets)) < 200_000
    del node.metadata["widgets"]
    for cell in node.cells:
        for output in cell.get("outputs", []):
            for mime in [m for m in output.get("data", {}) if "jupyter.widget" in m]:
                del output.data[mime]
    stripped = tmp_path / "stripped.ipynb"
    nbformat.write(node, stripped)
    assert write_html(stripped, tmp_path / "stripped.html") is None
    page = (tmp_path / "stripped.html").read_text()
    assert "data:image/png;base64" in page
    assert "final table: KL 0.001" in page


def test_data_in_widget_traits_fails_the_notebook(course):
    outcome = course.one(WIDGET + "\ndisplay(widgets.HTML('x' * 300_000))")
    assert outcome.status == 1
    assert "bytes of state" in outcome.entry["reason"]


def test_a_notebook_that_cannot_be_rendered_fails_with_a_named_reason(course, make_book):
    node = make_book()
    output = {"output_type": "display_data", "data": {"text/markdown": 5}, "metadata": {}}
    node.cells[-1].outputs = [output]
    broken = course.root / "broken.ipynb"
    broken.write_text(json.dumps(node))
    reason = write_html(broken, course.root / "broken.html")
    assert reason is not None
    assert reason.startswith("HTML export failed with ")


def test_the_next_run_expects_what_the_last_one_took(course, make_book):
    course.write("01_one", make_book())
    _, first, text = course.run()
    assert "about 2 min 0 s in all" in text  # as the notebook states
    _, _, text = course.run()
    assert "about 2 min" not in text.splitlines()[0]
    assert f"about {first['notebooks'][0]['seconds']:.1f} s in all" in text.splitlines()[0]


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_notebook_past_its_time_is_said_to_be_late_and_not_to_be_done_soon(course, make_book):
    course.write("01_one", make_book())
    course.write("02_two", make_book())
    progress = _Progress(course.plan(), Console(file=io.StringIO()))
    progress.left = {"01_one": 20.0, "02_two": 40.0}
    progress.name, progress.since = "01_one", time.monotonic() - 12
    assert progress._line() == "01_one: starting, 12 s so far, about 48 s left in all"
    progress.since -= 38
    late = "longer than 20 s (a busy machine?); then about 40 s left in all"
    assert progress._line() == f"01_one: starting, 50 s so far, {late}"


def test_ctrl_c_ends_the_kernel_says_so_in_the_file_and_exits_130(course, make_book):
    pid_file = course.root / "pid"
    cell = (
        "import os, time\nfrom pathlib import Path\n"
        f"Path({str(pid_file)!r}).write_text(str(os.getpid()))\ntime.sleep(600)"
    )
    course.write("01_one", make_book(cell))
    course.write("02_two", make_book())
    command = [sys.executable, "-m", "logra_lab", "course", "--preset", "smoke", "--name", "r"]
    folders = ["--notebooks", course.root / "notebooks", "--runs", course.root / "runs"]
    runner = subprocess.Popen(
        [*command, *folders],
        stdout=subprocess.PIPE,
        text=True,
        # a shell that starts the tests in the background has SIGINT ignored, and so would this be
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (pid_file.is_file() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    kernel = int(pid_file.read_text())
    runner.send_signal(signal.SIGINT)
    text, _ = runner.communicate(timeout=60)
    assert runner.returncode == 130
    assert "interrupted" in text
    assert "not run" in text
    node = nbformat.read(course.root / "runs/r/notebooks/01_one.ipynb", as_version=4)
    assert node.metadata.logra_lab.status == "interrupted"
    assert "was interrupted" in node.cells[0].source
    summary = json.loads((course.root / "runs/r/course.json").read_text())
    assert summary["waiting"] == ["02_two"]
    with pytest.raises(ProcessLookupError):
        os.kill(kernel, 0)
