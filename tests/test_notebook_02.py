"""What 02_accumulation records at the smoke preset, against closed forms of the shipped policy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def found(recorded: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return recorded("02_accumulation")


@pytest.fixture(scope="session")
def shapes() -> list[tuple[int, int]]:
    """(d, k) of every trained matrix, from the shipped policy's config.json."""
    config = json.loads((ROOT / "data" / "small_policy" / "config.json").read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    block = [(hidden, hidden)] * 2 + [(kv, hidden)] * 2 + [(inner, hidden)] * 2 + [(hidden, inner)]
    return block * config["num_hidden_layers"]


def test_the_sums_by_hand_keep_one_projection_and_one_divisor(found: dict[str, Any]) -> None:
    toy = found["toy"]
    assert toy["same"] < 1e-15  # float64, six terms a sum
    assert toy["mixed"] > 0.1  # another A for some of the tokens: no rounding
    assert (toy["by batch"], toy["by piece"]) == ((2 - 8) / 10, 0)


def test_what_stands_is_the_closed_form_and_the_sketched_run_never_holds_a_gradient(
    found: dict[str, Any], shapes: list[tuple[int, int]]
) -> None:
    stands = {
        "weight gradients": 4 * sum(d * k for d, k in shapes),
        "sketch S": 4 * found["rank"] * sum(d for d, _ in shapes),
    }
    assert found["stands_predicted"] == found["stands_measured"] == stands
    largest = 4 * max(d * k for d, k in shapes)
    assert found["new_gradient"] == {"measured": largest, "largest matrix": largest}
    assert found["sketched_weight_gradients"] == 0


def test_peaks_are_as_predicted_kept_and_recomputed_at_every_cut(found: dict[str, Any]) -> None:
    # Issue E asks for 10 %; what a block holds while it goes backward is summed, not traced.
    assert len(found["peaks"]) == 4
    for name, pair in found["peaks"].items():
        assert pair["predicted"] == pytest.approx(pair["measured"], rel=0.1), name
    for name, off in found["by_cut_off"].items():
        assert abs(off) < 0.1, name
    for how in ("kept", "recomputed"):
        sizes = [found["peaks"][f"{method}, {how}"]["measured"] for method in ("dense", "sketch")]
        assert sizes[1] < sizes[0]
    # A finer cut cannot go below what waits for the sum.
    finest = {name: size for name, size in found["by_cut"].items() if name.endswith(" 1")}
    assert finest["dense 1"] > found["stands_measured"]["weight gradients"]
    assert finest["sketch 1"] > found["stands_measured"]["sketch S"]
    assert finest["sketch 1"] < found["stands_measured"]["weight gradients"]


def test_every_cut_gives_the_sketch_of_the_batch_recomputed_or_not(found: dict[str, Any]) -> None:
    # Issue E: 1e-6, float32. A token counted twice gives 1, a mean of means some per cent.
    assert len(found["differences"]) == 9
    assert {key.split()[1] for key in found["differences"]} == {
        "none",
        "non_reentrant",
        "reentrant",
    }
    assert 0 < max(found["differences"].values()) < 1e-6
    assert found["all_tokens"] == found["microbatches"] * found["tokens"]
