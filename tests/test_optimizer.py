"""The step, checked on the weights themselves; what is skipped leaves every bit as it was."""

import copy
import io
import itertools
import math
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from logra_lab import kl
from logra_lab.errors import InputError
from logra_lab.optimizer import KLControl, LoGRA
from logra_lab.rowadam import row_adam

reference = runpy.run_path(str(Path(__file__).with_name("reference.py")))
decoder, tiny_llm = reference["decoder"], reference["tiny_llm"]
RANK, RHO = 5, 1e-3


def token_ids(seed=1, batch=3):
    return torch.randint(31, (batch, 7), generator=torch.Generator().manual_seed(seed))


def backward(model, seed=1):
    ids = token_ids(seed)
    F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()


def probe_of(model):
    ids = token_ids(seed=7, batch=2)
    return lambda: model(ids).flatten(0, 1)


def weights(optimizer):
    return {p: x.module.weight.detach().clone() for p, x in optimizer.sketch.layers.items()}


def changes(optimizer, before):
    return {p: x.module.weight - before[p] for p, x in optimizer.sketch.layers.items()}


def norm(tensors):
    return math.sqrt(sum(x.double().square().sum().item() for x in tensors))


def projection_of(layer, seed, draw):
    """A of a layer from the scalar contract; shared inputs use the first reader's path."""
    return reference["matrix"](RANK, layer.site.k, seed=seed, draw=draw, path=layer.site.path)


def snapshot(optimizer):
    state = {f"w:{n}": p.detach().clone() for n, p in optimizer.sketch.model.named_parameters()}
    return state | {
        "v": optimizer.v.clone(),
        "t": optimizer.t,
        "draw": optimizer.draw,
        "keys": [site.projection.key for site in optimizer.sketch.sites],
        "mismatch": optimizer.mismatch.m,
        "hint": optimizer.fd_hint,
    }


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        same = torch.equal(value, b[key]) if isinstance(value, torch.Tensor) else value == b[key]
        assert same, key


# --- the update ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["plain", "norm_preserving"])
@pytest.mark.parametrize("refresh", [True, False])
def test_three_steps_catch_a_wrong_sign_size_draw_moment_or_layer(variant, refresh):
    """W − ρ-sized row_adam(S) · A, redone by hand with the scalar contract's A, in float64."""
    model = decoder()
    twin = copy.deepcopy(model)
    optimizer = LoGRA(
        model,
        rank=RANK,
        seed=11,
        update_ratio=RHO,
        variant=variant,
        refresh=refresh,
        wire="float64",
    )
    layers = optimizer.sketch.layers
    moments = {p: torch.zeros(x.S.shape[0], dtype=torch.float64) for p, x in layers.items()}
    modules = dict(twin.named_modules())
    for t in (1, 2, 3):
        backward(model, seed=t)
        report = optimizer.step()
        twin.zero_grad()
        backward(twin, seed=t)
        updates = {}
        for path, layer in layers.items():
            A = projection_of(layer, 11, t if refresh else 0)
            S = modules[path].weight.grad @ A.T
            D, moments[path] = row_adam(S, moments[path], t, variant=variant)
            updates[path] = D @ A
        size = RHO * norm(modules[p].weight for p in layers) / norm(updates.values())
        with torch.no_grad():
            for path, update in updates.items():
                modules[path].weight.sub_(size * update)
        for path, layer in layers.items():
            torch.testing.assert_close(
                layer.module.weight, modules[path].weight, rtol=1e-11, atol=1e-13
            )
        assert (report.t, report.skipped, report.alpha) == (t, None, 1.0)
    frozen = {n for n, _ in model.named_parameters()} - {f"{p}.weight" for p in layers}
    assert frozen
    state, other = model.state_dict(), twin.state_dict()
    assert all(torch.equal(state[name], other[name]) for name in frozen)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("projection", ["sign", "gaussian"])
@pytest.mark.parametrize("variant", ["plain", "norm_preserving"])
def test_size_rule_catches_a_gram_of_another_scale_or_a_rule_per_layer(share, projection, variant):
    """√Σ‖ΔW_l‖² = ρ √Σ‖W_l‖² on the change itself, in float64: layers differ, the sum holds.

    ΔW is recovered from W′ − W: relative error 2⁻⁵³/ρ, far below 1e-9.
    """
    model = decoder()
    optimizer = LoGRA(
        model,
        rank=RANK,
        update_ratio=RHO,
        share_inputs=share,
        projection=projection,
        variant=variant,
        wire="float64",
    )
    before = weights(optimizer)
    backward(model)
    report = optimizer.step()
    change = changes(optimizer, before)
    assert norm(change.values()) == pytest.approx(RHO * norm(before.values()), rel=1e-9)
    assert report.update_norm == pytest.approx(norm(change.values()), rel=1e-9)
    assert report.update_ratio == pytest.approx(RHO, rel=1e-12)
    ratios = [norm([change[p]]) / norm([before[p]]) for p in before]
    assert max(ratios) > 1.2 * min(ratios)  # a rule per layer would give ρ to each


def test_descent_catches_a_step_uphill():
    model = decoder()
    optimizer = LoGRA(model, rank=RANK, update_ratio=RHO)
    ids = token_ids()

    def value():
        return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    losses = []
    for _ in range(10):
        losses.append(value().item())
        value().backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert sum(b < a for a, b in itertools.pairwise(losses)) >= 7


def test_published_defaults_catch_other_constants():
    optimizer = LoGRA(decoder(), rank=RANK)
    assert (optimizer.rho, optimizer.beta2, optimizer.eps) == (6e-5, 0.95, 1e-8)
    assert optimizer.variant == "norm_preserving"
    assert optimizer.refresh
    assert KLControl().alpha_max == 3.0


def test_sketch_norm_in_the_report_catches_the_norm_of_the_direction():
    model = decoder()
    optimizer = LoGRA(model, rank=RANK)
    backward(model)
    expected = norm(layer.S for layer in optimizer.sketch.layers.values())
    assert optimizer.step().sketch_norm == pytest.approx(expected, rel=1e-12)
    assert not optimizer.sketch.flat.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tiny_gradients_catch_an_update_of_nan(dtype):
    """1e-25: squares underflow float32, so the step is skipped there; float64 takes it."""
    model = decoder(dtype=dtype)
    optimizer = LoGRA(model, rank=RANK, update_ratio=RHO, wire="float64")
    optimizer.sketch.flat.fill_(1e-25)
    before = weights(optimizer)
    report = optimizer.step()
    size = norm(changes(optimizer, before).values())
    expected = RHO * norm(before.values()) if dtype == torch.float64 else 0.0
    assert size == pytest.approx(expected, rel=1e-6)
    assert (report.skipped is None) == (dtype == torch.float64)


# --- draws ---------------------------------------------------------------------------------------


def test_draws_catch_a_projection_that_is_not_renumbered_or_not_fixed():
    for refresh, draws in [(True, [1, 2, 3]), (False, [0, 0, 0])]:
        model = decoder()
        optimizer = LoGRA(model, rank=RANK, refresh=refresh)
        seen = []
        for t in range(3):
            seen.append(optimizer.draw)
            assert {s.projection.draw for s in optimizer.sketch.sites} == {optimizer.draw}
            backward(model, seed=t)
            optimizer.step()
        assert seen == draws


def test_microbatches_catch_a_redraw_between_them():
    """12 = 1 × 12 = 3 × 4 = 12 × 1 sequences: one draw, one moment update, the same weights."""
    results = []
    for parts in (1, 3, 12):
        model = decoder()
        optimizer = LoGRA(model, rank=RANK, update_ratio=RHO)
        ids = token_ids(batch=12)
        for part in ids.chunk(parts):
            logits = model(part)[:, :-1].flatten(0, 1)
            (F.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum") / 72).backward()
        optimizer.step()
        assert optimizer.t == 1
        results.append(snapshot(optimizer))
    for other in results[1:]:
        for key, value in results[0].items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(value, other[key], rtol=1e-10, atol=1e-14)


# --- control -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["jvp", "fd", "auto"])
def test_budget_catches_alpha_that_is_reported_but_not_applied(method):
    """KL(1) by explicit weights: the uncontrolled step's own change, then α = √(δ/KL(1))."""
    free = LoGRA(decoder(), rank=RANK, update_ratio=RHO, wire="float64")
    before = weights(free)
    backward(free.sketch.model)
    free.step()
    full = changes(free, before)
    model = decoder()
    z, z_dot = directional(model, full)
    kl_full = kl.variance_kl(z, z_dot).mean().item()

    delta = kl_full / 9
    control = KLControl(budget=kl.Budget(delta), method=method)
    optimizer = LoGRA(model, rank=RANK, update_ratio=RHO, control=control, wire="float64")
    backward(model)
    report = optimizer.step(probe_of(model))
    assert report.alpha == pytest.approx(1 / 3, rel=1e-5)
    for path, change in changes(optimizer, before).items():
        torch.testing.assert_close(change, full[path] / 3, rtol=1e-4, atol=1e-12)
    assert report.kl_predicted_full == pytest.approx(kl_full, rel=1e-5)
    assert report.kl_predicted == pytest.approx(delta, rel=1e-5)
    assert report.update_ratio == pytest.approx(RHO / 3, rel=1e-5)
    assert report.kl_budget == delta
    assert report.kl_method == ("fd" if method == "fd" else "jvp")


def directional(model, change, h=1e-4):
    """Logits and their derivative along a dense change, by central difference on copies."""
    logits = []
    for sign in (h, -h, 0.0):
        twin = copy.deepcopy(model)
        modules = dict(twin.named_modules())
        with torch.no_grad():
            for path, value in change.items():
                modules[path].weight.add_(sign * value)
            logits.append(probe_of(twin)())
    return logits[2], (logits[0] - logits[1]) / (2 * h)


def test_small_proposals_catch_a_step_that_cannot_grow_or_has_no_cap():
    model = decoder()
    control = KLControl(budget=kl.Budget(1.0), alpha_max=2.5)
    optimizer = LoGRA(model, rank=RANK, update_ratio=1e-6, control=control, wire="float64")
    before = weights(optimizer)
    backward(model)
    report = optimizer.step(probe_of(model))
    assert report.alpha == 2.5
    change = norm(changes(optimizer, before).values())
    assert change == pytest.approx(2.5e-6 * norm(before.values()), rel=1e-6)


def test_annealing_catches_a_budget_indexed_from_zero():
    """Update 1 gets δ₀ and update H gets δ_H."""
    model = decoder()
    control = KLControl(budget=kl.Budget(1e-4, 1e-6, horizon=3))
    optimizer = LoGRA(model, rank=RANK, control=control)
    seen = []
    for t in range(4):
        backward(model, seed=t)
        seen.append(optimizer.step(probe_of(model)).kl_budget)
    assert seen == pytest.approx([1e-4, 5.05e-5, 1e-6, 1e-6], rel=1e-9)


def test_mismatch_catches_a_budget_that_ignores_it_or_counts_a_skipped_step():
    model = decoder()
    control = KLControl(budget=kl.Budget(1e-4), subtract_mismatch=True)
    optimizer = LoGRA(model, rank=RANK, control=control)
    backward(model)
    report = optimizer.step(probe_of(model), gap=1e-4)  # m = 0.3e-4
    assert report.mismatch == pytest.approx(3e-5, rel=1e-12)
    assert report.kl_budget == pytest.approx(7e-5, rel=1e-12)
    assert optimizer.step(probe_of(model), gap=1e-4).skipped  # an empty sketch
    assert optimizer.mismatch.m == pytest.approx(3e-5, rel=1e-12)
    backward(model)
    assert optimizer.step(probe_of(model), gap=1.0).kl_budget == pytest.approx(5e-5, rel=1e-12)


def test_mismatch_catches_a_subtraction_that_was_not_asked_for():
    model = decoder()
    optimizer = LoGRA(model, rank=RANK, control=KLControl(budget=kl.Budget(1e-4)))
    backward(model)
    report = optimizer.step(probe_of(model), gap=1.0)
    assert (report.kl_budget, report.mismatch) == (1e-4, None)


@pytest.mark.parametrize("method", ["jvp", "fd"])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_realised_kl_catches_a_measurement_on_the_old_or_twice_stepped_weights(method, temperature):
    """Against logits kept by the test; and near the prediction, since KL is 1e-5."""
    model = decoder()
    control = KLControl(budget=kl.Budget(1e-5), method=method, temperature=temperature)
    optimizer = LoGRA(model, rank=RANK, update_ratio=RHO, control=control)
    probe = probe_of(model)
    with torch.no_grad():
        old = probe()
    backward(model)
    report = optimizer.step(probe)
    with torch.no_grad():
        p, q = (torch.distributions.Categorical(logits=z / temperature) for z in (old, probe()))
    expected = torch.distributions.kl_divergence(p, q).mean().item()
    assert report.kl_realised == pytest.approx(expected, rel=1e-6)
    assert report.kl_realised == pytest.approx(report.kl_predicted, rel=0.05)


def test_probe_without_budget_catches_a_report_that_changes_the_step():
    plain = LoGRA(decoder(), rank=RANK)
    probed = LoGRA(decoder(), rank=RANK, control=KLControl())
    for optimizer in (plain, probed):
        backward(optimizer.sketch.model)
    plain.step()
    report = probed.step(probe_of(probed.sketch.model))
    assert report.alpha == 1.0
    assert report.kl_predicted_full > 0
    assert_same(snapshot(plain), snapshot(probed))


def test_unmeasured_steps_catch_extra_forwards():
    model = decoder()
    control = KLControl(budget=kl.Budget(1e-4), method="jvp", measure=False)
    optimizer = LoGRA(model, rank=RANK, control=control)
    calls, probe = [], probe_of(model)
    backward(model)
    report = optimizer.step(lambda: calls.append(1) or probe())
    assert report.kl_realised is None
    assert len(calls) == 1


class Wide(nn.Module):
    """Two wide linears before a softmax, for a rank at which int8 rounding is coarse."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q_proj = nn.Linear(2048, 5, bias=False, dtype=torch.float64)
        self.x = torch.randn(7, 2048, dtype=torch.float64) / 45

    def forward(self):
        return self.q_proj(self.x)


def test_coarse_rounding_catches_a_probe_of_what_is_not_applied():
    """Rows of one peak and many halves of a unit: rounding them adds 2047/4 to a squared norm of
    63.6² + 2047/4, 5.5 % of the norm, and so about 11 % to the KL of the step."""

    def step(wire, control=None, rho=1e-3):
        model = Wide()
        optimizer = LoGRA(
            model, rank=2048, targets=["q_proj"], update_ratio=rho, control=control, wire=wire,
            variant="plain",
        )  # fmt: skip
        optimizer.sketch.flat.fill_(0.5)
        optimizer.sketch.flat[:, 0] = 63.6
        optimizer.sketch.flat[::2] *= -1  # equal rows would move every logit alike
        before = weights(optimizer)
        report = optimizer.step(model if control else None)
        return report, changes(optimizer, before)

    def kl_of(change):
        z_dot = Wide().x @ change["q_proj"].T
        return kl.variance_kl(Wide()(), z_dot).mean().item()

    peak = step("float64")[0].update.values.abs().max().item()
    rho = 1e-3 * 63.6 * 2.0**-24 / peak  # so that the wire's unit is 2⁻²⁴ and the halves are halves
    exact, sent = (kl_of(step(wire, rho=rho)[1]) for wire in ("float64", "int8"))
    assert abs(sent / exact - 1) > 0.05
    control = KLControl(budget=kl.Budget(sent), method="jvp", measure=False)
    report, _ = step("int8", control, rho=rho)
    assert report.kl_predicted_full == pytest.approx(sent, rel=1e-9, abs=0)


# --- skipped steps -------------------------------------------------------------------------------


def trained(**settings):
    """A model two steps into training, so that every piece of state is non-trivial."""
    model = decoder(dtype=torch.float32)
    control = KLControl(budget=kl.Budget(1e-4), method="fd", subtract_mismatch=True)
    optimizer = LoGRA(model, rank=RANK, control=control, **settings)
    for t in range(2):
        backward(model, seed=t)
        assert optimizer.step(probe_of(model), gap=1e-5).skipped is None
    return model, optimizer


@pytest.mark.parametrize("refresh", [True, False])
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("zero", "sketch is zero in every layer"),
        ("nan", r"layer 'blocks.1.o_proj' is not finite"),
        ("inf", r"layer 'blocks.1.o_proj' is not finite"),
        ("nan logits", "predicted KL(1) is nan"),
        ("no tokens", "no position"),
        ("nan gap", "logprob gap is nan"),
    ],
)
def test_skipped_steps_catch_any_state_that_moves(case, reason, refresh):
    model, optimizer = trained(refresh=refresh)
    before = snapshot(optimizer)
    probe, gap = probe_of(model), 1e-5
    if case != "zero":
        backward(model)
    if case in ("nan", "inf"):
        optimizer.sketch.layers["blocks.1.o_proj"].S[3, 2] = float(case)
    if case == "nan logits":
        probe = lambda: probe_of(model)() * math.nan  # noqa: E731
    if case == "no tokens":
        probe = lambda: probe_of(model)()[:0]  # noqa: E731
    if case == "nan gap":
        gap = math.nan
    report = optimizer.step(probe, gap=gap)
    assert reason in report.skipped
    assert (report.t, report.alpha) == (2, None)
    assert_same(snapshot(optimizer), before)
    assert not optimizer.sketch.flat.any()
    # and the next step is the one that an optimizer which never skipped would take
    twin, other = trained(refresh=refresh)
    for m, o in ((model, optimizer), (twin, other)):
        backward(m, seed=5)
        assert o.step(probe_of(m), gap=1e-5).t == 3
    assert_same(snapshot(optimizer), snapshot(other))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("when", [1, 3])
def test_a_raising_probe_catches_half_a_proposal_left_in_the_sketch(error, when):
    """In the probe's first forward, and in the one that keeps the old logits (fd: the third)."""
    model, optimizer = trained()
    before = snapshot(optimizer)
    backward(model)
    calls, probe = [], probe_of(model)

    def broken():
        calls.append(1)
        if len(calls) == when:
            raise error("broken")
        return probe()

    with pytest.raises(error, match="broken"):
        optimizer.step(broken, gap=0.0)
    assert_same(snapshot(optimizer), before)
    assert not optimizer.sketch.flat.any()


def test_non_finite_weights_catch_a_size_of_nan():
    model, optimizer = trained()
    backward(model)
    with torch.no_grad():
        model.blocks[0].up_proj.weight[0, 0] = math.inf
    before = weights(optimizer)
    report = optimizer.step(probe_of(model))
    assert "the weights" in report.skipped
    assert all(torch.equal(w, before[p]) for p, w in weights(optimizer).items())


# --- state ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("refresh", [True, False])
def test_resuming_catches_any_state_that_is_not_saved(refresh):
    """Five steps, against two, a file read with weights_only=True, other RNG draws, three."""
    model, optimizer = trained(refresh=refresh)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)

    resumed_model = decoder(seed=99, dtype=torch.float32)
    control = KLControl(budget=kl.Budget(1e-4), method="fd", subtract_mismatch=True)
    resumed = LoGRA(resumed_model, rank=RANK, control=control, refresh=refresh)
    backward(resumed_model)  # a leftover that loading must forget
    state = torch.load(file, weights_only=True)
    resumed_model.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    assert not resumed.sketch.flat.any()
    torch.rand(17)
    for t in range(3):
        reports = []
        for m, o in ((model, optimizer), (resumed_model, resumed)):
            backward(m, seed=10 + t)
            reports.append(o.step(probe_of(m), gap=2e-5))
        assert reports[0] == reports[1]
    assert_same(snapshot(optimizer), snapshot(resumed))


def test_state_dict_catches_a_view_of_the_running_moment():
    model, optimizer = trained()
    state = optimizer.state_dict()
    kept = copy.deepcopy(state)
    backward(model)
    optimizer.step(probe_of(model))
    assert torch.equal(state["v"], kept["v"])
    assert state["t"] == kept["t"] == 2
    later = optimizer.state_dict()
    kept = later["v"].clone()
    optimizer.load_state_dict(state)  # must not write into what was saved
    assert torch.equal(later["v"], kept)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("rank", {"rank": 4}),
        ("seed", {"seed": 1}),
        ("layers", {"targets": ["q_proj", "k_proj"]}),
        ("projection", {"projection": "gaussian", "wire": "float32"}),
        ("sites", {"share_inputs": False}),
        ("refresh", {"refresh": False}),
        ("variant", {"variant": "plain"}),
        ("wire", {"wire": "float32"}),
    ],
)
def test_loading_catches_a_checkpoint_of_another_run(name, settings):
    _, optimizer = trained()
    other = LoGRA(decoder(dtype=torch.float32), **{"rank": RANK, **settings})
    before = snapshot(other)
    with pytest.raises(InputError, match=rf"checkpoint does not fit: {name} is"):
        other.load_state_dict(optimizer.state_dict())
    assert_same(snapshot(other), before)


def test_loading_catches_a_renamed_layer_or_another_scheme():
    _, optimizer = trained()
    for change in ("layers", "scheme"):
        state = optimizer.state_dict()
        fixed = state["fixed"] = dict(state["fixed"])
        if change == "layers":
            fixed["layers"] = [x.replace("q_proj", "query") for x in fixed["layers"]]
        else:
            fixed["scheme"] += 1
        with pytest.raises(InputError, match=f"{change} is"):
            optimizer.load_state_dict(state)


def test_loading_catches_a_damaged_state_that_is_half_applied():
    _, optimizer = trained()
    before = snapshot(optimizer)
    for key in optimizer.state_dict():
        state = optimizer.state_dict()
        del state[key]
        with pytest.raises(InputError, match=rf"lacks \['{key}'\]"):
            optimizer.load_state_dict(state)
    assert_same(snapshot(optimizer), before)


# --- bad input -----------------------------------------------------------------------------------


def refused(match, *, model=None, **settings):
    """LoGRA refuses, and leaves the model as it was."""
    model = model or decoder()
    flags = [p.requires_grad for p in model.parameters()]
    with pytest.raises(InputError, match=match):
        LoGRA(model, **{"rank": RANK, **settings})
    assert [p.requires_grad for p in model.parameters()] == flags
    assert not any(m._forward_hooks for m in model.modules())


def test_bad_settings_catch_values_that_fail_only_later():
    refused("rank 0 ", rank=0)
    refused("rank 13 .*≤ 12", rank=13)
    refused(r"\['wq'\].*q_proj", targets=["wq"])
    refused("update_ratio is -0.1", update_ratio=-0.1)
    refused("update_ratio is nan", update_ratio=math.nan)
    refused("64 bits", seed=1 << 63)
    refused("update_ratio is inf", update_ratio=math.inf)
    refused("beta2 1.0", beta2=1.0)
    refused("eps -1", eps=-1.0)
    refused("variant 'adam'", variant="adam")
    refused("projection 'dct'", projection="dct")


def test_narrow_weights_catch_steps_that_rounding_would_swallow():
    for dtype in (torch.bfloat16, torch.float16):
        model = decoder(dtype=dtype)
        refused(r"'blocks\.0\.q_proj' is torch\.\w*float16.*dtype=torch\.float32", model=model)


def test_unusable_models_catch_tied_quantised_or_missing_targets():
    tied = tiny_llm("Qwen2", tie_word_embeddings=True)
    refused("'lm_head' shares", model=tied, targets=["lm_head"])
    packed = decoder()
    int8 = torch.zeros(12, 12, dtype=torch.int8)
    packed.blocks[0].q_proj.weight = nn.Parameter(int8, requires_grad=False)
    refused("int8", model=packed)
    refused("its linear layers are none", model=nn.Sequential(nn.Embedding(5, 3)))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"alpha_max": 0.0}, "alpha_max"),
        ({"alpha_max": -1.0}, "alpha_max"),
        ({"alpha_max": math.nan}, "alpha_max"),
        ({"temperature": 0.0}, "temperature"),
        ({"method": "exact"}, "'exact'.*auto"),
        ({"method": "off", "budget": kl.Budget(1e-4)}, "needs a probe"),
    ],
)
def test_bad_control_catches_values_that_fail_only_later(settings, match):
    with pytest.raises(InputError, match=match):
        KLControl(**settings)


def test_a_budget_without_a_probe_catches_an_uncontrolled_step():
    model, optimizer = trained()
    backward(model)
    before, S = snapshot(optimizer), optimizer.sketch.flat.clone()
    with pytest.raises(InputError, match=r"step\(probe\)"):
        optimizer.step()
    assert_same(snapshot(optimizer), before)
    assert torch.equal(optimizer.sketch.flat, S)  # the caller may still pass one
