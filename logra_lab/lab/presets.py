"""One table of sizes: the same notebooks and the same loop, from a smoke test to eight GPUs."""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from logra_lab.errors import InputError


@dataclass(frozen=True)
class Preset:
    """Plain values that notebooks and the loop read; nothing in here is computed.

    Units: `kl_start` and `kl_end` are nats per generated token (the annealed budget of a step);
    `update_ratio` is rho, the norm of a proposed step over the norm of the target weights.
    Shape letters are those of the method: a weight is `[d, k]`, activations `[n, k]`.
    """

    name: str
    # The training run.
    policy: str
    task: str
    steps: int
    prompts_per_step: int
    seeds: tuple[int, ...]
    rank: int
    update_ratio: float
    variant: str
    kl_start: float
    kl_end: float
    adam_lr: float  # learning rates of the two baselines
    lora_lr: float
    cell_minutes: float  # limit of a notebook cell
    max_new_tokens: int
    temperature: float
    train_problems: int
    eval_task: str | None
    eval_problems: int
    eval_samples: int
    task_params: tuple[tuple[str, Any], ...]  # of the task's generator, as items
    # What `logra-lab train` adds: engines, trainers, types, memory; settings as items.
    placement: tuple[tuple[str, Any], ...]
    # The one-matrix notebook.
    d: int
    k: int
    n: int
    ranks: tuple[int, ...]
    draws: int
    # The ablations: every rank with every budget, redrawn and fixed.
    sweep_ranks: tuple[int, ...]
    sweep_budgets: tuple[float, ...]
    sweep_steps: int


_LAPTOP = Preset(
    name="laptop",
    policy="small",
    task="sums",
    steps=100,
    prompts_per_step=256,
    seeds=(0, 1, 2),
    rank=32,
    update_ratio=2e-3,
    variant="plain",
    kl_start=5e-3,
    kl_end=1e-3,
    adam_lr=3e-4,
    lora_lr=1e-3,
    cell_minutes=30,
    max_new_tokens=16,
    temperature=1.0,
    train_problems=4096,
    eval_task=None,
    eval_problems=256,
    eval_samples=8,
    task_params=(),
    placement=(),
    d=4096,
    k=4096,
    n=512,
    ranks=(4, 16, 64, 256),
    draws=20,
    sweep_ranks=(4, 32),
    sweep_budgets=(5e-4, 2e-2),
    sweep_steps=12,
)

# What both have in common. Prompts of DAPO-Math may be long: one beyond the limit is refused at the
# start, with the number to raise it to.
_SERVED: tuple[tuple[str, Any], ...] = (
    ("engine", "vllm"),
    ("serving_dtype", "bfloat16"),
    ("autocast", "bfloat16"),
    ("checkpointing", "non_reentrant"),
    ("max_prompt_tokens", 2048),
    ("score_workers", 8),
)

# The published runs: rank 256, rho 6e-5, budget 2e-4 to 2e-5 over 300 updates (arXiv:2610.06647).
_ONE_GPU = replace(
    _LAPTOP,
    name="one_gpu",
    policy="Qwen/Qwen2.5-1.5B",
    task="dapo_math",
    train_problems=14000,
    eval_task="math500",
    steps=300,
    prompts_per_step=256,
    seeds=(0,),
    rank=256,
    update_ratio=6e-5,
    variant="norm_preserving",
    kl_start=2e-4,
    kl_end=2e-5,
    adam_lr=1e-6,
    lora_lr=1e-5,
    cell_minutes=7 * 24 * 60,
    max_new_tokens=2048,
    eval_problems=500,
    # Trainer and engine share a card, and vLLM reserves its cache whatever the trainer needs later.
    # By `logra-lab plan Qwen2.5-1.5B --fsdp 1` a step takes up to 22 GiB, and serving 8 without
    # the cache. 8 GiB more keep both below 40; they hold 73 sequences of 4096 tokens at a time.
    placement=(*_SERVED, ("microbatch_tokens", 4096), ("kv_cache_mib", 8192)),
    n=4096,
    draws=100,
    sweep_ranks=(4, 64, 256),
    sweep_budgets=(2e-5, 2e-4),
    sweep_steps=300,
)

PRESETS: dict[str, Preset] = {
    preset.name: preset
    for preset in (
        replace(
            _LAPTOP,
            name="smoke",
            steps=6,
            prompts_per_step=64,
            seeds=(0, 1),
            eval_problems=64,
            eval_samples=4,
            d=192,
            k=256,
            n=64,
            ranks=(4, 16, 64),
            draws=8,
            sweep_ranks=(4,),
            sweep_steps=4,
        ),
        _LAPTOP,
        replace(
            _LAPTOP,
            name="smollm",
            policy="smollm2",
            task="reasoning_gym:chain_sum",
            task_params=(("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 2)),
            train_problems=2000,
            steps=40,
            prompts_per_step=48,
            seeds=(0,),
            rank=64,
            update_ratio=3e-4,
            variant="norm_preserving",
            kl_start=2e-2,
            kl_end=1e-3,
            adam_lr=1e-5,  # customary for a pretrained model; neither was searched for
            lora_lr=2e-4,
            cell_minutes=240,
            max_new_tokens=32,
            eval_problems=200,
            eval_samples=4,
        ),
        _ONE_GPU,
        replace(
            _ONE_GPU,
            name="eight_gpu",
            policy="Qwen/Qwen2.5-7B",
            prompts_per_step=512,
            # An engine has a card of 80 GB to itself: by the plan 40 GiB without the cache, and
            # 24 GiB of cache, 109 sequences of 4096 tokens. A trainer: up to 42 GiB with two such
            # sequences a microbatch. The journal lets a run that lost a trainer go on from its last
            # step; its bases are the weights in float32 (26 GB), hence not more often.
            placement=(
                *_SERVED,
                ("trainers", 4),
                ("engines", 4),
                ("microbatch_tokens", 8192),
                ("kv_cache_mib", 24576),
                ("probe_responses", 8),  # two a rank
                ("journal_every", 100),
            ),
        ),
    )
}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        InputError: no such preset; the message holds the nearest name and all names.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = get_close_matches(name, PRESETS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise InputError(f"preset {name!r} is unknown; {hint}presets: {', '.join(PRESETS)}")
