"""The live view of a run: its state in words and its curves, renewed while the run goes on.

It reads the run's folder and nothing else, so it can be closed, opened in another kernel, or never
be there: the run does not know of it. Where a reader has the notebook open, a thread renews it;
where nobody can press a button (the course runner, a test) it shows the moment it was made.
"""

import contextvars
import threading
from pathlib import Path

from IPython import get_ipython
from ipywidgets import HTML, Button, HBox, Output, VBox
from matplotlib.figure import Figure

from logra_lab.lab import launch, outputs
from logra_lab.lab.context import run_context
from logra_lab.lab.watch import Look, draw, look


class Watch:
    """The widget, in `box`.

    Args: run_dir: of the run, which may not have begun. every: seconds between two looks.
        threaded: whether it renews itself; by default where a reader has the notebook open.
    """

    latest: "Watch | None" = None  # of this kernel: a cell run again leaves no second thread

    def __init__(
        self, run_dir: str | Path, *, every: float = 2.0, threaded: bool | None = None
    ) -> None:
        if Watch.latest is not None:
            Watch.latest.close()
        Watch.latest = self
        self.run_dir, self.every = Path(run_dir), every
        self.button = Button(
            description="Stop the run", tooltip="End after the step under way, and save"
        )
        self.button.on_click(lambda _: self.stop())
        self.again = Button(description="Look now", tooltip="Read the run's records")
        self.again.on_click(lambda _: self.renew())
        self.said, self.table, self.output = HTML(), HTML(), Output()
        self.box = VBox([HBox([self.button, self.again]), self.said, self.table, self.output])
        self._drawn: tuple[int, int] | None = None  # lines and steps in the figure
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        seen = self.renew()
        by_hand = run_context() is None and get_ipython() is not None
        if (by_hand if threaded is None else threaded) and not seen.over:
            # In the caller's context: messages from a thread need the request they answer.
            context = contextvars.copy_context()
            self._thread = threading.Thread(
                target=context.run, args=(self._renewing,), daemon=True, name="watching a run"
            )
            self._thread.start()

    def renew(self) -> Look:
        """Look, and show it; a figure is drawn only where there are new steps."""
        with self._lock:
            seen = look(self.run_dir)
            self.table.value = seen.html()
            self.button.disabled = not seen.alive
            state = len(seen.lines), seen.steps
            if seen.lines and state != self._drawn:
                # Not by pyplot, which is the main thread's, and where a figure stays open.
                self.output.outputs = (outputs.image(draw(seen, Figure())),)
                self._drawn = state
            return seen

    def stop(self) -> None:
        """Ask the run to end after its step; it says so itself when it has."""
        self.button.disabled = True
        try:
            launch.stop(self.run_dir, limit_s=0)
            self.said.value = "asked to stop: the step under way is finished and saved"
        except Exception as error:  # raised again: an observer's own trace goes to a hidden log
            self.output.outputs = (outputs.failure(error),)
            raise

    def close(self) -> None:
        """Look no more; the run goes on."""
        self._end.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10)

    def _renewing(self) -> None:
        try:
            while not self._end.wait(self.every):
                if self.renew().over:
                    self.said.value = "the run has ended; this is what it left"
                    return
        except Exception as error:  # noqa: BLE001  a thread has nobody to raise it to
            self.output.outputs = (outputs.failure(error),)
