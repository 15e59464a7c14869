"""VLLMEngine in this process, against Hugging Face: sampling, weights, versions, the prefix cache.

Engines are shared by the module; every test begins with a full sync, so that order is of no matter.
"""

import os
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from logra_lab.errors import InputError
from logra_lab.rl.policies import SMALL_FOLDER, load_policy
from logra_lab.rl.vllm_engine import VLLMEngine
from logra_lab.rl.vllm_sampling import RolloutError, read_output, seed_of
from logra_lab.sync import sealed
from logra_lab.sync.errors import (
    DigestMismatch,
    NeedsFullSync,
    PrefixCacheBusy,
    ShapeMismatch,
    SyncError,
    VersionGap,
    WrongRun,
)
from logra_lab.sync.mapping import TARGETS
from logra_lab.sync.wire import ThinLayer

shared = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[1] / "vllm_support.py")))
gaps, prompts, names = shared.gaps, shared.prompts, shared.names
pytestmark = shared.needs_vllm

LONG = prompts(1, 300, seed=5)[0]  # the CPU backend's blocks hold 128 tokens: two are cached
TOKENS = 16


def state():
    """What starting an engine in this process must leave as it was."""
    return {
        "environment": dict(os.environ),
        "set_num_threads": torch.set_num_threads,
        "threads": torch.get_num_threads(),
        "random": random.getstate(),
        "torch": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "affinity": os.sched_getaffinity(0),
    }


def start(policy, **settings):
    return VLLMEngine(
        policy, max_new_tokens=TOKENS, max_prompt_tokens=320, in_process=True,
        kv_cache_bytes=32 << 20, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def qwen2():
    """(engine, trainer, what was seen at the start)."""
    policy = shared.tiny_policy("Qwen2")
    before = state()
    engine = start(policy)
    seen = {"before": before, "after": state(), "version": engine.version}
    with pytest.raises(NeedsFullSync, match="not had a full sync") as refused:
        engine.generate([[1, 2]], ["a"])
    seen["refused"] = str(refused.value)
    yield engine, shared.Trainer(policy), seen
    engine.close()
    assert not torch.distributed.is_initialized()  # the last one gives the process group back


@pytest.fixture
def pair(qwen2, request):
    """Engine and trainer at version 0 of a run of their own."""
    engine, trainer, _ = qwen2
    trainer.restart(request.node.name)
    engine.full_sync(trainer.weights, trainer.run, 0)
    return engine, trainer


def served(engine):
    return engine.digests()[0]


def test_an_engine_in_this_process_leaves_it_as_it_was(qwen2):
    before, after = qwen2[2]["before"], qwen2[2]["after"]
    for name in before:
        assert after[name] == before[name], name


def test_a_fresh_engine_has_no_version_and_refuses_to_generate(qwen2):
    assert qwen2[2]["version"] is None
    assert "unknown version" in qwen2[2]["refused"]


def test_five_updates_reach_the_engine_to_the_bit_and_in_its_logprobs(pair):
    engine, trainer = pair
    for _ in range(5):
        assert engine.sync(trainer.step())
    assert engine.version == trainer.version == 5
    assert served(engine) == shared.cast_digest(trainer.weights, torch.float32)
    assert engine.llm.get_weight_version() == f"{trainer.run}:5"
    rollout = engine.generate(prompts(), names(4))
    assert gaps(trainer, rollout).max() < 1e-3
    trainer.restart("control")  # the updates did matter
    assert gaps(trainer, rollout).max() > 0.1


@pytest.mark.parametrize("kind", TARGETS)
def test_an_update_of_one_kind_of_layer_moves_the_engine_as_it_moves_hugging_face(pair, kind):
    """Each place of the fused parameters on its own; then back, bit for bit."""
    engine, trainer = pair
    before = served(engine)
    ask = prompts(2), names(2)
    old = engine.generate(*ask)
    engine.sync(trainer.step(0.1, kinds=[kind]))
    new = engine.generate(*ask)
    assert gaps(trainer, new).max() < 1e-3
    assert gaps(trainer, old).max() > 1e-2  # the same tokens under the moved weights
    trainer.restart(trainer.run)
    engine.full_sync(trainer.weights, trainer.run, 0)
    assert served(engine) == before


def test_a_stale_prefix_is_dropped_and_without_the_reset_it_shows(pair, monkeypatch):
    """A1: a prompt of more than two blocks; the negative control skips the reset."""
    engine, trainer = pair
    engine.generate([LONG], ["fill the cache"])
    engine.sync(trainer.step(0.3))
    updated = engine.generate([LONG], ["after"])
    assert gaps(trainer, updated).mean() < 1e-3
    with start(engine.policy) as fresh:  # loads the moved weights from a folder
        fresh.full_sync(trainer.weights, trainer.run, 1)
        loaded = fresh.generate([LONG], ["after"])
    assert loaded.response_ids == updated.response_ids
    assert torch.allclose(loaded.logprobs[0], updated.logprobs[0], atol=1e-4)

    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: True)
    engine.sync(trainer.step(0.3))
    stale = engine.generate([LONG], ["after"])
    assert gaps(trainer, stale).mean() > 0.05


def test_in_this_process_a_full_sync_writes_no_file_and_takes_the_weights_as_they_are(
    pair, monkeypatch
):
    """Of 7 billion weights it would be 28 GB, for each engine of a machine."""
    engine, trainer = pair
    monkeypatch.setattr("logra_lab.sync.sealed.write", None)
    trainer.step()
    engine.full_sync(trainer.weights, trainer.run, 1)
    digest = shared.cast_digest(trainer.weights, torch.float32)
    trainer.step()  # whoever keeps the trainer's own tensors goes along
    assert engine.digests() == [digest]


def test_a_full_sync_drops_the_prefix_too(pair):
    engine, trainer = pair
    engine.generate([LONG], ["fill the cache"])
    trainer.step(0.3)
    engine.full_sync(trainer.weights, trainer.run, 1)
    assert gaps(trainer, engine.generate([LONG], ["after"])).mean() < 1e-3


def test_a_cache_that_cannot_be_dropped_stops_generation_until_the_update_comes_again(
    pair, monkeypatch
):
    engine, trainer = pair
    update = trainer.step(0.3)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm, "reset_prefix_cache", lambda: False)
        with pytest.raises(PrefixCacheBusy, match="prefix cache"):
            engine.sync(update)
    assert engine.version is None
    assert engine.llm.get_weight_version() == f"{trainer.run}:0"  # not bumped
    with pytest.raises(NeedsFullSync, match="cached keys and values"):
        engine.generate(prompts(), names(4))
    with pytest.raises(VersionGap):
        engine.sync(trainer.update(0.1, base=7))
    assert engine.version is None  # a refused update is no remedy
    assert engine.sync(update) is False
    assert engine.version == 1
    assert gaps(trainer, engine.generate([LONG], ["after"])).mean() < 1e-3


def test_requests_in_flight_stop_an_update_before_it_writes(pair):
    from vllm import SamplingParams

    engine, trainer = pair
    before, update = served(engine), trainer.step()
    engine.llm.enqueue(
        [{"prompt_token_ids": LONG}], SamplingParams(max_tokens=4, detokenize=False), use_tqdm=False
    )
    engine.llm.llm_engine.step()
    with pytest.raises(PrefixCacheBusy, match="in flight"):
        engine.sync(update)
    assert engine.version == 0
    assert served(engine) == before
    engine.llm.wait_for_completion(use_tqdm=False)
    assert engine.sync(update)


def test_the_same_update_twice_is_acknowledged_and_changes_nothing(pair):
    engine, trainer = pair
    update = trainer.step()
    assert engine.sync(update) is True
    once = served(engine)
    assert engine.sync(update) is False
    assert (served(engine), engine.version) == (once, 1)


def damaged(update):
    """One bit of the numbers flipped."""
    data = bytearray(update.to_bytes())
    data[-1] ^= 1
    return SimpleNamespace(to_bytes=lambda: bytes(data))


def misshapen(trainer):
    """The second layer, a row short."""
    first, second, *rest = trainer.layers
    layers = [first, ThinLayer(second.name, second.d - 1, second.k, second.site), *rest]
    U = torch.ones(sum(x.d for x in layers), trainer.rank)
    settings = {"run": trainer.run, "base": 0, "seed": 1, "draw": 1}
    return shared.ThinUpdate.round(U, layers, **settings)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda t: t.update(0.1, base=2), VersionGap),
        (lambda t: t.update(0.1, run="another"), WrongRun),
        (misshapen, ShapeMismatch),
        (lambda t: damaged(t.update(0.1)), DigestMismatch),
    ],
)
def test_a_refused_update_leaves_weights_version_and_generation_as_they_were(pair, wrong, error):
    engine, trainer = pair
    before = served(engine)
    with pytest.raises(error):
        engine.sync(wrong(trainer))
    assert (served(engine), engine.version) == (before, 0)
    assert gaps(trainer, engine.generate(prompts(), names(4))).max() < 1e-3
    assert engine.sync(trainer.step())  # and the next one is taken


def test_a_resumed_trainer_begins_with_a_full_sync_and_rolls_out_its_version(pair):
    engine, trainer = pair
    trainer.restart("resumed", version=7)
    with pytest.raises(WrongRun):
        engine.sync(trainer.update(0.1))
    engine.full_sync(trainer.weights, "resumed", 7)
    assert engine.version == 7
    assert engine.llm.get_weight_version() == "resumed:7"
    assert engine.sync(trainer.step())


def test_a_base_file_is_taken_whole_or_not_at_all(pair, tmp_path):
    engine, trainer = pair
    before, path = served(engine), tmp_path / "base.safetensors"
    trainer.step(0.3)
    sealed.write(path, trainer.weights, {"run": trainer.run, "version": 3})
    for change, error in [
        ({"run": "another"}, WrongRun),
        ({"version": 4}, VersionGap),
        ({"base": tmp_path / "absent"}, InputError),
    ]:
        with pytest.raises(error):
            engine.full_sync(**({"base": path, "run": trainer.run, "version": 3} | change))
        assert (served(engine), engine.version) == (before, 0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    (tmp_path / "flipped").write_bytes(data)
    with pytest.raises(DigestMismatch):
        engine.full_sync(tmp_path / "flipped", trainer.run, 3)
    missing = {n: w for n, w in trainer.weights.items() if "1.mlp" not in n}
    with pytest.raises(ShapeMismatch, match=r"layers\.1\.mlp"):
        engine.full_sync(missing, trainer.run, 3)
    assert (served(engine), engine.version) == (before, 0)
    engine.full_sync(path, trainer.run, 3)
    assert served(engine) == shared.cast_digest(trainer.weights, torch.float32) != before


def test_another_rank_that_refuses_or_fails_keeps_this_one_from_going_on(pair, monkeypatch):
    """The vote of a group, with the other rank's voice put in by hand."""
    from logra_lab.sync import vllm_transfer

    engine, trainer = pair
    before, update = served(engine), trainer.step()
    monkeypatch.setattr(vllm_transfer, "_all_ranks", lambda good: False)
    with pytest.raises(SyncError, match="another rank refused"):
        engine.sync(update)
    assert (served(engine), engine.version) == (before, 0)
    votes = iter([True, False])
    monkeypatch.setattr(vllm_transfer, "_all_ranks", lambda good: next(votes))
    with pytest.raises(SyncError, match="failed while writing"):
        engine.sync(update)
    monkeypatch.undo()
    assert engine.version is None
    with pytest.raises(NeedsFullSync):
        engine.sync(update)


def test_level_2_sleep_makes_the_version_unknown_until_a_full_sync(pair):
    """A5: one more thin update on weights that were given up would give neither policy."""
    engine, trainer = pair
    for _ in range(3):
        engine.sync(trainer.step())
    engine.sleep(1)
    with pytest.raises(SyncError, match="wake_up"):
        engine.generate(prompts(), names(4))
    engine.wake_up()
    assert engine.version == 3
    engine.sleep(2)
    engine.wake_up()
    assert engine.version is None
    assert engine.llm.get_weight_version() == "unknown"
    with pytest.raises(NeedsFullSync, match="level 2"):
        engine.sync(trainer.step())
    with pytest.raises(NeedsFullSync, match="level 2"):
        engine.generate(prompts(), names(4))
    engine.full_sync(trainer.weights, trainer.run, 4)
    assert served(engine) == shared.cast_digest(trainer.weights, torch.float32)
    assert gaps(trainer, engine.generate(prompts(), names(4))).max() < 1e-3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_the_trainer_at_the_sampling_temperature(
    pair, monkeypatch, temperature
):
    """A8: mean |gap| below 0.02; vLLM's default, logprobs of the raw logits, would fail it."""
    engine, trainer = pair
    monkeypatch.setattr(engine, "temperature", temperature)
    rollout = engine.generate(prompts(8), names(8))
    assert gaps(trainer, rollout, temperature).mean() < 0.02
    if temperature != 1:
        assert gaps(trainer, rollout, 1.0).mean() > 0.02


def test_the_gap_does_not_trend_while_nothing_is_learned(pair):
    """A8's standing metric: five updates of zero, float32, where rounding is below 1e-5 nats."""
    engine, trainer = pair
    seen = []
    for _ in range(5):
        engine.sync(trainer.step(0.0))
        seen.append(gaps(trainer, engine.generate(prompts(8), names(8))).mean().item())
    assert max(seen) < 1e-5
    assert engine.version == 5


def test_tokens_are_drawn_from_softmax_at_the_temperature(pair, monkeypatch):
    """Frequencies of 3000 first tokens: chi-square over the 61 ids at the 99.99 % point.

    110 is that point for 60 degrees of freedom (Wilson-Hilferty: 60·(1 − 2/540 + 3.72·√(2/540))³);
    ids expected less than 5 times are put together, which lowers it.
    """
    engine, trainer = pair
    monkeypatch.setattr(engine, "temperature", 1.7)
    monkeypatch.setattr(engine, "max_new_tokens", 1)
    count, prompt = 3000, prompts(1)[0]
    rollout = engine.generate([prompt] * count, names(count))
    found = torch.bincount(torch.tensor(rollout.response_ids)[:, 0], minlength=61).double()

    def distance(temperature):
        logits = trainer.model(torch.tensor([prompt])).logits[0, -1].double()
        expected = count * torch.softmax(logits / temperature, -1).detach()
        rare = expected < 5
        f = torch.cat([found[~rare], found[rare].sum()[None]])
        e = torch.cat([expected[~rare], expected[rare].sum()[None]])
        return ((f - e) ** 2 / e).sum()

    assert distance(1.7) < 110
    assert distance(1.5) > 110  # a slightly wrong temperature is seen


def test_a_row_depends_on_its_prompt_and_key_alone(pair):
    engine, _ = pair
    ask = prompts(6)
    alone = [engine.generate([p], [k]) for p, k in zip(ask, names(6), strict=True)]
    together = engine.generate(ask[::-1], names(6)[::-1])
    assert together.response_ids[::-1] == [r.response_ids[0] for r in alone]
    others = engine.generate(ask, [f"other {k}" for k in names(6)])
    assert others.response_ids != together.response_ids[::-1]


def test_a_response_ends_with_the_first_of_several_closing_ids_or_at_the_limit(pair, monkeypatch):
    engine, _ = pair
    closing = (7, 11, 13, 17)
    monkeypatch.setattr(engine.policy, "eos_ids", closing)
    rollout = engine.generate(prompts(40), names(40))
    assert {"stop", "length"} == set(rollout.finish)
    for ids, logprobs, finish in zip(
        rollout.response_ids, rollout.logprobs, rollout.finish, strict=True
    ):
        assert len(logprobs) == len(ids)
        assert not set(ids[:-1]) & set(closing)
        assert (ids[-1] in closing) == (finish == "stop")
        assert finish == "stop" or len(ids) == TOKENS


def test_the_ids_of_the_engine_are_those_of_the_rollout_whatever_the_tokenizer_says(
    pair, monkeypatch
):
    """A9: [4, 5] decodes to "ab", and "ab" encodes to [9]."""

    class Merging:
        def decode(self, ids, **_):
            return "".join({4: "a", 5: "b"}.get(i, "?") for i in ids)

        def __call__(self, text):
            return SimpleNamespace(input_ids=[9] * text.count("ab"))

    engine, trainer = pair
    plain = engine.generate(prompts(), names(4))
    monkeypatch.setattr(engine.policy, "tokenizer", Merging())
    rollout = engine.generate(prompts(), names(4))
    assert rollout.response_ids == plain.response_ids
    assert rollout.texts == [engine.policy.decode(r) for r in plain.response_ids]
    assert rollout.prompt_ids == prompts()
    assert gaps(trainer, rollout).max() < 1e-3


def answer(ids, logprobs, finish="length"):
    """A completion as vLLM returns it: one {id: Logprob} a token."""
    listed = [{token: SimpleNamespace(logprob=x)} for token, x in logprobs]
    return SimpleNamespace(token_ids=ids, logprobs=listed, finish_reason=finish)


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (answer([4, 5], [(4, -1.0)]), "2 sampled ids, but 1 log-prob"),
        (answer([4], [(4, -1.0), (5, -1.0)]), "1 sampled ids, but 2 log-prob"),
        (answer([], []), "0 sampled ids"),
        (SimpleNamespace(token_ids=[4], logprobs=None, finish_reason="stop"), "but 0 log-prob"),
        (answer([4, 5], [(4, -1.0), (9, -1.0)]), "at position 1"),
        (answer([4], [(4, float("nan"))]), "not finite"),
        (answer([4], [(4, -1.0)], "abort"), "abort"),
    ],
)
def test_logprobs_are_never_padded_or_guessed(output, words):
    with pytest.raises(RolloutError, match=words):
        read_output(output)


def test_a_well_formed_answer_is_read_in_order():
    ids, logprobs, finish = read_output(answer([4, 5], [(4, -1.5), (5, -0.25)], "stop"))
    assert (ids, logprobs.tolist(), finish) == ([4, 5], [-1.5, -0.25], "stop")


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1},
     {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"min_tokens": 3},
     {"logit_bias": {1: 2.0}}, {"allowed_token_ids": [1]}, {"bad_words": ["x"]},
     {"temprature": 1.0}],
)  # fmt: skip
def test_settings_that_change_the_distribution_are_refused(sampling):
    with pytest.raises(InputError, match=next(iter(sampling))):
        start(shared.tiny_policy(), sampling=sampling)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens"),
        ({"max_prompt_tokens": 512}, "512 positions"),
        ({"tensor_parallel": 2}, "in_process=False"),
    ],
)
def test_impossible_settings_are_refused_at_once(settings, words):
    usual = {"max_new_tokens": 4, "max_prompt_tokens": 8, "in_process": True}
    with pytest.raises(InputError, match=words):
        VLLMEngine(shared.tiny_policy(), **(usual | settings))


@pytest.mark.parametrize(
    ("asked", "keys", "words"),
    [
        ([], [], "no prompts"),
        ([[1]], [], "0 keys"),
        ([[1], []], ["a", "b"], "prompt 1 has 0 tokens"),
        ([[1] * 321], ["a"], "321 tokens"),
        ([[61]], ["a"], "61"),
        ([[-1]], ["a"], "-1"),
    ],
)
def test_bad_prompts_are_refused_by_place(pair, asked, keys, words):
    with pytest.raises(InputError, match=words):
        pair[0].generate(asked, keys)


def test_seeds_are_63_bits_of_the_keys_hash():
    """BLAKE2b-64 of "a" is 40f89e395b66422f (RFC 7693's algorithm, by coreutils' b2sum -l 64)."""
    assert seed_of("a") == int.from_bytes(bytes.fromhex("40f89e395b66422f"), "little") >> 1
    assert 0 <= min(map(seed_of, names(1000))) <= max(map(seed_of, names(1000))) < 2**63


@pytest.mark.parametrize("arch", ["Qwen3", "Llama"])
def test_the_other_architectures_follow_five_updates(arch):
    policy = shared.tiny_policy(arch)
    trainer = shared.Trainer(policy)
    with start(policy) as engine:
        engine.full_sync(trainer.weights, "run", 0)
        for kind in TARGETS[:5]:
            engine.sync(trainer.step(0.05, kinds=[kind, "down_proj", "up_proj"]))
        assert served(engine) == shared.cast_digest(trainer.weights, torch.float32)
        assert gaps(trainer, engine.generate(prompts(), names(4))).max() < 1e-3


@pytest.mark.parametrize("mode", ["exact", "plain"])
def test_bfloat16_serves_the_cast_of_the_trainer_and_plain_mode_does_not(mode):
    """Steps of a few 1e-4 are half lost in bfloat16, whose spacing at 0.15 is 1e-3."""
    policy = shared.tiny_policy("Qwen2")
    trainer = shared.Trainer(policy)
    with start(policy, dtype="bfloat16", receiver=mode) as engine:
        engine.full_sync(trainer.weights, "run", 0)
        for _ in range(5):
            engine.sync(trainer.step(2e-4))
        same = served(engine) == shared.cast_digest(trainer.weights, torch.bfloat16)
        assert same == (mode == "exact")
        rollout = engine.generate(prompts(), names(4))
        # 8 bits of mantissa through 2 layers, on logits of a few units.
        assert gaps(trainer, rollout).mean() < 0.1


def test_an_engine_from_a_folder_knows_its_closing_ids_and_a_reload_forgets_the_version():
    """trl#5312: what reads the folder again rolls out the base weights over the synced ones."""
    policy = load_policy("small")
    trainer = shared.Trainer(policy)
    with start(SMALL_FOLDER) as engine:
        assert engine.policy.eos_ids == policy.eos_ids
        base = served(engine)
        assert base == shared.cast_digest(trainer.weights, torch.float32)
        engine.full_sync(trainer.weights, "run", 0)
        engine.sync(trainer.step(1e-3))
        rollout = engine.generate([policy.encode("1+2=")], ["a"])
        assert rollout.texts == [policy.decode(rollout.response_ids[0])]
        assert gaps(trainer, rollout).max() < 1e-3
        engine.reload()
        assert served(engine) == base
        with pytest.raises(NeedsFullSync, match="folder again"):
            engine.sync(trainer.step(1e-3))
        with pytest.raises(NeedsFullSync):
            engine.generate([policy.encode("1+2=")], ["a"])
        engine.full_sync(trainer.weights, "run", 2)
        assert served(engine) == shared.cast_digest(trainer.weights, torch.float32)


def test_a_policy_in_memory_has_no_folder_to_read_again(pair):
    with pytest.raises(InputError, match="full_sync"):
        pair[0].reload()
    assert pair[0].version == 0


def test_closing_an_engine_leaves_another_of_this_process_at_work(pair):
    """vLLM's own shutdown would take down the process group that both use."""
    engine, trainer = pair
    with start(shared.tiny_policy("Qwen2")) as other:
        other.full_sync(trainer.weights, "other", 0)
    assert engine.sync(trainer.step())
    assert gaps(trainer, engine.generate(prompts(), names(4))).max() < 1e-3


def test_a_closed_engine_says_so_and_closes_twice():
    policy = shared.tiny_policy("Qwen2")
    engine = start(policy)
    engine.close()
    engine.close()
    assert engine.version is None
    with pytest.raises(SyncError, match="closed"):
        engine.generate([[1]], ["a"])
    with pytest.raises(SyncError, match="closed"):
        engine.sync(shared.Trainer(policy).update(0.1))
