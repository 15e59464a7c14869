"""Triton kernels for what the method does every step, each beside its launcher and its reference.

Every operation has a torch path of the same result; this module says which of the two runs. It
imports neither Triton nor the kernels, so that `import logra_lab` works where they cannot.
"""

import os
from importlib.util import find_spec
from typing import Any

import torch

from logra_lab.errors import InputError

BACKENDS = ("triton", "torch")
VARIABLE = "LOGRA_LAB_KERNELS"


def backend(device: torch.device | str, force: str | None = None) -> str:
    """Which path computes on `device`: ``"triton"`` on CUDA where Triton is installed, else
    ``"torch"``; the name goes into run records.

    `force`, or the environment variable LOGRA_LAB_KERNELS, decides otherwise. Raises `InputError`
    for an unknown name, and for ``"triton"`` where its kernels cannot run.
    """
    kind = torch.device(device).type
    choice = force or os.environ.get(VARIABLE)
    if not choice:
        return "triton" if kind == "cuda" and _installed() else "torch"
    if choice not in BACKENDS:
        raise InputError(
            f"kernels {choice!r} are unknown: expected one of {BACKENDS}; see {VARIABLE}"
        )
    if choice == "triton" and not (_installed() and (kind == "cuda" or _interpreting())):
        raise InputError(
            f"Triton kernels cannot run on {kind!r} here: they need a CUDA device and the "
            f"triton package, or a process of logra_lab.kernels.interpreter; use 'torch'"
        )
    return choice


def require(kernel: Any, device: torch.device) -> None:
    """Raise `InputError` unless `kernel` can be launched on tensors of `device`.

    Triton's own message, "0 active drivers", names neither. Whether a kernel is interpreted was
    settled when its module was imported.
    """
    from triton import JITFunction

    if device.type != "cuda" and isinstance(kernel, JITFunction):
        raise InputError(
            f"kernel {kernel.__name__} got tensors on {device.type!r}: compiled Triton kernels "
            f"need a CUDA device; use the torch path, or a process of logra_lab.kernels.interpreter"
        )


def _installed() -> bool:
    return find_spec("triton") is not None


def _interpreting() -> bool:
    """Whether this process interprets the kernels that it imports."""
    import triton

    return bool(triton.knobs.runtime.interpret)
