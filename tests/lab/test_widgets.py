"""Sliders: one result at a time, whatever happens (field cases ipywidgets#1582, #1919, #2419)."""

import base64

import matplotlib

matplotlib.use("agg")  # before pyplot: there is no display here

import matplotlib.pyplot as plt
import pytest

from logra_lab.errors import InputError
from logra_lab.lab.verdict import WIDGET_STATE_LIMIT
from logra_lab.lab.widgets import explore, slider


def drawing(seen):
    def compute(rank):
        seen.append(rank)
        fig, ax = plt.subplots()
        ax.plot([0, rank])
        return f"computed rank {rank}", fig

    return compute


def images(output):
    return [o["data"]["image/png"] for o in output.outputs if "image/png" in o.get("data", {})]


def text(output):
    return " ".join(o.get("data", {}).get("text/markdown", "") for o in output.outputs)


def test_twenty_changes_leave_one_image_and_no_open_figure():
    seen = []
    choose = slider("rank", list(range(1, 22)), 1)
    *_, output = explore(drawing(seen), "move it", choose).children
    before = plt.get_fignums()
    for rank in range(2, 22):
        choose.value = rank
        assert len(images(output)) == 1
        assert f"computed rank {rank}" in text(output)
    assert seen == list(range(2, 22))  # it computed, and did not merely redraw
    assert plt.get_fignums() == before


def test_the_picture_changes_with_the_value_and_is_a_png():
    choose = slider("rank", [1, 2, 3], 1)
    *_, output = explore(drawing([]), "move it", choose).children
    choose.value = 2
    first = images(output)[0]
    choose.value = 3
    assert images(output)[0] != first
    assert base64.b64decode(first).startswith(b"\x89PNG\r\n\x1a\n")  # RFC 2083, section 3.1
    assert len(first) < WIDGET_STATE_LIMIT / 2  # the runner refuses widgets that hold more


def test_nothing_is_computed_before_the_first_change_and_the_hint_says_what_to_do():
    seen = []
    *_, output = explore(drawing(seen), "move **it**", slider("rank", [1, 2], 1)).children
    assert seen == []
    assert text(output) == "move **it**"


def test_a_failure_is_shown_in_place_of_the_result_raised_and_closes_its_figure():
    def compute(rank):
        plt.subplots()
        raise ValueError(f"rank {rank} is cursed")

    choose = slider("rank", [1, 2, 3], 1)
    _, busy, output = explore(compute, "move it", choose).children
    before = plt.get_fignums()
    with pytest.raises(ValueError, match="cursed"):
        choose.value = 2
    (shown,) = output.outputs
    assert (shown["output_type"], shown["ename"]) == ("error", "ValueError")
    assert any("in compute" in line for line in shown["traceback"])
    assert busy.value == ""
    assert plt.get_fignums() == before


def test_the_busy_line_speaks_while_it_computes():
    said = []
    choose = slider("rank", [1, 2], 1)

    def compute(rank):
        said.append(box.children[1].value)
        return drawing([])(rank)

    box = explore(compute, "move it", choose)
    choose.value = 2
    assert "computing" in said[0]
    assert box.children[1].value == ""


def test_a_slider_acts_on_release_is_named_and_refuses_a_start_it_does_not_have():
    choose = slider("budget", {"small": 1e-4, "large": 1e-2}, 1e-2)
    assert (choose.description, choose.continuous_update) == ("budget", False)
    assert (choose.label, choose.value) == ("large", 1e-2)
    with pytest.raises(InputError, match=r"'budget': 3 is not among its values \[1, 2\]"):
        slider("budget", [1, 2], 3)
