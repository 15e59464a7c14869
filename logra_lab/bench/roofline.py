"""What a kernel takes at least on this machine: its bytes over the rate of a copy, its FLOPs over
the rate of a matrix product, whichever is longer.

Both rates are measured in the same rounds as the kernels, so that a machine that slows down slows
all of them. Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from logra_lab.bench import Figure, figure, say

Arm = Callable[[], Any]
Clock = Callable[[Arm], float]
COPY = "copy"


@dataclass(frozen=True)
class Part:
    """One launch: the least bytes that it reads and writes, the FLOPs of its definition, and the
    type of the products whose rate bounds them (multiply and add count one each)."""

    nbytes: int
    flops: int
    unit: torch.dtype = torch.float32


@dataclass(frozen=True)
class Case:
    """A kernel on real shapes: its closed forms, and two ways to compute the same.

    `moved` is the bytes that `traffic`, a bound on memory alone, is about; 0 for none.
    """

    parts: tuple[Part, ...]
    ours: Arm
    naive: Arm
    moved: int = 0

    def least(self, bandwidth: float, rates: Mapping[torch.dtype, float]) -> float:
        """Seconds at the roofline, launch by launch."""
        return sum(max(p.nbytes / bandwidth, p.flops / rates[p.unit]) for p in self.parts)


class Machine:
    """The arms that measure a machine: a copy, and a square product of each type."""

    def __init__(
        self, device: str, units: Sequence[torch.dtype], *, copied: int, side: int
    ) -> None:
        self.copied, self.side, self.units = copied, side, tuple(units)
        source = torch.ones(copied, dtype=torch.int8, device=device)
        target = torch.empty_like(source)
        self.arms: dict[str, Arm] = {COPY: lambda: target.copy_(source)}
        for unit in self.units:
            # Not ones: a GPU multiplies them faster than numbers.
            a = torch.randn(side, side, device=device).mul_(8).to(unit)
            self.arms[_gemm(unit)] = _product(a)

    def rates(
        self, seconds: Mapping[str, Sequence[float]]
    ) -> list[tuple[float, dict[torch.dtype, float]]]:
        """Of each round: bytes a second, and FLOPs a second by type."""
        found = []
        for i, copy in enumerate(seconds[COPY]):
            by_type = {u: 2 * self.side**3 / seconds[_gemm(u)][i] for u in self.units}
            found.append((2 * self.copied / copy, by_type))
        return found

    def figures(self, prefix: str, seconds: Mapping[str, Sequence[float]]) -> dict[str, Figure]:
        """Rates in GB/s and GFLOP/s."""
        rounds = self.rates(seconds)
        found = {f"{prefix}_copy": figure([bw / 1e9 for bw, _ in rounds], "GB/s")}
        for unit in self.units:
            rates = [by_type[unit] / 1e9 for _, by_type in rounds]
            found[f"{prefix}_{_gemm(unit)}"] = figure(rates, "GFLOP/s")
        return found


def _gemm(unit: torch.dtype) -> str:
    return f"gemm_{str(unit).removeprefix('torch.')}"


def _product(a: torch.Tensor) -> Arm:
    multiply = torch._int_mm if a.dtype == torch.int8 else torch.mm
    return lambda: multiply(a, a.T)  # the layout that int8 on CUDA asks for


def cpu_clock(arm: Arm) -> float:
    """Seconds of one call on this thread; those that the machine gave to others are not in it."""
    start = time.thread_time()
    arm()
    return time.thread_time() - start


class CudaClock:
    """Seconds of one call on the device, with caches cold.

    Writing a GiB first empties the L2 cache, and lets the CPU run ahead, so that what it takes to
    launch kernels is not in the time.
    """

    def __init__(self) -> None:
        self.flush = torch.empty(1 << 30, dtype=torch.int8, device="cuda")

    def __call__(self, arm: Arm) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush.zero_()
        start.record()
        arm()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def turns(arms: Mapping[str, Arm], clock: Clock, rounds: int) -> dict[str, list[float]]:
    """Seconds of every arm in each round. Arms take turns, in an order that alternates; the first
    round warms up (and compiles) and is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for i in range(rounds + 1):
        for name in list(arms)[:: 1 if i % 2 else -1]:
            taken = clock(arms[name])
            if i:
                seconds[name].append(taken)
        say(f"round {i} of {rounds}")
    return seconds


def compare(
    prefix: str,
    cases: Mapping[str, Case],
    machine: Machine,
    clock: Clock,
    rounds: int,
    *,
    share: str | None = None,
    traffic: str | None = None,
) -> dict[str, Figure]:
    """The machine's figures, and of each case: time, bytes, FLOPs, `roofline` (the least time over
    that of ours, 1 at best), `naive` (ours over naive), and `traffic` (ours over the time that a
    copy takes for the bytes `moved`; only under its bound). `share` bounds `roofline`."""
    arms = dict(machine.arms)
    for name, case in cases.items():
        arms |= {f"{name} ours": case.ours, f"{name} naive": case.naive}
    seconds = turns(arms, clock, rounds)
    found, rates = machine.figures(prefix, seconds), machine.rates(seconds)
    for name, case in cases.items():
        ours, naive = seconds[f"{name} ours"], seconds[f"{name} naive"]
        key = f"{prefix}_{name}"
        least = [case.least(*rate) / t for rate, t in zip(rates, ours, strict=True)]
        found[f"{key}_ms"] = figure([1e3 * t for t in ours], "ms")
        found[f"{key}_mb"] = figure(sum(p.nbytes for p in case.parts) / 1e6, "MB")
        found[f"{key}_gflop"] = figure(sum(p.flops for p in case.parts) / 1e9, "GFLOP")
        found[f"{key}_roofline"] = figure(least, "of roofline", share)
        by_naive = [a / b for a, b in zip(ours, naive, strict=True)]
        found[f"{key}_naive"] = figure(by_naive, "× naive")
        if case.moved and traffic:
            over = [t * bw / case.moved for (bw, _), t in zip(rates, ours, strict=True)]
            found[f"{key}_traffic"] = figure(over, "× copy", traffic)
    return found
