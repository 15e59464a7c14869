"""The shipped policy under the default preset: three seeds, then a soak of 1,100 steps.

The soak asks what a controller is for: does a long run end where it was best, and does memory
stay flat? It is run with the budget and without.
"""

import math
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from logra_lab.bench import Figure, figure, say
from logra_lab.lab.presets import preset
from logra_lab.rl.evaluate import EvalResult
from logra_lab.rl.loop import preset_config, train


def run(quick: bool) -> dict[str, Figure]:
    """Accuracy and truncation before and after, seconds a run, and the two soaks."""
    base = preset("smoke" if quick else "laptop")
    runs: list[tuple[list[EvalResult], float]] = []
    for seed in base.seeds:
        start = time.perf_counter()
        results = _train(base, f"seed {seed}", seed=seed)[0]
        runs.append((results, time.perf_counter() - start))
    before, after = [r[0] for r, _ in runs], [r[-1] for r, _ in runs]
    figures = {
        "before": figure([r.pass_at_1 for r in before], "Pass@1", "<= 0.40", every=True),
        "after": figure([r.pass_at_1 for r in after], "Pass@1", ">= 0.85", every=True),
        "pass4_before": figure([r.pass_at_4 or 0 for r in before], "Pass@4"),
        "pass4_after": figure([r.pass_at_4 or 0 for r in after], "Pass@4"),
        "truncated_before": figure([r.truncated_share for r in before], "share"),
        "truncated_after": figure(
            [r.truncated_share for r in after],
            "share",
            f"< {min(r.truncated_share for r in before)}",
            every=True,
        ),
        "seconds": figure([seconds for _, seconds in runs], "s a run", "<= 120", every=True),
    }
    steps, every = (24, 6) if quick else (1100, 50)
    for name, control in (
        ("soak", {"kl_horizon": steps}),
        ("soak_uncontrolled", {"kl_start": None, "kl_end": None}),
    ):
        results, memory = _train(
            base, name, steps=steps, eval_every=every, eval_samples=4, **control
        )
        best = max(r.pass_at_1 for r in results)
        held = name == "soak"
        drop = 100 * (best - results[-1].pass_at_1)
        figures[f"{name}_best"] = figure(best, "Pass@1")
        figures[f"{name}_drop"] = figure(drop, "points below best", "<= 3" if held else None)
        # from a fifth of the run on: by then every shape has been allocated once
        growth = memory[-1] / memory[len(memory) // 5] - 1
        figures[f"{name}_memory_growth"] = figure(growth, "share", "<= 0.05" if held else None)
    return figures


def _train(base: Any, name: str, **settings: Any) -> tuple[list[EvalResult], list[int]]:
    """Evaluations of a run and the resident bytes after each step."""
    memory: list[int] = []
    process = psutil.Process()

    def watch(line: dict[str, Any]) -> None:
        memory.append(process.memory_info().rss)
        if line["step"] % max(1, math.ceil(config.steps / 20)) == 0:
            say(f"{name}: step {line['step']} of {config.steps}, accuracy {line['accuracy']:.1%}")

    config = preset_config(base, **settings)
    with tempfile.TemporaryDirectory() as folder:
        return train(config, Path(folder) / "run", on_step=watch)[1], memory
