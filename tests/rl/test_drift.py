"""Followers of a short real run against the same steps written out, and gaps with old caches."""

import copy

import pytest
import torch
import torch.nn.functional as F

from logra_lab.errors import InputError
from logra_lab.lab.presets import preset
from logra_lab.rl.drift import Follower, follow, rewired
from logra_lab.rl.gaps import gaps
from logra_lab.rl.loop import load_tasks, preset_config
from logra_lab.rl.policies import load_policy
from logra_lab.rl.rollout import HFEngine
from logra_lab.sketch import TARGETS, find_targets

STEPS, PROBES = 3, 6
EXACT, PLAIN = Follower("bfloat16", "exact"), Follower("bfloat16", "plain")
SAME = Follower("float32", "exact")


def config(**settings):
    few = {"steps": STEPS, "prompts_per_step": 16, "eval_problems": 8, "measure_kl": False}
    return preset_config(preset("smoke"), **(few | settings))


def weights_of(model):
    return {name: module.weight.data for name, module in find_targets(model, TARGETS).items()}


@pytest.fixture(scope="module")
def policy():
    return load_policy("small")


@pytest.fixture(scope="module")
def raced(policy):
    """(rows, updates) of a run whose trainer applies float32 factors."""
    before = {name: weight.clone() for name, weight in weights_of(policy.model).items()}
    updates, lines = [], []
    rows = follow(
        policy,
        config(wire="float32"),
        [EXACT, PLAIN, SAME],
        probes=PROBES,
        every=2,
        on_update=updates.append,
        on_step=lines.append,
    )
    assert [line["version"] for line in lines] == [1, 2, 3]
    for name, weight in weights_of(policy.model).items():
        assert torch.equal(weight, before[name])  # a copy was trained
    return rows, updates


def last(rows, follower):
    (row,) = [r for r in rows if r["follower"] == follower.name and r["step"] == STEPS]
    return row


def by_hand(policy, updates, *, plain, wire=None):
    """Weights after all updates, with whole matrices A; `plain` keeps bfloat16 after each step."""
    weights = {name: weight.clone() for name, weight in weights_of(policy.model).items()}
    for update in updates:
        sent = update if wire is None else rewired(update, wire)
        for name, weight in weights.items():
            weight -= sent.factor(name) @ sent.projection(sent.places[name][1]).unit()
            if plain:
                weight.copy_(weight.bfloat16())
    return weights


def served(policy, weights):
    """The policy with these targets, everything cast to bfloat16, computing in float64."""
    model = copy.deepcopy(policy.model)
    for name, weight in weights_of(model).items():
        weight.copy_(weights[name])
    return model.bfloat16().double()


def test_comparisons_come_every_so_many_steps_and_at_the_end(raced):
    rows, _ = raced
    assert [row["step"] for row in rows] == [2] * 3 + [3] * 3
    assert {row["weights"] for row in rows} == {786_432}  # 4 blocks of 128 × 1536


def test_whoever_gets_what_the_trainer_applied_does_not_drift(raced):
    row = last(raced[0], SAME)
    for measure in ("differing", "max_error", "relative_error", "logprob_gap", "kl"):
        assert row[measure] == 0, measure


def test_the_int8_wire_followed_in_both_serving_types_does_not_drift(policy):
    rows = follow(policy, config(steps=2), [Follower(), Follower(dtype=torch.float32)], probes=2)
    assert len(rows) == 4
    assert {row["differing"] for row in rows} == {0}


@pytest.mark.parametrize("follower", [EXACT, PLAIN], ids=lambda x: x.mode)
def test_drift_is_that_of_the_steps_written_out(policy, raced, follower):
    rows, updates = raced
    row = last(rows, follower)
    right = by_hand(policy, updates, plain=False)
    mine = by_hand(policy, updates, plain=follower.mode == "plain", wire="bfloat16")
    gap = torch.cat([(mine[n].bfloat16().float() - right[n].bfloat16()).flatten() for n in right])
    moved = torch.cat([(w - right[n]).flatten() for n, w in weights_of(policy.model).items()])
    # Whole products sum in another order than blocks: a few roundings fall the other way.
    assert row["differing"] == pytest.approx(int((gap != 0).sum()), rel=0.02)
    assert row["relative_error"] == pytest.approx((gap.norm() / moved.norm()).item(), rel=0.02)
    assert row["max_error"] == pytest.approx(gap.abs().max().item(), rel=0.02)

    problems = load_tasks(config())[1].problems[:PROBES]
    engine = HFEngine(policy, max_new_tokens=16, temperature=1.0)
    rollout = engine.generate(
        [policy.encode(p.prompt) for p in problems], [f"drift:{p.id}" for p in problems]
    )
    pair, kl, chosen = [served(policy, w) for w in (right, mine)], [], []
    for prompt, response in zip(rollout.prompt_ids, rollout.response_ids, strict=True):
        ids = torch.tensor([prompt + response])
        with torch.no_grad():
            p, q = (m(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for m in pair)
        kl.append(F.kl_div(q, p, reduction="none", log_target=True).sum(-1))
        chosen.append((p - q).gather(1, ids[0, len(prompt) :, None])[:, 0].abs())
    # Float32 logits of a few units, to 2⁻²³ of them, on gaps of 1e-5 and more.
    assert row["logprob_gap"] == pytest.approx(torch.cat(chosen).mean().item(), rel=0.1)
    assert row["kl"] == pytest.approx(torch.cat(kl).mean().item(), rel=0.2, abs=1e-10)


def test_an_int8_factor_is_a_bfloat16_factor(policy):
    """8 bits of significand hold every integer up to 256."""
    updates = []
    follow(policy, config(steps=1), [Follower()], probes=1, on_update=updates.append)
    (update,) = updates
    again = rewired(update, "bfloat16")
    assert again.values.dtype == torch.bfloat16
    assert all(torch.equal(again.factor(x.name), update.factor(x.name)) for x in update.layers)
    assert rewired(update, "int8") is update


@pytest.mark.parametrize("settings", [{"engine": "hf"}, {"method": "adam"}])
def test_runs_without_thin_updates_or_with_an_engine_of_their_own_are_refused(policy, settings):
    with pytest.raises(InputError, match="drift of method"):
        follow(policy, config(**settings), [Follower()])


def test_gaps_see_the_model_the_temperature_and_whose_keys_were_kept(policy):
    engine = HFEngine(policy, max_new_tokens=8, temperature=0.7)
    prompts = [policy.encode("12+34="), policy.encode("7+8=")]
    rollout = engine.generate(prompts, ["a", "b"])
    other = copy.deepcopy(policy.model)
    for weight in weights_of(other).values():
        weight.mul_(1.1)
    right = gaps(policy.model, rollout, temperature=0.7)
    assert len(right) == sum(map(len, rollout.response_ids))
    assert right.max() < 1e-4  # float32
    assert gaps(policy.model, rollout).max() > 1e-2  # the wrong temperature
    assert gaps(other, rollout, temperature=0.7).max() > 1e-2
    kept = gaps(policy.model, rollout, temperature=0.7, prefix=(policy.model, 3))
    assert kept.max() < 1e-4
    stale = gaps(policy.model, rollout, temperature=0.7, prefix=(other, 3))
    assert stale.max() > 1e-3
