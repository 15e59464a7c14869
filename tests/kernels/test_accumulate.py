"""S += Hᵀ P by the kernel: the definition's numbers, within what float32 sums allow."""

import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jaxtyping
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from logra_lab.errors import InputError
from logra_lab.sketch import Sketch, _Accumulate
from logra_lab.sketch import accumulate as by_torch_or_kernel

accumulate = pytest.importorskip("logra_lab.kernels.accumulate", reason="needs the triton package")
guards = runpy.run_path(str(Path(__file__).parent / "guards.py"))
guarded, untouched = guards["guarded"], guards["untouched"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = (16, 32, 16)


def draw(n, d, r, *dtypes, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = zip((d, n, n), (r, d, r), strict=True)
    S, H, P = (torch.randn(*shape, generator=g) for shape in shapes)
    H_type, P_type = (dtypes * 2)[:2] if dtypes else (torch.float32, torch.float32)
    return S, H.to(H_type), P.to(P_type)


def defined(S, H, P):
    """The new S in float64, and a bound on the kernel's error.

    Each product rounds once (not at all in 16 bits), and a sum of m terms in any order is off by at
    most (m − 1)·u·Σ|terms| (Higham 2002, section 4.2), to first order: n + 1 terms here.
    """
    S, H, P = S.double(), H.double().flatten(0, -2), P.double().flatten(0, -2)
    bound = (len(H) + 1) * guards["ADDITION"] * (S.abs() + H.abs().T @ P.abs())
    return S + H.T @ P, bound


def close(got, S, H, P):
    want, bound = defined(S, H, P)
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert ((got.cpu().double() - want).abs() <= bound).all()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "d", "r"),
    [
        (1, 1, 1),
        (7, 5, 3),
        (17, 16, 32),  # one token past a block
        (16, 17, 33),  # one row and one column of S past a block
        (53, 19, 127),
        (5, 41, 300),
        (3, 2, 512),
        (0, 8, 4),
    ],
)
def test_numbers_are_the_definitions_and_nothing_beside_the_tensors_is_read_or_written(
    machine, n, d, r, dtype, parts
):
    S, H, P = draw(n, d, r, dtype)
    out, memory = guarded(S, 55, device=machine.device)
    (h, _), (p, _) = (guarded(x, torch.nan, device=machine.device) for x in (H, P))
    machine.run(accumulate.launch, out, h, p, parts=parts, blocks=SMALL)
    close(out, S, H, P)
    assert untouched(memory, out, 55)
    close(accumulate.reference(S, H, P).float(), S, H, P)


@pytest.mark.parametrize("types", [(DTYPES[0], DTYPES[1]), (DTYPES[2], DTYPES[1])])
def test_mixed_types_are_multiplied_in_float32(machine, types):
    S, H, P = draw(37, 11, 13, *types)
    out = S.clone().to(machine.device)
    machine.run(accumulate.launch, out, H.to(machine.device), P.to(machine.device), blocks=SMALL)
    close(out, S, H, P)


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_integers_are_summed_exactly_and_added_to_what_is_there(machine, dtype, parts):
    g = torch.Generator().manual_seed(parts)
    H, P = (torch.randint(-2, 3, (2, 67, m), generator=g).to(dtype) for m in (21, 35))
    S = torch.randint(-99, 99, (21, 35), generator=g).float()
    want = S.double() + torch.einsum("btd,btr->dr", H.double(), P.double())
    out = S.clone().to(machine.device)
    h, p = H.to(machine.device), P.to(machine.device)
    machine.run(accumulate.launch, out, h, p, parts=parts, blocks=SMALL)
    assert torch.equal(out.cpu().double(), want)


def test_shards_of_rows_are_the_rows_of_the_whole(machine):
    S, H, P = draw(29, 23, 19)
    whole, shards = S.clone().to(machine.device), S.clone().to(machine.device)
    h, p = H.to(machine.device), P.to(machine.device)
    machine.run(accumulate.launch, whole, h, p, blocks=SMALL)
    for start, stop in ((0, 1), (1, 18), (18, 18), (18, 23)):
        machine.run(accumulate.launch, shards[start:stop], h, p, start, blocks=SMALL)
    assert torch.equal(shards, whole)
    close(whole, S, H, P)


LAYOUTS = ["swapped", 2, 1]  # how the last two dimensions lie, see `guarded`


@pytest.mark.parametrize("turn", range(3))
def test_strides_taken_for_granted_or_for_each_others(machine, turn):
    S, H, P = draw(21, 13, 11)
    out, memory = guarded(S, 55, LAYOUTS[turn], machine.device)
    h, _ = guarded(H.view(3, 7, -1), torch.nan, LAYOUTS[turn - 1], machine.device)
    p, _ = guarded(P.view(3, 7, -1), torch.nan, LAYOUTS[turn - 2], machine.device)
    machine.run(accumulate.launch, out, h, p, blocks=SMALL)
    close(out, S, H, P)
    assert untouched(memory, out, 55)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 5), (3, 1, 2, 2)])
def test_leading_dimensions_merge_differently_in_h_and_p(machine, shape):
    g = torch.Generator().manual_seed(0)
    H, P = (torch.randn(*shape, m, generator=g) for m in (7, 5))
    if len(shape) > 1:
        H = H.transpose(0, 1).contiguous().transpose(0, 1)
    S = torch.zeros(7, 5)
    out = S.clone().to(machine.device)
    machine.run(accumulate.launch, out, H.to(machine.device), P.to(machine.device), blocks=SMALL)
    close(out, S, H[None], P[None])


# --- autograd, forward mode, fake tensors, torch.compile ---


@pytest.fixture
def by_kernel(interpreted):
    yield from guards["forcing"](interpreted, "accumulate", "launch")


def tangents(*which):
    S, H, P = draw(10, 6, 3)
    S = S[:4]
    dots = draw(10, 6, 3, seed=1)
    dots = tuple(
        x[: len(y)] if i in which else torch.zeros_like(y)
        for i, (x, y) in enumerate(zip(dots, (S, H, P), strict=True))
    )
    return (S, H, P), dots


def central(values, dots):
    """(f(½) − f(−½))/1 in float64: exact but for rounding, since f is bilinear."""

    def f(h):
        S, H, P = (x.double() + h * y.double() for x, y in zip(values, dots, strict=True))
        return S + H[:, 1:5].T @ P

    return f(0.5) - f(-0.5)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
def test_tangents_catch_an_operator_that_drops_them(interpreted, by_kernel, which):
    values, dots = tangents(*which)
    want = central(values, dots)
    function = partial(accumulate.accumulate, start=1)
    before = tuple(x.clone() for x in values + dots)
    new, got = interpreted(torch.func.jvp, function, before[:3], before[3:])
    assert want.abs().min() > 1e-3
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-5)
    close(new, values[0], values[1][:, 1:5], values[2])
    assert by_kernel() == 3  # S, and the tangents of H and P


def test_gradients_are_those_of_the_product(interpreted):
    (S, H, P), _ = tangents()
    function = partial(accumulate.accumulate, S.clone(), start=1)
    to_H, to_P = interpreted(torch.autograd.functional.jacobian, function, (H, P))
    eye = torch.eye(6)[1:5]  # ∂S[i, j]/∂H[n, m] = δ(i, m)·P[n, j]
    torch.testing.assert_close(to_H, torch.einsum("im,nj->ijnm", eye, P))
    torch.testing.assert_close(to_P, torch.einsum("ni,jm->ijnm", H[:, 1:5], torch.eye(3)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_pass_and_shapes_are_checked(device):
    with FakeTensorMode():
        S, H, P = (torch.empty(*shape, device=device) for shape in ((4, 3), (2, 5, 6), (2, 5, 3)))
        assert accumulate.accumulate(S, H, P, 1) is S
        with pytest.raises(InputError, match="rows of S inside 0:6"):
            accumulate.accumulate(S, H, P, 3)


def test_operator_keeps_the_rules_of_torch(interpreted):
    """That it writes S and nothing else, and that fake tensors get what real ones do."""
    code = """
import torch, logra_lab.kernels.accumulate
operator = torch.ops.logra_lab.accumulate.default
torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))
"""
    interpreted(exec, code, {"args": draw(10, 6, 3)})


def test_traced_in_one_graph_that_mutates_s_and_never_loses_tangents():
    """Without a device the graph can be made but not run: the operator must be in it, once."""
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return lambda S, H, P: (S,)

    S, H, P = draw(10, 6, 3)
    with torch.no_grad():
        torch.compile(accumulate.accumulate, fullgraph=True, backend=keep)(S, H, P)
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [str(target) for target in targets] == ["logra_lab.accumulate"]
    with forward_ad.dual_level(), pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(accumulate.accumulate, fullgraph=True, backend=keep)(S, H, P)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_of_the_sketch_accumulates_by_the_kernel(interpreted, by_kernel, dtype):
    """The hook's own function: its H is what `torch.autograd` hands to a backward of the layer."""
    S, H, P = draw(10, 6, 3, dtype)
    out = S.clone()
    # What it reads of its context; of a class that the interpreter's process can import.
    context = SimpleNamespace(saved_tensors=(P,), S=out, inbox=None)
    interpreted(_Accumulate.backward, context, H)
    close(out, S, H, P)
    assert by_kernel() == 1


def test_the_torch_path_of_the_sketch_gives_the_same(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 5, bias=False))
    sketch = Sketch(model, 3, targets=["0"])
    x, H = torch.randn(4, 8), torch.randn(4, 5)
    model(x).backward(H)
    P = sketch.sites[0].projection.project(x)
    close(sketch.flat, torch.zeros(5, 3), H, P)
    y = model(x)
    monkeypatch.setenv("LOGRA_LAB_KERNELS", "triton")
    with pytest.raises(InputError, match="cannot run on 'cpu'"):
        y.backward(H)


# --- what does not fit ---


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_function_of_the_sketch_takes_fake_tensors_by_either_path(device):
    with FakeTensorMode():
        S, H, P = (torch.empty(*shape, device=device) for shape in ((6, 3), (2, 5, 6), (2, 5, 3)))
        by_torch_or_kernel(S, H, P)


def test_the_torch_path_compiles_to_one_graph_and_carries_tangents(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    (S, H, P), (S_dot, H_dot, P_dot) = draw(10, 6, 3), draw(10, 6, 3, seed=1)
    out = S.clone()
    torch.compile(by_torch_or_kernel, fullgraph=True, backend="aot_eager")(out, H, P)
    close(out, S, H, P)

    def moved(S, H, P):
        S = S * 1
        by_torch_or_kernel(S, H, P)
        return S

    _, got = torch.func.jvp(moved, (S, H, P), (S_dot, H_dot, P_dot))
    want = S_dot + H_dot.T @ P + H.T @ P_dot
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_an_expanded_s_and_shapes_that_would_broadcast_are_refused_by_the_sketch(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' own check
    S, H, P = torch.zeros(1, 3).expand(4, 3), torch.ones(2, 4), torch.ones(2, 3)
    with pytest.raises(InputError, match="entries of S share memory"):
        by_torch_or_kernel(S, H, P)
    assert (S == 0).all()
    for wrong in ((torch.zeros(4, 3), H, torch.ones(2, 5)), (torch.zeros(5, 3), H, P)):
        with pytest.raises(InputError, match=r"expected S \[d, r\], H"):
            by_torch_or_kernel(*wrong)


WRONG = {
    r"S \[rows, r\] in float32": {"S": torch.zeros(4, 3, dtype=torch.float64)},
    "an S that is not expanded": {"S": torch.zeros(1, 3).expand(4, 3)},
    "H and P in": {"H": torch.zeros(2, 4, dtype=torch.int32)},
    r"H \[\*batch, d\] and P \[\*batch, 3\]": {"P": torch.zeros(2, 5)},
    "rows of S inside 0:4": {"start": 1},
    "tensors on cpu": {"H": torch.zeros(2, 4, device="meta")},
    r"got tensors on 'cpu'.*use the torch path": {},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named_before_anything_is_written(message):
    good = {"S": torch.ones(4, 3), "H": torch.ones(2, 4), "P": torch.ones(2, 3)}
    with pytest.raises(InputError, match=message):
        accumulate.launch(**good | WRONG[message])
    assert torch.equal(good["S"], torch.ones(4, 3))


@pytest.mark.parametrize(
    ("architecture", "dtype", "product"),
    [(80, "bf16", "f32.bf16.bf16.f32"), (90, "fp16", "wgmma.mma_async"), (90, "fp32", "fma.rn")],
)
def test_it_compiles_and_float32_is_not_rounded_to_tf32(build, architecture, dtype, product):
    wide = dtype == "fp32"
    ROWS, COLUMNS, TOKENS = accumulate.BLOCKS[wide]
    fixed = {"out_column": 1, "h_column": 1, "p_column": 1, "ADD": True, "WIDE": wide}
    fixed |= {"ROWS": ROWS, "COLUMNS": COLUMNS, "TOKENS": TOKENS}
    types = {"out": "*fp32", "h": f"*{dtype}", "p": f"*{dtype}"}
    ptx = build(accumulate._accumulate, architecture, types, fixed)
    assert product in ptx
    assert "tf32" not in ptx
    assert ".ftz" not in ptx


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_real_shape_repeats_to_the_bit(dtype):
    S, H, P = draw(4099, 519, 256, dtype)
    out = [S.cuda(), S.cuda()]
    for one in out:
        accumulate.launch(one, H.cuda(), P.cuda())
    close(out[0], S, H, P)
    assert torch.equal(*out)
