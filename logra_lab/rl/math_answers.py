r"""Mathematical answers judged by math-verify, with the rules that it leaves open.

* The gold answer is the first argument: `verify` is not symmetric (a gold inequality accepts an
  interval, a gold interval does not accept an inequality).
* Percent: a percent sign is a unit and is dropped from both sides, as in the MATH benchmark's own
  normalisation (Hendrycks et al. 2021, arXiv:2103.03874). So ``50\%`` is right for gold ``50`` and
  gold ``50\%``, and wrong for gold ``0.5``; math-verify alone would accept it for all three.
* One answer: alternatives ("x=11 or x=42") and chains ("1=2=42") are wrong unless the gold has
  them too; math-verify alone would take the last member.
* Evaluated: where the gold is a plain number, the answer is a number too (decimal, fraction, mixed
  number, with a unit or "x ="), not an expression left to the judge: ``12+30``, ``\sqrt{144}`` and,
  for a gold integer, ``84/2`` are wrong.
* Only the LaTeX parser is used. math-verify's other one goes through sympy's `parse_expr`, which
  evaluates Python; no answer ever reaches it.
* math-verify's own time limits use signals and fail outside the main thread; they are off, and the
  scoring pool's limit kills the process.
"""

import re
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

from logra_lab.rl.answers import extract_answer, is_number
from logra_lab.rl.outcomes import Outcome, Problem

_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)
_PERCENT = re.compile(r"\\?%")
_OR = re.compile(r"\\lor\b|\\vee\b|\bor\b")
_UNIT = re.compile(r"\^\{?\\circ\}?|\\(?:text|mathrm|textbf|mathbf)\s*\{[^{}]*\}|\\[$!,;: ]|\$")
_SIDE = re.compile(r"^\s*[A-Za-z]\w*(?:\([A-Za-z]\))?\s*=")
_LITERAL_COMMANDS = frozenset(["frac", "dfrac", "tfrac", "left", "right", "times"])


def check_math(text: str, problem: Problem) -> Outcome:
    """Judge the response's one answer (`logra_lab.rl.answers`) against `problem.answer`.

    Raises ValueError when the gold answer cannot be read or does not equal itself, which the pool
    reports as an error of the task rather than a wrong answer. Cost: 1 to 300 ms.
    """
    found = extract_answer(text, numeric=is_number(problem.answer))
    if found.answer is None:
        return found.verdict or Outcome.unparsable
    if len(found.answer) > 1000 or not _balanced(found.answer):
        return Outcome.unparsable
    gold_text, answer_text = _normal(problem.answer), _normal(found.answer)
    gold = _gold(gold_text)
    answer = _parsed(answer_text)
    if not answer:
        return Outcome.unparsable
    if not is_single(answer_text, gold_text):
        return Outcome.wrong
    return Outcome.correct if verify(gold, answer, timeout_seconds=None) else Outcome.wrong


def is_single(answer: str, gold: str) -> bool:
    """Whether the answer is one evaluated answer, by the rules of this module."""
    if _OR.search(answer) and not _OR.search(gold):
        return False
    bare = _UNIT.sub("", answer)
    if "=" not in gold:
        bare = _SIDE.sub("", bare)
    if bare.count("=") > gold.count("="):
        return False
    return not is_number(gold) or _is_literal(bare, integer=re.search(r"[./]", gold) is None)


def _is_literal(text: str, *, integer: bool) -> bool:
    scientific = re.sub(r"\\times\s*10\s*\^\s*(?:\{-?[0-9]+\}|[0-9])", "", text)
    commands = re.findall(r"\\([A-Za-z]+)", scientific)
    if "times" in commands or not set(commands) <= _LITERAL_COMMANDS:
        return False
    if re.search(r"[+*!^|&_]|[^\s({]\s*-", scientific):
        return False
    return not (integer and re.search(r"/|frac|[0-9]\s+[0-9]", scientific))


def _balanced(answer: str) -> bool:
    return answer.count("{") == answer.count("}")


def _normal(answer: str) -> str:
    return _PERCENT.sub("", answer).strip().strip("$").strip()


def _parsed(answer: str) -> list[Any]:
    return list(parse(f"\\boxed{{{answer}}}", extraction_config=_LATEX, parsing_timeout=None))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    gold = _parsed(answer) if _balanced(answer) else []
    if not gold or not verify(gold, gold, timeout_seconds=None, raise_on_error=True):
        raise ValueError(f"math-verify cannot read the gold answer {answer!r}; correct the data")
    return gold
