"""Figures and numbers of runs that were played or watched live; see `steered`."""

from collections.abc import Mapping
from statistics import median

from matplotlib.figure import Figure

from logra_lab.lab.steered import Steered
from logra_lab.lab.style import PALETTE


def draw(steered: Steered, figure: Figure) -> Figure:
    """Accuracy and truncation, and KL predicted, realised and allowed, of the steps so far."""
    figure.set_size_inches(10, 3.4)
    left, right = figure.subplots(1, 2)
    steps = [line["step"] for line in steered.lines]
    left.plot(steps, _values(steered, "accuracy"), color=PALETTE[0], label="accuracy")
    left.plot(steps, _values(steered, "truncated_share"), color=PALETTE[1], label="truncated")
    left.set(xlabel="step (count)", ylabel="responses of the batch (share)", ylim=(-0.02, 1.02))
    right.plot(steps, _values(steered, "kl_predicted"), color=PALETTE[5], label="predicted")
    realised = {"ls": "", "marker": "o", "ms": 4, "color": PALETTE[0]}
    right.plot(steps, _values(steered, "kl_realised"), label="realised", **realised)
    budget = {"color": PALETTE[6], "ls": "--", "lw": 1.2}
    right.step(steps, _values(steered, "kl_budget"), where="mid", label="budget δ", **budget)
    right.set(xlabel="step (count)", ylabel="KL (nats/token, log scale)", yscale="log")
    for ax in (left, right):
        ax.set_xlim(0, steered.config.steps + 1)
        ax.legend()
    figure.tight_layout()
    return figure


def compare(runs: Mapping[float, Steered], figure: Figure) -> Figure:
    """Accuracy, and KL predicted and realised, of runs under one constant budget each."""
    figure.set_size_inches(10, 3.6)
    left, right = figure.subplots(1, 2)
    for colour, (delta, steered) in zip(PALETTE, runs.items(), strict=False):
        steps = [line["step"] for line in steered.lines]
        left.plot(steps, _values(steered, "accuracy"), color=colour, label=f"δ = {delta:.1e}")
        right.plot(steps, _values(steered, "kl_predicted"), color=colour)
        right.plot(steps, _values(steered, "kl_realised"), "o", color=colour, ms=4)
        right.axhline(delta, color=colour, ls="--", lw=1)
    left.set(xlabel="step (count)", ylabel="accuracy of the batch (share)")
    right.set(xlabel="step (count)", ylabel="KL (nats/token, log scale)", yscale="log")
    right.set_title("line predicted, points realised, dashes δ", fontsize=10)
    left.legend()
    figure.tight_layout()
    return figure


def medians(steered: Steered, first: int = 1, last: int | None = None) -> dict[str, float]:
    """Medians of α and of both KLs over the steps `first` to `last` that were taken."""
    lines = [line for line in steered.lines[first - 1 : last] if line["skipped"] is None]
    return {
        name: median(line[name] for line in lines)
        for name in ("alpha", "kl_predicted", "kl_realised")
    }


def _values(steered: Steered, name: str) -> list[float]:
    """One number a step; where a step has none, a gap in the curve."""
    return [float("nan") if line.get(name) is None else line[name] for line in steered.lines]
