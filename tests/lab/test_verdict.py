"""Field cases E2: a notebook that did not work must not pass, and the reason has a name."""

import json
import sys
import time

import pytest

# The five notebooks that papermill itself lets pass (or, for SIGKILL, whose file looks healthy).
FALSE_SUCCESS = {
    "sys_exit": (["import sys; sys.exit(0)", "after = 1"], "never ran"),
    "shell_status": (["!exit 3"], "exit status 3"),
    "thread": (
        [
            "import threading, time\n"
            "def fail():\n    time.sleep(0.3)\n    raise ValueError('thread says no')\n"
            "threading.Thread(target=fail).start()"
        ],
        "ValueError: thread says no",
    ),
    "asyncio_task": (
        [
            "import asyncio\n"
            "async def fail():\n    await asyncio.sleep(0.3)\n    raise KeyError('task says no')\n"
            "kept = asyncio.create_task(fail())"
        ],
        "KeyError: 'task says no'",
    ),
    "sigkill": (["import os, signal; os.kill(os.getpid(), signal.SIGKILL)"], "kernel died"),
}


@pytest.mark.parametrize("case", FALSE_SUCCESS)
def test_a_notebook_that_papermill_lets_pass_fails_with_a_named_reason(course, case):
    cells, reason = FALSE_SUCCESS[case]
    outcome = course.one(*cells)
    assert outcome.status == 1
    assert outcome.entry["status"] == "failed"
    assert outcome.entry["peak_bytes"] > 10 * 2**20  # an interpreter, however short its life
    assert reason in outcome.entry["reason"]
    assert reason in outcome.text
    # The file itself says so, and no code cell that did not run reads `completed`.
    assert outcome.node.metadata.papermill.exception is True
    assert reason in outcome.node.metadata.logra_lab.reason
    assert outcome.node.cells[0].source.startswith("> **This run failed.**")
    for cell in outcome.node.cells:
        if cell.cell_type == "code" and cell.execution_count is None:
            assert cell.metadata.papermill.status != "completed"
    record = json.loads((outcome.run / "records" / "01_one.json").read_text())
    assert record["run"]["status"] == "failed"


def test_a_healthy_notebook_passes_and_leaves_everything(course):
    before = time.time() - 1
    outcome = course.one(
        "import sys\nprint(sys.executable)",
        "import asyncio\n"
        "async def handled():\n    raise KeyError('expected')\n"
        "task = asyncio.create_task(handled())\n"
        "try:\n    await task\nexcept KeyError:\n    print('handled')",
        "!true",
        "import matplotlib.pyplot as plt\nfrom logra_lab.lab.style import save, use_style\n"
        "use_style()\nfig, ax = plt.subplots()\nax.plot([1, 2])\nax.set_xlabel('step')\n"
        "ax.set_ylabel('memory (MiB)')\nsave(fig, 'memory')\nplt.show()",
    )
    assert outcome.status == 0, outcome.entry["reason"]
    assert outcome.entry["peak_bytes"] > 20 * 2**20  # an interpreter with matplotlib
    assert outcome.node.metadata.papermill.exception is None
    shown = [output for cell in outcome.node.cells for output in cell.get("outputs", [])]
    assert any(sys.executable in output.get("text", "") for output in shown)
    assert any("image/png" in output.get("data", {}) for output in shown)
    record = json.loads((outcome.run / "records" / "01_one.json").read_text())
    assert record["numbers"] == {"answer": 42, "share": 0.5}
    assert record["run"]["parameters"] == {"preset": "smoke"}
    figure = outcome.run / "records" / record["figures"][0]
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_mtime > before
    page = (outcome.run / "html" / "01_one.html").read_text()
    assert "data:image/png;base64" in page
    assert "prefers-color-scheme: dark" in page


@pytest.mark.parametrize(
    ("cells", "last", "reason"),
    [
        (["1 / 0"], None, "raised ZeroDivisionError"),
        ([], "def record(**_): pass\nrecord(answer=1)", "no record was written"),
        (
            ["from logra_lab.lab.record import record\nrecord(answer=1)"],
            "def record(**_): pass\nrecord()",
            "not the last cell's own",
        ),
        (
            [
                "from pathlib import Path\nfrom logra_lab.lab.record import declare\n"
                "declare(Path('gone.png'))"
            ],
            None,
            "gone.png does not exist",
        ),
        (
            [
                "import os\nfrom pathlib import Path\nfrom logra_lab.lab.record import declare\n"
                "Path('old.png').write_text('x')\nos.utime('old.png', (1, 1))\n"
                "declare(Path('old.png'))"
            ],
            None,
            "old.png is older",
        ),
        (
            ["import threading\nthreading.Thread(target=threading.Event().wait).start()"],
            None,
            "still running at the end",
        ),
        (["!exit 3\n!true"], None, "exit status 3"),
        (
            [],
            "from logra_lab.lab.record import record\nrecord(loss=float('nan'))",
            "loss is nan",
        ),
    ],
    ids=[
        *("raises", "no_record", "earlier_record", "missing_figure"),
        *("old_figure", "thread", "shell", "nan"),
    ],
)
def test_other_ways_not_to_pass(course, cells, last, reason):
    outcome = course.one(*cells, **({"last": last} if last else {}))
    assert outcome.status == 1
    assert reason in outcome.entry["reason"]


def test_a_cell_over_its_time_limit_is_named(course):
    outcome = course.one("import time\ntime.sleep(60)", limit_s=2)
    assert outcome.status == 1
    assert "cell [3] (`import time`) ran past its limit of 2 s" in outcome.entry["reason"]
    assert outcome.entry["seconds"] < 40


def test_a_failing_notebook_does_not_stop_the_next_and_both_are_reported(course, make_book):
    course.write("01_bad", make_book("raise ValueError('no')"))
    course.write("02_good", make_book("1 + 1"))
    status, summary, text = course.run()
    assert status == 1
    assert [entry["status"] for entry in summary["notebooks"]] == ["failed", "passed"]
    assert "cell [3] (`raise ValueError('no')`) raised ValueError: no" in text
    assert summary["passed"] is False


def test_what_an_earlier_run_left_cannot_pass_for_new(course, make_book):
    course.write("01_one", make_book())
    assert course.run()[0] == 0
    course.write("01_one", make_book("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    status, summary, _ = course.run()
    assert status == 1
    assert "answer" not in (course.root / "runs/r/records/01_one.json").read_text()
    assert summary["notebooks"][0]["status"] == "failed"


def test_a_short_peak_of_memory_between_two_samples_is_seen(course):
    # 300 MB for an instant; a plain kernel stays below 150 MB.
    outcome = course.one("block = bytearray(300_000_000); del block")
    assert outcome.status == 0, outcome.entry["reason"]
    assert 300_000_000 < outcome.entry["peak_bytes"] < 600_000_000


def test_memory_of_child_processes_counts(course):
    code = "block = b'x' * 300_000_000; import time; time.sleep(2)"
    outcome = course.one(
        f"import sys, subprocess\nsubprocess.run([sys.executable, '-c', {code!r}])"
    )
    assert outcome.status == 0, outcome.entry["reason"]
    assert 300_000_000 < outcome.entry["peak_bytes"] < 700_000_000


def test_no_kernel_process_survives_its_notebook(course):
    outcome = course.one(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "time.sleep(0.6)\nprint('child', child.pid)"
    )
    assert outcome.status == 0
    text = "".join(o.get("text", "") for c in outcome.node.cells for o in c.get("outputs", []))
    pid = int(text.split("child ")[1].split()[0])
    import psutil

    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
