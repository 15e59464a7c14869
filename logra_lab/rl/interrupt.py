"""Ctrl-C that lets the step under way finish: the first asks, the second insists."""

import signal
import threading
from types import FrameType
from typing import Any


class StopRequest:
    """While active, the first SIGINT sets `requested`; the next one raises KeyboardInterrupt.

    Outside the main thread Python allows no signal handler; then Ctrl-C keeps its usual meaning
    and `requested` can be set by the caller.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
