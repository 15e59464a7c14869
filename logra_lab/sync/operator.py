"""W ← W − U A as one operator of torch: opaque to torch.compile and to fake tensors.

An update is no part of any function that a KL probe differentiates: probes perturb the outputs of
layers and never W. The operator has no derivative, and a tangent on its way in is an error.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd import forward_ad

from logra_lab import kernels
from logra_lab.errors import InputError
from logra_lab.operators import found
from logra_lab.sync.wire import power_of_two

# Not `torch.library.custom_op`: what that finds in mutates_args gets a new version, which tensors
# made in inference mode, as engines hold them, do not have.
_LIBRARY = torch.library.Library("logra_lab", "FRAGMENT")
_LIBRARY.define(
    "apply(Tensor(a!)[] weights, Tensor[] values, Tensor[] exponents, Tensor(b!)[] served, "
    "int start, int stop, str path, int k, int rank, int seed, int draw, str kind) -> ()"
)


def apply(
    weights: Sequence[Tensor],
    values: Sequence[Tensor],
    exponents: Sequence[Tensor],
    served: Sequence[Tensor],
    columns: slice,
    fields: tuple[str, int, int, int, int, str],
) -> None:
    """W ← W − values·2^exponents·(√r A) in place for each weight, drawing one A for all of them.

    Args:
        weights: [d, columns] each, of one type, on one device. values: their factors U/√r [d, r],
            int8 or floats. exponents: [d] each for int8, else none.
        served: a tensor for every weight that gets its cast, or none.
        columns: the part of A that the weights hold. fields: of the `Projection`.

    By the Triton kernel on CUDA (int8), else by torch. Raises `InputError` for a tensor with a
    tangent and for an expanded one. Cost: see `Projection.subtract_`.
    """
    if any(kernels.overlaps(x) for x in (*weights, *served)):
        raise InputError("apply: entries of a weight, or of its served copy, share memory: copy it")
    if forward_ad._current_level >= 0:
        for x in (*weights, *values, *served):
            if forward_ad.unpack_dual(x).tangent is not None:
                raise InputError(
                    "apply: a weight or factor has a tangent, and an update has none: perturb the "
                    "outputs of layers instead (`probe.perturbed`)"
                )
    torch.ops.logra_lab.apply(
        list(weights),
        list(values),
        list(exponents),
        list(served),
        columns.start,
        columns.stop,
        *fields,
    )


def arithmetic(factor: torch.dtype, weight: torch.dtype, device: torch.device) -> torch.dtype:
    """The type in which torch sums the product: int8 stands for integer sums. All are exact for
    the int8 wire; where a CPU multiplies integers, that is the quickest."""
    if weight == torch.float64:
        return torch.float64
    integer = factor == torch.int8 and weight == torch.float32
    return torch.int8 if integer and device.type == "cpu" and _vnni() else torch.float32


def _apply(
    weights: list[Tensor],
    values: list[Tensor],
    exponents: list[Tensor],
    served: list[Tensor],
    start: int,
    stop: int,
    *fields: str | int,
) -> None:
    projection, first = found(*fields), weights[0]
    copies: Sequence[Tensor | None] = served or [None] * len(weights)
    covered = values[0].dtype == torch.int8 and first.dtype != torch.float64
    if covered and kernels.backend(first.device) == "triton":
        from logra_lab.kernels import apply as kernel  # needs Triton

        for w, f, e, copy in zip(weights, values, exponents, copies, strict=True):
            kernel.launch(w, f, e, projection.key, start, copy)
        for x in (*weights, *served):
            if not x.is_inference():  # torch's own operations in place do the same
                torch.autograd.graph.increment_version(x)
        return
    dtype = arithmetic(values[0].dtype, first.dtype, first.device)
    factors, scales = values, [power_of_two(e) for e in exponents]
    if dtype != torch.int8:
        factors = [f.to(dtype) for f in values]  # a copy where there are scales: those are int8
        for f, scale in zip(factors, scales, strict=False):
            f.mul_(scale[:, None])
        scales = []
    rows: Sequence[Tensor | None] = scales or [None] * len(weights)
    parts = zip(weights, factors, rows, copies, strict=True)
    projection.subtract_(list(parts), slice(start, stop))


_LIBRARY.impl("apply", _apply, "CompositeExplicitAutograd")


@torch.library.register_fake("logra_lab::apply", lib=_LIBRARY)
def _(*_: object) -> None:
    return None


@cache
def _vnni() -> bool:
    """Whether this CPU has dot products of int8 (elsewhere torch's integer product is slow)."""
    flags = torch.cpu.get_capabilities()
    return any(flags.get(name, False) for name in ("avx512_vnni", "avx_vnni", "amx_int8"))
