"""What 09_memory_plan records at the smoke preset, against sums written out from the shapes."""

from collections.abc import Callable
from typing import Any

import pytest

GIB = 2**30
# Qwen2.5-7B: arXiv:2412.15115 and its config.json; (d, k) of a block's trained matrices.
BLOCK = [(3584, 3584)] * 2 + [(512, 3584)] * 2 + [(18944, 3584)] * 2 + [(3584, 18944)]
P, P_t = 7_615_616_512, 28 * sum(d * k for d, k in BLOCK)
ROWS = 28 * sum(d for d, _ in BLOCK)


@pytest.fixture(scope="session")
def found(recorded: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return recorded("09_memory_plan")


def test_one_matrix_by_hand_is_16_bytes_a_number_or_4_and_a_sketch(found: dict[str, Any]) -> None:
    d, k, r = 18944, 3584, found["setup"]["rank"]
    assert sum(found["by_hand"]["dense Adam"].values()) == 16 * d * k
    assert sum(found["by_hand"]["LoGRA"].values()) == 4 * (d * k + d * r + d)


def test_the_two_numbers_of_the_7b_model(found: dict[str, Any]) -> None:
    setup = found["setup"]
    assert (setup["fsdp"], setup["rank"], setup["dtype"]) == (4, 256, "bfloat16")
    weights, cache = 2 * P, 2 * 28 * 2 * 512 * setup["sequences"] * setup["context"]
    assert weights + cache < found["serve"] < 1.05 * (weights + cache)
    adapters = 28 * sum(256 * (d + k) for d, k in BLOCK)
    assert found["standing"] == {
        "dense Adam": (4 + 4 + 8) * P_t // 4 + 4 * (P - P_t) // 4,
        "LoRA": 2 * P // 4 + 16 * adapters // 4,
        "LoGRA": 4 * P // 4 + 4 * ROWS * (256 + 1) // 4,
    }
    # Four arrays [tokens, vocabulary] of float32.
    assert found["logits"] == 4 * 4 * setup["tokens"] * 152064
    for name, cost in found["terms"].items():
        assert found["limits"][name] == max(
            (t for t in cost if "probe" not in t and "block, rec" not in t), key=cost.__getitem__
        )
        assert found["standing"][name] < found["peaks"][name] <= sum(cost.values())


def test_published_averages_are_the_papers_and_lie_inside(found: dict[str, Any]) -> None:
    averages = {(row["model"], row["method"]): row["published"] for row in found["published"]}
    assert {key: value for key, value in averages.items() if value is not None} == {
        ("Qwen2.5-1.5B", "dense Adam"): 9.18,
        ("Qwen2.5-1.5B", "LoRA"): 13.2,
        ("Qwen2.5-1.5B", "LoGRA"): 7.18,
        ("Qwen2.5-7B", "dense Adam"): 31.82,
        ("Qwen2.5-7B", "LoGRA"): 17.29,
        ("27B", "LoGRA"): 51.5,
    }  # method.md
    # The average of a run lies between what stands and the largest moment of the same system.
    assert set(found["inside"].values()) == {True}
    for saving in found["savings"]:
        assert saving["least"] < saving["published"] < saving["most"]


def test_without_checkpointing_loras_activations_alone_exceed_its_published_average() -> None:
    # The claim in words: what a block keeps, bfloat16 with peft's float32 inputs, from the shapes.
    hidden, q, kv, inner, heads, r, n = 1536, 1536, 256, 8960, 12, 256, 4096
    kept = 2 * (2 * q + 2 * kv + 3 * inner) + 4 * (2 * (hidden + 1) + heads)
    inputs = 4 * (5 * hidden + q + inner + 7 * r)
    assert 28 * n * (kept + inputs) / GIB > 13.2


def test_every_comparison_with_counted_bytes_is_within_ten_per_cent(found: dict[str, Any]) -> None:
    # Issue E: 10 %. Two models, three methods, with and without checkpointing.
    assert found["comparisons"] == 2 * (2 * (7 + 8 + 8) + 3)
    assert {"gradients", "adapters", "sketches S, then D and U"} <= found["worst_off"].keys()
    assert {"saved for backward", "one block, recomputed", "peak of the step"} <= found[
        "worst_off"
    ].keys()
    assert max(found["worst_off"].values()) < 0.1
    # Sums of shapes: what is left are position ids and indices.
    assert found["terms_off"] < 0.012
    assert found["command_status"] == 0
