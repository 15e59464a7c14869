"""One look for every figure: opaque, legible on dark and light pages, safe for colour blindness."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import seaborn as sns
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from logra_lab.errors import InputError
from logra_lab.lab.context import interactive_folder, run_context
from logra_lab.lab.record import declare

# Okabe and Ito, "Color Universal Design" (2008), without the yellow that fades on white.
PALETTE: tuple[str, ...] = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)

_STYLE: dict[Any, Any] = {
    # An opaque light ground: a transparent one loses its black labels on a dark page.
    "figure.facecolor": "#FBFBF8",
    "savefig.facecolor": "#FBFBF8",
    "axes.facecolor": "#FFFFFF",
    "savefig.transparent": False,
    "figure.figsize": (7.0, 4.0),
    "figure.dpi": 110,
    "savefig.dpi": 150,
    "savefig.bbox": "tight",
    "font.size": 11,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.formatter.min_exponent": 2,  # 60, not 6 × 10¹, on a logarithmic axis
    "grid.color": "#D9D9D4",
    "grid.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 2.0,
    "legend.frameon": False,
    "axes.prop_cycle": cycler(color=PALETTE),
}


def use_style() -> None:
    """Apply the course's look to every figure drawn from here on."""
    mpl.rcParams.update(_STYLE)


def band(
    ax: Axes, x: Sequence[float], runs: Sequence[Sequence[float]], *, label: str, **kwargs: Any
) -> Axes:
    """Mean over seeds as a line, lowest to highest seed as a band.

    Shapes: `x` has T entries, `runs` has one row of T values a seed.
    Raises: InputError when a row's length differs from that of `x`.
    """
    for seed, values in enumerate(runs):
        if len(values) != len(x):
            raise InputError(
                f"band {label!r}: seed row {seed} has {len(values)} values, x has {len(x)}"
            )
    steps = [step for _ in runs for step in x]
    flat = [value for values in runs for value in values]
    sns.lineplot(x=steps, y=flat, ax=ax, label=label, errorbar=("pi", 100), **kwargs)
    return ax


def save(fig: Figure, name: str) -> Path:
    """Write the figure as PNG into the run's figure folder and declare it as an artefact.

    Raises:
        InputError: a name that is not letters, digits, `_` and `-`, a figure without axes, or
            an axis that shows data without a label: name the quantity and its unit.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise InputError(f"figure name {name!r}: expected letters, digits, _ and -, no suffix")
    if not fig.axes:
        raise InputError(f"figure {name!r} has no axes; draw before saving")
    for number, ax in enumerate(fig.axes):
        if ax.has_data() and ax.axison and not (ax.get_xlabel() and ax.get_ylabel()):
            raise InputError(f"figure {name!r}: axes {number} needs x and y labels, with units")
    context = run_context()
    folder = Path(context.figures) if context else interactive_folder() / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    fig.savefig(path, metadata={"Description": describe(fig)})
    declare(path)
    return path


def describe(fig: Figure) -> str:
    """What the figure shows, for whoever cannot see it: quantities, axes and series."""
    said = []
    for ax in (ax for ax in fig.axes if ax.has_data() and ax.axison):
        lines = ax.get_legend_handles_labels()[1]
        title = f"{ax.get_title()}: " if ax.get_title() else ""
        series = f" ({'; '.join(dict.fromkeys(lines))})" if lines else ""
        said.append(f"{title}{ax.get_ylabel()} against {ax.get_xlabel()}{series}")
    return "Chart. " + ". ".join(" ".join(one.split()) for one in said)
