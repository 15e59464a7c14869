"""Held-out accuracy: Pass@k from several samples a problem, with bootstrap intervals over problems.

Problems, not samples, are what the interval resamples: samples of one problem are not independent.
A response that the verifier could not judge (timeout, error) says nothing about the policy: it
is counted among the outcomes and left out of accuracy, and a problem with no judged response is
left out whole.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from logra_lab.errors import InputError, LograError

if TYPE_CHECKING:
    from logra_lab.rl.policies import Policy
    from logra_lab.rl.rollout import Generates
    from logra_lab.rl.scoring import ScoringPool
    from logra_lab.rl.tasks import Task

_UNJUDGED = ("timeout", "error")


class EvaluationError(LograError):
    """An evaluation has no number to give, or the engine or scorer broke its promise."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold at least one of the c correct.

    1 − C(n−c, k) / C(n, k) as the product 1 − Π_{i=n−c+1..n} (1 − k/i), which never forms the large
    binomials: unbiased for "k fresh samples" (Chen et al. 2021, arXiv:2107.03374, section 2.1).
    Raises `InputError` unless 0 ≤ c ≤ n and 1 ≤ k ≤ n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise InputError(f"pass_at_k: expected 0 <= c <= n and 1 <= k <= n, got {n=}, {c=}, {k=}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def bootstrap_interval(
    values: Sequence[float], *, seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval (low, high) of the mean of `values`, one value a problem.

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapter 13. Values that are all
    equal, or a single one, give an interval of width 0: it then shows nothing about the spread.
    Raises `InputError` for no values, a non-finite value, or a bad setting. Cost: `resamples`
    passes over the values.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise InputError(f"bootstrap_interval: expected finite values in one row, got {values!r}")
    if resamples < 1 or not 0 < level < 1:
        raise InputError(
            "bootstrap_interval: expected resamples >= 1 and 0 < level < 1, "
            f"got resamples={resamples}, level={level}"
        )
    draw = np.random.default_rng(seed)
    size = array.size
    means = [array[draw.integers(0, size, size)].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_interval(
    before: Mapping[str, float] | Sequence[float],
    after: Mapping[str, float] | Sequence[float],
    *,
    seed: int = 0,
    resamples: int = 2000,
    level: float = 0.95,
) -> tuple[float, float]:
    """Bootstrap interval of mean(after − before) over the same problems.

    Takes two `EvalResult.rewards` (paired by problem id over the ids that both hold) or two equal
    long rows. Pairing removes the spread between problems that both share. Raises `InputError`
    when nothing can be paired.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        differences = [after[name] - before[name] for name in before if name in after]
    elif isinstance(before, Mapping) or isinstance(after, Mapping) or len(before) != len(after):
        raise InputError("paired_interval: expected two mappings or two rows of equal length")
    else:
        differences = [new - old for old, new in zip(before, after, strict=True)]
    if not differences:
        raise InputError("paired_interval: the two evaluations share no problem")
    return bootstrap_interval(differences, seed=seed, resamples=resamples, level=level)


@dataclass(frozen=True)
class EvalResult:
    """One evaluation; shares and Pass@k lie in [0, 1], intervals are 95 % over problems.

    problems: asked; judged_problems: with at least one judged response, the base of pass_at_1;
    pass_at_4: over problems with at least four judged responses, None when there is none;
    mean_length: response tokens over all responses; truncated_share: of all responses, those that
    ended at the token limit; outcomes: responses by outcome; rewards: mean reward of each judged
    problem by id, for `paired_interval`.
    """

    problems: int
    judged_problems: int
    samples: int
    pass_at_1: float
    pass_at_1_interval: tuple[float, float]
    pass_at_4: float | None
    pass_at_4_interval: tuple[float, float] | None
    mean_length: float
    truncated_share: float
    outcomes: dict[str, int]
    rewards: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a JSON record."""
        return asdict(self)


def evaluate(
    engine: "Generates",
    policy: "Policy",
    task: "Task",
    scorer: "ScoringPool",
    *,
    samples: int = 8,
    run_seed: int,
    tag: str,
) -> EvalResult:
    """Sample every problem of `task` `samples` times and score the answers.

    Random numbers depend only on `f"{run_seed}:eval:{tag}:{problem.id}:{sample}"`: the same tag
    before and after training gives paired noise. Raises `InputError` for an empty task, repeated
    problem ids or samples < 1, and `EvaluationError` when no response could be judged. Cost:
    len(task) · samples generated responses, held at once.
    """
    problems = list(task.problems)
    _check(problems, samples)
    prompts = [policy.encode(problem.prompt) for problem in problems]
    rollout = engine.generate(
        [prompt for prompt in prompts for _ in range(samples)],
        [f"{run_seed}:eval:{tag}:{p.id}:{sample}" for p in problems for sample in range(samples)],
    )
    asked = [problem for problem in problems for _ in range(samples)]
    if len(rollout.texts) != len(asked):
        raise EvaluationError(f"engine: expected {len(asked)} responses, got {len(rollout.texts)}")
    scores = scorer.score(rollout.texts, asked, rollout.finish)
    if len(scores) != len(asked):
        raise EvaluationError(f"scorer: expected {len(asked)} scores, got {len(scores)}")
    outcomes = [str(score.outcome) for score in scores]
    lengths = [len(ids) for ids in rollout.response_ids]
    rows = [slice(i * samples, (i + 1) * samples) for i in range(len(problems))]
    counts = [_judged(outcomes[row]) for row in rows]
    ones = [pass_at_k(n, c, 1) for n, c in counts if n >= 1]
    fours = [pass_at_k(n, c, 4) for n, c in counts if n >= 4]
    if not ones:
        raise EvaluationError(
            f"evaluation {tag!r}: none of {len(asked)} responses could be judged "
            f"({dict(Counter(outcomes))}); mend the verifier or raise its time limit"
        )
    return EvalResult(
        problems=len(problems),
        judged_problems=len(ones),
        samples=samples,
        pass_at_1=math.fsum(ones) / len(ones),
        pass_at_1_interval=bootstrap_interval(ones),
        pass_at_4=math.fsum(fours) / len(fours) if fours else None,
        pass_at_4_interval=bootstrap_interval(fours) if fours else None,
        mean_length=sum(lengths) / len(lengths),
        truncated_share=sum(reason == "length" for reason in rollout.finish) / len(asked),
        outcomes=dict(sorted(Counter(outcomes).items())),
        rewards=_mean_rewards(problems, rows, scores),
    )


def _check(problems: Sequence[Any], samples: int) -> None:
    if not problems:
        raise InputError("evaluate: expected at least one problem, got an empty task")
    if samples < 1:
        raise InputError(f"evaluate: expected samples >= 1, got {samples}")
    repeated = [name for name, count in Counter(p.id for p in problems).items() if count > 1]
    if repeated:
        raise InputError(
            "evaluate: problem ids must differ, since they seed the samples; "
            f"repeated: {repeated[:5]}"
        )


def _judged(outcomes: Sequence[str]) -> tuple[int, int]:
    """(n, c): how many responses were judged, and how many of them are correct."""
    return sum(o not in _UNJUDGED for o in outcomes), sum(o == "correct" for o in outcomes)


def _mean_rewards(
    problems: Sequence[Any], rows: Sequence[slice], scores: Sequence[Any]
) -> dict[str, float]:
    means = {}
    for problem, row in zip(problems, rows, strict=True):
        rewards = [score.reward for score in scores[row] if score.reward is not None]
        if rewards:
            means[problem.id] = math.fsum(rewards) / len(rewards)
    return means
