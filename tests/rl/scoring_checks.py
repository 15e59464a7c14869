"""Verifier checks for test_scoring, importable by the scoring processes (no test lives here)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from logra_lab.rl.outcomes import Outcome, Problem

RETURNS = {
    "true": True,
    "false": False,
    "one": 1.0,
    "half": 0.5,
    "zero": 0.0,
    "int": 1,
    "outcome": Outcome.unparsable,
    "nan": float("nan"),
    "two": 2.0,
    "minus": -0.1,
    "none": None,
    "text": "correct",
}


def behave(text: str, problem: Problem):
    """Do what the text says."""
    if text == "hang":
        time.sleep(600)
    if text == "spin":
        # One endless C call that holds the interpreter lock: no Python-level timer can end it.
        sum(range(10**15))
    if text == "raise":
        raise RuntimeError("the judge's own mistake")
    if text == "exit":
        sys.exit(0)
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if text.startswith("child:"):
        child = subprocess.Popen(["sleep", "600"])
        Path(text.removeprefix("child:")).write_text(str(child.pid))
        time.sleep(600)
    return RETURNS[text]


def equals(text: str, problem: Problem) -> bool:
    return text == problem.answer


def heavy_modules(text: str, problem: Problem) -> bool:
    """True where the worker has loaded none of the named modules."""
    return not set(text.split(",")) & sys.modules.keys()


def process(text: str, problem: Problem):
    Path(text).write_text(str(os.getpid()))
    time.sleep(600)


def numpy_values(text: str, problem: Problem):
    import numpy

    return {"bool": numpy.bool_(True), "float32": numpy.float32(1.0)}[text]


def nap(text: str, problem: Problem) -> bool:
    time.sleep(float(text))
    return True


def process_then_spin(text: str, problem: Problem):
    Path(text).write_text(str(os.getpid()))
    sum(range(10**15))
