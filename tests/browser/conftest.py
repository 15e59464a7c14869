"""One Chromium and one JupyterLab for all tests of this folder, both thrown away at the end."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest

from logra_lab.lab.context import Context, write_context

ROOT = Path(__file__).resolve().parents[2]
# Chromium asks its maker for lists and updates; a test asks nobody.
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-default-apps --disable-extensions --window-size=1280,1000"
)
# Every cell is in the page, seen or not: a test looks at all of them.
SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none"}}


def _installed(*names: str) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Headless Chromium by its driver. Missing: a skip that says so, and a failure in CI."""
    chromium = _installed("chromium", "chromium-browser", "google-chrome")
    driver = _installed("chromedriver")
    if not (chromium and driver):
        said = "no Chromium with chromedriver here: apt-get install chromium chromium-driver"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(said)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    chrome.set_page_load_timeout(60)
    yield chrome
    chrome.quit()


@dataclass
class Lab:
    """A running JupyterLab: its address and the folder it serves."""

    url: str
    folder: Path

    def put(self, notebook: Path, parameters: dict[str, Any]) -> str:
        """A copy with other values in its parameters cell; returns the address of its page."""
        node = nbformat.read(notebook, as_version=4)
        for cell in node.cells:
            if "parameters" in cell.metadata.get("tags", []):
                cell.source += "".join(f"\n{name} = {v!r}" for name, v in parameters.items())
        nbformat.write(node, self.folder / notebook.name)
        return f"{self.url}/doc/tree/{notebook.name}"


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """JupyterLab on a free port; kernels write records and figures into a temporary folder."""
    home = tmp_path_factory.mktemp("lab")
    for name, value in SETTINGS.items():
        place = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        place.parent.mkdir(parents=True)
        place.write_text(json.dumps(value))
    (home / "notebooks").mkdir()
    names = ("record", "figures", "log", "guard")
    paths = {name: str(home / "out" / name / name) for name in names}
    context = write_context(Context(notebook="browser", token="test", **paths), home / "context")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser"]
    command += ["--ServerApp.ip=127.0.0.1", f"--ServerApp.port={port}"]
    command += ["--ServerApp.port_retries=0", "--IdentityProvider.token="]
    command += [f"--ServerApp.root_dir={home / 'notebooks'}"]
    command += ["--LabApp.expose_app_in_browser=True", "--LabApp.news_url=None"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    environment = {
        **os.environ,
        **context,
        "OMP_NUM_THREADS": "1",  # the browser needs a core of its own, and waiting threads spin
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
    }
    environment.pop("MPLBACKEND", None)
    with (home / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(f"{url}/api", server, home / "log")
        yield Lab(url, home / "notebooks")
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()


def _wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start; its log ends:\n{log.read_text()[-2000:]}")
