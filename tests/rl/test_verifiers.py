"""The judges: math-verify with its policies, reasoning-gym, JSON schema, unit tests, sums."""

import json
import os
import time
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

from logra_lab.rl import verifiers
from logra_lab.rl.math_answers import check_math
from logra_lab.rl.scoring import ScoringPool
from logra_lab.rl.tasks import load_task
from logra_lab.rl.verifiers import (
    Outcome,
    Problem,
    check_json_schema,
    check_reasoning_gym,
    check_sum,
    check_unit_tests,
    is_plain_expression,
    json_schema_verifier,
    math_verifier,
    reasoning_gym_verifier,
    sums_verifier,
    unit_test_verifier,
)

C, W, U = Outcome.correct, Outcome.wrong, Outcome.unparsable


def math(gold: str, answer: str) -> Outcome:
    return check_math(f"\\boxed{{{answer}}}", Problem("p", "", gold))


def test_names_versions_and_owners_are_there_for_the_manifest():
    for make in (
        sums_verifier,
        math_verifier,
        reasoning_gym_verifier,
        json_schema_verifier,
        unit_test_verifier,
    ):
        verifier = make()
        assert verifier.name
        assert verifier.version
        assert verifier.owner == "logra_lab"


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("42", C),
        (" 42\n", C),
        ("41", W),
        ("-42", W),
        ("042", W),
        ("42.0", U),
        ("41 42", U),
        ("=42", U),
        ("", U),
        ("٤٢", U),
    ],
)
def test_sums_take_the_number_and_nothing_else(text, outcome):
    assert check_sum(text, Problem("p", "40+2=", "42")) is outcome


# H3: the gold answer comes first. Measured: gold (2,7) refuses 2<x<7, gold 2<x<7 accepts (2,7).
def test_argument_order_is_pinned_by_the_interval_pair():
    assert math("(2,7)", "2<x<7") is W
    assert math("2<x<7", "(2,7)") is C


@pytest.mark.parametrize(
    ("gold", "answer", "outcome"),
    [
        ("50", "50\\%", C),
        ("50\\%", "50\\%", C),
        ("50\\%", "50", C),
        ("50%", "50", C),
        ("0.5", "50\\%", W),  # math-verify alone accepts it
        ("50\\%", "0.5", W),  # this one too
        ("0.5", "0.5", C),
    ],
)
def test_percent_is_a_unit(gold, answer, outcome):
    assert math(gold, answer) is outcome


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("7/8", "0.875"),
        ("\\frac{7}{8}", "7/8"),
        ("7/8", "\\frac{14}{16}"),
        ("(x-4)(x-5)", "x^2-9x+20"),
        ("6\\sqrt{2}", "\\sqrt{72}"),
        ("\\{2,3\\}", "\\{3,2\\}"),
        ("\\text{Lea}", "\\text{Lea}"),
        ("3\\frac{3}{4}", "3.75"),
        ("1000", "1,000"),
        ("42", "x = 42"),
        ("42", "42 \\text{ jars}"),
        ("42", "\\$42"),
        ("42", "42^\\circ"),
        ("42", "42.0"),
        ("-3", "-3"),
        ("300000000", "3\\times10^8"),
    ],
)
def test_equal_answers_in_another_form_are_correct(gold, answer):
    assert math(gold, answer) is C


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "x=11 \\lor x=42"),  # accepted by math-verify alone
        ("42", "x=11 \\text{ or } x=42"),
        ("42", "1=2=42"),  # accepted by math-verify alone
        ("42", "41=42"),  # accepted by math-verify alone
        ("42", "12+30"),  # the rest of these leave the calculation to the judge
        ("42", "6\\cdot 7"),
        ("42", "50-8"),
        ("42", "84/2"),
        ("42", "\\frac{84}{2}"),
        ("12", "\\sqrt{144}"),
        ("24", "4!"),
        ("8", "2^3"),
        ("23", "11 12"),
        ("42", "\\{41, 42\\}"),
        ("42", "[41, 42]"),
        ("42", "42\\pm1"),
        ("42", "43"),
    ],
)
def test_alternatives_chains_and_calculations_are_wrong(gold, answer):
    assert math(gold, answer) is W


def test_a_gold_answer_that_cannot_be_read_is_an_error_of_the_data_not_a_wrong_answer():
    with pytest.raises(ValueError, match="correct the data"):
        math("\\frac{", "1")
    with ScoringPool(math_verifier(), timeout_s=30) as pool:
        found = pool.score(["\\boxed{1}"], [Problem("p", "", "\\frac{")], ["stop"])
    assert (found[0].outcome, found[0].reward) == (Outcome.error, None)


# H4: parse_expr and eval run code that an answer holds.
ATTACKS = [
    "__import__('os').system('touch {path}')",
    "__import__('pathlib').Path('{path}').touch()",
    "open('{path}', 'w')",
    "eval(\"open('{path}','w')\")",
    "[x for x in [open('{path}', 'w')]]",
    "(lambda: open('{path}', 'w'))()",
    "().__class__.__base__.__subclasses__()",
]
EVALUATING = [
    "countdown",
    "puzzle24",
    "polynomial_multiplication",
    "simple_integration",
    "intermediate_integration",
    "string_insertion",
    "spiral_matrix",
    "binary_matrix",
    "n_queens",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_answer_to_math_is_run_as_code(attack, tmp_path):
    path = tmp_path / "made"
    text = attack.format(path=path)
    for wrapped in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>", f"Answer: {text}"):
        for gold in ("42", "x^2"):
            assert check_math(wrapped, Problem("p", "", gold)) is not C
    assert not path.exists()


@pytest.mark.parametrize("name", EVALUATING)
def test_no_answer_to_an_evaluating_reasoning_gym_judge_is_run_as_code(name, tmp_path):
    path = tmp_path / "made"
    problem = load_task(f"reasoning_gym:{name}", size=1)[0]
    for attack in ATTACKS:
        text = f"<answer>{attack.format(path=path)}</answer>"
        assert check_reasoning_gym(text, problem) is not C
        assert not path.exists(), attack
    assert check_reasoning_gym(f"<answer>{problem.answer}</answer>", problem) is C


def test_the_attack_works_on_an_unguarded_judge(tmp_path):
    """Control: without the guard the answer does create the file."""
    import reasoning_gym

    path = tmp_path / "made"
    dataset = reasoning_gym.create_dataset("string_insertion", seed=0, size=1)
    dataset.score_answer(answer=f"[open('{path}', 'w').name]", entry=dataset[0])
    assert path.exists()


@pytest.mark.parametrize("answer", ["x.real", "abs(x)", "a__b", "'a'.upper()", "f'{1}'", "x := 1"])
def test_names_attributes_and_strings_are_no_plain_expression(answer):
    assert not is_plain_expression(answer)


@pytest.mark.parametrize(
    "answer", ["69*(71 - 38) - 18", "X**8/5 + C", "['a', 'b']", "Q _ _\n_ Q _"]
)
def test_what_evaluating_judges_need_is_a_plain_expression(answer):
    assert is_plain_expression(answer)


def test_every_reasoning_gym_dataset_accepts_its_own_answer_and_refuses_nonsense():
    """composite has no problems of its own; five have no single gold answer and get none here."""
    without = set()
    for name in sorted(set(DATASETS) - {"composite"}):
        problem = load_task(f"reasoning_gym:{name}", size=1)[0]
        if problem.answer:
            assert check_reasoning_gym(f"<answer>{problem.answer}</answer>", problem) is C, name
        else:
            without.add(name)
        assert check_reasoning_gym("<answer>zz</answer>", problem) in (W, U), name
    assert len(without) < 10


def test_part_of_a_point_for_containing_the_answer_is_no_point():
    """reasoning-gym's own score for "x 5 y" with gold 5 is len(gold) / len(answer) > 0."""
    entry = {"question": "4 + 1", "answer": "5", "metadata": {}}
    meta = {"dataset": "basic_arithmetic", "params": {}, "entry": entry}
    assert check_reasoning_gym("<answer>4 5 6</answer>", Problem("p", "", "5", meta)) is W


def test_a_judge_that_raises_on_the_answer_only_is_unparsable_and_on_the_gold_an_error(monkeypatch):
    problem = load_task("reasoning_gym:prime_factorization", size=1)[0]
    assert check_reasoning_gym("<answer>zz</answer>", problem) is U

    def broken(*, answer, entry):
        raise KeyError("the judge is broken")

    judge = type("Judge", (), {"score_answer": staticmethod(broken)})()
    monkeypatch.setattr(verifiers, "_judge", lambda name, params: (judge, False))
    with pytest.raises(KeyError, match="broken"):
        check_reasoning_gym("<answer>zz</answer>", problem)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ('{"name": "Mira", "age": 9}', C),
        ('Here:\n```json\n{"name": "Mira", "age": 9}\n```\nDone.', C),
        ('<think>{"name": 1}</think>{"name": "Mira", "age": 9}', C),
        ('{"name": "Mira"}', W),
        ('{"name": "Mira", "age": -1}', W),
        ('{"name": "Mira", "age": 9, "x": 0}', W),
        ('{"name": "Mira", "age": NaN}', U),
        ('{"name": "Mira", ', U),
        ('```json\n{"name": "a", "age": 1}\n```\n```json\n{"name": "b", "age": 1}\n```', U),
        ("", U),
        ('<think>{"name": "Mira", "age": 9}', U),
    ],
)
def test_json_schema(text, outcome):
    assert check_json_schema(text, Problem("p", "", "", {"schema": SCHEMA})) is outcome


def test_a_broken_schema_is_an_error_and_never_wrong():
    verifier = json_schema_verifier()
    problem = Problem("p", "", "", {"schema": {"type": "no such type"}})
    with ScoringPool(verifier, timeout_s=30) as pool:
        found = pool.score(["{}"], [problem], ["stop"])
    assert found[0].outcome is Outcome.error
    assert "SchemaError" in found[0].detail


MEDIAN = Problem(
    "p",
    "Write median(values).",
    "",
    {
        "function": "median",
        "cases": [
            {"args": [[3, 1, 2]], "expected": 2},
            {"args": [[4, 1, 3, 2]], "expected": 2.5},
        ],
    },
)
GOOD = """def median(values):
    v, m = sorted(values), len(values) // 2
    return v[m] if len(v) % 2 else (v[m - 1] + v[m]) / 2
"""


@pytest.mark.parametrize(
    ("source", "outcome"),
    [
        (GOOD, C),
        (f"Here it is:\n```python\n{GOOD}```\nIt sorts first.", C),
        ("def median(values):\n    return sorted(values)[len(values) // 2]\n", W),
        ("def mean(values):\n    return 2\n", W),
        ("this is no program", W),
        (f"```python\n{GOOD}```\n```python\nprint(1)\n```", U),
        ("", U),
        ("import os\nos._exit(0)\n", W),
        ("import sys\nsys.exit(0)\n", W),
        ("class Y:\n    __eq__ = lambda *a: True\ndef median(values):\n    return Y()\n", W),
        ("def median(values):\n    raise SystemExit(0)\n", W),
        ("def median(values):\n    return bytearray(1 << 33) and 2\n", W),
        ("open('results.json', 'w').write('[')\nimport os; os._exit(0)\n", W),
    ],
)
def test_unit_tests(source, outcome):
    assert check_unit_tests(source, MEDIAN) is outcome


def test_an_endless_program_is_wrong_within_its_own_limit():
    start = time.monotonic()
    endless = "def median(values):\n    while True: pass\n"
    with ScoringPool(unit_test_verifier(), timeout_s=30) as pool:
        assert pool.score([endless], [MEDIAN], ["stop"])[0].outcome is W
    assert time.monotonic() - start < 20


def test_the_program_sees_neither_the_expected_values_nor_our_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_TEST", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    spy = (
        "import os, sys\n"
        "seen = [[*os.environ], os.listdir('.'), open('given.json').read(), sys.flags.isolated]\n"
        "def median(values): return seen\n"
    )
    from logra_lab.rl.unit_tests import run_function

    (result,) = run_function(spy, "median", [[[1]]]) or [""]
    environment, files, given, isolated = json.loads(result)
    assert "SECRET_OF_THE_TEST" not in environment
    assert "PYTHONPATH" not in environment
    assert files == ["given.json"]
    assert "expected" not in given
    assert isolated == 1
    assert not Path(os.getcwd(), "given.json").exists()
