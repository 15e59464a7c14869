"""Reward functions: sums, reasoning-gym, math-verify, JSON schema, unit tests, any callable.

Each factory returns a `Verifier`, whose `check(text, problem)` runs in the scoring processes. The
single answer that is judged comes from `logra_lab.rl.answers`. Heavy libraries are imported where
they are used, and named in `preload`, so that a scoring process loads only what it needs.
"""

import ast
import inspect
import json
import re
import sys
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from logra_lab.rl.answers import extract_answer, final_part, is_number
from logra_lab.rl.outcomes import Outcome, Problem, Score, Verifier

__all__ = [
    "Outcome",
    "Problem",
    "Score",
    "Verifier",
    "json_schema_verifier",
    "math_verifier",
    "reasoning_gym_verifier",
    "sums_verifier",
    "unit_test_verifier",
]

OWNER = "logra_lab"
_INTEGER = re.compile(r"[+-]?[0-9]+")


def check_sum(text: str, problem: Problem) -> Outcome:
    """The stripped text is the gold number and nothing else; another integer is wrong ("042" too,
    since the policy is to write the number), anything else unparsable."""
    answer = text.strip()
    if answer == problem.answer:
        return Outcome.correct
    return Outcome.wrong if _INTEGER.fullmatch(answer) else Outcome.unparsable


def sums_verifier() -> Verifier:
    """Judge of the "sums" task, see `check_sum`."""
    return Verifier("sums", "1", OWNER, check_sum)


# Some reasoning-gym judges pass the answer to eval or to sympy's parse_expr, which evals. Only
# these words may appear in an answer to them; single letters are variables.
_EVALUATES = re.compile(r"\beval\(|\b(?:sympy|sp)\.parse_expr\(|sympy_parser import|\bsympify\(")
_WORDS = frozenset(
    re.findall(r"\w+", "sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt pi")
)
_EXPRESSION = re.compile(r"[\w\s+\-*/^().,]*", re.ASCII)
_NAME = re.compile(r"(?<![0-9A-Za-z_])[A-Za-z_]\w*")


def is_plain_expression(answer: str) -> bool:
    """Whether evaluating the answer can do nothing but arithmetic: a Python literal, or an
    expression of numbers, operators, one-letter variables, underscores and usual functions,
    without attributes, strings or any other name."""
    try:
        ast.literal_eval(answer)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        if not _EXPRESSION.fullmatch(answer) or re.search(r"\.\s*[A-Za-z_]", answer):
            return False
        return all(len(n) == 1 or n in _WORDS for n in _NAME.findall(answer))
    return True


@lru_cache(maxsize=64)
def _judge(name: str, params: str) -> tuple[Any, bool]:
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(params))
    source = inspect.getsource(sys.modules[type(dataset).__module__])
    return dataset, _EVALUATES.search(source) is not None


def check_reasoning_gym(text: str, problem: Problem) -> Outcome:
    """Correct exactly if the dataset's own `score_answer` gives 1.0 for the extracted answer.

    reasoning-gym gives part of a point for an answer that merely contains the gold one, which
    would reward lists: anything below 1.0 is wrong. An answer that the judge would evaluate and
    that is no plain expression (`is_plain_expression`) is wrong without being evaluated. An answer
    on which the judge raises is unparsable if the gold answer passes through the same judge, else
    the judge's exception goes on and becomes outcome error.
    """
    found = extract_answer(text, numeric=is_number(problem.answer), whole=True)
    if found.answer is None:
        return found.verdict or Outcome.unparsable
    # One judge (game_of_life_halting) takes any text without "true" in it for "False".
    truths = ("true", "false")
    if problem.answer.lower() in truths and found.answer.lower() not in truths:
        return Outcome.unparsable
    meta = problem.meta
    dataset, evaluates = _judge(meta["dataset"], json.dumps(meta["params"], sort_keys=True))
    exact = found.answer == problem.answer
    if evaluates and not exact and not is_plain_expression(found.answer):
        return Outcome.wrong
    try:
        score = dataset.score_answer(answer=found.answer, entry=meta["entry"])
    except (ValueError, TypeError, LookupError, SyntaxError, AttributeError, ArithmeticError):
        dataset.score_answer(answer=problem.answer, entry=meta["entry"])
        return Outcome.unparsable
    return Outcome.correct if score == 1.0 else Outcome.wrong


def reasoning_gym_verifier() -> Verifier:
    """Judge of every reasoning-gym dataset, see `check_reasoning_gym`."""
    return Verifier(
        "reasoning-gym", version("reasoning-gym"), OWNER, check_reasoning_gym, ("reasoning_gym",)
    )


def math_verifier() -> Verifier:
    """Judge of mathematical answers by math-verify, see `logra_lab.rl.math_answers`."""
    from logra_lab.rl.math_answers import check_math

    return Verifier("math-verify", version("math-verify"), OWNER, check_math)


def _fenced(text: str, language: str) -> str | None:
    """The one fenced block of that language (or the whole text) after the reasoning; None if the
    reasoning stays open or there are several different blocks."""
    tail = final_part(text)
    if tail is None:
        return None
    blocks = set(re.findall(rf"```(?:{language})?[ \t]*\n(.*?)```", tail, re.DOTALL))
    if len(blocks) > 1:
        return None
    return blocks.pop() if blocks else tail


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON (RFC 8259)")


def check_json_schema(text: str, problem: Problem) -> Outcome:
    """The response is JSON (alone or in one fenced block) valid under `problem.meta["schema"]`.

    Text that is no JSON is unparsable, JSON that does not fit is wrong, a broken schema raises.
    Draft 2020-12 unless the schema names another; references to other documents are not fetched.
    """
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    source = _fenced(text, "json")
    try:
        value = json.loads(source or "", parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return Outcome.unparsable
    schema = problem.meta["schema"]
    judge = validator_for(schema, default=Draft202012Validator)
    judge.check_schema(schema)
    valid = judge(schema, registry=Registry()).is_valid(value)
    return Outcome.correct if valid else Outcome.wrong


def json_schema_verifier() -> Verifier:
    """Judge of structured output, see `check_json_schema`."""
    return Verifier("json-schema", version("jsonschema"), OWNER, check_json_schema, ("jsonschema",))


def check_unit_tests(text: str, problem: Problem) -> Outcome:
    """Run the one Python function of the response on test cases, see `logra_lab.rl.unit_tests`.

    `problem.meta`: `function` (its name) and `cases`, a list of `{"args": [...], "expected": ...}`
    in JSON values. No code or several different code blocks: unparsable.
    """
    from logra_lab.rl.unit_tests import run_function

    source = _fenced(text, "python|py")
    if source is None or not source.strip():
        return Outcome.unparsable
    cases = problem.meta["cases"]
    results = run_function(source, problem.meta["function"], [c["args"] for c in cases])
    expected = [json.dumps(c["expected"], sort_keys=True) for c in cases]
    return Outcome.correct if results == expected else Outcome.wrong


def unit_test_verifier() -> Verifier:
    """Judge of programs by unit tests, see `check_unit_tests`. Not a security sandbox."""
    return Verifier("unit-tests", "1", OWNER, check_unit_tests, ("logra_lab.rl.unit_tests",))
