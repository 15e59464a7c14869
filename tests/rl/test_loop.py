"""Whole runs: records, checkpoints, interruption, export, the command line, and bad input.

"Equal" means to the bit, on one machine with one thread count, for weights, optimizer state and
every logged number but wall times and memory.
"""

import importlib
import json
import math
import os
import resource
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import transformers as hf

from logra_lab import cli
from logra_lab.errors import InputError, LograError
from logra_lab.lab.presets import preset
from logra_lab.rl import checkpoint, tasks
from logra_lab.rl.config import make_config
from logra_lab.rl.loop import load_tasks, preset_config, train
from logra_lab.rl.policies import load_policy
from logra_lab.rl.records import ExportRefused, export_policy, read_manifest, read_steps
from logra_lab.rl.rollout import HFEngine
from logra_lab.rl.scoring import ScoringError
from logra_lab.rl.verifiers import Verifier

DATA = Path(__file__).resolve().parents[2] / "data"

HERE = Path(__file__).parent
shared = runpy.run_path(str(HERE / "training.py"))
tiny_config, same, numbers = (shared[n] for n in ("tiny_config", "same", "numbers"))
METHODS = ["logra", "adam", "lora"]
SIX = {"steps": 6, "eval_every": 3, "checkpoint_every": 2}
# What a resumed run has to carry over: v, the finite difference's last step size, the mismatch.
OF_METHOD = {
    "logra": {
        "kl_start": 2e-3, "kl_method": "fd", "subtract_mismatch": True, "updates_per_batch": 2,
    },
    "adam": {},
    "lora": {},
}  # fmt: skip


def state_of(folder: Path) -> dict:
    """The checkpoint, read as anybody would read it, without the run's random id."""
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    state["learner"].pop("run", None)
    return state


def lines_of(folder: Path) -> list[dict]:
    return [numbers(line) for line in read_steps(folder)]


def evaluations_of(folder: Path) -> list[dict]:
    return read_manifest(folder)["evaluations"]


def assert_equal_runs(one: Path, two: Path) -> None:
    assert same(lines_of(one), lines_of(two))
    assert same(evaluations_of(one), evaluations_of(two))
    first, second = state_of(one), state_of(two)
    for part in first:
        assert same(first[part], second[part]), part
    assert first.keys() == second.keys()


def interrupt_at(step: int):
    """Ctrl-C while that step is logged."""
    return lambda line: signal.raise_signal(signal.SIGINT) if line["step"] == step else None


# --- equal runs -----------------------------------------------------------------------------

RESUME = """
import sys, torch
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.loop import train
from logra_lab.rl.records import read_manifest
torch.rand(17)
for folder in sys.argv[1:]:
    train(TrainConfig(**read_manifest(folder)["config"]), folder, resume=True)
"""


def test_interrupted_and_resumed_in_a_new_process_equals_uninterrupted_and_so_does_a_rerun(
    tmp_path,
):
    folders = []
    for method in METHODS:
        config = tiny_config(method=method, **SIX, **OF_METHOD[method])
        torch.manual_seed(1)
        train(config, tmp_path / method)
        torch.manual_seed(2)
        torch.rand(17)  # global random state is no part of a run
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / f"{method}-cut", on_step=interrupt_at(3))
        cut = tmp_path / f"{method}-cut"
        assert read_manifest(cut)["status"] == "interrupted"
        assert lines_of(cut) == lines_of(tmp_path / method)[:3]
        assert state_of(cut)["step"] == 3
        assert [e["step"] for e in evaluations_of(cut)] == [0]  # step 3's is still to come
        folders.append(cut)
    done = subprocess.run(
        [sys.executable, "-c", RESUME, *map(str, folders)],
        env=os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for method in METHODS:
        assert_equal_runs(tmp_path / method, tmp_path / f"{method}-cut")
        manifest = read_manifest(tmp_path / f"{method}-cut")
        assert manifest["status"] == "finished"
        assert [s["after_step"] for s in manifest["sessions"]] == [0, 3]
        assert [e["step"] for e in manifest["evaluations"]] == [0, 3, 6]
    lines = lines_of(tmp_path / "logra")
    assert all(line["kl_realised"] > 0 for line in lines)
    # the gap is rounding, whose sign depends on the thread count; its state is tested with the step
    assert all(line["mismatch"] is not None for line in lines)
    assert state_of(tmp_path / "logra")["learner"]["fd_hint"] is not None

    train(tiny_config(method="logra", **SIX, **OF_METHOD["logra"]), tmp_path / "again")
    assert_equal_runs(tmp_path / "logra", tmp_path / "again")


def test_another_seed_draws_other_problems_samples_and_signs(tmp_path):
    for seed in (0, 1):
        train(tiny_config(steps=1, seed=seed), tmp_path / str(seed))
    one, two = (lines_of(tmp_path / s)[0] for s in "01")
    assert one["tokens"] != two["tokens"] or one["loss"] != two["loss"]
    assert one["update_ratio"] == pytest.approx(two["update_ratio"])


def test_a_skipped_step_survives_interruption_with_its_baseline_and_count(tmp_path):
    """Rewards that are all equal: nothing is learned, and the count of such batches goes on."""
    config = tiny_config(
        steps=4, prompts_per_step=2, max_new_tokens=1, warn_after_equal_rewards=4, eval_samples=2
    )
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, on_step=interrupt_at(2))
    train(config, tmp_path, resume=True)
    lines = lines_of(tmp_path)
    assert all("no learning signal" in line["skipped"] for line in lines)
    assert [bool(line["warnings"]) for line in lines] == [False, False, False, True]
    assert state_of(tmp_path)["baseline"] == {"ema": 0.0, "count": 0}


def test_a_run_can_be_prolonged(tmp_path):
    train(tiny_config(steps=2), tmp_path / "two")
    train(tiny_config(steps=4), tmp_path / "two", resume=True)
    train(tiny_config(steps=4), tmp_path / "four")
    assert same(lines_of(tmp_path / "two"), lines_of(tmp_path / "four"))
    assert same(state_of(tmp_path / "two")["weights"], state_of(tmp_path / "four")["weights"])
    with pytest.raises(InputError, match="checkpoint is at step 4, beyond steps = 3"):
        train(tiny_config(steps=3), tmp_path / "two", resume=True)
    assert read_manifest(tmp_path / "two")["status"] == "finished"


def test_a_last_evaluation_that_was_interrupted_is_made_up_for(tmp_path):
    config = tiny_config(steps=2)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, on_step=interrupt_at(2))
    assert [e["step"] for e in evaluations_of(tmp_path)] == [0]
    _, results = train(config, tmp_path, resume=True)
    assert len(results) == 1
    assert [e["step"] for e in evaluations_of(tmp_path)] == [0, 2]
    assert train(config, tmp_path, resume=True)[1] == []  # nothing is left to do
    assert [e["step"] for e in evaluations_of(tmp_path)] == [0, 2]


def test_resuming_with_other_settings_is_refused_by_name_and_the_record_stays(tmp_path):
    train(tiny_config(steps=1), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with pytest.raises(InputError, match="other settings: rank, update_ratio differ"):
        train(tiny_config(steps=2, rank=4, update_ratio=1e-3), tmp_path, resume=True)
    with pytest.raises(InputError, match="there is a record already"):
        train(tiny_config(steps=1), tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_held_out_prompts_are_not_trained_on_and_are_the_same_for_every_seed():
    settings = {"train_problems": 900, "eval_problems": 90, "task_params": {"max_value": 31}}
    sets = []
    for seed in (0, 1):
        training, held_out = load_tasks(tiny_config(seed=seed, **settings))
        assert not {p.prompt for p in training} & {p.prompt for p in held_out}
        assert (len(training), len(held_out)) == (900, 90)
        sets.append([p.id for p in held_out])
    assert sets[0] == sets[1]


# --- interruption ---------------------------------------------------------------------------


def until(condition, within_s=60.0):
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        threading.Event().wait(0.01)


SETTINGS = {
    "steps": 8, "prompts_per_step": 64, "eval_problems": 8, "eval_samples": 1,
    "train_problems": 96, "checkpoint_every": 3,
}  # fmt: skip


def command(folder: Path, *more: str) -> list[str]:
    pairs = [text for n, v in SETTINGS.items() for text in ("--set", f"{n}={v}")]
    start = [sys.executable, "-m", "logra_lab", "train", "--preset", "smoke"]
    return [*start, "--run-dir", str(folder), *pairs, *more]


def test_ctrl_c_finishes_the_step_saves_exits_130_and_resume_equals_uninterrupted(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    child = subprocess.Popen(
        command(cut), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    steps = cut / "steps.jsonl"
    until(lambda: child.poll() is not None or (steps.is_file() and steps.read_bytes()))
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 130, said
    assert "logra-lab: interrupted" in said
    assert "Traceback" not in said
    assert read_manifest(cut)["status"] == "interrupted"
    reached = state_of(cut)["step"]
    assert 1 <= reached < 8
    assert [line["step"] for line in lines_of(cut)] == list(range(1, reached + 1))

    done = subprocess.run(
        command(cut, "--resume"), capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert str(cut) in done.stdout.replace("\n", "")
    train(preset_config(preset("smoke"), **SETTINGS), whole)
    assert_equal_runs(cut, whole)


def twice(monkeypatch, owner, name, when):
    """Ctrl-C, and again at once, inside `owner.name` when `when()` holds."""
    original = getattr(owner, name)

    def interrupted(*args, **kwargs):
        if when():
            signal.raise_signal(signal.SIGINT)  # asks
            signal.raise_signal(signal.SIGINT)  # insists
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("place", ["generation", "saving"])
def test_a_second_ctrl_c_ends_at_once_and_leaves_the_previous_checkpoint(
    tmp_path, monkeypatch, place
):
    config = tiny_config(steps=4, checkpoint_every=1)
    logged = []
    owner, name = (HFEngine, "generate") if place == "generation" else (torch, "save")
    # In step 3: while it generates, or while its checkpoint is written.
    count = 2 if place == "generation" else 3
    twice(monkeypatch, owner, name, lambda: len(logged) == count)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path, on_step=logged.append)
    assert signal.getsignal(signal.SIGINT) is handler
    assert read_manifest(tmp_path)["status"] == "interrupted"
    assert checkpoint.load(tmp_path / "checkpoint.pt")["step"] == 2
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(1, count + 1))
    monkeypatch.undo()
    train(config, tmp_path, resume=True)
    train(config, tmp_path / "whole")
    assert_equal_runs(tmp_path, tmp_path / "whole")


# --- checkpoints on bad days ----------------------------------------------------------------


def test_a_full_disk_while_checkpointing_fails_the_run_and_keeps_the_previous_one(tmp_path):
    config = tiny_config(steps=3, checkpoint_every=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(line):
        if line["step"] == 2:  # files may no longer grow beyond this: the checkpoint needs 2 MB
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))

    try:
        with pytest.raises(checkpoint.CheckpointError, match=r"could not be written: .*make room"):
            train(config, tmp_path, on_step=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    manifest = read_manifest(tmp_path)
    assert manifest["status"] == "failed"
    assert manifest["error"].startswith("CheckpointError: checkpoint ")
    assert checkpoint.load(tmp_path / "checkpoint.pt")["step"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "checkpoint.pt", "manifest.json", "steps.jsonl",
    ]  # fmt: skip
    train(config, tmp_path, resume=True)
    train(config, tmp_path / "whole")
    assert same(lines_of(tmp_path), lines_of(tmp_path / "whole"))
    assert same(state_of(tmp_path), state_of(tmp_path / "whole"))


def test_a_corrupt_checkpoint_is_found_on_resume_and_the_one_before_works(tmp_path):
    config = tiny_config(steps=2, checkpoint_every=1)
    train(config, tmp_path)
    path = tmp_path / "checkpoint.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before = (tmp_path / "manifest.json").read_bytes()
    with pytest.raises(checkpoint.CheckpointError, match=r"damaged; the previous .*\.prev: copy"):
        train(config, tmp_path, resume=True)
    assert (tmp_path / "manifest.json").read_bytes() == before
    path.write_bytes((tmp_path / "checkpoint.pt.prev").read_bytes())  # the advice given
    train(config, tmp_path, resume=True)
    train(config, tmp_path / "whole")
    assert same(state_of(tmp_path), state_of(tmp_path / "whole"))


# --- verifiers ------------------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch):
    """A verifier that raises whatever it is given."""
    monkeypatch.syspath_prepend(str(HERE))
    return Verifier("broken", "1", "tests", importlib.import_module("scoring_checks").behave)


def test_a_verifier_that_always_raises_fails_the_run_with_its_message(tmp_path, broken):
    with pytest.raises(ScoringError, match=r"'broken' failed on .*KeyError"):
        train(tiny_config(), tmp_path, verifier=broken)
    manifest = read_manifest(tmp_path)
    assert manifest["status"] == "failed"
    assert "ScoringError: verifier 'broken' failed on" in manifest["error"]
    assert manifest["reward"] == {"name": "broken", "version": "1", "owner": "tests"}
    assert not (tmp_path / "checkpoint.pt").exists()


def test_the_command_line_says_so_in_one_line_with_status_1(tmp_path, broken, monkeypatch, capsys):
    monkeypatch.setattr(tasks, "sums_verifier", lambda: broken)
    pairs = ["--set", "eval_problems=8", "--set", "eval_samples=1", "--set", "steps=1"]
    folder = tmp_path / "run"
    assert cli.main(["train", "--preset", "smoke", "--run-dir", str(folder), *pairs]) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("logra-lab: verifier 'broken' failed on")
    assert "KeyError" in last
    assert read_manifest(folder)["status"] == "failed"


# --- the command line -----------------------------------------------------------------------


def test_train_prints_what_was_evaluated_and_where_it_is(tmp_path, capsys):
    folder = tmp_path / "run"
    pairs = [
        text
        for pair in ("steps=2", "prompts_per_step=16", "eval_problems=8", "eval_every=1")
        for text in ("--set", pair)
    ]
    arguments = ["train", "--preset", "smoke", "--run-dir", str(folder), *pairs]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    rows = [line.split("│")[1:-1] for line in out.splitlines() if line.startswith("│")]
    evaluations = evaluations_of(folder)
    assert [int(row[0]) for row in rows] == [e["step"] for e in evaluations] == [0, 1, 2]
    for row, evaluation in zip(rows, evaluations, strict=True):
        result = evaluation["result"]
        assert row[1].strip().startswith(f"{result['pass_at_1']:.1%} (")
        assert row[2].strip() == f"{result['pass_at_4']:.1%}"
        assert float(row[3]) == pytest.approx(result["mean_length"], abs=0.051)
        assert row[4].strip() == f"{result['truncated_share']:.1%}"
    assert f"records and checkpoint: {folder}" in out.replace("\n", " ").replace(":  ", ": ")
    assert read_manifest(folder)["config"]["steps"] == 2

    # A finished run that is resumed does nothing, and shows the same table.
    assert cli.main([*arguments, "--resume"]) == 0
    assert [x for x in capsys.readouterr().out.splitlines() if x.startswith("│")] == [
        x for x in out.splitlines() if x.startswith("│")
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "stepz=3"], "'stepz' is no setting; did you mean 'steps'"),
        (["--set", "rank=0"], "rank: Input should be greater than or equal to 1"),
        (["--set", "rank=1000"], "rank 1000 does not fit layer 'model.layers.0"),
        (["--set", "rank=1000", "--set", "method=lora"], "rank 1000 does not fit layer"),
        (["--set", 'targets=["qproj"]'], "['qproj'] name no linear layer of Qwen2ForCausalLM"),
        (["--set", "task=summs"], "unknown task 'summs'; did you mean 'sums'?"),
        (["--set", "task=reasoning_gym:chain_sums"], "nearest: chain_sum"),
        (["--set", "task=jsonl:empty.jsonl"], "empty"),
        (["--set", "task=jsonl:no-such.jsonl"], "no-such.jsonl"),
        (["--policy", "./no/such/folder"], "no such folder, and not a hub id"),
        (["--set", "max_new_tokens=100000"], "exceeds the model's"),
        (["--resume"], "nothing to resume"),
    ],
)
def test_bad_input_to_train_is_one_line_status_2_and_leaves_no_checkpoint(
    tmp_path, monkeypatch, capsys, arguments, said
):
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").write_text("")
    sizes = ["--set", "eval_problems=4", "--set", "train_problems=16"]
    assert cli.main(["train", "--preset", "smoke", "--run-dir", "run", *sizes, *arguments]) == 2
    errors = [x for x in capsys.readouterr().err.splitlines() if x.startswith("logra-lab: ")]
    assert len(errors) == 1
    assert said in errors[0]
    assert not Path("run/checkpoint.pt").exists()
    if Path("run/manifest.json").exists():
        assert read_manifest("run")["status"] == "failed"


def test_a_policy_that_turns_non_finite_fails_clearly_and_keeps_the_checkpoint(tmp_path):
    policy = load_policy("small")

    def poison(line):
        if line["step"] == 2:
            with torch.no_grad():
                policy.model.model.norm.weight[0] = torch.nan

    with pytest.raises(LograError, match=r"NaN|finite"):
        train(tiny_config(checkpoint_every=1, steps=4), tmp_path, policy=policy, on_step=poison)
    assert read_manifest(tmp_path)["status"] == "failed"
    state = checkpoint.load(tmp_path / "checkpoint.pt")
    assert state["step"] == 2
    assert all(w.isfinite().all() for w in state["weights"].values())


# --- evaluation and export ------------------------------------------------------------------


def test_evaluation_by_the_real_engine_finds_the_accuracy_in_the_policys_manifest(tmp_path):
    root = HERE.parents[1] / "data" / "MANIFEST.json"
    measured = json.loads(root.read_text())["small_policy"]["measured"]
    config = make_config(steps=1, eval_problems=200, eval_samples=8, prompts_per_step=2)
    _, results = train(config, tmp_path)
    n = 200
    # Both are estimates: 2,048 samples there, 1,600 here. Samples of one problem may agree wholly,
    # so the band is that of 200 and of 256 (2,048 / 8) independent problems; 4 deviations.
    for name, found in (
        ("sampled_accuracy", results[0].pass_at_1),
        ("sampled_truncated", results[0].truncated_share),
    ):
        p = measured[name]
        assert abs(found - p) < 4 * math.sqrt(p * (1 - p) * (1 / n + 1 / 256)), name
    assert measured["max_new_tokens"] == config.max_new_tokens
    assert measured["temperature"] == config.temperature


@pytest.mark.parametrize("method", METHODS)
def test_an_exported_run_loads_as_a_plain_folder_with_the_trained_logits(tmp_path, method):
    config = tiny_config(method=method, learning_rate=1e-3, steps=2)
    run, _ = train(config, tmp_path / "run")
    out = export_policy(tmp_path / "run", run.policy, tmp_path / "out")
    assert not list(out.glob("adapter*"))
    again = hf.AutoModelForCausalLM.from_pretrained(out)
    start = load_policy("small")
    assert list(again.state_dict()) == list(start.model.state_dict())  # the keys never change
    ids = torch.tensor([run.policy.encode("12+34=")])
    with torch.no_grad():
        mine, theirs = run.policy.model(ids).logits, again(ids).logits
        before = start.model(ids).logits
    # Merging rounds W + B A once; the wrapper adds in another order.
    torch.testing.assert_close(theirs, mine, atol=0 if method != "lora" else 1e-4, rtol=0)
    assert (mine - before).abs().max() > 1e-3
    exported = load_policy(str(out))
    assert exported.encode("1+2=") == start.encode("1+2=")
    assert read_manifest(out)["evaluations"][-1]["step"] == 2
    # The run goes on after an export: the adapters of a LoRA run are still there.
    run.scorer = shared["Judge"]()
    assert run.one_step()["step"] == 3


def test_a_run_that_was_not_evaluated_after_training_is_not_exported(tmp_path):
    policy = load_policy("small")
    with pytest.raises(KeyboardInterrupt):
        train(tiny_config(), tmp_path / "run", policy=policy, on_step=interrupt_at(1))
    with pytest.raises(ExportRefused, match="but an update at step"):
        export_policy(tmp_path / "run", policy, tmp_path / "out")


@pytest.mark.parametrize("method", METHODS)
def test_the_command_exports_what_the_checkpoint_holds_and_not_the_policy_as_it_was(
    tmp_path, method, capsys
):
    run, _ = train(tiny_config(method=method, learning_rate=1e-3, steps=2), tmp_path / "run")
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert str(tmp_path / "out") in capsys.readouterr().out
    ids = torch.tensor([run.policy.encode("12+34=")])
    with torch.no_grad():
        theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
        mine = run.policy.model(ids).logits
    torch.testing.assert_close(theirs, mine, atol=0 if method != "lora" else 1e-4, rtol=0)
    assert cli.main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 2  # it exists


def test_a_short_run_does_learn(tmp_path):
    config = preset_config(preset("smoke"), steps=14, prompts_per_step=128, eval_samples=8)
    _, (before, after) = train(config, tmp_path)
    assert after.pass_at_1 > before.pass_at_1 + 0.15
    assert after.truncated_share < before.truncated_share


def test_another_evaluation_task_is_judged_by_the_run_s_verifier_or_refused():
    files = {"task": f"jsonl:{DATA / 'dapo_math_tiny.jsonl'}", "train_problems": 12}
    other = f"jsonl:{DATA / 'math500_tiny.jsonl'}"
    train_task, held_out = load_tasks(make_config(**files, eval_task=other, eval_problems=12))
    assert (len(train_task), len(held_out)) == (12, 12)
    assert not {p.prompt for p in train_task} & {p.prompt for p in held_out}
    with pytest.raises(InputError, match="one verifier"):
        load_tasks(make_config(**files, eval_task="sums", eval_problems=4))
