"""The published results beside what was found here: what, at which scale, and how far it goes.

Published figures come from `published.py`; the others are read from the records of a run and from
the result files of `logra-lab bench`. What a run lacks is said in words, never filled in.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from logra_lab.lab.context import project_root
from logra_lab.lab.presets import preset
from logra_lab.lab.published import PUBLISHED as P

SMALLER = "measured here, far smaller"
FORMULA = "calculated here, not measured"
NOT_TRIED = "not tried"
NOT_RUN = "not in this run"

Numbers = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Row:
    """One published result; `here` is "–" where this run says nothing about it."""

    claim: str
    published: str
    here: str
    scale: str
    status: str


class _NotVaried(Exception):
    """The sweep of this preset holds that setting still."""


@dataclass(frozen=True)
class _Source:
    claim: str
    published: str
    needs: tuple[str, ...]  # notebooks by their record's name, result files as `bench step`
    found: Callable[[Numbers], tuple[str, str]]  # what was found, and at which scale
    status: str = SMALLER


def rows(records: Numbers) -> list[Row]:
    """The table of a run: `records` holds whole records, by notebook."""
    known = {**records, **_result_files()}
    return [_row(source, known) for source in _SOURCES]


def _row(source: _Source, known: Numbers) -> Row:
    if missing := [name for name in source.needs if name not in known]:
        status = f"{NOT_RUN} ({', '.join(missing)})"
        return Row(source.claim, source.published, "–", "–", status)
    try:
        here, scale = source.found(known)
    except _NotVaried:
        status = f"{NOT_RUN} (its preset does not vary it)"
        return Row(source.claim, source.published, "–", "–", status)
    except (KeyError, IndexError, TypeError) as error:
        names = ", ".join(source.needs)
        here, scale = f"unreadable: {type(error).__name__} {error} in {names}", "–"
        return Row(source.claim, source.published, here, scale, "unknown")
    return Row(source.claim, source.published, here, scale, source.status)


def _result_files() -> dict[str, Mapping[str, Any]]:
    files = sorted((project_root() / "data" / "results").glob("*.json"))
    return {f"bench {file.stem}": json.loads(file.read_text(encoding="utf-8")) for file in files}


def _bench(known: Numbers, name: str, key: str) -> float:
    return float(known[f"bench {name}"]["figures"][key]["value"])


def _ppo_scale(known: Numbers) -> str:
    run = known["07_ppo"]["run"]
    sizes, steps = preset(run["preset"]), known["07_ppo"]["numbers"]["steps"]
    policy = "0.8 M-parameter policy" if sizes.policy == "small" else sizes.policy
    ends = known["07_ppo"]["numbers"]["accuracy_after"]  # by method and seed
    seeds = {m: sum(key.startswith(m) for key in ends) for m in ("LoGRA", "Adam", "LoRA")}
    counts = ", ".join(f"{m} {n}" for m, n in seeds.items())
    return f"{policy}, task {sizes.task}, {steps} steps, r = {sizes.rank}; seeds: {counts}"


def _accuracy(known: Numbers) -> tuple[str, str]:
    means = known["07_ppo"]["numbers"]["means"]
    parts = [f"{m} {means[f'{m} after']['pass_at_1']:.1%}" for m in ("LoGRA", "Adam")]
    return "Pass@1 after training: " + ", ".join(parts), _ppo_scale(known)


def _lora(known: Numbers) -> tuple[str, str]:
    numbers = known["07_ppo"]["numbers"]
    means, kept = numbers["means"], numbers["bytes_measured"]
    parts = [
        f"{name} {means['LoRA after'][key]:.1%} against {means['LoGRA after'][key]:.1%}"
        for name, key in (("Pass@1", "pass_at_1"), ("Pass@4", "pass_at_4"))
    ]
    kib = [f"{kept[m] / 1024:,.0f}" for m in ("LoRA", "LoGRA")]
    parts.append(f"gradient and optimizer state {kib[0]} against {kib[1]} KiB")
    return "; ".join(parts), _ppo_scale(known)


def _shorter(known: Numbers) -> tuple[str, str]:
    means = known["07_ppo"]["numbers"]["means"]
    before, after = means["LoGRA before"], means["LoGRA after"]
    length = f"{before['mean_length']:.1f} → {after['mean_length']:.1f} tokens"
    cut = f"{before['truncated_share']:.1%} → {after['truncated_share']:.1%}"
    return f"{length}, truncated {cut}", _ppo_scale(known)


def _ablated(name: str) -> Callable[[Numbers], tuple[str, str]]:
    """One comparison of 08_ablations: pairs of cells that differ in one thing only."""

    def found(known: Numbers) -> tuple[str, str]:
        record = known["08_ablations"]
        sizes, points = preset(record["run"]["preset"]), record["numbers"]["effects_in_points"]
        ranks = " and ".join(str(r) for r in sizes.sweep_ranks)
        scale = (
            f"0.8 M-parameter policy, task {sizes.task}, ranks {ranks}, {sizes.sweep_steps} steps, "
            f"{len(sizes.seeds)} seeds"
        )
        if name not in points:
            raise _NotVaried
        gap = points[name]
        return (
            f"{gap['mean']:+.1f} points of Pass@1 in the mean, {gap['lowest']:+.1f} to "
            f"{gap['highest']:+.1f} over the pairs"
        ), scale

    return found


def _budgets(known: Numbers) -> tuple[str, str]:
    numbers = known["07_ppo"]["numbers"]
    top = numbers["kl_said"]["largest"]
    said = ", ".join(f"{method} {top[method]:.1e}" for method in ("LoGRA", "Adam", "LoRA"))
    return (
        f"largest realised KL of a step, nats/token: {said} (only LoGRA is under a budget); the "
        f"median step realised {numbers['kl_ratio_median']:.2f} × its prediction"
    ), _ppo_scale(known)


def _planned(model: str) -> Callable[[Numbers], tuple[str, str]]:
    """The closed forms of 09_memory_plan beside a published average, of one model."""

    def found(known: Numbers) -> tuple[str, str]:
        numbers = known["09_memory_plan"]["numbers"]
        plans = {row["method"]: row for row in numbers["published"] if row["model"] == model}
        parts = [
            f"{m} {plans[m]['standing']:.1f} standing, {plans[m]['peak']:.1f} at the peak "
            f"({plans[m]['low']:.1f} to {plans[m]['high']:.1f})"
            for m in ("dense Adam", "LoRA", "LoGRA")
        ]
        off = max(numbers["terms_off"], numbers["peak_off"])
        return "; ".join(parts), (
            f"GiB per GPU by logra-lab plan; its terms are within {off:.1%} of bytes counted on a "
            "small model. Published are averages over a run, these are two moments of a step"
        )

    return found


def _step_memory(known: Numbers) -> tuple[str, str]:
    adam, ours = (_bench(known, "step", key) for key in ("mib_adamw", "mib_logra_r64"))
    return f"{adam:,.0f} → {ours:,.0f} MiB (−{1 - ours / adam:.0%})", (
        "bench step: gradient, optimizer state and activations of 4 layers of width 1024, r = 64, "
        "float32 on a CPU; weights not counted"
    )


def _step_time(known: Numbers) -> tuple[str, str]:
    parts = [f"r = {r}: {_bench(known, 'step', f'logra_r{r}'):.2f} ×" for r in (64, 256)]
    probe = _bench(known, "step", "logra_r64_jvp")
    text = f"{', '.join(parts)} AdamW's; with the KL probe, r = 64, {probe:.2f} ×"
    return text, "bench step: 4 layers of width 1024, CPU time of one step without rollout"


def _long_run(known: Numbers) -> tuple[str, str]:
    before, best = (_bench(known, "policy", key) for key in ("before", "soak_best"))
    drop = _bench(known, "policy", "soak_drop")
    text = f"Pass@1 {before:.0%} → {best:.0%} at best, {drop:.1f} points below it at the end"
    return text, "bench policy: 1,100 steps of the 0.8 M-parameter policy on sums"


def _language_model(known: Numbers) -> tuple[str, str]:
    before, after = (_bench(known, "llm", key) for key in ("before", "after"))
    return f"accuracy {before:.0%} → {after:.0%}", (
        "bench llm: SmolLM2-135M-Instruct, sums of two terms, 40 steps on a CPU"
    )


def _untried(_known: Numbers) -> tuple[str, str]:
    return "–", "–"


def _arrow(adam: str, logra: str, saved: str | None = None) -> str:
    text = f"{P[adam]:g} → {P[logra]:g} GiB"
    return f"{text} (−{P[saved]:g} %)" if saved else text


_SOURCES = (
    _Source(
        "1.5B, average training memory per GPU, dense Adam → LoGRA",
        _arrow("gib_1_5b_adam", "gib_1_5b_logra", "saved_1_5b"),
        ("09_memory_plan",),
        _planned("Qwen2.5-1.5B"),
        FORMULA,
    ),
    _Source(
        "7B, average training memory per GPU, dense Adam → LoGRA",
        _arrow("gib_7b_adam", "gib_7b_logra", "saved_7b"),
        ("09_memory_plan",),
        _planned("Qwen2.5-7B"),
        FORMULA,
    ),
    _Source(
        "27B, training memory per GPU",
        f"dense Adam out of memory at its first state; LoGRA {P['gib_27b_logra']:g} GiB",
        ("09_memory_plan",),
        _planned("27B"),
        FORMULA,
    ),
    _Source(
        "Less memory than dense Adam, measured",
        f"7B: −{P['saved_7b']:g} %",
        ("bench step",),
        _step_memory,
    ),
    _Source(
        "7B, peak Pass@1 on MATH-500",
        f"LoGRA {P['pass_7b_logra']:g} %, dense Adam {P['pass_7b_adam']:g} %",
        ("07_ppo",),
        _accuracy,
    ),
    _Source(
        "27B, Reasoning-Gym Hard, verifier score",
        f"{P['score_27b_before']:g} % → {P['score_27b_after']:g} % in {P['steps_27b']:,.0f}+ steps",
        ("bench policy",),
        _long_run,
    ),
    _Source(
        "27B, answers shorter and less often truncated",
        "no figure",
        ("07_ppo",),
        _shorter,
    ),
    _Source(
        "A pretrained language model learns",
        f"1.5B to 27B, r = {P['rank']:g}",
        ("bench llm",),
        _language_model,
    ),
    _Source("Step time against dense Adam", "nearly unchanged", ("bench step",), _step_time),
    _Source(
        "1.5B, LoRA against LoGRA, first 300 steps",
        f"{P['gib_1_5b_lora']:g} against {P['gib_1_5b_logra_300']:g} GiB; LoRA the higher mean "
        "Pass@1, LoGRA slightly ahead on Pass@4",
        ("07_ppo",),
        _lora,
    ),
    _Source(
        "KL budget: small or annealed",
        "stable, slightly ahead of no control; a large constant budget degraded accuracy",
        ("07_ppo",),
        _budgets,
    ),
    _Source(
        f"Rank {P['rank_low']:g} → {P['rank']:g}, short runs",
        "a few points of accuracy",
        ("08_ablations",),
        _ablated("rank"),
    ),
    _Source(
        "Projection redrawn against fixed",
        "no consistent difference",
        ("08_ablations",),
        _ablated("refresh"),
    ),
    _Source(
        "KL budget, larger against smaller",
        "a large constant budget degraded accuracy (runs as short as these cannot show that, only "
        "how fast a policy learns)",
        ("08_ablations",),
        _ablated("budget"),
    ),
    _Source(
        "An independent port: GRPO, 7B, 8 × A100; a step on B300",
        f"{_arrow('port_gib_adam', 'port_gib_logra')}; {P['port_ms_adam']:g} → "
        f"{P['port_ms_logra']:g} ms",
        (),
        _untried,
        NOT_TRIED,
    ),
)
