"""The kernel for RowAdam against section 2 of the method, computed by hand in float64."""

import math
import runpy

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from logra_lab import rowadam
from logra_lab.errors import InputError

row_adam = pytest.importorskip("logra_lab.kernels.row_adam", reason="needs the triton package")
VARIANTS = ["plain", "norm_preserving"]
GUARD = 3
UNIT = 2**-24  # the rounding of float32
# v is rounded once, its root by half of that; the factor once, its product with S once; sums and
# everything else are float64. A row's own moment and its layer's mean root both enter a factor.
RTOL = 4 * UNIT


def by_hand(S, v, sizes, t, beta2=0.95, eps=1e-8, variant="norm_preserving"):
    """The direction and the next moment, layer by layer, in numpy's float64."""
    S, v = S.double().numpy(), v.double().numpy()
    v = beta2 * v + (1 - beta2) * (S * S).mean(1)
    D, start = np.zeros_like(S), 0
    for size in sizes:
        rows = slice(start, start + size)
        start += size
        root = np.sqrt(v[rows] / (1 - beta2**t))
        if variant == "plain":
            D[rows] = S[rows] / (root + eps)[:, None]
        elif size:
            s = 1 / (root + max(eps * root.mean(), 2.0**-126))  # smallest normal float32
            D[rows] = S[rows] * (s / np.sqrt((s * s).mean()))[:, None]
            now = np.linalg.norm(D[rows])
            D[rows] *= np.linalg.norm(S[rows]) / now if now else 1
    return torch.from_numpy(D), torch.from_numpy(v)


def draw(sizes, r, seed=0):
    """A sketch and moments, with rows and layers of unlike size."""
    g = torch.Generator().manual_seed(seed)
    d = sum(sizes)
    S = torch.randn(d, r, generator=g) * 10 ** (4 * torch.rand(d, 1, generator=g) - 3)
    return S, 10 ** (4 * torch.rand(d, generator=g) - 3)


def guarded(x, fill, device, step=(1, 1)):
    """A view equal to x, its neighbours in memory all `fill`; and that memory."""
    sizes = [n * s + 2 * GUARD for n, s in zip(x.shape, step, strict=False)]
    memory = torch.full(sizes, fill, dtype=x.dtype, device=device)
    cuts = tuple(slice(GUARD, GUARD + n * s, s) for n, s in zip(x.shape, step, strict=False))
    memory[cuts] = x.to(device)
    return memory[cuts], memory


def untouched(memory, view):
    """Whether all of `memory` except `view` is still nan."""
    outside = torch.ones_like(memory, dtype=torch.bool)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return bool(memory[outside].isnan().all())


def inside(machine, name, *arguments):
    """Calls a function of this file where the kernels run."""
    if machine.device == "cuda":
        return globals()[name](*arguments)
    scope = {"run": runpy.run_path, "path": __file__, "name": name, "arguments": arguments}
    return machine.run(eval, "run(path)[name](*arguments)", scope)


SHAPES = [
    ([1], 1),
    ([7], 3),
    ([3, 1, 13], 5),
    ([64, 1], 64),  # a program's rows, and one more
    ([5, 0, 2], 257),  # a layer without rows
    ([3, 8], 512),
    ([2, 3], 1031),  # more columns than a program holds
    ([2049, 3, 4097], 2),  # more rows of a layer than it takes at a time
    ([0], 4),
    ([], 4),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("sizes", "r"), SHAPES)
def test_directions_and_moments_with_nan_around_everything(machine, variant, sizes, r):
    S, v = draw(sizes, r)
    D, S_memory = guarded(S, math.nan, machine.device)
    old, v_memory = guarded(v, math.nan, machine.device)
    new, norms = machine.run(row_adam.launch, D, old, sizes, 3, variant=variant)
    want, moment = by_hand(S, v, sizes, 3, variant=variant)
    torch.testing.assert_close(D.cpu().double(), want, rtol=RTOL, atol=0)
    torch.testing.assert_close(new.cpu().double(), moment, rtol=UNIT, atol=0)
    assert torch.equal(old.cpu(), v)  # the caller decides whether the new one counts
    assert untouched(S_memory, D)
    assert untouched(v_memory, old)
    sums = [math.sqrt(part.double().square().sum()) for part in S.split(sizes)] if sizes else []
    assert norms.tolist() == pytest.approx(sums, rel=1e-12)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("t", "beta2", "eps"), [(1, 0.95, 1e-8), (40, 0.5, 0.3), (2, 0.0, 1e-3)])
def test_settings_catch_a_late_bias_correction_a_misplaced_eps_or_scalars_in_float32(
    machine, variant, t, beta2, eps
):
    sizes = [6, 11]
    S, v = draw(sizes, 7, seed=t)
    D = S.clone().to(machine.device)
    named = {"beta2": beta2, "eps": eps, "variant": variant}
    new, _ = machine.run(row_adam.launch, D, v.to(machine.device), sizes, t, **named)
    want, moment = by_hand(S, v, sizes, t, **named)
    torch.testing.assert_close(D.cpu().double(), want, rtol=RTOL, atol=0)
    torch.testing.assert_close(new.cpu().double(), moment, rtol=UNIT, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("step", [(1, 2), (3, 1)])
def test_strides_that_are_taken_for_granted(machine, variant, step):
    sizes = [9, 14]
    S, v = draw(sizes, 10)
    for turned in (False, True):
        lay = S.T if turned else S
        view, memory = guarded(lay, math.nan, machine.device, step)
        D = view.T if turned else view
        old, _ = guarded(v, math.nan, machine.device, (2,))
        new, _ = machine.run(row_adam.launch, D, old, sizes, 5, variant=variant)
        want, moment = by_hand(S, v, sizes, 5, variant=variant)
        torch.testing.assert_close(D.cpu().double(), want, rtol=RTOL, atol=0)
        torch.testing.assert_close(new.cpu().double(), moment, rtol=UNIT, atol=0)
        assert untouched(memory, view)


def test_norm_preserving_keeps_each_layers_norm_not_only_the_whole(machine):
    sizes = [5, 40, 8]
    S, v = draw(sizes, 6)
    S[5:45] *= 1e3
    D = S.clone().to(machine.device)
    machine.run(row_adam.launch, D, v.to(machine.device), sizes, 2)
    for before, after in zip(S.split(sizes), D.cpu().split(sizes), strict=True):
        # an entry is rounded twice
        assert after.double().norm().item() == pytest.approx(
            before.double().norm().item(), rel=2 * UNIT
        )
        assert (after / before).std(1).max() < 1e-6 * (after / before).abs().max()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("seen", [0.0, 2.0])
def test_a_zero_sketch_has_a_zero_direction_and_a_fading_moment(machine, variant, seen):
    """One layer is zero, the other has a dead row: 0/0 or 1/tiny² would be nan."""
    sizes = [3, 4]
    S, _ = draw(sizes, 5)
    S[:3] = S[5] = 0
    v = torch.full((7,), seen)
    D = S.clone().to(machine.device)
    new, norms = machine.run(row_adam.launch, D, v.to(machine.device), sizes, 2, variant=variant)
    want, moment = by_hand(S, v, sizes, 2, variant=variant)
    assert torch.equal(D[:3].cpu(), torch.zeros(3, 5))
    torch.testing.assert_close(D.cpu().double(), want, rtol=RTOL, atol=0)
    torch.testing.assert_close(new.cpu().double(), moment, rtol=UNIT, atol=0)
    assert norms[0] == 0


@pytest.mark.parametrize("size", [1e-25, 1e-18, 1e17])
def test_extreme_sketches_catch_squares_in_float32(machine, size):
    """1e-25 squared is 0 in float32, and the norm with it; 1e17 has factors of 1e-17."""
    g = torch.Generator().manual_seed(0)
    S = size * torch.randn(6, 4, generator=g)
    for variant in VARIANTS:
        D = S.clone().to(machine.device)
        v = torch.zeros(6, device=machine.device)
        new, _ = machine.run(row_adam.launch, D, v, [6], 1, variant=variant)
        assert new.isfinite().all()
        if variant == "norm_preserving":
            assert D.double().norm().item() == pytest.approx(S.double().norm().item(), rel=RTOL)
        else:
            assert D.abs().max() <= 2 * (1 + RTOL)  # |S_ij| ≤ √r · RMS of its row


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("place", [(0, 0), (6, 4), (13, 2)])
def test_not_finite_leaves_everything_and_names_the_layer(machine, variant, bad, place):
    """3e38 is a number; its square, the moment, is none in float32."""
    layers = {"layers.0.q_proj": 6, "layers.0.k_proj": 1, "layers.1.q_proj": 7}
    S, v = draw(list(layers.values()), 5)
    S[place] = bad
    name = {0: "layers.0.q_proj", 6: "layers.0.k_proj", 13: "layers.1.q_proj"}[place[0]]
    D, old = S.clone().to(machine.device), v.to(machine.device)
    message, D, old = inside(machine, "refused", D, old, layers, variant)
    assert name in message
    assert "not finite" in message
    torch.testing.assert_close(D.cpu(), S, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(old.cpu(), v)


def refused(S, v, layers, variant):
    """What the library says of a bad sketch, by the kernel, and what it left."""
    import os

    os.environ["LOGRA_LAB_KERNELS"] = "triton"
    try:
        rowadam.row_adam_(S, v, layers, 2, variant=variant)
    except rowadam.NonFiniteSketch as error:
        return str(error), S, v
    finally:
        del os.environ["LOGRA_LAB_KERNELS"]
    raise AssertionError("the sketch was taken")


def routed(S, v, layers, forced):
    """The library's functions with the kernels it is told to take, and how often they ran."""
    import os

    launches = []
    launch = row_adam.launch
    row_adam.launch = lambda *x, **named: launches.append(1) or launch(*x, **named)
    os.environ["LOGRA_LAB_KERNELS"] = forced
    try:
        D = S.clone()
        new = rowadam.row_adam_(D, v, layers, 3, variant="norm_preserving")
        one, _ = rowadam.row_adam(S, v, 3, variant="plain")
        return D, new, one, len(launches)
    finally:
        del os.environ["LOGRA_LAB_KERNELS"]
        row_adam.launch = launch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_paths_of_the_library_give_the_same_and_float64_goes_by_torch(machine, dtype):
    layers = {"a": 4, "b": 9}
    S, v = (x.to(machine.device, dtype) for x in draw([4, 9], 6))
    *kernel, launches = inside(machine, "routed", S, v, layers, "triton")
    *torch_path, none = inside(machine, "routed", S, v, layers, "torch")
    assert (launches, none) == (0 if dtype == torch.float64 else 2, 0)
    for one, two in zip(kernel, torch_path, strict=True):
        assert one.dtype == dtype
        # torch sums r squares in float32 and rounds moment and factor some more times
        torch.testing.assert_close(one, two, rtol=16 * UNIT, atol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_torch_path_of_many_layers_is_that_of_each(variant):
    layers = {"a": 4, "b": 9, "c": 1}
    S, v = draw(list(layers.values()), 6)
    D = S.clone()
    new = rowadam.row_adam_(D, v, layers, 3, variant=variant)
    want, moment = by_hand(S, v, list(layers.values()), 3, variant=variant)
    torch.testing.assert_close(D.double(), want, rtol=16 * UNIT, atol=0)
    torch.testing.assert_close(new.double(), moment, rtol=16 * UNIT, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_torch_path_of_many_layers_changes_nothing_of_a_bad_sketch(bad):
    S, v = draw([4, 9], 6)
    S[7, 2] = bad
    kept, old = S.clone(), v.clone()
    with pytest.raises(rowadam.NonFiniteSketch, match="of b is not finite"):
        rowadam.row_adam_(S, v, {"a": 4, "b": 9}, 3)
    torch.testing.assert_close(S, kept, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(v, old)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_reference_is_the_definition(variant):
    S, v = draw([5, 0, 3], 4)
    S[5:] = 0
    D, new = row_adam.reference(S, v, [5, 0, 3], 4, variant=variant)
    want, moment = by_hand(S, v, [5, 0, 3], 4, variant=variant)
    torch.testing.assert_close(D, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(new, moment, rtol=1e-12, atol=0)


def compiled(S, v, layers, forced):
    """As part of one compiled graph that also reads S before and after."""
    import os

    def step(S, v):
        before = S.sum()
        new = rowadam.row_adam_(S, v, layers, 3)
        return before, S * 2, new

    names, sizes = list(layers), list(layers.values())
    os.environ["LOGRA_LAB_KERNELS"] = forced
    try:
        torch.library.opcheck(
            torch.ops.logra_lab.row_adam_.default,
            (S.clone(), v, names, sizes, 3, 0.95, 1e-8, "plain"),
            test_utils=("test_schema", "test_faketensor"),  # it changes S, and nothing else
        )
        with torch.no_grad():
            D = S.clone()
            graph = torch.compile(step, backend="aot_eager", fullgraph=True)
            results = D, *graph(D, v)
            bad = S.clone()
            bad[4, 1] = math.nan
            try:
                graph(bad, v)
            except rowadam.NonFiniteSketch as error:
                return *results, str(error), bad
    finally:
        del os.environ["LOGRA_LAB_KERNELS"]
    raise AssertionError("the compiled step took a sketch with nan")


@pytest.mark.parametrize("forced", ["triton", "torch"])
def test_compiled_in_one_graph_the_sketch_changes_and_a_bad_one_is_still_refused(machine, forced):
    layers = {"a": 3, "b": 4}
    S, v = draw([3, 4], 5)
    *got, message, bad = inside(
        machine, "compiled", S.to(machine.device), v.to(machine.device), layers, forced
    )
    D, before, doubled, new = (x.cpu().double() for x in got)
    want, moment = by_hand(S, v, [3, 4], 3)
    rtol = RTOL if forced == "triton" else 16 * UNIT
    torch.testing.assert_close(D, want, rtol=rtol, atol=0)
    torch.testing.assert_close(doubled, 2 * want, rtol=rtol, atol=0)
    torch.testing.assert_close(new, moment, rtol=16 * UNIT, atol=0)
    assert before.item() == pytest.approx(S.double().sum().item(), rel=1e-5)
    assert "of b is not finite" in message
    S[4, 1] = math.nan
    assert torch.equal(bad.cpu().nan_to_num(7), S.nan_to_num(7))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_catch_a_step_that_reads_their_values(device, variant):
    with FakeTensorMode():
        S, v = torch.empty(7, 5, device=device), torch.empty(7, device=device)
        new = rowadam.row_adam_(S, v, {"a": 3, "b": 4}, 1, variant=variant)
        assert (tuple(new.shape), new.dtype, new.device) == ((7,), torch.float32, S.device)
        with pytest.raises(InputError, match="8 rows, S has 7"):
            rowadam.row_adam_(S, v, {"a": 3, "b": 5}, 1)


def test_a_gradient_that_would_be_lost_is_refused():
    S = torch.zeros(2, 3, requires_grad=True)
    with pytest.raises(InputError, match="an update has none"):
        rowadam.row_adam_(S, torch.zeros(2), {"a": 2}, 1)


@pytest.mark.parametrize("which", ["S", "v"])
def test_a_tangent_that_would_stay_that_of_the_old_sketch_is_refused(which):
    S, v = torch.ones(2, 3), torch.ones(2)

    def step(x):
        moved = {"S": S, "v": v, which: x * 1}
        rowadam.row_adam_(moved["S"], moved["v"], {"a": 2}, 1)
        return moved["S"]

    x = {"S": S, "v": v}[which]
    with pytest.raises(InputError, match="an update has none"):
        torch.func.jvp(step, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(InputError, match="an update has none"):
        step(forward_ad.make_dual(x, torch.ones_like(x)))


WRONG = {
    r"a sketch \[d, r\]": {"S": torch.zeros(4)},
    "an S that is not expanded": {"S": torch.ones(1, 3).expand(4, 3)},
    "S and v in float32": {"S": torch.zeros(4, 3, dtype=torch.float64)},
    r"moments \[4\]": {"v": torch.zeros(5)},
    "4 rows": {"sizes": [1, 2]},
    "on one device": {"v": torch.zeros(4, device="meta")},
    "t ≥ 1": {"t": 0},
    "a variant of": {"variant": "adam"},
    "compiled Triton kernels need": {},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message):
    good = {"S": torch.ones(4, 3), "v": torch.zeros(4), "sizes": [4], "t": 1}
    with pytest.raises(InputError, match=message):
        row_adam.launch(**good | WRONG[message])
    assert (good["S"] == 1).all()


def test_an_expanded_sketch_is_refused_before_either_path_writes():
    with pytest.raises(InputError, match="entries of S share memory"):
        rowadam.row_adam_(torch.ones(1, 2).expand(4, 2), torch.zeros(4), {"a": 4})


def test_layers_that_do_not_cover_the_sketch_are_named():
    with pytest.raises(InputError, match="3 rows, S has 4"):
        rowadam.row_adam_(torch.ones(4, 2), torch.zeros(4), {"a": 3})


@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("name", ["_moments", "_factors", "_scale"])
def test_it_compiles(build, architecture, name):
    types = {"S": "*fp32", "v": "*fp32", "new_v": "*fp32", "squares": "*fp64", "ends": "*i64"}
    types |= {"factors": "*fp32", "norms": "*fp64", "faulty": "*i32"}
    kernel = getattr(row_adam, name)
    scalars = {p.name: p.annotation_type for p in kernel.params}
    scalars = {k: scalars[k] for k in ("beta2", "correction", "eps") if k in scalars}
    assert set(scalars.values()) <= {"fp64"}  # Python's floats would travel as float32
    types |= scalars
    fixed = {"ROWS": 16, "COLS": 256, "s_col": 1, "v_row": 1}
    if name == "_factors":
        fixed = {"PRESERVE": True}
    fixed = {k: v for k, v in fixed.items() if k in kernel.arg_names}
    ptx = build(kernel, architecture, types, fixed)
    wanted = {"_moments": "fma.rn.f64", "_factors": "sqrt.rn.f64", "_scale": "mul.f32"}
    assert wanted[name] in ptx.replace("mul.rn.f32", "mul.f32")
    assert ".ftz" not in ptx  # small numbers are not flushed to zero
