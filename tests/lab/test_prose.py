"""A number in words needs something that backs it; each test is a way to state one without."""

from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from logra_lab.errors import InputError
from logra_lab.lab.prose import explain, unbacked

PARAMETERS = 'preset: str = "laptop"\nrank: int = 64\nbudget: float = 5e-3'


@pytest.fixture
def stated(course, make_book):
    """Complaints about a notebook that ends with these cells' words; `record` as of a run."""

    def check(
        *cells: Any, record: dict[str, Any] | None = None, code: str = "x = 300"
    ) -> list[str]:
        node = make_book(code, parameters=PARAMETERS)
        node.cells[2:2] = [new_markdown_cell(c) if isinstance(c, str) else c for c in cells]
        return unbacked(course.write("01_one", node), record)

    return check


@pytest.mark.parametrize(
    "words",
    [
        "Two of 10 rows, float32, bfloat16, int8, SHA-256, MATH-500, Qwen2.5-7B, 1.5B, Pass@4.",
        "A rank of 64 takes 64 times less; the budget is 5e-3, or 5·10⁻³.",  # parameters
        "A prompt of 300 ids has no unit, and the code says 300.",
        "Rounding is 2⁻²⁴ and ±1/√r, with 95 % bootstrap intervals.",
        "Published: 31.82 → 17.29 GiB, 45.7 % less.",
        "    S = 0.123 · G\n\n`0.456` and $0.789 x$ are formulas, see [2](03_x.ipynb).",
        "As PR 4018 found.\n\n## References\n\n* NeMo-RL PR 4018, 1984, pages 113-456.",
        "Next number: 0.996. <!-- numbers: 0.996 = 1 - 2**-8 -->",
        "A cosine.\n<!-- numbers: 0.243 = 1 / sqrt(1 + (laptop.k - 1) / published['rank']) -->",
        'Up to 17 updates (NeMo-RL).\n<!-- numbers: 17 = "NeMo-RL" -->',
    ],
)
def test_backed_numbers_pass(stated, words):
    assert stated(words) == []


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("Accuracy rises to 0.87.", "0.87"),
        ("It rises by 5 %.", "5 %"),  # small, but a result
        ("It is 3 times faster.", "3 times"),
        ("Memory falls from 12 to 1 MiB.", "12 MiB"),  # the unit belongs to both
        ("A step of 6·10⁻⁵ nats.", "6·10⁻⁵ nats"),
        ("It takes 1,234 tokens.", "1,234"),
        ("The code's 300 as a share: 300 % more.", "300 %"),
        ("It needs 31.82 GiB.", "31.82 GiB"),  # a published number passed off as one's own
        ("| a | b |\n|---|---|\n| x | 0.77 |", "0.77"),
        ("<details><summary>Solution</summary>\n\nIt is 0.77.\n\n</details>", "0.77"),
        (new_code_cell('said = f"the median of all steps is 0.77, not {x}"'), "0.77"),
        (new_code_cell("print('the median of all steps fell by 12 %')"), "12 %"),
    ],
)
def test_numbers_without_backing_are_named(stated, words, shown):
    (found,) = stated(words)
    assert f" {shown} in “" in found
    assert found.startswith("cell 2: ")


def test_looks_of_a_figure_back_no_number(stated):
    assert stated("It scores 8.5.", code="plot(figsize=(8.5, 3.6))")
    assert not stated("It scores 8.5.", code="x = 8.5")


@pytest.mark.parametrize(
    ("declaration", "complaint"),
    [
        ("0.995 = 1 - 2**-8", "the right side is 0.996"),
        ("0.99 = 1 - 2**-8", "the right side is 0.996"),  # 1.00 would be the rounded one
        ("0.5 = nothing", "NameError"),
        ('17 = "nobody"', "names no such source"),
        ("0.5", "SyntaxError"),
        ("ten = 2 * 5", "the right side is 10"),
        ("0.77 = 0.77", "does not back itself"),
        ('0.77 = "it is 0.77"', "names no such source"),  # words that state it are no source
    ],
)
def test_a_declaration_that_does_not_hold_is_named(stated, declaration, complaint):
    found = "\n".join(stated(f"Words: it is 0.77.\n\n<!-- numbers: {declaration} -->"))
    assert complaint in found


def test_a_declared_record_is_evaluated_once_there_is_one(stated):
    words = (
        "The median is 0.90, or 90 %.\n<!-- numbers: 0.90 = record['m']; 90 = 100 * record['m'] -->"
    )
    assert stated(words) == []
    assert stated(words, record={"m": 0.9011}) == []
    assert len(stated(words, record={"m": 0.91})) == 2
    assert "KeyError" in stated(words, record={})[0]


def displayed(text: str) -> nbformat.NotebookNode:
    output = new_output("display_data", {"text/markdown": text, "text/plain": text})
    return new_code_cell("y = 1", outputs=[output])


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("Median 0.90, the same as 90 % and 90.11 %.", ""),
        ("It holds 2 MiB, 2,097,152 bytes.", ""),
        ("At δ = 5.0e-05 nothing moves; rank 64, 300 ids.", ""),
        ("Median 0.91.", "0.91"),
        ("It is 90 times less.", "90 times"),  # a share is no factor
        ("It holds 2.1 MiB.", "2.1 MiB"),
        ("It takes 300 s.", "300 s"),  # the code's 300 is no time that anybody measured
        ("It said 0.77.", "0.77"),  # the record holds it in a sentence, which nobody can assert
    ],
)
def test_what_is_displayed_has_to_be_in_the_record_to_the_digits_shown(stated, text, missing):
    record = {"m": 0.9011, "bytes": [2**21], "tried": {"5.0e-05": {}}, "said": "it is 0.77"}
    found = stated(displayed(text), record=record)
    assert len(found) == bool(missing)
    assert not missing or f"output of cell 2: {missing} in “" in found[0]


def test_the_message_says_how_to_comply():
    text = explain(["cell 3: 0.87 in “rises to 0.87”"])
    assert "cell 3: 0.87" in text
    assert "<!-- numbers: " in text
    assert "record(...)" in text
    with pytest.raises(InputError):
        explain([])
    assert "logra_lab/lab/prose.py" in text
