"""P = X Aᵀ of the kernel and of torch: the definition's numbers, within what float32 sums allow."""

import math
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

project = pytest.importorskip("logra_lab.kernels.project", reason="needs the triton package")
HERE = Path(__file__).parent
independent = runpy.run_path(str(HERE / "independent.py"))
guards = runpy.run_path(str(HERE / "guards.py"))
guarded, untouched, rounded = (guards[name] for name in ("guarded", "untouched", "rounded"))
KEY = key_of("7:2:layers.0.q_proj")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = (16, 32)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def unit(k, r):
    """√r·A [r, k] in float64."""
    return torch.from_numpy(independent["signs"](KEY, slice(0, r), slice(0, k))).double()


def defined(x, r, tokens=None):
    """P in float64, and a bound on the error of the kernel before its last rounding.

    Products with ±1 are exact, and so are the three pieces of a float32 number, which have its
    sign. A sum of m terms in any order is off by at most (m − 1)·u·Σ|terms| (Higham 2002, section
    4.2), to first order; two factors round once each, and 1/√r itself is rounded.
    """
    terms = (3 if x.dtype == torch.float32 else 1) * x.shape[-1] + 3
    x, A = x.double(), unit(x.shape[-1], r)
    factor = torch.ones(x.shape[:-1]) if tokens is None else tokens
    factor = factor.double()[..., None] / math.sqrt(r)
    bound = terms * guards["ADDITION"] * x.abs().sum(-1, keepdim=True) * factor.abs()
    return x @ A.T * factor, bound


def close(got, x, r, tokens=None):
    want, bound = defined(x, r, tokens)
    assert got.shape == want.shape
    assert got.dtype == x.dtype
    assert ((got.cpu().double() - want).abs() <= rounded(bound, want, x.dtype)).all()


SHAPES = [
    (1, 1, 1),
    (7, 5, 3),
    (17, 31, 32),  # one row past a block
    (16, 33, 33),  # one column past a block, one sign past a word
    (3, 97, 127),
    (5, 41, 128),  # one Philox call
    (11, 13, 129),
    (2, 67, 300),
    (19, 3, 512),
    (0, 8, 4),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "r"), SHAPES)
def test_numbers_are_the_definitions_and_nothing_beside_the_tensors_is_read_or_written(
    machine, n, k, r, dtype
):
    x = torch.randn(n, k, generator=generator()).to(dtype)
    tokens = torch.randn(n, generator=generator(1))
    X, _ = guarded(x, torch.nan, device=machine.device)
    T, _ = guarded(tokens, torch.nan, device=machine.device)
    close(machine.run(project.launch, X, KEY, r, T, blocks=SMALL), x, r, tokens)
    if n:
        memory = torch.full((n * r + 64,), 55, dtype=dtype, device=machine.device)
        out = memory[32:-32].view(n, r)
        machine.run(project.fill, out, X, KEY, T, SMALL)
        close(out, x, r, tokens)
        assert untouched(memory, out, 55)
        close(project.reference(x, KEY, r, tokens).to(dtype), x, r, tokens)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("r", [3, 64, 130])
def test_integers_give_the_bits_of_exact_sums_on_both_paths(machine, r, dtype):
    """Sums below 2²⁴ are exact in float32; then one product with 1/√r, and one cast."""
    n, k = 9, 151
    x = torch.randint(-2, 3, (n, k), generator=generator(r))
    sums = x.double() @ unit(k, r).T
    want = (sums.float() * torch.tensor(1 / math.sqrt(r))).to(dtype)
    got = machine.run(project.launch, x.to(machine.device, dtype), KEY, r, blocks=SMALL)
    assert torch.equal(got.cpu(), want)
    here = Projection("layers.0.q_proj", k, r, seed=7, draw=2).project(x.to(dtype))
    assert torch.equal(here, want)


def test_all_24_bits_of_float32_reach_the_sum(machine):
    """One column: P = ±x exactly, so a lost bit of one of the three pieces shows."""
    words = torch.randint(0, 1 << 23, (64, 1), generator=generator(), dtype=torch.int32)
    exponents = torch.arange(30, 222, 3, dtype=torch.int32)[:, None]  # clear of both ends
    x = (words | exponents << 23).view(torch.float32)
    got = machine.run(project.launch, x.to(machine.device), KEY, 1, blocks=SMALL)
    assert torch.equal(got.cpu(), x * unit(1, 1).float())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3.4e38])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_entry_gives_infinities_in_its_row_alone_as_torch_has_it(machine, dtype, bad):
    """inf − inf, the rest after the leading bits, would be nan; a nan must not become a number."""
    x = torch.randn(4, 37, generator=generator())
    x[2, 11] = bad if dtype != torch.float16 or math.isnan(bad) else math.copysign(math.inf, bad)
    x = x.to(dtype)
    got = machine.run(project.launch, x.to(machine.device), KEY, 35, blocks=SMALL).cpu()
    want = x.double() @ unit(37, 35).T / math.sqrt(35)
    here = Projection("layers.0.q_proj", 37, 35, seed=7, draw=2).project(x)
    for P in (got, here):
        assert torch.equal(P[2].isnan(), want[2].isnan())
        signs = P[2].double().nan_to_num(0).sign()
        assert torch.equal(signs, want[2].nan_to_num(0).sign())
        assert P[2].isfinite().all() == math.isfinite(x[2, 11].item())
    rest = [0, 1, 3]
    close(got[rest], x[rest], 35)


def test_bfloat16_is_rounded_once_at_the_end_on_both_paths(machine):
    """1 + 300·2⁻⁹: a sum kept in bfloat16 stays at 1, where every step is less than a tie."""
    k = 301
    signs = unit(k, 1)[0]
    x = torch.full((1, k), 2**-9) * signs
    x[0, 0] = signs[0]
    want = torch.tensor([[1 + 300 * 2**-9]]).bfloat16()
    got = machine.run(project.launch, x.to(machine.device, torch.bfloat16), KEY, 1, blocks=SMALL)
    assert torch.equal(got.cpu(), want)
    here = Projection("layers.0.q_proj", k, 1, seed=7, draw=2)
    assert torch.equal(here.project(x.bfloat16()), want)


LAYOUTS = {
    "transposed": lambda x: guarded(x, torch.nan, "swapped")[0],
    "every second column": lambda x: guarded(x, torch.nan, 2)[0],
    "batch and length swapped": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every third token": lambda x: guarded(x.repeat_interleave(3, 1), torch.nan)[0][:, ::3],
    "one token for all": lambda x: x[:, :1].expand_as(x),
    "backwards copied": lambda x: x.flip(-1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_tokens_catch_strides_taken_for_granted(machine, layout):
    x = LAYOUTS[layout](torch.randn(3, 7, 37, generator=generator()))
    tokens = torch.randn(7, 3, generator=generator(1)).T
    X = x if machine.device == "cpu" else x.to(machine.device)
    got = machine.run(project.launch, X, KEY, 35, tokens.to(machine.device), blocks=SMALL)
    close(got, x, 35, tokens)


@pytest.mark.parametrize("shape", [(23,), (4, 23), (2, 3, 23), (2, 1, 3, 23), (2, 3, 2, 1, 23)])
def test_any_leading_shape(machine, shape):
    x = torch.randn(*shape, generator=generator())
    x = x.permute(*reversed(range(x.dim() - 1)), x.dim() - 1)  # no shape that merges by itself
    close(machine.run(project.launch, x.to(machine.device), KEY, 9, blocks=SMALL), x, 9)
    here = Projection("layers.0.q_proj", 23, 9, seed=7, draw=2)
    close(here.project(x), x, 9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_path_catches_row_chunks_and_blocks_that_do_not_meet(monkeypatch, dtype):
    monkeypatch.setattr("logra_lab.projection._BLOCK_NUMBERS", 64 * 40)
    monkeypatch.setattr("logra_lab.projection._WIDE_NUMBERS", 64 * 5)
    x = torch.randn(2, 9, 150, generator=generator()).to(dtype)
    tokens = torch.randn(2, 9, generator=generator(1))
    close(Projection("layers.0.q_proj", 150, 40, seed=7, draw=2).project(x, tokens), x, 40, tokens)


# --- autograd, forward mode, fake tensors, torch.compile ---


@pytest.fixture
def unchecked(monkeypatch):
    """Without the tests' checks of shapes: they come first, and torch.compile cannot trace them."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def by_kernel(interpreted):
    yield from guards["forcing"](interpreted, "project", "launch")


def inputs(dtype):
    draws = [torch.randn(3, 4, 40, generator=generator(i)).to(dtype) for i in range(2)]
    return draws, [torch.randn(3, 4, generator=generator(i)).to(dtype) for i in (2, 3)]


@pytest.mark.parametrize("path", ["torch", "kernel"])
def test_tangents_catch_an_operator_that_drops_them(path, request):
    """Along a bilinear function central differences are exact but for rounding."""
    dtype = torch.float64 if path == "torch" else torch.float32
    (x, x_dot), (s, s_dot) = inputs(dtype)
    run = (lambda f, *a: f(*a)) if path == "torch" else request.getfixturevalue("interpreted")
    calls = None if path == "torch" else request.getfixturevalue("by_kernel")
    p = Projection("m", 40, 9)

    def f(h):
        A = p.matrix(torch.float64)
        moved = [a.double() + h * b.double() for a, b in ((x, x_dot), (s, s_dot))]
        return moved[0] @ A.T * moved[1][..., None]

    want = (f(0.5) - f(-0.5)) / 1.0
    _, got = run(torch.func.jvp, p.project, (x, s), (x_dot, s_dot))
    assert calls is None or calls() == 3  # P, and the tangent of each argument
    assert want.abs().min() > 1e-3
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-12 if path == "torch" else 1e-5)


def test_gradients_of_every_order_by_central_differences():
    (x, _), (s, _) = inputs(torch.float64)
    p = Projection("m", 40, 9)
    both = (x[:1, :2].clone().requires_grad_(), s[:1, :2].clone().requires_grad_())
    assert torch.autograd.gradcheck(p.project, both, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(p.project, both, check_fwd_over_rev=True)


def test_gradients_reach_a_leaf_through_the_kernel(interpreted, by_kernel):
    """The gradient of Σ P² is 2 P A."""
    (x, _), (s, _) = inputs(torch.float32)
    p = Projection("m", 40, 9)
    got = interpreted(torch.autograd.functional.jacobian, p.project, (x[0], s[0]))
    A = p.matrix()
    for t in range(4):
        torch.testing.assert_close(got[0][t, :, t], A * s[0, t], rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(got[1][t, :, t], A @ x[0, t], rtol=1e-5, atol=1e-6)
    assert by_kernel() >= 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_tensors_get_shapes_and_leave_no_fake_signs_behind(device, dtype):
    p = Projection("m", 40, 9)
    with FakeTensorMode():
        x = torch.empty(2, 5, 40, device=device, dtype=dtype)
        P = p.project(x, torch.empty(2, 5, device=device, dtype=dtype))
        assert (P.shape, P.dtype, P.device) == ((2, 5, 9), dtype, x.device)
        if device == "cpu":  # torch without CUDA has no backward for it, fake or not
            x.requires_grad_()
            p.project(x).sum().backward()
            assert x.grad.shape == x.shape
    (x, _), _ = inputs(torch.float64)
    torch.testing.assert_close(p.project(x), x @ p.matrix(torch.float64).T)


def test_operator_keeps_the_rules_of_torch():
    (x, _), (s, _) = inputs(torch.float32)
    fields = Projection("m", 40, 9)._fields
    for tensor, back in ((x, False), (torch.ones(3, 4, 9), True)):
        torch.library.opcheck(torch.ops.logra_lab.project.default, (tensor, s, back, *fields))


def test_compiled_in_one_graph_and_its_gradients_and_tangents_are_the_eager_ones(unchecked):
    (x, x_dot), (s, s_dot) = inputs(torch.float64)
    p = Projection("m", 40, 9)

    def f(x, s):
        return p.project(x, s).sin()

    eager = torch.func.jvp(f, (x, s), (x_dot, s_dot))
    with torch.no_grad():
        whole = torch.compile(f, fullgraph=True, backend="aot_eager")
        assert torch.equal(whole(x, s), eager[0])
    compiled = torch.compile(f, backend="aot_eager")
    leaves = [[t.clone().requires_grad_() for t in (x, s)] for _ in range(2)]
    for function, (a, b) in zip((f, compiled), leaves, strict=True):
        function(a, b).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*leaves, strict=True))

    inside = torch.compile(lambda *a: torch.func.jvp(f, a[:2], a[2:]), backend="aot_eager")
    torch.testing.assert_close(inside(x, s, x_dot, s_dot), eager)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            out = compiled(forward_ad.make_dual(x, x_dot), forward_ad.make_dual(s, s_dot))
            torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, eager[1])


def test_the_choice_is_the_backends(monkeypatch):
    monkeypatch.setenv("LOGRA_LAB_KERNELS", "triton")
    with pytest.raises(InputError, match="cannot run on 'cpu'"):
        Projection("m", 8, 2).project(torch.ones(1, 8))
    for other in (Projection("m", 8, 2, kind="gaussian"), Projection("m", 8, 2)):
        x = torch.ones(1, 8, dtype=torch.float64 if other.kind == "sign" else torch.float32)
        forced = other.project(x)
        monkeypatch.delenv("LOGRA_LAB_KERNELS")
        torch.testing.assert_close(forced, x @ other.matrix(x.dtype).T)
        monkeypatch.setenv("LOGRA_LAB_KERNELS", "triton")


# --- what does not fit ---

WRONG = {
    "X in one of": {"x": torch.zeros(2, 4, dtype=torch.float64)},
    r"X \[\*batch, k\]": {"x": torch.zeros(())},
    r"a rank in 1\.\.": {"rank": 0},
    r"token factors \[2\]": {"tokens": torch.ones(3)},
    "token factors in one of": {"tokens": torch.ones(2, dtype=torch.int32)},
    "token factors on cpu": {"tokens": torch.ones(2, device="meta")},
    r"got tensors on 'cpu'.*use the torch path": {},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message):
    good = {"x": torch.zeros(2, 4), "key": KEY, "rank": 3}
    with pytest.raises(InputError, match=message):
        project.launch(**good | WRONG[message])


@pytest.mark.parametrize(("x", "tokens"), [((2, 7), None), ((2, 8), (3,)), ((2, 8), (2, 1))])
def test_a_projection_names_shapes_that_do_not_fit(unchecked, x, tokens):
    with pytest.raises(InputError, match=r"'m'.*\[\*batch, 8\]"):
        Projection("m", 8, 2).project(torch.ones(x), tokens and torch.ones(tokens))


@pytest.mark.parametrize(
    ("x", "tokens", "message"),
    [
        (torch.int32, None, "X in one of"),
        (torch.bool, None, "X in one of"),
        (torch.complex64, None, "X in one of"),
        (torch.float32, torch.bool, "token factors in one of"),
        (torch.float32, torch.int64, "token factors in one of"),
        (torch.bfloat16, torch.float64, "token factors in one of"),
    ],
)
@pytest.mark.parametrize("kind", ["sign", "gaussian"])
def test_a_projection_names_types_that_one_path_would_take(unchecked, kind, x, tokens, message):
    tokens = tokens and torch.ones(2, dtype=tokens)
    with pytest.raises(InputError, match=f"'m': expected {message}"):
        Projection("m", 8, 2, kind=kind).project(torch.ones(2, 8, dtype=x), tokens)


def test_a_projection_names_devices_that_differ_and_takes_factors_of_its_own_type(unchecked):
    p = Projection("m", 8, 2)
    with pytest.raises(InputError, match="token factors are on meta, X on cpu"):
        p.project(torch.ones(2, 8), torch.ones(2, device="meta"))
    x, tokens = torch.ones(2, 8).double(), torch.tensor([2.0, 3.0]).double()
    torch.testing.assert_close(p.project(x, tokens), x @ p.matrix(x.dtype).T * tokens[:, None])


def test_vmap_and_jacobians_by_it_are_those_of_the_product():
    (x, _), (s, _) = inputs(torch.float64)
    p = Projection("m", 40, 9)
    A = p.matrix(torch.float64)
    want = x @ A.T * s[..., None]
    torch.testing.assert_close(torch.vmap(p.project)(x, s), want)
    both = torch.vmap(p.project, in_dims=(1, 1))(x, s)
    torch.testing.assert_close(both, want.transpose(0, 1))
    one = torch.vmap(p.project, in_dims=(0, None))(x, s[0])
    torch.testing.assert_close(one, x @ A.T * s[0][:, None])
    one = torch.vmap(p.project, in_dims=(None, 0))(x[0], s)
    torch.testing.assert_close(one, x[0] @ A.T * s[..., None])
    forward = torch.func.jacfwd(p.project)(x[0, 0])
    torch.testing.assert_close(forward, A)
    torch.testing.assert_close(torch.func.jacrev(p.project)(x[0, 0]), A)


@pytest.mark.parametrize(
    ("architecture", "dtype", "product"),
    [
        (80, "bf16", "f32.bf16.bf16.f32"),
        (90, "fp16", "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16"),
        (90, "fp32", "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"),
    ],
)
def test_it_compiles_to_16_bit_tensor_core_products(build, architecture, dtype, product):
    types = {"out": f"*{dtype}", "x": f"*{dtype}", "tokens": "*fp32", "key": "u64"}
    ROWS, COLUMNS = project.BLOCKS[4 if dtype == "fp32" else 2]
    fixed = {"x_column": 1, "WIDE": False, "ROWS": ROWS, "COLUMNS": COLUMNS}
    ptx = build(project._project, architecture, types | {"scale": "fp32"}, fixed)
    assert product in ptx
    assert "tf32" not in ptx
    assert ".ftz" not in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_real_shape_with_the_default_blocks(dtype):
    x = torch.randn(1111, 2051, generator=generator()).to(dtype)
    tokens = torch.rand(1111, generator=generator(1))
    close(project.launch(x.cuda(), KEY, 256, tokens.cuda()), x, 256, tokens)
