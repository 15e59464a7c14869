"""The two probes, and what happens when a probe cannot see."""

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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from logra_lab import kl
from logra_lab.errors import InputError
from logra_lab.probe import ProbeError, perturbed, predict
from logra_lab.sketch import Sketch

reference = runpy.run_path(str(Path(__file__).with_name("reference.py")))
decoder, tiny_llm = reference["decoder"], reference["tiny_llm"]
RANK = 5


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
    got = predict(sketch, U, forward, temperature=T, method="jvp")
    assert got.kl == pytest.approx(expected, rel=1e-7)
    assert (got.tokens, got.method) == (12, "jvp")
    torch.testing.assert_close(got.logits[0], z, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("T", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("size", [1e-3, 0.05, 1.0])
def test_fd_in_float64_catches_a_step_size_that_was_not_corrected(T, size):
    """To 1e-6 of the exact derivative (field report D1), for small and large proposals."""
    sketch, U, forward = setup(decoder(), size=size)
    exact = predict(sketch, U, forward, temperature=T, method="jvp")
    fd = predict(sketch, U, forward, temperature=T, method="fd")
    assert fd.method == "fd"
    assert fd.kl == pytest.approx(exact.kl, rel=1e-6)
    again = predict(sketch, U, forward, temperature=T, method="fd", hint=fd.hint)
    assert again.kl == pytest.approx(exact.kl, rel=1e-6)


@pytest.mark.parametrize("arch", ["Qwen2", "Qwen3", "Llama"])
@pytest.mark.parametrize("T", [0.5, 1.0, 1.7])
def test_probes_of_hugging_face_models_catch_disagreement_in_float32(arch, T):
    """1e-4 relative (issue A), through the model's own default attention."""
    sketch, U, forward = setup(tiny_llm(arch), vocabulary=61, size=0.01)
    exact = predict(sketch, U, forward, temperature=T, method="jvp")
    fd = predict(sketch, U, forward, temperature=T, method="fd")
    assert fd.kl == pytest.approx(exact.kl, rel=1e-4)


def test_probes_in_autocast_catch_a_difference_drowned_in_bfloat16():
    """Logits round to 2⁻⁸; at a change of 5 % of their spread that is (2⁻⁸/0.05)² < 1 % of KL,
    and the third derivative (0.05)² = 0.3 %: within 10 % leaves room for the layers between."""
    sketch, U, forward = setup(tiny_llm("Qwen2"), vocabulary=61, size=0.01)
    exact = predict(sketch, U, forward, method="jvp").kl

    def cast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward()

    for method in ("jvp", "fd"):
        got = predict(sketch, U, cast, method=method)
        assert got.kl == pytest.approx(exact, rel=0.1), method


def test_a_tiny_step_in_autocast_catches_rounding_taken_for_no_change():
    """Of a step this small, bfloat16 layers show nothing at the first h that is tried."""
    sketch, U, forward = setup(tiny_llm("Qwen2"), vocabulary=61, size=1e-7)
    exact = predict(sketch, U, forward, method="jvp").kl

    def cast():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return forward()

    got = predict(sketch, U, cast, method="fd")
    assert got.kl == pytest.approx(exact, rel=0.15)


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_logits_by_batch_and_length_catch_a_mean_over_the_batch_alone(method):
    sketch, U, forward = setup(decoder())
    with pytest.raises(InputError, match=r"shape \[1, 12, 31\]: expected \[positions, V\]"):
        predict(sketch, U, lambda: forward()[None], method=method)


def test_hint_catches_a_step_size_that_is_searched_again_every_time():
    sketch, U, forward = setup(decoder(), size=1.0)
    calls = []

    def counted():
        calls.append(1)
        return forward()

    hint = predict(sketch, U, counted, method="fd").hint
    assert len(calls) > 2
    calls.clear()
    predict(sketch, U, counted, method="fd", hint=hint)
    assert len(calls) == 2


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_chunks_catch_a_mean_of_chunk_means(method):
    """Chunks of 2 and 10 positions: the mean is weighted by tokens."""
    sketch, U, forward = setup(decoder())
    parts = [lambda: forward()[:2], lambda: forward()[2:]]
    whole = predict(sketch, U, forward, method=method)
    split = predict(sketch, U, parts, method=method)
    assert split.tokens == whole.tokens == 12
    assert split.kl == pytest.approx(whole.kl, rel=1e-5 if method == "fd" else 1e-10)


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_scaling_catches_a_prediction_that_is_not_quadratic(method):
    sketch, U, forward = setup(decoder())
    one = predict(sketch, U, forward, method=method).kl
    two = predict(sketch, 2 * U, forward, method=method).kl
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
    predict(sketch, U, forward, method=method)
    with torch.enable_grad():
        predict(sketch, U, forward, method=method)
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

    assert predict(sketch, U, with_gradients, method=method).kl > 0
    assert not any(listening)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_models_catch_a_probe_that_recomputation_breaks(reentrant):
    """Non-reentrant: forward mode runs through it. Reentrant has no rule: finite difference."""
    sketch, U, forward = setup(decoder())
    expected = predict(sketch, U, forward, method="jvp").kl
    model = sketch.model
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        got = predict(sketch, U, forward, method="auto")
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
            predict(sketch, U, broken, method=method)
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
        predict(sketch, U, forward, method="jvp")
        assert backends() == inside
    assert backends() != inside


@pytest.mark.parametrize("where", ["model", "blocks", "linears"])
def test_compiled_regions_catch_tangents_that_dynamo_forgets(where, monkeypatch):
    """The hooks of the probe run inside of what is compiled; exact would be 0 without tangents."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace it
    torch._dynamo.reset()
    model = decoder()
    sketch, U, forward = setup(model)
    exact = predict(sketch, U, forward, method="jvp").kl
    parts = {
        "model": [model],
        "blocks": list(model.blocks),
        "linears": [m for m in model.modules() if isinstance(m, torch.nn.Linear)],
    }
    for part in parts[where]:
        part.compile(backend="aot_eager")
    got = predict(sketch, U, forward, method="jvp")
    assert (got.kl, got.method) == (pytest.approx(exact, rel=1e-12), "jvp")


def test_a_perturbed_model_carries_the_tangents_of_its_inputs():
    """Central differences of y − t·(X Aᵀ)Uᵀ along y, with P a constant as the probe has it."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6).double())
    sketch = Sketch(model, 3, targets=["0"])
    U = torch.randn(6, 3, dtype=torch.float64)
    x, x_dot = (torch.randn(4, 8, dtype=torch.float64) for _ in range(2))
    for t in (0.0, 0.25):  # a number, as in a finite difference
        with torch.no_grad(), perturbed(sketch, U, t):
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
        assert predict(sketch, U, forward, method="auto").method == "jvp"


def live_tensors():
    gc.collect()
    return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_repeated_probes_catch_tangents_or_graphs_that_stay_alive(method):
    sketch, U, forward = setup(decoder())
    predict(sketch, U, forward, method=method)
    before = live_tensors()
    for _ in range(5):
        predict(sketch, U, forward, method=method)
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
        got = predict(sketch, U, forward, method="auto")
    assert len(seen) == 1
    assert got.method == "fd"
    reference_sketch, U, plain = setup(Squashed(torch.tanh))
    expected = predict(reference_sketch, U, plain, method="jvp").kl
    assert got.kl == pytest.approx(expected, rel=1e-5)
    with pytest.raises(RuntimeError, match=r"jvp|forward.mode|functorch"):
        predict(sketch, U, forward, method="jvp")


@pytest.mark.parametrize("method", ["auto", "jvp"])
def test_dropped_tangents_catch_no_change_taken_for_a_prediction(method):
    """A custom op drops tangents silently: KL 0 for a non-zero update would mean α = α_max."""
    sketch, U, forward = setup(Squashed(silent))
    with pytest.raises(ProbeError, match="jvp probe sees no change"):
        predict(sketch, U, forward, method=method)
    assert predict(sketch, U, forward, method="fd").kl > 0


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_another_model_catches_a_probe_that_bypasses_the_sketch(method):
    sketch, U, _ = setup(decoder())
    with pytest.raises(ProbeError, match="bypass the sketched model"):
        predict(sketch, U, probe_of(decoder(seed=1)), method=method)


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_zero_update_catches_a_false_alarm(method):
    sketch, U, forward = setup(decoder())
    assert predict(sketch, 0 * U, forward, method=method).kl == 0


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_no_positions_catch_a_mean_over_nothing(method):
    sketch, U, forward = setup(decoder())
    with pytest.raises(kl.BadPrediction, match="no position"):
        predict(sketch, U, lambda: forward()[:0], method=method)
    with pytest.raises(kl.BadPrediction, match="no position"):
        predict(sketch, U, [], method=method)


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_nan_logits_catch_a_prediction_that_looks_like_zero(method):
    sketch, U, forward = setup(decoder())
    got = predict(sketch, U, lambda: forward() * math.nan, method=method)
    assert math.isnan(got.kl)


@pytest.mark.parametrize("method", ["off", "jacobian"])
def test_unknown_method_catches_a_silent_default(method):
    sketch, U, forward = setup(decoder())
    with pytest.raises(InputError, match=rf"'{method}'.*auto.*jvp.*fd"):
        predict(sketch, U, forward, method=method)
