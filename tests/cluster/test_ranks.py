"""The step of a group of ranks against the step of one process, on the same batch.

Three processes become groups of one, two and three ranks in turn. Their policies are random Qwen2
models of which no matrix can be cut evenly; weights are float64, so that what is left of the
difference is that of sums in another order, and a mistake cannot hide in it.
"""

import math
import resource
import shutil

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from logra_lab.cluster.node import Needs, start
from logra_lab.rl.config import make_config
from logra_lab.rl.policies import SMALL_FOLDER, load_policy
from logra_lab.rl.ppo import Sample
from logra_lab.rl.trainer import Share, deal

transformers = pytest.importorskip("transformers")

CLOSE = 1e-6  # the bound; float64 sums of a thousand terms are off by 1e-13
BATCH = {"prompts_per_step": 12, "max_new_tokens": 6, "rank": 4, "microbatch_tokens": 64}


def config(**settings):
    common = {"engine": "hf", "engines": 1, "trainers": 3, "trainer_timeout": 200}
    probe = {"kl_start": 1e-3, "probe_responses": 3, "wire": "float32", "update_ratio": 0.02}
    return make_config(**common | BATCH | probe | settings)


def folder(path, **sizes):
    """A random Qwen2: k and v have 2 rows, hidden 7, MLP 11: nothing that three ranks can share."""
    shape = {"hidden_size": 7, "intermediate_size": 11, "num_hidden_layers": 2, "head_dim": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1}
    small = transformers.AutoConfig.from_pretrained(SMALL_FOLDER)
    common = {"vocab_size": small.vocab_size, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**shape | heads | common | sizes)
    )
    for parameter in model.parameters():  # large enough for the policy to have a preference
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SMALL_FOLDER / name, path)
    return path


@pytest.fixture(scope="module")
def hosts(ray_node):
    from logra_lab.bench.ranks import Hosts

    with start(None, Needs(trainers=3)) as cluster:
        made = Hosts(cluster, 3)
        yield made
        made.close()


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def batch(odd):
    from logra_lab.bench.ranks import rollout

    return rollout(odd, config(), BATCH["prompts_per_step"])


def one_process(settings, path, samples, shares=None, dtype="float64"):
    """What a step in this process does, and the weights before it."""
    from logra_lab.bench.ranks import alone, watch

    trainer = alone(settings, path, dtype)
    before = {name: weight.clone() for name, weight in trainer.targets().items()}
    trainer.load(shares or deal(samples, settings, 1))
    return watch(trainer), before


def assert_close(seen, expected, before, bound=CLOSE):
    from logra_lab.bench.ranks import apart

    assert seen.skipped is None
    found = apart(seen, expected, before)
    assert all(value <= bound for value in found.values()), found


# --- equal to one process -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "checkpointing", "probe"),
    [
        (1, "none", "jvp"),
        (2, "none", "fd"),
        (2, "reentrant", "jvp"),
        (2, "non_reentrant", "jvp"),
        (3, "none", "jvp"),
        (3, "non_reentrant", "fd"),
    ],
)
def test_s_v_d_alpha_and_weights_are_those_of_one_process(
    hosts, odd, batch, size, checkpointing, probe
):
    """Catches uneven and empty shards, a sketch that counts recomputed tokens twice, a local
    normaliser, a local ‖W‖ or ‖DA‖, and a probe that perturbs the local rows only."""
    settings = config(checkpointing=checkpointing, kl_method=probe)
    expected, before = one_process(config(kl_method=probe), odd, batch)
    hosts.form(settings, odd, size)
    ranks = hosts.step(batch, settings)
    for seen in ranks:
        assert_close(seen, expected, before)
        assert seen.alpha == ranks[0].alpha  # to the bit: each rank decides by itself
        assert seen.update.to_bytes() == ranks[0].update.to_bytes()
    assert 0 < expected.alpha < 3  # neither the cap nor nothing


def test_int8_integers_are_those_of_one_process_but_one_in_ten_thousand(hosts, odd, batch):
    """Catches rounding bits that count from the shard's first row, and rows rounded twice."""
    from logra_lab.bench.ranks import apart

    settings = config(wire="int8")
    expected, before = one_process(settings, odd, batch)
    for size in (2, 3):
        hosts.form(settings, odd, size)
        found = apart(hosts.step(batch, settings)[0], expected, before)
        assert found["int8"] <= 1e-4, found
        assert found["units"] <= 1


def test_fewer_samples_than_ranks_catch_an_empty_piece_that_adds_or_hangs(hosts, odd, batch):
    settings = config(probe_responses=1)
    expected, before = one_process(settings, odd, batch[:2])
    hosts.form(settings, odd, 3)
    shares = deal(batch[:2], settings, 3)
    assert sorted(map(len, (s.pieces[0] for s in shares))) == [0, 1, 1]
    assert sorted(map(len, (s.probe[0] for s in shares))) == [0, 0, 1]
    for seen in hosts.step(batch[:2], settings):
        assert_close(seen, expected, before)


def test_shards_on_the_host_change_nothing(hosts, odd, batch):
    settings = config()
    expected, before = one_process(settings, odd, batch)
    hosts.form(config(cpu_offload=True), odd, 2)
    assert_close(hosts.step(batch, settings)[0], expected, before)


def test_bfloat16_passes_keep_float32_masters_and_point_the_same_way(hosts, odd, batch):
    """Eight bits of mantissa: S is off by some 1e-2 and must not be equal, D stays S's."""
    settings = config()
    expected, before = one_process(settings, odd, batch, dtype="float32")
    hosts.form(config(autocast="bfloat16"), odd, 2, "float32")
    seen = hosts.step(batch, settings)[0]
    assert {w.dtype for w in seen.W.values()} == {torch.float32}
    cosine = torch.cosine_similarity(seen.S.flatten(), expected.S.flatten(), dim=0)
    assert 0.95 < cosine < 1 - 1e-6
    moved = {name: (seen.W[name] - before[name]).norm() for name in before}
    assert all(math.isfinite(x) and x > 0 for x in moved.values())


# --- the policy as FSDP holds it ------------------------------------------------------------------


def embedding_facts(rank):
    model = rank.trainer.policy.model
    names = [name for name, _ in model.named_parameters()]
    one = model.lm_head.weight is model.get_input_embeddings().weight
    return one, sum("embed" in name or "lm_head" in name for name in names)


def test_tied_embeddings_stay_one_parameter_that_learns_from_both_uses(hosts, tied, batch):
    settings = config()
    expected, before = one_process(settings, tied, batch)
    hosts.form(settings, tied, 2)
    assert hosts.run(embedding_facts) == [(True, 1)] * 2
    assert_close(hosts.step(batch, settings)[0], expected, before)


def fill_with_nan(_, on):
    torch.use_deterministic_algorithms(on)  # fills new memory with NaN, by torch's default


def buffers(rank):
    return {name: buffer.clone() for name, buffer in rank.trainer.policy.model.named_buffers()}


def test_buffers_that_no_file_holds_are_an_eager_models_although_memory_was_nan(hosts, odd, batch):
    eager = dict(load_policy(str(odd)).model.named_buffers())
    assert eager
    every, hosts.now = hosts.now, hosts.every
    hosts.run(fill_with_nan, True)
    hosts.now = every
    try:
        hosts.form(config(), odd, 2, "float32")
    finally:
        every, hosts.now = hosts.now, hosts.every
        hosts.run(fill_with_nan, False)
        hosts.now = every
    for found in hosts.run(buffers):
        assert found.keys() == eager.keys()
        assert all(torch.equal(found[name], eager[name]) for name in eager)


def hidden_loss(rank_or_trainer):
    """S of a loss on the last hidden states, which the root hands out beside its logits."""
    trainer = getattr(rank_or_trainer, "trainer", rank_or_trainer)
    model, learner, ranks = trainer.policy.model, trainer.learner, trainer.ranks
    ids = torch.arange(2, 12).reshape(2, 5)
    out = model(input_ids=ids, output_hidden_states=True, use_cache=False)
    (out.hidden_states[-1].square().sum() / ranks.size).backward()
    learner.sketch.settle()
    layers = learner.sketch.layers.values()
    return torch.cat([ranks.gather(layer.S, layer.d) for layer in layers]).clone()


def test_a_loss_on_hidden_states_alone_meets_no_freed_weight(hosts, odd):
    from logra_lab.bench.ranks import alone

    expected = hidden_loss(alone(config(), odd))
    hosts.form(config(), odd, 2)
    for found in hosts.run(hidden_loss):
        torch.testing.assert_close(found, expected, rtol=CLOSE, atol=1e-12)


class Sizes(TorchDispatchMode):
    """Operators that give a new [rows, k] tensor of a target, whole or this rank's rows of it."""

    def __init__(self, shapes):
        super().__init__()
        self.shapes, self.found = shapes, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tensors((args, kwargs))}
        for x in tensors(out):
            if tuple(x.shape) in self.shapes and x.untyped_storage().data_ptr() not in given:
                self.found.add(str(func))
        return out


def tensors(tree):
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [getattr(x, "_local_tensor", x) for x in leaves if isinstance(x, torch.Tensor)]


def large_temporaries(rank):
    layers = rank.learner.sketch.layers.values()
    shapes = {(n, layer.site.k) for layer in layers for n in (layer.d, len(layer.S)) if n}
    shapes |= {(k, d) for d, k in shapes}
    with Sizes(shapes) as mode:
        rank.trainer.update(fresh=True)
    with Sizes(shapes) as control:
        next(iter(layers)).weight.clone()
    return mode.found, control.found


def test_no_d_by_k_temporary_beyond_the_gather(hosts, tmp_path, batch):
    """With sizes that no activation, sketch or Gram matrix shares."""
    sizes = {"hidden_size": 38, "intermediate_size": 46, "num_attention_heads": 17}
    path = folder(tmp_path, **sizes)
    settings = config(wire="int8", kl_method="fd")
    hosts.form(settings, path, 2)
    hosts.all("load", deal(batch, settings, 2))
    for found, control in hosts.run(large_temporaries):
        assert found == set()
        assert control == {"aten.clone.default"}


def test_a_full_disk_on_one_rank_is_an_os_error_on_all_and_the_next_save_works(hosts, tmp_path):
    """dcp's own exception is no Exception: Ray would take the ranks for dead."""
    import ray

    from logra_lab.bench.mischief import starve

    hosts.form(config(), SMALL_FOLDER, 2, "float32")
    pid = hosts.all("describe")[0]["pid"]
    starve(pid)
    saves = [rank.save.remote(str(tmp_path / "no")) for rank in hosts.now]
    for save in saves:
        with pytest.raises(ray.exceptions.RayTaskError) as caught:
            ray.get(save, timeout=60)
        assert isinstance(caught.value.cause, OSError)
        assert "rank 0" in str(caught.value.cause)
    starve(pid, resource.RLIM_INFINITY)
    hosts.all("save", str(tmp_path / "yes"))
    assert (tmp_path / "yes" / ".metadata").is_file()


# --- one decision --------------------------------------------------------------------------------


def test_ranks_of_very_different_local_kl_take_the_same_alpha_of_the_weighted_mean(hosts, odd):
    """A rank that took its own α, or weighted ranks and not tokens, is found; no hang (200 s)."""
    settings = config()
    samples = unlike(odd)
    pieces = [[sample] for sample in samples]
    tokens = sum(len(s.response) for s in samples)
    local = []
    for piece in pieces:
        share = Share(pieces, [piece], samples[0], tokens)
        local.append(one_process(settings, odd, samples, [share])[0])
    low, high = sorted(local, key=lambda seen: seen.kl)
    assert high.kl > 2 * low.kl
    whole, before = one_process(settings, odd, samples, [Share(pieces, pieces, samples[0], tokens)])
    hosts.form(settings, odd, 2)
    hosts.all("load", [Share([piece], [piece], samples[0], tokens) for piece in pieces])
    from logra_lab.bench.ranks import watch_rank

    one, two = hosts.run(watch_rank)
    assert one.alpha == two.alpha
    assert low.kl < one.kl < high.kl
    weighted = sum(x.kl * len(s.response) for x, s in zip(local, samples, strict=True)) / tokens
    assert one.kl == pytest.approx(weighted, rel=CLOSE)
    assert_close(one, whole, before)


def unlike(path):
    """Two samples, one long and one of a single token."""
    torch.manual_seed(3)
    long = torch.randint(2, 50, (9,)).tolist()
    rows = [([5, 6, 7], long, 0.5), ([11], [30], -0.5)]
    return [Sample(p, r, torch.full((len(r),), -4.0), "stop", a) for p, r, a in rows]


def state(rank):
    learner = rank.learner
    rows = {name: weight.to_local().clone() for name, weight in weights(rank).items()}
    return rows, learner.v.clone(), learner.t, learner.draw, float(learner.sketch.flat.abs().sum())


def weights(rank):
    return dict(rank.trainer.policy.model.named_parameters())


def same(a, b):
    return all(torch.equal(a[0][n], b[0][n]) for n in a[0]) and torch.equal(a[1], b[1])


@pytest.mark.parametrize("where", ["logprobs", "sketch"])
def test_nan_on_one_rank_makes_all_skip_and_changes_nothing(hosts, odd, batch, where):
    import ray

    from logra_lab.bench.mischief import spoil

    settings = config()
    hosts.form(settings, odd, 3)
    before = hosts.run(state)
    spoilt = list(batch)
    if where == "logprobs":
        bad = batch[0]
        nan = torch.full_like(bad.logprobs, math.nan)
        spoilt[0] = Sample(bad.prompt, bad.response, nan, bad.finish, bad.advantage)
    else:
        ray.get(hosts.now[1].__ray_call__.remote(spoil))
    skipped = {seen.skipped for seen in hosts.step(spoilt, settings)}
    assert len(skipped) == 1
    assert "nan" in skipped.pop()
    after = hosts.run(state)
    assert all(same(a, b) and a[2:] == b[2:] for a, b in zip(after, before, strict=True))
    assert all(x[4] == 0 for x in after)  # and the sketch is empty
    expected, weights_before = one_process(settings, odd, batch)
    for seen in hosts.step(batch, settings):  # as if nothing had been
        assert_close(seen, expected, weights_before)
