"""Rounding and applying a thin update, against integers, fractions and the scalar Philox."""

import hashlib
import math
import runpy
from fractions import Fraction
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logra_lab import projection
from logra_lab.errors import InputError
from logra_lab.sync import operator
from logra_lab.sync import wire as wires
from logra_lab.sync.errors import ShapeMismatch
from logra_lab.sync.update import Slot, ThinUpdate, apply
from logra_lab.sync.wire import ThinLayer, payload_bytes

reference = runpy.run_path(str(Path(__file__).parents[1] / "reference.py"))
philox, inside = reference["philox"], reference["inside"]
LAYERS = (
    ThinLayer("m.q", 13, 151, "m.q"),
    ThinLayer("m.k", 5, 151, "m.q"),  # reads what m.q reads
    ThinLayer("m.o", 11, 137, "m.o"),
)
ROWS = {"m.q": slice(0, 13), "m.k": slice(13, 18), "m.o": slice(18, 29)}


def key(text):
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def word(row, c, *, seed, version, layer):
    """Section 4 of the method; the key's text is the layer's own name and the new version."""
    return philox((row, c // 4, 1, 1), key(f"{seed}:{version}:{layer}"))[c % 4]


@cache
def signs(r, k, *, seed, draw, site):
    """√r A as int64, from section 1 of the method, one Philox call for 128 signs of a column."""
    columns = []
    for j in range(k):
        bits = []
        for block in range(-(-r // 128)):
            for w in philox((j, block, 0, 1), key(f"{seed}:{draw}:{site}")):
                bits += [1 if w >> i & 1 else -1 for i in range(32)]
        columns.append(bits[:r])
    return np.array(columns, dtype=np.int64).T


def integers(u, e, words):
    """floor(u/2^e + w/2³²), exactly."""
    return [
        math.floor(Fraction(x) / Fraction(2) ** e + Fraction(w, 2**32))
        for x, w in zip(u, words, strict=True)
    ]


def exponent(u):
    """The smallest e ≥ −126 with max|u| ≤ 127·2^e, by trying."""
    e = -126
    while max(abs(Fraction(x)) for x in u) > 127 * Fraction(2) ** e:
        e += 1
    return e


def factor(r, rows=29, seed=0, scale=1e-3, dtype=torch.float32):
    """Rows of very different sizes, one of them zero."""
    g = torch.Generator().manual_seed(seed)
    U = torch.randn(rows, r, generator=g, dtype=torch.float64) * scale
    U *= 10.0 ** torch.randint(-3, 4, (rows, 1), generator=g)
    U[4] = 0
    return U.to(dtype)


def rounded(U, layers=LAYERS, *, base=0, seed=3, draw=7, **rest):
    return ThinUpdate.round(U, layers, run="run", base=base, seed=seed, draw=draw, **rest)


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same(x, y):
    """Bit for bit: −0 is not 0."""
    return x.dtype == y.dtype and torch.equal(bits(x), bits(y))


# Rounding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("r", [1, 33, 130])
def test_integers_catch_another_scale_floor_word_row_or_key(r, dtype):
    """Every entry by fractions; negative entries floor downwards, rows count within the layer."""
    U = factor(r, dtype=dtype)
    thin = rounded(U, base=41)
    assert (thin.values.dtype, thin.exponents.dtype) == (torch.int8, torch.int8)
    assert (thin.base, thin.version, thin.rank, thin.wire) == (41, 42, r, "int8")
    negative = 0
    for layer in LAYERS:
        for row in range(layer.d):
            i = ROWS[layer.name].start + row
            u = [x * (1 / math.sqrt(r)) for x in U[i].tolist()]  # 1/√r is folded in
            e = exponent(u)
            words = [word(row, c, seed=3, version=42, layer=layer.name) for c in range(r)]
            assert int(thin.exponents[i]) == e, (layer.name, row)
            assert thin.values[i].tolist() == integers(u, e, words), (layer.name, row)
            negative += sum(x < 0 for x in u)
    assert negative > 29 * r // 4


BOUNDARY = [  # u, e
    (127.0, 0),
    (math.nextafter(127, 128), 1),
    (-127 * 2.0**-20, -20),
    (-math.nextafter(127 * 2.0**-20, 1), -19),
    (64.0, 0),  # 64 needs 2^0: 127·2^−1 is 63.5
    (63.5, -1),
    (1.0, -6),
    (0.0, -126),
    (5e-324, -126),  # smaller than any exponent can say
    (-(2.0**-140), -126),
    (127 * 2.0**-126, -126),
    (127 * 2.0**100, 100),
]


def test_exponents_catch_a_logarithm_and_a_boundary_off_by_one():
    """r = 1, where 1/√r = 1, so that u is what is written."""
    layer = ThinLayer("x", len(BOUNDARY), 1, "x")
    thin = rounded(torch.tensor([[u] for u, _ in BOUNDARY], dtype=torch.float64), [layer])
    assert thin.exponents.tolist() == [e for _, e in BOUNDARY]
    for row, (u, e) in enumerate(BOUNDARY):
        w = word(row, 0, seed=3, version=1, layer="x")
        assert thin.values[row].tolist() == integers([u], e, [w])
    assert thin.values[[0, 2, 7]].flatten().tolist() == [127, -127, 0]


@pytest.mark.parametrize("u", [math.nextafter(127 * 2.0**100, math.inf), -1e300])
def test_huge_factors_catch_an_exponent_that_wraps(u):
    with pytest.raises(InputError, match="far too large"):
        rounded(torch.tensor([[u]], dtype=torch.float64), [ThinLayer("x", 1, 1, "x")])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wire", wires.WIRES)
def test_factors_that_are_not_finite_catch_a_wire_that_takes_them(wire, bad):
    U = factor(4)
    U[17, 2] = bad
    with pytest.raises(InputError, match=r"m\.k"):
        rounded(U, wire=wire)


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_factors_beyond_the_wire_catch_a_cast_to_infinity(wire):
    with pytest.raises(InputError, match=wire):
        rounded(factor(4, dtype=torch.float64) * 1e60, wire=wire)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("wire", wires.WIRES)
def test_rounding_catches_a_factor_scaled_in_place(wire, dtype):
    U = factor(5, dtype=dtype)
    before = U.clone()
    rounded(U, wire=wire)
    assert same(U, before)


def test_shared_sites_catch_rounding_bits_drawn_by_site_draw_or_place_in_the_update():
    """q and k share A and here their rows too; a fixed draw keeps A from step to step."""
    layers = [ThinLayer("q", 40, 50, "q"), ThinLayer("k", 40, 50, "q")]
    half = torch.full((80, 50), 0.5) * math.sqrt(50)
    half[:, 0] *= 200  # e is 0: u/2^e is 100 here and ½ elsewhere, where each entry is a fair coin
    one, two = rounded(half, layers, draw=0), rounded(half, layers, draw=0, base=1)
    q, k = one.values[:40, 1:], one.values[40:, 1:]
    for other in (k, two.values[:40, 1:]):
        share = (q != other).float().mean()  # of 1,960 fair coins: σ = 0.0113, band 5 σ
        assert abs(share - 0.5) < 0.057


def test_layer_order_catches_rounding_by_row_of_the_update():
    U = factor(9)
    thin = rounded(U)
    moved = rounded(torch.cat([U[18:], U[:18]]), (LAYERS[2], *LAYERS[:2]))
    assert torch.equal(torch.cat([moved.values[11:], moved.values[:11]]), thin.values)
    assert torch.equal(torch.cat([moved.exponents[11:], moved.exponents[:11]]), thin.exponents)


@pytest.mark.parametrize("numbers", [1, 100, 101])
def test_row_blocks_catch_words_or_exponents_counted_from_the_block(numbers, monkeypatch):
    whole = rounded(factor(33))
    monkeypatch.setattr(wires, "_ROWS", numbers)
    blocked = rounded(factor(33))
    assert torch.equal(blocked.values, whole.values)
    assert torch.equal(blocked.exponents, whole.exponents)


def test_mean_over_versions_catches_truncation_and_rounding_to_nearest():
    """An entry's rounding has a standard deviation of at most ½ unit (2^e), its mean over n
    versions ½/√n, the mean over m entries of that ½/√(nm). Bands of 5 σ: P < 1e-4 for 60 entries.
    """
    n, layer = 400, ThinLayer("x", 12, 5, "x")
    U = factor(5, rows=12)
    u = U.double() / math.sqrt(5)
    live = [i for i in range(12) if i != 4]
    total = torch.zeros(12, 5, dtype=torch.float64)
    for version in range(n):
        thin = rounded(U, [layer], base=version)
        total += thin.factor("x", dtype=torch.float64)
    unit = torch.tensor([2.0 ** exponent(row.tolist()) for row in u], dtype=torch.float64)[:, None]

    def unbiased(mean):
        error = ((mean - u) / unit)[live]
        each, all_ = 2.5 / math.sqrt(n), 2.5 / math.sqrt(n * error.numel())
        return bool(error.abs().max() < each) and bool(error.mean().abs() < all_)

    assert unbiased(total / n)
    assert not unbiased((u / unit).round() * unit)  # negative controls
    assert not unbiased((u / unit).trunc() * unit)
    assert not unbiased((u / unit).floor() * unit)


@pytest.mark.parametrize("wire", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_wires_catch_a_missing_scale_or_another_rounding(wire, dtype):
    """U/√r to nearest even, 8, 24 or 53 bits of it (numpy's rint rounds halves to even)."""
    U = factor(33, dtype=dtype)
    thin = rounded(U, wire=wire)
    mantissa, e = np.frexp(U.double().numpy() * (1 / math.sqrt(33)))
    digits = {"bfloat16": 8, "float32": 24, "float64": 53}[wire]
    expected = np.ldexp(np.rint(np.ldexp(mantissa, digits)), e - digits)
    assert thin.exponents is None
    assert thin.values.dtype == getattr(torch, wire)
    assert np.array_equal(thin.values.double().numpy(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wire": "int4"}, "int4"),
        ({"kind": "ternary"}, "ternary"),
        ({"kind": "gaussian"}, "gaussian"),  # the default wire is int8
        ({"U": torch.zeros(28, 4)}, "29 rows"),
        ({"U": torch.zeros(29, 0)}, "29 rows"),
        ({"layers": (*LAYERS[:2], ThinLayer("m.q", 11, 137, "m.q"))}, "m.q"),
        ({"layers": (LAYERS[1], LAYERS[0], LAYERS[2])}, "m.k"),  # its site comes after it
        ({"layers": (*LAYERS[:2], ThinLayer("m.o", 11, 137, "m.q"))}, "m.o"),  # other inputs
        ({"layers": (*LAYERS[:2], ThinLayer("m.o", 11, 137, "m.x"))}, "m.o"),
        ({"layers": (*LAYERS[:2], ThinLayer("m.o", 11, 151, "m.k"))}, "m.o"),  # m.k has no own A
    ],
)
def test_bad_arguments_catch_updates_that_could_not_be_read_again(change, message):
    arguments = {"U": factor(4), "layers": LAYERS, "wire": "int8", "kind": "sign"} | change
    with pytest.raises(InputError, match=message):
        rounded(arguments.pop("U"), arguments.pop("layers"), **arguments)


def test_gaussian_projections_go_with_float_wires():
    thin = rounded(factor(4), wire="float32", kind="gaussian")
    W = torch.zeros(11, 137, dtype=torch.float64)
    apply(thin, [Slot.whole("m.o", W)])
    A = projection.Projection("m.o", 137, 4, 3, 7, "gaussian").matrix(torch.float64)
    expected = -factor(4)[ROWS["m.o"]].double() @ A
    assert torch.allclose(W, expected, rtol=1e-6, atol=0)


# Applying


def weights(layers=LAYERS, seed=1):
    g = torch.Generator().manual_seed(seed)
    return {x.name: torch.randn(x.d, x.k, generator=g) * 0.05 for x in layers}


def by_hand(W, thin, layer):
    """W − (values·2^e) @ signs: integers in numpy, one rounding to float32 at the very end.

    The difference is exact in float64, which the error term of Knuth's two-sum shows.
    """
    start = sum(x.d for x in thin.layers[: thin.layers.index(layer)])
    rows = slice(start, start + layer.d)
    S = signs(thin.rank, layer.k, seed=thin.seed, draw=thin.draw, site=layer.site)
    sums = thin.values[rows].numpy().astype(np.int64) @ S
    scale = thin.exponents[rows].numpy()[:, None].astype(np.int32)
    a, b = W.double().numpy(), -np.ldexp(sums.astype(np.float64), scale)
    total = a + b
    part = total - a
    assert not ((a - (total - part)) + (b - part)).any()
    return torch.from_numpy(total.astype(np.float32))


def hands(W, thin):
    return {x.name: by_hand(W[x.name], thin, x) for x in thin.layers}


def copies(W):
    return {name: w.clone() for name, w in W.items()}


@pytest.fixture(params=[True, False], ids=["integers", "floats"])
def _arithmetic(request, monkeypatch):
    """Both ways to sum, also where the CPU would choose one of them."""
    monkeypatch.setattr(operator, "_vnni", lambda: request.param)


@pytest.mark.usefixtures("_arithmetic")
@pytest.mark.parametrize(
    ("d", "k", "r"),
    [
        *((1, 1, 1), (1, 40, 33), (40, 33, 33), (7, 131, 128), (11, 149, 129), (5, 521, 512)),
        *((127, 64, 64), (3, 2, 2), (19, 257, 1)),
    ],
)
def test_apply_catches_any_rounding_but_that_of_the_subtraction(d, k, r):
    layer = ThinLayer("x", d, k, "x")
    thin = rounded(torch.randn(d, r, generator=torch.Generator().manual_seed(d)) * 1e-3, [layer])
    W = weights([layer])["x"]
    expected = by_hand(W, thin, layer)
    apply(thin, [Slot.whole("x", W)])
    assert same(W, expected)


@pytest.mark.usefixtures("_arithmetic")
def test_largest_sums_catch_saturation_and_eight_bit_accumulators():
    """All integers ±127 and 512 of them: one sum is 65,024."""
    layer = ThinLayer("x", 8, 600, "x")
    U = torch.where(torch.rand(8, 512, generator=torch.Generator().manual_seed(0)) < 0.5, -1.0, 1.0)
    S = torch.from_numpy(signs(512, 600, seed=3, draw=7, site="x"))
    U[0] = S[:, 17]  # one column's sum is 512·127
    thin = rounded(U * 127 * math.sqrt(512), [layer])
    thin.values.copy_(U * 127)
    thin.exponents.fill_(-20)
    W = weights([layer])["x"]
    expected, before = by_hand(W, thin, layer), W.clone()
    apply(thin, [Slot.whole("x", W)])
    assert same(W, expected)
    assert (before - W)[0, 17].item() == pytest.approx(512 * 127 * 2.0**-20, rel=1e-5)


def shards(name, W, cuts_d, cuts_k):
    """Views of a weight, cut into rows and columns."""
    d, k = W.shape
    edges = [sorted({0, n, *(c for c in cuts if c < n)}) for n, cuts in ((d, cuts_d), (k, cuts_k))]
    spans = [[slice(*x) for x in pairwise(e)] for e in edges]
    return [Slot(name, W[i, j], i, j) for i in spans[0] for j in spans[1]]


LAYOUTS = {
    "whole": ((), ()),
    "rows": ((1, 2, 7), ()),
    "columns": ((), (1, 64, 65, 130)),
    "both": ((4,), (33, 128)),
    "every column alone": ((), range(200)),
}


@pytest.mark.usefixtures("_arithmetic")
@pytest.mark.parametrize("numbers", [64, 1000, 1 << 18])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_catch_sums_that_depend_on_shards_blocks_or_order(layout, numbers, monkeypatch):
    """Three updates in a row, in all of these the bits that the hand gets."""
    monkeypatch.setattr(projection, "_BLOCK_NUMBERS", numbers)
    W, expected = weights(), weights()
    slots = [slot for name, w in W.items() for slot in shards(name, w, *LAYOUTS[layout])]
    for version in range(3):
        thin = rounded(factor(33, seed=version), base=version, draw=version)
        apply(thin, slots[:: -1 if version % 2 else 1])
        expected = hands(expected, thin)
    for name in W:
        assert same(W[name], expected[name]), name


def test_strided_weights_catch_an_update_of_a_copy():
    """A fused parameter's rows, and a weight stored the other way round."""
    thin = rounded(factor(33))
    W = weights()
    expected = hands(W, thin)
    fused = torch.cat([W["m.q"], torch.zeros(2, 151), W["m.k"]])
    turned = W["m.o"].T.contiguous().T
    apply(
        thin,
        [
            Slot.whole("m.q", fused[:13]),
            Slot.whole("m.k", fused[15:]),
            Slot.whole("m.o", turned),
        ],
    )
    assert same(fused, torch.cat([expected["m.q"], torch.zeros(2, 151), expected["m.k"]]))
    assert same(turned, expected["m.o"])


@pytest.mark.usefixtures("_arithmetic")
def test_zero_rows_catch_a_weight_whose_sign_of_zero_changes():
    for r in (1, 2, 33):
        layer = ThinLayer("x", 7, 40, "x")
        W = torch.full((7, 40), -0.0)
        apply(rounded(torch.zeros(7, r), [layer]), [Slot.whole("x", W)])
        assert torch.signbit(W).all()


@pytest.mark.parametrize("wire", ["int8", "float32"])
def test_permuted_sum_shows_what_integers_are_for(wire):
    """The same terms in another order: equal bits for int8, others for float factors (control)."""
    layer = ThinLayer("x", 64, 512, "x")
    g = torch.Generator().manual_seed(0)
    thin = rounded(torch.randn(64, 256, generator=g) * 1e-3, [layer], wire=wire)
    W = weights([layer])["x"]
    F = thin.factor("x")
    S = torch.from_numpy(signs(256, 512, seed=3, draw=7, site="x")).float()
    order = torch.randperm(256, generator=g)
    other = W - F[:, order] @ S[order]
    apply(thin, [Slot.whole("x", W)])
    share = (bits(W) != bits(other)).double().mean().item()
    assert (share == 0) if wire == "int8" else (share > 0.005)
    assert torch.allclose(W, other, atol=1e-6)


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_float_wires_catch_a_wrong_product(wire, dtype):
    """A sum of r terms errs by at most r·ε·Σ|terms| (Higham 2002, section 3.1), W − · by ε more."""
    thin = rounded(factor(33, dtype=torch.float64), wire=wire)
    W = {name: w.to(dtype) for name, w in weights().items()}
    before = copies(W)
    apply(thin, [Slot.whole(name, w) for name, w in W.items()])
    epsilon = torch.finfo(dtype).eps
    for layer in LAYERS:
        F = thin.values[ROWS[layer.name]].double()
        S = torch.from_numpy(signs(33, layer.k, seed=3, draw=7, site=layer.site)).double()
        expected = before[layer.name].double() - F @ S
        terms = F.abs().sum(1, keepdim=True) + before[layer.name].abs()
        error = (W[layer.name].double() - expected).abs()
        assert (error <= 35 * epsilon * terms).all(), layer.name


def bfloat16_bits(x):
    """Round to nearest even on the bits of a float32 that is not nan."""
    raw = x.numpy().view(np.uint32)
    return ((raw + 0x7FFF + (raw >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.mark.usefixtures("_arithmetic")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_served_copies_catch_a_cast_of_the_old_weight_or_another_rounding(layout, monkeypatch):
    monkeypatch.setattr(projection, "_BLOCK_NUMBERS", 1000)
    thin = rounded(factor(33))
    for dtype in (torch.bfloat16, torch.float16):
        W = weights()
        expected = hands(W, thin)
        served = {name: torch.full_like(w, 9, dtype=dtype) for name, w in W.items()}
        slots = []
        for name in W:
            for slot in shards(name, W[name], *LAYOUTS[layout]):
                part = served[name][slot.rows, slot.columns]
                slots.append(Slot(name, slot.weight, slot.rows, slot.columns, part))
        apply(thin, slots)
        for name, w in expected.items():
            assert same(W[name], w)
            if dtype == torch.bfloat16:
                found = served[name].view(torch.int16).numpy().view(np.uint16)
                assert np.array_equal(found, bfloat16_bits(w))
            else:
                assert np.array_equal(served[name].numpy(), w.numpy().astype(np.float16))


class Created(TorchDispatchMode):
    """Bytes of the largest storage that an operation made."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = inside(self, func, args, kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        old = {x.untyped_storage().data_ptr() for x in given}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in old:
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return out


@pytest.mark.usefixtures("_arithmetic")
@pytest.mark.parametrize("r", [8, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_catches_a_dense_update_and_a_cast_of_the_weight(dtype, r):
    """W has 1.6 M entries, six blocks of them; the factor at r = 512 has twice a block."""
    layer = ThinLayer("x", 1031, 1543, "x")
    W = torch.zeros(1031, 1543, dtype=dtype)
    served = torch.zeros_like(W, dtype=torch.bfloat16)
    thin = rounded(torch.randn(1031, r, generator=torch.Generator().manual_seed(0)), [layer])
    with Created() as created:
        apply(thin, [Slot.whole("x", W, served)])
    bound = max(4 * projection._BLOCK_NUMBERS, 4 * 1031 * r)
    assert 0 < created.largest <= bound < 2 * W.numel()
    with Created() as created:  # negative control: the product of the whole matrix
        torch.mm(torch.ones(1031, 1), torch.ones(1, 1543))
    assert created.largest > bound


def broken_slots(W):
    """Slots of three layers whose second cannot be written, and why."""
    served = torch.zeros(5, 151, dtype=torch.bfloat16)
    k, good = W["m.k"], slice(0, 5)
    return {
        "unknown layer": Slot.whole("m.v", k),
        "fewer rows": Slot.whole("m.k", k[:4].T),
        "more columns": Slot("m.k", torch.zeros(5, 152), good, slice(0, 152)),
        "rows outside": Slot("m.k", k, slice(1, 6), slice(0, 151)),
        "rows from the end": Slot("m.k", k, slice(-5, 0), slice(0, 151)),
        "no rows": Slot("m.k", k[:0], slice(2, 2), slice(0, 151)),
        "weight of another shape": Slot("m.k", k[:, :150], good, slice(0, 151)),
        "served of another shape": Slot("m.k", k, good, slice(0, 151), served[:, :150]),
        "weight is the transpose": Slot("m.k", k.T, good, slice(0, 151)),
    }


@pytest.mark.parametrize("fault", broken_slots(weights()))
def test_second_of_three_slots_catches_a_check_after_the_first_write(fault):
    thin = rounded(factor(33))
    W = weights()
    before = copies(W)
    slot = broken_slots(W)[fault]
    with pytest.raises(ShapeMismatch, match=r"m\.[kv]"):
        apply(thin, [Slot.whole("m.q", W["m.q"]), slot, Slot.whole("m.o", W["m.o"])])
    assert all(same(W[name], before[name]) for name in W)


def test_an_update_of_a_part_of_the_layers_catches_writes_elsewhere():
    thin = rounded(factor(33))
    W = weights()
    expected = W | {"m.k": by_hand(W["m.k"], thin, LAYERS[1])}
    before = copies(W)
    apply(thin, [Slot("m.k", W["m.k"][1:3], slice(1, 3), slice(0, 151))])
    assert same(W["m.q"], before["m.q"])
    assert same(W["m.o"], before["m.o"])
    assert same(W["m.k"][1:3], expected["m.k"][1:3])
    assert same(W["m.k"][[0, 3, 4]], before["m.k"][[0, 3, 4]])


@pytest.mark.parametrize(("wire", "size"), [("int8", 1), ("bfloat16", 2), ("float32", 4)])
def test_payload_bytes_catch_forgotten_exponents(wire, size):
    shapes = [(x.d, x.k) for x in LAYERS]
    expected = 29 * (33 * size + (wire == "int8"))
    assert payload_bytes(shapes, 33, wire) == rounded(factor(33), wire=wire).nbytes == expected
