"""S = G Aᵀ, with G from ordinary autograd on an unfrozen copy and A from the scalar contract."""

import copy
import math
import runpy
import warnings
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from logra_lab import projection
from logra_lab.errors import InputError
from logra_lab.optimizer import LoGRA
from logra_lab.projection import Projection
from logra_lab.sketch import Sketch

reference = runpy.run_path(str(Path(__file__).with_name("reference.py")))
decoder, tiny_llm, inside = (reference[name] for name in ("decoder", "tiny_llm", "inside"))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
RANK = 5


def owner(path, share):
    """The path whose key draws A: the first of q/k/v and of gate/up where A is shared."""
    if not share:
        return path
    for first, others in {"q_proj": ("k_proj", "v_proj"), "gate_proj": ("up_proj",)}.items():
        for other in others:
            path = path.replace(other, first)
    return path


def expected_sketches(model, run, *, share=True, seed=3, draw=2, kind="sign", **found):
    """{path: G Aᵀ} in float64."""
    out = {}
    for path, G in reference["dense_gradients"](model, run, **found).items():
        name = owner(path, share)
        if kind == "sign":
            A = reference["matrix"](RANK, G.shape[1], seed=seed, draw=draw, path=name)
        else:
            A = Projection(name, G.shape[1], RANK, seed, draw, kind).matrix(torch.float64)
        out[path] = G.double() @ A.T
    return out


def assert_sketches(sketch, expected, tolerance):
    """Relative to the norm of each layer's sketch."""
    assert list(sketch.layers) == list(expected)
    for path, S in expected.items():
        error = (sketch.layers[path].S.double() - S).norm() / S.norm()
        assert error < tolerance, (path, error.item())
    for path, layer in sketch.layers.items():
        assert layer.module.weight.grad is None, path


def check(model, run, *, tolerance=None, share=True, kind="sign", targets=None):
    """The sketch of `run(model)`, which calls backward, is G Aᵀ."""
    found = {"targets": targets} if targets else {}
    expected = expected_sketches(model, run, share=share, kind=kind, **found)
    sketch = Sketch(model, RANK, seed=3, draw=2, share_inputs=share, projection=kind, **found)
    run(model)
    dtype = next(model.parameters()).dtype
    assert sketch.flat.dtype == dtype
    assert_sketches(sketch, expected, tolerance or TOLERANCE[dtype])
    return sketch


def loss(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).to(torch.float64), ids[:, 1:].flatten())


def token_ids(batch=3, length=7, vocabulary=31, seed=1):
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kind", ["sign", "gaussian"])
def test_sketch_catches_a_wrong_transpose_projection_or_sharing(dtype, share, kind):
    ids = token_ids()
    check(decoder(dtype=dtype), lambda m: loss(m(ids), ids).backward(), share=share, kind=kind)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("parts", [1, 3, 6])
def test_microbatches_catch_a_sketch_that_is_overwritten_or_averaged(dtype, parts):
    ids = token_ids(batch=6)

    def run(model):
        for part in ids.chunk(parts):
            (loss(model(part), part) / parts).backward()

    check(decoder(dtype=dtype), run)


def test_interleaved_microbatches_catch_activations_kept_for_the_last_forward_only():
    """Two forwards before the first backward: each backward needs its own P."""
    one, two = token_ids(seed=1), token_ids(seed=2)

    def run(model):
        losses = [loss(model(ids), ids) for ids in (one, two)]
        losses[0].backward()
        losses[1].backward()

    check(decoder(), run)


class Checkpointed(nn.Module):
    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, ids):
        x = self.model.embed(ids)
        if self.reentrant and torch.is_grad_enabled():
            x.requires_grad_()
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.model.head(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_checkpointing_catches_tokens_counted_in_both_forwards(reentrant, share, dtype):
    ids = token_ids()
    model = decoder(dtype=dtype)
    expected = expected_sketches(model, lambda m: loss(m(ids), ids).backward(), share=share)
    sketch = Sketch(model, RANK, seed=3, draw=2, share_inputs=share)
    calls = Counter()
    model.blocks[0].q_proj.register_forward_hook(lambda *_: calls.update(forward=1))
    loss(Checkpointed(model, reentrant)(ids), ids).backward()
    assert calls["forward"] == 2  # the recomputation did happen
    assert_sketches(sketch, expected, TOLERANCE[dtype])


class Twice(nn.Module):
    """One linear called twice in a forward, on inputs of other shapes: 2-D, 3-D, keyword."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 6, bias=False)

    def forward(self, x):
        y = self.proj(input=torch.tanh(self.proj(x)))
        return y.square().sum() + self.proj(x.flatten(0, -2)[:2]).sum()


@pytest.mark.parametrize("shape", [(7, 6), (2, 7, 6), (2, 1, 3, 6), (6,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_module_called_twice_catches_one_slot_per_module(shape, dtype):
    torch.manual_seed(0)
    model = Twice().to(dtype)
    x = torch.randn(shape if len(shape) > 1 else (1, *shape), dtype=dtype)
    check(model, lambda m: m(x).backward(), targets=["proj"])


def test_one_linear_catches_every_sum_by_hand():
    """d = 6 → 5 outputs of k = 6 inputs, 7 rows, r = 3; G = Hᵀ X written out."""
    g = torch.Generator().manual_seed(0)
    X = torch.randn(7, 6, dtype=torch.float64, generator=g)
    H = torch.randn(7, 5, dtype=torch.float64, generator=g)
    layer = nn.Sequential(nn.Linear(6, 5)).double()
    sketch = Sketch(layer, 3, targets=["0"])
    (layer(X) * H).sum().backward()
    A = reference["matrix"](3, 6, seed=0, draw=0, path="0")
    for d in range(5):
        for r in range(3):
            by_hand = sum((H[n, d] * X[n, k] * A[r, k]).item() for n in range(7) for k in range(6))
            assert sketch.layers["0"].S[d, r].item() == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("arch", ["Qwen2", "Qwen3", "Llama"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_hugging_face_models_catch_a_target_that_is_missed(arch, dtype):
    """The norms of these models run in float32 even in a float64 model, in both runs alike."""
    ids = token_ids(vocabulary=61)
    model = tiny_llm(arch).to(dtype)
    sketch = check(model, lambda m: loss(m(ids).logits, ids).backward())
    assert len(sketch.layers) == 2 * 7
    assert len(sketch.sites) == 2 * 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_hugging_face_checkpointing_catches_double_counting_or_no_counting(reentrant):
    ids = token_ids(vocabulary=61)
    model = tiny_llm("Qwen2").train()
    expected = expected_sketches(model, lambda m: loss(m(ids).logits, ids).backward())
    sketch = Sketch(model, RANK, seed=3, draw=2)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    calls = Counter()
    module = model.model.layers[0].self_attn.q_proj
    module.register_forward_hook(lambda *_: calls.update(forward=1))
    loss(model(ids).logits, ids).backward()
    assert calls["forward"] == 2
    assert_sketches(sketch, expected, 1e-5)


def test_autocast_catches_a_sketch_accumulated_in_bfloat16():
    """Tolerance: P rounds each of its values once (relative ε/2, ε = 2⁻⁷) and each entry of the
    projected sum of ±x accumulates in float32; H and the bf16 activations are those of the
    reference run. G of the reference is itself a bf16 GEMM result, ε/2 more. Errors of rows are
    independent, so ε bounds the norm; a sum of 64 microbatches held in bfloat16 would stall.
    """
    ids = token_ids(batch=64, vocabulary=61)
    model = tiny_llm("Qwen2")

    def run(m):
        for part in ids.split(1):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                value = loss(m(part).logits, part)
            value.backward()

    expected = expected_sketches(model, run)
    sketch = Sketch(model, RANK, seed=3, draw=2)
    run(model)
    assert sketch.flat.dtype == torch.float32
    assert_sketches(sketch, expected, 2**-7)


def test_shared_inputs_catch_a_projection_computed_by_every_reader(monkeypatch):
    """Four projections a block, not seven; seven when sharing is off."""
    calls = Counter()
    project = Projection.project
    monkeypatch.setattr(
        Projection, "project", lambda self, x: calls.update(n=1) or project(self, x)
    )
    for share, per_block in [(True, 4), (False, 7)]:
        calls.clear()
        model = decoder(layers=3)
        Sketch(model, RANK, share_inputs=share)
        model(token_ids())
        assert calls["n"] == 3 * per_block


class Split(nn.Module):
    """Siblings that do not read one activation: another tensor, or one modified in between."""

    def __init__(self, mode):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(6, 5), nn.Linear(9 if mode == "wide" else 6, 5)
        self.v_proj, self.mode = nn.Linear(6, 5), mode

    def forward(self, x, other):
        q = self.q_proj(x)
        with torch.no_grad():
            if self.mode == "in place":
                x.mul_(2)
        k = self.k_proj(x if self.mode == "in place" else other)
        return (q * k * self.v_proj(x)).sum()


@pytest.mark.parametrize("mode", ["other", "in place", "wide"])
def test_siblings_with_other_inputs_catch_a_stale_shared_projection(mode):
    torch.manual_seed(0)
    model = Split(mode).double()
    x = torch.randn(7, 6, dtype=torch.float64)
    other = torch.randn(7, 9 if mode == "wide" else 6, dtype=torch.float64)
    inputs = {
        p: {"q_proj": x, "k_proj": other, "v_proj": x}[p] for p in ("q_proj", "k_proj", "v_proj")
    }
    if mode == "in place":
        inputs["k_proj"] = inputs["v_proj"] = 2 * x
    sketch = Sketch(model, RANK, targets=list(inputs))
    H = {}
    for name in inputs:

        def keep(module, args, y, name=name):
            y.register_hook(lambda grad: H.update({name: grad}))

        getattr(model, name).register_forward_hook(keep)
    model(x.clone(), other).backward()
    for name, X in inputs.items():
        path = "k_proj" if (mode, name) == ("wide", "k_proj") else "q_proj"
        A = reference["matrix"](RANK, X.shape[1], seed=0, draw=0, path=path)
        torch.testing.assert_close(
            sketch.layers[name].S, H[name].T @ X @ A.T, rtol=1e-12, atol=1e-13
        )


def test_no_grad_forward_catches_accumulation_in_forward():
    ids = token_ids()
    model = decoder()
    sketch = Sketch(model, RANK)
    model(ids)
    assert not sketch.flat.any()  # a forward alone accumulates nothing
    loss(model(ids), ids).backward()
    before = sketch.flat.clone()
    with torch.no_grad():
        model(ids)
    with torch.inference_mode():
        model(ids)
    with sketch.paused():
        assert not model(ids).requires_grad
    assert torch.equal(sketch.flat, before)


def test_paused_catches_a_pause_that_survives_an_exception():
    sketch = Sketch(decoder(), RANK)
    with pytest.raises(ZeroDivisionError), sketch.paused():
        raise ZeroDivisionError
    ids = token_ids()
    loss(sketch.model(ids), ids).backward()
    assert sketch.flat.any()


def test_attaching_catches_outputs_that_change_or_gradients_that_stop():
    """Same logits to the bit; the input still receives its gradient."""
    model = decoder()
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    plain = model.blocks[0](x)
    (grad,) = torch.autograd.grad(plain.square().sum(), x)
    Sketch(model, RANK)
    sketched = model.blocks[0](x)
    assert torch.equal(plain, sketched)
    assert torch.equal(grad, torch.autograd.grad(sketched.square().sum(), x)[0])


def test_in_place_activations_catch_an_output_that_is_a_view():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 6)).double()
    x = torch.randn(7, 6, dtype=torch.float64)
    check(model, lambda m: m(x).square().sum().backward(), targets=["0", "2"])


def test_deep_copies_catch_a_reference_policy_that_adds_to_the_sketch():
    model = decoder()
    sketch = Sketch(model, RANK)
    ids = token_ids()
    copied = copy.deepcopy(model)
    copied.requires_grad_(True)
    loss(copied(ids), ids).backward()
    assert not sketch.flat.any()


def test_remove_catches_hooks_or_flags_left_behind():
    model = decoder()
    model.embed.weight.requires_grad_(False)
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    keys = list(model.state_dict())
    sketch = Sketch(model, RANK)
    assert not any(p.requires_grad for p in model.parameters())
    assert list(model.state_dict()) == keys
    sketch.remove()
    assert {n: p.requires_grad for n, p in model.named_parameters()} == flags
    assert not any(m._forward_hooks for m in model.modules())
    ids = token_ids()
    loss(model(ids), ids).backward()
    assert not sketch.flat.any()
    assert model.blocks[0].q_proj.weight.grad is not None


def test_redraw_catches_a_projection_cached_from_the_last_draw():
    ids = token_ids()
    model = decoder()
    expected = expected_sketches(model, lambda m: loss(m(ids), ids).backward(), seed=3, draw=9)
    sketch = Sketch(model, RANK, seed=3, draw=2)
    loss(model(ids), ids).backward()
    sketch.zero_()
    assert not sketch.flat.any()
    sketch.redraw(9)
    loss(model(ids), ids).backward()
    assert_sketches(sketch, expected, 1e-12)


def test_wrapped_models_catch_keys_that_depend_on_the_wrapper():
    plain, wrapped = nn.Module(), nn.Module()
    plain.q_proj = nn.Linear(8, 4)
    wrapped._orig_mod = plain
    a = Sketch(plain, RANK, targets=["q_proj"]).sites[0].projection
    b = Sketch(wrapped, RANK, targets=["q_proj"]).sites[0].projection
    assert a.key == b.key


# --- the second moments of the estimate S A of G -------------------------------------------------


@pytest.mark.parametrize(("kind", "factor"), [("sign", -1), ("gaussian", 1)])
def test_variance_catches_a_projection_of_another_scale_or_law(kind, factor):
    """E SA = G and E‖SA − G‖² = (k ∓ 1)/r · ‖G‖², over 1,500 draws, within 3 standard errors.

    Section 1 of the method. The standard error is the sample's own. The bias is tested by its
    squared norm, whose expectation over n draws is E‖SA − G‖²/n.
    """
    d, k, r, n = 3, 17, 4, 1500
    G = torch.randn(d, k, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    errors, total = [], torch.zeros_like(G)
    for draw in range(n):
        A = Projection("m", k, r, seed=0, draw=draw, kind=kind).matrix(torch.float64)
        difference = (G @ A.T) @ A - G
        errors.append(difference.square().sum())
        total += difference
    errors = torch.stack(errors)
    expected = (k + factor) / r * G.square().sum()
    assert abs(errors.mean() - expected) < 3 * errors.std() / math.sqrt(n)
    # the other law's value is far outside the band: the test can tell them apart
    other = (k - factor) / r * G.square().sum()
    assert abs(errors.mean() - other) > 3 * errors.std() / math.sqrt(n)
    # ‖mean‖² is a sum of d·k correlated terms: 3 times its expectation is beyond 1e-3
    assert total.div(n).square().sum() < 3 * expected / n


def test_sketches_of_a_layer_catch_a_variance_that_only_the_formula_has():
    """The same identity through a real layer, hook and backward, over 600 redraws."""
    d, k, r, n = 3, 9, 2, 600
    g = torch.Generator().manual_seed(0)
    X = torch.randn(5, k, dtype=torch.float64, generator=g)
    H = torch.randn(5, d, dtype=torch.float64, generator=g)
    model = nn.Sequential(nn.Linear(k, d)).double()
    sketch = Sketch(model, r, targets=["0"])
    G, errors = H.T @ X, []
    for draw in range(n):
        sketch.zero_()
        sketch.redraw(draw)
        (model(X) * H).sum().backward()
        A = sketch.sites[0].projection.matrix(torch.float64)
        errors.append((sketch.layers["0"].S @ A - G).square().sum())
    errors = torch.stack(errors)
    expected = (k - 1) / r * G.square().sum()
    assert abs(errors.mean() - expected) < 3 * errors.std() / math.sqrt(n)


@pytest.mark.parametrize("r", [4, 16])
def test_cosine_catches_a_sketch_that_points_elsewhere(r):
    """E cos(SA, G) is close to 1/√(1 + (k−1)/r); Jensen's gap is O(1/r) for a many-row G: 2 %."""
    d, k = 64, 256
    G = torch.randn(d, k, generator=torch.Generator().manual_seed(0))
    cosines = []
    for draw in range(50):
        A = Projection("m", k, r, draw=draw).matrix()
        cosines.append(F.cosine_similarity(((G @ A.T) @ A).flatten(), G.flatten(), dim=0))
    expected = 1 / math.sqrt(1 + (k - 1) / r)
    assert torch.stack(cosines).mean().item() == pytest.approx(expected, rel=0.02)


# --- memory --------------------------------------------------------------------------------------


class Created(TorchDispatchMode):
    """Lists the operations that create a tensor of d·k elements, views of old storage excepted."""

    def __init__(self, model):
        super().__init__()
        weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
        self.sizes = {w.numel() for w in weights}
        self.known = {w.untyped_storage().data_ptr() for w in model.parameters()}
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = inside(self, func, args, kwargs)
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.Tensor) or leaf.numel() not in self.sizes:
                continue
            if leaf.untyped_storage().data_ptr() not in self.known:
                self.found.append((str(func), tuple(leaf.shape)))
        return out


class Mlp(nn.Module):
    """n = 5, r = 3, d and k prime: 11 · 13 and 13 · 17 come from no other pair of sizes here."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(13, 17), nn.Linear(13, 17)
        self.down_proj = nn.Linear(17, 11)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def train_step(model, optimizer, autocast=False):
    x = torch.randn(5, 13)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        value = model(x).square().sum()
    value.backward()
    return optimizer.step()


@pytest.mark.parametrize("variant", ["plain", "norm_preserving"])
def test_memory_catches_any_new_tensor_of_a_weights_size(variant, monkeypatch):
    monkeypatch.setattr(projection, "_BLOCK_NUMBERS", 64)  # these matrices are smaller than a block
    model = Mlp()
    optimizer = LoGRA(model, rank=3, variant=variant)
    with Created(model) as created:
        for _ in range(2):
            assert train_step(model, optimizer).skipped is None
    assert created.found == []
    assert all(p.grad is None for p in model.parameters())


def test_memory_check_catches_a_dense_gradient():
    """Negative control: one unfrozen weight, or an update formed before it is subtracted."""
    model = Mlp()
    LoGRA(model, rank=3)
    model.down_proj.weight.requires_grad_(True)
    with Created(model) as created:
        model(torch.randn(5, 13)).square().sum().backward()
    assert {shape for _, shape in created.found} <= {(11, 17), (17, 11)}
    assert created.found
    with Created(model) as created:
        torch.randn(11, 3) @ torch.randn(3, 17)
    assert created.found == [("aten.mm.default", (11, 17))]


def test_memory_in_autocast_catches_anything_but_casts_of_the_weights(monkeypatch):
    monkeypatch.setattr(projection, "_BLOCK_NUMBERS", 64)
    model = Mlp()
    optimizer = LoGRA(model, rank=3)
    with Created(model) as created:
        assert train_step(model, optimizer, autocast=True).skipped is None
    assert created.found
    casts = {"aten._to_copy.default", "aten.t.default", "aten.transpose.int", "aten.detach.default"}
    assert {name for name, _ in created.found} <= casts
    made = [name for name, _ in created.found if name == "aten._to_copy.default"]
    assert len(made) == 3  # one cast a layer


def test_saved_activations_catch_a_layer_that_keeps_its_input():
    """What autograd saves for a lone linear: P [n, r] and the weight, never X [n, k]."""
    model = nn.Sequential(nn.Linear(13, 11))
    Sketch(model, 3, targets=["0"])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.shape) or t, lambda t: t
    ):
        model(torch.randn(5, 13, requires_grad=True))
    assert (5, 13) not in saved
    assert (5, 3) in saved


@pytest.mark.parametrize("share", [True, False])
def test_inputs_catch_an_activation_that_outlives_the_forward(share):
    """The normed hidden states that q/k/v and gate/up read: nobody but autograd may hold them."""
    model = decoder(layers=1)
    Sketch(model, RANK, share_inputs=share)
    inputs = []
    for name in ("q_proj", "gate_proj", "down_proj"):
        getattr(model.blocks[0], name).register_forward_hook(
            lambda module, args, y: inputs.append(weakref.ref(args[0]))
        )
    with torch.no_grad():
        model(token_ids())
    value = model(token_ids()).sum()
    assert len(inputs) == 6
    assert all(ref() is None for ref in inputs)
    value.backward()


def test_projections_catch_a_cache_that_outlives_backward(monkeypatch):
    made, project = [], Projection.project

    def keep(self, x):
        P = project(self, x)
        made.append(weakref.ref(P))
        return P

    monkeypatch.setattr(Projection, "project", keep)
    model = decoder()
    Sketch(model, RANK)
    model(token_ids()).sum().backward()
    assert len(made) == 2 * 4
    assert all(ref() is None for ref in made)


def test_an_unread_sibling_catches_an_input_held_for_a_reader_that_never_comes():
    model = nn.ModuleDict({"q_proj": nn.Linear(6, 5), "k_proj": nn.Linear(6, 5)})
    Sketch(model, 3, targets=["q_proj", "k_proj"])
    x = torch.randn(7, 6)
    ref = weakref.ref(x)
    model["q_proj"](x).sum().backward()
    del x
    assert ref() is None


# --- bad input -----------------------------------------------------------------------------------


def unchanged(model):
    return all(p.requires_grad for p in model.parameters()) and not any(
        m._forward_hooks for m in model.modules()
    )


@pytest.mark.parametrize("rank", [0, -3, 13])
def test_rank_catches_a_layer_that_is_too_narrow(rank):
    model = decoder(k=12)
    with pytest.raises(InputError, match=rf"rank {rank} .*blocks\.0\.q_proj.*≤ 12"):
        Sketch(model, rank)
    assert unchanged(model)


def test_unknown_target_catches_a_name_that_is_silently_skipped():
    model = decoder()
    with pytest.raises(InputError, match=r"\['query'\].*Decoder.*'down_proj'.*'q_proj'"):
        Sketch(model, 2, targets=["q_proj", "query"])
    assert unchanged(model)


def test_one_name_catches_a_string_read_letter_by_letter():
    assert list(Sketch(decoder(layers=1), 2, targets="q_proj").layers) == ["blocks.0.q_proj"]
    with pytest.raises(InputError, match=r"\['query'\]"):
        Sketch(decoder(), 2, targets="query")


def test_full_paths_catch_matching_by_last_component_only():
    paths = ["blocks.1.q_proj", "head"]
    assert list(Sketch(decoder(), 2, targets=paths).layers) == paths


def test_model_without_linears_catches_an_empty_sketch():
    with pytest.raises(InputError, match=r"Sequential; its linear layers are none"):
        Sketch(nn.Sequential(nn.Conv1d(3, 3, 1)), 2)


def test_embedding_as_target_catches_a_weight_that_is_no_linear():
    with pytest.raises(InputError, match=r"'embed' is Embedding.*expected nn\.Linear"):
        Sketch(decoder(), 2, targets=["embed"])


def test_tied_head_catches_an_update_of_the_embedding():
    model = tiny_llm("Qwen2", tie_word_embeddings=True)
    with pytest.raises(InputError, match=r"'lm_head' shares .*\['model\.embed_tokens\.weight'\]"):
        Sketch(model, 2, targets=["lm_head"])
    assert unchanged(model)
    assert (
        "lm_head"
        in Sketch(tiny_llm("Qwen2", tie_word_embeddings=False), 2, targets=["lm_head"]).layers
    )


def test_two_linears_with_one_weight_catch_an_update_applied_twice():
    model = decoder()
    model.blocks[1].q_proj.weight = model.blocks[0].q_proj.weight
    with pytest.raises(InputError, match=r"'blocks\.0\.q_proj' .*\['blocks\.1\.q_proj\.weight'\]"):
        Sketch(model, 2)


def test_quantised_weights_catch_integers_taken_for_weights():
    model = decoder()
    packed = nn.Parameter(torch.zeros(12, 12, dtype=torch.int8), requires_grad=False)
    model.blocks[1].o_proj.weight = packed
    with pytest.raises(InputError, match=r"'blocks\.1\.o_proj' is Linear .*int8.*unquantised"):
        Sketch(model, 2)


def test_packed_shapes_catch_four_bit_weights_stored_flat():
    model = decoder()
    model.blocks[0].k_proj.weight = nn.Parameter(torch.zeros(72, 1, dtype=torch.float64))
    with pytest.raises(InputError, match=r"'blocks\.0\.k_proj'"):
        Sketch(model, 2)


def test_default_targets_catch_a_model_of_which_only_a_part_would_train():
    """Phi-3 style: q, k, v and gate, up are fused under other names."""
    block = nn.ModuleDict({n: nn.Linear(8, 8) for n in ("qkv_proj", "o_proj", "lm_head")})
    with pytest.warns(UserWarning, match="qkv_proj stay frozen"):
        Sketch(block, 2)


def test_default_targets_do_not_warn_where_nothing_is_left_out():
    block = nn.ModuleDict({n: nn.Linear(8, 8) for n in ("o_proj", "lm_head")})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Sketch(block, 2)
