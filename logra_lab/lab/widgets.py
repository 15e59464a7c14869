"""Sliders that recompute: move one, read what was done, see one figure; never a pile of them.

The result replaces the one before by a single assignment of the output's contents, so nothing
flickers, nothing is appended and no figure stays open. A notebook shows the same computation in a
static figure first; a widget is only ever the second way to see it.
"""

import base64
import io
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from ipywidgets import HTML, Layout, Output, SelectionSlider, ValueWidget, VBox
from matplotlib.figure import Figure

from logra_lab.errors import InputError

# Of the PNG inside the widget's state, which a notebook file carries as text.
_DPI = 72


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


def explore(compute: Callable[..., tuple[str, Figure]], hint: str, *controls: ValueWidget) -> VBox:
    """Controls above one result: `compute(*values)` runs after every change of a control.

    Args:
        compute: returns a sentence in Markdown that says what it did, and the figure, which is
            closed here. While it runs a line says so; what it raises is shown and raised.
        hint: Markdown shown until the first change: what the controls do, and how long it takes.
        controls: in the order of compute's arguments.

    Returns: the box, with `children = (*controls, busy line, output)`.
    """
    busy, output = HTML(), Output()
    output.outputs = (_markdown(hint),)

    def changed(_change: Any) -> None:
        busy.value = "<em>computing …</em>"
        open_before = set(plt.get_fignums())
        try:
            said, figure = compute(*(control.value for control in controls))
            output.outputs = (_markdown(said), _image(figure))
        except Exception as error:  # raised again: an observer's own trace goes to a hidden log
            output.outputs = (_error(error),)
            raise
        finally:
            busy.value = ""
            for number in set(plt.get_fignums()) - open_before:
                plt.close(number)

    for control in controls:
        control.observe(changed, names="value")
    return VBox([*controls, busy, output])


def _markdown(text: str) -> dict[str, Any]:
    data = {"text/markdown": text, "text/plain": text}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def _image(figure: Figure) -> dict[str, Any]:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    data = {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": "figure"}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def _error(error: Exception) -> dict[str, Any]:
    return {
        "output_type": "error",
        "ename": type(error).__name__,
        "evalue": str(error),
        "traceback": traceback.format_exception(error),
    }
