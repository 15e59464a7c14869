"""torch, numpy and Triton draw the same signs and rounding bits, for any slice."""

import json
import runpy
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from logra_lab.errors import InputError
from logra_lab.philox import key_of, rounding_words
from logra_lab.projection import Projection

signs = pytest.importorskip("logra_lab.kernels.signs", reason="needs the triton package")
HERE = Path(__file__).parent
independent = runpy.run_path(str(HERE / "independent.py"))
guards = runpy.run_path(str(HERE / "guards.py"))
VECTORS = json.loads((HERE.parent / "philox.json").read_text())["vectors"]  # Random123's
TOP = 1 << 32
# Keys whose halves reach the top of 32 bits: a signed or swapped word would show.
KEYS = [key_of("7:2:m"), (0, 0), (0xFFFFFFFF, 0xFFFFFFFF), (0, 0x80000000), (0x80000000, 1)]


@pytest.mark.parametrize("vector", VECTORS)
def test_the_judge_gives_the_known_answers(vector):
    counter, key, out = ([int(w, 16) for w in vector[x]] for x in ("counter", "key", "out"))
    assert independent["philox"](counter, key).tolist() == out


def expected(key, rows, columns):
    return torch.from_numpy(independent["signs"](key, rows, columns)).to(torch.int8)


@pytest.mark.parametrize("key", KEYS)
def test_signs_catch_key_halves_that_are_swapped_or_signed(machine, key):
    rows, columns = slice(0, 131), slice(0, 5)
    got = machine.run(signs.launch, key, rows, columns, machine.device)
    assert torch.equal(got.cpu(), expected(key, rows, columns))


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(0, 1), slice(0, 1)),
        (slice(0, 512), slice(0, 37)),
        (slice(5, 131), slice(3, 40)),  # begins inside a word, ends in the next Philox call
        (slice(127, 129), slice(63, 65)),  # either side of a call and of a program
        (slice(0, 33), slice(2**31 - 3, 2**31 + 4)),  # where signed 32-bit columns turn negative
        (slice(2**31 - 3, 2**31 + 4), slice(0, 3)),
        (slice(TOP - 130, TOP), slice(TOP - 5, TOP)),  # the last of everything
    ],
)
def test_signs_of_a_slice_catch_offsets_counted_from_its_corner_and_signed_indices(
    machine, rows, columns
):
    key = key_of("7:2:m")
    want = expected(key, rows, columns)
    for width in (16, 64):
        got = machine.run(signs.launch, key, rows, columns, machine.device, width=width)
        assert torch.equal(got.cpu(), want)
    assert torch.equal(signs.reference(key, rows, columns), want)


@pytest.mark.parametrize("rank", [1, 31, 32, 33, 127, 128, 129, 257])
def test_signs_are_those_of_the_projection(machine, rank):
    projection = Projection("m", k=263, rank=rank, seed=7, draw=2)
    got = machine.run(signs.launch, projection.key, slice(0, rank), slice(0, 263), machine.device)
    assert torch.equal(got.cpu().float(), projection.unit())


@pytest.mark.parametrize(
    ("rows", "rank"),
    [
        (slice(0, 1), 1),
        (slice(3, 20), 67),  # neither a multiple of four columns nor of a program's rows
        (slice(2**31 - 2, 2**31 + 2), 5),
        (slice(TOP - 17, TOP), 130),
    ],
)
def test_rounding_bits_catch_the_domain_of_signs_and_words_out_of_order(machine, rows, rank):
    text = "7:3:layers.0.q_proj"
    got = machine.run(signs.launch_rounding, key_of(text), rows, rank, machine.device)
    want = torch.from_numpy(independent["rounding_words"](key_of(text), rows, rank))
    assert torch.equal(got.cpu(), want)
    assert torch.equal(rounding_words(text, rows, rank), want)


@pytest.mark.parametrize(
    ("rows", "columns"), [(slice(4, 4), slice(0, 3)), (slice(0, 2), slice(9, 9))]
)
def test_an_empty_slice_has_no_signs(machine, rows, columns):
    got = machine.run(signs.launch, (1, 2), rows, columns, machine.device)
    assert tuple(got.shape) == (rows.stop - rows.start, columns.stop - columns.start)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [(slice(-1, 2), slice(0, 2)), (slice(0, 2), slice(0, TOP + 1)), (slice(3, 2), slice(0, 2))],
)
def test_indices_beyond_32_bits_are_refused_since_they_would_repeat(machine, rows, columns):
    with pytest.raises(InputError, match=r"expected a part of 0:2\*\*32"):
        machine.run(signs.launch, (1, 2), rows, columns, machine.device)


# --- as an operator: `Projection.unit` ---


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
def test_the_kernel_draws_the_signs_of_a_projection_and_torch_those_of_gaussians(
    interpreted, forced, dtype
):
    fields = {"path": "m", "k": 45, "rank": 37, "seed": 7, "draw": 2}
    got = interpreted(Projection(**fields).unit, dtype)
    assert torch.equal(got, Projection(**fields).unit(dtype))
    assert (got.dtype, forced()) == (dtype, 1)
    if dtype.is_floating_point:
        normals = Projection(**fields, kind="gaussian")
        assert torch.equal(interpreted(normals.unit, dtype), normals.unit(dtype))
        assert forced() == 1


@pytest.fixture
def forced(interpreted):
    yield from guards["forcing"](interpreted, "signs", "launch")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_get_the_shape_type_and_device_of_the_signs(device):
    p = Projection("m", 40, 9)
    with FakeTensorMode():
        unit = p.unit(torch.bfloat16, device)
        assert (unit.shape, unit.dtype, unit.device.type) == ((9, 40), torch.bfloat16, device)
        assert p.matrix(device=device).shape == (9, 40)
    assert torch.equal(p.unit(), Projection("m", 40, 9).unit())


@pytest.mark.parametrize("kind", ["sign", "gaussian"])
def test_compiled_in_one_graph_the_signs_are_the_eager_ones(kind, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace it
    p, x = Projection("m", 40, 9, kind=kind), torch.randn(3, 40)
    whole = torch.compile(lambda x: x @ p.matrix().T, fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(x), x @ p.matrix().T)
    torch.library.opcheck(
        torch.ops.logra_lab.signs.default, (torch.float32, torch.device("cpu"), *p._fields)
    )


@pytest.mark.parametrize("name", ["_signs", "_rounding"])
def test_it_compiles(build, name):
    types = {"key": "u64", "row0": "i64", "column0": "i64"}
    types["out"] = {"_signs": "*i8", "_rounding": "*i64"}[name]
    fixed = {"_signs": {"WIDTH": 128}, "_rounding": {"ROWS": 16, "QUADS": 16}}[name]
    assert "mul.hi.u32" in build(getattr(signs, name), 90, types, fixed)  # Philox, in 32 bits
