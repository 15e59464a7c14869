"""A is a pure function of (seed, draw, path), the same to the bit everywhere."""

import hashlib
import json
import math
import random
import runpy
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from logra_lab.errors import InputError
from logra_lab.philox import key_of, philox4x32
from logra_lab.projection import Projection, canonical_path

HERE = Path(__file__).parent
reference = runpy.run_path(str(HERE / "reference.py"))
# Random123's known-answer vectors (kat_vectors, philox4x32 with 10 rounds).
VECTORS = json.loads((HERE / "philox.json").read_text())["vectors"]


def words(texts):
    return [int(text, 16) for text in texts]


@pytest.mark.parametrize("vector", VECTORS)
def test_known_answers_catch_another_generator_round_count_or_word_order(vector):
    counter, key, out = (words(vector[name]) for name in ("counter", "key", "out"))
    assert philox4x32(torch.tensor(counter), tuple(key)).tolist() == out
    assert reference["philox"](counter, key) == out  # so the reference may judge the rest


def test_random_counters_catch_lost_carries_of_the_signed_64_bit_product():
    rng = random.Random(1)
    key = (rng.getrandbits(32), rng.getrandbits(32))
    counters = [[rng.getrandbits(32) for _ in range(4)] for _ in range(200)]
    got = philox4x32(torch.tensor(counters).T.contiguous(), key).T.tolist()
    assert got == [reference["philox"](c, key) for c in counters]


def test_tensor_keys_catch_a_key_that_is_not_broadcast_per_counter():
    counter = torch.arange(12).reshape(4, 3)
    keys = (torch.tensor([1, 2**32 - 1, 7]), torch.tensor([5, 6, 2**31]))
    got = philox4x32(counter, keys).T.tolist()
    words_and_keys = torch.cat([counter, torch.stack(keys)]).T.tolist()
    assert got == [reference["philox"](row[:4], row[4:]) for row in words_and_keys]


@pytest.mark.parametrize("text", ["0:1:model.layers.0.self_attn.q_proj", "", "σ"])
def test_key_catches_big_endian_or_swapped_words(text):
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    value = int.from_bytes(digest, "little")
    assert key_of(text) == (value % 2**32, value // 2**32)


def test_key_of_a_projection_catches_another_order_of_seed_draw_path():
    assert Projection("a.b", 8, 2, seed=3, draw=5).key == key_of("3:5:a.b")


@pytest.mark.parametrize(("r", "k"), [(1, 1), (3, 7), (32, 40), (33, 35), (128, 130), (150, 151)])
def test_signs_catch_a_wrong_bit_word_block_or_scale(r, k):
    """Every element, for ranks on and off the borders of words (32) and calls (128)."""
    A = Projection("layers.0.q_proj", k, r, seed=7, draw=2).matrix(torch.float64)
    expected = reference["matrix"](r, k, seed=7, draw=2, path="layers.0.q_proj")
    assert A.shape == (r, k)
    assert torch.equal(A.sign(), expected.sign())
    torch.testing.assert_close(A, expected, rtol=1e-15, atol=0)


def test_signs_of_a_large_layer_catch_an_index_that_wraps_or_a_shared_block():
    r, k = 700, 4099
    unit = Projection("m", k, r, seed=1, draw=9).unit()
    rng = random.Random(2)
    for _ in range(300):
        i, j = rng.randrange(r), rng.randrange(k)
        assert unit[i, j] == reference["sign"](i, j, seed=1, draw=9, path="m"), (i, j)


def test_columns_near_two_to_the_32_catch_counters_held_in_signed_32_bits():
    top = 2**32
    packed = Projection("m", 300, 200, seed=1).words_of(top - 3, top).long() & 0xFFFFFFFF
    assert packed.shape == (math.ceil(200 / 32), 3)
    for i in (0, 31, 32, 127, 128, 160, 199):
        for n in range(3):
            bit = (packed[i // 32, n].item() >> (i % 32)) & 1
            expected = reference["sign"](i, top - 3 + n, seed=1, draw=0, path="m")
            assert 2 * bit - 1 == expected


@pytest.mark.parametrize("kind", ["sign", "gaussian"])
def test_prefix_catches_numbers_that_depend_on_rank_or_width(kind):
    big = Projection("m", 50, 48, kind=kind).unit(torch.float64)
    for r, k in [(47, 50), (33, 49), (32, 48), (1, 3)]:
        if r <= k:
            small = Projection("m", k, r, kind=kind).unit(torch.float64)
            assert torch.equal(small, big[:r, :k])


def test_slices_catch_columns_counted_from_the_start_of_the_slice():
    whole = Projection("m", 90, 64)
    assert torch.equal(whole.words_of(17, 61), whole.words[:, 17:61])
    assert whole.words_of(5, 5).shape == (2, 0)


def test_draw_seed_and_path_catch_a_projection_that_is_never_redrawn():
    """Two independent sign matrices agree in half the places: 10⁴ signs, σ = 0.005, band 4 σ."""
    base = Projection("m", 100, 100, seed=0, draw=1).unit()
    for other in (
        Projection("m", 100, 100, seed=0, draw=2),
        Projection("m", 100, 100, seed=1, draw=1),
        Projection("n", 100, 100, seed=0, draw=1),
    ):
        agree = (base == other.unit()).double().mean().item()
        assert abs(agree - 0.5) < 4 * 0.005
    assert torch.equal(base, Projection("m", 100, 100, seed=0, draw=1).unit())


def test_balance_catches_a_bit_that_is_constant_or_repeated():
    """Mean of n fair signs has σ = 1/√n; rows, columns and neighbours, bands of 5 σ.

    512 rows, 1024 columns: P(any of 1,536 means beyond 5 σ) < 1e-3, and the seed is fixed.
    """
    r, k = 512, 1024
    unit = Projection("m", k, r, seed=3).unit(torch.float64)
    assert abs(unit.mean()) < 5 / math.sqrt(r * k)
    assert unit.mean(1).abs().max() < 5 / math.sqrt(k)
    assert unit.mean(0).abs().max() < 5 / math.sqrt(r)
    for step in (1, 32, 128):  # bit, word and call neighbours are independent
        assert abs((unit[step:] * unit[:-step]).mean()) < 5 / math.sqrt((r - step) * k)


def test_gaussian_moments_catch_uniform_entries_or_a_missing_square_root():
    """n = 262,144 normals: mean σ 1/√n, variance σ √(2/n), 4th moment σ √(96/n); bands of 4 σ."""
    r, k = 256, 1024
    x = Projection("m", k, r, seed=5, kind="gaussian").unit(torch.float64)
    n = r * k
    assert abs(x.mean()) < 4 / math.sqrt(n)
    assert abs(x.square().mean() - 1) < 4 * math.sqrt(2 / n)
    assert abs(x.pow(4).mean() - 3) < 4 * math.sqrt(96 / n)
    for step in (1, 2, 4):  # the two halves of Box–Muller and neighbouring calls
        assert abs((x[step:] * x[:-step]).mean()) < 4 / math.sqrt((r - step) * k)
    assert torch.isfinite(x).all()


def test_gaussians_catch_the_stream_of_the_signs_or_an_unscaled_logarithm():
    """Box–Muller on the words of domain 2, one column by hand."""
    p = Projection("m", 9, 4, seed=1, draw=2, kind="gaussian")
    u = [(w + 0.5) / 2**32 for w in reference["philox"]((6, 0, 2, 1), key_of("1:2:m"))]
    radius = [math.sqrt(-2 * math.log(u[0])), math.sqrt(-2 * math.log(u[2]))]
    angle = [2 * math.pi * u[1], 2 * math.pi * u[3]]
    expected = [f(a) * q for q, a in zip(radius, angle, strict=True) for f in (math.cos, math.sin)]
    column = p.unit(torch.float64)[:, 6]
    torch.testing.assert_close(
        column, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("kind", ["sign", "gaussian"])
def test_project_gram_and_subtract_catch_a_missing_or_doubled_scale(kind):
    """Against products with the scalar contract's A (signs), or with the matrix itself."""
    r, k, d = 5, 11, 3
    p = Projection("m", k, r, seed=2, draw=4, kind=kind)
    A = p.matrix(torch.float64)
    if kind == "sign":
        A = reference["matrix"](r, k, seed=2, draw=4, path="m")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, k, dtype=torch.float64, generator=g)
    W = torch.randn(d, k, dtype=torch.float64, generator=g)
    U = torch.randn(d, r, dtype=torch.float64, generator=g)
    torch.testing.assert_close(p.project(x), x @ A.T, rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(p.gram(torch.float64), A @ A.T, rtol=1e-13, atol=1e-14)
    expected = [W - U @ A, 2 * W - U[:2].sum(0) @ A]
    weights = [W, 2 * W]
    F = U / r**0.5  # folded, so that the signs are applied as ±1
    both = [(weights[0], F, None, None), (weights[1], F[:2].sum(0).expand(d, r), None, None)]
    p.subtract_(both)  # one A, two readers
    for weight, value in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, value, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_units_catch_signs_that_are_not_exact_in_a_narrow_type(dtype):
    unit = Projection("m", 70, 40).unit(dtype)
    assert unit.dtype == dtype
    assert torch.equal(unit.double(), Projection("m", 70, 40).unit(torch.float64))
    assert torch.equal(unit.double().abs(), torch.ones(40, 70, dtype=torch.float64))


def test_fake_tensors_catch_kept_signs_that_are_fake_or_met_by_fake_ones():
    p = Projection("m", 40, 9)
    with FakeTensorMode():
        assert p.unit().shape == (9, 40)
    assert torch.equal(p.unit(), Projection("m", 40, 9).unit())
    with FakeTensorMode():
        W = torch.empty(3, 40)
        p.subtract_([(W, torch.empty(3, 9), None, None)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gram_catches_sums_in_a_narrow_type(dtype):
    """Column sums beyond 2^8 and 2^11, over several blocks, and a diagonal beyond 65504."""
    p = Projection("m", 70_000, 5)
    integers = p.unit(torch.float64) @ p.unit(torch.float64).T
    assert torch.equal(p.gram(dtype), (integers.float() * (1 / 5)).to(dtype))


def test_unit_catches_a_cached_tensor_that_callers_can_modify():
    p = Projection("m", 40, 9)
    p.unit().zero_()
    p.matrix().zero_()
    assert torch.equal(p.unit(), Projection("m", 40, 9).unit())


@pytest.mark.parametrize(
    "wrapped",
    [
        "_orig_mod.model.layers.0.q_proj",
        "model.layers.0._checkpoint_wrapped_module.q_proj",
        "_fsdp_wrapped_module.model._orig_mod.layers.0._fsdp_wrapped_module.q_proj",
        "model.layers.0.q_proj._orig_mod",
    ],
)
def test_canonical_path_catches_a_wrapper_that_changes_the_signs(wrapped):
    assert canonical_path(wrapped) == "model.layers.0.q_proj"


def test_canonical_path_catches_removal_of_ordinary_parts():
    assert canonical_path("model.my_orig_mod.x_fsdp_wrapped_module") == (
        "model.my_orig_mod.x_fsdp_wrapped_module"
    )


@pytest.mark.parametrize("rank", [0, -1, 9])
def test_rank_catches_a_projection_that_cannot_exist(rank):
    with pytest.raises(InputError, match=rf"rank {rank} .*'layer\.7'.*1 ≤ rank ≤ 8"):
        Projection("layer.7", 8, rank)


def test_kind_catches_a_typing_error():
    with pytest.raises(InputError, match=r"'rademacher'.*sign.*gaussian"):
        Projection("m", 8, 2, kind="rademacher")
