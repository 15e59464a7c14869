"""`logra-lab train`: progress in a file, the summary, and errors of groups in one line."""

import json
import re

import pytest

from logra_lab import cli
from logra_lab.cluster import groups
from logra_lab.cluster.trainers import TrainersLost
from logra_lab.rl import command
from logra_lab.rl.command import Lines
from logra_lab.rl.config import make_config

SIZES = ("steps=2", "prompts_per_step=16", "eval_problems=8", "eval_samples=1", "train_problems=64")
GROUPS = ("trainers=2", "engines=1", "engine=hf", "journal_every=50")


def train(folder, *settings, more=()):
    pairs = [x for setting in (*SIZES, *settings) for x in ("--set", setting)]
    return cli.main(["train", "--preset", "smoke", "--run-dir", str(folder), *pairs, *more])


def line(step, **more):
    return {
        **{"step": step, "accuracy": 0.25, "response_tokens_mean": 6.0, "kl_realised": 1e-3},
        **{"skipped": None, "warnings": [], "seconds_step": 2.0},
        **more,
    }


def test_a_file_gets_a_line_every_quarter_of_a_minute_and_the_last_step():
    said, now = [], [0.0]
    lines = Lines(make_config(steps=20), said.append, lambda: now[0])
    for step in range(1, 21):
        now[0] += 2.0
        lines.step(line(step))
    # After 2 s, then whenever 15 s are over (each step is 2 s later), and at the end.
    assert [int(x.split()[1]) for x in said] == [1, 9, 17, 20]
    assert said[1] == "step 9 of 20: accuracy 25%, tokens 6.0, KL 1.0e-03, 2 s, 22 s left"
    assert said[-1] == "step 20 of 20: accuracy 25%, tokens 6.0, KL 1.0e-03, 2 s"


def test_warnings_faults_and_phases_are_told_at_once_and_skipped_steps_by_their_reason():
    said = []
    lines = Lines(make_config(steps=9), said.append, lambda: 0.0)
    lines.phase("evaluating at step 0")
    faults = {"faults": ["engine 0: died"], "engines": []}
    lines.step(line(1, skipped="the loss is nan", warnings=["look here"], engines=faults))
    assert said[:3] == ["evaluating at step 0 …", "step 1: look here", "step 1: engine 0: died"]
    assert said[3].startswith("step 1 of 9: skipped, the loss is nan, 2 s")


def test_a_run_into_a_file_ends_with_split_pace_memory_and_place(tmp_path, capsys):
    folder = tmp_path / "run"
    assert train(folder, more=["--model", "small"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("loading small …\nevaluating at step 0 …\nstep 1 of 2: accuracy ")
    rows = dict(x.split(":", 1) for x in out.splitlines() if x.count(": ") or ":  " in x)
    assert set(rows) >= {"time", "pace", "staleness", "memory", "steps"}
    assert "idle" not in rows  # one process has no group of engines
    steps = [json.loads(x) for x in (folder / "steps.jsonl").read_text().splitlines()]
    generating = sum(x["seconds_generate"] for x in steps) / sum(x["seconds_step"] for x in steps)
    assert f"generate {generating:.1%}" in rows["time"]
    assert f"loop {steps[-1]['peak_memory_mib']:,.0f} MiB" in rows["memory"]
    assert out.strip().endswith(f"records and checkpoint: {folder}")
    assert not (folder / "process.json").exists()


def test_a_machine_with_too_few_gpus_is_one_line_with_status_2(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert train(tmp_path / "run", *GROUPS) == 2
    errors = [x for x in capsys.readouterr().err.splitlines() if x.startswith("logra-lab")]
    assert len(errors) == 1
    # 0 where other tests have a Ray up, which knows what is really there
    assert re.search(r"this machine has [01] GPUs, the run needs 3 \(2 trainers", errors[0])
    assert "lower trainers, engines" in errors[0]
    assert not (tmp_path / "run").exists()


def test_a_lost_trainer_is_one_line_with_status_1_that_names_resume(tmp_path, monkeypatch, capsys):
    def lost(*_):
        raise TrainersLost("trainer 1 ended (killed, or out of memory?); go on with --resume")

    monkeypatch.setattr(groups, "make", lost)
    assert train(tmp_path / "run", *GROUPS) == 1
    errors = [x for x in capsys.readouterr().err.splitlines() if x]
    assert errors == ["logra-lab: trainer 1 ended (killed, or out of memory?); go on with --resume"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"trainers": 4, "engines": 4, "engine": "vllm"}, "starting 4 trainers and 4 vllm engines"),
        ({"engines": 1, "engine": "hf"}, "starting 1 hf engines on Ray"),
        ({}, "loading small"),
    ],
)
def test_the_first_line_says_what_is_waited_for(setting, words):
    assert command._beginning(make_config(**setting)).startswith(words)


def test_trainers_without_a_journal_are_refused_before_anything_starts(tmp_path, capsys):
    groups = [x for x in GROUPS if not x.startswith("journal_every")]
    assert train(tmp_path / "run", *groups) == 2
    assert "set journal_every" in capsys.readouterr().err
    assert not (tmp_path / "run" / "manifest.json").exists()
