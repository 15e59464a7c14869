"""Tasks: specs, schemas, determinism, held-out problems, and every kind of bad input."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logra_lab.errors import InputError, LograError
from logra_lab.rl.tasks import load_task
from logra_lab.rl.verifiers import Outcome, Problem, Verifier, check_sum

DATA = Path(__file__).parents[2] / "data"
DAPO = f"jsonl:{DATA / 'dapo_math_tiny.jsonl'}"
MATH = f"jsonl:{DATA / 'math500_tiny.jsonl'}"
TWO_TERMS = {"min_terms": 2, "max_terms": 2, "operators": ["+"], "allow_parentheses": False}


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def prompts(task) -> list[str]:
    return [p.prompt for p in task]


def test_sums_are_sums_and_distinct():
    task = load_task("sums", size=300, seed=3)
    assert len(set(prompts(task))) == len(task) == 300
    for problem in task:
        a, b = map(int, problem.prompt.removesuffix("=").split("+"))
        assert 0 <= a <= 99
        assert 0 <= b <= 99
        assert problem.answer == str(a + b)
        assert task.verifier.check(problem.answer, problem) is Outcome.correct


def test_sums_can_be_drawn_to_the_last_pair_and_no_further():
    task = load_task("sums", size=16, params={"max_value": 3})
    assert {p.prompt for p in task} == {f"{a}+{b}=" for a in range(4) for b in range(4)}
    with pytest.raises(InputError, match=r"17 problems asked for.*only 16"):
        load_task("sums", size=17, params={"max_value": 3})


@pytest.mark.parametrize(
    ("spec", "size", "params"),
    [
        ("sums", 200, None),
        ("reasoning_gym:basic_arithmetic", 60, TWO_TERMS),
        (DAPO, 12, None),
    ],
)
def test_a_task_is_a_function_of_its_seed_and_leaves_global_random_state_alone(spec, size, params):
    random.seed(1)
    before = random.getstate()
    first = load_task(spec, size=size, seed=5, params=params)
    random.seed(2)
    second = load_task(spec, size=size, seed=5, params=params)
    assert list(first) == list(second)
    random.seed(1)
    load_task(spec, size=size, seed=5, params=params)
    assert random.getstate() == before
    assert prompts(load_task(spec, size=size, seed=6, params=params)) != prompts(first)


def test_neighbouring_seeds_of_reasoning_gym_do_not_share_their_problems():
    """reasoning-gym draws entry i from seed + i: seeds 0 and 1 given as such share 99 of 100."""
    spec = "reasoning_gym:basic_arithmetic"  # up to six terms of four digits: chance hits are rare
    first, second = (set(prompts(load_task(spec, size=100, seed=s))) for s in (0, 1))
    assert len(first & second) < 10


@pytest.mark.parametrize(
    ("spec", "params", "held", "size"),
    [
        ("sums", {"max_value": 9}, 30, 70),
        ("reasoning_gym:basic_arithmetic", {**TWO_TERMS, "max_digits": 1}, 40, 70),
        (MATH, None, 4, 8),
    ],
)
def test_excluded_held_out_problems_do_not_occur_in_training(spec, params, held, size):
    """The spaces are so small that without `exclude` the two would overlap (the control)."""
    held_out = load_task(spec, size=held, seed=1, params=params)
    exclude = {p.prompt for p in held_out}
    train = load_task(spec, size=size, seed=0, params=params, exclude=exclude)
    control = load_task(spec, size=size, seed=0, params=params)
    assert not exclude & set(prompts(train))
    assert exclude & set(prompts(control))
    assert len(set(prompts(train))) == size


def test_reasoning_gym_keeps_the_entry_and_its_own_judge():
    task = load_task("reasoning_gym:chain_sum", size=5, seed=2, params={"max_terms": 3})
    for problem in task:
        entry = problem.meta["entry"]
        assert problem.prompt == entry["question"]
        assert eval(entry["metadata"]["expression"]) == int(problem.answer)
        # chain_sum's judge takes "+007" for 7; a comparison of texts would not
        number = int(problem.answer)
        padded = f"{'-' if number < 0 else '+'}0{abs(number)}"
        assert task.verifier.check(f"<answer>{padded}</answer>", problem) is Outcome.correct


def test_dapo_schema_gives_prompt_answer_and_index():
    rows = {r["extra_info"]["index"]: r for r in rows_of("dapo_math_tiny.jsonl")}
    task = load_task(DAPO, size=12)
    assert len(task) == len(rows) == 12
    for problem in task:
        row = rows[problem.id.removeprefix("dapo_math/")]
        assert problem.prompt == row["prompt"][0]["content"]
        assert problem.answer == row["reward_model"]["ground_truth"]


def test_math500_schema_and_every_shipped_solution_is_correct():
    task = load_task(MATH, size=12)
    solutions = {f"math500/{r['unique_id']}": r["solution"] for r in rows_of("math500_tiny.jsonl")}
    for problem in task:
        assert "\\boxed{}" in problem.prompt
        assert task.verifier.check(solutions[problem.id], problem) is Outcome.correct
        assert task.verifier.check("\\boxed{1234567}", problem) is Outcome.wrong


def test_every_shipped_dapo_answer_is_correct_in_its_own_answer_line():
    task = load_task(DAPO, size=12)
    for problem in task:
        assert task.verifier.check(f"So.\nAnswer: {problem.answer}", problem) is Outcome.correct


@pytest.mark.parametrize("name", ["dapo_math_tiny.jsonl", "math500_tiny.jsonl"])
def test_parquet_holds_the_same_task_as_jsonl(name, tmp_path):
    pq.write_table(pa.Table.from_pylist(rows_of(name)), tmp_path / "tiny.parquet")
    parquet = load_task(f"parquet:{tmp_path / 'tiny.parquet'}", size=12, seed=4)
    jsonl = load_task(f"jsonl:{DATA / name}", size=12, seed=4)
    assert list(parquet) == list(jsonl)


@pytest.mark.parametrize(
    ("spec", "hub", "split", "file"),
    [
        ("dapo_math", "BytedTsinghua-SIA/DAPO-Math-17k", "train", "dapo_math_tiny.jsonl"),
        ("math500", "HuggingFaceH4/MATH-500", "test", "math500_tiny.jsonl"),
    ],
)
def test_hub_tasks_ask_datasets_for_the_right_id_and_split(monkeypatch, spec, hub, split, file):
    import datasets

    rows = rows_of(file)
    asked = []

    def load_dataset(name, *, split):
        asked.append((name, split))
        return datasets.Dataset.from_list(rows + rows)  # the hub's DAPO file repeats its rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task = load_task(spec, size=12)
    assert asked == [(hub, split)]
    assert len(set(prompts(task))) == 12
    with pytest.raises(InputError, match="only 12"):
        load_task(spec, size=13)


def test_no_hub_is_an_error_that_names_the_way_out(monkeypatch):
    import datasets

    def load_dataset(name, *, split):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(LograError, match=r"no route.*jsonl:PATH") as caught:
        load_task("dapo_math", size=1)
    assert not isinstance(caught.value, InputError)


def test_a_verifier_of_ones_own_replaces_the_tasks():
    mine = Verifier("mine", "2", "me", check_sum)
    assert load_task(DAPO, size=1, verifier=mine).verifier is mine


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("sumz", {}, "did you mean 'sums'"),
        ("reasoning_gym:basic_arithmetics", {}, "nearest: basic_arithmetic"),
        ("reasoning_gym:", {}, "unknown task"),
        ("reasoning_gym:basic_arithmetic", {"params": {"min_term": 2}}, "known params:.*min_terms"),
        ("reasoning_gym:basic_arithmetic", {"params": {"min_terms": 0}}, "min_terms must be pos"),
        ("reasoning_gym:basic_arithmetic", {"params": {"min_terms": "two"}}, "bad params"),
        ("reasoning_gym:basic_arithmetic", {"params": {"size": 3}}, "not in params"),
        ("sums", {"params": {"max_value": -1}}, "max_value=-1"),
        ("sums", {"params": {"max": 9}}, "max"),
        ("sums", {"size": 0}, "size must be at least 1"),
        (DAPO, {"size": 13}, "13 problems asked for, but there are only 12"),
        (DAPO, {"params": {"x": 1}}, "takes no params"),
        ("jsonl:no/such/file.jsonl", {}, "no such file"),
        ("parquet:no/such/file.parquet", {}, "no such file"),
    ],
)
def test_bad_input(spec, settings, message):
    with pytest.raises(InputError, match=message):
        load_task(spec, **{"size": 2, **settings})


def test_a_small_space_of_reasoning_gym_ends_with_an_error_and_not_in_a_loop():
    params = {**TWO_TERMS, "max_digits": 1}  # 11 x 11 pairs of 0..10
    with pytest.raises(InputError, match="500 problems asked for"):
        load_task("reasoning_gym:basic_arithmetic", size=500, params=params)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no rows"),
        ("\n\n", "no rows"),
        ('{"problem": "a", "answer": "1"}\n{"problem"', "line 2"),
        ("[1]", "line 1.*JSON object"),
        ('{"problem": "a", "solution": "b"}', "MATH-500 needs also answer"),
        ('{"prompt": "a"}', "DAPO-Math-17k needs also reward_model"),
        ('{"problem": "a", "answer": 5}', "row 0.*expected text, got 5"),
        ('{"problem": "a", "answer": " "}', "row 0 has an empty"),
        ('{"prompt": [{"role": "user"}], "reward_model": {"ground_truth": "1"}}', "content"),
        ('{"prompt": [{"content": "a"}], "reward_model": {}}', "ground_truth"),
    ],
)
def test_bad_files(tmp_path, content, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        load_task(f"jsonl:{file}", size=1)


def test_broken_and_empty_parquet_files(tmp_path):
    broken, empty = tmp_path / "broken.parquet", tmp_path / "empty.parquet"
    broken.write_bytes(b"PAR1 but no more")
    pq.write_table(pa.table({"problem": pa.array([], pa.string())}), empty)
    with pytest.raises(InputError, match="not a readable Parquet file"):
        load_task(f"parquet:{broken}", size=1)
    with pytest.raises(InputError, match="no rows"):
        load_task(f"parquet:{empty}", size=1)


def test_excluding_everything_says_that_nothing_is_left():
    everything = {p.prompt for p in load_task(MATH, size=12)}
    with pytest.raises(InputError, match=r"held out .12 prompts excluded.; lower eval_problems"):
        load_task(MATH, size=1, exclude=everything)


def test_problems_are_plain_values_that_compare_and_pickle():
    import pickle

    task = load_task("reasoning_gym:chain_sum", size=2)
    assert pickle.loads(pickle.dumps(task[0])) == task[0]
    assert isinstance(task[0], Problem)
    with pytest.raises(IndexError):
        task[2]
