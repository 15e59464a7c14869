"""What 03_rowadam records at the smoke preset, against closed forms."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from logra_lab.lab.presets import preset
from logra_lab.sketch import TARGETS

SMOKE = preset("smoke")
BETA2 = 0.95


@pytest.fixture(scope="module")
def numbers(recorded: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    return recorded("03_rowadam")


def test_the_toys_rows_have_root_mean_square_one_at_first_whatever_their_size(
    numbers: dict[str, Any],
) -> None:
    S1, S2 = [[3.0, 4.0], [0.3, -0.4]], [[0.0, 5.0], [0.5, 0.0]]
    # t = 1: v̂ is the mean square 12.5 (and a hundredth of it). Both rows of S2 have it too, so that
    # v̂ stays at t = 2: a missing bias correction would give factors √20 and √10 there.
    for step, S in zip(numbers["toy"], (S1, S2), strict=True):
        plain = [[x / math.sqrt(12.5) for x in S[0]], [x / math.sqrt(0.125) for x in S[1]]]
        size = math.sqrt(sum(x * x for row in S for x in row) / 4)  # ‖S‖ over ‖plain‖ = √4
        for row in range(2):
            assert step["by hand"][row] == pytest.approx(plain[row])
            assert step["plain"][row] == pytest.approx(plain[row])
            assert step["kept"][row] == pytest.approx([x * size for x in plain[row]])


def test_redrawn_moments_learn_a_rows_norm_and_fixed_ones_do_not(numbers: dict[str, Any]) -> None:
    r = numbers["rank"]
    for name, errors in numbers["moments"].items():
        assert len(errors) == SMOKE.draws
        for t, error in enumerate(errors, 1):
            # Var of Σ w_s x_s with w_s ∝ β₂^(t − s), normalised; a fixed A is one sample.
            weights = [BETA2 ** (t - s) for s in range(1, t + 1)]
            used = sum(w * w for w in weights) / sum(weights) ** 2
            expected = math.sqrt(2 / r * (used if name.startswith("redrawn") else 1))
            # 2,048 rows share each A: an RMS over them is known to a few per cent.
            assert error == pytest.approx(expected, rel=0.08), (name, t)
    for t, closed in enumerate(numbers["moments_closed"]["redrawn"], 1):
        weights = [BETA2 ** (t - s) for s in range(1, t + 1)]
        used = sum(w * w for w in weights) / sum(weights) ** 2
        assert closed == pytest.approx(math.sqrt(2 / r * used))


def test_real_gradients_follow_the_closed_forms_of_signs_and_gaussian_entries(
    numbers: dict[str, Any],
) -> None:
    noise = numbers["noise"]
    k = noise["k"]
    assert noise["r"] == [4, 16, 64] * 2
    for i, kind in enumerate(noise["kind"]):
        r = noise["r"][i]
        expected = (k - 1 if kind == "sign" else k + 1) / r
        # Three standard errors over draws.
        assert abs(noise["error"][i] - expected) < 3 * noise["error_sem"][i]
        cosine = 1 / math.sqrt(1 + (k - 1) / r)
        for what in ("cosine", "to_rows"):
            # These gradients have few directions g, and ‖A g‖ varies by √(1/2r) a draw and
            # direction: up to a third at r = 4, averaged over four layers and eight draws.
            assert noise[what][i] == pytest.approx(cosine, rel=0.12), (kind, r, what)
    svd = noise["svd"]
    assert svd["measured"] == pytest.approx(svd["closed form"], abs=1e-5)  # Eckart and Young
    assert svd["measured"] == sorted(svd["measured"])


def test_sketches_of_one_real_gradient_average_out_as_one_over_m(numbers: dict[str, Any]) -> None:
    k, r = numbers["noise"]["k"], numbers["rank"]
    for m, (error, closed) in enumerate(
        zip(numbers["averaged"], numbers["averaged_closed"], strict=True), 1
    ):
        assert closed == pytest.approx((k - 1) / (r * m))
        # A gradient of few directions: a single draw is off by up to √(2/r) = a quarter.
        assert error == pytest.approx(closed, rel=0.25)
    assert numbers["averaged"][-1] < numbers["averaged"][0] / (SMOKE.draws / 2)


def test_plain_shares_a_step_by_weights_and_norm_preserving_by_gradients(
    numbers: dict[str, Any],
) -> None:
    hidden, inner = 128, 384  # data/small_policy/config.json; k and v have half the heads
    weights = {"q_proj": hidden**2, "k_proj": hidden**2 / 2, "v_proj": hidden**2 / 2}
    weights |= {"o_proj": hidden**2, "gate_proj": hidden * inner, "up_proj": hidden * inner}
    weights["down_proj"] = hidden * inner
    shares = numbers["shares"]
    for kind in TARGETS:
        expected = 100 * weights[kind] / sum(weights.values())
        assert shares["plain"]["predicted"][kind] == pytest.approx(expected)
    for found in shares.values():
        for what in ("predicted", "measured"):
            assert sum(found[what].values()) == pytest.approx(100)
        for kind, predicted in found["predicted"].items():
            # ‖S‖² and ‖D A‖² of rows that share few directions scatter by √(2/r), a quarter, around
            # their means; shares by less, as layers are added up.
            assert found["measured"][kind] == pytest.approx(predicted, rel=0.6, abs=2), kind
    # On one layer they are one direction; ε and float32 rounding remain.
    assert numbers["same_direction"] == pytest.approx(1, abs=1e-5)


def test_methods_hold_the_numbers_of_their_closed_forms_at_equal_bytes(
    numbers: dict[str, Any],
) -> None:
    d, r = 128, 16
    budget = d * (r + 1)
    lora, galore = budget // (4 * 2 * d), budget // (3 * d)
    assert (lora, galore) == (2, 5)
    expected = {  # numbers with the gradient, rank
        "dense Adam": (3 * d * d, d),
        "LoRA, equal bytes": (4 * lora * 2 * d, lora),
        "LoRA, equal rank": (4 * r * 2 * d, r),
        "GaLore, equal bytes": (d * d + 3 * galore * d, galore),
        "GaLore, equal rank": (d * d + 3 * r * d, r),
    }
    ours = ("LoGRA", "LoGRA, Gaussian A", "LoGRA, A fixed", "sketch, no moment")
    expected |= dict.fromkeys(ours, (budget, r))
    assert numbers["race"].keys() == expected.keys()
    for name, (count, rank) in expected.items():
        row = numbers["race"][name]
        assert row["KiB, closed form"] == row["KiB, counted"] == 4 * count / 1024, name
        assert row["rank"] == rank


def test_no_method_gets_below_its_floor_and_redrawing_has_none(numbers: dict[str, Any]) -> None:
    left, floors = numbers["left_over"], numbers["floors"]
    assert floors["rows within one A"] == pytest.approx(1 - 16 / 128)
    # The floor of one A is its mean up to the spread of a share of 16 in 128 over 128 rows.
    assert floors["rows within this A"] == pytest.approx(1 - 16 / 128, abs=0.03)
    bounds = {
        "LoRA, equal bytes": floors["any W of rank 2"],
        "LoRA, equal rank": floors["any W of rank 16"],
        "LoGRA, A fixed": floors["rows within this A"],
    }
    for name, bound in bounds.items():
        assert left[f"full rank | {name}"] > bound * (1 - 1e-5), name
    # A fixed A has come near its floor; a redrawn one is far below it, with the same bytes.
    assert left["full rank | LoGRA, A fixed"] < 1.05 * floors["rows within this A"]
    assert left["full rank | LoGRA"] < 0.7 * floors["rows within this A"]
    assert left["full rank | LoGRA"] < left["full rank | sketch, no moment"]
    # Signs or Gaussian entries: (k − 1)/r against (k + 1)/r, under 2 % apart; the rest is the draw.
    assert left["full rank | LoGRA, Gaussian A"] == pytest.approx(
        left["full rank | LoGRA"], rel=0.15
    )
    # Where the target has LoRA's rank, LoRA learns it.
    assert left["rank 2 | LoRA, equal bytes"] < 0.1 < left["full rank | LoRA, equal bytes"]


def test_a_first_step_gains_and_its_cosine_is_no_verdict(numbers: dict[str, Any]) -> None:
    steps = numbers["first_step"]["steps"]
    assert len(steps) == 6
    for name, row in steps.items():
        # A wrong sign, or a change that was not applied, gains nothing.
        assert row["gain, own batch"] > 0, name
    assert steps["the gradient"]["cosine with G"] == pytest.approx(1, abs=1e-5)
    # cos(sign G, G) = ‖G‖₁/(√dk ‖G‖), at most 1 and √(2/π) = 0.80 for normal entries.
    assert 0.2 < steps["dense Adam"]["cosine with G"] < 0.9
    ours = steps["LoGRA, plain"]
    low, high = (1 / math.sqrt(1 + (k - 1) / numbers["rank"]) for k in (384, 128))
    # RowAdam turns S A towards equal rows: by a factor of at most 1, and not by much.
    assert 0.5 * low < ours["cosine with G"] < 1.1 * high
    assert ours["gain, own batch"] > steps["the gradient"]["gain, own batch"] / 2
    for name, row in steps.items():
        relative = row["gain, fresh batch"] / steps["dense Adam"]["gain, fresh batch"]
        assert numbers["first_step"]["relative"][name] == pytest.approx(relative)
    for name, (low, high) in numbers["first_step"]["relative_range"].items():
        assert low <= numbers["first_step"]["relative"][name] * (1 + 1e-12) <= high * (1 + 2e-12)


def test_variants_of_one_cosine_split_a_step_between_layers_and_differ_in_length(
    numbers: dict[str, Any],
) -> None:
    steps = numbers["first_step"]["steps"]
    plain, kept = steps["LoGRA, plain"], steps["LoGRA, norm-preserving"]
    # One direction in each layer, so one cosine in each; a global direction would have another.
    assert kept["cosine with G"] == pytest.approx(plain["cosine with G"], rel=1e-3)
    # Large gradients have the larger share: the KL is used up at a shorter length.
    assert steps["the gradient"]["length"] < kept["length"] < plain["length"]
