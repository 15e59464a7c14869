"""Pass@k, bootstrap intervals, and the evaluation that puts them together."""

import itertools
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from logra_lab.errors import InputError
from logra_lab.rl.evaluate import (
    EvaluationError,
    bootstrap_interval,
    evaluate,
    paired_interval,
    pass_at_k,
)

# --- Pass@k ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_k_subsets_with_a_correct_sample(n):
    """Counts the subsets; 1 - (1 - c/n)^k, the biased estimator, would fail."""
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_accurate_where_binomials_overflow_floats():
    """C(5000, 400) has over 600 digits; the exact value comes from Python's integers."""
    exact = 1 - math.comb(4990, 400) * 10**30 // math.comb(5000, 400) / 10**30
    assert pass_at_k(5000, 10, 400) == pytest.approx(exact, rel=1e-12)


def test_pass_at_k_is_unbiased_for_k_fresh_samples():
    """Sum over the binomial law of c: exactly 1 - (1 - p)^k (Chen et al. 2021, appendix A)."""
    n, k, p = 8, 4, 0.3
    law = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(w * pass_at_k(n, c, k) for c, w in enumerate(law))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-14)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(InputError, match=f"n={n}, c={c}, k={k}"):
        pass_at_k(n, c, k)


# --- intervals ------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "z"), [(0.95, 1.959964), (0.8, 1.281552)])
def test_the_interval_is_the_normal_one_for_many_values(level, z):
    """Central limit theorem, n = 4000. A quantile of 2000 resamples has a standard error of
    at most sqrt(q(1-q)/2000)/density = 0.060 sd at q = 0.025; 4 of them are allowed."""
    values = np.random.default_rng(1).exponential(size=4000)
    low, high = bootstrap_interval(values, level=level)
    error = values.std() / math.sqrt(len(values))
    assert (low - values.mean()) / error == pytest.approx(-z, abs=0.24)
    assert (high - values.mean()) / error == pytest.approx(z, abs=0.24)


def test_the_interval_of_two_values_holds_the_three_possible_means():
    """Resamples of (0, 1) have means 0, 0.5, 1 with chances 1/4, 1/2, 1/4."""
    assert bootstrap_interval([0.0, 1.0], level=0.95) == (0.0, 1.0)
    assert bootstrap_interval([0.0, 1.0], level=0.4) == (0.5, 0.5)


def test_the_interval_is_a_function_of_its_seed():
    values = list(np.random.default_rng(0).normal(size=50))
    assert bootstrap_interval(values) == bootstrap_interval(values)
    assert bootstrap_interval(values) != bootstrap_interval(values, seed=1)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [[1.0, 2.0]]])
def test_the_interval_refuses_values_without_a_mean(values):
    with pytest.raises(InputError, match="expected finite values"):
        bootstrap_interval(values)


@pytest.mark.parametrize("setting", [{"level": 0.0}, {"level": 95}, {"resamples": 0}])
def test_the_interval_refuses_bad_settings(setting):
    with pytest.raises(InputError, match=next(iter(setting))):
        bootstrap_interval([1.0, 2.0], **setting)


def test_pairing_removes_the_spread_between_problems():
    """after = before + 0.1 on every problem: the difference is certain, the two means are not."""
    before = {str(i): v for i, v in enumerate(np.random.default_rng(2).random(200))}
    after = {name: value + 0.1 for name, value in before.items()}
    low, high = paired_interval(before, after)
    assert low == pytest.approx(0.1, abs=1e-12)
    assert high == pytest.approx(0.1, abs=1e-12)
    assert np.ptp(bootstrap_interval(list(before.values()))) > 0.05


def test_pairing_goes_by_problem_id_not_by_place():
    before = {"a": 0.0, "b": 1.0, "only before": 0.3}
    after = {"only after": 0.9, "b": 1.0, "a": 0.0}
    assert paired_interval(before, after) == (0.0, 0.0)
    assert paired_interval([0.0, 1.0], [-1.0, 0.0]) == (-1.0, -1.0)


@pytest.mark.parametrize(
    ("before", "after"), [({"a": 1.0}, {"b": 1.0}), ([1.0], [1.0, 2.0]), ({"a": 1.0}, [1.0])]
)
def test_nothing_to_pair_is_refused(before, after):
    with pytest.raises(InputError, match="paired_interval"):
        paired_interval(before, after)


# --- evaluate -------------------------------------------------------------------------------


@dataclass
class Engine:
    """Answers as a script says, by key; remembers what it was asked."""

    script: dict[str, list[str]]
    asked: list = field(default_factory=list)

    def generate(self, prompt_ids, keys):
        self.asked = list(zip(prompt_ids, keys, strict=True))
        texts = []
        for key in keys:
            _, _, _, problem, sample = key.split(":")
            texts.append(self.script[problem][int(sample)])
        return SimpleNamespace(
            texts=texts,
            response_ids=[list(range(len(text))) for text in texts],
            logprobs=[torch.zeros(len(text)) for text in texts],
            finish=["length" if text == "truncated" else "stop" for text in texts],
        )


class Scorer:
    """The text is the outcome; 1 for correct, none for timeout and error, else 0."""

    def score(self, texts, problems, finish):
        rewards = {"correct": 1.0, "timeout": None, "error": None}
        return [
            SimpleNamespace(outcome="wrong" if t == "truncated" else t, reward=rewards.get(t, 0.0))
            for t in texts
        ]


POLICY = SimpleNamespace(encode=lambda prompt: [len(prompt), 7])


def result_of(script: dict[str, list[str]], samples: int, engine: Engine | None = None):
    problems = [SimpleNamespace(id=name, prompt=name * 2) for name in script]
    return evaluate(
        engine or Engine(script),
        POLICY,
        SimpleNamespace(name="fake", problems=problems),
        Scorer(),
        samples=samples,
        run_seed=5,
        tag="end",
    )


C, W, U, T, E, L = "correct", "wrong", "unparsable", "timeout", "error", "truncated"


def test_the_figures_of_a_small_evaluation_by_hand():
    script = {
        "a": [C, C, W, W, W, W, W, W],  # 2 of 8
        "bb": [C] * 8,  # 8 of 8
        "ccc": [W, U, L, W, W, W, W, L],  # 0 of 8
        "d": [T, C, E, W, C, T, E, T],  # 2 of 3 judged: no Pass@4
        "e": [T] * 8,  # nothing judged: left out
    }
    result = result_of(script, 8)
    assert (result.problems, result.judged_problems, result.samples) == (5, 4, 8)
    assert result.pass_at_1 == pytest.approx((2 / 8 + 1 + 0 + 2 / 3) / 4)
    # Pass@4 of 2 in 8: 1 - C(6,4)/C(8,4) = 1 - 15/70.
    assert result.pass_at_4 == pytest.approx((1 - 15 / 70 + 1 + 0) / 3)
    assert result.outcomes == {C: 12, W: 14, U: 1, T: 11, E: 2}  # a truncated one is wrong
    assert sum(result.outcomes.values()) == 40
    assert result.truncated_share == 2 / 40
    assert result.mean_length == pytest.approx(
        sum(len(text) for texts in script.values() for text in texts) / 40
    )
    assert result.rewards == pytest.approx({"a": 0.25, "bb": 1.0, "ccc": 0.0, "d": 2 / 3})
    low, high = result.pass_at_1_interval
    assert 0 <= low < result.pass_at_1 < high <= 1


def test_each_sample_has_the_key_that_seeds_it_and_the_prompt_of_its_problem():
    script = {"a": [C, W], "bb": [W, C]}
    engine = Engine(script)
    result_of(script, 2, engine)
    assert engine.asked == [
        ([2, 7], "5:eval:end:a:0"),
        ([2, 7], "5:eval:end:a:1"),
        ([4, 7], "5:eval:end:bb:0"),
        ([4, 7], "5:eval:end:bb:1"),
    ]


def test_fewer_than_four_samples_give_no_pass_at_4():
    result = result_of({"a": [C, W, W]}, 3)
    assert result.pass_at_4 is None
    assert result.pass_at_4_interval is None
    assert result.to_dict()["pass_at_4"] is None


def test_an_evaluation_without_a_judged_response_is_an_error_not_a_zero():
    with pytest.raises(EvaluationError, match=r"none of 4 responses.*'timeout': 3"):
        result_of({"a": [T, T], "b": [E, T]}, 2)


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="empty task"):
        result_of({}, 1)
    with pytest.raises(InputError, match="samples >= 1"):
        result_of({"a": []}, 0)
    twice = SimpleNamespace(problems=[SimpleNamespace(id="a", prompt="a")] * 2)
    with pytest.raises(InputError, match=r"ids must differ.*'a'"):
        evaluate(Engine({"a": [C]}), POLICY, twice, Scorer(), samples=1, run_seed=0, tag="x")


def test_an_engine_that_loses_a_response_is_found():
    class Lossy(Engine):
        def generate(self, prompt_ids, keys):
            return super().generate(prompt_ids[:-1], keys[:-1])

    with pytest.raises(EvaluationError, match="expected 2 responses, got 1"):
        result_of({"a": [C, W]}, 2, Lossy({"a": [C, W]}))
