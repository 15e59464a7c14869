"""Checkpoints: tensors and plain values in one file, replaced atomically, under a digest.

The file is an ordinary `torch.save` archive, so `torch.load(path, weights_only=True)` reads it too.
It ends in a zip comment holding the SHA-256 of all bytes before it: one flipped byte or a cut
file is found before anything is unpickled. The checkpoint before is kept as `<name>.prev`; see
`logra_lab.atomic` for why a crash at any moment leaves a complete one.
"""

import hashlib
import os
import shutil
import struct
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from logra_lab.atomic import previous_path, write_atomically
from logra_lab.errors import InputError, LograError

NAME = "checkpoint.pt"  # in a run's folder
_MARK = b"logra-lab checkpoint 1 sha256:"
_HEX = 64
_BLOCK = 1 << 20
# The weights-only reader knows pickle's LONG1 (at most 255 bytes, sign included), not LONG4.
_INT_BITS = 8 * 255 - 1


class CheckpointError(LograError):
    """A checkpoint could not be written, or the file at hand is missing, cut or damaged."""


def save(path: str | Path, state: dict[Any, Any]) -> None:
    """Write `state` to `path` atomically; the file that was there becomes `<path>.prev`.

    `state` is a dict of dicts, lists, tuples (read back as lists), str, int, float, bool, None and
    dense tensors (any device and type; a view is saved without the rest of its storage).
    Raises `InputError` naming the key path of any other value before a byte is written, and
    `CheckpointError` when the system refuses a write (a full disk, a quota): the temporary file is
    removed and the earlier checkpoint stays. Cost: the file is written once and read once (for
    the digest); needs room for a third file beside the present and the previous one.
    """
    path = Path(path)
    if type(state) is not dict:
        raise InputError(f"checkpoint state: expected a dict, got {type(state).__name__}")
    plain = _plain(state, "state")
    try:
        write_atomically(path, lambda file: _write(file, plain), keep_previous=True)
    except OSError as error:
        raise CheckpointError(_full_disk_message(path, plain, error)) from error


def load(path: str | Path) -> dict[Any, Any]:
    """Read a checkpoint written by `save`, tensors on the CPU, `weights_only=True`.

    Raises `CheckpointError` when the file is missing, cut short or changed in any byte; the
    message names `<path>.prev` if that exists. Cost: the file is read twice.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            damage = _damage(file)
            if damage is None:
                file.seek(0)
                return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        damage = "there is no such file"
    except OSError as error:
        damage = f"it cannot be read ({error.strerror})"
    previous = previous_path(path)
    advice = f"the previous checkpoint is {previous}: copy it to {path} to go on from there"
    if not previous.exists():
        advice = f"no previous checkpoint {previous.name} was kept beside it: start the run anew"
    raise CheckpointError(f"checkpoint {path}: {damage}; {advice}")


class _Sink:
    """A file that remembers its first error, which torch's writer may mask by a RuntimeError."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self.file.flush()


def _write(file: BinaryIO, state: dict[Any, Any]) -> None:
    sink = _Sink(file)
    try:
        torch.save(state, cast(BinaryIO, sink))
    except RuntimeError as error:
        if sink.error is not None:
            raise sink.error from error
        raise
    # A zip archive ends in the 16-bit length of its comment (APPNOTE.TXT 4.3.16); torch writes 0.
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", len(_MARK) + _HEX) + _MARK)
    length = file.tell()
    file.seek(0)
    digest = _digest(file, length)
    file.seek(length)
    file.write(digest)


def _digest(file: BinaryIO, length: int) -> bytes:
    """Hexadecimal SHA-256 of the next `length` bytes of `file`."""
    digest = hashlib.sha256()
    while length > 0 and (block := file.read(min(length, _BLOCK))):
        digest.update(block)
        length -= len(block)
    return digest.hexdigest().encode()


def _damage(file: BinaryIO) -> str | None:
    """What is wrong with an open checkpoint file, or None."""
    size = file.seek(0, os.SEEK_END)
    body = size - _HEX
    if body < len(_MARK):
        return f"it is cut short ({size} bytes)"
    file.seek(body - len(_MARK))
    if file.read(len(_MARK)) != _MARK:
        return f"its end mark is missing ({size} bytes): cut short, damaged, or not written by save"
    expected = file.read(_HEX)
    file.seek(0)
    if _digest(file, body) != expected:
        return f"its {size} bytes do not match their SHA-256: damaged"
    return None


def _plain(value: Any, where: str) -> Any:
    """`value` with only what a weights-only load gives back; exact types, no subclasses."""
    if value is None or type(value) in (str, bool, float):
        return value
    if type(value) is int and value.bit_length() <= _INT_BITS:
        return value
    if type(value) in (list, tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                _plain_key(key, where)
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return _plain_tensor(value.detach(), where)
    raise InputError(
        f"checkpoint {where}: expected dict, list, tuple, str, int (under {_INT_BITS} bits), "
        f"float, bool, None or a tensor, got {type(value).__module__}.{type(value).__qualname__}; "
        "convert it before saving"
    )


def _plain_key(key: Any, where: str) -> None:
    if type(key) is not int or key.bit_length() > _INT_BITS:
        raise InputError(f"checkpoint {where}: keys must be str or int, got {key!r}")


def _plain_tensor(tensor: torch.Tensor, where: str) -> torch.Tensor:
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise InputError(
            f"checkpoint {where}: expected a dense tensor with data, got layout {tensor.layout} "
            f"on {tensor.device}, {tensor.dtype}; convert it before saving"
        )
    tensor = tensor.cpu()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    if isinstance(value, list):
        return sum(map(_tensor_bytes, value))
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def _full_disk_message(path: Path, state: dict[Any, Any], error: OSError) -> str:
    free = "unknown"
    if path.parent.is_dir():
        free = str(shutil.disk_usage(path.parent).free)
    kept = (
        f"{path} still holds a complete checkpoint" if path.exists() else f"{path} does not exist"
    )
    return (
        f"checkpoint {path} could not be written: {error.strerror or error}; about "
        f"{_tensor_bytes(state)} bytes of tensors needed, {free} bytes free; {kept}; make room or "
        "choose another run folder, then resume"
    )
