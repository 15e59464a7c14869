"""The kernel over rows of logits against its definitions, computed in extended precision."""

import math
import re
import runpy

import jaxtyping
import numpy as np
import pytest
import torch

from logra_lab import kl as library
from logra_lab.errors import InputError

kl = pytest.importorskip("logra_lab.kernels.kl", reason="needs the triton package")
GUARD = 3
INF, NAN = math.inf, math.nan
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def judge(z, other=None, labels=None, temperature=1.0, kind="token"):
    """(KL, log-probability, entropy) of every row, from the textbook, with 64 bits of mantissa."""

    def log_softmax(x):
        top = x.max(1, keepdims=True)
        return x - top - np.log(np.exp(x - top).sum(1, keepdims=True))

    z = np.asarray(z.double(), np.longdouble) / temperature
    out = np.full((3, len(z)), NAN)
    log_p = log_softmax(z)
    p, alive = np.exp(log_p), z > -INF
    if kind == "variance":
        u = np.where(alive, np.asarray(other.double(), np.longdouble) / temperature, 0)
        out[0] = (p * (u - (p * u).sum(1, keepdims=True)) ** 2).sum(1) / 2
    if kind == "realised":
        log_q = log_softmax(np.asarray(other.double(), np.longdouble) / temperature)
        with np.errstate(invalid="ignore"):
            out[0] = np.where(alive, p * (log_p - log_q), 0).sum(1)
    if labels is not None:
        out[1] = np.take_along_axis(log_p, labels.numpy()[:, None], 1)[:, 0]
        out[2] = -np.where(alive, p * np.where(alive, log_p, 0), 0).sum(1)
    return torch.from_numpy(out)


def tolerance(z, temperature, lanes=512):
    """Relative, of a sum over a row: units of 2⁻²⁴, the rounding of float32.

    A weight 2^x has three roundings in x, so 3·ln 2·|x| units (|x| ≤ 126: smaller ones are 0), and
    4 of ex2.approx (2⁻²² by the PTX manual). Changing weights by ε changes a variance, or a mean of
    e^y − 1 − y, by 2ε at most. Terms are not negative: a sum's rounding is its longest chain of
    additions, down a chunk's column, over the chunks with 6 operations each, across the lanes.
    """
    seen = torch.where(z > -INF, z.double(), z.double().amax(1, keepdim=True))
    span = (seen.amax() - seen.amin()).item() / temperature / math.log(2)
    chain = 4 + 6 * math.ceil(z.shape[1] / (2 * lanes)) + 2 * math.log2(lanes)
    return 2**-24 * (2 * (3 * math.log(2) * min(span, 126) + 4) + chain + 8)


def check(got, want, z, temperature=1.0, lanes=512, change=None):
    """`change`: new − old logits; their difference rounds by 2⁻²⁴ of itself, so y does by that."""
    assert got.shape == want.shape
    if len(z) == 0:
        return
    rtol = tolerance(z, temperature, lanes)
    got = got.cpu().double()
    for row in range(got.shape[1]):
        value, slack = want[0, row].item(), rtol
        if change is not None and 0 < value < INF:
            spread = math.sqrt(
                2 * min(value, 1.0)
            )  # of y, where KL is small: KL is half its square
            slack += 2 * 2**-24 * change[row].abs().max().item() / temperature / spread
        assert got[0, row].item() == pytest.approx(value, rel=slack, abs=1e-30, nan_ok=True)
    torch.testing.assert_close(got[1], want[1], rtol=rtol, atol=rtol, equal_nan=True)
    torch.testing.assert_close(got[2], want[2], rtol=rtol, atol=rtol, equal_nan=True)


def draw(n, V, dtype=torch.float32, seed=0):
    """Logits, a tangent, new logits and labels."""
    g = torch.Generator().manual_seed(seed)
    z, u = 3 * torch.randn(n, V, generator=g), torch.randn(n, V, generator=g)
    z, u = z.to(dtype), u.to(dtype)
    return z, u, (z + u / 8).to(dtype), torch.randint(V, (n,), generator=g)


def guarded(x, fill, device="cpu", step=(1, 1), turned=False):
    """A view equal to x, its neighbours in memory all `fill`; and that memory."""
    if turned:
        view, memory = guarded(x.T, fill, device, step)
        return view.T, memory
    sizes = [n * s + 2 * GUARD for n, s in zip(x.shape, step, strict=False)]
    memory = torch.full(sizes, fill, dtype=x.dtype, device=device)
    cuts = tuple(slice(GUARD, GUARD + n * s, s) for n, s in zip(x.shape, step, strict=False))
    memory[cuts] = x.to(device)
    return memory[cuts], memory


def inside(machine, name, *arguments):
    """Calls a function of this file where the kernels run."""
    if machine.device == "cuda":
        return globals()[name](*arguments)
    scope = {"run": runpy.run_path, "path": __file__, "name": name, "arguments": arguments}
    return machine.run(eval, "run(path)[name](*arguments)", scope)


SIZES = [(3, 1), (2, 2), (3, 7), (1, 63), (2, 64), (2, 65), (2, 131), (2, 521), (0, 5)]
CASES = [(*size, torch.float32) for size in SIZES]
CASES += [(*size, dtype) for size in ((3, 7), (2, 131)) for dtype in TYPES[1:]]


@pytest.mark.parametrize(("n", "V", "dtype"), CASES)
def test_every_result_with_nan_around_the_inputs_and_canaries_behind_the_output(
    machine, n, V, dtype
):
    T = 0.7
    z, u, new, labels = draw(n, V, dtype)
    Z, _ = guarded(z, NAN, machine.device)
    ids, _ = guarded(labels, -1, machine.device)
    for kind, other in (("token", None), ("variance", u), ("realised", new)):
        memory = torch.full((3 * n + 2 * GUARD,), 55.0, device=machine.device)
        out = memory[GUARD : GUARD + 3 * n].view(3, n)
        given = None if other is None else guarded(other, NAN, machine.device)[0]
        got = machine.run(kl.launch, Z, given, ids, T, kind, out=out, lanes=16)
        assert (memory[:GUARD] == 55).all()
        assert (memory[GUARD + 3 * n :] == 55).all()
        if other is None:
            assert (out[0] == 55).all()  # no KL was asked for
            out[0] = NAN
        change = new.double() - z.double() if kind == "realised" else None
        check(out, judge(z, other, labels, T, kind), z, T, 16, change)
        assert tuple(got.shape) == (3, n)


@pytest.mark.parametrize("kind", ["variance", "realised"])
def test_layouts_catch_strides_that_are_taken_for_granted_or_for_each_others(machine, kind):
    z, u, new, labels = draw(5, 90)
    other = u if kind == "variance" else new
    want = judge(z, other, labels, 1.0, kind)
    for one, two in (((1, 1), (2, 3)), ((3, 2), (1, 1))):
        Z, _ = guarded(z, NAN, machine.device, one, turned=True)
        Y, _ = guarded(other, NAN, machine.device, two)
        ids, _ = guarded(labels, -1, machine.device, (2,))
        got = machine.run(kl.launch, Z, Y, ids, 1.0, kind, lanes=16)
        check(got, want, z, 1.0, 16, new - z if kind == "realised" else None)


@pytest.mark.parametrize("kind", ["variance", "realised"])
def test_the_largest_vocabulary(machine, kind):
    z, u, new, _ = draw(1, 262_144)
    labels = torch.tensor([262_143])
    other = u if kind == "variance" else new
    got = machine.run(
        kl.launch,
        z.to(machine.device),
        other.to(machine.device),
        labels.to(machine.device),
        1.0,
        kind,
    )
    check(got, judge(z, other, labels, 1.0, kind), z, 1.0, 512, new - z)


def test_two_types_at_once_and_a_temperature_that_counts_once(machine):
    z, u, _, _ = draw(2, 40)
    half = z.bfloat16()
    for T in (0.5, 1.7):
        got = machine.run(
            kl.launch, half.to(machine.device), u.to(machine.device), None, T, "variance"
        )
        check(got, judge(half, u, None, T, "variance"), half, T)


# --- what a plain float32 sum loses ---------------------------------------------------------------


@pytest.mark.parametrize("order", ["as drawn", "heavy last", "heavy first"])
def test_a_variance_of_1e_4_on_tangents_of_1000_catches_squares_that_cancel(machine, order):
    """E u² − (E u)² has errors of 1e6·2⁻²⁴ = 0.06 here; so has a mean in one float32: 3e-5.

    `heavy last`: the first chunks, of other tangents, weigh e⁻⁴⁰ of the last.
    """
    g = torch.Generator().manual_seed(1)
    z = torch.randn(3, 333, generator=g)
    u = 1000 + 0.01 * torch.randn(3, 333, generator=g)
    light = {"heavy last": slice(0, 200), "heavy first": slice(70, 333)}.get(order, slice(0))
    z[:, light] -= 40
    u[:, light] = -300 * u[:, light] / 1000
    got = machine.run(
        kl.launch, z.to(machine.device), u.to(machine.device), None, 1.0, "variance", lanes=16
    )
    check(got, judge(z, u, None, 1.0, "variance"), z, 1.0, 16)


@pytest.mark.parametrize("constant", [0.0, 1.0, 1000.1, -3e4])
def test_constant_tangents_have_a_variance_of_zero_to_the_rounding_of_their_mean(machine, constant):
    z, _, _, _ = draw(3, 200)
    u = torch.full_like(z, constant)
    got = machine.run(
        kl.launch, z.to(machine.device), u.to(machine.device), None, 1.0, "variance", lanes=16
    )
    assert (got[0] >= 0).all()
    # A mean is within some units of 2⁻²⁴ of the constant, and a second one within as many of that.
    assert (got[0] <= (16 * 2**-24 * 16 * 2**-24 * constant) ** 2).all()


def test_extreme_logits_catch_an_exponential_that_overflows_or_a_maximum_of_the_first_chunk(
    machine,
):
    g = torch.Generator().manual_seed(2)
    z = 2e4 * torch.rand(4, 150, generator=g) - 1e4
    z[1, 7:9] = 1e4  # two of the largest, alike
    z[2] = z[2].sort().values  # every chunk has a new maximum
    z[3] = -1e4  # all ties
    new = z.flip(1).contiguous()
    new[3] = 1e4
    u, labels = torch.randn(4, 150, generator=g), torch.tensor([3, 7, 149, 0])
    for kind, other in (("variance", u), ("realised", new)):
        want = judge(z, other, labels, 1.0, kind)
        got = machine.run(
            kl.launch,
            z.to(machine.device),
            other.to(machine.device),
            labels.to(machine.device),
            1.0,
            kind,
            lanes=16,
        )
        # What is 0 by rounding: p's neighbours at distances in z rounded to 2⁻²⁴·2e4.
        torch.testing.assert_close(got.cpu().double(), want, rtol=2**-24 * 600, atol=1e-30)
    assert got[0, 3] == 0


@pytest.mark.parametrize("size", [1e-5, 1e-3, 0.1, 3.0, 100.0, 1e4])
def test_realised_kl_of_every_size_catches_cancellation_and_overflow(machine, size):
    z, u, _, _ = draw(2, 150)
    new = z + size * u
    got = machine.run(
        kl.launch, z.to(machine.device), new.to(machine.device), None, 1.0, "realised", lanes=16
    )
    assert (got[0] > 0).all()
    check(got, judge(z, new, None, 1.0, "realised"), z, 1.0, 16, new - z)


def test_the_same_logits_and_a_shift_of_all_have_no_kl(machine):
    z, _, _, _ = draw(3, 150)
    z = (z * 16).round() / 16  # so that the shift is exact
    for new in (z, z + 64, z - 1024):
        got = machine.run(
            kl.launch, z.to(machine.device), new.to(machine.device), None, 1.0, "realised", lanes=16
        )
        assert (got[0] == 0).all()


def test_one_id_has_no_uncertainty(machine):
    """V = 1, and one unmasked id among many: all is exactly 0, whatever the others' tangents."""
    many = torch.full((1, 150), -INF)
    many[0, 97] = -7.5
    for z, label in ((torch.full((1, 1), 1e4), 0), (many, 97)):
        u = torch.full_like(z, NAN)
        u[0, label] = 3e3
        new = torch.where(z > -INF, 12.0, -INF)
        for kind, other in (("variance", u), ("realised", new)):
            ids = torch.tensor([label], device=machine.device)
            got = machine.run(
                kl.launch, z.to(machine.device), other.to(machine.device), ids, 1.0, kind, lanes=16
            )
            assert got.flatten().tolist() == [0, 0, 0]


# --- masks, and numbers that are none -------------------------------------------------------------


def test_masked_ids_have_no_say_whatever_their_tangent(machine):
    z, u, new, labels = draw(3, 150)
    mask = torch.zeros(3, 150, dtype=torch.bool)
    mask[0, ::2] = mask[1, :128] = mask[2, 17:] = True  # whole chunks and lanes among them
    labels = torch.tensor([1, 130, 3])
    for kind, other in (
        ("variance", u.masked_fill(mask, NAN)),
        ("realised", new.masked_fill(mask, -INF)),
    ):
        masked = z.masked_fill(mask, -INF)
        got = machine.run(
            kl.launch,
            masked.to(machine.device),
            other.to(machine.device),
            labels.to(machine.device),
            1.0,
            kind,
            lanes=16,
        )
        for row in range(3):  # the same row without those columns
            there = ~mask[row]
            label = there[: labels[row]].sum()[None]
            short = [x[row, there][None] for x in (z, u if kind == "variance" else new)]
            want = judge(*short, label, 1.0, kind)
            check(got[:, row, None], want, short[0], 1.0, 16, short[1] - short[0])


@pytest.mark.parametrize("tangent", [1e30, -3e38, INF, NAN])
@pytest.mark.parametrize("place", [slice(0, 60), slice(60, 64), slice(90, 150)])
def test_an_id_of_probability_zero_catches_a_weight_of_0_times_an_infinite_square(
    machine, place, tangent
):
    """e⁻³⁰⁰ is 0 in float32; seen first it still has the largest logit, of its lane or of all."""
    z, u, _, _ = draw(3, 150)
    z[:, place] -= 300
    u[:, place] = tangent
    got = machine.run(
        kl.launch, z.to(machine.device), u.to(machine.device), None, 1.0, "variance", lanes=16
    )
    quiet = u.clone()
    quiet[:, place] = 0
    want = judge(z, quiet, None, 1.0, "variance")
    check(got, want, z, 1.0, 16)
    torch.testing.assert_close(library.variance_kl(z, u).double(), want[0], rtol=1e-5, atol=0)


def test_tangents_that_are_large_but_alike_have_no_variance_and_no_nan(machine):
    """The square of 1e30 is infinite: times a chunk's weight of 0 it would be nan."""
    z, _, _, _ = draw(3, 150)
    z[:, 60:] -= 300
    u = torch.full_like(z, 1e30)
    got = machine.run(
        kl.launch, z.to(machine.device), u.to(machine.device), None, 1.0, "variance", lanes=16
    )
    assert not got[0].isnan().any()


@pytest.mark.parametrize("far", [-30.0, 0.0, 9.0, 90.0])
def test_an_id_unmasked_by_the_new_policy_weighs_on_its_normaliser(machine, far):
    z, _, new, _ = draw(2, 150)
    z[0, 5] = z[1, :40] = z[1, 80:] = -INF
    new[0, 5] = far
    new[1, 100:110] = far
    got = machine.run(
        kl.launch, z.to(machine.device), new.to(machine.device), None, 1.0, "realised", lanes=16
    )
    want = judge(z, new, None, 1.0, "realised")
    torch.testing.assert_close(got[0].cpu().double(), want[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(library.realised_kl(z, new).double(), want[0], rtol=1e-5, atol=0)


def test_an_id_that_the_new_policy_masks_makes_kl_infinite(machine):
    z, _, new, _ = draw(2, 150)
    new[1, 131] = -INF
    got = machine.run(
        kl.launch, z.to(machine.device), new.to(machine.device), None, 1.0, "realised", lanes=16
    )
    assert got[0].isfinite().tolist() == [True, False]
    assert got[0, 1] == INF


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("kind", ["variance", "realised"])
def test_nan_and_infinite_logits_or_tangents_never_look_like_numbers(machine, kind, bad):
    z, u, new, labels = draw(4, 150)
    other = u if kind == "variance" else new
    z[1, 140], other[2, 3] = bad, bad
    z[3] = -INF  # no id at all
    got = machine.run(
        kl.launch,
        z.to(machine.device),
        other.to(machine.device),
        labels.to(machine.device),
        1.0,
        kind,
        lanes=16,
    ).cpu()
    assert got[0].isnan().tolist() == [False, True, True, True]
    assert got[1].isnan().tolist() == [False, True, False, True]
    assert got[2].isnan().tolist() == [False, True, False, True]


def test_a_label_outside_the_vocabulary_reads_nothing_and_is_nan(machine):
    z, _, _, _ = draw(3, 20)
    labels = torch.tensor([-1, 20, 19], device=machine.device)
    got = machine.run(kl.launch, z.to(machine.device), None, labels)
    assert got[1].isnan().tolist() == [True, True, False]
    logp, entropy = library.logprob_entropy(z, labels.cpu())
    torch.testing.assert_close(got[1].cpu(), logp, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(got[2].cpu(), entropy, rtol=1e-5, atol=1e-6)


def unknown_labels(z, labels, z_dot):
    """Gradient of the sum and tangents of log-probabilities, by the kernel and by the library."""
    found = []
    for function in (kl.token, library.logprob_entropy):
        leaf = z.clone().requires_grad_()
        (grad,) = torch.autograd.grad(function(leaf, labels)[0].sum(), [leaf])
        found.append((grad, torch.func.jvp(lambda x: function(x, labels)[0], (z,), (z_dot,))[1]))  # noqa: B023
    return found


def test_an_unknown_label_moves_with_nothing_and_its_derivative_reads_nothing(machine):
    z, u, _, _ = draw(3, 20)
    labels = torch.tensor([-100, 20, 19])
    given = (x.to(machine.device) for x in (z, labels, u))
    (grad, dot), (by_torch, torch_dot) = inside(machine, "unknown_labels", *given)
    assert (grad[:2] == 0).all()
    assert (dot[:2] == 0).all()
    assert grad[2].abs().max() > 0.5
    torch.testing.assert_close(grad, by_torch, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dot, torch_dot, rtol=1e-5, atol=1e-6)


# --- derivatives, fake tensors, torch.compile -----------------------------------------------------


def along(name, z, other, labels, T, z_dot, other_dot):
    """The results, their tangents in both ways of forward mode, and their gradients."""
    from torch.autograd import forward_ad

    def results(z, other):
        if name == "token":
            return torch.stack(kl.token(z, labels, T))
        return getattr(kl, name)(z, other, T)[None]

    value, by_func = torch.func.jvp(results, (z, other), (z_dot, other_dot))
    with forward_ad.dual_level():
        dual = results(forward_ad.make_dual(z, z_dot), forward_ad.make_dual(other, other_dot))
        by_dual = forward_ad.unpack_dual(dual).tangent
    leaves = [z.clone().requires_grad_(), other.clone().requires_grad_()]
    rows = results(*leaves)
    weights = torch.arange(1.0, 1 + rows.numel(), device=z.device).view_as(rows)
    grads = torch.autograd.grad((rows * weights).sum(), leaves, allow_unused=True)
    return value, by_func, by_dual, weights, *grads


@pytest.mark.parametrize("name", ["token", "variance", "realised"])
def test_tangents_and_gradients_equal_central_differences_and_are_not_zero(machine, name):
    """The definition's own differences: (f(z + h ż) − f(z − h ż))/2h in 64 bits, h = 1e-5."""
    T, h = 0.8, 1e-5
    z, u, new, labels = draw(3, 40)
    other = new if name == "realised" else u
    other, labels = other.contiguous(), labels
    z[1, ::2] = -INF  # a masked id moves nothing, even along nan
    other = torch.where(z > -INF, other, -INF) if name == "realised" else other
    g = torch.Generator().manual_seed(9)
    z_dot, other_dot = (torch.randn(3, 40, generator=g) for _ in range(2))
    labels[1] = 1

    def moved(step, a, b):
        with np.errstate(invalid="ignore"):
            all_three = judge(z.double() + step * a, other.double() + step * b, labels, T, name)
        return all_three[1:] if name == "token" else all_three[:1]

    def difference(a, b):
        return (moved(h, a, b) - moved(-h, a, b)) / (2 * h)

    want = difference(z_dot.double(), other_dot.double())
    assert (want.abs() > 1e-3).all()
    given = [x.to(machine.device) for x in (z, other, labels)]
    dots = [x.masked_fill(z == -INF, NAN).to(machine.device) for x in (z_dot, other_dot)]
    value, by_func, by_dual, weights, z_grad, other_grad = inside(
        machine, "along", name, *given, T, *dots
    )
    want_value = judge(z, other, labels, T, name)
    want_value = want_value[1:] if name == "token" else want_value[:1]
    torch.testing.assert_close(value.cpu().double(), want_value, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(by_func.cpu().double(), want, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(by_dual, by_func)
    for j in range(40):  # ∂Σ(weights·results) by column j, all rows at once: rows are independent
        one = torch.zeros(3, 40, dtype=torch.float64)
        one[:, j] = 1
        for which, grad in enumerate((z_grad, other_grad)):
            if name == "token" and which:
                assert grad is None
                continue
            parts = difference(one, 0 * one) if which == 0 else difference(0 * one, one)
            column = (parts * weights.cpu()).sum(0)
            torch.testing.assert_close(grad[:, j].cpu().double(), column, rtol=1e-4, atol=1e-5)


def compiled(z, other, labels):
    """Each operation under torch.compile, as one graph, and with gradients."""
    torch.library.opcheck(
        torch.ops.logra_lab.logit_rows.default,
        (z, other, labels, 0.9, "realised"),
        test_utils=("test_schema", "test_faketensor"),
    )

    def all_four(z, other, labels):
        return kl.variance(z, other, 0.9), kl.realised(z, other, 0.9), *kl.token(z, labels, 0.9)

    graph = torch.compile(all_four, backend="aot_eager", fullgraph=True)
    plain = torch.compile(all_four, backend="aot_eager")
    leaf = z.clone().requires_grad_()
    (grad,) = torch.autograd.grad(torch.stack(plain(leaf, other, labels)).sum(), [leaf])
    leaf = z.clone().requires_grad_()
    (eager,) = torch.autograd.grad(torch.stack(all_four(leaf, other, labels)).sum(), [leaf])
    with torch.no_grad():
        return torch.stack(graph(z, other, labels)), grad, eager


def test_torch_compile_gives_the_same_numbers_and_gradients(machine):
    z, _, new, labels = (x.to(machine.device) for x in draw(2, 30))
    got, grad, eager = inside(machine, "compiled", z, new, labels)
    want = torch.cat(
        [
            judge(z.cpu(), new.cpu(), None, 0.9, "variance")[:1],
            judge(z.cpu(), new.cpu(), labels.cpu(), 0.9, "realised"),
        ]
    )
    torch.testing.assert_close(got.cpu().double(), want, rtol=1e-5, atol=1e-6)
    assert grad.abs().max() > 0.1
    torch.testing.assert_close(grad, eager)


def tangents_compiled(z, other, labels, z_dot, other_dot):
    """Tangents of each operation eagerly, and by both ways that compiled code can meet them."""
    from torch.autograd import forward_ad

    def all_four(z, other):
        rows = kl.variance(z, other, 0.9), kl.realised(z, other, 0.9), *kl.token(z, labels, 0.9)
        return torch.stack(rows)

    def inside(*x):
        return torch.func.jvp(all_four, x[:2], x[2:])[1]

    eager = inside(z, other, z_dot, other_dot)
    traced = torch.compile(inside, backend="aot_eager")(z, other, z_dot, other_dot)
    with forward_ad.dual_level():
        duals = forward_ad.make_dual(z, z_dot), forward_ad.make_dual(other, other_dot)
        dual = torch.compile(all_four, backend="aot_eager")(*duals)
        return eager, traced, forward_ad.unpack_dual(dual).tangent


def test_torch_compile_never_loses_tangents(machine):
    """The eager ones are compared with central differences above; dynamo forgets a jvp (2.13)."""
    z, u, new, labels = (x.to(machine.device) for x in draw(2, 30))
    eager, traced, dual = inside(machine, "tangents_compiled", z, new, labels, u, u.flip(1))
    assert (eager.abs() > 1e-3).all()
    torch.testing.assert_close(traced, eager)
    assert dual is not None
    torch.testing.assert_close(dual, eager)


def test_fake_tensors_pass_through_with_shape_type_and_device():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        z = torch.empty(6, 50, dtype=torch.bfloat16)
        labels = torch.empty(6, dtype=torch.int64)
        for got in (kl.variance(z, z), kl.realised(z, z), *kl.token(z, labels)):
            assert (tuple(got.shape), got.dtype, got.device) == ((6,), torch.float32, z.device)
        with pytest.raises(InputError, match="int64 labels"):
            kl.token(z, labels[:5])


# --- who computes ---------------------------------------------------------------------------------


def routed(z, u, new, labels, forced):
    """The library's functions, in a process that is told which kernels to take, and is watched."""
    import os

    launches = []
    launch, kl.launch = kl.launch, lambda *x, **named: launches.append(x[4]) or launch(*x, **named)
    os.environ["LOGRA_LAB_KERNELS"] = forced
    try:
        got = (
            library.variance_kl(z, u, 0.9),
            library.realised_kl(z, new, 0.9),
            *library.logprob_entropy(z, labels, 0.9),
        )
        return torch.stack([x.float() for x in got]), launches, got[0].dtype
    finally:
        del os.environ["LOGRA_LAB_KERNELS"]
        kl.launch = launch


@pytest.mark.parametrize("dtype", [*TYPES, torch.float64])
def test_both_paths_of_the_library_give_the_same_and_float64_goes_by_torch(machine, dtype):
    z, u, new, labels = (x.to(machine.device) for x in draw(3, 90))
    z, u, new = z.to(dtype), u.to(dtype), new.to(dtype)
    one, launches, wide = inside(machine, "routed", z, u, new, labels, "triton")
    two, none, _ = inside(machine, "routed", z, u, new, labels, "torch")
    assert launches == ([] if dtype == torch.float64 else ["variance", "realised", "token"])
    assert none == []
    assert wide == (torch.float64 if dtype == torch.float64 else torch.float32)
    # torch's log-probabilities near −10 round to 1e-6 and realised KL by it, beside changes of 1/8
    torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_torch_paths_keep_the_definitions_where_logits_are_extreme_or_masked(dtype):
    z, _, new, labels = draw(4, 60)
    z, new = z.to(dtype), new.to(dtype)
    new[1] = 3000 * new[1]  # e^x overflows while p underflows
    z[2, ::2] = new[2, ::2] = -INF
    z[3] = 1e4 * z[3].sign()
    labels[2] = 1
    want = judge(z, new, labels, 1.0, "realised")
    rtol = 2e-5 if dtype == torch.float32 else 1e-11
    torch.testing.assert_close(library.realised_kl(z, new).double(), want[0], rtol=rtol, atol=0)
    logp, entropy = library.logprob_entropy(z, labels)
    torch.testing.assert_close(logp.double(), want[1], rtol=rtol, atol=rtol)
    torch.testing.assert_close(entropy.double(), want[2], rtol=rtol, atol=rtol)


def test_the_reference_is_the_definition():
    z, u, new, labels = draw(4, 60)
    z[1, ::2] = new[1, ::3] = -INF
    z[2, 7] = -INF
    new[0] *= 300
    labels[1] = 1
    for kind, other in (("token", None), ("variance", u), ("realised", new)):
        got = kl.reference(z, other, labels, 0.7, kind)
        want = judge(z, other, labels, 0.7, kind)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14, equal_nan=True)


WRONG = {
    r"logits \[n, V\] with V ≥ 1": {"z": torch.zeros(3, 0)},
    "logits in one of": {"z": torch.zeros(3, 5, dtype=torch.float64)},
    "a kind of": {"kind": "kl"},
    "a second .* tensor unless": {"other": None},
    r"a second tensor \[3, 5\]": {"other": torch.zeros(3, 4)},
    "a second tensor in one of": {"other": torch.zeros(3, 5, dtype=torch.int32)},
    r"int64 labels \[3\]": {"labels": torch.zeros(3)},
    "tensors on one device": {"other": torch.zeros(3, 5, device="meta")},
    "a temperature > 0": {"temperature": 0.0},
    "compiled Triton kernels need": {},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"z": torch.zeros(5)}, r"logits \[n, V\] with V ≥ 1"),
        ({"z": torch.zeros(3, 0)}, r"logits \[n, V\] with V ≥ 1"),
        ({"z": torch.zeros(3, 5, dtype=torch.int32)}, "logits in one of"),
        ({"other": torch.zeros(1, 5)}, r"a second tensor \[3, 5\]"),
        ({"other": torch.zeros(3, 5, dtype=torch.int32)}, "a second tensor in one of"),
        ({"other": torch.zeros(3, 5, device="meta")}, "a second tensor on cpu"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"int64 labels \[3\]"),
        ({"labels": torch.zeros(3, dtype=torch.int32)}, r"int64 labels \[3\]"),
        ({"T": -1.0}, "a temperature > 0"),
    ],
)
def test_the_library_names_what_does_not_fit_before_either_path(change, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' own check
    z, labels = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)
    x = {"z": z, "other": z, "labels": labels, "T": 1.0} | change
    if "labels" in change:
        calls = [lambda: library.logprob_entropy(x["z"], x["labels"], x["T"])]
    else:
        calls = [
            lambda: library.variance_kl(x["z"], x["other"], x["T"]),
            lambda: library.realised_kl(x["z"], x["other"], x["T"]),
        ]
    for call in calls:
        with pytest.raises(InputError, match=message):
            call()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_library_takes_fake_tensors_by_either_path(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        z = torch.empty(4, 9, device=device)
        labels = torch.empty(4, dtype=torch.int64, device=device)
        results = library.variance_kl(z, z), library.realised_kl(z, z)
        for x in (*results, *library.logprob_entropy(z, labels)):
            assert (tuple(x.shape), x.dtype, x.device) == ((4,), torch.float32, z.device)


def test_the_torch_paths_compile_to_one_graph_and_keep_tangents(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    z, u, new, labels = (x.double() if x.is_floating_point() else x for x in draw(2, 30))

    def all_four(z, other):
        rows = library.variance_kl(z, other, 0.9), library.realised_kl(z, other, 0.9)
        return torch.stack([*rows, *library.logprob_entropy(z, labels, 0.9)])

    graph = torch.compile(all_four, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(graph(z, new), all_four(z, new))
    h = 1e-6
    want = (all_four(z + h * u, new - h * u) - all_four(z - h * u, new + h * u)) / (2 * h)
    assert (want.abs() > 1e-3).all()

    def along(*x):
        return torch.func.jvp(all_four, x[:2], x[2:])[1]

    for function in (along, torch.compile(along, fullgraph=True, backend="aot_eager")):
        with torch.no_grad():
            torch.testing.assert_close(function(z, new, u, -u), want, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named(message):
    good = {"z": torch.zeros(3, 5), "other": torch.zeros(3, 5), "labels": None, "kind": "variance"}
    with pytest.raises(InputError, match=message):
        kl.launch(**good | WRONG[message])


def test_an_output_that_does_not_fit_is_named(machine):
    z = torch.zeros(3, 5, device=machine.device)
    for out in (torch.zeros(3, 4), torch.zeros(3, 6)[:, ::2], torch.zeros(3, 3).double()):
        with pytest.raises(InputError, match=r"expected out \[3, 3\]"):
            machine.run(kl.launch, z, z, None, 1.0, "variance", out=out.to(machine.device))


@pytest.mark.parametrize("kind", ["token", "variance", "realised"])
@pytest.mark.parametrize(("architecture", "dtype"), [(80, "*fp32"), (90, "*bf16")])
def test_it_compiles_to_a_loop_without_exchange_between_threads(build, architecture, dtype, kind):
    lanes = 512 if dtype == "*fp32" else 1024
    types = {"z": dtype, "other": dtype, "labels": "*i64", "out": "*fp32", "rate": "fp32"}
    fixed = {"z_column": 1, "other_column": 1, "KIND": kind, "LANES": lanes}
    fixed["DEPTH"] = 2 if kind == "realised" and lanes > 512 else 4
    if kind == "token":
        fixed["other"] = None
    ptx = build(kl._rows, architecture, {k: v for k, v in types.items() if k not in fixed}, fixed)
    loop = re.search(r"^(\$L__BB0_\d+):.*?bra\S*\s+\1;", ptx, re.M | re.S).group(0)
    assert "ex2" in loop
    assert "bar.sync" not in loop
    assert "bar.sync" in ptx  # the lanes meet once
