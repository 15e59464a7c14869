"""The plugin in vLLM's own processes, tensor-parallel, and what it refuses or leaves alone."""

import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from logra_lab.errors import InputError, LograError
from logra_lab.rl.vllm_engine import VLLMEngine
from logra_lab.sync import vllm_plugin
from logra_lab.sync.errors import (
    DigestMismatch,
    NeedsFullSync,
    SyncError,
    UnsupportedRolloutBackend,
    VersionGap,
)
from logra_lab.sync.mapping import Geometry, shards, target_paths
from logra_lab.sync.wording import find_error, worded

shared = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "vllm_support.py")))
gaps, prompts, names = shared.gaps, shared.prompts, shared.names
needs_vllm = shared.needs_vllm

SMALL = {"max_new_tokens": 12, "max_prompt_tokens": 32, "kv_cache_bytes": 32 << 20}


def parts_of(model, rank, size):
    """(name, rows, columns) of a rank's targets; the mapping has tests of its own."""
    c = model.config
    geometry = Geometry(
        hidden=c.hidden_size,
        intermediate=c.intermediate_size,
        heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim if hasattr(c, "head_dim") else c.hidden_size // c.num_attention_heads,
    )
    found = shards(target_paths(c.num_hidden_layers), geometry, rank=rank, size=size)
    return [(s.layer, s.rows, s.columns) for s in found]


def casts(trainer, dtype, size):
    """What every rank should serve."""
    ranks = [parts_of(trainer.model, rank, size) for rank in range(size)]
    return [shared.cast_digest(trainer.weights, dtype, parts) for parts in ranks]


@pytest.fixture(scope="module")
def parallel():
    """Two ranks, in processes of their own, serving bfloat16."""
    policy = shared.tiny_policy("Qwen2")
    with VLLMEngine(policy, tensor_parallel=2, dtype="bfloat16", threads=1, **SMALL) as engine:
        yield engine, shared.Trainer(policy)


@needs_vllm
def test_two_ranks_serve_the_cast_of_the_trainer_to_the_bit(parallel):
    engine, trainer = parallel
    trainer.restart("bits")
    with pytest.raises(NeedsFullSync):
        engine.sync(trainer.update(0.1, run="never synced"))
    engine.full_sync(trainer.weights, "bits", 0)
    for _ in range(3):
        assert engine.sync(trainer.step(3e-4))
    assert engine.digests() == casts(trainer, torch.bfloat16, 2)
    assert engine.version == 3
    assert engine.llm.get_weight_version() == "bits:3"
    assert gaps(trainer, engine.generate(prompts(), names(4))).mean() < 0.1


@needs_vllm
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_a_rank_that_refuses_keeps_the_other_from_writing(parallel, bad_rank):
    """vLLM's list form gives each rank its own payload: here one of them is damaged."""
    engine, trainer = parallel
    trainer.restart(f"ranks {bad_rank}")
    engine.full_sync(trainer.weights, trainer.run, 0)
    before = engine.digests()
    good = trainer.update(0.1).to_bytes()
    payloads = [{"update": good}, {"update": good}]
    payloads[bad_rank] = {"update": good[:-1] + bytes([good[-1] ^ 1])}
    with pytest.raises(DigestMismatch, match="some byte has changed"):
        engine._transfer(payloads)
    assert engine.digests() == before
    assert engine.version == 0
    assert engine.sync(trainer.step())  # the workers' answers are still in step with the calls
    assert engine.digests() == casts(trainer, torch.bfloat16, 2)


@needs_vllm
def test_errors_cross_processes_with_their_type_and_words(parallel):
    engine, trainer = parallel
    trainer.restart("errors")
    engine.full_sync(trainer.weights, trainer.run, 0)
    with pytest.raises(VersionGap, match="from version 4 to 5, the weights are of version 0"):
        engine.sync(trainer.update(0.1, base=4))
    with pytest.raises(InputError, match=r"base .* cannot be read"):
        engine.full_sync("/no/such/base", trainer.run, 1)
    assert engine.version == 0


@needs_vllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "arch", "settings", "dtype"),
    [
        (1, "Qwen2", {}, torch.float32),
        (1, "Llama", {}, torch.bfloat16),
        (2, "Qwen3", {}, torch.float32),
        # One KV head on two ranks: both hold it.
        (2, "Llama", {"num_key_value_heads": 1}, torch.float32),
    ],
)
def test_engines_in_their_own_processes_follow_and_leave_none_behind(ranks, arch, settings, dtype):
    policy = shared.tiny_policy(arch, **settings)
    trainer = shared.Trainer(policy)
    mine = psutil.Process()
    before = {p.pid for p in mine.children(recursive=True)}
    shared_memory = {p.name for p in Path("/dev/shm").glob("vllm_dist_*")}
    name = str(dtype).removeprefix("torch.")
    with VLLMEngine(policy, tensor_parallel=ranks, dtype=name, threads=1, **SMALL) as engine:
        started = [p for p in mine.children(recursive=True) if p.pid not in before]
        assert len(started) > ranks
        engine.full_sync(trainer.weights, "run", 0)
        for _ in range(5):
            engine.sync(trainer.step())
        assert engine.digests() == casts(trainer, dtype, ranks)
        limit = 1e-3 if dtype == torch.float32 else 0.1
        assert gaps(trainer, engine.generate(prompts(), names(4))).mean() < limit
    # Python's resource tracker belongs to this process and stays.
    left = [p for p in started if p.is_running() and "resource_tracker" not in str(p.cmdline())]
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]
    assert {p.name for p in Path("/dev/shm").glob("vllm_dist_*")} <= shared_memory


@needs_vllm
def test_a_stock_engine_is_refused_naming_layer_and_remedy(monkeypatch):
    """A2 (i): without the plugin's hand on it, vLLM packs the weights and frees them."""
    from vllm.model_executor.layers import utils

    vllm_plugin.register()
    stock = utils.dispatch_cpu_unquantized_gemm.__wrapped__
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", stock)
    with pytest.raises(
        UnsupportedRolloutBackend,
        match=r"layers\.0\.self_attn\.qkv_proj\.weight: expected .* \[256, 128\], got \[0\]",
    ):
        VLLMEngine(shared.tiny_policy(), in_process=True, **SMALL)


@needs_vllm
def test_engines_of_others_keep_their_packed_weights():
    """The plugin is loaded in every vLLM process; only engines that ask for it are changed."""
    from vllm.config import VllmConfig, WeightTransferConfig, set_current_vllm_config
    from vllm.model_executor.layers import utils

    vllm_plugin.register()

    def packed():
        layer = nn.Linear(64, 64, bias=False)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        return layer.weight.numel() == 0

    assert packed()
    for backend, expected in [(None, True), ("nccl", True), (vllm_plugin.BACKEND, False)]:
        transfer = None if backend is None else WeightTransferConfig(backend=backend)
        with set_current_vllm_config(VllmConfig(weight_transfer_config=transfer)):
            assert packed() is expected


class Layer(nn.Module):
    """A linear layer whose GEMM may read something else than `weight`."""

    def __init__(self, weight, reads=None):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.reads = weight if reads is None else reads
        self.quant_method = self

    def apply(self, layer, x, bias):
        return x @ self.reads.T


@needs_vllm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gemm_that_reads_a_copy_is_found_and_the_weight_restored_to_the_bit(dtype):
    from logra_lab.sync.vllm_places import _check_reads

    weight = torch.randn(96, 160).to(dtype)
    weight[0, :2] = torch.tensor([-0.0, float("nan")])
    bits = weight.clone().view(torch.uint8)
    half = weight.clone()
    half[:48] = weight[:48]

    def layer(reads=None):
        return nn.ModuleDict({"q": Layer(weight, reads)})

    _check_reads(layer(), "q.weight")
    assert torch.equal(weight.view(torch.uint8), bits)
    with pytest.raises(UnsupportedRolloutBackend, match="q: its GEMM does not read"):
        _check_reads(layer(reads=weight.clone()), "q.weight")
    assert torch.equal(weight.view(torch.uint8), bits)


@needs_vllm
def test_a_gemm_that_reads_the_weight_in_part_is_found():
    from logra_lab.sync.vllm_places import _check_reads

    class Half(Layer):
        def apply(self, layer, x, bias):
            return torch.cat([x @ self.weight[:48].T, x @ self.kept[48:].T], 1)

    bad = Half(torch.randn(96, 160))
    bad.kept = bad.weight.data.clone()
    with pytest.raises(UnsupportedRolloutBackend):
        _check_reads(nn.ModuleDict({"q": bad}), "q.weight")


@needs_vllm
def test_registering_again_does_nothing():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers import utils

    vllm_plugin.register()
    known, choose = dict(WeightTransferEngineFactory._registry), utils.dispatch_cpu_unquantized_gemm
    vllm_plugin.register()
    assert WeightTransferEngineFactory._registry == known
    assert utils.dispatch_cpu_unquantized_gemm is choose
    assert vllm_plugin.BACKEND in known


@pytest.mark.parametrize(
    ("version", "words"), [(None, "not installed"), ("0.33.0", "0.33.0, expected 0.32")]
)
def test_another_vllm_is_refused_by_our_engine_and_left_alone_by_the_plugin(
    monkeypatch, version, words
):
    monkeypatch.setattr(vllm_plugin, "installed_version", lambda: version)
    vllm_plugin.register()  # no error: it would stop every vLLM on the machine
    with pytest.raises(UnsupportedRolloutBackend, match=words):
        VLLMEngine(shared.tiny_policy(), in_process=True, **SMALL)


@needs_vllm
def test_a_vllm_without_the_private_name_is_refused(monkeypatch):
    from vllm.model_executor.layers import utils

    monkeypatch.delattr(utils, "dispatch_cpu_unquantized_gemm")
    with pytest.raises(UnsupportedRolloutBackend, match="dispatch_cpu_unquantized_gemm"):
        vllm_plugin.require_support()


@needs_vllm
def test_an_allowlist_that_leaves_the_plugin_out_is_named(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "something")
    with pytest.raises(UnsupportedRolloutBackend, match="VLLM_PLUGINS"):
        VLLMEngine(shared.tiny_policy(), in_process=True, **SMALL)


@pytest.mark.parametrize(
    "error",
    [
        VersionGap("from 1 to 2, here [3]"),
        UnsupportedRolloutBackend("two\nlines]"),
        InputError("x"),
        SyncError(""),
    ],
)
def test_a_worded_error_comes_back_as_itself_from_the_text_around_it(error):
    text = f"Call failed: Worker failed with error '{worded(error)}', please check the log"
    found = find_error(text)
    assert type(found) is type(error)
    assert str(found) == str(error)


def test_errors_of_other_packages_come_back_named():
    found = find_error(worded(MemoryError("no room")))
    assert type(found) is SyncError
    assert "MemoryError: no room" in str(found)
    assert find_error(worded(type("LograError", (LograError,), {})("x"))) is not None
    assert find_error("Worker failed with error 'something'") is None


@needs_vllm
@pytest.mark.slow
def test_a_script_without_the_main_guard_is_told_so(tmp_path):
    """The script is imported again by every process that vLLM spawns."""
    policy = shared.tiny_policy()
    policy.model.save_pretrained(tmp_path)
    (tmp_path / "script.py").write_text(
        "from transformers import AutoModelForCausalLM\n"
        "from logra_lab.rl.policies import Policy\n"
        "from logra_lab.rl.vllm_engine import VLLMEngine\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path)!r})\n"
        "policy = Policy(model, None, 'tiny', (7,), 0)\n"
        "VLLMEngine(policy, max_new_tokens=4, max_prompt_tokens=8)\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "if __name__ == '__main__':" in done.stderr.strip().splitlines()[-1]


_ENDINGS = """
import json, os, signal, sys
import psutil
from logra_lab.rl.vllm_engine import VLLMEngine
import runpy

if __name__ == "__main__":
    shared = runpy.run_path(sys.argv[1])
    policy = shared["tiny_policy"]()
    engine = VLLMEngine(
        policy, max_new_tokens=4, max_prompt_tokens=8, kv_cache_bytes=32 << 20, threads=1
    )
    engine.full_sync(shared["Trainer"](policy).weights, "run", 0)
    started = [p.pid for p in psutil.Process().children(recursive=True)]
    asked = []
    signal.signal(signal.SIGINT, lambda *_: asked.append("Ctrl-C"))
    os.killpg(0, signal.SIGINT)  # as a terminal does
    for _ in range(20):
        rollout = engine.generate(shared["prompts"](), shared["names"](4))
    print(json.dumps([started, asked, len(rollout.response_ids)]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@needs_vllm
def test_ctrl_c_spares_the_engine_and_a_killed_trainer_leaves_no_process(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_ENDINGS)
    support = str(Path(__file__).parents[1] / "vllm_support.py")
    done = subprocess.run(
        [sys.executable, str(script), support], capture_output=True, text=True, timeout=120,
        start_new_session=True,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr[-2000:]
    started, asked, responses = json.loads(done.stdout.splitlines()[-1])
    assert asked == ["Ctrl-C"]
    assert responses == 4
    assert len(started) >= 2
    left = [psutil.Process(pid) for pid in started if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
