"""Trainer and vLLM engine on one card: three steps of a small random Qwen2, then what both hold.

Nothing is built or downloaded: the policy is drawn here, with the tokenizer of the shipped one; its
reward, an even length, has a signal for any policy. Checked are the served weights, to the bit, the
log-probabilities, and a group of one trainer rank (FSDP2, NCCL) against the trainer of one process.

Where there is no GPU the same steps run small on the CPU, with gloo for NCCL and, if vLLM is
missing, a Hugging Face copy for the engine: figures `gpu`, `nccl` and `vllm` say what took part. No
GPU has run this yet.
"""

import math
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from logra_lab.bench import Figure, figure, say
from logra_lab.cluster.trainer_rank import TrainerRank
from logra_lab.rl.config import TrainConfig, make_config
from logra_lab.rl.engines import CopyEngine
from logra_lab.rl.environment import peak_gpu_memory_mib
from logra_lab.rl.gaps import gaps
from logra_lab.rl.loop import load_tasks
from logra_lab.rl.outcomes import Problem, Verifier
from logra_lab.rl.policies import SMALL_FOLDER, load_policy, on_gpu
from logra_lab.rl.run import Run
from logra_lab.rl.scoring import ScoringPool
from logra_lab.rl.trainer import Share, Trainer

STEPS = 3


def even_length(text: str, problem: Problem) -> bool:
    """Right where the response has an even number of characters: half of what is random."""
    return len(text) % 2 == 0


def run(quick: bool) -> dict[str, Figure]:
    """At most 8 minutes, most of it the start of vLLM; under a minute on a CPU."""
    begun, cuda = time.perf_counter(), torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="logra_lab_one_gpu_") as scratch:
        folder = Path(scratch) / "policy"
        _draw_policy(folder, large=cuda and not quick)
        config = _config(folder, large=cuda and not quick)
        say(f"{'GPU' if cuda else 'no GPU here: CPU'}, engine {config.engine}, {STEPS} steps")
        figures, batch = _loop(config)
        say("one trainer rank, FSDP2, against the trainer of one process")
        figures |= _one_rank(config, folder, batch)
    here = {"gpu": cuda, "vllm": config.engine == "vllm"}
    shown = {name: figure(int(there), "0 or 1") for name, there in here.items()}
    seconds = figure(time.perf_counter() - begun, "s", "<= 480")
    return {**shown, **figures, "seconds": seconds}


def _draw_policy(folder: Path, *, large: bool) -> None:
    """A Qwen2 with random weights, about 100 million numbers if large."""
    tokenizer = AutoTokenizer.from_pretrained(SMALL_FOLDER, local_files_only=True)
    hidden, blocks, heads = (1024, 8, 16) if large else (64, 2, 2)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=blocks,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(folder: Path, *, large: bool) -> TrainConfig:
    sizes: dict[str, Any] = {"prompts_per_step": 256, "max_new_tokens": 64, "rank": 64}
    if not large:
        sizes = {"prompts_per_step": 16, "max_new_tokens": 12, "rank": 8}
    return make_config(
        policy=str(folder),
        steps=STEPS,
        **sizes,
        engine="vllm" if find_spec("vllm") else "hf",
        serving_dtype="bfloat16",
        autocast="bfloat16" if torch.cuda.is_available() else "none",
        checkpointing="non_reentrant",
        kl_start=1e-3,
        train_problems=512,
        eval_problems=16,
        max_prompt_tokens=64,
        kv_cache_mib=1024 if large else 64,
    )


@dataclass
class _Batch:
    """What the loop's trainer was given to learn from, step by step."""

    shares: list[list[Share]] = field(default_factory=list)

    def kept(self, shares: list[Share]) -> list[Share]:
        self.shares.append(shares)
        return shares


def _loop(config: TrainConfig) -> tuple[dict[str, Figure], list[Share]]:
    """Three steps; then the engine's weights and log-probabilities beside the trainer's."""
    judge = Verifier("even length", "1", "bench one_gpu", even_length)
    tasks, kept = load_tasks(config, judge), _Batch()
    start = time.perf_counter()
    with ScoringPool(judge, config.score_workers, config.score_timeout) as scorer:
        loop = Run(config, on_gpu(load_policy(config.policy)), *tasks, scorer)
        try:
            took = time.perf_counter() - start
            load = loop.trainer.load
            loop.trainer.load = lambda shares: load(kept.kept(shares))
            lines = [_told(loop.one_step()) for _ in range(STEPS)]
            figures = _held(loop)
        finally:
            loop.publisher.close()
    steps = [line["seconds_step"] for line in lines]
    figures["steps_taken"] = figure(loop.version, "updates", f">= {STEPS}")
    figures["gap_recorded"] = figure([abs(x["logprob_gap"]) for x in lines], "nats/token")
    figures["seconds_start"] = figure(took, "s")
    figures["seconds_step"] = figure(steps, "s")
    sync = sum(x.get("seconds_sync", 0.0) for x in lines)
    figures["sync_share"] = figure(sync / sum(steps), "share of the steps")
    if (peak := peak_gpu_memory_mib()) is not None:
        figures["trainer_gpu_mib"] = figure(peak, "MiB")
        free, total = torch.cuda.mem_get_info()
        figures["card_mib"] = figure((total - free) / 2**20, "MiB in use after the loop")
    return figures, kept.shares[0]


def _told(line: dict[str, Any]) -> dict[str, Any]:
    say(f"step {line['step']}: {line['skipped'] or 'taken'}, {line['seconds_step']:.1f} s")
    return line


def _held(loop: Run) -> dict[str, Figure]:
    """Served bits against the trainer's cast, and the engine against a model with those bits."""
    config = loop.config
    copy = CopyEngine(loop.policy, max_new_tokens=1, dtype=torch.bfloat16, targets=config.targets)
    copy.full_sync(loop.trainer.targets(), loop.trainer.run, loop.version)
    engine = loop.engine
    digests = engine.digests() if config.engine == "vllm" else [engine.receiver.digest()]
    prompts = [loop.policy.encode(problem.prompt) for problem in loop.held_out]
    rollout = engine.generate(prompts, [f"gap:{i}" for i in range(len(prompts))])
    gap = gaps(copy.policy.model, rollout, temperature=config.temperature).mean().item()
    return {
        "served": figure(sum(d != copy.receiver.digest() for d in digests), "ranks off", "<= 0"),
        "gap": figure(gap, "nats/token", "<= 0.02"),
    }


def _one_rank(config: TrainConfig, folder: Path, batch: list[Share]) -> dict[str, Figure]:
    """One step on the loop's first batch, float32: the rows of a group of one, and one process."""
    plain = config.model_copy(update={"autocast": "none", "wire": "float32"})
    alone = Trainer(on_gpu(load_policy(str(folder))), plain)
    alone.load(batch)
    mine = alone.update(fresh=True).report
    rank = TrainerRank()
    address = rank.reserve("127.0.0.1")
    rank.join(plain.model_dump(mode="json"), str(folder), alone.run, 0, 1, address)
    try:
        rank.load(batch)
        taken, about = rank.update(True)
        assert taken is not None  # rank 0 tells it
        theirs = taken.report
        weights = rank.targets() or {}
    finally:
        rank.leave()
    say(f"rank on {about['device']}, {about['backend']}")
    ours = {name: weight.float().cpu().numpy() for name, weight in alone.targets().items()}
    before = {n: w.numpy() for n, w in Trainer(load_policy(str(folder)), plain).targets().items()}
    moved = np.sqrt(sum(np.square(ours[n] - before[n]).sum() for n in ours))
    apart = np.sqrt(sum(np.square(ours[n] - weights[n]).sum() for n in ours))
    alphas = [report.alpha or math.nan for report in (mine, theirs)]  # none where it was skipped
    return {
        "nccl": figure(int("nccl" in about["backend"]), "0 or 1"),
        "rank_weights": figure(float(apart / moved), "of the step", "<= 1e-4"),
        "rank_sketch": figure(abs(theirs.sketch_norm / mine.sketch_norm - 1), "of ‖S‖", "<= 1e-6"),
        "rank_alpha": figure(abs(alphas[1] / alphas[0] - 1), "of α", "<= 1e-4"),
    }
