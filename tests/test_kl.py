"""Predicted KL: formulas, both probes, and what happens when a probe cannot see."""

import copy
import gc
import math
import runpy
import warnings
from functools import partial
from pathlib import Path

import jaxtyping
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, kl_divergence
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from logra_lab import kl
from logra_lab.errors import InputError
from logra_lab.sketch import Sketch

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


# --- the two probes ------------------------------------------------------------------------------


def probe_of(model, vocabulary=31, batch=2, length=6):
    ids = torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(5))

    def forward():
        out = model(ids)
        return getattr(out, "logits", out).flatten(0, 1)

    return forward


def setup(model, size=0.02, vocabulary=31, **settings):
    """A sketch, a random proposal and a probe that sees it."""
    sketch = Sketch(model, RANK, seed=1, draw=4, **settings)
    g = torch.Generator().manual_seed(9)
    U = size * torch.randn(sketch.flat.shape, dtype=torch.float64, generator=g)
    return sketch, U.to(sketch.flat.dtype), probe_of(model, vocabulary)


def dense_copy(model, sketch, factor, t):
    """A copy whose weights are W − t·U A, with A of the scalar contract."""
    twin = copy.deepcopy(model)
    modules = dict(twin.named_modules())
    with torch.no_grad():
        for path, layer in sketch.layers.items():
            A = reference["matrix"](
                RANK, layer.site.k, seed=1, draw=4, path=layer.site.path, dtype=factor.dtype
            )
            modules[path].weight.sub_(t * (factor[layer.rows] @ A))
    return twin


@pytest.mark.parametrize("T", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("share", [True, False])
def test_jvp_catches_a_direction_that_is_not_the_weight_update(T, share):
    """Independent: central difference of logits of two copies with densely changed weights.

    Float64, h = 1e-5: truncation O(h²) = 1e-10 and rounding 1e-16/h = 1e-11 in ż.
    """
    model = decoder()
    sketch, U, forward = setup(model, share_inputs=share)
    h = 1e-5
    with torch.no_grad():
        plus, minus = (probe_of(dense_copy(model, sketch, U, t))() for t in (h, -h))
        z = forward()
    z_dot = (plus - minus) / (2 * h)
    expected = kl.variance_kl(z, z_dot, T).mean().item()
    got = kl.predict(sketch, U, forward, temperature=T, method="jvp")
    assert got.kl == pytest.approx(expected, rel=1e-7)
    assert (got.tokens, got.method) == (12, "jvp")
    torch.testing.assert_close(got.logits[0], z, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("T", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("size", [1e-3, 0.05, 1.0])
def test_fd_in_float64_catches_a_step_size_that_was_not_corrected(T, size):
    """To 1e-6 of the exact derivative (field report D1), for small and large proposals."""
    sketch, U, forward = setup(decoder(), size=size)
    exact = kl.predict(sketch, U, forward, temperature=T, method="jvp")
    fd = kl.predict(sketch, U, forward, temperature=T, method="fd")
    assert fd.method == "fd"
    assert fd.kl == pytest.approx(exact.kl, rel=1e-6)
    again = kl.predict(sketch, U, forward, temperature=T, method="fd", hint=fd.hint)
    assert again.kl == pytest.approx(exact.kl, rel=1e-6)


@pytest.mark.parametrize("arch", ["Qwen2", "Qwen3", "Llama"])
@pytest.mark.parametrize("T", [0.5, 1.0, 1.7])
def test_probes_of_hugging_face_models_catch_disagreement_in_float32(arch, T):
    """1e-4 relative (issue A), through the model's own default attention."""
    sketch, U, forward = setup(tiny_llm(arch), vocabulary=61, size=0.01)
    exact = kl.predict(sketch, U, forward, temperature=T, method="jvp")
    fd = kl.predict(sketch, U, forward, temperature=T, method="fd")
    assert fd.kl == pytest.approx(exact.kl, rel=1e-4)


def test_probes_in_autocast_catch_a_difference_drowned_in_bfloat16():
    """Logits round to 2⁻⁸; at a change of 5 % of their spread that is (2⁻⁸/0.05)² < 1 % of KL,
    and the third derivative (0.05)² = 0.3 %: within 10 % leaves room for the layers between."""
    sketch, U, forward = setup(tiny_llm("Qwen2"), vocabulary=61, size=0.01)
    exact = kl.predict(sketch, U, forward, method="jvp").kl

    def cast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward()

    for method in ("jvp", "fd"):
        got = kl.predict(sketch, U, cast, method=method)
        assert got.kl == pytest.approx(exact, rel=0.1), method


def test_a_tiny_step_in_autocast_catches_rounding_taken_for_no_change():
    """Of a step this small, bfloat16 layers show nothing at the first h that is tried."""
    sketch, U, forward = setup(tiny_llm("Qwen2"), vocabulary=61, size=1e-7)
    exact = kl.predict(sketch, U, forward, method="jvp").kl

    def cast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward()

    got = kl.predict(sketch, U, cast, method="fd")
    assert got.kl == pytest.approx(exact, rel=0.15)


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_logits_by_batch_and_length_catch_a_mean_over_the_batch_alone(method):
    sketch, U, forward = setup(decoder())
    with pytest.raises(InputError, match=r"shape \[1, 12, 31\]: expected \[positions, V\]"):
        kl.predict(sketch, U, lambda: forward()[None], method=method)


def test_hint_catches_a_step_size_that_is_searched_again_every_time():
    sketch, U, forward = setup(decoder(), size=1.0)
    calls = []

    def counted():
        calls.append(1)
        return forward()

    hint = kl.predict(sketch, U, counted, method="fd").hint
    assert len(calls) > 2
    calls.clear()
    kl.predict(sketch, U, counted, method="fd", hint=hint)
    assert len(calls) == 2


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_chunks_catch_a_mean_of_chunk_means(method):
    """Chunks of 2 and 10 positions: the mean is weighted by tokens."""
    sketch, U, forward = setup(decoder())
    parts = [lambda: forward()[:2], lambda: forward()[2:]]
    whole = kl.predict(sketch, U, forward, method=method)
    split = kl.predict(sketch, U, parts, method=method)
    assert split.tokens == whole.tokens == 12
    assert split.kl == pytest.approx(whole.kl, rel=1e-5 if method == "fd" else 1e-10)


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_scaling_catches_a_prediction_that_is_not_quadratic(method):
    sketch, U, forward = setup(decoder())
    one = kl.predict(sketch, U, forward, method=method).kl
    two = kl.predict(sketch, 2 * U, forward, method=method).kl
    assert two == pytest.approx(4 * one, rel=1e-5)


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_probing_catches_changed_weights_left_hooks_or_a_touched_sketch(method):
    """Bit for bit, on a model with a sketch already accumulated."""
    model = decoder(dtype=torch.float32)
    sketch, U, forward = setup(model)
    forward().square().sum().backward()
    before = copy.deepcopy(model.state_dict())
    S, factor = sketch.flat.clone(), U.clone()
    hooks = {n: list(m._forward_hooks) for n, m in model.named_modules()}
    kl.predict(sketch, U, forward, method=method)
    with torch.enable_grad():
        kl.predict(sketch, U, forward, method=method)
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert {n: list(m._forward_hooks) for n, m in model.named_modules()} == hooks
    assert torch.equal(sketch.flat, S)
    assert torch.equal(U, factor)
    forward().square().sum().backward()  # the sketch still listens
    torch.testing.assert_close(sketch.flat, 2 * S, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_a_forward_that_turns_gradients_on_catches_a_sketch_that_listens(method):
    sketch, U, forward = setup(decoder())
    listening = []

    def with_gradients():
        with torch.enable_grad():
            z = forward()
        listening.append(z.requires_grad)
        return z

    assert kl.predict(sketch, U, with_gradients, method=method).kl > 0
    assert not any(listening)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_models_catch_a_probe_that_recomputation_breaks(reentrant):
    """Non-reentrant: forward mode runs through it. Reentrant has no rule: finite difference."""
    sketch, U, forward = setup(decoder())
    expected = kl.predict(sketch, U, forward, method="jvp").kl
    model = sketch.model
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        got = kl.predict(sketch, U, forward, method="auto")
    assert got.method == ("fd" if reentrant else "jvp")
    assert got.kl == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("method", ["auto", "jvp", "fd"])
@pytest.mark.parametrize("error", [ZeroDivisionError, RuntimeError, KeyboardInterrupt])
def test_a_raising_forward_catches_hooks_or_a_backend_left_behind(method, error):
    model = decoder()
    sketch, U, forward = setup(model)
    hooks = {n: list(m._forward_hooks) for n, m in model.named_modules()}
    before = backends()

    def broken():
        forward()
        raise error("broken")

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # an ordinary error is no reason to change the method
        with pytest.raises(error, match="broken"):
            kl.predict(sketch, U, broken, method=method)
    assert {n: list(m._forward_hooks) for n, m in model.named_modules()} == hooks
    assert backends() == before
    forward().sum().backward()
    assert sketch.flat.any()  # no longer paused


def backends():
    return (
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )


def test_callers_attention_backend_catches_a_probe_that_resets_it():
    sketch, U, forward = setup(decoder())
    with sdpa_kernel([SDPBackend.MATH]):
        inside = backends()
        kl.predict(sketch, U, forward, method="jvp")
        assert backends() == inside
    assert backends() != inside


@pytest.mark.parametrize("where", ["model", "blocks", "linears"])
def test_compiled_regions_catch_tangents_that_dynamo_forgets(where, monkeypatch):
    """The hooks of the probe run inside of what is compiled; exact would be 0 without tangents."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace it
    torch._dynamo.reset()
    model = decoder()
    sketch, U, forward = setup(model)
    exact = kl.predict(sketch, U, forward, method="jvp").kl
    parts = {
        "model": [model],
        "blocks": list(model.blocks),
        "linears": [m for m in model.modules() if isinstance(m, torch.nn.Linear)],
    }
    for part in parts[where]:
        part.compile(backend="aot_eager")
    got = kl.predict(sketch, U, forward, method="jvp")
    assert (got.kl, got.method) == (pytest.approx(exact, rel=1e-12), "jvp")


def test_a_perturbed_model_carries_the_tangents_of_its_inputs():
    """Central differences of y − t·(X Aᵀ)Uᵀ along y, with P a constant as the probe has it."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6).double())
    sketch = Sketch(model, 3, targets=["0"])
    U = torch.randn(6, 3, dtype=torch.float64)
    x, x_dot = (torch.randn(4, 8, dtype=torch.float64) for _ in range(2))
    for t in (0.0, 0.25):  # a number, as in a finite difference
        with torch.no_grad(), kl.perturbed(sketch, U, t):
            y, got = torch.func.jvp(model, (x,), (x_dot,))
        A = sketch.sites[0].projection.matrix(torch.float64)
        torch.testing.assert_close(y, model[0].bias + x @ (model[0].weight - t * U @ A).T)
        torch.testing.assert_close(got, x_dot @ model[0].weight.T)


def test_fused_attention_catches_a_jvp_probe_on_the_default_kernel():
    """The default kernel has no forward-mode rule (so the probe must choose another one)."""
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(NotImplementedError, match=r"forward.*AD"):
        torch.func.jvp(lambda x: F.scaled_dot_product_attention(x, x, x), (q,), (q,))
    sketch, U, forward = setup(decoder())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kl.predict(sketch, U, forward, method="auto").method == "jvp"


def live_tensors():
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_repeated_probes_catch_tangents_or_graphs_that_stay_alive(method):
    sketch, U, forward = setup(decoder())
    kl.predict(sketch, U, forward, method=method)
    before = live_tensors()
    for _ in range(5):
        kl.predict(sketch, U, forward, method=method)
    assert live_tensors() <= before


# --- operations without a forward-mode rule ------------------------------------------------------


class NoJvp(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0] ** 2)


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.tanh(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


@torch.library.custom_op("logra_lab_tests::tanh", mutates_args=())
def silent(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


class Squashed(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.inner, self.op = decoder(), op

    def forward(self, ids):
        return self.op(self.inner(ids))


@pytest.mark.parametrize("op", [NoJvp.apply, OldStyle.apply])
def test_ops_without_a_rule_catch_a_crash_or_a_silent_fallback(op):
    """auto: finite difference with exactly one warning, the same number; jvp: the error."""
    sketch, U, forward = setup(Squashed(op))
    with pytest.warns(UserWarning, match="no forward-mode rule.*method='fd'") as seen:
        got = kl.predict(sketch, U, forward, method="auto")
    assert len(seen) == 1
    assert got.method == "fd"
    reference_sketch, U, plain = setup(Squashed(torch.tanh))
    expected = kl.predict(reference_sketch, U, plain, method="jvp").kl
    assert got.kl == pytest.approx(expected, rel=1e-5)
    with pytest.raises(RuntimeError, match=r"jvp|forward.mode|functorch"):
        kl.predict(sketch, U, forward, method="jvp")


@pytest.mark.parametrize("method", ["auto", "jvp"])
def test_dropped_tangents_catch_no_change_taken_for_a_prediction(method):
    """A custom op drops tangents silently: KL 0 for a non-zero update would mean α = α_max."""
    sketch, U, forward = setup(Squashed(silent))
    with pytest.raises(kl.ProbeError, match="jvp probe sees no change"):
        kl.predict(sketch, U, forward, method=method)
    assert kl.predict(sketch, U, forward, method="fd").kl > 0


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_another_model_catches_a_probe_that_bypasses_the_sketch(method):
    sketch, U, _ = setup(decoder())
    with pytest.raises(kl.ProbeError, match="bypass the sketched model"):
        kl.predict(sketch, U, probe_of(decoder(seed=1)), method=method)


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_zero_update_catches_a_false_alarm(method):
    sketch, U, forward = setup(decoder())
    assert kl.predict(sketch, 0 * U, forward, method=method).kl == 0


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_no_positions_catch_a_mean_over_nothing(method):
    sketch, U, forward = setup(decoder())
    with pytest.raises(kl.BadPrediction, match="no position"):
        kl.predict(sketch, U, lambda: forward()[:0], method=method)
    with pytest.raises(kl.BadPrediction, match="no position"):
        kl.predict(sketch, U, [], method=method)


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_nan_logits_catch_a_prediction_that_looks_like_zero(method):
    sketch, U, forward = setup(decoder())
    got = kl.predict(sketch, U, lambda: forward() * math.nan, method=method)
    assert math.isnan(got.kl)


@pytest.mark.parametrize("method", ["off", "jacobian"])
def test_unknown_method_catches_a_silent_default(method):
    sketch, U, forward = setup(decoder())
    with pytest.raises(InputError, match=rf"'{method}'.*auto.*jvp.*fd"):
        kl.predict(sketch, U, forward, method=method)


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
