"""Sealed safetensors: bytes or a file whose header carries the SHA-256 of every byte of it.

An ordinary safetensors file; any reader of that format opens it. One metadata entry, `logra_lab`,
holds a JSON object whose first member is the digest, computed with 64 zeros in its own place. So
one changed byte anywhere (header, padding, numbers, the digest) is found before anything is used.
The digest protects from accidents, not from an adversary: whoever can write can seal anew.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from logra_lab.atomic import sync_folder
from logra_lab.sync.errors import DigestMismatch, PayloadError, TornFile

_ZEROS = b"0" * 64
_MARK = b'{\\"sha256\\":\\"'  # begins the object, as a JSON string inside the header's JSON
_MAX_HEADER = 4 << 20  # bytes; a thousand layers take about 100 kB
_BITS = {"I8": 8, "BF16": 16, "F16": 16, "F32": 32, "F64": 64}


def pack(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bytes:
    """Tensors (contiguous, on the CPU) and JSON values as sealed bytes; the same input gives the
    same bytes. Cost: two copies of the tensors and one pass of SHA-256."""
    data = bytearray(safetensors.torch.save(dict(tensors), _metadata(meta)))
    place = _digest_place(data)
    data[place] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def digest_of(data: bytes) -> str:
    """The digest that sealed bytes carry."""
    return data[_digest_place(data)].decode()


def unpack(data: bytes, *, max_bytes: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(meta, tensors) of sealed bytes of at most `max_bytes`.

    Nothing is allocated from a declared size before it is known to fit the bytes at hand. Memory:
    the bytes and their tensors, so twice `max_bytes`, and Python's objects for the header, up to
    48 bytes for each of its bytes where it is nothing but brackets. Raises `PayloadError` (what is
    malformed), `TornFile` (too short), `DigestMismatch`.
    """
    if len(data) > max_bytes:
        raise PayloadError(f"{len(data)} bytes: expected at most {max_bytes}; is it another model?")
    header = _parse_header(data[: 8 + _MAX_HEADER], len(data))
    place = _digest_place(data)
    digest = hashlib.sha256()
    view = memoryview(data)
    for part in (view[: place.start], _ZEROS, view[place.stop :]):
        digest.update(part)
    _compare(data[place], digest)
    try:
        tensors = safetensors.torch.load(bytes(data))
    except (SafetensorError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise PayloadError(f"not a safetensors payload: {error!s:.200}") from error
    return _meta(header), tensors


def write(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> str:
    """Write a sealed file that is complete or absent, also after a power cut; return its digest.

    Cost: the file is written once and read once; the tensors are not copied.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # by the umask; safetensors makes files for the owner only
        safetensors.torch.save_file(dict(tensors), temporary, _metadata(meta))
        with open(temporary, "rb+") as file:
            os.fchmod(file.fileno(), mode)
            place = _digest_place(_read_header(file))
            seal = _file_digest(file, place).hexdigest()
            file.seek(place.start)
            file.write(seal.encode())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return seal


def read_meta(path: Path, *, verify: bool = True) -> dict[str, Any]:
    """The JSON object of a sealed file; `verify` reads all of it and compares the digest.

    Raises as `unpack` does, naming the file. Read its tensors with `safetensors.safe_open`.
    """
    try:
        with open(path, "rb") as file:
            head = _read_header(file)
            header = _parse_header(head, file.seek(0, os.SEEK_END))
            place = _digest_place(head)
            if verify:
                _compare(head[place], _file_digest(file, place))
            return _meta(header) | {"sha256": head[place].decode()}
    except PayloadError as error:
        raise type(error)(f"{path}: {error}") from error


def _metadata(meta: Mapping[str, Any]) -> dict[str, str]:
    # One entry: safetensors gives several no fixed order.
    sealed = {"sha256": _ZEROS.decode(), **meta}
    return {"logra_lab": json.dumps(sealed, separators=(",", ":"), allow_nan=False)}


def _parse_header(data: bytes | bytearray, size: int) -> dict[str, Any]:
    """The header of a payload of `size` bytes that begins with `data`, checked against the size."""
    if len(data) < 8:
        raise TornFile(f"{size} bytes: too short for a header")
    (length,) = struct.unpack("<Q", data[:8])
    if length > _MAX_HEADER:
        raise PayloadError(f"a header of {length} bytes: expected at most {_MAX_HEADER}")
    if 8 + length > size:
        raise TornFile(f"{size} bytes, of which the header alone declares {8 + length}")
    try:
        header = json.loads(str(data[8 : 8 + length], "utf-8"), object_pairs_hook=_unique)
        spans = [
            (*entry["data_offsets"], entry["dtype"], entry["shape"])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
        for start, stop, dtype, shape in spans:
            if not all(type(n) is int and 0 <= n < 1 << 63 for n in (start, stop, *shape)):
                raise ValueError("an offset or a dimension is no natural number")
            if (stop - start) * 8 != _BITS[dtype] * math.prod(shape[:8]) or len(shape) > 8:
                raise ValueError(f"{stop - start} bytes cannot hold {dtype} {shape}")
        end = max((stop for _, stop, _, _ in spans), default=0)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PayloadError(f"the header is not one of safetensors: {error!r:.200}") from error
    if size != 8 + length + end:
        kind = TornFile if size < 8 + length + end else PayloadError
        raise kind(f"{size} bytes, but the header declares {8 + length + end}")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Readers disagree on which of two equal keys counts; nobody may see another update than we.
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one JSON object")
    return found


def _digest_place(data: bytes | bytearray) -> slice:
    """Where in the header the digest stands."""
    header = bytes(data[8 : 8 + min(struct.unpack("<Q", data[:8])[0], _MAX_HEADER)])
    at = 8 + header.find(_MARK) + len(_MARK)
    if header.count(_MARK) != 1 or at + 64 > 8 + len(header):
        raise PayloadError("there is no digest in the header: not written by logra_lab")
    return slice(at, at + 64)


def _meta(header: dict[str, Any]) -> dict[str, Any]:
    try:
        meta = json.loads(header["__metadata__"]["logra_lab"], object_pairs_hook=_unique)
        del meta["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise PayloadError(f"the logra_lab metadata cannot be read: {error!r:.200}") from error
    return meta


def _read_header(file: BinaryIO) -> bytes:
    file.seek(0)
    start = file.read(8)
    if len(start) < 8:
        raise TornFile(f"{len(start)} bytes: too short for a header")
    return start + file.read(min(struct.unpack("<Q", start)[0], _MAX_HEADER))


def _file_digest(file: BinaryIO, place: slice) -> "hashlib._Hash":
    digest = hashlib.sha256()
    file.seek(0)
    digest.update(file.read(place.start) + _ZEROS)
    file.seek(place.stop)
    while block := file.read(1 << 20):
        digest.update(block)
    return digest


def _compare(expected: bytes | bytearray, digest: "hashlib._Hash") -> None:
    if bytes(expected) != digest.hexdigest().encode():
        raise DigestMismatch(
            f"SHA-256 is {digest.hexdigest()[:16]}…, expected {expected[:16].decode('latin1')!r}…: "
            "some byte has changed; get it again"
        )
