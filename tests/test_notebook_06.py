"""What 06_predicted_kl records at the smoke preset, against closed forms."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from logra_lab.lab.presets import preset

SMOKE = preset("smoke")
ALPHA_MAX = 3  # published, and the configuration's default


@pytest.fixture(scope="module")
def numbers(recorded: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return recorded("06_predicted_kl")


def test_toy_kl_is_that_of_a_bernoulli_variable_not_the_length_of_the_change(
    numbers: dict[str, Any],
) -> None:
    names = ("the likely token", "the second one", "the rare token")
    for name, q in zip(names, (0.90, 0.09, 0.01), strict=True):
        row = numbers["toy"][name]
        for how in ("½ Var by hand", "library"):
            assert row[how] == pytest.approx(q * (1 - q) / 2, rel=1e-5)
        # Raising one logit by 1: log Σ p e^ż − E ż, in full.
        assert row["realised"] == pytest.approx(math.log(1 - q + q * math.e) - q, rel=1e-4)
    shift = numbers["toy"]["all of them alike"]
    assert abs(shift["library"]) < 1e-12
    assert abs(shift["realised"]) < 1e-12
    assert [row["length"] for row in numbers["toy"].values()] == pytest.approx([1] * 4)


def test_updates_of_one_norm_differ_by_orders_of_magnitude(numbers: dict[str, Any]) -> None:
    rows = numbers["distance"]
    assert len(rows) == 2 + 7
    norms = [row["norm"] for row in rows.values()]
    assert norms == pytest.approx([norms[0]] * len(norms), rel=1e-5)
    predicted = [row["predicted"] for row in rows.values()]
    assert numbers["apart"]["factor"] == pytest.approx(max(predicted) / min(predicted))
    assert numbers["apart"]["factor"] > 10
    # Random directions are nearly orthogonal to what the policy feels: Fisher has few directions.
    assert rows["random numbers"]["predicted"] < rows["the proposal"]["predicted"] / 3
    for name, row in rows.items():
        # At a tenth of ρ some curvature is left; a missing ½, or T², would be a factor of 2.
        assert row["realised"] == pytest.approx(row["predicted"], rel=0.4), name


def test_prediction_is_quadratic_and_comes_true_for_small_steps(numbers: dict[str, Any]) -> None:
    law = numbers["law"]
    for draw in set(law["draw"]):
        rows = [i for i, d in enumerate(law["draw"]) if d == draw]
        full = {law["predicted"][i] / law["alpha"][i] ** 2 for i in rows}
        assert max(full) == pytest.approx(min(full))
        off = [abs(law["ratio"][i] - 1) for i in rows]
        # The next term of KL(α) is of order α³. At α = 0.01 at most a twentieth was seen.
        assert off[0] < 0.1
        assert off[0] < max(off) / 3
    for predicted, realised, ratio in zip(
        law["predicted"], law["realised"], law["ratio"], strict=True
    ):
        assert ratio == pytest.approx(realised / predicted)
    # Linear logits keep the law longest where softmax is all there is: exact as α → 0.
    assert law["linear_ratio"][0] == pytest.approx(1, abs=0.01)
    assert numbers["kl_full"] == pytest.approx(law["predicted"][0] / law["alpha"][0] ** 2, rel=1e-4)


def test_the_mean_over_handfuls_is_the_mean_over_the_batch(numbers: dict[str, Any]) -> None:
    seen = numbers["concentration"]
    assert len(seen["groups"]) == SMOKE.prompts_per_step // 8
    # Handfuls differ in tokens, so only bounds hold for an unweighted look at a weighted mean.
    assert min(seen["groups"]) < seen["all"] < max(seen["groups"])
    assert seen["below"] == sum(one < seen["all"] for one in seen["groups"])
    assert 1 / numbers["positions"] < seen["largest_share"] <= 1
    assert (seen["half_in"] == 1) == (seen["largest_share"] >= 0.5)


def test_probes_agree_and_the_finite_difference_runs_the_policy_on_both_sides(
    numbers: dict[str, Any],
) -> None:
    jvp, first, hinted = numbers["probes"].values()
    assert jvp["KL(1)"] == pytest.approx(numbers["kl_full"], rel=1e-6)
    assert jvp["passes"] == 1  # on dual numbers
    for fd in (first, hinted):
        # bench probe: at most 1e-3 in 30 steps; float32 differences carry 2⁻²⁴/h of noise each
        assert abs(fd["off"]) < 5e-3
        assert fd["passes"] % 2 == 0
    assert 2 <= hinted["passes"] <= first["passes"]
    assert numbers["cost"]["one forward"] == 1


def test_budgets_follow_the_published_cosine_and_the_mismatch_is_taken_off(
    numbers: dict[str, Any],
) -> None:
    start, end, H = 2e-4, 2e-5, 300
    expected = [
        end + (start - end) / 2 * (1 + math.cos(math.pi * (t - 1) / (H - 1)))
        for t in (1, 75, 150, 300)
    ]
    assert numbers["schedule"]["library"] == pytest.approx(expected)
    assert expected[0] == pytest.approx(start)
    assert expected[-1] == pytest.approx(end)
    m = [3e-6, 0.7 * 3e-6 + 3e-6]  # 0.3 of a gap of 1e-5, twice
    m.append(0.7 * m[-1] + 3e-4)
    m.append(0.7 * m[-1])  # a negative gap counts as none
    assert numbers["mismatch"]["m"] == pytest.approx(m)
    left = [start - m[0], start - m[1], start / 2, start / 2]
    assert numbers["mismatch"]["budget left of 2e-4"] == pytest.approx(left)


def test_the_scale_is_the_root_of_budget_over_prediction_up_to_its_cap(
    numbers: dict[str, Any],
) -> None:
    deltas = [SMOKE.kl_start * 10 ** (power / 2) for power in range(-6, 4)]
    full = numbers["governed"]["predicted"] / numbers["governed"]["alpha"] ** 2
    assert full == pytest.approx(numbers["kl_full"], rel=1e-5)
    expected = [min(ALPHA_MAX, math.sqrt(delta / full)) for delta in deltas]
    assert list(numbers["governed"]["scales"].values()) == pytest.approx(expected)
    assert numbers["governed"]["capped"] == sum(
        one == ALPHA_MAX for one in numbers["governed"]["scales"].values()
    )
    predicted = min(SMOKE.kl_start, ALPHA_MAX**2 * full)
    assert numbers["governed"]["predicted"] == pytest.approx(predicted)
    assert numbers["governed"]["realised"] > 0


def test_under_a_budget_rho_cancels(numbers: dict[str, Any]) -> None:
    rows = numbers["wreck"]["cancels"]
    # ż is linear in U: exact but for float32, in which U is scaled.
    assert rows["KL(1)"] == pytest.approx(rows["ρ² law"], rel=1e-4)
    assert rows["α ρ"] == pytest.approx([rows["α ρ"][0]] * 3, rel=1e-4)
    assert rows["ρ"] == [SMOKE.update_ratio, 0.02, 0.2]


def test_what_wrecks_the_policy_without_a_budget_does_not_with_one(
    numbers: dict[str, Any],
) -> None:
    wreck = numbers["wreck"]
    free = wreck["accuracy"]["no budget"]
    assert wreck["start"] == SMOKE.kl_start
    assert wreck["first_predicted"] > 100 * SMOKE.kl_start  # it was said before
    assert wreck["times_over"] == pytest.approx(wreck["first_predicted"] / SMOKE.kl_start)
    assert free["after"] < free["before"] / 2
    for name in ("constant δ", "annealed δ"):
        held = wreck["accuracy"][name]
        assert held["before"] == free["before"]  # the same problems and random numbers
        # Three standard errors of a mean over problems, each with a spread below ½.
        slack = 3 * 0.5 / math.sqrt(SMOKE.eval_problems)
        assert held["after"] > held["before"] - slack
        assert held["after"] > 2 * free["after"]
        assert wreck["largest"][name] < wreck["largest"]["no budget"] / 10
    assert len(wreck["ratios"]) == 2 * wreck["steps"]  # no step was skipped


def test_a_budget_limits_the_prediction_and_the_notebook_says_what_went_past_it(
    numbers: dict[str, Any],
) -> None:
    wreck = numbers["wreck"]
    assert wreck["past"] == pytest.approx(wreck["largest"]["constant δ"] / SMOKE.kl_start)
    assert wreck["of"] == 2 * wreck["steps"]
    # No cap binds at this ρ: a step is predicted at its budget, and past it where the ratio is
    # above 1. Far from 1 it would be another quantity than the predicted one.
    assert wreck["over"] == sum(ratio > 1 for ratio in wreck["ratios"])
    assert all(1 / 4 < ratio < 4 for ratio in wreck["ratios"])
