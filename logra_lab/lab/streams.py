"""Bound what a cell prints: its beginning and its end in the notebook, everything in a log file.

Tens of thousands of printed lines overrun the kernel's message queue and make an executed
notebook of many megabytes; the last line, the one that matters, is then the one that is lost.
"""

import sys
from pathlib import Path
from typing import Any, TextIO

HEAD_CHARS = 48_000
TAIL_CHARS = 8_000
FLUSHES = 100  # each explicit flush is a message of its own


class BoundStream:
    """Replaces `write` and `flush` of one output stream of the kernel, cell by cell."""

    def __init__(self, stream: Any, log: TextIO) -> None:
        self.log = log
        self._write, self._flush = stream.write, stream.flush
        # On the instance, so that output captured from child processes passes here as well.
        stream.write, stream.flush = self.write, self.flush
        self.start_cell()

    def start_cell(self, *_args: Any) -> None:
        """Fresh budget."""
        self.shown = 0
        self.flushes = 0
        self.held = 0
        self.tail = ""

    def write(self, text: str) -> int:
        """Show the text while the cell has budget left; keep the rest for its end."""
        self.log.write(text)
        head = text[: max(0, HEAD_CHARS - self.shown)]
        if head:
            self._write(head)
            self.shown += len(head)
        rest = text[len(head) :]
        if rest:
            self.held += len(rest)
            self.tail = (self.tail + rest)[-TAIL_CHARS:]
        return len(text)

    def flush(self) -> None:
        """Flush, unless the cell has done so too often; the kernel's timer still does."""
        self.flushes += 1
        if self.flushes <= FLUSHES:
            self._flush()

    def end_cell(self, *_args: Any) -> None:
        """Show the end of what was held back, and say where the whole text is."""
        self.log.flush()
        if self.held:
            hidden = self.held - len(self.tail)
            name = Path(self.log.name).name
            self._write(
                f"\n[... {hidden} characters left out here; all of it in logs/{name} ...]\n"
            )
            self._write(self.tail)
        self._flush()


def bound_output(shell: Any, log: Path) -> None:
    """Bound stdout and stderr of this kernel; the full text goes to `log`."""
    file = log.open("a", encoding="utf-8", buffering=1)
    for stream in (sys.stdout, sys.stderr):
        bound = BoundStream(stream, file)
        shell.events.register("pre_run_cell", bound.start_cell)
        shell.events.register("post_run_cell", bound.end_cell)
