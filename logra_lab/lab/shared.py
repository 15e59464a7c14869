"""One value a quantity and kernel: what the reader chose in one widget holds in the next ones.

A notebook has many sliders for the same rank. They are members of one `Quantity`: the first one
sets its value, later ones start there, and moving any of them moves all. Sliders may offer
different values; a follower takes the listed value nearest to the chosen one, by ratio.
"""

import math
from collections.abc import Sequence
from typing import Any

from ipywidgets import ValueWidget

from logra_lab.errors import InputError


class Quantity:
    """A positive number that several sliders of a kernel show, and those sliders by name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.value: float | None = None  # None until the first slider
        self._members: dict[str, tuple[ValueWidget, Sequence[float]]] = {}
        self._starts: dict[str, float] = {}
        self._following = False

    def join(
        self, member: str, control: ValueWidget, values: Sequence[Any], start: Any, leads: bool
    ) -> None:
        """Set `control` to the chosen value; from now on it follows and, if it `leads`, leads.

        Where none is chosen it begins at `start`, and so do the next ones. An earlier control of
        the same name leaves: its cell was run again. If it had another start, then the notebook's
        parameters have changed, and the choice begins anew. `values` are those of the control.

        Raises: InputError for values that are not positive numbers.
        """
        if not all(isinstance(v, int | float) and 0 < v < math.inf for v in values):
            raise InputError(
                f"slider {member!r}: its values {list(values)} are to be positive numbers, since a "
                f"shared {self.name} is compared by ratio; `slider` takes anything else"
            )
        earlier = self._members.get(member)
        if earlier is not None and leads:
            earlier[0].unobserve(self._moved, names="value")
        if self.value is None or self._starts.get(member, start) != start:
            self.value = start
        self._starts[member], self._members[member] = start, (control, values)
        control.value = nearest(values, self.value)
        if leads:
            control.observe(self._moved, names="value")

    def _moved(self, change: Any) -> None:
        if self._following:
            return
        self.value, self._following = change["new"], True
        try:
            for control, values in list(self._members.values()):
                if control is not change["owner"]:
                    control.value = nearest(values, change["new"])
        finally:
            self._following = False


def nearest(values: Sequence[Any], wanted: float) -> Any:
    """The listed value with the smallest ratio to `wanted`, either way; all are positive."""
    return min(values, key=lambda value: abs(math.log(value / wanted)))


RANK, BUDGET = Quantity("rank"), Quantity("budget")
