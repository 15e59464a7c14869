"""A live training: start it, pause it, change δ while it runs, stop it, and watch its curves.

In a notebook that somebody has open, the training runs in a thread of the kernel, and cells can
be run meanwhile. It speaks through its own widget only, by assigning traits: what a thread
prints would end up under whichever cell runs. Where nobody can press a button (the course runner,
a test), it runs in the caller's thread.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from IPython import get_ipython
from ipywidgets import HTML, Button, HBox, Output, ValueWidget, VBox
from matplotlib.figure import Figure

from logra_lab.lab import outputs
from logra_lab.lab.context import run_context
from logra_lab.lab.curves import draw
from logra_lab.lab.steered import Steered, opened
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.run import Run

_REDRAW_S = 0.7  # a figure takes a tenth of a second, as a short step does


class LiveTraining:
    """The widget, in `box`; the training it shows, if one was started, in `steered`.

    Args:
        config: what is trained, from its policy anew at each start; the budget is `delta`'s.
        delta: a control whose value is the budget δ, at the start and while it runs.
        threaded: whether `start` returns at once; by default where a reader has the notebook open.
    """

    latest: "LiveTraining | None" = None  # of this kernel: a cell run again ends its training

    def __init__(
        self,
        config: TrainConfig,
        delta: ValueWidget,
        *,
        threaded: bool | None = None,
        open_run: Callable[[TrainConfig], AbstractContextManager[Run]] = opened,
    ) -> None:
        if LiveTraining.latest is not None and LiveTraining.latest.steered is not None:
            LiveTraining.latest.steered.stop()
        LiveTraining.latest = self
        self.config, self.delta, self._open = config, delta, open_run
        by_hand = run_context() is None and get_ipython() is not None
        self.threaded = by_hand if threaded is None else threaded
        self.steered: Steered | None = None
        self._drawn = 0.0
        self.buttons = {
            name: Button(description=name, tooltip=tip, disabled=name != "Start")
            for name, tip in (
                ("Start", "Train from the shipped policy"),
                ("Pause", "Wait after this step, or go on"),
                ("Stop", "End after this step"),
            )
        }
        for name, act in (("Start", self.start), ("Pause", self.pause), ("Stop", self.stop)):
            self.buttons[name].on_click(lambda _button, act=act: act())
        delta.observe(self._budget, names="value")
        self.said, self.table = HTML(f"{config.steps} steps at most; not started"), HTML()
        self.output = Output()
        row = HBox(list(self.buttons.values()))
        self.box = VBox([row, delta, self.said, self.table, self.output])

    def start(self) -> None:
        """Begin anew from the policy; does nothing while a training is under way."""
        if self.steered is not None and self.steered.running:
            return
        self.steered = Steered(
            self.config,
            self.delta.value,
            on_step=self._stepped,
            on_end=self._ended,
            open_run=self._open,
        )
        self.output.outputs, self.said.value, self.table.value = (), "loading the policy …", ""
        self._enable(running=True)
        if self.threaded:
            self.steered.start()
        else:
            self.steered.run()

    def pause(self) -> None:
        """Wait after the step under way; if it waits, go on."""
        if self.steered is None:
            return
        if self.steered.paused:
            self.steered.go_on()
        else:
            self.steered.pause()
        self.buttons["Pause"].description = "Go on" if self.steered.paused else "Pause"

    def stop(self) -> None:
        """End after the step under way."""
        if self.steered is not None:
            self.steered.stop()

    def _budget(self, change: Any) -> None:
        if self.steered is not None:
            self.steered.delta = change["new"]

    def _enable(self, *, running: bool) -> None:
        for name, button in self.buttons.items():
            button.disabled = (name == "Start") == running
        self.buttons["Pause"].description = "Pause"

    def _stepped(self, steered: Steered) -> None:
        line = steered.lines[-1]
        self.said.value = f"step {line['step']} of {steered.config.steps}: {_in_words(line)}"
        rows = "".join(
            f"<tr><td>{step}</td><td>{delta:.1e}</td></tr>" for step, delta in steered.changes
        )
        head = "<tr><th>from step</th><th>budget δ, nats/token</th></tr>"
        self.table.value = f"<table>{head}{rows}</table>"
        if time.monotonic() - self._drawn > _REDRAW_S:
            self._draw(steered)

    def _draw(self, steered: Steered) -> None:
        # Not by pyplot, which is the main thread's, and where a figure stays open.
        self.output.outputs = (outputs.image(draw(steered, Figure())),)
        self._drawn = time.monotonic()

    def _ended(self, steered: Steered) -> None:
        if steered.error is not None:
            self.output.outputs = (outputs.failure(steered.error),)
        elif steered.lines:
            self._draw(steered)
        how = "failed" if steered.error else "ended"
        self.said.value += f" · {how} after {len(steered.lines)} steps"
        self._enable(running=False)


def _in_words(line: dict[str, Any]) -> str:
    if line["skipped"]:
        return f"skipped, {line['skipped']}"
    right = "–" if line["accuracy"] is None else f"{line['accuracy']:.0%}"
    return (
        f"accuracy {right}, {line['response_tokens_mean']:.1f} tokens, α {line['alpha']:.2f}, "
        f"KL predicted {line['kl_predicted']:.1e}, realised {line['kl_realised']:.1e} nats/token"
    )
