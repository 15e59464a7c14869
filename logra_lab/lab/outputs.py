"""What an `Output` widget shows, as the messages it holds: assigned at once, never appended."""

import base64
import io
import traceback
from typing import Any

from matplotlib.figure import Figure

# Of the PNG inside the widget's state, which a notebook file carries as text.
DPI = 72


def markdown(text: str) -> dict[str, Any]:
    """Text that a page without Markdown shows as it is."""
    data = {"text/markdown": text, "text/plain": text}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def image(figure: Figure) -> dict[str, Any]:
    """The figure as PNG; the caller closes it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    data = {"image/png": base64.b64encode(buffer.getvalue()).decode(), "text/plain": "figure"}
    return {"output_type": "display_data", "data": data, "metadata": {}}


def failure(error: BaseException) -> dict[str, Any]:
    """The error as a cell would show it."""
    return {
        "output_type": "error",
        "ename": type(error).__name__,
        "evalue": str(error),
        "traceback": traceback.format_exception(error),
    }
