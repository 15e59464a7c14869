"""What a group of engines did between two reports: its own seconds, and each engine's share."""

import copy
import time
from typing import Any

from logra_lab.cluster.seats import Seats


class Meter:
    """Counts that only grow, so that a batch in the background may go on counting while a report
    is made. Attributes: seconds of generating and of sending updates; pieces done again."""

    def __init__(self, seats: Seats) -> None:
        self.seats = seats
        self.generating = self.sending = 0.0
        self.redone = 0
        self._before = self._counts()

    def report(self) -> dict[str, Any]:
        """The counts since the last report, as plain values; see `EngineGroup.stats`."""
        now, before = self._counts(), self._before
        self._before = now
        wall, generating = (now[name] - before[name] for name in ("clock", "generating"))
        engines = []
        for seat, new, old in zip(self.seats.all, now["tallies"], before["tallies"], strict=True):
            busy = new.busy - old.busy
            engines.append(
                {
                    "engine": seat.index,
                    "version": seat.version,
                    "busy_seconds": busy,
                    "idle_share": _rest(busy, wall),
                    "generate_idle_share": _rest(new.generating - old.generating, generating),
                    "rows": new.rows - old.rows,
                    "pieces": new.pieces - old.pieces,
                    "restarts": new.restarts - old.restarts,
                    "lost": bool(seat.lost),
                    "host_mib": seat.memory.get("host_mib"),
                    "gpu_mib": seat.memory.get("gpu_mib"),
                }
            )
        return {
            "seconds": wall,
            "generate_seconds": generating,
            "transport_seconds": now["sending"] - before["sending"],
            "pieces_redone": now["redone"] - before["redone"],
            "restarts": sum(engine["restarts"] for engine in engines),
            "engines": engines,
            "faults": self.seats.faults[before["faults"] : now["faults"]],
        }

    def _counts(self) -> dict[str, Any]:
        return {
            "clock": time.monotonic(),
            "generating": self.generating,
            "sending": self.sending,
            "redone": self.redone,
            "faults": len(self.seats.faults),
            "tallies": [copy.copy(seat.tally) for seat in self.seats.all],
        }


def _rest(part: float, whole: float) -> float | None:
    return max(0.0, 1 - part / whole) if whole > 0 else None
