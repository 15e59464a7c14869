"""`logra-lab bench one_gpu` on the CPU: the same steps, small; it notices weights that differ."""

import json
from importlib.util import find_spec

import pytest
import torch

from logra_lab import bench
from logra_lab.bench import one_gpu
from logra_lab.rl.engines import CopyEngine

FIGURES = {
    *("gpu", "vllm", "nccl", "served", "gap", "gap_recorded", "steps_taken", "sync_share"),
    *("seconds", "seconds_start", "seconds_step", "rank_weights", "rank_sketch", "rank_alpha"),
}


def figures(tmp_path, monkeypatch, *, vllm):
    if not vllm:
        monkeypatch.setattr(one_gpu, "find_spec", lambda _: None)
    out = tmp_path / "figures.json"
    assert bench.main("one_gpu", json_path=str(out), quick=True) == 0
    return json.loads(out.read_text())["figures"]


def test_the_quick_run_takes_three_steps_holds_every_bound_and_says_what_took_part(
    tmp_path, monkeypatch
):
    found = figures(tmp_path, monkeypatch, vllm=False)
    cuda = torch.cuda.is_available()
    assert set(found) == FIGURES | ({"trainer_gpu_mib", "card_mib"} if cuda else set())
    assert [f for f, x in found.items() if x["holds"] is False] == []
    assert found["steps_taken"]["value"] == 3
    took_part = {name: found[name]["value"] for name in ("gpu", "nccl", "vllm")}
    assert took_part == {"gpu": cuda, "nccl": cuda, "vllm": 0}


def test_an_engine_that_missed_the_last_update_is_noticed(tmp_path, monkeypatch):
    sync = CopyEngine.sync

    def all_but_the_third(self, update):
        return update.version == one_gpu.STEPS or sync(self, update)

    monkeypatch.setattr(CopyEngine, "sync", all_but_the_third)
    found = figures(tmp_path, monkeypatch, vllm=False)
    assert (found["served"]["value"], found["served"]["holds"]) == (1, False)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_with_vllm_as_the_engine(tmp_path, monkeypatch):
    found = figures(tmp_path, monkeypatch, vllm=True)
    assert found["vllm"]["value"] == 1
    assert [f for f, x in found.items() if x["holds"] is False] == []
