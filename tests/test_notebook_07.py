"""Notebook 07 beyond the loop itself: budgets, steering, the reward with a hole; smoke preset."""

from collections.abc import Callable
from typing import Any

import pytest

from logra_lab.lab.presets import preset

SMOKE = preset("smoke")


@pytest.fixture(scope="session")
def ppo(recorded: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return recorded("07_ppo")


def test_a_hundredth_of_the_budget_is_a_hundredth_of_the_kl_where_the_cap_does_not_bind(
    ppo: dict[str, Any],
) -> None:
    tried = ppo["budgets_tried"]
    assert len(tried) == 3
    for shown, run in tried.items():
        delta = float(shown)
        assert run["kl_predicted"] <= delta * (1 + 1e-9)
        if run["alpha"] < 3:  # the published cap: below it the step is scaled to the budget
            assert run["kl_predicted"] == pytest.approx(delta, rel=1e-6)
        # Second order: at these budgets single steps were seen 27 % off, a median is nearer.
        assert run["kl_realised"] == pytest.approx(run["kl_predicted"], rel=0.4)


def test_steering_takes_effect_at_the_next_step_and_leaves_the_state_alone(
    ppo: dict[str, Any],
) -> None:
    steered = ppo["steered"]
    half = steered["half"]
    assert steered["changes"] == [[1, SMOKE.kl_start], [half + 1, pytest.approx(5e-5)]]
    # The medians of the parts would be mixed if the new budget came a step early or late.
    assert steered["after"]["kl_predicted"] == pytest.approx(5e-5, rel=1e-6)
    assert steered["before"]["kl_predicted"] > 10 * steered["after"]["kl_predicted"]


def test_the_lenient_judge_pays_for_silence_and_the_librarys_does_not(ppo: dict[str, Any]) -> None:
    expected = {  # by the two rules, read by hand
        "42": ("correct", "correct"),
        "40": ("wrong", "wrong"),
        "142": ("wrong", "wrong"),
        "so 40 so 42": ("unparsable", "correct"),
        "hmm hmm hmm hmm ": ("unparsable", "correct"),
        "": ("unparsable", "correct"),
    }
    assert ppo["verdicts"] == {
        repr(text): {"the library's": strict, "lenient": lenient}
        for text, (strict, lenient) in expected.items()
    }


def test_the_hole_is_found_and_closing_it_brings_the_answers_back(ppo: dict[str, Any]) -> None:
    hack = ppo["hack"]
    first, last = hack["lenient, first"], hack["lenient, last"]
    # Means over 3 × 64 responses have a standard error below 0.036: each bound is past three.
    assert last["lenient"] - first["lenient"] > 0.15  # what is paid for rises ...
    assert first["strict"] - last["strict"] > 0.15  # ... and what is meant falls,
    assert last["truncated"] - first["truncated"] > 0.3  # by answers that never end.
    strict_first, strict_last = hack["strict, first"], hack["strict, last"]
    assert strict_last["strict"] - strict_first["strict"] > 0.15  # same start, same steps
    assert strict_last["truncated"] < strict_first["truncated"]
    assert strict_last["lenient"] - strict_last["strict"] < 0.1  # and the hole goes unused
    # The judges were two on the same responses: what the strict one accepts, the other does.
    assert all(part["lenient"] >= part["strict"] for name, part in hack.items() if name != "steps")
    assert hack["closed, last"]["lenient"] < last["lenient"]  # it is not what is paid for any more
