"""`bench cluster`: what it takes for a difference, and for noise."""

import json
import math
from dataclasses import replace

import pytest
import torch

from logra_lab import bench
from logra_lab.bench.cluster import _noise
from logra_lab.bench.faults import Went
from logra_lab.bench.ranks import Seen, apart
from logra_lab.sync.update import ThinUpdate
from logra_lab.sync.wire import ThinLayer

LAYERS = [ThinLayer("a", 2, 3, "a"), ThinLayer("b", 1, 3, "b")]


def seen(values=((4, 0), (2, 6), (1, 1)), exponents=(0, 1, 0), **changes):
    U = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    made = ThinUpdate.round(U, LAYERS, run="r", base=0, seed=0, draw=1)
    numbers = {
        "values": torch.tensor(values, dtype=torch.int8),
        "exponents": torch.tensor(exponents, dtype=made.exponents.dtype),
    }
    W = {"a": torch.zeros(2, 3), "b": torch.zeros(1, 3)}
    common = {"S": U, "D": U, "v": U[:, 0], "W": W, "alpha": 0.5, "kl": 1.0, "skipped": None}
    return Seen(**common | {"update": replace(made, **numbers)} | changes)


def test_integers_are_compared_as_numbers_and_a_unit_is_the_finer_ones():
    """Row 1 is (2, 6)·2 in one and (4, 13)·1 in the other: one of six numbers differs, by 1."""
    before = {"a": torch.ones(2, 3), "b": torch.ones(1, 3)}
    found = apart(seen(((4, 0), (4, 13), (1, 1)), (0, 0, 0)), seen(), before)
    assert (found["int8"], found["units"]) == (pytest.approx(1 / 6), 1.0)
    assert {found[name] for name in ("S", "D", "v", "alpha", "W")} == {0.0}


def test_differences_are_relative_to_their_own_size_and_those_of_weights_to_the_step():
    before = {"a": torch.full((2, 3), 100.0), "b": torch.full((1, 3), 100.0)}
    moved = {"a": torch.full((2, 3), 99.0), "b": torch.full((1, 3), 99.0)}
    other = {"a": torch.full((2, 3), 99.5), "b": torch.full((1, 3), 99.5)}
    found = apart(seen(W=other, alpha=0.55, S=seen().S * 1.01), seen(W=moved), before)
    assert found["W"] == pytest.approx(0.5)
    assert found["alpha"] == pytest.approx(0.1)
    assert found["S"] == pytest.approx(0.01)
    assert found["D"] == 0


def test_noise_is_students_t_of_three_seeds_and_never_below_that_of_sampling():
    """t(97.5 %, 4) = 2.776; variance of 0.8, 0.9, 1.0 is 0.01, of the other three 0."""
    bound = _noise([0.8, 0.9, 1.0], [0.9, 0.9, 0.9])
    assert float(bound.split(" .. ")[1]) == pytest.approx(2.776 * math.sqrt(0.01 / 3), abs=1e-4)
    alike = float(_noise([0.9] * 3, [0.9] * 3).split(" .. ")[1])
    assert alike == pytest.approx(2.776 * math.sqrt(2 * 0.9 * 0.1 / (2048 * 3)), abs=1e-4)


def test_recovery_is_counted_to_the_first_step_after_the_fault():
    assert Went(None, 10.0, {1: 8.0, 2: 9.0, 3: 14.5, 4: 15.0}).recovered == 14.5
    assert Went(None, 10.0, {1: 8.0}).recovered == math.inf


@pytest.mark.slow
def test_quick_cluster_bench_writes_every_figure_with_its_bound(ray_node, tmp_path):
    out = tmp_path / "cluster.json"
    assert bench.main("cluster", json_path=str(out), quick=True) == 0
    figures = json.loads(out.read_text())["figures"]
    bounds = {key: f["bound"] for key, f in figures.items() if f["bound"]}
    assert bounds["sync_share"] == "< 0.05"
    assert {bounds[f"ranks_{x}"] for x in ("s", "v", "d", "alpha", "w")} == {"<= 1e-6"}
    assert (bounds["ranks_int8"], bounds["ranks_int8_units"]) == ("<= 1e-4", "<= 1")
    assert all(figures[key]["holds"] for key in bounds if key.startswith("ranks"))
    shares = [
        figures[f"{x}_share"]["value"] for x in ("generate", "score", "train", "update", "sync")
    ]
    assert 0.5 < sum(shares) < 1.2  # medians of parts of a step
