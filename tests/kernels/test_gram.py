"""A Aᵀ by the kernel is a matrix of exact integers over r; ‖D A‖² without A is its definition."""

import runpy
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from logra_lab.errors import InputError
from logra_lab.philox import key_of
from logra_lab.projection import Projection

gram = pytest.importorskip("logra_lab.kernels.gram", reason="needs the triton package")
HERE = Path(__file__).parent
independent = runpy.run_path(str(HERE / "independent.py"))
guards = runpy.run_path(str(HERE / "guards.py"))
guarded = guards["guarded"]
KEY = key_of("7:2:layers.0.q_proj")
SMALL = (32, 2)


def integers(k, r):
    """r·A Aᵀ in int64."""
    signs = torch.from_numpy(independent["signs"](KEY, slice(0, r), slice(0, k)))
    return signs @ signs.T


def projection(k, r):
    return Projection("layers.0.q_proj", k, r, seed=7, draw=2)


def factor(d, r, seed=0):
    return torch.randn(d, r, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("k", "r"),
    [
        *((1, 1), (5, 3), (64, 32), (65, 33), (131, 127)),
        *((197, 128), (67, 129), (33, 300), (37, 511), (40, 512)),
    ],
)
def test_integers_over_r_and_nothing_beside_them_is_written(machine, k, r):
    memory = torch.full((r * r + 64,), 55, dtype=torch.int32, device=machine.device)
    sums = memory[32:-32].view(r, r).fill_(7)
    machine.run(gram.add, sums, KEY, k, SMALL)
    assert torch.equal(sums.cpu() - 7, integers(k, r).int())
    assert (memory[:32] == 55).all()
    assert (memory[-32:] == 55).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_bits_are_those_of_the_torch_path(machine, dtype):
    k, r = 71, 37
    got = machine.run(gram.launch, KEY, k, r, dtype, machine.device, blocks=SMALL)
    want = integers(k, r).to(dtype) * torch.tensor(1 / r, dtype=torch.float64)
    assert torch.equal(got.cpu(), want.to(dtype))
    if dtype in (torch.float32, torch.float64):  # sums in the others need not be exact
        assert torch.equal(got.cpu(), projection(k, r).gram(dtype))
    if dtype == torch.float64:
        torch.testing.assert_close(got.cpu(), gram.reference(KEY, k, r), rtol=1e-15, atol=0)


@pytest.mark.parametrize("blocks", [(32, 1), (64, 4), (128, 1)])
def test_cuts_of_the_columns_change_no_bit(machine, blocks):
    got = machine.run(gram.launch, KEY, 101, 40, torch.float32, machine.device, blocks=blocks)
    assert torch.equal(got.cpu(), projection(101, 40).gram())


def bound(D, G):
    """Σ|D_i|·|G_ij|·|D_j| rounds in r + 3 places a product of three: sums over i, then over j.

    Two nested sums of at most r terms, two products, the rounding of G itself and, per row, none
    in float64: (2r + 3)·u·Σ|terms| (Higham 2002, section 3.1).
    """
    D, G = D.double().abs(), G.double().abs()
    return (2 * len(G) + 3) * guards["ADDITION"] * torch.sum(D @ G * D)


@pytest.mark.parametrize(
    ("d", "k", "r", "step"),
    [
        (1, 1, 1, 1),
        (7, 5, 3, 2),
        (17, 70, 33, "swapped"),
        (3, 40, 127, 1),
        (41, 19, 129, 2),
        (2, 9, 300, "swapped"),
        (5, 7, 511, 1),
        (3, 11, 512, 2),
    ],
)
def test_the_norm_is_that_of_d_times_a_and_guards_are_not_read(machine, d, k, r, step):
    D, G = factor(d, r), integers(k, r).float() / r
    (x, _), (g, _) = (guarded(m, torch.nan, step, machine.device) for m in (D, G))
    got = machine.run(gram.launch_norm, x, g, blocks=(16, 32))
    assert got.dtype == torch.float64
    want = gram.reference_norm(D, KEY, k)  # from A and D A themselves
    signs = torch.from_numpy(independent["signs"](KEY, slice(0, r), slice(0, k))).double()
    assert want == pytest.approx((D.double() @ signs).square().sum().item() / r, rel=1e-12)
    assert abs(got.item() - want) <= bound(D, G)


def test_a_wide_range_of_rows_catches_a_sum_in_float32(machine):
    """One row of 4096 and 64 rows of 1, each less than half a unit of 2²⁴ when added in float32."""
    D = torch.ones(65, 1)
    D[0] = 4096 * 4
    x, one = D.to(machine.device), torch.ones(1, 1, device=machine.device)
    assert machine.run(gram.launch_norm, x, one, blocks=(16, 32)).item() == 2**28 + 64


@pytest.mark.parametrize("r", [1, 4])
def test_a_factor_without_rows_has_no_norm(machine, r):
    got = machine.run(
        gram.launch_norm,
        torch.ones(0, r, device=machine.device),
        torch.eye(r, device=machine.device),
    )
    assert got.item() == 0


# --- autograd, forward mode, fake tensors, torch.compile ---


@pytest.fixture
def unchecked(monkeypatch):
    """Without the tests' checks of shapes: they come first, and torch.compile cannot trace them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def by_kernel(interpreted):
    yield from guards["forcing"](interpreted, "gram", "launch_norm")


@pytest.mark.parametrize("path", ["torch", "kernel"])
def test_tangents_catch_an_operator_that_drops_them(path, request):
    """Central differences of a quadratic form are exact but for rounding."""
    k, r = 40, 9
    D, D_dot = (factor(6, r, seed) for seed in (0, 1))
    p, A = projection(k, r), projection(k, r).matrix(torch.float64)

    def f(h):
        return ((D.double() + h * D_dot.double()) @ A).square().sum()

    want = f(0.5) - f(-0.5)
    if path == "torch":
        D, D_dot, run = D.double(), D_dot.double(), lambda g, *a: g(*a)
    else:
        run, calls = (request.getfixturevalue(name) for name in ("interpreted", "by_kernel"))
    value, got = run(torch.func.jvp, p.squared_norm, (D,), (D_dot,))
    assert abs(want) > 1
    torch.testing.assert_close(value, f(0), rtol=1e-12 if path == "torch" else 1e-6, atol=0)
    torch.testing.assert_close(got, want, rtol=1e-12 if path == "torch" else 1e-5, atol=0)
    assert path == "torch" or calls() == 1


def test_gradient_by_central_differences():
    D = factor(3, 5).double().requires_grad_()
    norm = projection(12, 5).squared_norm
    assert torch.autograd.gradcheck(norm, D, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(norm, D, check_fwd_over_rev=True)


def test_vmap_and_jacobians_by_it_catch_norms_of_all_factors_together():
    p, A = projection(40, 9), projection(40, 9).matrix(torch.float64)
    D = torch.stack([factor(6, 9, seed) for seed in range(3)]).double()
    norms = (D @ A).square().sum((1, 2))
    torch.testing.assert_close(torch.vmap(p.squared_norm)(D), norms)
    torch.testing.assert_close(torch.vmap(p.squared_norm, in_dims=1)(D.transpose(0, 1)), norms)
    want = 2 * D[0] @ A @ A.T
    for jacobian in (torch.func.jacfwd, torch.func.jacrev, torch.func.grad):
        torch.testing.assert_close(jacobian(p.squared_norm)(D[0]), want)


@pytest.mark.parametrize("shape", [(9,), (6, 1), (6, 8), (2, 6, 9)])
def test_a_projection_names_factors_that_torch_would_broadcast(unchecked, shape):
    with pytest.raises(InputError, match=r"'layers\.0\.q_proj': expected D \[d, 9\]"):
        projection(40, 9).squared_norm(torch.ones(shape))


def test_a_projection_names_factors_that_are_no_floats(unchecked):
    with pytest.raises(InputError, match="expected D in one of"):
        projection(40, 9).squared_norm(torch.ones(6, 9, dtype=torch.int64))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_get_shapes_and_leave_no_fake_signs_behind(device):
    p = projection(40, 9)
    with FakeTensorMode():
        G = p.gram(torch.bfloat16, device)
        assert (G.shape, G.dtype, G.device.type) == ((9, 9), torch.bfloat16, device)
        norm = p.squared_norm(torch.empty(6, 9, device=device))
        assert (norm.shape, norm.dtype, norm.device.type) == ((), torch.float64, device)
    assert torch.equal(p.gram(), integers(40, 9).float() * torch.tensor(1 / 9))


def test_operators_keep_the_rules_of_torch():
    p, check = projection(40, 9), torch.library.opcheck
    check(torch.ops.logra_lab.gram.default, (torch.float32, torch.device("cpu"), *p._fields))
    check(torch.ops.logra_lab.squared_norm.default, (factor(6, 9), p.gram()))


def test_compiled_in_one_graph_and_tangents_are_the_eager_ones(unchecked):
    p, (D, D_dot) = projection(40, 9), (factor(6, 9, seed).double() for seed in (0, 1))
    eager = torch.func.jvp(p.squared_norm, (D,), (D_dot,))
    with torch.no_grad():
        whole = torch.compile(p.squared_norm, fullgraph=True, backend="aot_eager")
        assert torch.equal(whole(D), eager[0])
    compiled = torch.compile(p.squared_norm, backend="aot_eager")
    leaf = D.clone().requires_grad_()
    compiled(leaf).backward()
    torch.testing.assert_close(leaf.grad, 2 * D @ p.gram(torch.float64))
    for grad in (True, False):
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            out = compiled(forward_ad.make_dual(D, D_dot))
            torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, eager[1])


# --- what does not fit ---


@pytest.mark.parametrize(("k", "r"), [(4, 0), (-1, 2), (2**31, 2)])
def test_sizes_without_signs_are_refused(k, r):
    with pytest.raises(InputError, match=r"expected 1 ≤ rank < 2\*\*31 and 0 ≤ k"):
        gram.launch(KEY, k, r, device="cpu")


@pytest.mark.parametrize(
    ("D", "G"),
    [
        (torch.ones(4), torch.ones(4, 4)),
        (torch.ones(2, 4), torch.ones(4, 3)),
        (torch.ones(2, 4).double(), torch.ones(4, 4).double()),
        (torch.ones(2, 4), torch.ones(4, 4, device="meta")),
    ],
)
def test_factors_that_do_not_fit_are_named(D, G):
    with pytest.raises(InputError, match=r"expected D \[d, r\] and gram \[r, r\] in float32"):
        gram.launch_norm(D, G)


def test_tensors_without_a_gpu_are_refused_with_the_way_out():
    for call in (
        lambda: gram.launch(KEY, 4, 2, device="cpu"),
        lambda: gram.launch_norm(torch.ones(2, 4), torch.ones(4, 4)),
    ):
        with pytest.raises(InputError, match=r"got tensors on 'cpu'.*use the torch path"):
            call()


@pytest.mark.parametrize("architecture", [80, 90])
def test_it_compiles_to_integer_tensor_core_products(build, architecture):
    fixed = dict(zip(("COLUMNS", "TIMES"), gram.BLOCKS, strict=True))
    ptx = build(gram._gram, architecture, {"out": "*i32", "key": "u64"}, fixed)
    assert ".s32.s8.s8" in ptx
    assert {80: "mma.sync", 90: "wgmma.mma_async"}[architecture] in ptx


def test_the_norm_compiles_and_is_not_rounded_to_tf32(build):
    fixed = {"d_column": 1, "g_column": 1} | dict(
        zip(("ROWS", "SIDE"), gram.NORM_BLOCKS, strict=True)
    )
    ptx = build(gram._norm, 90, {"out": "*fp64", "d": "*fp32", "gram": "*fp32"}, fixed)
    assert "fma.rn.f32" in ptx
    assert "add.f64" in ptx or "cvt.f64.f32" in ptx
    assert "tf32" not in ptx


@pytest.mark.gpu
def test_a_real_shape():
    p, D = Projection("m", 3584, 256), factor(3584, 256)
    want = ((D.double() @ p.matrix(torch.float64)) ** 2).sum()
    G = p.gram(device="cuda")
    assert torch.equal(G.cpu(), p.gram())
    assert abs(p.squared_norm(D.cuda()).cpu() - want) <= bound(D, G.cpu())
