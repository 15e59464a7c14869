"""Run an untrusted function on test inputs in a limited child process.

THIS IS NOT A SECURITY SANDBOX. The child is an ordinary process of the same user: it can read the
user's files and use the network. The limits keep honest mistakes (endless loops, runaway memory,
huge files) from hurting the machine; for hostile code use a container or a virtual machine.

What it does resist is reward hacking: the child gets only the arguments, never the expected
values, and its results come back as JSON and are compared outside, so that leaving early,
overriding ``==`` or reading the tests does not pass them.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CPU_S = 2  # seconds of CPU time for all cases of a problem
WALL_S = 4.0  # seconds by the clock; below the scoring pool's default limit of 5
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20

_HARNESS = """
import json, resource
given = json.load(open("given.json", encoding="utf-8"))
for name, limit in given["limits"].items():
    resource.setrlimit(getattr(resource, name), (limit, limit))
names = {"__name__": "candidate"}
exec(compile(given["source"], "candidate.py", "exec"), names)
results = [json.dumps(names[given["function"]](*args), sort_keys=True) for args in given["args"]]
with open("results.json", "w", encoding="utf-8") as file:
    json.dump(results, file)
"""


def run_function(source: str, function: str, args: list[list[Any]]) -> list[str] | None:
    """Results of `function(*a)` for each `a` as JSON texts (keys sorted), or None if any failed.

    The child is ``python -I`` (no user site, no environment, no path of ours) in an empty temporary
    folder, without standard streams, with limits on CPU time, memory, file size, open files and
    core dumps. A crash, an exception, a result that is no JSON value, or going over a limit is the
    candidate's failure and gives None. Cost: one process start, about 20 ms.
    """
    limits = {
        "RLIMIT_CPU": CPU_S,
        "RLIMIT_AS": MEMORY_BYTES,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_NOFILE": 64,
        "RLIMIT_CORE": 0,
    }
    given = {"source": source, "function": function, "args": args, "limits": limits}
    with tempfile.TemporaryDirectory(prefix="unit-tests-") as folder:
        Path(folder, "given.json").write_text(json.dumps(given), encoding="utf-8")
        try:
            # Same process group as the caller: the pool kills the group, candidate included.
            done = subprocess.run(
                [sys.executable, "-I", "-c", _HARNESS],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                timeout=WALL_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None
        results = Path(folder, "results.json")
        if done.returncode != 0 or not results.is_file():
            return None
        return _read(results)


def _read(path: Path) -> list[str] | None:
    """The candidate can write this file too, so that anything may be in it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None
