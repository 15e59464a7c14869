"""Policy synchronisation in numbers: payload, exactness, what rounding costs, time to apply.

Training runs are real runs of the presets; engines are real vLLM engines on the CPU in processes
of their own, beside a Hugging Face copy that the same updates reach. Times are ratios from
interleaved runs. Without vLLM its figures are left out, said aloud.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from logra_lab.bench import Figure, figure, say
from logra_lab.bench.fuzz import fuzz
from logra_lab.lab.presets import preset
from logra_lab.rl.drift import Follower, follow
from logra_lab.rl.engines import CopyEngine
from logra_lab.rl.gaps import gaps
from logra_lab.rl.loop import load_tasks, preset_config, train
from logra_lab.rl.policies import Policy, load_policy
from logra_lab.rl.run import Run
from logra_lab.rl.scoring import ScoringPool
from logra_lab.sketch import TARGETS, find_targets
from logra_lab.sync.shapes import MODELS
from logra_lab.sync.update import Slot, ThinUpdate, apply
from logra_lab.sync.wire import ThinLayer, payload_bytes

_GB = 1e9
_STALE_IDS = 300  # more than two blocks of 128 of the CPU engine's cache


def run(quick: bool) -> dict[str, Figure]:
    """All figures that the README's table of synchronisation shows."""
    figures = payload(64 if quick else 256)
    figures |= {f"apply_r{r}": apply_ratio(r, rounds=2 if quick else 9) for r in (64, 256)}
    found = fuzz(500 if quick else 20_000)
    figures["fuzz_tried"] = figure(found["tried"], "payloads", ">= 10000")
    figures["fuzz_partial"] = figure(found["partial"], "payloads", "<= 0")
    figures["fuzz_crash"] = figure(found["crashes"], "payloads", "<= 0")
    figures |= exactness("shipped", "laptop", 4 if quick else 200)
    figures |= exactness("smollm", "smollm", 1 if quick else 10)
    if find_spec("vllm"):
        figures |= logprob_gaps(16 if quick else 256) | stale_cache()
    else:
        say("vLLM is not installed: its figures are left out; run `make setup` on Linux x86_64")
    figures |= plain_drift(4 if quick else 200)
    figures["int8_cost"] = rounding_cost(quick)
    return figures


def payload(rank: int) -> dict[str, Figure]:
    """Bytes of an update of each model's shapes from the real serializer, the closed form
    Σ d·(r + 1), and full bfloat16 weights."""
    figures = {}
    for name, key, bound in (
        ("Qwen2.5-1.5B", "gb_1_5b", "0.15 .. 0.19"),
        ("Qwen2.5-7B", "gb_7b", "0.33 .. 0.39"),
        ("27B", "gb_27b", "0.7 .. 1.0"),
        ("27B with linear attention", "gb_27b_linear", "0.7 .. 1.05"),
    ):
        model = MODELS[name]
        size = len(model.update(rank).to_bytes())
        figures[key] = figure(size / _GB, "GB", bound if rank == 256 else None)
        figures[f"{key}_closed_form"] = figure(payload_bytes(model.shapes, rank) / _GB, "GB")
        figures[f"{key}_full_bf16"] = figure(2 * model.parameters / _GB, "GB")
        say(f"{name}: {size:,} bytes at rank {rank}")
    return figures


def apply_ratio(rank: int, rounds: int) -> Figure:
    """`apply`, signs included, over float32 `addmm_` with ready A, on SmolLM2's matrices."""
    say(f"applying at rank {rank}")
    policy = load_policy("smollm2")
    linears = find_targets(policy.model, TARGETS)
    weights = {name: module.weight.data for name, module in linears.items()}
    layers = _layers(weights)
    U = torch.randn(sum(x.d for x in layers), rank, generator=torch.Generator().manual_seed(0))
    update = ThinUpdate.round(U.mul_(1e-6), layers, run="bench", base=0, seed=0, draw=1)
    ready = {x.site: update.projection(x).matrix() for x in layers}
    factors = dict(zip(weights, U.split([x.d for x in layers]), strict=True))
    slots = [Slot.whole(name, weight) for name, weight in weights.items()]
    torch.set_num_threads(1)  # two threads of one pair wait for whatever else the machine does

    def plain() -> None:
        for layer in layers:
            weights[layer.name].addmm_(factors[layer.name], ready[layer.site], alpha=-1)

    return figure(_ratios(lambda: apply(update, slots), plain, rounds), "× addmm_", "<= 1.2")


def _layers(weights: Mapping[str, Tensor]) -> list[ThinLayer]:
    """q, k and v share one A, and so do gate and up."""

    def site(name: str) -> str:
        first = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj")
        return first.replace("up_proj", "gate_proj")

    return [ThinLayer(n, w.shape[0], w.shape[1], site(n)) for n, w in weights.items()]


def _ratios(ours: Callable[[], None], theirs: Callable[[], None], rounds: int) -> list[float]:
    """Ours over theirs, pair by pair, the order of a pair alternating; the first is dropped."""
    found = []
    for i in range(rounds + 1):
        seconds = {}
        for f in (ours, theirs) if i % 2 else (theirs, ours):
            start = time.perf_counter()
            f()
            seconds[f] = time.perf_counter() - start
        found.append(seconds[ours] / seconds[theirs])
    return found[1:]


def exactness(name: str, preset_name: str, steps: int) -> dict[str, Figure]:
    """Served bits that differ from the trainer's cast to bfloat16 after `steps` updates.

    In a Hugging Face copy all bits are compared; in vLLM the digests of the served weights of all
    ranks with those of a copy that was given the trainer's cast.
    """
    figures = {}
    engine = "vllm" if find_spec("vllm") else "hf"
    settings = {"engine": engine, "serving_dtype": "bfloat16", "eval_problems": 32}
    config = preset_config(preset(preset_name), steps=steps, **settings)
    with _loop(config.model_dump()) as loop:
        copy = CopyEngine(
            loop.policy, max_new_tokens=1, dtype=torch.bfloat16, targets=config.targets
        )
        copy.full_sync(loop.learner.targets(), loop.learner.run, 0)
        publish = loop.publisher.publish

        def both(update: ThinUpdate) -> list[str]:
            copy.sync(update)
            return publish(update)

        loop.publisher.publish = both  # type: ignore[method-assign]
        while loop.version < steps:
            line = loop.one_step()
            if line["step"] % 10 == 0 or name == "smollm":
                say(f"{name}, {engine}: step {line['step']}, accuracy {line['accuracy']:.0%}")
        targets = loop.learner.targets()
        bits = sum(count for count, _ in copy.receiver.difference(targets).values())
        figures[f"bits_{name}"] = figure(bits, "bits that differ", "<= 0")
        if engine == "vllm":  # its digest is over the layers in the copy's order
            odd = loop.engine.digests() != [copy.receiver.digest()]  # type: ignore[union-attr]
            figures[f"bits_{name}_vllm"] = figure(int(odd), "ranks that differ", "<= 0")
    return figures


@contextmanager
def _loop(settings: Mapping[str, Any]) -> Iterator[Run]:
    """A run of these settings that is closed at the end."""
    config = preset_config(preset("laptop"), **settings)
    tasks = load_tasks(config)
    with ScoringPool(tasks[0].verifier, config.score_workers, config.score_timeout) as scorer:
        loop = Run(config, load_policy(config.policy), *tasks, scorer)
        try:
            yield loop
        finally:
            loop.publisher.close()
            gc.collect()


def logprob_gaps(rows: int) -> dict[str, Figure]:
    """Mean |logp of the trainer − logp of vLLM| over sampled tokens, float32, by temperature."""
    from logra_lab.rl.vllm_engine import VLLMEngine

    figures = {}
    for key, temperature in {"gap_t05": 0.5, "gap_t1": 1.0, "gap_t17": 1.7}.items():
        policy = load_policy("small")
        config = preset_config(preset("laptop"), eval_problems=rows)
        prompts = [policy.encode(x.prompt) for x in load_tasks(config)[1].problems]
        with VLLMEngine(policy, temperature=temperature, max_new_tokens=16) as engine:
            engine.full_sync(_targets(policy), "bench", 0)
            rollout = engine.generate(prompts, [str(i) for i in range(len(prompts))])
        gap = gaps(policy.model, rollout, temperature=temperature).mean().item()
        figures[key] = figure(gap, "nats/token", "<= 0.02")
    return figures


def stale_cache() -> dict[str, Figure]:
    """Largest logprob error after an update, against the trainer, with and without the reset."""
    from logra_lab.rl.vllm_engine import VLLMEngine

    policy = load_policy("small")
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(5, 25, (_STALE_IDS,), generator=generator).tolist()
    figures = {}
    for key, bound, reset in (("stale_reset", "<= 0.02", True), ("stale_control", ">= 0.1", False)):
        own = load_policy("small")
        targets = _targets(own)
        with VLLMEngine(policy, max_new_tokens=8, max_prompt_tokens=_STALE_IDS) as engine:
            engine.full_sync(targets, "bench", 0)
            engine.generate([prompt], ["warm"])
            layers = _layers(targets)
            U = torch.randn(sum(x.d for x in layers), 4, generator=generator).mul_(0.05)
            update = ThinUpdate.round(U, layers, run="bench", base=0, seed=0, draw=1)
            apply(update, [Slot.whole(n, w) for n, w in targets.items()])
            if not reset:  # what goes wrong for those who forget it
                engine._reset_prefix_cache = lambda: None  # type: ignore[method-assign]
            engine.sync(update)
            rollout = engine.generate([prompt], ["after"])
        figures[key] = figure(gaps(own.model, rollout).max().item(), "nats", bound)
    return figures


def _targets(policy: Policy) -> dict[str, Tensor]:
    return {n: m.weight.data for n, m in find_targets(policy.model, TARGETS).items()}


def plain_drift(steps: int) -> dict[str, Figure]:
    """How far a bfloat16 engine parts from the trainer's cast in all steps: KL and logprob gap a
    token, relative weight error. Exact and plain under the int8 wire; and a bfloat16 wire of a
    trainer that applies its factors unrounded, which even a float32 copy does not make good."""
    figures = {}
    for wire, followers in {
        "int8": {"plain": Follower(mode="plain"), "exact": Follower()},
        "float32": {"bf16_wire": Follower("bfloat16"), "bf16_both": Follower("bfloat16", "plain")},
    }.items():
        say(f"drift over {steps} steps, the trainer's factors in {wire}")
        config = preset_config(preset("laptop"), steps=steps, eval_problems=32, wire=wire)
        rows = follow(load_policy("small"), config, list(followers.values()), every=steps)
        last = {row["follower"]: row for row in rows}
        for name, follower in followers.items():
            row = last[follower.name]
            bound = "<= 0" if name == "exact" else None
            figures[f"{name}_kl"] = figure(row["kl"], "nats/token", bound)
            figures[f"{name}_gap"] = figure(row["logprob_gap"], "nats/token", bound)
            error = figure(row["relative_error"], "of ‖W_t − W_0‖", bound)
            figures[f"{name}_weight_error"] = error
    return figures


def rounding_cost(quick: bool) -> Figure:
    """Held-out Pass@1 of float32 factors minus that of int8, seed by seed, in points."""
    base = preset("smoke" if quick else "laptop")
    costs = []
    for seed in base.seeds:
        after = {}
        for wire in ("int8", "float32"):
            config = preset_config(base, seed=seed, wire=wire)
            with tempfile.TemporaryDirectory() as folder:
                after[wire] = train(config, Path(folder) / "run")[1][-1].pass_at_1
            say(f"seed {seed}, {wire}: Pass@1 {after[wire]:.1%}")
        costs.append(100 * (after["float32"] - after["int8"]))
    return figure(costs, "points of Pass@1")
