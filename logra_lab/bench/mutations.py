"""Ways to damage or rewrite the bytes of a thin update, for the fuzzer and for tests.

Half of the mutations damage bytes, as a network or a disk does: the digest has to tell. The other
half rewrite numbers, fields or layers and seal the result anew, as only a hostile or a faulty
writer does: the digest is right, and the checks behind it have to hold.
"""

import hashlib
import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

MARK = b'{\\"sha256\\":\\"'
NUMBERS = [0, 1, 2, 3, 4, 7, 127, 128, 65535, 1 << 31, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63]
NUMBERS += [1 << 64, 10**18, int("9" * 4300), -1, -128, -(1 << 63), -(10**30)]
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
VALUES: list[Any] = [*NUMBERS, 0.5, 4.0, 1e300, float("nan"), float("inf"), True, False, None, DEEP]
VALUES += ["", "x" * 300, "\ud800", "q", "int8", "float32", "gaussian", "I8", "F32", "BF16", "U8"]
VALUES += [[], {}, [0], [[]], [0, 16], [10**18, 10**18], [["q", 6, 8, 0]], {"sha256": "0" * 64}]


def mutate(rng: random.Random, payloads: Sequence[bytes]) -> bytes:
    """One of the payloads, damaged or rewritten."""
    data, other = rng.choice(payloads), rng.choice(payloads)
    if rng.random() < 0.5:
        for _ in range(rng.choice((1, 1, 1, 2, 8))):
            data = rng.choice(_DAMAGES)(rng, data, other)
        return data
    header, body = split(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        header, body = rng.choice(REWRITES)(rng, header, body, split(other))
    return seal(header, body)


def split(data: bytes) -> tuple[bytes, bytes]:
    """Header and body, as far as there are any."""
    stop = 8 + int.from_bytes(data[:8], "little")
    return data[8:stop], data[stop:]


def seal(header: bytes, body: bytes) -> bytes:
    """A payload with a right digest: SHA-256 of all its bytes, with zeros where the digest goes."""
    header += b" " * (-len(header) % 8)
    data = bytearray(struct.pack("<Q", len(header)) + header + body)
    if (at := data.find(MARK)) >= 0 and at + len(MARK) + 64 <= 8 + len(header):
        at += len(MARK)
        data[at : at + 64] = b"0" * 64
        data[at : at + 64] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def header_of(meta: dict[str, Any], entries: dict[str, Any]) -> bytes:
    """A header from its metadata (digest first) and its tensors' entries."""
    text = json.dumps({"sha256": "0" * 64, **meta}, separators=(",", ":"))
    return json.dumps({"__metadata__": {"logra_lab": text}, **entries}).encode()


def fields_of(header: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata (without digest) and tensors' entries of a well-formed header."""
    entries = json.loads(header)
    meta = json.loads(entries.pop("__metadata__")["logra_lab"])
    return {name: value for name, value in meta.items() if name != "sha256"}, entries


def _flip(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(max(1, len(data)))
    return data[:at] + bytes(b ^ 1 << rng.randrange(8) for b in data[at : at + 1]) + data[at + 1 :]


def _swap(rng: random.Random, data: bytes, other: bytes) -> bytes:
    i, j = sorted(rng.randrange(max(1, len(data))) for _ in range(2))
    return data[:i] + data[j : j + 1] + data[i + 1 : j] + data[i : i + 1] + data[j + 1 :]


def _cut(rng: random.Random, data: bytes, other: bytes) -> bytes:
    i, j = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return rng.choice((data[:i], data[i:], data[:i] + data[j:]))


def _insert(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.choice((rng.randrange(len(data) + 1), len(data)))
    return data[:at] + rng.randbytes(rng.randint(1, 16)) + data[at:]


def _splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    i, j = rng.randrange(len(data) + 1), rng.randrange(len(other) + 1)
    return data[:i] + other[rng.choice((i, j)) :]


def _length(rng: random.Random, data: bytes, other: bytes) -> bytes:
    length = rng.choice((0, 2, 4, len(data), 1 << 22, 1 << 31, 1 << 63, 2**64 - 1))
    return struct.pack("<Q", rng.choice((length, rng.randrange(len(data) + 1)))) + data[8:]


_DAMAGES = (_flip, _flip, _swap, _cut, _insert, _splice, _length)
Parts = tuple[bytes, bytes]


def _number(rng: random.Random, header: bytes, body: bytes, other: Parts) -> Parts:
    """Some run of digits becomes another token."""
    starts = [i for i, b in enumerate(header) if 48 <= b < 58 and not 48 <= header[i - 1] < 58]
    if not starts:
        return header, body
    start = stop = rng.choice(starts)
    while header[stop : stop + 1].isdigit():
        stop += 1
    token = json.dumps(rng.choice(VALUES)).encode().replace(b'"', b'\\"')
    return header[:start] + token + header[stop:], body


def _field(rng: random.Random, header: bytes, body: bytes, other: Parts) -> Parts:
    """One value somewhere in the JSON becomes another, leaves, or is joined by a new one."""
    meta, entries = _readable(header)
    parent: Any = rng.choice((meta, meta, entries))
    while parent:
        key = rng.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        if not (isinstance(parent[key], dict | list) and parent[key] and rng.random() < 0.8):
            break
        parent = parent[key]
    else:
        return header, body
    change = rng.random()
    if change < 0.1:
        del parent[key]
    elif change < 0.2 and isinstance(parent, dict):
        parent[rng.choice(("values", "more", "layers", "rank"))] = rng.choice(VALUES)
    elif change < 0.5 and type(parent[key]) is int and parent[key] < 1 << 64:
        parent[key] += rng.choice((-1, 1, 1 << 32))
    else:
        parent[key] = rng.choice(VALUES)
    return header_of(meta, entries), body


def _layers(rng: random.Random, header: bytes, body: bytes, other: Parts) -> Parts:
    """Layers are swapped, doubled, dropped, renamed, or read another's input."""
    meta, entries = _readable(header)
    layers = meta.get("layers")
    if not (isinstance(layers, list) and layers and all(isinstance(x, list) for x in layers)):
        return header, body
    i, j = (rng.randrange(len(layers)) for _ in range(2))
    change = rng.randrange(5)
    if change == 0:
        layers[i], layers[j] = layers[j], layers[i]
    elif change == 1:
        layers.insert(i, list(layers[j]))
    elif change == 2:
        del layers[i]
    elif change == 3:
        layers[i][:1] = [rng.choice(("q", "k", "o", "v", "_orig_mod.q", "", "\udfff"))]
    else:
        layers[i][3:] = [rng.randrange(-1, 4)]
    return header_of(meta, entries), body


def _shuffle(rng: random.Random, header: bytes, body: bytes, other: Parts) -> Parts:
    """Members in another order, which means the same."""
    parts = [list(part.items()) for part in _readable(header)]
    for part in parts:
        rng.shuffle(part)
    return header_of(dict(parts[0]), dict(parts[1])), body


def _double(rng: random.Random, header: bytes, body: bytes, other: Parts) -> Parts:
    """A key stands twice."""
    name = rng.choice(("rank", "run", "seed", "layers", "sha256", "values", "__metadata__"))
    text = f'\\"{name}\\":' if f'\\"{name}\\":'.encode() in header else f'"{name}":'
    return header.replace(text.encode(), (text + "0," + text).encode(), 1), body


def _numbers(rng: random.Random, header: bytes, body: bytes, other: Parts) -> Parts:
    changed = bytearray(body)
    for _ in range(rng.choice((1, 4, 64)) if body else 0):
        changed[rng.randrange(len(body))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
    return header, bytes(changed)


def _body(rng: random.Random, header: bytes, body: bytes, other: Parts) -> Parts:
    return header, rng.choice(_DAMAGES)(rng, body, other[1])


def _mix(rng: random.Random, header: bytes, body: bytes, other: Parts) -> Parts:
    return rng.choice(((header, other[1]), (other[0], body)))


REWRITES: tuple[Callable[..., Parts], ...] = (
    *(_number, _field, _field, _layers, _shuffle, _double),
    *(_numbers, _body, _mix),
)


def _readable(header: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a header, or none where an earlier rewrite left no JSON of that kind."""
    try:
        return fields_of(header)
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}, {}
