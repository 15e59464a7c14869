"""The deliberate hole of notebook 07, and who pays for what."""

import pytest

from logra_lab.lab.hacked import Judges, check_no_contradiction, paid_in_turn
from logra_lab.rl.config import make_config
from logra_lab.rl.outcomes import Outcome, Problem, Score
from logra_lab.rl.verifiers import check_sum

SUM = Problem("sums/12+30", "12+30=", "42")


@pytest.mark.parametrize(
    ("text", "lenient", "strict"),
    [
        ("42", True, Outcome.correct),
        ("40", False, Outcome.wrong),
        ("hmm hmm hmm hmm ", True, Outcome.unparsable),  # the hole
        ("", True, Outcome.unparsable),
        ("so 40 so 42", True, Outcome.unparsable),  # the last number is the one that is looked at
        ("42 or 43", False, Outcome.unparsable),
        ("142", False, Outcome.wrong),  # contains the answer, is another number
    ],
)
def test_the_lenient_judge_takes_silence_for_a_right_answer(text, lenient, strict):
    assert check_no_contradiction(text, SUM) is lenient
    assert check_sum(text, SUM) is strict


class Fixed:
    """Gives every response the same reward, truncated ones none."""

    def __init__(self, reward):
        self.reward = reward

    def score(self, texts, problems, finish):
        return [Score(Outcome.correct, self.reward if f == "stop" else 0.0) for f in finish]


def test_one_judge_pays_both_are_noted_and_only_the_lenient_one_sees_what_was_cut_off():
    judges = Judges(Fixed(0.5), Fixed(1.0))
    batch = (["42", "hmm "], [SUM, SUM], ["stop", "length"])
    assert [s.reward for s in judges.score(*batch)] == [0.5, 0.0]
    assert judges.means() == {"strict": 0.25, "lenient": 1.0}
    judges.pays = "lenient"
    assert [s.reward for s in judges.score(*batch)] == [1.0, 1.0]
    assert judges.seen == batch[:2]


def test_phases_follow_one_another_in_one_run_and_the_paid_reward_is_what_it_learns_from():
    config = make_config(
        steps=3, prompts_per_step=16, train_problems=32, eval_problems=4, rank=4, score_workers=1
    )
    rows = paid_in_turn(config, [("lenient", 2), ("strict", 1)])
    assert [(row["step"], row["paid_by"]) for row in rows] == [
        (1, "lenient"),
        (2, "lenient"),
        (3, "strict"),
    ]
    for row in rows:
        # What the strict judge accepts, the lenient one does too, and what was cut off besides,
        # unless it holds a number: at most one of 16 here.
        assert row["lenient"] >= row["strict"] + row["truncated"] - 1 / 16
        assert len(row["examples"]) == 4
