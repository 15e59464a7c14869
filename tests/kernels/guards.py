"""Tensors with guards around them in memory, and bounds on float32 sums."""

import torch

GUARD = 3  # entries on every side
# Unit roundoff: half the distance from 1 to the next number. Sums get a whole one, 2⁻²³, for each
# addition, since tensor cores may truncate.
ROUNDOFF = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SMALLEST = {torch.float32: 2**-149, torch.bfloat16: 2**-133, torch.float16: 2**-24}
ADDITION = 2**-23


def guarded(x, fill, step=1, device="cpu"):
    """A view equal to x, its neighbours in memory all `fill`; and that memory.

    step: of the last dimension; "swapped" lays the last two dimensions out in turn.
    """
    if step == "swapped":
        view, memory = guarded(x.mT, fill, 1, device)
        return view.mT, memory.mT
    steps = [1] * (x.dim() - 1) + [step]
    memory = torch.full(
        [n * s + 2 * GUARD for n, s in zip(x.shape, steps, strict=True)],
        fill,
        dtype=x.dtype,
        device=device,
    )
    cuts = tuple(slice(GUARD, GUARD + n * s, s) for n, s in zip(x.shape, steps, strict=True))
    memory[cuts] = x.to(device)
    return memory[cuts], memory


def untouched(memory, view, fill):
    """Whether all of `memory` except `view` still holds `fill`, a number."""
    outside = torch.ones_like(memory, dtype=torch.bool)
    outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
    return bool((memory[outside] == fill).all())


def rounded(bound, exact, dtype):
    """`bound` on a number near `exact`, plus one rounding to `dtype`."""
    return bound + ROUNDOFF[dtype] * (exact.abs() + bound) + SMALLEST[dtype] / 2


def forcing(interpreted, module, function):
    """Inside: the interpreter's process takes the Triton path, and counts the calls of a launcher.

    A generator for a fixture; yields a function that returns the count.
    """
    interpreted(
        exec,
        f"""
import os, logra_lab.kernels.{module} as m
globals().update(m=m)
os.environ["LOGRA_LAB_KERNELS"] = "triton"
m.original, m.calls = m.{function}, 0
def counted(*args, **named):
    m.calls += 1
    return m.original(*args, **named)
m.{function} = counted
""",
        {},
    )
    yield lambda: interpreted(
        eval, f"__import__('sys').modules['logra_lab.kernels.{module}'].calls"
    )
    interpreted(
        exec,
        f"""
import os, logra_lab.kernels.{module} as m
globals().update(m=m)
del os.environ["LOGRA_LAB_KERNELS"]
m.{function} = m.original
""",
        {},
    )
