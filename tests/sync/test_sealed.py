"""Sealed bytes and files, and the header of an update: what is written and what is refused.

Hostile payloads are sealed anew by `seal`, so that the digest is right and the checks behind it
have to refuse; what seals is checked against hashlib here.
"""

import hashlib
import json
import os
import pickle
import struct
import tracemalloc

import pytest
import safetensors
import safetensors.torch
import torch

from logra_lab.bench.mutations import MARK, fields_of, header_of, seal, split
from logra_lab.sync import sealed
from logra_lab.sync.errors import DigestMismatch, PayloadError, TornFile
from logra_lab.sync.update import ThinUpdate
from logra_lab.sync.wire import ThinLayer

LAYERS = (ThinLayer("q", 3, 8, "q"), ThinLayer("k", 2, 8, "q"), ThinLayer("o", 4, 11, "o"))
# d, k of the targets of a block of Qwen2.5-1.5B: hidden 1536, 2 KV heads of 128, inner 8960.
QWEN = {
    "self_attn.q_proj": (1536, 1536),
    "self_attn.k_proj": (256, 1536),
    "self_attn.v_proj": (256, 1536),
    "self_attn.o_proj": (1536, 1536),
    "mlp.gate_proj": (8960, 1536),
    "mlp.up_proj": (8960, 1536),
    "mlp.down_proj": (1536, 8960),
}


def thin(wire="int8", seed=0, layers=LAYERS, r=4, run="run", **rest):
    g = torch.Generator().manual_seed(seed)
    U = torch.randn(sum(x.d for x in layers), r, generator=g)
    arguments = {"base": 5, "seed": 1, "draw": 6, "wire": wire, "run": run} | rest
    return ThinUpdate.round(U, layers, **arguments)


WIRES = ("int8", "float32", "bfloat16", "float64")
DATA = {wire: thin(wire).to_bytes() for wire in WIRES}


def by_hashlib(data):
    """(digest in the bytes, SHA-256 of the bytes with 64 zeros in its place)."""
    at = data.index(MARK) + len(MARK)
    blank = data[:at] + b"0" * 64 + data[at + 64 :]
    return data[at : at + 64].decode(), hashlib.sha256(blank).hexdigest()


@pytest.mark.parametrize("wire", WIRES)
def test_round_trip_catches_a_lost_field_and_bytes_that_vary(wire):
    sent = thin(wire)
    data = sent.to_bytes()
    assert data == sent.to_bytes() == thin(wire).to_bytes() == DATA[wire]
    got = ThinUpdate.from_bytes(data)
    for name in ("run", "base", "version", "seed", "draw", "rank", "wire", "kind", "scheme"):
        assert getattr(got, name) == getattr(sent, name), name
    assert got.layers == LAYERS
    assert got.values.dtype == sent.values.dtype
    assert torch.equal(got.values, sent.values)
    assert (got.exponents is None) == (sent.exponents is None) == (wire != "int8")
    assert got.exponents is None or torch.equal(got.exponents, sent.exponents)
    assert got.to_bytes() == data
    assert got.digest == sent.digest == by_hashlib(data)[0] == by_hashlib(data)[1]


def test_any_change_catches_a_digest_that_leaves_something_out():
    changes = [{"run": "b"}, {"base": 6}, {"seed": 2}, {"draw": 5}, {"r": 3}, {"wire": "float32"}]
    changes += [{"layers": (ThinLayer("p", 3, 8, "p"), ThinLayer("k", 2, 8, "p"), LAYERS[2])}]
    changes += [{"layers": (LAYERS[0], ThinLayer("k", 2, 8, "k"), LAYERS[2])}]  # another site
    changes += [{"layers": (*LAYERS[:2], ThinLayer("o", 4, 12, "o"))}]
    assert len({thin(**change).digest for change in [{}, *changes]}) == 1 + len(changes)
    values, exponents = thin(), thin()
    values.values[8, 3] ^= 1
    exponents.exponents[8] += 1
    assert len({thin().digest, values.digest, exponents.digest}) == 3


@pytest.mark.parametrize("wire", WIRES)
def test_plain_safetensors_read_it(wire, tmp_path):
    """The values by the format's own reader, metadata included."""
    sent = thin(wire)
    tensors = safetensors.torch.load(DATA[wire])
    assert set(tensors) == ({"values", "exponents"} if wire == "int8" else {"values"})
    assert torch.equal(tensors["values"], sent.values)
    (tmp_path / "u").write_bytes(DATA[wire])
    with safetensors.safe_open(tmp_path / "u", "pt") as file:
        meta = json.loads(file.metadata()["logra_lab"])
    assert (meta["run"], meta["base"], meta["version"], meta["wire"]) == ("run", 5, 6, wire)
    assert next(iter(meta)) == "sha256"


def test_reading_catches_any_use_of_pickle(monkeypatch):
    """With a negative control: what torch.save wrote is pickle, and does trip the wire."""

    class Unpickled(BaseException):
        pass

    def refuse(*_, **__):
        raise Unpickled

    path = os.devnull
    for name in ("loads", "load", "Unpickler", "_loads", "_load", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    for wire in WIRES:
        assert ThinUpdate.from_bytes(DATA[wire]).wire == wire
        with pytest.raises(PayloadError):
            ThinUpdate.from_bytes(pickle.dumps(thin(wire).values))
    with pytest.raises(Unpickled):
        torch.load(path)


@pytest.mark.parametrize("prefix", ["model.layers.{}.", "m" * 47 + ".{}."])
def test_size_catches_a_header_of_more_than_256_bytes_a_layer(prefix):
    """Qwen2.5-1.5B at r = 256 from the real serializer: Σ d·(r + 1), 0.166 GB, and the header."""
    layers = []
    for block in range(28):
        for name, (d, k) in QWEN.items():
            site = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
            first = name
            for old, new in site.items():
                first = first.replace(old, new)
            path = prefix.format(block)
            layers.append(ThinLayer(path + name, d, k, path + first))
    rows = 28 * (2 * 1536 + 2 * 256 + 2 * 8960 + 1536)
    assert max(len(x.name) for x in layers) > 30
    # As `round` would make it, without drawing 166 million random words.
    update = ThinUpdate(
        *("run", 0, 1, 0, 1, 256, "int8", "sign", 1, tuple(layers)),
        values=torch.zeros(rows, 256, dtype=torch.int8),
        exponents=torch.zeros(rows, dtype=torch.int8),
    )
    size = len(update.to_bytes())
    assert rows * 257 < size < rows * 257 + 256 * len(layers)
    assert size / 1e9 == pytest.approx(0.166, abs=0.001)


def test_size_of_small_layers_catches_long_names_that_stand_twice():
    layers = [ThinLayer(f"{i:060}", 1, 1, f"{i:060}") for i in range(50)]
    size = len(thin(layers=layers, r=1).to_bytes())
    assert 100 < size < 100 + 256 * 50


@pytest.mark.parametrize("wire", ["int8", "float32"])
def test_every_flipped_byte_catches_bytes_outside_the_digest(wire):
    data = DATA[wire]
    mismatches = 0
    for at in range(len(data)):
        for mask in (1, 0x20, 0x80, 0xFF):
            bad = bytearray(data)
            bad[at] ^= mask
            with pytest.raises(PayloadError) as caught:
                ThinUpdate.from_bytes(bytes(bad))
            mismatches += caught.type is DigestMismatch
    assert mismatches > 4 * len(split(data)[1])  # all of the body, and much of the header


@pytest.mark.parametrize("wire", ["int8", "float32"])
def test_every_truncation_catches_a_torn_payload_that_is_taken_for_another_fault(wire, tmp_path):
    data, path = DATA[wire], tmp_path / "update"
    for length in range(len(data)):
        with pytest.raises(TornFile):
            ThinUpdate.from_bytes(data[:length])
        path.write_bytes(data[:length])
        with pytest.raises(TornFile, match="update"):
            sealed.read_meta(path, verify=bool(length % 2))


def test_appended_bytes_catch_a_reader_that_stops_at_the_last_tensor():
    for more in (b"\0", b" " * 8, DATA["int8"]):
        with pytest.raises(PayloadError, match="declares") as caught:
            ThinUpdate.from_bytes(DATA["int8"] + more)
        assert caught.type is PayloadError


@pytest.mark.parametrize("wire", WIRES)
def test_max_bytes_catches_reading_before_the_limit(wire):
    size = len(DATA[wire])
    ThinUpdate.from_bytes(DATA[wire], max_bytes=size)
    with pytest.raises(PayloadError, match=f"{size} bytes: expected at most {size - 1}"):
        ThinUpdate.from_bytes(DATA[wire], max_bytes=size - 1)


# Hostile payloads, each under a right digest.


@pytest.mark.parametrize("wire", WIRES)
def test_seal_catches_a_digest_that_is_wrong_here_and_there_alike(wire):
    assert seal(*split(DATA[wire])) == DATA[wire]
    meta, entries = fields_of(split(DATA[wire])[0])
    again = seal(header_of(meta, entries), split(DATA[wire])[1])
    assert by_hashlib(again)[0] == by_hashlib(again)[1]
    assert torch.equal(ThinUpdate.from_bytes(again).values, thin(wire).values)


DEEP = "[" * 10_000 + "]" * 10_000
NOT_NATURAL = [-1, 1.0, 0.5, 1e300, True, False, None, "4", [], {}, float("nan"), float("inf")]
HUGE = [1 << 63, 1 << 64, 10**18, 10**30, int("9" * 4300)]
FIELDS = {
    "format": ["thin-update-2", 1, None, [], "x" * 10_000],
    "run": ["", "x" * 129, 1, None, ["run"]],
    "base": [*NOT_NATURAL, *HUGE, 4, 6],
    "version": [*NOT_NATURAL, *HUGE, 5, 7, 6.0],
    "seed": [*NOT_NATURAL[1:], 1 << 63, -(1 << 63) - 1, int("9" * 4300)],
    "draw": [*NOT_NATURAL, 1 << 63, -(10**30)],
    "rank": [*NOT_NATURAL, *HUGE, 0, 3, 5, 12, 65_537],
    "wire": ["int4", "INT8", "float32", "bfloat16", 8, None, ["int8"]],
    "kind": ["gaussian", "Sign", 1, None, ["sign"]],
    "scheme": [0, 2, 1.0, True, "1", None, *HUGE],
    "layers": [[], {}, None, "q", 3, [1], [None], [[]], ["q"], {"q": [3, 8, 0]}],
}
ENTRIES = {
    0: ["", "_orig_mod", "_orig_mod.q", "a._fsdp_wrapped_module.b", 1, None, [], True],
    1: [*NOT_NATURAL, *HUGE, 0, 2, 4, 1 << 32],
    2: [*NOT_NATURAL, *HUGE, 0, 3, 1 << 32],
    3: [*NOT_NATURAL, *HUGE, 1, 2, 3],
}


def refused(header, body=None, kind=PayloadError, **limits):
    body = split(DATA["int8"])[1] if body is None else body
    with pytest.raises(kind) as caught:
        ThinUpdate.from_bytes(seal(header, body), **limits)
    assert caught.type in (PayloadError, TornFile)  # the seal is right
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("name", FIELDS)
def test_fields_catch_every_value_that_is_taken_on_trust(name):
    for value in FIELDS[name]:
        meta, entries = fields_of(split(DATA["int8"])[0])
        meta[name] = value
        refused(header_of(meta, entries))
    meta, entries = fields_of(split(DATA["int8"])[0])
    del meta[name]
    assert "fields" in refused(header_of(meta, entries))
    meta, entries = fields_of(split(DATA["int8"])[0])
    assert "fields" in refused(header_of(meta | {name + "s": 1}, entries))


@pytest.mark.parametrize("place", ENTRIES)
def test_layers_catch_names_shapes_and_sites_that_are_taken_on_trust(place):
    for layer, value in [(i, v) for i in range(3) for v in ENTRIES[place]]:
        meta, entries = fields_of(split(DATA["int8"])[0])
        before = meta["layers"][layer][place]
        meta["layers"][layer][place] = value
        same = type(value) is type(before) and value == before
        if same or (place == 3 and value == layer and type(value) is int):  # k may draw its own A
            ThinUpdate.from_bytes(seal(header_of(meta, entries), split(DATA["int8"])[1]))
        else:
            refused(header_of(meta, entries))


def test_sites_catch_cycles_and_chains():
    """q → k → q; v → k → q, all of 8 inputs; a site that comes later; a site of other inputs."""
    alike = thin(layers=(*LAYERS[:2], ThinLayer("v", 4, 8, "v"))).to_bytes()
    for data, sites in [
        *((alike, sites) for sites in ([1, 0, 2], [0, 0, 1], [1, 1, 2], [0, 2, 2], [2, 2, 2])),
        *((DATA["int8"], sites) for sites in ([0, 0, 0], [0, 1, 1])),
    ]:
        meta, entries = fields_of(split(data)[0])
        for layer, site in zip(meta["layers"], sites, strict=True):
            layer[3] = site
        assert "site" in refused(header_of(meta, entries)), sites


def test_names_catch_a_layer_that_stands_twice():
    for i, j in ((0, 1), (1, 2), (2, 0)):
        meta, entries = fields_of(split(DATA["int8"])[0])
        meta["layers"][i][0] = meta["layers"][j][0]
        assert "twice" in refused(header_of(meta, entries))


def test_layer_entries_catch_other_lengths():
    for entry in ([], ["q", 3, 8], ["q", 3, 8, 0, 0], {"name": "q"}, "q380", None):
        meta, entries = fields_of(split(DATA["int8"])[0])
        meta["layers"][0] = entry
        assert "layer entry" in refused(header_of(meta, entries))


BODY = 9 * 4 + 9  # 9 rows of 4 integers, 9 exponents


def tensors(values, exponents, **more):
    """Entries (dtype, shape, start, stop)."""
    named = {"exponents": exponents, "values": values, **more}
    out = {}
    for name, entry in named.items():
        if entry is not None:
            dtype, shape, *offsets = entry
            out[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return out


GOOD = (("I8", [9, 4], 9, 45), ("I8", [9], 0, 9))
HOSTILE_TENSORS = {
    "overlapping": (("I8", [9, 4], 9, 45), ("I8", [9], 9, 18)),
    "one inside the other": (("I8", [9, 5], 0, 45), ("I8", [9], 0, 9)),
    "a hole": (("I8", [9, 4], 9, 45), ("I8", [8], 0, 8)),
    "flat": (("I8", [36], 9, 45), ("I8", [9], 0, 9)),
    "turned": (("I8", [4, 9], 9, 45), ("I8", [9], 0, 9)),
    "exponents of two dimensions": (("I8", [9, 4], 9, 45), ("I8", [9, 1], 0, 9)),
    "another type of the same size": (("F32", [9, 1], 9, 45), ("I8", [9], 0, 9)),
    "unsigned": (("U8", [9, 4], 9, 45), ("I8", [9], 0, 9)),
    "booleans": (("I8", [9, 4], 9, 45), ("BOOL", [9], 0, 9)),
    "no such type": (("I9", [9, 4], 9, 45), ("I8", [9], 0, 9)),
    "type is a list": ((["I8"], [9, 4], 9, 45), ("I8", [9], 0, 9)),
    "type is a number": ((8, [9, 4], 9, 45), ("I8", [9], 0, 9)),
    "no exponents": (("I8", [9, 5], 0, 45), None),
    "no values": (None, ("I8", [45], 0, 45)),
    "more than the body": (("I8", [9, 4], 9, 45), ("I8", [10**18], 45, 45 + 10**18)),
    "numbers of 4300 digits": (("I8", [int("9" * 4300)], 0, int("9" * 4300)), GOOD[1]),
    "product of dimensions": (("I8", [1 << 32, 1 << 32], 9, 45), GOOD[1]),
    "product that wraps to the right size": (("I8", [(1 << 62) + 9, 4], 9, 45), GOOD[1]),
    "many dimensions": (("I8", [9, 4] + [1] * 100_000, 9, 45), GOOD[1]),
    "negative dimensions": (("I8", [-9, -4], 9, 45), GOOD[1]),
    "negative offsets": (("I8", [9, 4], -36, 0), GOOD[1]),
    "backwards": (("I8", [9, 4], 45, 9), GOOD[1]),
    "float dimensions": (("I8", [9.0, 4.0], 9, 45), GOOD[1]),
    "float offsets": (("I8", [9, 4], 9.0, 45.0), GOOD[1]),
    "true for one": (("I8", [9, 4], 9, 45), ("I8", [9, True], 0, 9)),
    "one offset": (("I8", [9, 4], 45), GOOD[1]),
    "three offsets": (("I8", [9, 4], 9, 45, 45), GOOD[1]),
    "shape is a text": (("I8", "94", 9, 45), GOOD[1]),
    "shape is a number": (("I8", 36, 9, 45), GOOD[1]),
    "shape is nothing": (("I8", None, 9, 45), GOOD[1]),
}


@pytest.mark.parametrize("case", HOSTILE_TENSORS)
def test_tensors_catch_a_size_or_type_that_is_taken_on_trust(case):
    meta, good = fields_of(split(DATA["int8"])[0])
    assert tensors(*GOOD) == good
    refused(header_of(meta, tensors(*HOSTILE_TENSORS[case])))


def test_more_tensors_catch_names_that_nobody_asked_for():
    meta, good = fields_of(split(DATA["int8"])[0])
    body = split(DATA["int8"])[1]
    more = tensors(*GOOD, more=("I8", [1], 45, 46))
    assert "tensors" in refused(header_of(meta, more), body + b"\0")
    renamed = {name.replace("val", "Val"): entry for name, entry in good.items()}
    assert "tensors" in refused(header_of(meta, renamed))


@pytest.mark.parametrize(
    "header",
    [
        *(
            b"",
            b"{}",
            b"null",
            b"[]",
            b"1234",
            b'"x"',
            b"true",
            b"{",
            b"\xff\xfe{}",
            b"[" * 100_000,
        ),
        b'{"__metadata__":{}}',
        b'{"__metadata__":null}',
        b'{"__metadata__":[]}',
        b'{"__metadata__":{"logra_lab":""}}',
        b'{"__metadata__":{"logra_lab":{}}}',
        b'{"values":null}',
        b'{"values":[]}',
        b'{"values":{}}',
        '{"values":{"dtype":"I8","shape":[45],"data_offsets":[0,45]}}'.encode("utf-16"),
        b'{"a":' + DEEP.encode() + b"}",
    ],
)
def test_headers_that_are_none_catch_errors_of_json_that_pass_through(header):
    refused(header)
    refused(header, b"")


def test_metadata_catches_a_digest_that_stands_elsewhere():
    """In a tensor's name, as the only entry, in a list: sealed, and yet no metadata."""
    zeros, hold = "0" * 64, json.dumps
    for text in (f'{{"sha256":"{zeros}"}}', f'{{"sha256":"{zeros}","x":{DEEP}}}'):
        refused(hold({"__metadata__": {"logra_lab": text}}).encode(), b"")
        refused(hold({"__metadata__": {"other": text}}).encode(), b"")
        refused(hold({"__metadata__": text}).encode(), b"")
        refused(hold({"__metadata__": {"logra_lab": [text]}}).encode(), b"")
        refused(hold({text: {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}}).encode(), b"")
        refused(hold({"__metadata__": {"logra_lab": f"[{text}]"}}).encode(), b"")
    twice = seal(header_of({"x": {"sha256": zeros}}, {}), b"")
    with pytest.raises(PayloadError, match="no digest"):
        sealed.unpack(twice, max_bytes=1 << 20)


@pytest.mark.parametrize("length", [4, 449, (4 << 20) + 1, 10**18, 1 << 63, 2**64 - 1])
def test_header_lengths_catch_an_allocation_before_the_check(length, tmp_path):
    data = struct.pack("<Q", length) + DATA["int8"][8:]
    (tmp_path / "u").write_bytes(data)
    reads = [(lambda: ThinUpdate.from_bytes(data), 1 << 17)]
    reads += [(lambda: sealed.read_meta(tmp_path / "u"), 5 << 20)]  # the largest header is 4 MiB
    for read, bound in reads:
        tracemalloc.start()
        with pytest.raises(PayloadError):
            read()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < bound


@pytest.mark.parametrize("key", ["run", "layers", "sha256", "rank"])
def test_keys_that_stand_twice_catch_readers_that_may_disagree(key):
    """JSON leaves open which one counts; Python takes the last, others the first."""
    header = split(DATA["int8"])[0]
    old = f'\\"{key}\\":'.encode()
    assert "twice" in refused(header.replace(old, old + b"0," + old, 1)) or key == "sha256"


@pytest.mark.parametrize("key", [b'"values":', b'"exponents":', b'"__metadata__":', b'"dtype":'])
def test_keys_of_the_header_that_stand_twice_catch_the_same(key):
    header = split(DATA["int8"])[0]
    assert "twice" in refused(header.replace(key, key + b'"I8",' + key, 1))


def test_other_orders_catch_a_reader_that_counts_on_one():
    """Members of JSON objects have no order, the digest's place aside."""
    meta, entries = fields_of(split(DATA["int8"])[0])
    header = header_of(dict(reversed(meta.items())), dict(reversed(entries.items())))
    got = ThinUpdate.from_bytes(seal(header, split(DATA["int8"])[1]))
    assert torch.equal(got.values, thin().values)
    assert got.layers == LAYERS


def test_numbers_catch_a_sign_that_does_not_exist():
    header, body = split(DATA["int8"])
    for at, byte, message in [(9, 0x80, "−128"), (0, 0x81, "exponents"), (0, 101, "exponents")]:
        bad = bytearray(body)
        bad[at] = byte
        assert message in refused(header, bytes(bad))
    extremes = bytearray(body)
    extremes[0], extremes[1], extremes[9], extremes[10] = 0x82, 100, 0x81, 127  # −126, 100, −127
    got = ThinUpdate.from_bytes(seal(header, bytes(extremes)))
    assert (got.exponents[:2].tolist(), got.values[0, :2].tolist()) == ([-126, 100], [-127, 127])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("wire", WIRES[1:])
def test_float_numbers_catch_nan_and_infinity(wire, bad):
    values = thin(wire).values
    values[4, 1] = bad
    header = split(DATA[wire])[0]
    body = values.view(torch.uint8).numpy().tobytes()
    assert "not finite" in refused(header, body)


def test_gaussian_integers_are_refused_and_gaussian_floats_read():
    gaussian = thin("float32", kind="gaussian")
    assert ThinUpdate.from_bytes(gaussian.to_bytes()).kind == "gaussian"
    meta, entries = fields_of(split(DATA["int8"])[0])
    assert "signs only" in refused(header_of(meta | {"kind": "gaussian"}, entries))


# Memory: the payload itself, what tracemalloc sees of Python, safetensors' copies included (its
# bytearrays come from Python's allocator), and every tensor that an operation makes, as in fuzz.


def peak_of(read, data):
    from logra_lab.bench.fuzz import _Allocated

    with _Allocated():  # torch imports a part of itself when a dispatch mode first begins
        torch.zeros(1)
    tracemalloc.start()
    with _Allocated() as allocated:
        outcome = read(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return len(data) + peak + allocated.bytes, outcome


@pytest.mark.parametrize("wire", WIRES)
def test_memory_catches_a_third_copy_of_the_numbers(wire):
    """4 to 32 MB of numbers; 64 kB for all the rest."""
    layers = [ThinLayer(f"layers.{i}.x", 2000, 500, f"layers.{i}.x") for i in range(10)]
    data = thin(wire, layers=layers, r=200).to_bytes()
    used, got = peak_of(lambda x: ThinUpdate.from_bytes(x, max_bytes=len(x)), data)
    assert got.layers == tuple(layers)
    assert 2 * got.values.nbytes < used < 2 * len(data) + (1 << 16)


@pytest.mark.parametrize("unit", ["[],", "{},", '{"":0},', '{"a":{}},', "[[]],", "0.5,", '"𝄞",'])
@pytest.mark.parametrize("inside", [True, False])
def test_memory_catches_headers_that_swell(unit, inside):
    """A quarter of the largest header, all of it one JSON list, in the metadata or beside it: at
    most 48 bytes of Python objects for each byte."""
    listed = "[" + unit * ((1 << 18) // len(unit.encode())) + "0]"
    text = f'{{"sha256":"{"0" * 64}","x":{listed if inside else 0}}}'
    header = json.dumps({"__metadata__": {"logra_lab": text}}, ensure_ascii=False)
    if not inside:
        entry = '"z":{"dtype":"I8","shape":[0],"data_offsets":[0,0],"y":' + listed + "}"
        header = header[:-1] + "," + entry + "}"
    data = seal(header.encode(), b"")

    def read(data):
        with pytest.raises(PayloadError):
            ThinUpdate.from_bytes(data)

    used, _ = peak_of(read, data)
    assert used < (2 + 48) * len(data) + (1 << 16)


# Files


TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(700_000, dtype=torch.int8)}
META = {"format": "base", "version": 3, "name": 'a "quoted" name, \\ and ü'}


def test_pack_and_write_catch_two_formats(tmp_path):
    """700 kB and more, so that the file's digest takes several blocks."""
    tensors = TENSORS | {"c": torch.arange(500_000.0)}
    data = sealed.pack(tensors, META)
    digest = sealed.write(tmp_path / "base", tensors, META)
    assert (tmp_path / "base").read_bytes() == data
    assert digest == sealed.digest_of(data) == by_hashlib(data)[1]
    for verify in (True, False):
        assert sealed.read_meta(tmp_path / "base", verify=verify) == META | {"sha256": digest}
    meta, got = sealed.unpack(data, max_bytes=len(data))
    assert meta == META
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
    assert os.listdir(tmp_path) == ["base"]


def test_verify_catches_every_kind_of_changed_byte_in_a_file(tmp_path):
    path = tmp_path / "base"
    sealed.write(path, TENSORS, META)
    data = path.read_bytes()
    digest_at = data.index(MARK) + len(MARK)
    for at in (digest_at, digest_at + 63, data.index(b"base"), len(data) // 2, len(data) - 1):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(DigestMismatch, match="base"):
            sealed.read_meta(path)
    sealed.read_meta(path, verify=False)  # the header is well-formed: only the digest can tell


def test_write_catches_a_half_written_file_under_the_name(tmp_path, monkeypatch):
    path = tmp_path / "base"
    sealed.write(path, TENSORS, META)
    before = path.read_bytes()
    for name in ("replace", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *_: (_ for _ in ()).throw(OSError("disk is full")))
            with pytest.raises(OSError, match="disk is full"):
                sealed.write(path, {"a": torch.zeros(5)}, META)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["base"]
    with pytest.raises(ValueError, match="JSON"):
        sealed.write(path, TENSORS, {"x": float("nan")})
    assert path.read_bytes() == before


def test_metadata_catches_a_mark_in_the_values():
    """Names that look like the digest's beginning, quoted once or twice."""
    for name in ('{"sha256":"', '{\\"sha256\\":\\"', "0" * 64, '"', "\\"):
        data = sealed.pack(TENSORS, {"name": name, "nested": {"deeper": name}})
        meta, _ = sealed.unpack(data, max_bytes=1 << 20)
        assert meta == {"name": name, "nested": {"deeper": name}}
        assert sealed.digest_of(data) == by_hashlib(data)[1]


def test_files_of_others_are_refused_by_name(tmp_path):
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file(TENSORS, path)
    with pytest.raises(PayloadError, match=r"other\.safetensors: there is no digest"):
        sealed.read_meta(path)
