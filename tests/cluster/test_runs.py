"""Whole runs on Ray that take minutes: other numbers of ranks, overlap, vLLM, SmolLM2."""

import runpy
import shutil
from pathlib import Path

import pytest
import torch

from logra_lab.bench.faults import go, settings
from logra_lab.rl.export import trained_policy
from logra_lab.rl.publish import JOURNAL
from logra_lab.rl.records import read_manifest, read_steps
from logra_lab.sync.journal_replay import Replay

pytestmark = pytest.mark.slow
needs_vllm = runpy.run_path(str(Path(__file__).parents[1] / "vllm_support.py"))["needs_vllm"]


def lines_of(folder, went):
    assert went.error is None
    return read_steps(folder)


def test_two_ranks_go_on_where_one_has_stopped_and_the_first_steps_were_the_same(
    ray_node, tmp_path
):
    """Batches, seeds and rewards of the first step do not depend on ranks; weights do, by rounding
    alone: α and KL of the next step differ by less than a hundredth."""
    one = lines_of(tmp_path / "one", go(settings(steps=2, trainers=1), tmp_path / "one"))
    shutil.copytree(tmp_path / "one", tmp_path / "both")
    two = go(settings(steps=4, trainers=2), tmp_path / "both", resume=True)
    alone = go(settings(steps=4, trainers=1), tmp_path / "one", resume=True)
    both, alone = lines_of(tmp_path / "both", two), lines_of(tmp_path / "one", alone)
    assert both[:2] == one
    assert [line["version"] for line in both] == [1, 2, 3, 4]
    third, expected = both[2], alone[2]
    for name in ("reward_mean", "tokens", "response_tokens_mean"):
        assert third[name] == expected[name]
    for name in ("kl_predicted", "alpha", "sketch_norm", "kl_realised"):
        assert third[name] == pytest.approx(expected[name], rel=1e-2)


def test_overlap_is_one_step_stale_on_a_cluster_too_and_two_updates_are_two_versions(
    ray_node, tmp_path
):
    config = settings(steps=4, overlap=True, updates_per_batch=2, subtract_mismatch=True)
    lines = lines_of(tmp_path / "run", go(config, tmp_path / "run"))
    assert [line["version"] for line in lines] == [2, 4, 6, 8]
    assert [line["staleness"] for line in lines] == [0, 2, 2, 2]
    assert [len(line["updates"]) for line in lines] == [2] * 4
    assert lines[0]["mismatch"] == pytest.approx(0, abs=1e-5)
    assert len({line["mismatch"] for line in lines}) == 1  # no gap of older weights moved it


def test_shards_on_the_host_and_bfloat16_passes_train(ray_node, tmp_path):
    config = settings(steps=2, cpu_offload=True, autocast="bfloat16", checkpointing="non_reentrant")
    lines = lines_of(tmp_path / "run", go(config, tmp_path / "run"))
    assert [line["skipped"] for line in lines] == [None, None]
    assert all(line["kl_realised"] > 0 for line in lines)


@needs_vllm
def test_two_trainers_and_a_vllm_engine_stay_in_step(ray_node, tmp_path):
    """On-policy ratios are 1 up to two engines' arithmetic; one update missed would show there."""
    config = settings(engine="vllm", update_ratio=1e-2)
    lines = lines_of(tmp_path / "run", go(config, tmp_path / "run"))
    assert [line["skipped"] for line in lines] == [None] * len(lines)
    assert max(line["ratio_max"] for line in lines) < 1.01
    assert all(line["sync_bytes"] > 0 for line in lines)


@needs_vllm
def test_smollm2_learns_in_ten_steps_of_two_trainers_and_a_vllm_engine(ray_node, tmp_path):
    """Issue A's ten steps of one process go from 5 to 48 % with 48 prompts; these have 24."""
    config = settings(
        policy="smollm2",
        task="reasoning_gym:chain_sum",
        task_params={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
        train_problems=500,
        engine="vllm",
        steps=10,
        prompts_per_step=24,
        rank=64,
        update_ratio=3e-4,
        variant="norm_preserving",
        kl_start=2e-2,
        max_new_tokens=32,
        microbatch_tokens=1024,
        probe_responses=4,
        checkpoint_every=0,
    )
    folder = tmp_path / "run"
    lines = lines_of(folder, go(config, folder))
    assert [line["skipped"] for line in lines] == [None] * 10
    assert max(line["ratio_max"] for line in lines) < 1.1
    first, last = lines[:3], lines[-3:]
    assert sum(x["truncated_share"] for x in last) < sum(x["truncated_share"] for x in first)
    # 72 answers a side: a few right ones more or less are noise, their length is not
    shorter = [sum(x["response_tokens_mean"] for x in part) / 3 for part in (last, first)]
    assert shorter[0] < shorter[1] - 1
    assert sum(x["accuracy"] for x in last) >= sum(x["accuracy"] for x in first)
    held = Replay.open(folder / JOURNAL).weights(10)[1]
    model = trained_policy(folder).model
    assert all(torch.equal(model.get_submodule(n).weight, w) for n, w in held.items())
    assert len(read_manifest(folder)["evaluations"]) == 2
