"""SmolLM2-135M-Instruct on two-term sums from reasoning-gym, 40 steps under KL control.

Accuracy on 200 held-out problems before and after; and on 1,000 further draws, each sampled once
with the same random numbers after steps 20 and 40, the paired change: does the run slide back
once it has learned? Those draws may repeat training prompts; the 200 never do.
"""

import time
from typing import Any

from logra_lab.bench import Figure, figure, say
from logra_lab.lab.presets import preset
from logra_lab.rl.evaluate import EvalResult, evaluate, paired_interval
from logra_lab.rl.loop import load_tasks, preset_config
from logra_lab.rl.policies import load_policy
from logra_lab.rl.run import Run
from logra_lab.rl.scoring import ScoringPool
from logra_lab.rl.tasks import Task, load_task


def run(quick: bool) -> dict[str, Figure]:
    """Needs the wheel of SmolLM2; about a quarter of an hour on two cores."""
    settings: dict[str, Any] = {"steps": 40}
    slide_problems = 1000
    if quick:
        settings, slide_problems = {"steps": 2, "prompts_per_step": 8, "eval_problems": 8}, 8
    base = preset("smollm")
    config = preset_config(base, eval_samples=1, **settings)
    train_task, held_out = load_tasks(config)
    further = load_task(
        config.task,
        size=slide_problems,
        seed=3,  # neither the training's nor the held-out draw
        params=config.task_params,
        exclude={problem.prompt for problem in held_out},
        distinct=False,
    )
    with ScoringPool(train_task.verifier) as scorer:
        loop = Run(config, load_policy(config.policy), train_task, held_out, scorer)

        def judged(task: Task, tag: str) -> EvalResult:
            return evaluate(
                loop.engine, loop.policy, task, scorer, samples=1, run_seed=config.seed, tag=tag
            )

        start = time.perf_counter()
        before = judged(held_out, "held-out")
        slides: list[EvalResult] = []
        apart = 0.0
        for step in range(1, config.steps + 1):
            line = loop.one_step()
            say(
                f"step {step} of {config.steps}: accuracy {line['accuracy'] or 0:.0%}, "
                f"{line['response_tokens_mean']:.1f} tokens, {line['seconds_step']:.1f} s, "
                f"KL {line.get('kl_realised') or 0:.1e}, {line['skipped'] or 'taken'}"
            )
            if step in (config.steps // 2, config.steps):
                pause = time.perf_counter()
                slides.append(judged(further, "further"))
                apart += time.perf_counter() - pause
        after = judged(held_out, "held-out")
        seconds = time.perf_counter() - start - apart
    middle, last = slides
    low, high = paired_interval(middle.rewards, last.rewards)
    change = last.pass_at_1 - middle.pass_at_1
    return {
        "before": figure(before.pass_at_1, "accuracy", "< 0.10"),
        "after": figure(after.pass_at_1, "accuracy", ">= 0.50"),
        "truncated_before": figure(before.truncated_share, "share"),
        "truncated_after": figure(after.truncated_share, "share", "< 0.05"),
        "tokens_before": figure(before.mean_length, "tokens"),
        "tokens_after": figure(after.mean_length, "tokens"),
        "seconds": figure(seconds, "s", "<= 900"),
        "slide": Figure(100 * change, "points", 100 * low, 100 * high, "low > -5", low > -0.05),
    }
