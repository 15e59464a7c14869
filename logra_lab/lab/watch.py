"""What a run is doing, from the files in its folder: at any moment, from any process, also after.

Nothing here speaks to the run. `look` reads the records; `Look.rows` says in words how it goes, and
`draw` shows its steps. A folder with no records yet, and one whose process is gone, are said to be
that.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from logra_lab.errors import LograError
from logra_lab.lab.launch import LOG
from logra_lab.lab.style import PALETTE
from logra_lab.rl import overview
from logra_lab.rl.owner import owner_of
from logra_lab.rl.records import read_manifest, read_steps

_SLOW = 5  # times a step's usual seconds without a line, and at least a minute: worth a look
_LOG_LINES = 3


@dataclass(frozen=True)
class Look:
    """A run at one moment.

    Attributes: `manifest`, None before the first record; `alive`, None where nobody can tell;
    `silent`, seconds since the records last changed; `log`, the end of its process's output.
    """

    folder: Path
    manifest: dict[str, Any] | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    alive: bool | None = None
    silent: float | None = None
    log: tuple[str, ...] = ()
    resuming: bool = False  # the records are those of an earlier process

    @property
    def steps(self) -> int:
        return int(self.manifest["config"]["steps"]) if self.manifest else 0

    @property
    def over(self) -> bool:
        """Whether nothing more will come from this process."""
        ended = self.manifest is not None and self.manifest["status"] != "running"
        return self.alive is False or (ended and not self.alive)

    @property
    def status(self) -> str:
        """In a sentence: what it is doing, or how it ended."""
        done = f"step {self.lines[-1]['step'] if self.lines else 0} of {self.steps}"
        if self.manifest is None:
            if self.alive:
                return "starting: no record yet"
            if self.log:
                return "ended before its first record"
            return "nothing here yet" if self.folder.is_dir() else "there is no such folder yet"
        said = self.manifest["status"]
        if self.resuming:
            return f"starting again after {done}"
        if said == "failed":
            return f"failed at {done}: {self.manifest['error']}"
        if said != "running":
            return f"{said} at {done}"
        since = "" if self.silent is None else f"no line for {overview.duration(self.silent)}"
        if self.alive is False:
            return f"{done}, {since}, and its process is gone: it was killed; --resume goes on"
        left = overview.seconds_left(self.lines, self.steps)
        usual = overview.step_seconds(self.lines)
        if usual is not None and (self.silent or 0) > max(60.0, _SLOW * usual):
            return f"{done}, {since}, where a step takes {overview.duration(usual)}: see its log"
        return f"{done}, running" + ("" if left is None else f", {overview.duration(left)} left")

    def rows(self) -> list[tuple[str, str]]:
        """(name, words): all that is worth knowing about the run now."""
        rows = [("status", self.status), *overview.summary(self.lines)]
        if self.lines:
            rows.append(("weights", _versions(self.lines[-1])))
        if self.manifest:
            named = self.manifest["versions"]
            of = ", ".join(f"{n} {named[n]}" for n in ("logra_lab", "torch") if named.get(n))
            rows.append(("made by", f"{of}, on {self.manifest['device']}"))
        rows += [(f"at step {n}", said) for n, said in overview.troubles(self.lines)[-3:]]
        well = self.manifest is not None and self.manifest["status"] in ("finished", "interrupted")
        if not self.lines or (self.over and not well):
            rows += [("its log", line) for line in self.log]
        return rows

    def text(self) -> str:
        return "\n".join(f"{name:<11} {words}" for name, words in self.rows())

    def html(self) -> str:
        cells = "".join(
            f"<tr><th scope='row' style='text-align:left;vertical-align:top;white-space:nowrap'>"
            f"{escape(name)}</th><td style='text-align:left'>{escape(words)}</td></tr>"
            for name, words in self.rows()
        )
        return f"<table>{cells}</table>"


def look(run_dir: str | Path, *, now: float | None = None) -> Look:
    """Read a run's folder. Raises `RecordError` for a record that is damaged before its end."""
    folder = Path(run_dir)
    owner = owner_of(folder)
    log = _tail(folder / LOG)
    if not (folder / "manifest.json").is_file():
        return Look(folder, alive=owner.alive if owner else False, log=log)
    manifest, lines = read_manifest(folder), read_steps(folder)
    changed = max((folder / name).stat().st_mtime for name in ("manifest.json", "steps.jsonl"))
    silent = max(0.0, (time.time() if now is None else now) - changed)
    alive = owner.alive if owner else None
    if owner is None and manifest["status"] != "running":
        alive = False
    resuming = owner is not None and bool(alive) and owner.began > changed
    return Look(folder, manifest, lines, alive, silent, log, resuming)


def until(
    run_dir: str | Path, reached: Callable[[Look], bool], limit_s: float, *, every: float = 0.5
) -> Look:
    """Look until `reached` says so, the run is over, or the time is; the last look.

    Raises `LograError` with the end of its log for a run that ended without a step.
    """
    end = time.monotonic() + limit_s
    while True:
        seen = look(run_dir)
        if seen.over and not seen.lines:
            raise LograError(f"the run in {run_dir} {seen.status}; {'; '.join(seen.log)}")
        if reached(seen) or seen.over or time.monotonic() >= end:
            return seen
        time.sleep(every)


def draw(seen: Look, figure: Figure) -> Figure:
    """Four panels over the steps: what it learns, KL, where the time goes, who waits."""
    figure.set_size_inches(10, 6.2)
    (learns, kl), (time_, waits) = figure.subplots(2, 2)
    steps = [line["step"] for line in seen.lines]
    _curve(learns, seen, "accuracy", "accuracy", color=PALETTE[0])
    _curve(learns, seen, "truncated_share", "truncated", color=PALETTE[1])
    learns.set(ylabel="responses of the batch (share)", ylim=(-0.02, 1.02))
    _curve(kl, seen, "kl_predicted", "predicted", color=PALETTE[5])
    _curve(kl, seen, "kl_realised", "realised", color=PALETTE[0], marker="o", ls="", ms=4)
    _curve(kl, seen, "kl_budget", "budget δ", color=PALETTE[6], ls="--", lw=1.2)
    kl.set(ylabel="KL (nats/token, log scale)", yscale="log")
    parts = [overview.split([line]) for line in seen.lines]
    below = [0.0] * len(steps)
    for name, colour in zip(overview.PHASES, PALETTE, strict=False):
        heights = [part[name] for part in parts]
        time_.bar(steps, heights, bottom=below, color=colour, label=name, width=0.8)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    rest = [part["other"] for part in parts]
    time_.bar(steps, rest, bottom=below, color="#B8B8B2", label="other", width=0.8)
    tops = [a + b for a, b in zip(below, rest, strict=True)]
    time_.set(ylabel="time of a step (s)", ylim=(0, 1.05 * max(tops, default=1.0) or 1.0))
    _waiting(waits, seen.lines)
    time_.legend(fontsize=8, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1), columnspacing=1)
    for ax in (learns, kl, time_, waits):
        ax.set(xlabel="step (count)", xlim=(0.4, max(seen.steps, len(steps), 1) + 0.6))
        if ax is not time_ and ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=9)
    figure.tight_layout()
    return figure


def _curve(ax: Axes, seen: Look, name: str, label: str, **looks: Any) -> None:
    values = [float("nan") if x.get(name) is None else x[name] for x in seen.lines]
    ax.plot([x["step"] for x in seen.lines], values, label=label, **looks)


def _waiting(ax: Axes, lines: Sequence[dict[str, Any]]) -> None:
    """Idle share of every engine, and the steps at which one was started again."""
    engines: dict[int, tuple[list[int], list[float]]] = {}
    for line in lines:
        for number, share in overview.idle([line]).items():
            x, y = engines.setdefault(number, ([], []))
            x.append(line["step"])
            y.append(share)
    for number, (x, y) in engines.items():
        colour = PALETTE[number % len(PALETTE)]
        ax.plot(x, y, "-o", ms=3, color=colour, label=f"engine {number}")
    restarted = [x["step"] for x in lines if overview.mended([x])[0]]
    for step in restarted:
        label = "engine started again" if step == restarted[0] else None
        ax.axvline(step, color=PALETTE[1], ls=":", label=label)
    ax.set(ylabel="time without work (share)", ylim=(-0.02, 1.02))
    if not engines:
        ax.text(0.5, 0.5, "no group of engines", ha="center", transform=ax.transAxes)


def _versions(line: dict[str, Any]) -> str:
    engines = (line.get("engines") or {}).get("engines", [])
    held = ", ".join(
        f"engine {e['engine']} " + ("lost" if e["lost"] else f"at {e['version']}") for e in engines
    )
    made = line["engine_version"]
    text = f"version {line['version']}" + (f"; {held}" if held else "")
    return text if made is None else f"{text}; the batch was generated by version {made}"


def _tail(path: Path) -> tuple[str, ...]:
    if not path.is_file():
        return ()
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        said = file.read().decode(errors="replace").replace("\r", "\n").splitlines()
    return tuple(line.strip() for line in said if line.strip())[-_LOG_LINES:]
