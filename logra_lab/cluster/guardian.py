"""Run beside a driver that has started a Ray of its own: no process and no file outlives it.

Ray's own servers end when the driver's do, by SIGKILL too; its agents linger for more than a minute
then (they try to report to a server that is gone), and a stopped process never ends. All of them
write their logs into the node's folder, and by that they are found.
"""

import os
import shutil
import sys
import time
from pathlib import Path

import psutil

_GRACE = 3.0  # seconds for an ordinary end
_LIMIT = 30.0


def writers(folder: Path) -> list[psutil.Process]:
    """Processes, but not this one's parents, that have a file in `folder` open for writing."""
    found = []
    spared = {os.getpid(), *(p.pid for p in psutil.Process().parents())}
    for process in psutil.process_iter():
        if process.pid in spared:
            continue
        try:
            files = process.open_files()
        except psutil.Error:  # ended meanwhile, or another user's
            continue
        for file in files:
            # the mode is known on Linux only
            if getattr(file, "mode", "w") != "r" and Path(file.path).is_relative_to(folder):
                found.append(process)
                break
    return found


def end_all(folder: Path) -> None:
    """Kill what writes there and does not end by itself; then remove the folder."""
    start = time.monotonic()
    while (found := writers(folder)) and time.monotonic() < start + _LIMIT:
        if time.monotonic() > start + _GRACE:
            for process in found:
                try:
                    process.kill()
                except psutil.Error:
                    continue
        time.sleep(0.1)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()  # ends with the driver, which holds the other end and writes nothing
    end_all(Path(sys.argv[1]))
