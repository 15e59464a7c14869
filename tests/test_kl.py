"""KL in closed form, the scale of a step, budgets and mismatch."""

import math
import runpy
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from logra_lab import kl
from logra_lab.errors import InputError

reference = runpy.run_path(str(Path(__file__).with_name("reference.py")))
decoder, tiny_llm = reference["decoder"], reference["tiny_llm"]
RANK = 5


def pair(n=6, V=9, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    z, z_dot = (torch.randn(n, V, dtype=torch.float64, generator=g) for _ in range(2))
    return (2 * z).to(dtype), z_dot.to(dtype)


# --- formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize("T", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_variance_catches_missing_centring_or_temperature_used_once_or_thrice(T, dtype):
    """½ Var_p(ż/T) with p = softmax(z/T), summed in Python floats."""
    z, z_dot = pair(dtype=dtype)
    got = kl.variance_kl(z, z_dot, T)
    for row in range(z.shape[0]):
        weights = [math.exp(x / T) for x in z[row].tolist()]
        p = [w / sum(weights) for w in weights]
        u = [x / T for x in z_dot[row].tolist()]
        mean = sum(a * b for a, b in zip(p, u, strict=True))
        value = 0.5 * sum(a * (b - mean) ** 2 for a, b in zip(p, u, strict=True))
        rel = 1e-12 if dtype == torch.float64 else 1e-5
        assert got[row].item() == pytest.approx(value, rel=rel)


@pytest.mark.parametrize("T", [0.5, 1.0, 1.7])
def test_variance_catches_a_form_that_is_not_the_fisher_information(T):
    """½ żᵀ F ż, with F the Hessian of KL(p(z) ‖ p(z′)) in z′ at z′ = z, by autograd."""
    z, z_dot = pair(n=3)
    for row, tangent in zip(z, z_dot, strict=True):
        p = Categorical(logits=row / T)
        fisher = torch.autograd.functional.hessian(
            lambda x, p=p: kl_divergence(p, Categorical(logits=x / T)), row
        )
        expected = 0.5 * tangent @ fisher @ tangent
        got = kl.variance_kl(row[None], tangent[None], T)[0]
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=0)


def test_variance_catches_cancellation_of_a_large_common_shift():
    """A shift of all logits changes nothing; E u² − (E u)² would lose it in float32."""
    z, z_dot = pair(dtype=torch.float32)
    expected = kl.variance_kl(z.double(), z_dot.double())
    got = kl.variance_kl(z + 50, z_dot + 1000)
    # the shifted tangent itself is rounded to 1000·2⁻²⁴ = 6e-5, relative to ż of size 1
    torch.testing.assert_close(got.double(), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("n", [1, 255, 256, 257, 600])
def test_position_blocks_catch_rows_lost_or_shared_between_blocks(n):
    z, z_dot = pair(n=n, V=3)
    single = [kl.variance_kl(z[i : i + 1], z_dot[i : i + 1]) for i in range(n)]
    torch.testing.assert_close(kl.variance_kl(z, z_dot), torch.cat(single))
    new = z + 0.1 * z_dot
    single = [kl.realised_kl(z[i : i + 1], new[i : i + 1]) for i in range(n)]
    torch.testing.assert_close(kl.realised_kl(z, new), torch.cat(single))


@pytest.mark.parametrize("T", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("size", [1.0, 1e-2])
def test_realised_kl_catches_the_reverse_direction_or_no_temperature(T, size):
    z, z_dot = pair()
    new = z + size * z_dot
    expected = kl_divergence(Categorical(logits=z / T), Categorical(logits=new / T))
    torch.testing.assert_close(kl.realised_kl(z, new, T), expected, rtol=1e-9, atol=0)


def test_realised_kl_catches_cancellation_at_small_steps_in_float32():
    """KL near 1e-9: Σ p (log p − log q) in float32 has errors of 1e-7."""
    z, z_dot = pair(n=50, dtype=torch.float32)
    new = z + 3e-5 * z_dot
    expected = kl_divergence(Categorical(logits=z.double()), Categorical(logits=new.double()))
    got = kl.realised_kl(z, new)
    assert (got >= 0).all()
    # log-probabilities near −4 round to 2.4e-7, against changes of 3e-5: 1 % a token
    assert got.mean().item() == pytest.approx(expected.mean().item(), rel=0.03)
    assert not kl.realised_kl(z, z).any()


def test_prediction_catches_a_missing_half():
    """KL(p(z) ‖ p(z + h ż)) / h² → ½ Var: the third-order remainder is O(h)."""
    z, z_dot = pair(n=40)
    h = 1e-4
    realised = kl.realised_kl(z, z + h * z_dot) / h**2
    torch.testing.assert_close(kl.variance_kl(z, z_dot), realised, rtol=1e-3, atol=0)


def test_half_precision_logits_catch_a_softmax_in_bfloat16():
    z, z_dot = pair(dtype=torch.bfloat16)
    got = kl.variance_kl(z, z_dot)
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(), kl.variance_kl(z.double(), z_dot.double()), rtol=1e-5, atol=0
    )


# --- scale, budget, mismatch ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full", "budget", "alpha_max", "alpha"),
    [
        (4e-2, 1e-2, 3.0, 0.5),  # √(1e-2/4e-2); without the root it would be 0.25
        (1e-2, 1e-2, 3.0, 1.0),
        (1e-2, 4e-2, 3.0, 2.0),  # below the budget it grows
        (1e-6, 1e-2, 3.0, 3.0),  # up to the cap
        (4e-2, 1e-2, 0.25, 0.25),  # a cap below one binds as well
        (0.0, 1e-2, 3.0, 3.0),
        (5e-324, 1e-2, 3.0, 3.0),
        (4e-2, None, 3.0, 1.0),
        (0.0, None, 3.0, 1.0),
    ],
)
def test_step_scale_catches_a_missing_root_cap_or_growth(full, budget, alpha_max, alpha):
    assert kl.step_scale(full, budget, alpha_max) == pytest.approx(alpha, rel=1e-12)


def test_step_scale_catches_another_cap():
    assert kl.step_scale(1e-9, 1.0) == 3.0  # published α_max


@pytest.mark.parametrize("full", [math.nan, math.inf, -math.inf, -1e-12])
@pytest.mark.parametrize("budget", [None, 1e-3])
def test_step_scale_catches_a_bad_prediction_that_becomes_a_step(full, budget):
    with pytest.raises(kl.BadPrediction, match=str(full)):
        kl.step_scale(full, budget)


def test_budget_catches_an_index_off_by_one():
    """δ_H + ½(δ₀ − δ_H)(1 + cos(π (t−1)/(H−1))), held: 2e-4 → 2e-5."""
    budget = kl.Budget(2e-4, 2e-5, horizon=301)
    assert budget(1) == pytest.approx(2e-4, rel=1e-12)
    assert budget(151) == pytest.approx(1.1e-4, rel=1e-12)  # the cosine's zero
    assert budget(76) == pytest.approx(2e-5 + 0.5 * 1.8e-4 * (1 + math.sqrt(0.5)), rel=1e-12)
    assert budget(301) == pytest.approx(2e-5, rel=1e-12)
    assert budget(306) == 2e-5
    assert budget(300) > 2e-5
    values = [budget(t) for t in range(1, 310)]
    assert values == sorted(values, reverse=True)


def test_budget_catches_division_by_zero_at_horizon_one_and_a_constant_that_moves():
    assert [kl.Budget(2e-4, 2e-5, horizon=1)(t) for t in (1, 2)] == [2e-5, 2e-5]
    assert [kl.Budget(3e-4)(t) for t in (1, 10, 1000)] == [3e-4] * 3
    assert kl.Budget(2e-4, 2e-5).horizon == 300  # published


@pytest.mark.parametrize(
    "settings", [(0.0,), (-1e-4,), (math.nan,), (1e-4, 0.0), (1e-4, math.inf), (1e-4, 1e-5, 0)]
)
def test_budget_catches_values_that_are_no_budget(settings):
    with pytest.raises(InputError, match=r"KL budget .*positive finite.*horizon ≥ 1"):
        kl.Budget(*settings)


def test_mismatch_catches_swapped_weights_or_a_negative_gap_that_pays_back():
    """By hand: 0.3·0.1 = 0.03; 0.7·0.03 = 0.021; 0.7·0.021 + 0.3·0.2 = 0.0747."""
    mismatch = kl.Mismatch()
    assert mismatch.budget(0.05) == 0.05
    for gap, m in [(0.1, 0.03), (-5.0, 0.021), (0.2, 0.0747)]:
        mismatch.update(gap)
        assert mismatch.m == pytest.approx(m, rel=1e-12)
    assert mismatch.budget(1.0) == pytest.approx(0.9253, rel=1e-12)
    assert mismatch.budget(0.1) == pytest.approx(0.05, rel=1e-12)  # never below half


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_mismatch_catches_a_gap_that_would_poison_the_average(gap):
    mismatch = kl.Mismatch(0.02)
    with pytest.raises(kl.BadPrediction, match="gap"):
        mismatch.update(gap)
    assert mismatch.m == 0.02


def test_masked_logits_catch_a_nan_from_an_id_of_probability_zero():
    """An id masked with −inf before and after: both measures are those without its column."""
    torch.manual_seed(0)
    z, dz = torch.randn(5, 7).double(), torch.randn(5, 7).double()
    masked = torch.cat([z, torch.full((5, 1), -torch.inf).double()], dim=1)
    tangent = torch.cat([dz, torch.full((5, 1), torch.nan).double()], dim=1)
    torch.testing.assert_close(kl.variance_kl(masked, tangent), kl.variance_kl(z, dz))
    moved = torch.cat([z + dz, torch.full((5, 1), -torch.inf).double()], dim=1)
    torch.testing.assert_close(kl.realised_kl(masked, moved), kl.realised_kl(z, z + dz))


def test_an_unlikely_id_catches_nan_where_it_is_newly_masked():
    """e^−200 is 0 in float32; without the id's say the KL is infinite, however unlikely it was."""
    old, new = torch.tensor([[0.0, -200.0, 1.0]]), torch.tensor([[0.0, -torch.inf, 1.0]])
    assert kl.realised_kl(old, new).item() == torch.inf
    assert kl.realised_kl(old, old).item() == 0


def test_gradients_of_realised_kl_catch_nan_from_masked_and_from_revived_ids():
    """By new logits q − p, by old ones p·(log p/q − KL): the method, section 3."""
    old = torch.tensor([[0.0, -torch.inf, 1.0], [0.0, -100.0, 1.0]], requires_grad=True)
    new = torch.tensor([[0.5, -torch.inf, 1.0], [0.5, 0.0, 1.0]], requires_grad=True)
    got = torch.autograd.grad(kl.realised_kl(old, new).sum(), (old, new))
    log_p, log_q = (torch.log_softmax(x.detach().double(), -1) for x in (old, new))
    p, q = log_p.exp(), log_q.exp()
    gap = torch.where(p > 0, log_p - log_q, 0)
    want = p * (gap - (p * gap).sum(-1, keepdim=True)), q - p
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.inf, math.nan])
def test_temperatures_catch_a_measure_of_another_policy(temperature):
    z, labels = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)
    calls = (kl.variance_kl, z), (kl.realised_kl, z), (kl.logprob_entropy, labels)
    for function, other in calls:
        with pytest.raises(InputError, match="temperature > 0"):
            function(z, other, temperature)


def test_shapes_catch_rows_that_torch_would_broadcast_or_leave_out(monkeypatch):
    """Without the tests' own checks of shapes, as in a run."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    z = torch.zeros(3, 5)
    wrong = [
        (f, z[cut]) for f in (kl.variance_kl, kl.realised_kl) for cut in (slice(1), (..., [0]))
    ]
    wrong += [(kl.logprob_entropy, torch.zeros(n, dtype=torch.int64)) for n in (2, 4)]
    for function, other in wrong:
        with pytest.raises(InputError, match=r"expected .* \[3"):
            function(z, other)


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_policy_that_is_none_catches_a_realised_kl_that_looks_finite(bad):
    """A row with nan or inf, or with every id masked, has no softmax."""
    z = torch.zeros(2, 3)
    spoilt = z.clone()
    spoilt[1] = torch.tensor([0.0, bad, 1.0]) if bad is not None else -math.inf
    for old, new in ((spoilt, z), (z, spoilt)):
        got = kl.realised_kl(old, new)
        assert got[0] == 0
        assert math.isnan(got[1])
