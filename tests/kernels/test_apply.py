"""The kernel that applies an update gives the bits of the definition, whatever the layout."""

import runpy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from logra_lab.errors import InputError
from logra_lab.philox import key_of
from logra_lab.sync.update import Slot, ThinUpdate
from logra_lab.sync.update import apply as torch_apply
from logra_lab.sync.wire import ThinLayer

apply = pytest.importorskip("logra_lab.kernels.apply", reason="needs the triton package")
HERE = Path(__file__).parent
independent = runpy.run_path(str(HERE / "independent.py"))
KEY = key_of("7:2:layers.0.q_proj")
SMALL = (16, 16)
GUARD = 3  # entries around every tensor that the kernel must neither read nor write


def guarded(x, fill, step=(1, 1), device="cpu"):
    """A view equal to x, its neighbours in memory all `fill`; and that memory."""
    sizes = [n * s + 2 * GUARD for n, s in zip(x.shape, step, strict=False)]
    memory = torch.full(sizes, fill, dtype=x.dtype, device=device)
    cuts = tuple(slice(GUARD, GUARD + n * s, s) for n, s in zip(x.shape, step, strict=False))
    memory[cuts] = x.to(device)
    return memory[cuts], memory


def untouched(memory, view, fill):
    """Whether all of `memory` except `view` still holds the bits of `fill`."""
    outside = torch.ones_like(memory, dtype=torch.bool)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    rest = memory[outside]
    return torch.equal(bits(rest), bits(torch.full_like(rest, fill)))


def draw(d, k, r, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(d, k, generator=g) * 0.02
    values = torch.randint(-127, 128, (d, r), generator=g, dtype=torch.int8)
    exponents = torch.randint(-24, -10, (d,), generator=g, dtype=torch.int8)
    return weight, values, exponents


def defined(weight, values, exponents, key, start=0):
    columns = slice(start, start + weight.shape[1])
    arrays = (x.float().numpy() if x.is_floating_point() else x.numpy() for x in (weight, values))
    return torch.from_numpy(independent["applied"](*arrays, exponents.numpy(), key, columns))


def bits(x):
    return x.cpu().contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


@pytest.mark.parametrize(
    ("d", "k", "r"),
    [
        (1, 1, 1),
        (7, 5, 3),
        (17, 16, 32),  # one row past a block
        (16, 17, 31),
        (13, 37, 33),  # one sign past a word
        (19, 23, 96),
        (5, 41, 127),
        (31, 29, 128),  # one Philox call
        (11, 13, 129),
        (3, 7, 300),
        (2, 3, 512),
        (0, 8, 8),
        (8, 0, 8),
    ],
)
def test_bits_are_the_definitions_and_nothing_beside_the_tensors_is_read_or_written(
    machine, d, k, r
):
    weight, values, exponents = draw(d, k, r)
    # A stray read turns the weight to NaN or adds 128·2^100; a stray write clears the fill.
    W, W_memory = guarded(weight, torch.nan, device=machine.device)
    F, _ = guarded(values, -128, device=machine.device)
    e, _ = guarded(exponents, 100, device=machine.device)
    served, served_memory = guarded(weight.bfloat16() * 0, 55, device=machine.device)
    machine.run(apply.launch, W, F, e, KEY, 1000, served, blocks=SMALL)
    want = defined(weight, values, exponents, KEY, 1000)
    assert torch.equal(bits(W), bits(want))
    assert torch.equal(bits(served), bits(want.bfloat16()))
    assert untouched(W_memory, W, torch.nan)
    assert untouched(served_memory, served, 55)
    if weight.numel():
        assert torch.equal(bits(apply.reference(weight, values, exponents, KEY, 1000)), bits(want))


# How the weight, the served copy, the values and the exponents lie in memory.
LAYOUTS = ["transposed", "every second column", "every third row", "dense"]


@pytest.mark.parametrize("turn", range(len(LAYOUTS)))
def test_bits_catch_strides_that_are_taken_for_granted_or_for_each_others(machine, turn):
    weight, values, exponents = draw(19, 21, 37)

    def lay(x, fill, number):
        layout = LAYOUTS[(turn + number) % len(LAYOUTS)]
        if layout == "transposed" and x.dim() == 2:
            view, memory = guarded(x.T, fill, device=machine.device)
            return view.T, memory.T
        step = {"every second column": (1, 2), "every third row": (3, 1)}.get(layout, (1, 1))
        return guarded(x, fill, step, machine.device)

    W, W_memory = lay(weight, torch.nan, 0)
    served, served_memory = lay(weight.half() * 0, 55, 1)
    (F, _), (e, _) = lay(values, -128, 2), lay(exponents, 100, 3)
    machine.run(apply.launch, W, F, e, KEY, 0, served, blocks=SMALL)
    want = defined(weight, values, exponents, KEY)
    assert torch.equal(bits(W), bits(want))
    assert torch.equal(bits(served), bits(want.half()))
    assert untouched(W_memory, W, torch.nan)
    assert untouched(served_memory, served, 55)


@pytest.mark.parametrize("blocks", [(16, 16), (16, 64), (32, 32)])
def test_every_cut_and_block_gives_the_bits_of_the_whole(machine, blocks):
    d, k, r = 29, 43, 67
    weight, values, exponents = draw(d, k, r)
    want = defined(weight, values, exponents, KEY)
    W, F, e = (x.to(machine.device) for x in (weight.clone(), values, exponents))
    for rows in (slice(0, 11), slice(11, d)):  # shards of rows, then columns cut anywhere
        for columns in (slice(0, 1), slice(1, 18), slice(18, k)):
            part = W[rows, columns]
            machine.run(apply.launch, part, F[rows], e[rows], KEY, columns.start, blocks=blocks)
    assert torch.equal(bits(W), bits(want))


def test_columns_to_the_last_of_32_bits_catch_signed_counters(machine):
    weight, values, exponents = draw(3, 20, 5)
    for start in (2**31 - 10, 2**32 - 20):
        W = weight.clone().to(machine.device)
        F, e = values.to(machine.device), exponents.to(machine.device)
        machine.run(apply.launch, W, F, e, KEY, start, blocks=SMALL)
        assert torch.equal(bits(W), bits(defined(weight, values, exponents, KEY, start)))


def test_sums_beyond_16_bits_catch_a_narrow_accumulator(machine):
    r = 2048
    signs = torch.from_numpy(independent["signs"](KEY, slice(0, r), slice(0, 3)))
    values = (127 * signs[:, :1].T).to(torch.int8)  # column 0 sums to 127·r = 260,096
    values[0, 0] -= values[0, 0].sign()  # and odd numbers need every bit: 260,095
    exponents = torch.tensor([-18], dtype=torch.int8)
    W = torch.zeros(1, 3, device=machine.device)
    F, e = values.to(machine.device), exponents.to(machine.device)
    machine.run(apply.launch, W, F, e, KEY, blocks=SMALL)
    assert W[0, 0].item() == -(127 * r - 1) / 2**18
    assert torch.equal(bits(W), bits(defined(torch.zeros(1, 3), values, exponents, KEY)))


def test_powers_of_two_are_exact_over_the_range_of_exponents(machine):
    exponents = torch.arange(-126, 101, dtype=torch.int8)
    values = torch.full((len(exponents), 1), 127, dtype=torch.int8)
    W = torch.zeros(len(exponents), 1, device=machine.device)
    F, e = values.to(machine.device), exponents.to(machine.device)
    machine.run(apply.launch, W, F, e, KEY, blocks=(64, 16))
    sign = int(independent["signs"](KEY, slice(0, 1), slice(0, 1))[0, 0])
    assert W.flatten().tolist() == [-sign * 127 * 2.0 ** int(n) for n in exponents]


def corners(dtype):
    """float32 numbers around every kind of rounding to 16 bits: ties, carries, limits, NaN."""
    shift = {torch.bfloat16: 16, torch.float16: 13}[dtype]
    exponents = [0, 1, 100, 102, 103, 112, 113, 126, 127, 142, 143, 200, 254]
    mantissas = [0, 1, (1 << 23 - shift) - 1]  # even, odd, all ones: the carry moves the exponent
    half = 1 << shift - 1
    words = [
        e << 23 | m << shift | low
        for e in exponents
        for m in mantissas
        for low in (0, 1, half - 1, half, half + 1, 2 * half - 1)
    ]
    words += [0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
    magnitudes = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    return torch.stack([magnitudes, -magnitudes])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_served_cast_rounds_ties_to_even_and_keeps_infinity_and_nan(machine, dtype):
    weight = corners(dtype)
    W = weight.clone().to(machine.device)
    served = torch.empty_like(W, dtype=dtype)
    F = torch.zeros(2, 1, dtype=torch.int8, device=machine.device)  # the product is 0
    e = torch.zeros(2, dtype=torch.int8, device=machine.device)
    machine.run(apply.launch, W, F, e, KEY, 0, served, blocks=(16, 64))
    want = weight.to(dtype)  # IEEE 754 round to nearest, ties to even, by torch's CPU cast
    numbers = ~want.isnan()
    assert torch.equal(served.isnan().cpu(), want.isnan())
    assert torch.equal(bits(served)[numbers], bits(want)[numbers])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_of_16_bits_is_widened_exactly(machine, dtype):
    """Every number of the type, less a product of 0, is itself: the subnormal ones too."""
    weight = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype).view(64, 1024)
    W = weight.clone().to(machine.device)
    F = torch.zeros(64, 1, dtype=torch.int8, device=machine.device)
    e = torch.zeros(64, dtype=torch.int8, device=machine.device)
    machine.run(apply.launch, W, F, e, KEY, blocks=(64, 256))
    numbers = ~weight.isnan()
    assert torch.equal(W.isnan().cpu(), weight.isnan())
    assert torch.equal(bits(W)[numbers], bits(weight)[numbers])


@pytest.mark.parametrize("served", [None, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_several_updates_in_a_row_give_the_bits_of_the_torch_path(machine, dtype, served):
    d, k, r = 23, 30, 19
    torch.manual_seed(3)
    one = Slot.whole("m", torch.randn(d, k).to(dtype), served and torch.zeros(d, k, dtype=served))
    W = one.weight.clone().to(machine.device)
    copy = served and torch.zeros(d, k, dtype=served, device=machine.device)
    for step in range(3):
        update = ThinUpdate.round(
            torch.randn(d, r) * 0.1,
            [ThinLayer("m", d, k, "m")],
            run="t",
            base=step,
            seed=1,
            draw=step,
        )
        torch_apply(update, [one])
        key = update.projection(update.layers[0]).key
        F, e = update.values.to(machine.device), update.exponents.to(machine.device)
        machine.run(apply.launch, W, F, e, key, 0, copy, blocks=SMALL)
        assert torch.equal(bits(W), bits(one.weight))
        if served is not None:
            assert torch.equal(bits(copy), bits(one.served))


# --- fake tensors, torch.compile, tensors of engines, tangents ---

LAYERS = [ThinLayer("q", 6, 20, "q"), ThinLayer("k", 4, 20, "q"), ThinLayer("o", 5, 20, "o")]


def update_of(wire="int8", r=9):
    torch.manual_seed(4)
    U = torch.randn(sum(x.d for x in LAYERS), r) * 0.1
    return ThinUpdate.round(U, LAYERS, run="t", base=0, seed=1, draw=2, wire=wire)


def slots_of(dtype=torch.bfloat16):
    """Weights of float32 with served copies; two layers share one A, one is a shard."""
    g = torch.Generator().manual_seed(5)
    cuts = {"q": slice(0, 20), "k": slice(0, 20), "o": slice(7, 18)}
    slots = []
    for layer in LAYERS:
        W = torch.randn(layer.d, cuts[layer.name].stop - cuts[layer.name].start, generator=g)
        served = None if layer.name == "k" else torch.zeros_like(W, dtype=dtype)
        slots.append(Slot(layer.name, W, slice(0, layer.d), cuts[layer.name], served))
    return slots


def written(slots):
    return [x for slot in slots for x in (slot.weight, slot.served) if x is not None]


@pytest.mark.parametrize("wire", ["int8", "float32"])
def test_fake_tensors_pass_and_keep_their_shapes(wire):
    update, slots = update_of(wire), slots_of()
    with FakeTensorMode() as mode:

        def made(x, *names):
            found = {name: getattr(x, name) for name in names}
            return replace(
                x, **{n: t if t is None else mode.from_tensor(t) for n, t in found.items()}
            )

        fake = made(update, "values", "exponents")
        fakes = [made(slot, "weight", "served") for slot in slots]
        torch_apply(fake, fakes)
    for real, fake in zip(written(slots), written(fakes), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("wire", ["int8", "float32"])
def test_compiled_in_one_graph_the_bits_are_the_eager_ones_and_written_where_seen(wire):
    update, eager, slots = update_of(wire), slots_of(), slots_of()
    torch_apply(update, eager)

    def step(slots):
        before = slots[0].weight.sum()
        torch_apply(update, slots)
        return before, slots[0].weight * 2

    before, after = torch.compile(step, fullgraph=True, backend="aot_eager")(slots)
    for one, two in zip(written(slots), written(eager), strict=True):
        assert torch.equal(bits(one), bits(two))
    assert before == slots_of()[0].weight.sum()
    assert torch.equal(after, 2 * eager[0].weight)


def test_the_operator_keeps_the_rules_of_torch():
    update, slots = update_of(), slots_of()
    args = (
        [x.weight for x in slots[:2]],
        [update.values[:6], update.values[6:10]],
        [update.exponents[:6], update.exponents[6:10]],
        [torch.zeros(x.weight.shape) for x in slots[:2]],
        *(0, 20, "q", 20, 9, 1, 2, "sign"),
    )
    torch.library.opcheck(torch.ops.logra_lab.apply.default, args)


def by_kernel_in_inference_mode(update, engine):
    """Under no_grad, in a process that takes the kernel; W and its copy made as an engine does."""
    import os

    calls, launch = [], apply.launch
    apply.launch = lambda *x: calls.append(1) or launch(*x, blocks=SMALL)
    os.environ["LOGRA_LAB_KERNELS"] = "triton"
    try:
        with torch.inference_mode(engine):
            slots = slots_of()
        versions = [0 if engine else x._version for x in written(slots)]
        torch_apply(update, slots)
        return (
            written(slots),
            len(calls),
            engine or [x._version > v for x, v in zip(written(slots), versions, strict=True)],
        )
    finally:
        del os.environ["LOGRA_LAB_KERNELS"]
        apply.launch = launch


@pytest.mark.parametrize("engine", [True, False])
def test_the_kernel_writes_tensors_without_versions_and_gives_others_a_new_one(interpreted, engine):
    """`mutates_args` of a custom operator would refuse those that inference mode has made."""
    scope = {"path": __file__, "update": update_of(), "engine": engine, "run": runpy.run_path}
    code = "run(path)['by_kernel_in_inference_mode'](update, engine)"
    got, calls, bumped = interpreted(eval, code, scope)
    eager = slots_of()
    torch_apply(update_of(), eager)
    assert calls == 3
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, written(eager), strict=True))
    assert engine or all(bumped)


def test_the_torch_path_writes_tensors_of_inference_mode_inside_it():
    eager = slots_of()
    torch_apply(update_of(), eager)
    with torch.inference_mode():
        slots = slots_of()
        torch_apply(update_of(), slots)
    assert all(
        torch.equal(bits(a), bits(b)) for a, b in zip(*map(written, (slots, eager)), strict=True)
    )


@pytest.mark.parametrize("which", ["weight", "factor"])
def test_a_tangent_that_would_be_dropped_is_refused(which):
    """W, and the factor of a float wire, are all that could have one."""
    update, slot = update_of("float32"), slots_of()[0]
    before = slot.weight.clone()

    def step(x):
        moved = {"weight": slot.weight, "factor": update.values, which: x * 1}
        torch_apply(
            replace(update, values=moved["factor"]), [replace(slot, weight=moved["weight"])]
        )
        return moved["weight"]

    x = {"weight": slot.weight, "factor": update.values}[which]
    with pytest.raises(InputError, match="an update has none"):
        torch.func.jvp(step, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(InputError, match="an update has none"):
        step(forward_ad.make_dual(x, torch.ones_like(x)))
    assert torch.equal(slot.weight, before)


@pytest.mark.parametrize("which", ["weight", "served"])
def test_an_expanded_tensor_is_refused_before_either_path_writes(which):
    update, slot = update_of(), slots_of()[0]
    before = slot.weight.clone()
    expanded = {which: getattr(slot, which)[:1].expand(6, 20)}
    with pytest.raises(InputError, match="share memory"):
        torch_apply(update, [replace(slot, **expanded)])
    assert torch.equal(slot.weight, before)


WRONG = {
    r"a weight \[rows, columns\]": {"weight": torch.zeros(4)},
    "a weight in one of": {"weight": torch.zeros(4, 6, dtype=torch.float64)},
    "a weight that is not expanded": {"weight": torch.zeros(1, 6).expand(4, 6)},
    "a served copy that is not expanded": {"served": torch.zeros(4, 1).expand(4, 6)},
    "values and exponents in int8": {"values": torch.zeros(4, 3)},
    r"values \[4, r\] and exponents \[4\]": {"exponents": torch.zeros(3, dtype=torch.int8)},
    r"a rank in 1\.\.65536": {"values": torch.zeros(4, 0, dtype=torch.int8)},
    r"columns inside 0:2\*\*32": {"column_start": 2**32 - 5},
    "a served copy in one of": {"served": torch.zeros(4, 6, dtype=torch.float64)},
    r"a served copy \[4, 6\]": {"served": torch.zeros(6, 4)},
    "tensors on one device": {"served": torch.zeros(4, 6, device="meta")},
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_named_before_anything_is_written(message):
    weight, values, exponents = draw(4, 6, 3)
    good = {"weight": weight, "values": values, "exponents": exponents, "key": KEY}
    before = weight.clone()
    with pytest.raises(InputError, match=message):
        apply.launch(**good | WRONG[message])
    assert torch.equal(weight, before)


def test_tensors_without_a_gpu_are_refused_with_the_way_out():
    weight, values, exponents = draw(4, 6, 3)
    with pytest.raises(InputError, match=r"got tensors on 'cpu'.*use the torch path"):
        apply.launch(weight, values, exponents, KEY)


@pytest.mark.parametrize(
    ("architecture", "served", "product"),
    [(80, None, "mma.sync"), (90, "*bf16", "wgmma.mma_async")],
)
def test_it_compiles_to_integer_tensor_core_products(build, architecture, served, product):
    types = {"weight": "*fp32", "values": "*i8", "exponents": "*i8", "key": "u64", "column0": "i64"}
    fixed = {"weight_column": 1, "values_column": 1, "exponents_row": 1, "TAIL": 2}
    fixed |= {"ROWS": apply.BLOCKS[0], "COLUMNS": apply.BLOCKS[1]}
    if served:
        types["served"], fixed["served_column"] = served, 1
    else:
        fixed["served"] = None
    ptx = build(apply._apply, architecture, types, fixed)
    assert product in ptx
    assert ".s32.s8.s8" in ptx
    assert "ex2" not in ptx  # an approximate 2^e would not be exact
    assert ".ftz" not in ptx  # small numbers are not flushed to zero, as they are not in torch


@pytest.mark.gpu
def test_a_real_shape_gives_the_bits_of_the_torch_path():
    d, k, r = 1111, 2051, 256
    weight, values, exponents = draw(d, k, r)
    W, F, e = weight.cuda(), values.cuda(), exponents.cuda()
    served = torch.empty_like(W, dtype=torch.bfloat16)
    apply.launch(W, F, e, KEY, 5, served)
    want = defined(weight, values, exponents, KEY, 5)
    assert torch.equal(bits(W), bits(want))
    assert torch.equal(bits(served), bits(want.bfloat16()))
