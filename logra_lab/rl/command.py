"""`logra-lab train`: run a preset, tell how far it is and how long it takes, sum up at the end."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logra_lab.errors import InputError
from logra_lab.rl import overview
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.loop import CHECKPOINT, placed_config, train
from logra_lab.rl.owner import owned
from logra_lab.rl.records import read_manifest, read_steps

if TYPE_CHECKING:
    from logra_lab.lab.presets import Preset

_EVERY_S = 15.0  # between lines in a file


def main(
    preset: "Preset",
    *,
    policy: str | None,
    run_dir: Path | None,
    resume: bool,
    settings: Mapping[str, str],
) -> int:
    """Run to the last step; the numbers and their place go to standard output."""
    from rich.console import Console

    chosen = {name: _value(text) for name, text in settings.items()}
    if policy is not None:
        chosen["policy"] = policy
    config = placed_config(preset, **chosen)
    folder = run_dir or Path("runs") / f"train-{preset.name}"
    if resume and not (folder / CHECKPOINT).is_file():
        raise InputError(f"nothing to resume: {folder / CHECKPOINT} does not exist")
    progress = Bar(config) if sys.stdout.isatty() else Lines(config)
    with owned(folder), progress:
        progress.phase(_beginning(config))
        try:
            train(config, folder, resume=resume, on_step=progress.step, on_phase=progress.phase)
        except KeyboardInterrupt:
            if (folder / CHECKPOINT).is_file():
                Console(stderr=True).print(
                    f"saved in {folder}; go on with the same command and --resume"
                )
            raise
    _sum_up(Console(), config, folder)
    return 0


def _beginning(config: TrainConfig) -> str:
    groups = [f"{config.trainers} trainers"] if config.trainers else []
    groups += [f"{config.engines} {config.engine} engines"] if config.engines else []
    return f"starting {' and '.join(groups)} on Ray" if groups else f"loading {config.policy}"


class Lines:
    """Progress in a file: a line for each phase, and for a step every quarter of a minute."""

    def __init__(
        self,
        config: TrainConfig,
        say: Callable[[str], None] = lambda text: print(text, flush=True),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.say, self.clock = config, say, clock
        self.lines: list[dict[str, Any]] = []
        self.said = float("-inf")

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def phase(self, text: str) -> None:
        self.say(f"{text} …")

    def step(self, line: dict[str, Any]) -> None:
        self.lines = [*self.lines[-9:], line]  # as many as the pace is made from
        for text in overview.notes(line):
            self.say(f"step {line['step']}: {text}")
        last = line["step"] == self.config.steps
        if last or self.clock() - self.said >= _EVERY_S:
            self.said = self.clock()
            left = overview.seconds_left(self.lines, self.config.steps)
            ahead = "" if last or left is None else f", {overview.duration(left)} left"
            seconds = f"{line['seconds_step']:.3g} s"
            self.say(
                f"step {line['step']} of {self.config.steps}: {_worded(line)}, {seconds}{ahead}"
            )


class Bar:
    """Progress on a terminal."""

    def __init__(self, config: TrainConfig) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress("{task.description}", *columns)
        self.job = self.bar.add_task("starting", total=config.steps)

    def __enter__(self) -> "Bar":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def phase(self, text: str) -> None:
        self.bar.update(self.job, description=text)

    def step(self, line: dict[str, Any]) -> None:
        self.bar.update(self.job, completed=line["step"], description=_worded(line))
        for text in overview.notes(line):
            self.bar.console.print(f"step {line['step']}: {text}", markup=False)


def _worded(line: Mapping[str, Any]) -> str:
    if line["skipped"]:
        return f"skipped, {line['skipped']}"
    right = "–" if line["accuracy"] is None else f"{line['accuracy']:.0%}"
    kl = line.get("kl_realised")
    text = f"accuracy {right}, tokens {line['response_tokens_mean']:.1f}"
    return text + ("" if kl is None else f", KL {kl:.1e}")


def _sum_up(console: Any, config: TrainConfig, folder: Path) -> None:
    from rich.table import Table

    table = Table("step", "Pass@1 (95 %)", "Pass@4", "tokens", "truncated", title=config.task)
    for evaluation in read_manifest(folder)["evaluations"]:  # of earlier sessions too
        result = evaluation["result"]
        low, high = result["pass_at_1_interval"]
        four = result["pass_at_4"]
        table.add_row(
            str(evaluation["step"]),
            f"{result['pass_at_1']:.1%} ({low:.1%} to {high:.1%})",
            "–" if four is None else f"{four:.1%}",
            f"{result['mean_length']:.1f}",
            f"{result['truncated_share']:.1%}",
        )
    console.print(table)
    lines = read_steps(folder)
    for name, words in overview.summary(lines):
        console.print(f"{name + ':':<11}{words}", highlight=False, soft_wrap=True)
    troubles = overview.troubles(lines)
    for step, text in troubles[-3:]:
        console.print(f"step {step}: {text}", markup=False, highlight=False, soft_wrap=True)
    if len(troubles) > 3:
        console.print(f"and {len(troubles) - 3} more warnings, in its steps.jsonl")
    console.print(f"records and checkpoint: {folder}", soft_wrap=True)


def _value(text: str) -> Any:
    """A setting as JSON (numbers, booleans, null, lists) or, failing that, as plain text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
