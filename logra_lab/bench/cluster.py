"""The loop on Ray against the loop in one process: what it learns, where its time goes, its step.

Two trainers and a vLLM engine train the shipped policy from the seeds of the one-process runs. The
trajectories differ (sums in another order, another engine), so accuracies can only agree within the
noise of such runs, which the seeds show. A single step is compared in full; see `ranks`.
"""

import math
import statistics
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from logra_lab.bench import Figure, figure, say
from logra_lab.bench.ranks import Hosts, alone, apart, rollout, watch
from logra_lab.cluster.node import Cluster, Needs, start
from logra_lab.lab.presets import preset
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.loop import preset_config, train
from logra_lab.rl.overview import PHASES
from logra_lab.rl.policies import SMALL_FOLDER
from logra_lab.rl.records import read_steps
from logra_lab.rl.trainer import deal

_T_975 = 2.776  # Student's t at 97.5 % with 4 degrees of freedom: two means of three seeds
_ANSWERS = 256 * 8  # of an evaluation
_WARM = 3  # first steps of a run, in which shapes are met for the first time


def run(quick: bool) -> dict[str, Figure]:
    """Accuracy beside that of one process, parts of a step, overlap, and a step by 1 to 3 ranks."""
    with start(None, Needs(), cpus=4):  # one Ray for all
        figures = invariance(16 if quick else 64)
        return learning(quick) | figures


def learning(quick: bool) -> dict[str, Figure]:
    """Runs by seed in one process and on a cluster: their ends, and where a step's time went."""
    engine = "vllm" if find_spec("vllm") and not quick else "hf"
    if engine == "hf" and not quick:
        say("vLLM is not installed: the Hugging Face engine generates in its place")
    group = {"trainers": 2, "engines": 1, "engine": engine, "journal_every": 50}
    lengths: dict[str, Any] = {"steps": 50}
    if quick:
        lengths = {"steps": 5, "prompts_per_step": 32, "eval_problems": 32, "eval_samples": 2}
    one, many, lines, ratios = [], [], [], []
    for seed in preset("smoke" if quick else "laptop").seeds:
        settings = {"seed": seed, **lengths}
        one.append(_train(f"seed {seed}, one process", **settings)[0])
        after, steps = _train(f"seed {seed}, cluster", **settings, **group)
        many.append(after)
        lines += steps[_WARM:]
        if seed < 2:
            short = settings | {"steps": 5 if quick else 12, "overlap": True}
            ahead = _train(f"seed {seed}, cluster with overlap", **short, **group)[1]
            ratios.append(_seconds(ahead[_WARM:-1]) / _seconds(steps[_WARM:]))
    shares = {name: [x.get(f"seconds_{name}", 0.0) / x["seconds_step"] for x in lines]
              for name in PHASES}  # fmt: skip
    middle = {name: statistics.median(values) for name, values in shares.items()}
    return {
        "after": figure(many, "Pass@1"),
        "after_one_process": figure(one, "Pass@1"),
        "after_difference": figure(
            statistics.mean(many) - statistics.mean(one), "Pass@1", _noise(one, many)
        ),
        **{f"{name}_share": figure(middle[name], "of a step") for name in PHASES[:-1]},
        "sync_share": figure(middle["sync"], "of a step", "< 0.05"),
        "step_seconds": figure([x["seconds_step"] for x in lines], "s"),
        "overlap": figure(ratios, "× step without"),
    }


def _train(name: str, **settings: Any) -> tuple[float, list[dict[str, Any]]]:
    """Pass@1 at the end of a run, and its records."""
    config = preset_config(preset("laptop"), **settings)
    say(f"{name}: {config.steps} steps")
    with tempfile.TemporaryDirectory(prefix="logra_cluster_") as folder:
        _, results = train(config, Path(folder) / "run")
        return results[-1].pass_at_1, read_steps(Path(folder) / "run")


def _seconds(lines: Sequence[dict[str, Any]]) -> float:
    return statistics.median(line["seconds_step"] for line in lines)


def _noise(one: Sequence[float], many: Sequence[float]) -> str:
    """The range in which two means of so many runs differ by chance, 95 of 100 times; no narrower
    than what sampling of 256 x 8 answers makes."""
    spread = math.sqrt((statistics.variance(one) + statistics.variance(many)) / len(one))
    mean = statistics.mean([*one, *many])
    spread = max(spread, math.sqrt(2 * mean * (1 - mean) / (_ANSWERS * len(one))))
    return f"{-_T_975 * spread:.4f} .. {_T_975 * spread:.4f}"


def invariance(rows: int) -> dict[str, Figure]:
    """The first step of the shipped policy by one process and by one, two and three ranks: the
    largest difference of any, in float64 with its bound and in float32 as it is."""
    with start(None, Needs(trainers=3)) as cluster:
        return _invariance(cluster, rows)


def _invariance(cluster: Cluster, rows: int) -> dict[str, Figure]:
    hosts = Hosts(cluster, 3)
    figures = {}
    try:
        for dtype, bound in (("float64", "<= 1e-6"), ("float32", None)):
            say(f"ranks, {dtype}")
            worst = _apart(hosts, rows, dtype, "float32") | {
                k: v
                for k, v in _apart(hosts, rows, dtype, "int8").items()
                if k in ("int8", "units")
            }
            ending = "" if bound else "_float32"
            for name in ("S", "v", "D", "alpha", "W"):
                key = f"ranks_{name.lower()}{ending}"
                figures[key] = figure(worst[name], "relative", bound)
            share, units = ("<= 1e-4", "<= 1") if bound else (None, None)
            figures[f"ranks_int8{ending}"] = figure(worst["int8"], "of the integers", share)
            figures[f"ranks_int8_units{ending}"] = figure(worst["units"], "units", units)
    finally:
        hosts.close()
    return figures


def _apart(hosts: Hosts, rows: int, dtype: str, wire: str) -> dict[str, float]:
    config = _step_config(wire, rows)
    samples = rollout(SMALL_FOLDER, config, rows)
    trainer = alone(config, SMALL_FOLDER, dtype)
    before = {name: weight.clone() for name, weight in trainer.targets().items()}
    trainer.load(deal(samples, config, 1))
    expected = watch(trainer)
    worst: dict[str, float] = {}
    for size in (1, 2, 3):
        hosts.form(config, SMALL_FOLDER, size, dtype)
        for name, value in apart(hosts.step(samples, config)[0], expected, before).items():
            worst[name] = max(value, worst.get(name, 0.0))
    return worst


def _step_config(wire: str, rows: int) -> TrainConfig:
    """Of a proposal that its budget cuts, so that α is neither 1 nor its cap."""
    group = {"trainers": 3, "engines": 1, "engine": "hf"}
    size = {"prompts_per_step": rows, "update_ratio": 1e-2, "kl_start": 1e-3, "kl_end": None}
    return preset_config(preset("laptop"), wire=wire, **size, **group)
