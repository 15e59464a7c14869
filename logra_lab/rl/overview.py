"""What a run did, from its step lines: where the time went, who waited, what was lost and mended.

A line is one of `records.read_steps`; a run in one process has no `engines` and no `trainers`.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]

PHASES = ("generate", "score", "train", "update", "sync")
_RECENT = 10  # steps: later ones have other lengths than the first


def split(lines: Sequence[Line]) -> dict[str, float]:
    """Seconds of all steps by phase; "other" is what no phase has.

    With overlap "generate" is the waiting for a batch that was generated meanwhile.
    """
    found = {name: sum(_number(x, f"seconds_{name}") for x in lines) for name in PHASES}
    whole = sum(_number(x, "seconds_step") for x in lines)
    return found | {"other": max(0.0, whole - sum(found.values()))}


def shares(lines: Sequence[Line]) -> dict[str, float]:
    """`split` as shares of the whole; empty where no time has passed."""
    found = split(lines)
    whole = sum(found.values())
    return {name: seconds / whole for name, seconds in found.items()} if whole else {}


def generated(line: Line) -> float:
    """Tokens of all responses of a step."""
    return float(line["response_tokens_mean"] * sum(line["outcomes"].values()))


def rate(lines: Sequence[Line]) -> float | None:
    """Generated tokens a second of whole steps."""
    seconds = sum(_number(x, "seconds_step") for x in lines)
    return sum(map(generated, lines)) / seconds if seconds else None


def step_seconds(lines: Sequence[Line]) -> float | None:
    """A recent step's seconds, the median of the last ten."""
    recent = [_number(x, "seconds_step") for x in lines[-_RECENT:]]
    return statistics.median(recent) if recent else None


def seconds_left(lines: Sequence[Line], steps: int) -> float | None:
    """Until the last step, at the pace of the last ten; evaluations come on top."""
    pace = step_seconds(lines)
    return None if pace is None else pace * max(0, steps - lines[-1]["step"])


def idle(lines: Sequence[Line]) -> dict[int, float]:
    """Engine → share of the steps' time in which it did nothing.

    The engines' own clock also runs between steps: lines that span a start or an evaluation are
    left out, unless there are no others.
    """
    waited: dict[int, float] = {}
    seconds: dict[int, float] = {}
    own = [x for x in lines if x.get("engines") and _is_of_the_step(x)]
    for group in _groups(own or lines):
        for engine in group["engines"]:
            if engine["idle_share"] is not None:
                number = engine["engine"]
                waited[number] = waited.get(number, 0.0) + engine["idle_share"] * group["seconds"]
                seconds[number] = seconds.get(number, 0.0) + group["seconds"]
    return {number: waited[number] / seconds[number] for number in waited if seconds[number]}


def mended(lines: Sequence[Line]) -> tuple[int, int]:
    """(engines started again, pieces of batches generated again)."""
    groups = _groups(lines)
    return sum(g["restarts"] for g in groups), sum(g["pieces_redone"] for g in groups)


def notes(line: Line) -> list[str]:
    """What a step has to tell: warnings, and faults of engines that were mended."""
    return [*line["warnings"], *(line.get("engines") or {}).get("faults", [])]


def troubles(lines: Sequence[Line]) -> list[tuple[int, str]]:
    """(step, what): notes and skipped steps, in order."""
    found: list[tuple[int, str]] = []
    for line in lines:
        said = notes(line) + ([f"skipped: {line['skipped']}"] if line["skipped"] else [])
        found += [(line["step"], text) for text in said]
    return found


def memory(lines: Sequence[Line]) -> dict[str, float]:
    """Largest MiB seen, by whose it is: this loop's process, a trainer's or an engine's host
    memory, and what a trainer's tensors, or all of an engine's card, had of a GPU."""
    found: dict[str, float] = {}

    def note(name: str, value: float | None) -> None:
        if value is not None:
            found[name] = max(found.get(name, 0.0), value)

    for line in lines:
        note("loop", line.get("peak_memory_mib"))
        for rank in line.get("trainers") or []:
            note("trainer", rank["host_mib"])
            note("trainer, GPU", rank["gpu_mib"])
        for engine in (line.get("engines") or {}).get("engines", []):
            note("engine", engine["host_mib"])
            note("engine, GPU", engine["gpu_mib"])
    return found


def duration(seconds: float) -> str:
    """A time as one reads it: 42 s, 3 min 20 s, 5 h 7 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def summary(lines: Sequence[Line]) -> list[tuple[str, str]]:
    """(name, words) rows that say how a run went; empty before its first step."""
    if not lines:
        return []
    pace, speed = step_seconds(lines), rate(lines)
    parts = [f"{name} {share:.1%}" for name, share in shares(lines).items() if share >= 5e-4]
    rows = [("time", ", ".join(parts) or "none")]
    rows.append(("pace", f"{pace:.3g} s a step, {speed or 0:,.0f} generated tokens a second"))
    if waiting := idle(lines):
        restarts, again = mended(lines)
        shown = ", ".join(f"engine {number} {share:.0%}" for number, share in waiting.items())
        rows.append(("idle", shown))
        rows.append(("mended", f"{restarts} engine restarts, {again} pieces generated again"))
    stale = max((line.get("staleness") or 0 for line in lines), default=0)
    rows.append(("staleness", f"at most {stale} updates" if stale else "none, on-policy"))
    peaks = [f"{name} {mib:,.0f} MiB" for name, mib in memory(lines).items()]
    rows.append(("memory", ", ".join(peaks)))
    skipped = sum(bool(line["skipped"]) for line in lines)
    rows.append(("steps", f"{len(lines)}, of which skipped {skipped}"))
    return rows


def _number(line: Line, name: str) -> float:
    return float(line.get(name) or 0.0)  # a skipped step has no update


def _is_of_the_step(line: Line) -> bool:
    return bool(line["engines"]["seconds"] <= 1.5 * line["seconds_step"])


def _groups(lines: Sequence[Line]) -> list[Any]:
    return [line["engines"] for line in lines if line.get("engines")]
