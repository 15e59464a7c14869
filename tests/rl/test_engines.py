"""Engines with weights of their own: kept at the trainer's version, through whatever happens."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from logra_lab.cluster.shards import digests, find_source
from logra_lab.errors import InputError
from logra_lab.rl.checkpoint import CheckpointError
from logra_lab.rl.engines import CopyEngine
from logra_lab.rl.loop import train
from logra_lab.rl.policies import load_policy
from logra_lab.rl.publish import Publisher
from logra_lab.rl.records import read_manifest, read_steps
from logra_lab.rl.run import Run
from logra_lab.sketch import TARGETS, find_targets
from logra_lab.sync.errors import NeedsFullSync, ShapeMismatch, SyncError, VersionGap, WrongRun
from logra_lab.sync.journal import Journal
from logra_lab.sync.sealed import write

shared = runpy.run_path(str(Path(__file__).with_name("training.py")))
alternate, numbers, same = shared["alternate"], shared["numbers"], shared["same"]
tiny_config, tiny_run = shared["tiny_config"], shared["tiny_run"]


def copy_engine(**settings):
    return CopyEngine(load_policy("small"), max_new_tokens=4, targets=TARGETS, **settings)


def targets(policy):
    return {n: m.weight.data for n, m in find_targets(policy.model, TARGETS).items()}


def ask(engine):
    policy = load_policy("small")
    return engine.generate([policy.encode("1+2="), policy.encode("3+4=")], ["a", "b"])


def differing(engine, weights):
    return sum(count for count, _ in engine.receiver.difference(weights).values())


# --- the copy engine -----------------------------------------------------------------------------


def test_a_fresh_copy_refuses_to_generate_although_its_weights_happen_to_be_right():
    engine = copy_engine()
    assert engine.version is None
    with pytest.raises(NeedsFullSync, match="unknown version: it has not had a full sync"):
        ask(engine)
    engine.full_sync(targets(load_policy("small")), "r", 3)
    assert engine.version == 3
    ask(engine)
    engine.forget("slept")
    with pytest.raises(NeedsFullSync, match="slept"):
        ask(engine)


def test_a_copy_catches_weights_shared_with_the_trainer():
    policy = load_policy("small")
    engine = CopyEngine(policy, max_new_tokens=4, targets=TARGETS)
    weights = targets(policy)
    engine.full_sync(weights, "r", 0)
    before = {name: w.clone() for name, w in weights.items()}
    for place in engine.receiver.places:
        place.served.add_(1)
    assert all(torch.equal(weights[name], before[name]) for name in before)


def test_a_base_file_and_tensors_load_the_same_and_a_wrong_one_loads_nothing(tmp_path):
    policy = load_policy("small")
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(w.shape, generator=generator) for name, w in targets(policy).items()
    }
    write(tmp_path / "base.safetensors", weights, {"run": "r", "version": 5})
    by_file, by_tensors = copy_engine(dtype=torch.bfloat16), copy_engine(dtype=torch.bfloat16)
    by_file.full_sync(tmp_path / "base.safetensors", "r", 5)
    by_tensors.full_sync(weights, "r", 5)
    assert by_file.receiver.digest() == by_tensors.receiver.digest()
    assert differing(by_file, weights) == 0
    del weights["model.layers.0.self_attn.q_proj"]
    with pytest.raises(ShapeMismatch, match=r"no layer 'model\.layers\.0\.self_attn\.q_proj'"):
        by_tensors.full_sync(weights, "r", 6)
    assert (by_tensors.version, by_tensors.receiver.digest()) == (5, by_file.receiver.digest())


def test_a_base_file_of_another_run_or_version_is_not_taken_for_what_was_asked(tmp_path):
    engine, weights = copy_engine(), targets(load_policy("small"))
    engine.full_sync(weights, "r", 5)
    path = tmp_path / "base.safetensors"
    write(path, {name: w + 1 for name, w in weights.items()}, {"run": "r", "version": 3})
    for run, version, error in [("r", 6, VersionGap), ("other", 3, WrongRun)]:
        with pytest.raises(error, match=re.escape(str(path))):
            engine.full_sync(path, run, version)
    with pytest.raises(InputError, match="cannot be read"):
        engine.full_sync(tmp_path / "none.safetensors", "r", 6)
    assert (engine.version, differing(engine, weights)) == (5, 0)


def test_a_bfloat16_copy_computes_as_the_saved_model_loaded_in_bfloat16(tmp_path):
    """Of 250 tokens: `model.to` rounds the rotary frequencies too, which shows at far positions."""
    engine, policy = copy_engine(dtype=torch.bfloat16), load_policy("small")
    policy.model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, policy.vocab_size, (2, 250), generator=generator)
    with torch.no_grad():
        assert torch.equal(engine.policy.model(ids).logits, loaded(ids).logits)


# --- in a run --------------------------------------------------------------------------------


def test_a_float32_copy_gives_the_run_of_the_shared_model_bit_for_bit():
    """The same samples, the same updates: any bit that the engine missed would show in a token."""
    runs = [tiny_run(engine=engine) for engine in ("shared", "hf")]
    lines = [[numbers(run.one_step()) for _ in range(4)] for run in runs]
    assert [line.pop("engine_version") for line in lines[0]] == [None] * 4
    assert [line.pop("engine_version") for line in lines[1]] == [0, 1, 2, 3]
    assert lines[0] == lines[1]
    assert runs[1].engine.version == runs[1].version == 4
    assert differing(runs[1].engine, runs[1].learner.targets()) == 0


def test_a_bfloat16_copy_serves_the_cast_and_a_plain_one_does_not():
    found = {}
    for receiver in ("exact", "plain"):
        run = tiny_run(engine="hf", serving_dtype="bfloat16", receiver=receiver)
        for _ in range(3):
            run.one_step()
        found[receiver] = differing(run.engine, run.learner.targets())
    assert found["exact"] == 0 < found["plain"]


def test_several_updates_of_a_batch_reach_the_engine_each_with_its_own_version():
    run = tiny_run(alternate, engine="hf", updates_per_batch=3)
    line = run.one_step()
    assert line["engine_version"] == 0
    rows = sum(w.shape[0] for w in run.learner.targets().values())
    assert line["sync_bytes"] == 3 * rows * (run.config.rank + 1)
    assert run.engine.version == run.version == 3
    assert differing(run.engine, run.learner.targets()) == 0


def test_a_skipped_step_sends_nothing():
    run = tiny_run(lambda *_: shared["WRONG"], engine="hf")
    line = run.one_step()
    assert line["skipped"]
    assert run.engine.version == run.version == 0
    assert "sync_bytes" not in line


def test_an_engine_at_another_version_gets_a_full_sync_before_it_generates():
    run = tiny_run(alternate, engine="hf")
    run.one_step()
    run.engine.receiver.version = 7  # as if another trainer had been here
    for place in run.engine.receiver.places:
        place.served.zero_()
    assert run.one_step()["engine_version"] == 1
    assert differing(run.engine, run.learner.targets()) == 0


def test_bytes_of_the_record_are_those_of_the_update():
    """Σ d·(r + 1) over the targets of the shipped policy."""
    run = tiny_run(alternate, engine="hf")
    rows = sum(w.shape[0] for w in run.learner.targets().values())
    assert run.one_step()["sync_bytes"] == rows * (run.config.rank + 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "adam", "engine": "hf"}, "makes no thin updates"),
        ({"method": "lora", "journal_every": 5}, "makes no thin updates"),
        ({"projection": "gaussian"}, "no exact sums: set wire to 'float32'"),
        ({"wire": "int4"}, "wire"),
        ({"engine": "sglang"}, "engine"),
        ({"serving_dtype": "bfloat16"}, "go with engine 'hf' or 'vllm'"),
        ({"receiver": "plain"}, "go with engine 'hf' or 'vllm'"),
        ({"seed": 1 << 63}, "seed"),
    ],
)
def test_configurations_that_cannot_be_synchronised_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        tiny_config(**settings)


def test_a_prompt_too_long_for_vllm_is_refused_before_any_engine_starts():
    """Prompts of sums have 8 or 9 ids; the engine's own refusal would come when one is drawn."""
    with pytest.raises(InputError, match=r"a prompt of \d+ tokens, max_prompt_tokens is 3"):
        tiny_run(engine="vllm", max_prompt_tokens=3)


# --- the publisher ---------------------------------------------------------------------------


def test_a_refused_update_is_a_warning_and_the_next_generation_a_full_sync():
    run = tiny_run(alternate, engine="hf")
    run.one_step()
    sync = run.engine.sync

    def refuse(update):
        raise VersionGap("by hand")

    run.engine.sync = refuse
    line = run.one_step()
    assert "did not take update 2 (by hand): full sync next" in line["warnings"][-1]
    assert run.engine.version is None
    run.engine.sync = sync
    assert run.one_step()["engine_version"] == 2
    assert differing(run.engine, run.learner.targets()) == 0


def test_a_shared_engine_needs_nothing():
    run = tiny_run(alternate)
    assert isinstance(run.publisher, Publisher)
    assert run.publisher.own is None
    assert run.publisher.ready("r", 5) is None


# --- the journal of a run --------------------------------------------------------------------


def test_the_journal_reproduces_every_step_and_stays_bounded(tmp_path):
    seen = {}
    config = tiny_config(steps=5, journal_every=2, engine="hf")

    def keep(line):
        if line["version"] != line["step"]:
            pytest.fail(line["skipped"])
        journal = Journal.open(tmp_path / "journal")
        seen[line["step"]] = journal.weights()[1]

    run, _ = train(config, tmp_path, on_step=keep)
    journal = Journal.open(tmp_path / "journal")
    assert journal.run == run.learner.run
    assert journal.versions() == [4, 5]
    for version in (4, 5):
        assert same(journal.weights(version)[1], seen[version])
    assert same(dict(journal.weights()[1]), dict(run.learner.targets()))
    assert not same(seen[1], seen[2])


def test_a_resumed_run_begins_with_a_full_sync_and_cuts_a_journal_that_ran_ahead(tmp_path):
    """A6: the checkpoint is of step 2, the journal of step 3; the resumed steps take its place."""
    config = tiny_config(steps=4, journal_every=100, engine="hf", checkpoint_every=2)

    def fail(line):
        if line["step"] == 3:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(config, tmp_path, on_step=fail)
    assert read_manifest(tmp_path)["status"] == "failed"
    assert Journal.open(tmp_path / "journal").versions() == [0, 1, 2, 3]
    run, _ = train(config, tmp_path, resume=True)
    lines = read_steps(tmp_path)
    assert [line["engine_version"] for line in lines] == [0, 1, 2, 3]
    journal = Journal.open(tmp_path / "journal")
    assert journal.versions() == [0, 1, 2, 3, 4]
    assert same(dict(journal.weights()[1]), dict(run.learner.targets()))
    whole, _ = train(config, tmp_path / "whole")
    assert same(dict(whole.learner.targets()), dict(run.learner.targets()))


def test_a_checkpoint_older_than_the_journals_base_makes_a_base_of_its_own(tmp_path):
    """Base and update 3 are of steps that the resumed run takes again."""
    config = tiny_config(steps=4, journal_every=3, checkpoint_every=2)

    def fail(line):
        if line["step"] == 3:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(config, tmp_path, on_step=fail)
    assert Journal.open(tmp_path / "journal").versions() == [3]
    seen = []
    run, _ = train(
        config,
        tmp_path,
        resume=True,
        on_step=lambda _: seen.append(Journal.open(tmp_path / "journal").versions()),
    )
    assert seen == [[3], [3, 4]]
    assert same(dict(Journal.open(tmp_path / "journal").weights()[1]), dict(run.learner.targets()))


def test_a_journal_without_the_resumed_version_gets_a_new_base(tmp_path):
    config = tiny_config(steps=2, journal_every=100, checkpoint_every=1)
    train(config, tmp_path)
    for path in (tmp_path / "journal").glob("0000000*.thin"):
        path.unlink()
    assert Journal.open(tmp_path / "journal").versions() == [0]
    longer = tiny_config(steps=3, journal_every=100, checkpoint_every=1)
    run, _ = train(longer, tmp_path, resume=True)
    journal = Journal.open(tmp_path / "journal")
    assert journal.versions() == [2, 3]
    assert same(dict(journal.weights()[1]), dict(run.learner.targets()))


def test_the_journal_of_another_run_in_the_folder_is_refused_and_left_whole(tmp_path):
    config = tiny_config(steps=2, journal_every=100)
    train(config, tmp_path / "one")
    (tmp_path / "one" / "journal").rename(tmp_path / "journal")
    before = {path.name: path.read_bytes() for path in (tmp_path / "journal").iterdir()}
    with pytest.raises(WrongRun, match="move it away"):
        train(config, tmp_path)
    assert {path.name: path.read_bytes() for path in (tmp_path / "journal").iterdir()} == before
    assert len(before) == 3


def test_a_base_comes_after_the_checkpoint_or_a_group_could_go_on_from_nowhere(
    tmp_path, monkeypatch
):
    """A group's checkpoint has no weights: with step 2's base on disk, step 1's would be gone."""
    config = tiny_config(steps=3, journal_every=2)
    kept = Run.keep

    def killed(self, run_dir):
        if self.step == 2:
            raise RuntimeError("killed between publishing and keeping")
        kept(self, run_dir)

    monkeypatch.setattr(Run, "keep", killed)
    with pytest.raises(RuntimeError, match="between"):
        train(config, tmp_path)
    assert Journal.open(tmp_path / "journal").versions() == [0, 1, 2]
    state = {"learner": {"t": 1}, "shards": []}
    assert find_source(tmp_path, state).updates == range(1, 2)


def test_a_damaged_base_of_the_journal_is_found_before_a_group_goes_on_from_it(tmp_path):
    journal = Journal.create(tmp_path / "journal", "r", 3, {"a": torch.ones(2, 2)})
    state = {"learner": {"t": 3}, "shards": []}
    path = journal.contents.bases[3].path
    assert find_source(tmp_path, state) == (None, str(path), range(4, 4))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(SyncError, match="base-00000003"):
        find_source(tmp_path, state)


def test_damaged_shards_are_not_read_and_the_journal_gives_the_same_weights_if_it_can(tmp_path):
    folder = tmp_path / "shards" / "00000003"
    folder.mkdir(parents=True)
    (folder / "rows").write_bytes(b"weights")
    saved = {"version": 3, "digests": digests(folder)}
    state = {"learner": {"t": 3}, "shards": [saved]}
    assert find_source(tmp_path, state) == (str(folder), None, range(4, 4))
    (folder / "rows").write_bytes(b"weightz")
    with pytest.raises(CheckpointError, match=r"00000003 is damaged .*/checkpoint\.pt\.prev"):
        find_source(tmp_path, state)
    journal = Journal.create(tmp_path / "journal", "r", 3, {"a": torch.ones(2, 2)})
    base = str(journal.contents.bases[3].path)
    assert find_source(tmp_path, state) == (None, base, range(4, 4))
    with pytest.raises(CheckpointError, match="leads to version 4"):
        find_source(tmp_path, state | {"learner": {"t": 4}})
