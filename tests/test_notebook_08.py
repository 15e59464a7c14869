"""Notebook 08: what its sweep recorded at the smoke preset, against presets and closed forms."""

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from logra_lab.lab.notebook import read_notebook
from logra_lab.lab.presets import PRESETS, preset

ROOT = Path(__file__).resolve().parents[1]
SMOKE = preset("smoke")


@pytest.fixture(scope="session")
def ablations(recorded: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return recorded("08_ablations")


def test_every_rank_met_every_budget_redrawn_and_fixed_on_every_seed(
    ablations: dict[str, Any],
) -> None:
    expected = {
        f"r {rank}, δ {delta:.0e}, {how}"
        for rank, delta, how in product(
            SMOKE.sweep_ranks, SMOKE.sweep_budgets, ("redrawn", "fixed")
        )
    }
    assert ablations["cells"].keys() == expected
    for cell in ablations["cells"].values():
        assert len(cell["before"]) == len(cell["after"]) == len(SMOKE.seeds)
        assert [len(steps) for steps in cell["alpha"]] == [SMOKE.sweep_steps] * len(SMOKE.seeds)
    assert ablations["skipped"] == 0


def test_a_sweep_that_is_run_again_runs_nothing(ablations: dict[str, Any]) -> None:
    jobs = ablations["jobs"]
    assert (jobs["asked"], jobs["fresh again"]) == (len(ablations["cells"]), 0)
    assert ablations["seconds"]["again"] < 1  # it reads files; a job takes several seconds


def test_all_cells_start_from_one_policy_and_differ_in_nothing_but_their_row(
    ablations: dict[str, Any],
) -> None:
    # Same policy, same held-out problems, same random numbers: equal to the last response.
    assert len({tuple(cell["before"]) for cell in ablations["cells"].values()}) == 1
    # At the first step A has been drawn once either way, but draw 0 is not draw 1.
    for delta in SMOKE.sweep_budgets:
        redrawn, fixed = (
            ablations["cells"][f"r {SMOKE.sweep_ranks[0]}, δ {delta:.0e}, {how}"]
            for how in ("redrawn", "fixed")
        )
        assert redrawn["kl_predicted"] != fixed["kl_predicted"]


def test_no_step_is_predicted_beyond_its_budget_and_below_the_cap_it_uses_it_up(
    ablations: dict[str, Any],
) -> None:
    for cell in ablations["cells"].values():
        for alphas, kls in zip(cell["alpha"], cell["kl_predicted"], strict=True):
            for alpha, kl in zip(alphas, kls, strict=True):
                assert kl <= cell["budget"] * (1 + 1e-9)
                if alpha < 3:  # the published cap
                    assert kl == pytest.approx(cell["budget"], rel=1e-6)


def test_effects_are_means_over_pairs_that_differ_in_one_thing(ablations: dict[str, Any]) -> None:
    cells, seeds = ablations["cells"], range(len(SMOKE.seeds))
    low, high = sorted(SMOKE.sweep_budgets)
    gaps = [
        cells[f"r {rank}, δ {high:.0e}, {how}"]["after"][seed]
        - cells[f"r {rank}, δ {low:.0e}, {how}"]["after"][seed]
        for rank, how, seed in product(SMOKE.sweep_ranks, ("redrawn", "fixed"), seeds)
    ]
    effect = ablations["effects"]["budget"]
    assert effect["pairs"] == len(gaps)
    assert effect["mean"] == pytest.approx(mean(gaps), abs=1e-12)
    assert (effect["lowest"], effect["highest"]) == (min(gaps), max(gaps))
    assert effect["mean"] > 0  # a budget forty times as large gets a short run further
    # What the text says of redrawing: less than the error of one Pass@1.
    assert abs(ablations["effects_in_points"]["refresh"]["mean"]) < ablations["noise_points"]
    assert "rank" not in ablations["effects"]  # which this preset does not vary
    assert ablations["noise_points"] == pytest.approx(100 * math.sqrt(0.25 / 64))


def test_bands_of_nothing_lie_apart_in_two_of_all_deals(ablations: dict[str, Any]) -> None:
    # Of C(2m, m) equally likely deals two are separated.
    for m, share in ablations["apart"].items():
        assert share == pytest.approx(2 / math.comb(2 * int(m), int(m)))


def test_the_job_is_a_notebook_of_its_own_and_none_of_the_course() -> None:
    job = read_notebook(ROOT / "notebooks" / "jobs" / "ablation.ipynb")
    assert {"rank", "budget", "refresh", "seeds", "steps"} <= job.parameters.keys()
    assert job.path not in (ROOT / "notebooks").glob("*.ipynb")
    for sizes in PRESETS.values():
        assert sizes.sweep_steps >= 1
        assert min(sizes.sweep_budgets) < max(sizes.sweep_budgets)
