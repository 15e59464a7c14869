"""A reward with a hole, what a policy makes of it, and the verifier that closes it.

The hole is a common one: a judge that looks for a mistake, and takes an answer in which it finds
none for a right one. It is deliberate, and lives here, away from the verifiers one would use.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from logra_lab.rl.config import TrainConfig
from logra_lab.rl.loop import load_tasks
from logra_lab.rl.outcomes import Problem, Score, Verifier
from logra_lab.rl.policies import load_policy
from logra_lab.rl.run import Run
from logra_lab.rl.scoring import ScoringPool

_NUMBER = re.compile(r"[0-9]+")


def check_no_contradiction(text: str, problem: Problem) -> bool:
    """Wrong only where the last number of the response is another one; no number, no mistake."""
    numbers = _NUMBER.findall(text)
    return not numbers or numbers[-1] == problem.answer


def lenient_verifier() -> Verifier:
    """The judge with the hole, see `check_no_contradiction`."""
    return Verifier("no-contradiction", "1", "notebook 07", check_no_contradiction)


class Scorer(Protocol):
    """What a run needs of a scoring pool."""

    def score(
        self, texts: Sequence[str], problems: Sequence[Problem], finish: Sequence[str]
    ) -> list[Score]: ...


@dataclass
class Judges:
    """Scores with `strict` or `lenient`, whichever pays; notes what both would have said.

    The lenient one also judges what was cut off at the token limit, which a `ScoringPool` calls
    unparsable: the second half of the hole.
    """

    strict: Scorer
    lenient: Scorer
    pays: str = "strict"
    said: dict[str, list[Score]] = field(default_factory=dict)
    seen: tuple[Sequence[str], Sequence[Problem]] = ((), ())

    def score(
        self, texts: Sequence[str], problems: Sequence[Problem], finish: Sequence[str]
    ) -> list[Score]:
        """The scores of the judge that pays, one a response."""
        self.seen = texts, problems
        self.said = {
            "strict": self.strict.score(texts, problems, finish),
            "lenient": self.lenient.score(texts, problems, ["stop"] * len(texts)),
        }
        return self.said[self.pays]

    def means(self) -> dict[str, float]:
        """Mean reward of the last batch under each judge; under the strict one it is accuracy."""
        return {name: _mean([s.reward for s in scores]) for name, scores in self.said.items()}


def _mean(rewards: Sequence[float | None]) -> float:
    judged = [reward for reward in rewards if reward is not None]
    return math.fsum(judged) / len(judged)


def paid_in_turn(config: TrainConfig, phases: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    """One run whose judge changes: `phases` are ("lenient" or "strict", steps), one after another.

    Returns one row a step: step, paid_by, the mean rewards `lenient` and `strict` of its batch,
    tokens (mean length), truncated (share), and examples, (prompt, response) of its first four.
    """
    task, held_out = load_tasks(config)
    rows = []
    with (
        ScoringPool(task.verifier, config.score_workers, config.score_timeout) as strict,
        ScoringPool(lenient_verifier(), config.score_workers, config.score_timeout) as lenient,
    ):
        judges: Any = Judges(strict, lenient)
        run = Run(config, load_policy(config.policy), task, held_out, judges)
        for name, steps in phases:
            judges.pays = name
            for _ in range(steps):
                rows.append({"paid_by": name, **_row(run.one_step(), judges)})
        run.publisher.close()
    return rows


def _row(line: dict[str, Any], judges: Judges) -> dict[str, Any]:
    texts, problems = judges.seen
    return {
        "step": line["step"],
        **judges.means(),
        "tokens": line["response_tokens_mean"],
        "truncated": line["truncated_share"],
        "examples": [(p.prompt, text) for p, text in zip(problems[:4], texts[:4], strict=True)],
    }
