"""Predicted KL on the shipped policy: do the two probes agree, and does the prediction come true?

Both on real updates of a PPO run: the probes on the same proposal, and realised over predicted KL
on the same positions, with every step scaled to exactly the stated KL (no cap on alpha).
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from logra_lab.bench import Figure, figure, say
from logra_lab.lab.presets import preset
from logra_lab.probe import predict
from logra_lab.rl.loop import load_tasks, preset_config, train
from logra_lab.rl.policies import load_policy
from logra_lab.rl.records import read_steps
from logra_lab.rl.run import Run
from logra_lab.rl.scoring import ScoringPool

_RATIO = "realised / predicted"


def run(quick: bool) -> dict[str, Figure]:
    """`jvp_vs_fd`: |fd / jvp − 1|; `kl_ratio_*`: realised / predicted, step by step."""
    steps = 4 if quick else 30
    seeds = preset("laptop").seeds
    return {
        "jvp_vs_fd": figure(_disagreement(steps), "relative", "<= 1e-4"),
        "kl_ratio_1e4": figure(ratios(1e-4, steps, seeds), _RATIO, "0.95 .. 1.05"),
        "kl_ratio_1e3": figure(ratios(1e-3, steps, seeds), _RATIO, "0.85 .. 1.15"),
    }


def ratios(target: float, steps: int, seeds: Sequence[int]) -> list[float]:
    """Realised / predicted KL of every step of runs whose steps are all scaled to `target`."""
    found: list[float] = []
    for seed in seeds:
        config = preset_config(
            preset("laptop"),
            seed=seed,
            steps=steps,
            kl_start=target,
            kl_end=None,
            alpha_max=1e6,
            probe_responses=64,
            eval_problems=32,
            eval_samples=1,
        )
        with tempfile.TemporaryDirectory() as folder:
            train(config, Path(folder) / "run")
            lines = read_steps(Path(folder) / "run")
        found += [s["kl_realised"] / s["kl_predicted"] for s in lines if not s["skipped"]]
        say(f"KL {target:g}, seed {seed}: {len(found)} steps so far")
    return found


def _disagreement(steps: int) -> list[float]:
    config = preset_config(preset("laptop"), probe_responses=64, eval_problems=32)
    tasks, policy = load_tasks(config), load_policy(config.policy)
    seen: list[float] = []
    with ScoringPool(tasks[0].verifier) as scorer:
        loop = Run(config, policy, *tasks, scorer)
        learner = loop.learner
        step = learner.step

        def compare(probe, *, gap):  # type: ignore[no-untyped-def]
            """The proposal of this step through both probes, then the step as usual."""
            sketch = learner.sketch  # type: ignore[attr-defined]
            exact = predict(sketch, sketch.flat, probe, method="jvp").kl
            seen.append(abs(predict(sketch, sketch.flat, probe, method="fd").kl / exact - 1))
            return step(probe, gap=gap)

        learner.step = compare  # type: ignore[method-assign]
        for _ in range(steps):
            loop.one_step()
    return seen
