"""What 00_serve_or_learn records at the smoke preset, against sums written out from the shapes."""

from collections.abc import Callable
from typing import Any

import pytest

# Qwen2.5-7B: arXiv:2412.15115 and its config.json; (d, k) of a block's trained matrices.
BLOCK = [(3584, 3584)] * 2 + [(512, 3584)] * 2 + [(18944, 3584)] * 2 + [(3584, 18944)]
P, P_t = 7_615_616_512, 28 * sum(d * k for d, k in BLOCK)
ROWS = 28 * sum(d for d, _ in BLOCK)


@pytest.fixture(scope="session")
def found(recorded: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return recorded("00_serve_or_learn")


def test_the_two_numbers_are_weights_and_cache_and_sixteen_bytes_a_trained_weight(
    found: dict[str, Any],
) -> None:
    assert found["model"] == "Qwen2.5-7B"
    weights, cache = 2 * P, 2 * 32 * 4096 * 28 * 2 * 512
    assert weights + cache < found["serve"] < 1.05 * (weights + cache)
    # Everything in float32, gradient and moments of what is trained; the rest comes and goes.
    stands = 4 * P + (4 + 8) * P_t
    assert found["ways_stand"]["dense Adam"] == stands
    assert stands < found["learn"] < 1.2 * stands
    # What the prose says of the default model: the first fits on 80 GB, the second does not.
    assert found["serve"] < 80e9 < found["learn"]
    assert found["ratio"] == pytest.approx(found["learn"] / found["serve"])
    assert sum(found["kinds"].values()) == found["learn"]


def test_one_step_of_adam_by_hand(found: dict[str, Any]) -> None:
    # (2·w − 6)²/2 at w = 1: −4 · 2; decays 0.9 and 0.95; both bias-corrected: a step of the rate.
    expected = {"y": 2.0, "gradient": -8.0, "m": -0.8, "v": 3.2, "w": 1.1}
    assert found["toy"] == pytest.approx(expected)


def test_the_shipped_policy_holds_what_was_predicted(found: dict[str, Any]) -> None:
    # Issue E: 10 %. Activations are kept here, so every term is a sum of shapes and the peak too.
    assert found["small_worst_off"] < 0.1
    assert found["small_apart"] == max(abs(a - b) for a, b in found["small"].values())
    assert found["small"]["serve, weights"] == [4 * 801_664] * 2
    assert found["small"]["learn, Adam's two moments"] == [8 * 786_432] * 2
    assert found["small_ratio"] > 4


def test_ways_out_take_away_what_they_say(found: dict[str, Any]) -> None:
    stand = found["ways_stand"]
    assert stand["dense Adam, offloaded"] == 0
    assert stand["dense Adam, 4 GPUs"] == stand["dense Adam"] / 4
    r = found["plan_rank"]
    adapters = 28 * sum(r * (d + k) for d, k in BLOCK)
    assert stand["LoRA"] == 2 * P + 16 * adapters
    assert stand["LoGRA"] == 4 * P + 4 * ROWS * (r + 1)
    assert found["stored"] == {
        "adapter": 2 * adapters,
        "changed model": 2 * P,
        "one thin update": ROWS * (r + 1),
    }


def test_redrawn_updates_fill_the_matrix_and_an_adapter_never_does(found: dict[str, Any]) -> None:
    r, ranks = found["rank"], found["ranks_found"]
    steps = range(1, 1 + len(ranks["LoRA"]))
    # Random signs are linearly independent with near certainty: r new directions an update.
    assert ranks["LoGRA, A redrawn"] == [min(64, r * t) for t in steps]
    assert ranks["LoGRA, A fixed"] == ranks["LoRA"] == [r] * len(steps)
    assert found["ranks_predicted"]["redrawn"] == ranks["LoGRA, A redrawn"]
