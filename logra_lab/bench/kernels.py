"""The kernels in numbers: time, bytes, FLOPs, and how far each is from what the machine allows.

Without a GPU the torch paths are measured, on one thread and by its own time (with two, they wait
for whatever else a shared machine does). With CUDA the Triton kernels are, on the shapes of
Qwen2.5-7B, and a training step against dense AdamW and against LoGRA as one would first write it,
all in one run:

    logra-lab bench kernels --json data/results/kernels_gpu.json

That compiles the kernels as it goes (Triton's cache, no extension to build) and is made to end in
under 8 minutes on one GPU with 48 GB. It was never run: no GPU was at hand. What was run is every
call of a kernel, tiny and interpreted (tests/kernels/test_bench.py), and the arms of the step on
a CPU; the clock of the GPU was not.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.profiler import ProfilerActivity, profile

from logra_lab import kernels
from logra_lab.bench import Figure, figure, say
from logra_lab.bench.cases import Cases, Sizes
from logra_lab.bench.roofline import Clock, CudaClock, Machine, compare, cpu_clock, turns
from logra_lab.errors import InputError
from logra_lab.projection import Projection
from logra_lab.sync.shapes import MODELS
from logra_lab.sync.wire import ThinLayer

_MIB = 2**20
VOCABULARY = 152_064  # of Qwen2.5-7B
CPU = Sizes(
    layers=(ThinLayer("o_proj", 4096, 4096, "o_proj"),),
    tokens=2048,
    rank=256,
    rows=64,
    vocabulary=VOCABULARY,
    blocks=8,
    dtype=torch.float32,
)
GPU = Sizes(
    layers=MODELS["Qwen2.5-7B"].layers[:7],  # a block: q, k, v, o, gate, up, down
    tokens=8192,
    rank=256,
    rows=1024,
    vocabulary=VOCABULARY,
    blocks=28,
    dtype=torch.bfloat16,
)
TINY = Sizes(
    layers=(
        ThinLayer("q_proj", 48, 64, "q_proj"),
        ThinLayer("k_proj", 16, 64, "q_proj"),
        ThinLayer("down_proj", 64, 96, "down_proj"),
    ),
    tokens=32,
    rank=16,
    rows=4,
    vocabulary=130,
    blocks=2,
    dtype=torch.bfloat16,
)
_STEP_MEMORY = 44 << 30  # bytes that three models, AdamW's state and a step's activations need


def run(quick: bool) -> dict[str, Figure]:
    """Figures of the GPU if there is one, else of the CPU; keys begin with `gpu_` or `cpu_`."""
    return on_gpu(quick) if torch.cuda.is_available() else on_cpu(quick)


@torch.no_grad()
def on_cpu(quick: bool) -> dict[str, Figure]:
    """The torch paths, one thread; and the bounds on `project`."""
    torch.set_num_threads(1)
    sizes = replace(TINY, dtype=torch.float32) if quick else CPU
    units = (torch.float32, torch.int8)
    copied, side = (_MIB, 64) if quick else (256 * _MIB, 2048)
    machine = Machine("cpu", units, copied=copied, side=side)
    n, k, r = (64, 256, 16) if quick else (2048, 4096, 256)
    figures = {
        "project_cpu": project_ratio(n, k, r, rounds=2 if quick else 31),
        "project_block_mib": figure(block_bytes(n, k, r) / _MIB, "MiB", "<= 1.01"),
    }
    rounds = 2 if quick else 9
    return figures | compare("cpu", Cases(sizes, "cpu").all(), machine, cpu_clock, rounds)


def on_gpu(quick: bool) -> dict[str, Figure]:
    """The Triton kernels; and a step of LoGRA, AdamW and naive LoGRA."""
    if kernels.backend("cuda") != "triton":
        raise InputError(
            "bench kernels measures the Triton kernels on a GPU, but torch would compute: install "
            f"the triton package, and unset {kernels.VARIABLE}"
        )
    began = time.monotonic()
    with torch.no_grad():
        figures = triton_figures(
            replace(TINY, tokens=64, rank=32) if quick else GPU,
            "cuda",
            CudaClock(),
            rounds=2 if quick else 20,
            side=256 if quick else 8192,
            copied=_MIB if quick else 1024 * _MIB,
        )
    torch.cuda.empty_cache()
    figures |= step_figures(quick)
    figures["gpu_seconds"] = figure(time.monotonic() - began, "s", "<= 480")
    return figures


def triton_figures(
    sizes: Sizes, device: str, clock: Clock, *, rounds: int, side: int, copied: int
) -> dict[str, Figure]:
    """Each kernel at ≥ 70 % of its roofline; W, and logits, moved once within 1.2 × of a copy."""
    units = (torch.float32, torch.bfloat16, torch.int8)
    machine = Machine(device, units, copied=copied, side=side)
    cases = Cases(sizes, device).all()
    return compare("gpu", cases, machine, clock, rounds, share=">= 0.7", traffic="<= 1.2")


def step_figures(quick: bool) -> dict[str, Figure]:
    """Seconds of a training step; LoGRA's over dense AdamW's and over naive LoGRA's."""
    from logra_lab.bench.naive import SMALL, arms

    memory = torch.cuda.get_device_properties(0).total_memory
    if not quick and memory < _STEP_MEMORY:
        say(f"this GPU has {memory / 2**30:.0f} GiB: a step on blocks of the 7B model is left out")
        return {}
    made = arms("cuda", **SMALL) if quick else arms("cuda")
    return step_ratios(turns(made, CudaClock(), 2 if quick else 10))


def step_ratios(seconds: dict[str, list[float]]) -> dict[str, Figure]:
    """Round by round."""

    def ratio(other: str) -> list[float]:
        return [a / b for a, b in zip(seconds["logra"], seconds[other], strict=True)]

    figures = {f"gpu_step_{name}": figure(values, "s") for name, values in seconds.items()}
    figures["gpu_step_vs_adamw"] = figure(ratio("adamw"), "× AdamW")
    figures["gpu_step_vs_naive"] = figure(ratio("naive"), "× naive LoGRA")
    return figures


def project_ratio(n: int, k: int, rank: int, rounds: int) -> Figure:
    """`project`, signs drawn anew every time, over the plain product with A ready in memory."""
    X, draws = torch.randn(n, k), itertools.count(1)
    ready = Projection("site", k, rank).matrix()
    arms: dict[str, Callable[[], torch.Tensor]] = {
        "ours": lambda: Projection("site", k, rank, draw=next(draws)).project(X),
        "plain": lambda: X @ ready.T,
    }
    seconds = turns(arms, cpu_clock, rounds)
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["plain"], strict=True)]
    return figure(ratios, "× GEMM with A ready", "<= 1.15")


def block_bytes(n: int, k: int, rank: int) -> int:
    """The most bytes that `project` allocates at a time beside P and the packed sign bits.

    Every block of A is among them. torch's own allocation events, so whatever the code holds
    counts, under any name.
    """
    X, projection = torch.randn(n, k), Projection("site", k, rank)
    _ = projection.words  # r·k/8 bytes that live on, by design
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        P = projection.project(X)
    events = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    memory = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in memory)) - P.nbytes
