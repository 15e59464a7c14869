"""What every test gets: shape checks in the primitives, no network, few threads, an ETA."""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
from rich.console import Console

# Before anything imports them: beartype checks every annotated shape in the primitives.
PRIMITIVES = ["projection", "sketch", "rowadam", "kl", "optimizer"]
jaxtyping.install_import_hook([f"logra_lab.{name}" for name in PRIMITIVES], "beartype.beartype")

# For this process and for every kernel and worker that the tests start.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import torch  # noqa: E402  reads OMP_NUM_THREADS

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else ""
        if self.family in (socket.AF_INET, socket.AF_INET6) and host not in (
            "localhost",
            "127.0.0.1",
            "::1",
        ):
            raise RuntimeError(f"a test tried to reach {host}; tests use no network")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", local_only)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "take the notebooks' results from this folder, RUNS/NAME, instead of running them"
    parser.addoption("--course", metavar="DIR", type=Path, help=text)


@pytest.fixture(scope="session")
def smoke_course(request: pytest.FixtureRequest) -> tuple[int, Path]:
    """Every notebook, run once at the smoke preset: the exit status and the run's folder."""
    from logra_lab.lab.course import prepare, run_course

    if (given := request.config.getoption("--course")) is not None:
        passed = json.loads((given / "course.json").read_text())["passed"]
        return (0 if passed else 1), given
    root = Path(request.config.rootpath)
    plan = prepare(root / "notebooks", root / "runs", preset="smoke", name="test", limit_s=300)
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():  # its progress is for whoever waits
        return run_course(plan, Console(file=sys.stdout)), plan.run_dir


@pytest.fixture(scope="session")
def recorded(smoke_course: tuple[int, Path]) -> Callable[[str], dict[str, Any]]:
    """`recorded("07_ppo")`: the numbers that a notebook recorded at the smoke preset."""

    def numbers(name: str) -> dict[str, Any]:
        record = json.loads((smoke_course[1] / "records" / f"{name}.json").read_text())
        assert record["run"]["status"] == "passed", record["run"]["reason"]
        return record["numbers"]

    return numbers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, visibly, where there is no CUDA device."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


class _Eta:
    """Every quarter of a minute: how long the rest of the tests may take."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.past: dict[str, float] = config.cache.get("logra_lab/seconds", {})
        self.now: dict[str, float] = {}
        self.said = time.monotonic()
        self.left: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.left = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.now[report.nodeid] = self.now.get(report.nodeid, 0.0) + report.duration
        if report.when != "teardown" or report.nodeid not in self.left:
            return
        self.left.remove(report.nodeid)
        if time.monotonic() - self.said > 15 and self.left:
            self.said = time.monotonic()
            mean = sum(self.now.values()) / len(self.now)
            seconds = sum(self.past.get(name, mean) for name in self.left)
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.write_line(f" {len(self.left)} tests left, about {seconds:.0f} s")

    def pytest_sessionfinish(self) -> None:
        self.config.cache.set("logra_lab/seconds", {**self.past, **self.now})

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        run = Path(self.config.rootpath) / "runs" / "test"
        if (run / "course.json").is_file():
            terminalreporter.write_line(f"executed notebooks, HTML, figures and records: {run}")


def pytest_configure(config: pytest.Config) -> None:
    """Add the ETA."""
    config.pluginmanager.register(_Eta(config), "logra-lab-eta")
