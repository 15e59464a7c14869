"""The GPU's part of `logra-lab bench kernels`, tiny and interpreted: every call that it makes."""

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from logra_lab.bench import kernels
from logra_lab.bench.roofline import cpu_clock

LAUNCHERS = (
    ("signs", "launch"),
    ("project", "launch"),
    ("accumulate", "launch"),
    ("gram", "launch"),
    ("gram", "launch_norm"),
    ("row_adam", "launch"),
    ("apply", "launch"),
    ("kl", "launch"),
)
COUNTING = """
import functools, importlib, os
os.environ["LOGRA_LAB_KERNELS"] = "triton"
counts = importlib.import_module("logra_lab.kernels").bench_counts = {}
for module, name in %r:
    module = importlib.import_module("logra_lab.kernels." + module)
    launch, key = getattr(module, name), (module.__name__.rpartition(".")[2], name)
    def counted(*args, launch=launch, key=key, **named):
        counts[key] = counts.get(key, 0) + 1
        return launch(*args, **named)
    counted.original = launch
    setattr(module, name, counted)
"""
AS_BEFORE = """
import importlib, os
del os.environ["LOGRA_LAB_KERNELS"]
for module, name in %r:
    module = importlib.import_module("logra_lab.kernels." + module)
    setattr(module, name, getattr(module, name).original)
"""


@pytest.fixture
def counts(interpreted):
    interpreted(exec, COUNTING % (LAUNCHERS,), {})
    yield lambda: interpreted(eval, "__import__('logra_lab').kernels.bench_counts")
    interpreted(exec, AS_BEFORE % (LAUNCHERS,), {})


def test_every_arm_runs_by_the_kernels_and_catches_a_launcher_that_changed(interpreted, counts):
    sizes = kernels.TINY
    figures = interpreted(
        kernels.triton_figures, sizes, "cpu", cpu_clock, rounds=1, side=32, copied=4096
    )
    layers, sites, turns = len(sizes.layers), len(sizes.sites), 2  # a round, and one to warm up
    assert counts() == {
        ("signs", "launch"): turns * sites,
        ("project", "launch"): turns * sites,
        ("accumulate", "launch"): turns * layers,
        ("gram", "launch"): turns * sites + sites,  # and once for `squared_norm`
        ("gram", "launch_norm"): turns * layers,
        ("row_adam", "launch"): turns,
        ("apply", "launch"): turns * layers * 2,  # with and without a served copy
        ("kl", "launch"): turns * 3,  # variance, realised, token
    }
    bounds = {key: f.bound for key, f in figures.items() if f.bound}
    shares = {key for key, bound in bounds.items() if bound == ">= 0.7"}
    assert shares == {
        f"gpu_{name}_roofline"
        for name in ("signs", "project", "accumulate", "gram", "squared_norm", "row_adam")
    } | {"gpu_apply_roofline", "gpu_apply_served_roofline"} | {
        f"gpu_kl_{kind}_roofline" for kind in ("variance", "realised", "token")
    }
    assert {key for key, bound in bounds.items() if bound == "<= 1.2"} == {
        *("gpu_apply_traffic", "gpu_apply_served_traffic"),
        *(f"gpu_kl_{kind}_traffic" for kind in ("variance", "realised", "token")),
    }


@pytest.mark.gpu
def test_on_a_gpu_the_quick_run_measures_kernels_and_steps():
    figures = kernels.on_gpu(quick=True)
    assert figures["gpu_seconds"].holds
    assert {"gpu_step_vs_adamw", "gpu_step_vs_naive", "gpu_apply_traffic"} <= figures.keys()
    assert torch.cuda.max_memory_allocated() > 0
