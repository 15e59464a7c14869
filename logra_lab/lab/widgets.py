"""Sliders that recompute: move one, read what was done, see one figure; never a pile of them.

The result replaces the one before by a single assignment of the output's contents, so nothing
flickers, nothing is appended and no figure stays open. A notebook shows the same computation in a
static figure first; a widget is only ever the second way to see it.

Rank and budget are shared: `rank_slider` and `budget_slider` take the place of `slider`, and all
rank sliders of a notebook then start at one value and move together (the budget's likewise).

    explore(at_rank, hint, rank_slider("rank r of the sketch", [4, 16, 64], rank))
    explore(bytes_at, hint, rank_slider("rank r of the update", [1, 4, 16, 64, 256], rank))

The two descriptions differ, since a slider replaces the one of the same description: that is how a
cell that is run again leaves no second slider that computes unseen.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from ipywidgets import HTML, Layout, Output, SelectionSlider, ValueWidget, VBox
from matplotlib.figure import Figure

from logra_lab.errors import InputError
from logra_lab.lab import outputs, shared

# Of everything that widgets compute: with a training in the background, one thing at a time.
COMPUTING = threading.RLock()
# Held arrow keys repeat faster than this; a reader who looks at the result waits longer.
_SETTLE_S = 0.3


def slider(description: str, options: Mapping[str, Any] | Sequence[Any], value: Any) -> ValueWidget:
    """A slider over listed values, moved by mouse or arrow keys; it acts on release.

    `options` are values, or labels with their values; `value` is where it starts.
    Raises: InputError when `value` is not among the options.
    """
    values = list(options.values() if isinstance(options, Mapping) else options)
    if value not in values:
        raise InputError(f"slider {description!r}: {value!r} is not among its values {values}")
    return SelectionSlider(
        options=list(options.items()) if isinstance(options, Mapping) else values,
        value=value,
        description=description,
        continuous_update=False,
        style={"description_width": "initial"},
        layout=Layout(width="min(36em, 100%)"),
    )


def rank_slider(
    description: str, options: Mapping[str, Any] | Sequence[Any], value: Any
) -> ValueWidget:
    """A `slider` for the rank, one of several in a notebook that move together.

    It starts at the rank chosen so far (the listed one nearest to it), at `value` where none is.
    Give each its own `description`: one that is used again replaces the slider before.
    Raises: InputError as `slider` does, and for options that are not positive numbers.
    """
    return _shared_slider(shared.RANK, description, options, value)


def budget_slider(
    description: str, options: Mapping[str, Any] | Sequence[Any], value: Any, *, leads: bool = True
) -> ValueWidget:
    """The same for the KL budget δ, in nats per generated token.

    leads: whether its own moves move the others; not those of one that steers a running training.
    """
    return _shared_slider(shared.BUDGET, description, options, value, leads)


def _shared_slider(
    quantity: shared.Quantity,
    description: str,
    options: Mapping[str, Any] | Sequence[Any],
    value: Any,
    leads: bool = True,
) -> ValueWidget:
    control = slider(description, options, value)
    values = list(options.values() if isinstance(options, Mapping) else options)
    quantity.join(description, control, values, value, leads)
    return control


def explore(compute: Callable[..., tuple[str, Figure]], hint: str, *controls: ValueWidget) -> VBox:
    """Controls above one result: `compute(*values)` runs when a change of a control has settled.

    In a kernel several quick changes (a held arrow key) make one computation, of the last values;
    where no event loop runs, as in a test, each change computes at once.

    Args:
        compute: returns a sentence in Markdown that says what it did, and the figure, which is
            closed here. While it runs a line says so; what it raises is shown and raised.
        hint: Markdown shown until the first change: what the controls do, and how long it takes.
        controls: in the order of compute's arguments.

    Returns: the box, with `children = (*controls, busy line, output)`.
    """
    busy, output = HTML(), Output()
    output.outputs = (outputs.markdown(hint),)

    def run() -> None:
        busy.value = "<em>computing …</em>"
        open_before = set(plt.get_fignums())
        try:
            with COMPUTING:
                said, figure = compute(*(control.value for control in controls))
            output.outputs = (outputs.markdown(said), outputs.image(figure))
        except Exception as error:  # raised again: an observer's own trace goes to a hidden log
            output.outputs = (outputs.failure(error),)
            raise
        finally:
            busy.value = ""
            for number in set(plt.get_fignums()) - open_before:
                plt.close(number)

    changed = when_settled(run)
    for control in controls:
        control.observe(changed, names="value")
    return VBox([*controls, busy, output])


def when_settled(run: Callable[[], None]) -> Callable[[Any], None]:
    """An observer that calls `run` once after quick changes; at once where no event loop runs."""
    pending: list[asyncio.TimerHandle] = []

    def changed(_change: Any) -> None:
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            run()
            return
        for timer in pending:
            timer.cancel()
        pending[:] = [loop.call_later(_SETTLE_S, run)]

    return changed
