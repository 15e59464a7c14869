"""Sliders: one result at a time, whatever happens (field cases ipywidgets#1582, #1919, #2419)."""

import ast
import base64
from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # before pyplot: there is no display here

import matplotlib.pyplot as plt
import nbformat
import pytest

from logra_lab.errors import InputError
from logra_lab.lab import shared
from logra_lab.lab.verdict import WIDGET_STATE_LIMIT
from logra_lab.lab.widgets import budget_slider, explore, rank_slider, slider

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


@pytest.fixture
def nothing_chosen(monkeypatch):
    """A fresh kernel: no rank and no budget chosen yet."""
    for name in ("RANK", "BUDGET"):
        monkeypatch.setattr(shared, name, shared.Quantity(name.lower()))


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


@pytest.mark.usefixtures("nothing_chosen")
def test_a_rank_chosen_in_the_first_widget_carries_through_and_recomputes_the_others():
    first_seen, second_seen = [], []
    first = rank_slider("rank of the sketch", [4, 16, 64], 16)
    explore(drawing(first_seen), "", first)
    second = rank_slider("rank of the update", [1, 4, 16, 64, 256], 16)
    explore(drawing(second_seen), "", second)
    first.value = 64
    assert (second.value, first_seen, second_seen) == (64, [64], [64])
    second.value = 4  # and back: a later one leads as well
    assert (first.value, first_seen, second_seen) == (4, [64, 4], [64, 4])
    third = rank_slider("rank of the third", [4, 16, 64], 16)  # made after the choice
    assert third.value == 4
    assert budget_slider("budget", [1e-4, 1e-2], 1e-2).value == 1e-2  # another quantity


@pytest.mark.usefixtures("nothing_chosen")
def test_a_follower_takes_the_nearest_by_ratio_and_does_not_pull_the_leader_along():
    few = rank_slider("few", [1, 64], 64)
    many = rank_slider("many", [1, 16, 30, 256], 256)
    assert many.value == 30  # 64/30 is less than 256/64
    few.value = 1
    many.value = 16  # 16 times 1, 4 times less than 64; by difference it would be 1
    assert (many.value, few.value) == (16, 64)


@pytest.mark.usefixtures("nothing_chosen")
def test_a_cell_that_is_run_again_leaves_one_slider_and_new_parameters_begin_anew():
    seen = []
    for _ in range(3):
        explore(drawing(seen), "", rank_slider("rank r", [4, 16, 64], 16))
    leader = rank_slider("another", [4, 16, 64], 16)
    leader.value = 64
    assert seen == [64]  # not once for each run of the cell
    assert rank_slider("rank r", [4, 16, 64], 16).value == 64  # same parameters: the choice holds
    assert rank_slider("rank r", [4, 16, 64], 4).value == 4  # other parameters


@pytest.mark.usefixtures("nothing_chosen")
def test_a_shared_slider_refuses_what_has_no_ratio():
    with pytest.raises(InputError, match="compared by ratio"):
        rank_slider("rank r", [0, 4], 4)
    with pytest.raises(InputError, match="is not among its values"):
        budget_slider("budget", [1e-4, 1e-2], 1e-3)


def test_in_a_kernel_quick_changes_give_one_computation_of_the_last_value(course):
    made = """
import matplotlib.pyplot as plt
from logra_lab.lab.widgets import explore, rank_slider
seen = []
def compute(a, b):
    seen.append((a, b))
    return f"{a} {b}", plt.figure()
one, two = rank_slider("one", [1, 2, 3, 4], 1), rank_slider("two", [1, 2, 3, 4], 1)
box = explore(compute, "move it", one, two)
"""
    # What a browser sends for arrow keys: one message each, faster than they are computed.
    moved = "for index in (1, 2, 3):\n    one.set_state({'index': index})\nassert seen == []"
    waited = "import asyncio\nawait asyncio.sleep(1)\nassert seen == [(4, 4)], seen"
    shown = "assert [o['output_type'] for o in box.children[-1].outputs] == ['display_data'] * 2"
    outcome = course.one(made, moved, waited, shown)
    assert outcome.status == 0, outcome.entry["reason"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_two_shared_sliders_of_a_notebook_have_one_description(path):
    code = [c.source for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]
    calls = [node for source in code for node in ast.walk(ast.parse(source))]
    names = Counter(
        (call.func.id, ast.unparse(call.args[0]))
        for call in calls
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("rank_slider", "budget_slider")
    )
    assert all(count == 1 for count in names.values()), names
