r"""Tasks: a list of distinct problems and the verifier that judges them.

    load_task("sums", size=512)
    load_task("reasoning_gym:basic_arithmetic", size=500, params={"max_terms": 2})
    load_task("dapo_math", size=1000)             # Hugging Face hub, DAPO-Math-17k
    load_task("math500", size=500)                # Hugging Face hub, MATH-500
    load_task("jsonl:my_problems.jsonl", size=12) # or parquet:PATH, of either schema

Training and held-out problems: different seeds alone do not keep them apart in a small space of
problems. Load the held-out task first and exclude its prompts from training:

    held_out = load_task("sums", size=200, seed=1)
    train = load_task("sums", size=512, seed=0, exclude={p.prompt for p in held_out})
"""

import json
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from typing import Any

from logra_lab.errors import InputError
from logra_lab.rl.files import HUB, file_problems, hub_problems
from logra_lab.rl.verifiers import (
    Problem,
    Verifier,
    math_verifier,
    reasoning_gym_verifier,
    sums_verifier,
)

__all__ = ["Problem", "Task", "load_task"]

DRAWS_PER_PROBLEM = 20  # a generator that repeats itself more than this has no more to give


@dataclass(frozen=True)
class Task:
    """A named sequence of problems with the verifier that judges them."""

    name: str
    problems: Sequence[Problem]
    verifier: Verifier

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Problem:
        return self.problems[index]

    def __iter__(self) -> Iterator[Problem]:
        return iter(self.problems)


def load_task(
    spec: str,
    *,
    size: int,
    seed: int = 0,
    params: dict[str, Any] | None = None,
    verifier: Verifier | None = None,
    exclude: Collection[str] = (),
    distinct: bool = True,
) -> Task:
    """Load `size` problems whose prompts are distinct, or as often as drawn, none in `exclude`.

    `distinct=False` keeps a generator's own frequencies: of two-term sums with one or two digits
    half are of one digit, but only few of those are distinct.

    The result is a function of the arguments (and the file) alone; global random state is neither
    read nor changed. `params` go to the generator: those of the reasoning-gym dataset, `max_value`
    (default 99) for "sums"; file tasks take none. `verifier` replaces the task's own.

    Raises InputError for an unknown task or dataset (with the nearest names), bad `params`, a
    missing, unreadable or empty file, missing columns, and when there are fewer than `size`
    problems.
    """
    if size < 1:
        raise InputError(f"task {spec!r}: size must be at least 1, got {size}")
    kind, _, rest = spec.partition(":")
    params = dict(params or {})
    found: Iterable[Problem]
    if spec == "sums":
        found, own = _sums(params, seed, size + len(exclude)), sums_verifier()
    elif kind == "reasoning_gym" and rest:
        draws = DRAWS_PER_PROBLEM * (size + len(exclude))
        found, own = _reasoning_gym(rest, params, seed, draws), reasoning_gym_verifier()
    elif spec in HUB or (kind in ("jsonl", "parquet") and rest):
        if params:
            raise InputError(f"task {spec!r} takes no params, got {sorted(params)}")
        found = hub_problems(spec, seed) if spec in HUB else file_problems(kind, rest, seed)
        own = math_verifier()
    else:
        raise _unknown_task(spec)
    return Task(spec, _take(found, size, set(exclude), spec, distinct), verifier or own)


def _unknown_task(spec: str) -> InputError:
    names = ["sums", *HUB, "reasoning_gym:DATASET", "jsonl:PATH", "parquet:PATH"]
    near = get_close_matches(spec, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InputError(f"unknown task {spec!r}{hint} Known: {', '.join(names)}")


def _take(
    found: Iterable[Problem], size: int, exclude: set[str], spec: str, distinct: bool
) -> tuple[Problem, ...]:
    taken: list[Problem] = []
    seen = set(exclude)
    for problem in found:
        if problem.prompt not in seen:
            if distinct:
                seen.add(problem.prompt)
            taken.append(problem)
            if len(taken) == size:
                return tuple(taken)
    raise InputError(
        f"task {spec!r}: {size} problems asked for, but there are only {len(taken)} with distinct "
        f"prompts ({len(exclude)} excluded); ask for at most {len(taken)} (a run's settings are "
        "train_problems and eval_problems), or widen the task"
        if taken
        else f"task {spec!r}: all of its problems are held out ({len(exclude)} prompts excluded); "
        "lower eval_problems, or let eval_task be another task"
        if exclude
        else f"task {spec!r}: the dataset is empty"
    )


def _sums(params: dict[str, Any], seed: int, count: int) -> Iterator[Problem]:
    """ "a+b=" with a and b in 0..max_value; every pair is drawn at most once."""
    top = params.pop("max_value", 99)
    if params or type(top) is not int or top < 0:
        raise InputError(
            f"task 'sums' takes params max_value (an integer from 0), got max_value={top!r}"
            + (f" and {sorted(params)}" if params else "")
        )
    pairs = (top + 1) ** 2
    rng = random.Random(f"sums:{top}:{seed}")
    for pair in rng.sample(range(pairs), min(count, pairs)):
        a, b = divmod(pair, top + 1)
        yield Problem(f"sums/{a}+{b}", f"{a}+{b}=", str(a + b))


def _reasoning_gym(name: str, params: dict[str, Any], seed: int, draws: int) -> Iterator[Problem]:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = get_close_matches(name, DATASETS, n=3) or sorted(DATASETS)
        raise InputError(f"reasoning-gym has no dataset {name!r}; nearest: {', '.join(near)}")
    if {"seed", "size"} & params.keys():
        raise InputError(f"reasoning_gym:{name}: give seed and size to load_task, not in params")
    # Entry i of a dataset is drawn from seed + i, so that neighbouring seeds would share all but
    # one entry; a hash sets them apart (32 bits, the range the library draws its own seeds from).
    digest = blake2b(f"{name}:{seed}".encode(), digest_size=4).digest()
    try:
        json.dumps(params)
        dataset = reasoning_gym.create_dataset(
            name, seed=int.from_bytes(digest, "little"), size=draws, **params
        )
        first = dataset[0]
    # Its configurations validate with bare asserts, and some only fail when the first is drawn.
    except (AssertionError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        known = sorted(set(DATASETS[name][1].__dataclass_fields__) - {"seed", "size"})
        raise InputError(
            f"reasoning_gym:{name}: bad params {params} ({type(error).__name__}: {error}); "
            f"known params: {', '.join(known)}"
        ) from error
    for i in range(draws):
        entry = first if i == 0 else dataset[i]
        meta = {"dataset": name, "params": params, "entry": entry}
        yield Problem(
            f"{name}/{seed}/{i}",
            entry["question"],
            "" if entry["answer"] is None else str(entry["answer"]),
            meta,
        )
