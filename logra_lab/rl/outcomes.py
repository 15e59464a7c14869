"""What tasks, verifiers and the scoring pool exchange: problems, verifiers, outcomes and scores."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from logra_lab.errors import InputError


@dataclass(frozen=True)
class Problem:
    """One problem: `prompt` goes to the policy, `answer` is the gold answer as text.

    `id` is unique within a task; `meta` holds what the verifier needs besides, in plain picklable
    values, since it travels to the scoring processes.
    """

    id: str
    prompt: str
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)


class Outcome(StrEnum):
    """What became of a response. Rewards: correct 1.0, wrong and unparsable 0.0, else None."""

    correct = "correct"
    wrong = "wrong"
    unparsable = "unparsable"
    timeout = "timeout"
    error = "error"


REWARDS: dict[Outcome, float | None] = {
    Outcome.correct: 1.0,
    Outcome.wrong: 0.0,
    Outcome.unparsable: 0.0,
    Outcome.timeout: None,
    Outcome.error: None,
}


@dataclass(frozen=True)
class Score:
    """A judged response. `reward` None (timeout, error) is excluded from loss and baseline; 0.0 is
    a reward like any other. `detail` keeps the message of an error for the log."""

    outcome: Outcome
    reward: float | None
    detail: str = ""


@dataclass(frozen=True)
class Verifier:
    """A reward function with the name, version and owner that go into the run's manifest.

    `check(text, problem)` returns an `Outcome`; or a bool (True correct, False wrong); or a number
    in [0, 1], which is the reward itself, its outcome correct at 1 and wrong below. Anything else
    (None, text, nan, a number out of range) becomes outcome error, as an exception does.
    It runs in other processes, so it has to be importable there: a function at the top level of a
    module, a `functools.partial` of one, or an instance of such a class. `preload` names modules
    that a process imports at its start, outside any time limit.

    Raises InputError for a check that is not callable, cannot be pickled, or lives in a notebook
    or script (``__main__``), which other processes cannot import.
    """

    name: str
    version: str
    owner: str
    check: Callable[[str, Problem], "Outcome | bool | float"]
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not callable(self.check):
            raise InputError(
                f"verifier {self.name!r}: check must be callable as check(text, problem), "
                f"got {self.check!r}"
            )
        try:
            pickled = pickle.dumps(self.check)
        # pickle raises whatever __reduce__ raises; all of it means "cannot be sent".
        except Exception as error:
            raise InputError(
                f"verifier {self.name!r}: check cannot be sent to the scoring processes "
                f"({type(error).__name__}: {error}); use a function defined at the top level of "
                "an importable module, not a lambda or a nested function"
            ) from error
        if b"__main__" in pickled:
            raise InputError(
                f"verifier {self.name!r}: check is defined in a notebook or script (__main__), "
                "which the scoring processes cannot import; move it to a .py file and import it"
            )
