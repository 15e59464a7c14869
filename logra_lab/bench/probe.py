"""Predicted KL on the shipped policy: do the two probes agree, and does the prediction come true?

Both on real updates of a PPO run: the probes on the same proposal, and realised over predicted KL
on the same positions, with every step scaled to exactly the stated KL (no cap on alpha).
"""

import tempfile
from pathlib import Path

from logra_lab import kl
from logra_lab.bench import Figure, figure, say
from logra_lab.lab.presets import preset
from logra_lab.rl.loop import load_tasks, preset_config, train
from logra_lab.rl.policies import load_policy
from logra_lab.rl.records import read_steps
from logra_lab.rl.run import Run
from logra_lab.rl.scoring import ScoringPool


def run(quick: bool) -> dict[str, Figure]:
    """`jvp_vs_fd`: |fd / jvp − 1|; `kl_ratio_*`: realised / predicted, step by step."""
    steps = 4 if quick else 30
    small = {"eval_problems": 32, "eval_samples": 1, "steps": steps, "probe_responses": 64}
    figures = {"jvp_vs_fd": figure(_disagreement(steps), "relative", "<= 1e-4")}
    for key, target, bound in (
        ("kl_ratio_1e4", 1e-4, "0.95 .. 1.05"),
        ("kl_ratio_1e3", 1e-3, "0.85 .. 1.15"),
    ):
        ratios: list[float] = []
        for seed in preset("laptop").seeds:
            config = preset_config(
                preset("laptop"), seed=seed, kl_start=target, kl_end=None, alpha_max=1e6, **small
            )
            with tempfile.TemporaryDirectory() as folder:
                train(config, Path(folder) / "run")
                lines = read_steps(Path(folder) / "run")
            ratios += [s["kl_realised"] / s["kl_predicted"] for s in lines if not s["skipped"]]
            say(f"{key}, seed {seed}: {len(ratios)} steps so far")
        figures[key] = figure(ratios, "realised / predicted", bound)
    return figures


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
            exact = kl.predict(sketch, sketch.flat, probe, method="jvp").kl
            seen.append(abs(kl.predict(sketch, sketch.flat, probe, method="fd").kl / exact - 1))
            return step(probe, gap=gap)

        learner.step = compare  # type: ignore[method-assign]
        for _ in range(steps):
            loop.one_step()
    return seen
