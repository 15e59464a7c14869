r"""The written answer-extraction policy: one response holds one final answer, or none.

A policy gradient finds every hole in its judge, so that exactly one candidate is ever compared with
the gold answer, and its place does not depend on the gold. In this order:

1. Everything up to and including the last ``</think>`` is dropped. A ``<think>`` that stays open
   makes the response *unparsable*.
2. ``\boxed{...}`` (balanced braces): equal boxes count as one, several different ones are *wrong*,
   a box that never closes or is empty is *unparsable*. Nothing outside a box counts.
3. Else ``<answer>...</answer>``, by the same rule.
4. Else, where the gold answer is a number (`is_number`):

   a. "answer is" or "answer:": the numbers right after it. Several such claims have to agree.
   b. else the text after the last "=", "equals" or "is" (the words only where
      a number follows);
   c. else the whole text.

   In (a) and (b) the text ends with its sentence or line; in (a) what follows the last "=" of it
   counts ("the answer is 12 + 30 = 42"). One number (or the same one again) is the answer, several
   different ones are *wrong* ("12 or 5", a list of options), none is *unparsable*.
5. Else, where the gold answer is no number: the rest of the line after "answer is" or "answer:"
   (several such claims have to agree). Without such a claim, *unparsable*, or, for tasks whose own
   judge compares the whole text (``whole=True``), the whole text.

Truncated responses never get here: `logra_lab.rl.scoring` calls them unparsable.
"""

import re
from typing import NamedTuple

from logra_lab.rl.outcomes import Outcome

# Ends where the number does: "12e5", "12_000" and "12.0.7" are no way to write 12.
NUMBER = re.compile(
    r"(?<![\w.])-?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?(?:/[0-9]+)?"
    r"(?![0-9_]|[eE][+-]?[0-9]|\.[0-9])"
)
_CLAIM = re.compile(r"\banswer\**\s*(?:is\b\s*:?|:)", re.IGNORECASE)
_MARKER = re.compile(r"=|\bequals\b|\bis\b", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?]+(?=\s|$)|\n")
_LINE_END = re.compile(r"\n|$")
_DECORATION = " \t\r\n*`\"'"


class Extraction(NamedTuple):
    """`answer` is the single final answer; where it is None, `verdict` says wrong or unparsable."""

    answer: str | None
    verdict: Outcome | None = None


WRONG = Extraction(None, Outcome.wrong)
UNPARSABLE = Extraction(None, Outcome.unparsable)


def is_number(answer: str) -> bool:
    r"""Whether a gold answer is one plain number ("42", "-3.5", "1,000", "7/8", "50\%")."""
    bare = answer.strip().strip("$").removesuffix("%").removesuffix("\\")
    return NUMBER.fullmatch(bare) is not None


def final_part(text: str) -> str | None:
    """The text after the reasoning block, or None when a ``<think>`` stays open."""
    tail = text.rpartition("</think>")[2]
    return None if "<think>" in tail else tail


def extract_answer(text: str, *, numeric: bool, whole: bool = False) -> Extraction:
    """The one final answer of a response under the policy of this module.

    Args: `numeric` whether the gold answer is a number, `whole` whether plain text counts as a
    whole where nothing is marked. Cost: linear in the length of the text.
    """
    tail = final_part(text)
    if tail is None:
        return UNPARSABLE
    if "\\boxed" in tail:
        return _single(_boxes(tail))
    if "<answer>" in tail:
        return _single(re.findall(r"<answer>(.*?)(?:</answer>|$)", tail, re.DOTALL))
    if numeric:
        return _plain_number(tail.replace("\N{MINUS SIGN}", "-"))
    claims = [_segment(tail, m.end(), _LINE_END) for m in _CLAIM.finditer(tail)]
    if claims:
        return _single([c.strip(_DECORATION).removesuffix(".") for c in claims])
    return _single([tail]) if whole else UNPARSABLE


def _single(found: list[str]) -> Extraction:
    """One non-empty answer, or the verdict on several or none."""
    distinct = {" ".join(f.split()) for f in found}
    if len(distinct) > 1:
        return WRONG
    answer = found[0].strip() if found else ""
    return Extraction(answer) if answer else UNPARSABLE


def _boxes(text: str) -> list[str]:
    r"""Contents of every ``\boxed{...}`` by counting braces; an unclosed box gives an empty one."""
    found = []
    for match in re.finditer(r"\\boxed\s*(\{|[^\s{]|$)", text):
        if match.group(1) != "{":
            found.append(match.group(1))
            continue
        depth, end = 1, match.end()
        while end < len(text) and depth:
            escaped = text[end - 1] == "\\" and text[end - 2] != "\\"
            depth += 0 if escaped else {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        found.append(text[match.end() : end - 1] if depth == 0 else "")
    return found


def _segment(text: str, start: int, end: re.Pattern[str]) -> str:
    match = end.search(text, start + len(text[start:]) - len(text[start:].lstrip()))
    return text[start : match.start() if match else len(text)]


def _plain_number(text: str) -> Extraction:
    claims = [_segment(text, m.end(), _SENTENCE_END) for m in _CLAIM.finditer(text)]
    if claims:
        return _one_number([c.rpartition("=")[2] for c in claims])
    for marker in list(_MARKER.finditer(text))[-1:]:
        segment = _segment(text, marker.end(), _SENTENCE_END)
        if marker.group() == "=" or NUMBER.search(segment):
            return _one_number([segment])
    return _one_number([text])


def _one_number(segments: list[str]) -> Extraction:
    numbers = [n.group() for segment in segments for n in NUMBER.finditer(segment)]
    return _single([n.replace(",", "").replace("$", "") for n in numbers])
