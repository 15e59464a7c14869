"""Whole runs on Ray that something befalls, beside a run that nothing befalls.

The engine generates with Hugging Face, where a sample does not depend on timing: what differs from
the sound run is a fault's doing. Every fault of `logra-lab bench faults` is a slow test; two runs
that several befall are ordinary ones. No wait is longer than `faults.LIMIT`.
"""

import json
import shutil

import pytest
import torch

from logra_lab import cli
from logra_lab.bench import faults, mischief
from logra_lab.bench.faults import differences, go, settings
from logra_lab.cluster.trainers import TrainersLost
from logra_lab.errors import InputError
from logra_lab.rl.export import trained_policy
from logra_lab.rl.publish import JOURNAL
from logra_lab.rl.records import read_manifest, read_steps
from logra_lab.sync.journal_replay import Replay

STEPS = settings().steps


@pytest.fixture(scope="module")
def sound(ray_node, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "sound"
    went = go(settings(), folder)
    assert went.error is None
    return folder


@pytest.fixture(scope="module")
def mended(sound):
    """A run whose update was lost, whose engine and trainer straggled, whose trainer was killed in
    step 4; then resumed, with a NaN on one rank in the last step."""
    folder = sound.parent / "mended"
    strikes = {2: mischief.lose_update, 3: both_straggle, 4: mischief.kill_trainer}
    first = go(settings(), folder, strikes)
    kept = (folder / "steps.jsonl").read_text()
    status = read_manifest(folder)["status"]
    second = go(settings(), folder, {STEPS: mischief.spoil_sketch}, resume=True)
    return folder, first, kept, status, second


def both_straggle(run):
    mischief.stop_engine(run)
    mischief.stop_trainer(run)


def test_a_run_of_two_trainers_and_an_engine_tells_of_every_part(sound):
    lines = read_steps(sound)
    assert [line["version"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["skipped"] is None
        assert line["staleness"] == 0
        assert line["engine_version"] == line["version"] - 1  # strictly on-policy
        assert line["ratio_max"] == pytest.approx(1, abs=1e-3)
        assert line["kl_predicted"] <= line["kl_budget"] * (1 + 1e-9)
        evaluated = settings().eval_problems if line["step"] == 1 else 0  # before the first step
        rows = settings().prompts_per_step + evaluated
        assert [e["rows"] for e in line["engines"]["engines"]] == [rows]
        assert [rank["host_mib"] > 100 for rank in line["trainers"]] == [True, True]
        assert len({rank["pid"] for rank in line["trainers"]}) == 2


def test_shards_and_journal_are_those_of_the_last_checkpoints(sound):
    assert sorted(path.name for path in (sound / "shards").iterdir()) == [
        f"{STEPS - 2:08d}",
        f"{STEPS:08d}",
    ]
    assert Replay.open(sound / JOURNAL).versions()[-1] == STEPS


def test_a_killed_trainer_ends_the_run_with_an_error_that_says_how_to_go_on(mended):
    _, first, kept, status, _ = mended
    assert isinstance(first.error, TrainersLost)
    assert "trainer 1 ended" in str(first.error)
    assert "--resume" in str(first.error)
    assert status == "failed"
    assert len(kept.splitlines()) == 3  # a lost update and two stragglers cost no step


def test_a_lost_trainer_is_exit_status_one_and_one_line(monkeypatch, capsys, tmp_path):
    def lost(*_, **__):
        raise TrainersLost("trainer 1 ended: go on with --resume")

    monkeypatch.setattr("logra_lab.rl.command.train", lost)
    assert cli.main(["train", "--preset", "smoke", "--run-dir", str(tmp_path / "run")]) == 1
    assert "go on with --resume" in capsys.readouterr().err.splitlines()[-1]


def test_the_resumed_run_is_the_sound_one_bit_for_bit_and_keeps_what_was_reported(mended, sound):
    folder, _, kept, _, second = mended
    assert second.error is None
    assert (folder / "steps.jsonl").read_text().startswith(kept)
    assert differences(folder, sound, STEPS - 1) == []


def test_a_nan_on_one_rank_is_a_skipped_step_of_the_run_and_no_update(mended):
    folder, *_ = mended
    last = read_steps(folder)[-1]
    assert (last["step"], last["version"]) == (STEPS, STEPS - 1)
    assert "not finite" in last["skipped"]
    assert Replay.open(folder / JOURNAL).versions()[-1] == STEPS - 1
    assert read_manifest(folder)["evaluations"][-1]["step"] == STEPS


def test_one_rank_goes_on_where_two_have_stopped(mended, sound):
    """Weights lost, or rows of one rank in the place of another's, would show in the ratio against
    the engine's log-probabilities, which has its weights from the trainers after a resume."""
    folder = shutil.copytree(mended[0], sound.parent / "fewer")
    went = go(settings(steps=STEPS + 1, trainers=1), folder, resume=True)
    assert went.error is None
    last = read_steps(folder)[-1]
    assert (last["step"], last["version"], last["skipped"]) == (STEPS + 1, STEPS, None)
    assert len(last["trainers"]) == 1
    assert last["ratio_max"] == pytest.approx(1, abs=1e-3)  # the trainer's weights are the engine's
    assert read_manifest(folder)["sessions"][-1]["changed"]["trainers"] == [2, 1]
    _, weights = Replay.open(folder / JOURNAL).weights(STEPS)
    exported = trained_policy(folder).model
    for name, weight in weights.items():
        assert torch.equal(exported.get_submodule(name).weight, weight), name


def test_other_settings_than_who_computes_are_refused_before_anything_starts(sound, monkeypatch):
    monkeypatch.setattr("logra_lab.cluster.groups.make", None)
    for change, named in (({"update_ratio": 1e-3}, "update_ratio"), ({"trainers": 0}, "trainers")):
        with pytest.raises(InputError, match=f"other settings: {named} differ"):
            raise go(settings(**change), sound, resume=True).error


def test_every_fault_of_the_issue_has_its_key():
    assert set(faults.FAULTS) == {
        "engine_killed",
        "trainer_killed",
        "driver_killed",
        "update_lost",
        "engine_straggles",
        "trainer_straggles",
        "nan_on_one_rank",
        "disk_full",
        "kernel_restarted",
    }


def test_differences_catch_a_changed_weight_a_changed_record_and_a_missing_step(sound):
    other = shutil.copytree(sound, sound.parent / "changed")
    assert differences(other, sound) == []
    lines = (other / "steps.jsonl").read_text().splitlines()
    changed = json.loads(lines[2]) | {"accuracy": 0.123, "seconds_step": 1e9}
    (other / "steps.jsonl").write_text("\n".join([*lines[:2], json.dumps(changed), *lines[3:5]]))
    found = differences(other, sound, STEPS)
    assert found[0] == "5 steps are recorded, not 6"
    assert found[1] == "step 3 differs in ['accuracy']"


@pytest.mark.slow
@pytest.mark.parametrize("name", faults.FAULTS)
def test_fault_is_survived(name, sound):
    if name in ("driver_killed", "kernel_restarted"):
        pytest.importorskip("papermill")
    outcome = faults.FAULTS[name](sound.parent / name, sound)
    assert outcome.survived, outcome.said
    assert outcome.seconds < faults.LIMIT
