"""The extraction policy: a fixed verdict table, and attempts to list several answers."""

import pytest

from logra_lab.rl.answers import extract_answer, is_number
from logra_lab.rl.math_answers import check_math
from logra_lab.rl.tasks import load_task
from logra_lab.rl.verifiers import Outcome, Problem, check_reasoning_gym

C, W, U = Outcome.correct, Outcome.wrong, Outcome.unparsable

# Field report H5. Gold 12. Decided by hand from the written policy, never from a run.
H5 = [
    ("two boxes differing", "So \\boxed{5}. Wait: \\boxed{12}", W),
    ("two boxes equal", "So \\boxed{12}. Indeed \\boxed{12}", C),
    ("box only in think", "<think>I get \\boxed{12}.</think> Done.", U),
    ("unclosed box", "The result is \\boxed{12", U),
    ("12 or 5", "12 or 5", W),
    ("list of all options", "10, 11, 12, 13", W),
    ("correct then rambling", "The answer is 12. I also like 7 apples\nand 9 pears.", C),
    ("empty", "", U),
]

# Gold 12 as well.
MORE = [
    ("bare number", "12", C),
    ("another number's exponent", "12e5", U),
    ("another number's digits", "12_000", U),
    ("a version", "12.0.7", U),
    ("a grouping that is none", "12,0000", W),
    ("list without spaces", "12,13", W),
    ("equation", "5 + 7 = 12", C),
    ("equation with a full stop", "5 + 7 = 12.", C),
    ("sentence", "The answer is 12.", C),
    ("claim holding an equation", "The answer is 5 + 7 = 12.", C),
    ("bold label", "**Answer:** 12", C),
    ("label, next line", "Answer:\n12", C),
    ("dollars", "Answer: $12$", C),
    ("several steps", "5 + 7 = 5 + 5 + 2\n10 + 2 = 12", C),
    ("wrong sum", "5 + 7 = 13", W),
    ("restated question", "Calculate 5 + 7 =", U),
    ("unevaluated claim", "The answer is 5 + 7.", W),
    ("question words only", "What is 5 + 7?", W),
    ("equal claims", "The answer is 12. So the answer is 12.", C),
    ("different claims", "The answer is 12. So the answer is 13.", W),
    ("claim and later equation", "The answer is 12. Also 1 + 1 = 2.", C),
    ("two after the claim", "The answer is 12 or 13.", W),
    ("two after the equation", "5 + 7 = 12, 13", W),
    ("semicolons", "= 11; 12", W),
    ("equals in words", "In arithmetic, 5 + 7 equals 12.", C),
    ("is", "The sum of 5 and 7 is 12.", C),
    ("is, then another number", "The sum of 5 and 7 is 12, or 13.", W),
    ("is without a number after it", "12 is the sum.", C),
    ("last of the markers", "5 + 7 = 13. No, 5 + 7 is 12.", C),
    ("lines of options", "10\n11\n12", W),
    ("a range", "11-13", W),
    ("words", "twelve", U),
    ("after think", "<think>maybe 5 or 13</think>12", C),
    ("unclosed think", "<think>5 + 7 = 12", U),
    ("think opened again", "<think>5</think> <think>12", U),
    ("second think block", "<think>5</think>13<think>6</think>12", C),
    ("tag", "first 5, then 7: <answer>12</answer>", C),
    ("equal tags", "<answer>12</answer><answer> 12 </answer>", C),
    ("different tags", "<answer>12</answer><answer>5</answer>", W),
    ("empty tag", "<answer></answer> 12", U),
    ("box wins over tag", "\\boxed{13} <answer>12</answer>", W),
    ("boxes inside a tag", "<answer>\\boxed{12}\\boxed{5}</answer>", W),
    ("empty box", "12 \\boxed{}", U),
    ("list in a box", "\\boxed{11, 12}", W),
    ("another base in a box", "\\boxed{12_5}", W),
    ("or in a box", "\\boxed{12 \\text{ or } 5}", W),
]


@pytest.mark.parametrize(
    ("text", "verdict"), [c[1:] for c in H5 + MORE], ids=[c[0] for c in H5 + MORE]
)
@pytest.mark.parametrize("judge", ["math-verify", "reasoning-gym"])
def test_verdict_table(judge, text, verdict):
    if judge == "math-verify":
        assert check_math(text, Problem("p", "Calculate 5 + 7.", "12")) is verdict
    else:
        entry = {"question": "Calculate 5 + 7.", "answer": "12", "metadata": {}}
        meta = {"dataset": "basic_arithmetic", "params": {}, "entry": entry}
        assert check_reasoning_gym(text, Problem("p", "Calculate 5 + 7.", "12", meta)) is verdict


def test_h5_has_the_eight_strings_of_the_field_report():
    assert len({text for _, text, _ in H5}) == 8


@pytest.mark.parametrize(
    "template",
    ["{}", "Answer: {}", "= {}", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}."],
)
@pytest.mark.parametrize("joint", [" ", ", ", " or ", "\\lor ", "; ", " = ", "|", " & ", "/", "\n"])
def test_listing_every_answer_never_scores_on_more_than_one_of_them(template, joint):
    """A learner may write the same list for every problem: at most one gold answer can profit."""
    text = template.format(joint.join(str(n) for n in range(8, 17)))
    verdicts = [check_math(text, Problem("p", "", str(gold))) for gold in range(8, 17)]
    assert verdicts.count(C) <= 1
    if joint not in (" = ", "\n", "/"):
        assert C not in verdicts


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{\\frac{7}{8}}", "\\frac{7}{8}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{a \\\\ {b}} }", "a \\\\ {b}"),
        ("\\boxed {x}", "x"),
        ("\\boxed 7", "7"),
        ("Therefore the answer is (x-4)(x-5).", "(x-4)(x-5)"),
        ("Answer: $x^2$\nThat was it.", "$x^2$"),
    ],
)
def test_balanced_boxes_and_claims_of_answers_that_are_no_numbers(text, answer):
    assert extract_answer(text, numeric=False).answer == answer


def test_plain_text_counts_as_a_whole_only_where_the_task_says_so():
    assert extract_answer("cat dog", numeric=False).verdict is U
    assert extract_answer(" cat dog\n", numeric=False, whole=True).answer == "cat dog"


@pytest.mark.parametrize(
    ("gold", "number"),
    [
        ("42", True),
        ("-3.5", True),
        ("1,000", True),
        ("7/8", True),
        ("25\\%", True),
        ("$10$", True),
        ("0x67271", False),
        ("\\frac{7}{8}", False),
        ("x", False),
        ("1 2", False),
        ("", False),
    ],
)
def test_which_gold_answers_are_numbers(gold, number):
    assert is_number(gold) is number


@pytest.mark.parametrize("text", ["-7", "3 - 10 = -7", "The answer is −7", "Answer: -7.", "= $-7$"])
def test_negative_numbers_keep_their_sign(text):
    assert extract_answer(text, numeric=True).answer == "-7"


def test_thousands_are_one_number_and_lists_are_several():
    assert extract_answer("It is 12,500.", numeric=True).answer == "12500"
    assert extract_answer("It is 12,50,7.", numeric=True).verdict is W


def test_two_term_sums_of_reasoning_gym_in_a_small_models_words():
    """The job of the README: each way SmolLM2 writes a sum is judged by the dataset itself."""
    params = {"min_terms": 2, "max_terms": 2, "operators": ["+"], "allow_parentheses": False}
    for problem in load_task("reasoning_gym:basic_arithmetic", size=20, params=params):
        expression = problem.meta["entry"]["metadata"]["expression"]
        a, b = map(int, expression.split(" + "))
        for text in (f"{a + b}", f"{a} + {b} = {a + b}", f"The answer is {a + b}.", f"{a + b:,}"):
            assert check_reasoning_gym(text, problem) is C
        assert check_reasoning_gym(f"{a} + {b} = {a + b + 1}", problem) is W
        assert check_reasoning_gym(f"{a + b}, {a + b + 1}", problem) is W
