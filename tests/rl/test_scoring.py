"""The scoring pool: outcomes, limits, replacement, threads, notebooks, no orphans."""

import importlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
import papermill
import pytest

from logra_lab.errors import InputError, LograError
from logra_lab.rl.scoring import ScoringError, ScoringPool
from logra_lab.rl.verifiers import Outcome, Problem, Score, Verifier, math_verifier, sums_verifier

HERE = str(Path(__file__).parent)
SEVEN_EIGHTHS = Problem("h1", "3/4 + 1/8?", "7/8")


@pytest.fixture
def checks(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    return importlib.import_module("scoring_checks")


def pool_of(check, **settings) -> ScoringPool:
    return ScoringPool(Verifier("test", "1", "tests", check), **settings)


def problems(count: int) -> list[Problem]:
    return [Problem(str(i), f"{i}+1=", str(i + 1)) for i in range(count)]


def score(pool: ScoringPool, texts: list[str], finish: list[str] | None = None) -> list[Score]:
    return pool.score(texts, problems(len(texts)), finish or ["stop"] * len(texts))


def gone(pid: int, within_s: float = 20.0) -> bool:
    """Whether a process ends in time (a zombie counts as ended: it runs nothing)."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        threading.Event().wait(0.02)
    return False


def written_pid(path: Path, within_s: float = 30.0) -> int:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if path.is_file() and path.read_text():
            return int(path.read_text())
        threading.Event().wait(0.02)
    raise AssertionError(f"{path} was not written")


# H1: math-verify's signals fail in threads, and swallowed exceptions score everything 0.
def test_seven_eighths_scores_one_from_the_main_thread_and_from_a_thread():
    with ScoringPool(math_verifier(), timeout_s=30) as pool:
        args = (["\\boxed{0.875}"], [SEVEN_EIGHTHS], ["stop"])
        found = [pool.score(*args)]
        thread = threading.Thread(target=lambda: found.append(pool.score(*args)))
        thread.start()
        thread.join()
    assert found == [[Score(Outcome.correct, 1.0)]] * 2


def test_a_pool_made_in_a_thread_outlives_that_thread():
    made = []
    thread = threading.Thread(target=lambda: made.append(ScoringPool(sums_verifier())))
    thread.start()
    thread.join()
    with made[0] as pool:
        assert score(pool, ["1", "3"])[0].reward == 1.0


def test_seven_eighths_scores_one_inside_papermill(tmp_path):
    code = (
        "from logra_lab.rl.scoring import ScoringPool\n"
        "from logra_lab.rl.verifiers import Problem, math_verifier\n"
        "with ScoringPool(math_verifier(), timeout_s=30) as pool:\n"
        "    found = pool.score(['\\\\boxed{0.875}'], [Problem('h1', '', '7/8')], ['stop'])\n"
        "print(found[0].outcome, found[0].reward)"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    source = tmp_path / "score.ipynb"
    nbformat.write(notebook, source)
    done = papermill.execute_notebook(
        source, tmp_path / "out.ipynb", kernel_name="python3", progress_bar=False
    )
    assert done.cells[-1].outputs[0]["text"].strip() == "correct 1.0"


def test_a_script_without_a_main_guard_can_score_and_is_not_run_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "print('once')\n"
        "from logra_lab.rl.scoring import ScoringPool\n"
        "from logra_lab.rl.verifiers import Problem, sums_verifier\n"
        "with ScoringPool(sums_verifier()) as pool:\n"
        "    print(pool.score(['2'], [Problem('a', '1+1=', '2')], ['stop'])[0].reward)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["once", "1.0"], done.stderr


def test_error_is_an_outcome_with_its_message_and_never_reward_zero(checks):
    with pool_of(checks.behave) as pool:
        raised, left, died, good = score(pool, ["raise", "exit", "die", "true"])
    assert raised == Score(Outcome.error, None, "RuntimeError: the judge's own mistake")
    assert left == Score(Outcome.error, None, "SystemExit: 0")
    assert (died.outcome, died.reward) == (Outcome.error, None)
    assert "signal 9" in died.detail
    assert good == Score(Outcome.correct, 1.0)


@pytest.mark.parametrize(
    ("text", "outcome", "reward"),
    [
        ("true", Outcome.correct, 1.0),
        ("false", Outcome.wrong, 0.0),
        ("one", Outcome.correct, 1.0),
        ("half", Outcome.wrong, 0.5),
        ("zero", Outcome.wrong, 0.0),
        ("int", Outcome.correct, 1.0),
        ("outcome", Outcome.unparsable, 0.0),
        ("nan", Outcome.error, None),
        ("two", Outcome.error, None),
        ("minus", Outcome.error, None),
        ("none", Outcome.error, None),
        ("text", Outcome.error, None),
    ],
)
def test_what_a_verifier_may_return(checks, text, outcome, reward):
    from logra_lab.rl.worker import judge

    found = judge(Verifier("test", "1", "tests", checks.behave), text, problems(1)[0])
    # H6: 0.0 is a reward and None is none.
    assert (found.outcome, found.reward) == (outcome, reward)
    assert (found.reward is None) == (reward is None)
    assert bool(found.detail) == (outcome is Outcome.error)


def test_numpy_booleans_and_floats_count_as_such(checks):
    with pool_of(checks.numpy_values, timeout_s=30) as pool:
        assert [s.reward for s in score(pool, ["bool", "float32"])] == [1.0, 1.0]


def test_truncated_is_unparsable_without_calling_the_verifier(checks):
    with pool_of(checks.behave) as pool:
        found = score(pool, ["die", "raise", "true"], ["length", "length", "stop"])
    assert [(s.outcome, s.reward) for s in found] == [
        (Outcome.unparsable, 0.0),
        (Outcome.unparsable, 0.0),
        (Outcome.correct, 1.0),
    ]


@pytest.mark.parametrize("text", ["hang", "spin"])
def test_a_hanging_verifier_costs_its_own_item_only(checks, text):
    with pool_of(checks.behave, timeout_s=0.5) as pool:
        before = set(pool.pids)
        found = score(pool, ["true", text, "half", "true", "false", "true"])
        after = set(pool.pids)
        again = score(pool, ["true", "true", "true"])
    assert [s.reward for s in found] == [1.0, None, 0.5, 1.0, 0.0, 1.0]
    assert found[1].outcome is Outcome.timeout
    assert len(before & after) == 1
    assert all(gone(pid) for pid in before | after)
    assert [s.reward for s in again] == [1.0] * 3


def test_the_limit_is_for_one_item_not_for_a_batch(checks):
    """20 items of 0.1 s are 2 s of work for one worker, over the limit of 1 s for each."""
    with pool_of(checks.nap, workers=1, timeout_s=1.0) as pool:
        assert [s.outcome for s in score(pool, ["0.1"] * 20)] == [Outcome.correct] * 20


def test_killing_a_worker_takes_along_what_the_verifier_started(checks, tmp_path):
    with pool_of(checks.behave, timeout_s=1.0) as pool:
        found = score(pool, [f"child:{tmp_path / 'pid'}"])
    assert found[0].outcome is Outcome.timeout
    assert gone(written_pid(tmp_path / "pid"))


def test_a_worker_that_died_between_batches_is_replaced_without_an_error(checks):
    with pool_of(checks.equals) as pool:
        for worker in pool._workers:
            worker.process.kill()
            worker.process.wait()
        assert [s.outcome for s in score(pool, ["1", "2"])] == [Outcome.correct] * 2


def test_too_many_errors_stop_the_run_with_the_first_message(checks):
    with pool_of(checks.behave, max_error_share=0.25) as pool:
        allowed = score(pool, ["raise"] * 2 + ["true"] * 6)
        assert [s.outcome for s in allowed].count(Outcome.error) == 2
        with pytest.raises(ScoringError, match=r"3 of 8.*the judge's own mistake"):
            score(pool, ["raise"] * 3 + ["true"] * 5)
        assert score(pool, ["raise"] * 7)[0].outcome is Outcome.error
        assert issubclass(ScoringError, LograError)


def test_an_interrupted_batch_does_not_leak_answers_into_the_next(checks, monkeypatch):
    with pool_of(checks.behave, workers=1) as pool:
        collect = pool._collect

        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(pool, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            score(pool, ["true", "true"])
        monkeypatch.setattr(pool, "_collect", collect)
        assert [s.reward for s in score(pool, ["false", "half"])] == [0.0, 0.5]


def test_batches_from_several_threads_keep_their_own_scores(checks):
    found: dict[int, list[Score]] = {}
    with pool_of(checks.equals) as pool:

        def run(shift: int) -> None:
            texts = [str(i + 1 if i % 4 == shift else 0) for i in range(100)]
            found[shift] = score(pool, texts)

        threads = [threading.Thread(target=run, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for shift in range(4):
        assert [s.reward for s in found[shift]] == [float(i % 4 == shift) for i in range(100)]


def test_order_is_kept_over_many_chunks(checks):
    right = [i % 3 == 0 for i in range(500)]
    texts = [str(i + 1) if ok else "x" for i, ok in enumerate(right)]
    with pool_of(checks.equals, workers=3) as pool:
        assert [s.reward for s in score(pool, texts)] == [float(ok) for ok in right]
        assert score(pool, []) == []


def test_256_cheap_responses_take_well_under_a_tenth_of_a_millisecond_each():
    """Bound for a busy 2-core machine; alone it takes about 5 ms."""
    with ScoringPool(sums_verifier()) as pool:
        texts = [str(i + 1) for i in range(256)]
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            found = score(pool, texts)
            seconds.append(time.perf_counter() - start)
    assert {s.reward for s in found} == {1.0}
    assert min(seconds) < 0.05


def test_workers_load_neither_torch_nor_transformers(checks):
    import torch  # noqa: F401  (the parent has it, as in training)

    with pool_of(checks.heavy_modules) as pool:
        light, control = score(pool, ["torch,transformers,datasets,reasoning_gym", "os"])
    assert light.outcome is Outcome.correct
    assert control.outcome is Outcome.wrong


def test_bad_input_is_refused(checks):
    with pytest.raises(InputError, match="not a lambda"):
        Verifier("bad", "1", "tests", lambda text, problem: True)
    with pytest.raises(InputError, match="must be callable"):
        Verifier("bad", "1", "tests", 3)
    for settings in ({"workers": 0}, {"timeout_s": 0}, {"max_error_share": 2}):
        with pytest.raises(InputError, match=next(iter(settings))):
            ScoringPool(sums_verifier(), **settings)
    with ScoringPool(sums_verifier()) as pool:
        with pytest.raises(InputError, match="one entry a response"):
            pool.score(["1"], [], ["stop"])
        with pytest.raises(InputError, match="eos"):
            score(pool, ["1"], ["eos"])
        with pytest.raises(InputError, match=r"'bad-meta'.*plain picklable"):
            pool.score(["1"], [Problem("bad-meta", "", "1", {"f": lambda: 1})], ["stop"])
        assert score(pool, ["1"])[0].reward == 1.0
    with pytest.raises(LograError, match="closed"):
        score(pool, ["1"])


def test_a_check_from_a_script_or_notebook_is_refused_with_advice():
    code = (
        "from logra_lab.rl.verifiers import Verifier\n"
        "def check(text, problem): return True\n"
        "Verifier('mine', '1', 'me', check)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "InputError" in done.stderr
    assert "move it to a .py file" in done.stderr


def test_a_check_that_workers_cannot_import_is_an_input_error(checks, monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != HERE])
    with pytest.raises(InputError, match=r"'test' cannot be loaded.*scoring_checks"):
        pool_of(checks.equals)


@pytest.mark.parametrize("busy", [None, "process", "process_then_spin"])
def test_no_worker_outlives_a_parent_that_is_killed(tmp_path, busy):
    """SIGKILL leaves the parent no chance to clean up, whether workers are idle, at work, or in a
    C call that lets no other thread of theirs run."""
    script = tmp_path / "parent.py"
    work = f"pool.score([{str(tmp_path / 'busy')!r}], [Problem('a', '', '')], ['stop'])"
    script.write_text(
        f"import sys; sys.path.append({HERE!r})\n"
        "import scoring_checks, time, pathlib\n"
        "from logra_lab.rl.scoring import ScoringPool\n"
        "from logra_lab.rl.verifiers import Problem, Verifier\n"
        f"verifier = Verifier('t', '1', 't', scoring_checks.{busy or 'nap'})\n"
        f"pool = ScoringPool(verifier, timeout_s={2 if busy == 'process_then_spin' else 600})\n"
        f"pathlib.Path({str(tmp_path / 'pids')!r}).write_text(' '.join(map(str, pool.pids)))\n"
        f"{work if busy else 'time.sleep(600)'}\n"
    )
    parent = subprocess.Popen([sys.executable, script])
    try:
        if busy:
            written_pid(tmp_path / "busy")
        deadline = time.monotonic() + 60
        while not (tmp_path / "pids").is_file() and time.monotonic() < deadline:
            threading.Event().wait(0.02)
        threading.Event().wait(0.05)
        pids = [int(p) for p in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2
        assert all(os.path.exists(f"/proc/{pid}") for pid in pids)
    finally:
        parent.kill()
        parent.wait()
    assert all(gone(pid, within_s=60) for pid in pids)


def test_close_ends_every_worker_and_leaving_without_close_too(tmp_path):
    pool = ScoringPool(sums_verifier(), workers=3)
    pids = pool.pids
    pool.close()
    pool.close()
    assert len(pids) == 3
    assert all(gone(pid) for pid in pids)
    code = (
        "from logra_lab.rl.scoring import ScoringPool\n"
        "from logra_lab.rl.verifiers import sums_verifier\n"
        "pool = ScoringPool(sums_verifier()); print(*pool.pids)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert all(gone(int(pid)) for pid in done.stdout.split())
    assert len(done.stdout.split()) == 2
