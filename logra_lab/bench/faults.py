"""What a run on Ray survives: processes are killed, stopped and starved, and it has to go on.

A run that nothing befalls, 2 trainers and an engine whose samples do not depend on timing, tells
what every other one has to come to: the same records (but seconds) and the same weights, bit for
bit. `survived` is 1 if a run came to that, with no process left behind; seconds are from the fault
to the first step recorded after it, a start of new processes included.
"""

import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from logra_lab.bench import Figure, figure, say
from logra_lab.bench.detached import LIMIT, await_end, await_step, command, detached, kill_driver
from logra_lab.bench.mischief import (
    fill_disk,
    kill_engine,
    kill_trainer,
    lose_update,
    spoil_sketch,
    stop_engine,
    stop_trainer,
)
from logra_lab.cluster.node import Needs, start
from logra_lab.errors import LograError
from logra_lab.rl.config import TrainConfig, make_config
from logra_lab.rl.loop import train
from logra_lab.rl.publish import JOURNAL
from logra_lab.rl.records import read_steps
from logra_lab.rl.run import Run
from logra_lab.sync.journal_replay import Replay

_CLOCKS = ("seconds_", "peak_", "engines", "trainers", "warnings")
_SETTINGS: dict[str, Any] = {
    "steps": 6,
    "prompts_per_step": 24,
    "train_problems": 96,
    "eval_problems": 8,
    "eval_samples": 1,
    "max_new_tokens": 8,
    "rank": 8,
    "kl_start": 1e-3,
    "trainers": 2,
    "engines": 1,
    "engine": "hf",
    "journal_every": 50,
    "checkpoint_every": 2,
    "trainer_timeout": LIMIT,
    "engine_timeout": LIMIT,
}

Strike = Callable[[Run], None]


def run(quick: bool) -> dict[str, Figure]:
    """Each fault: 1 if it was survived, and seconds. Quick leaves out the driver and the kernel."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="logra_faults_")))
        stack.enter_context(start(None, Needs(), cpus=4))  # one Ray for the runs of this process
        say("a run that nothing befalls")
        sound = go(settings(), folder / "sound")
        if sound.error is not None:
            raise sound.error
        outcomes = {}
        for name, fault in FAULTS.items():
            if quick and fault in (driver_killed, kernel_restarted):
                continue
            say(name.replace("_", " "))
            outcomes[name] = outcome = fault(folder / name, folder / "sound")
            say(f"  {outcome.said}")
    figures = {}
    for name, outcome in outcomes.items():
        figures[name] = figure(float(outcome.survived), "survived", ">= 1")
        figures[f"{name}_s"] = figure(outcome.seconds, "s to recover")
    return figures


@dataclass(frozen=True)
class Outcome:
    """What came of a fault, in a number, seconds and words."""

    survived: bool
    seconds: float
    said: str


@dataclass
class Went:
    """A run, or its part until it failed: when a fault struck, and when steps were recorded."""

    error: LograError | None = None
    struck: float = math.nan
    recorded: dict[int, float] = field(default_factory=dict)

    @property
    def recovered(self) -> float:
        """Seconds from the fault to the first step recorded after it."""
        return min((t for t in self.recorded.values() if t > self.struck), default=math.inf)


def settings(**changes: Any) -> TrainConfig:
    return make_config(**_SETTINGS | changes)


def go(
    config: TrainConfig,
    run_dir: Path,
    strikes: Mapping[int, Strike] | None = None,
    *,
    resume: bool = False,
) -> Went:
    """A run in this process; `strikes` befall it just before their steps."""
    went, one_step = Went(), Run.one_step

    def watched(self: Run) -> dict[str, Any]:
        strike = (strikes or {}).get(self.step + 1)
        if strike is not None:
            went.struck = time.monotonic()
            strike(self)
        return one_step(self)

    def recorded(line: dict[str, Any]) -> None:
        went.recorded[line["step"]] = time.monotonic()

    Run.one_step = watched  # type: ignore[method-assign]
    try:
        train(config, run_dir, resume=resume, on_step=recorded)
    except LograError as error:
        went.error = error
    finally:
        Run.one_step = one_step  # type: ignore[method-assign]
    return went


def differences(run_dir: Path, sound: Path, steps: int | None = None) -> list[str]:
    """In what a run differs from the sound one, in its first `steps` steps: records and weights."""
    ours, theirs = (
        [{k: v for k, v in line.items() if not k.startswith(_CLOCKS)} for line in read_steps(x)]
        for x in (run_dir, sound)
    )
    last = len(theirs) if steps is None else steps
    found = [] if len(ours) >= last else [f"{len(ours)} steps are recorded, not {last}"]
    for a, b in zip(ours[:last], theirs[:last], strict=False):
        odd = sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))
        found += [f"step {b['step']} differs in {odd}"] if odd else []
    version = theirs[last - 1]["version"]
    (_, mine), (_, other) = (Replay.open(x / JOURNAL).weights(version) for x in (run_dir, sound))
    found += [
        f"weights of {name} differ" for name in other if not torch.equal(mine[name], other[name])
    ]
    return found


# --- faults and what has to come of them ---------------------------------------------------------


def _goes_on(strike: Strike) -> Callable[[Path, Path], Outcome]:
    """A fault that the run itself has to mend, within its third step and the next."""

    def fault(run_dir: Path, sound: Path) -> Outcome:
        went = go(settings(), run_dir, {3: strike})
        return _outcome(went, [] if went.error else differences(run_dir, sound))

    return fault


def _stops(strike: Strike, step: int) -> Callable[[Path, Path], Outcome]:
    """A fault that ends the run with an error that says how to go on; then it is resumed."""

    def fault(run_dir: Path, sound: Path) -> Outcome:
        first = go(settings(), run_dir, {step: strike})
        if first.error is None or "resume" not in str(first.error):
            return Outcome(False, math.inf, f"ended with {first.error!r}")
        reported = read_steps(run_dir)
        second = go(settings(), run_dir, resume=True)
        second.struck = first.struck
        problems = [] if second.error else differences(run_dir, sound)
        if read_steps(run_dir)[: len(reported)] != reported:
            problems.append("a reported step was lost")
        return _outcome(second, problems, f"{first.error}; ")

    return fault


def nan_on_one_rank(run_dir: Path, sound: Path) -> Outcome:
    """All ranks skip the last step, and the weights are those before it."""
    last = settings().steps
    went = go(settings(), run_dir, {last: spoil_sketch})
    problems = [] if went.error else differences(run_dir, sound, last - 1)
    line = read_steps(run_dir)[-1]
    if line["step"] != last or "nan" not in str(line["skipped"]):
        problems.append(f"the last record is of step {line['step']}: skipped {line['skipped']}")
    if Replay.open(run_dir / JOURNAL).versions()[-1] != last - 1:
        problems.append("the journal holds an update of the skipped step")
    return _outcome(went, problems, f"{line['skipped']}: ")


def driver_killed(run_dir: Path, sound: Path) -> Outcome:
    """SIGKILL to the process of the run: nothing of it stays, and it is resumed."""
    with detached(settings(), run_dir) as launched:
        await_step(run_dir, 2)
        struck = time.monotonic()
        problems = kill_driver(run_dir)
        reported = read_steps(run_dir)
        launched(resume=True)
        await_step(run_dir, len(reported) + 1)
        seconds = time.monotonic() - struck
        problems += await_end(run_dir)
    if read_steps(run_dir)[: len(reported)] != reported:
        problems.append("a reported step was lost")
    return _judged(problems + differences(run_dir, sound), seconds)


def kernel_restarted(run_dir: Path, sound: Path) -> Outcome:
    """SIGKILL to the process that started the run and watches it; another one attaches."""
    code = (
        "import sys, time; from logra_lab.lab import launch; launch.start_or_attach(sys.argv[1], "
        "sys.argv[2:]); print('started', flush=True); time.sleep(3600)"
    )
    program = [sys.executable, "-c", code, str(run_dir), *command(settings(), run_dir)]
    kernel = subprocess.Popen(program, stdout=subprocess.PIPE, start_new_session=True)
    with ExitStack() as stack:
        stack.callback(kernel.kill)
        launched = stack.enter_context(detached(settings(), run_dir, start=False))
        assert kernel.stdout is not None
        kernel.stdout.readline()
        await_step(run_dir, 2)
        struck, seen = time.monotonic(), len(read_steps(run_dir))
        kernel.kill()
        kernel.wait()
        attached = launched()
        problems = [] if attached == "attached" else [f"the run was {attached}, not attached to"]
        await_step(run_dir, seen + 1)
        seconds = time.monotonic() - struck
        problems += await_end(run_dir)
    return _judged(problems + differences(run_dir, sound), seconds)


FAULTS: dict[str, Callable[[Path, Path], Outcome]] = {
    "engine_killed": _goes_on(kill_engine),
    "update_lost": _goes_on(lose_update),
    "engine_straggles": _goes_on(stop_engine),
    "trainer_straggles": _goes_on(stop_trainer),
    "nan_on_one_rank": nan_on_one_rank,
    "trainer_killed": _stops(kill_trainer, 4),
    "disk_full": _stops(fill_disk, 4),
    "driver_killed": driver_killed,
    "kernel_restarted": kernel_restarted,
}


def _outcome(went: Went, problems: list[str], before: str = "") -> Outcome:
    if went.error is not None:
        problems = [f"ended with {went.error!r}", *problems]
    return _judged(problems, went.recovered - went.struck, before)


def _judged(problems: list[str], seconds: float, before: str = "") -> Outcome:
    said = "; ".join(problems[:3]) or f"went on after {seconds:.1f} s"
    return Outcome(not problems and seconds < LIMIT, seconds, before + said)
