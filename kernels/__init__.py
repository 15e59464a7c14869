"""Triton kernels for what the method does every step, each beside its launcher and its reference.

Every operation has a torch path of the same result; this module says which of the two runs. It
imports neither Triton nor the kernels, so that `import logra_lab` works where they cannot.

The library calls the kernels through functions that compute on any machine and pick the path:

    signs         `projection.Projection.unit`      ±1 of √r·A
    project       `projection.Projection.project`   P = tokens · X Aᵀ
    gram          `projection.Projection.gram`      A Aᵀ; `Projection.squared_norm` ⟨D (A Aᵀ), D⟩
    accumulate    `sketch.accumulate`               S ← S + Hᵀ P
    row_adam      `rowadam.row_adam_`               S ← D, the new moments
    apply         `sync.update.apply`               W ← W − U A
    kl            `kl.variance_kl`, `kl.realised_kl`, `kl.logprob_entropy`

All are operators of torch. A KL probe differentiates project, gram's squared norm and kl, which
carry tangents; signs and gram take no tensor; apply and row_adam, which probes do not reach,
refuse tangents. accumulate runs in a backward pass.
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

    `force`, or the environment variable LOGRA_LAB_KERNELS, decides otherwise. Some settings have no
    kernel, also where Triton is chosen: see `left_to_torch`. Raises `InputError` for an unknown
    name, and for ``"triton"`` where its kernels cannot run.
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


def left_to_torch(
    *, dtype: torch.dtype, projection: str = "sign", wire: str = "int8", ranks: int = 1
) -> list[str]:
    """The operations that torch computes although Triton is the backend, by their names above.

    There is no kernel for models in float64, for Gaussian projections, for other wires than int8,
    and none that sums RowAdam's norms over `ranks`.
    """
    if dtype == torch.float64:
        return ["signs", "project", "gram", "accumulate", "row_adam", "apply", "kl"]
    found = ["signs", "project", "gram"] if projection != "sign" else []
    found += ["row_adam"] if ranks > 1 else []
    return found + (["apply"] if wire != "int8" else [])


def overlaps(x: torch.Tensor) -> bool:
    """Whether entries of x share memory, as those of an expanded tensor do: programs that write
    them would race, and torch refuses to."""
    return any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True))


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
