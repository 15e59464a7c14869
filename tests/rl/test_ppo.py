"""Advantage, token batches and the clipped loss, against values worked out by hand."""

import math
import runpy
from pathlib import Path

import pytest
import torch
import transformers as hf

from logra_lab.errors import InputError
from logra_lab.optimizer import LoGRA
from logra_lab.rl.policies import make_policy
from logra_lab.rl.ppo import (
    LossStats,
    RewardBaseline,
    Sample,
    judged_samples,
    microbatches,
    ppo_loss,
    token_batch,
)
from logra_lab.rl.rollout import HFEngine, Rollout
from logra_lab.rl.verifiers import Outcome, Score

rollout_tests = runpy.run_path(str(Path(__file__).with_name("test_rollout.py")))
tiny, successor, Numbers = (rollout_tests[n] for n in ("tiny", "successor", "Numbers"))


def sample(prompt, response, *, logprobs=None, finish="stop", advantage=1.0) -> Sample:
    logprobs = torch.zeros(len(response)) if logprobs is None else torch.as_tensor(logprobs)
    return Sample(list(prompt), list(response), logprobs, finish, advantage)


def random_samples(lengths, vocab=61, seed=0) -> list[Sample]:
    """Samples whose rollout log-probabilities are near uniform, so that ratios spread."""
    g = torch.Generator().manual_seed(seed)
    out = []
    for i, n in enumerate(lengths):
        ids = torch.randint(0, vocab, (n + 3,), generator=g).tolist()
        logprobs = -math.log(vocab) + 0.1 * torch.randn(n, generator=g)
        out.append(sample(ids[:3], ids[3:], logprobs=logprobs, advantage=(-1.0) ** i))
    return out


def loss_of(logits, batch, *, normaliser, temperature=1.0, clip=0.2, stats=None):
    return ppo_loss(
        logits, batch, normaliser=normaliser, temperature=temperature, clip=clip, stats=stats
    )


def on_policy(samples, vocab=7):
    """Uniform logits and a batch whose rollout log-probabilities agree: every ratio is 1."""
    exact = [
        sample(s.prompt, s.response, logprobs=[-math.log(vocab)] * len(s.response),
               finish=s.finish, advantage=s.advantage)
        for s in samples
    ]  # fmt: skip
    batch = token_batch(exact, pad_id=0)
    return torch.zeros(len(batch.labels), vocab), batch


# --- baseline -------------------------------------------------------------------------------


def test_the_first_batch_uses_its_own_mean_and_later_ones_only_earlier_batches():
    # decay 0.9, rewards 1, 0, 1, 1: weights 0.9^age over their sum, by hand
    expected = [1.0, 1.0, 0.9 / 1.9, (0.81 + 1.0) / 2.71]
    baseline = RewardBaseline(0.9)
    for reward, b in zip([1.0, 0.0, 1.0, 1.0], expected, strict=True):
        assert baseline.value(reward) == pytest.approx(b, abs=1e-12)
        baseline.update(reward)
    assert baseline.count == 4


def test_the_bias_correction_makes_a_constant_reward_its_own_baseline_at_once():
    baseline = RewardBaseline(0.9)
    for _ in range(5):
        baseline.update(0.25)
        assert baseline.value(0.9) == pytest.approx(0.25, abs=1e-12)  # not 0.1 × 0.25


def test_asking_for_the_baseline_does_not_show_it_the_batch():
    baseline = RewardBaseline(0.9)
    baseline.value(1.0)
    assert (baseline.ema, baseline.count) == (0.0, 0)
    baseline.update(0.0)
    assert baseline.value(1.0) == 0.0  # 0.0 is a mean like any other, not "no baseline yet"


# --- judged samples -------------------------------------------------------------------------


def rollout_of(responses, finish=None) -> Rollout:
    n = len(responses)
    logprobs = [torch.full((len(r),), -1.0) for r in responses]
    return Rollout([[i] for i in range(n)], responses, logprobs, finish or ["stop"] * n, [""] * n)


def test_dropping_a_row_leaves_the_others_with_their_own_rewards_and_zero_is_not_none():
    scores = [
        Score(Outcome.correct, 1.0),
        Score(Outcome.timeout, None),
        Score(Outcome.wrong, 0.0),
        Score(Outcome.correct, 0.75),
    ]
    responses = [[4], [5, 5], [6, 6, 6], [4, 5, 6, 4]]
    kept = judged_samples(rollout_of(responses), scores, baseline=0.25)
    assert [s.prompt for s in kept] == [[0], [2], [3]]
    assert [s.response for s in kept] == [responses[0], responses[2], responses[3]]
    assert [s.advantage for s in kept] == [0.75, -0.25, 0.5]
    assert [len(s.logprobs) for s in kept] == [1, 3, 4]


def test_a_truncated_response_is_scored_like_any_other():
    scores = [Score(Outcome.unparsable, 0.0), Score(Outcome.correct, 1.0)]
    kept = judged_samples(rollout_of([[4, 4], [5]], ["length", "stop"]), scores, 0.5)
    assert [(s.finish, s.advantage) for s in kept] == [("length", -0.5), ("stop", 0.5)]


def test_a_missing_log_probability_is_refused_and_never_padded():
    rollout = rollout_of([[4, 5], [6, 6, 6]])
    rollout.logprobs[1] = rollout.logprobs[1][:2]
    scores = [Score(Outcome.correct, 1.0)] * 2
    with pytest.raises(InputError, match=r"response 1 has 3 token ids but 2 log-prob"):
        judged_samples(rollout, scores, 0.0)


def test_a_response_without_tokens_is_left_out():
    kept = judged_samples(rollout_of([[], [5]]), [Score(Outcome.wrong, 0.0)] * 2, 0.5)
    assert [s.prompt for s in kept] == [[1]]


# --- masks and positions --------------------------------------------------------------------


def test_masks_come_from_lengths_never_from_pad_or_eos_ids():
    pad = eos = 2
    rows = [
        ([7, 8], [5, 6, 7, 8], "length", [1, 1, 1, 1, 0]),  # no EOS: padding is no response
        ([2, 8], [5, 6, eos], "stop", [1, 1, 1, 0, 0]),  # pad == EOS: the EOS itself counts
        ([9], [5, pad, 6, pad, eos], "stop", [1, 1, 1, 1, 1]),  # the pad id in the middle
        ([4, 4, 4], [eos], "stop", [1, 0, 0, 0, 0]),  # length 1
    ]
    samples = [sample(p, r, finish=f, advantage=i) for i, (p, r, f, _) in enumerate(rows)]
    batch = token_batch(samples, pad)
    assert batch.mask.int().tolist() == [m for *_, m in rows]
    assert batch.input_ids.tolist() == [
        [2, 7, 8, 5, 6, 7, 8, 2],
        [2, 2, 8, 5, 6, 2, 2, 2],
        [2, 2, 9, 5, 2, 6, 2, 2],
        [4, 4, 4, 2, 2, 2, 2, 2],
    ]
    assert batch.attention_mask.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 0],
        [0, 1, 1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 0, 0, 0, 0],
    ]
    assert batch.position_ids[1, 1:6].tolist() == [0, 1, 2, 3, 4]
    assert batch.labels.tolist() == [5, 6, 7, 8, 5, 6, 2, 5, 2, 6, 2, 2, 2]
    assert batch.advantages.tolist() == [0.0] * 4 + [1.0] * 3 + [2.0] * 5 + [3.0]
    assert batch.complete.tolist() == [False] * 4 + [True] * 9


def test_rows_of_length_zero_contribute_no_token():
    batch = token_batch([sample([1], []), sample([1, 2], [3, 4])], pad_id=0)
    assert batch.mask.int().tolist() == [[0, 0], [1, 1]]
    assert batch.labels.tolist() == [3, 4]


def gpt2():
    config = hf.GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=2, n_positions=64)
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(50)  # absolute positions that matter
    return model.eval()


def token_logprobs(model, samples):
    batch = token_batch(samples, pad_id=0)
    with torch.no_grad():
        logp = torch.log_softmax(batch.logits(model), -1).gather(1, batch.labels[:, None])[:, 0]
    return list(logp.split([len(s.response) for s in samples]))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_padding_left_right_or_both_does_not_move_positions_or_attention(kind):
    model = gpt2() if kind == "gpt2" else tiny(kind, sharpness=5.0).eval()
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 61, (40,), generator=g).tolist()
    one = sample(ids[:4], ids[4:10])
    longer_prompt, longer_response = sample(ids[:9], ids[9:15]), sample(ids[:4], ids[4:15])
    with torch.no_grad():  # the definition: the sequence alone, without this library
        logits = model(torch.tensor([one.prompt + one.response]), use_cache=False).logits[0]
    rows = torch.log_softmax(logits, -1)[len(one.prompt) - 1 : -1]
    expected = rows.gather(1, torch.tensor(one.response)[:, None])[:, 0]
    crowd = [sample(ids[:n], ids[n : 2 * n]) for n in (1, 7, 12, 2)]
    for batch in (
        [one],
        [one, longer_prompt],  # 5 pads on the left
        [one, longer_response],  # 5 pads on the right
        [one, longer_prompt, longer_response, *crowd],
    ):
        torch.testing.assert_close(token_logprobs(model, batch)[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_shared_prefix_keeps_the_positions_of_every_row_behind_its_padding(kind):
    model = gpt2() if kind == "gpt2" else tiny(kind, sharpness=5.0).eval()
    ids = torch.randint(0, 61, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    rows = [sample(ids[:10] + ids[10 : 11 + n], ids[30 : 36 - n]) for n in range(5)]
    assert token_batch(rows, 0).prefix >= 10
    for row, logp in zip(rows, token_logprobs(model, rows), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([row.prompt + row.response]), use_cache=False).logits[0]
        exact = torch.log_softmax(logits, -1)[len(row.prompt) - 1 : -1]
        expected = exact.gather(1, torch.tensor(row.response)[:, None])[:, 0]
        torch.testing.assert_close(logp, expected, atol=1e-5, rtol=0)


def test_a_shift_by_one_place_would_cost_five_nats_a_token():
    model = successor(eos=(6,), pad=0, p=0.97).model.eval()
    rows = [sample([0, 1, 2], [3, 4, 5, 6, 0, 1]), sample([5], [6, 0]), sample([2, 3], [4])]
    for logp in token_logprobs(model, rows):
        # every token is the successor of the one before it: ln 0.97; any other: ln 0.005 = -5.3
        torch.testing.assert_close(logp, torch.full_like(logp, math.log(0.97)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_the_ratio_is_one_against_the_engines_own_logprobs_at_every_temperature(temperature):
    model = tiny("qwen2", sharpness=5.0).eval()
    policy = make_policy(model, Numbers(), "tiny")
    engine = HFEngine(policy, temperature=temperature, max_new_tokens=16, batch_size=5)
    prompts = [[3] * n for n in (1, 4, 2, 9, 6, 3)]
    out = engine.generate(prompts, [str(i) for i in range(6)])
    samples = judged_samples(out, [Score(Outcome.correct, 1.0)] * 6, 0.0)
    batch, stats = token_batch(samples, policy.pad_id), LossStats()
    with torch.no_grad():
        logits = batch.logits(model)
        loss_of(logits, batch, normaliser=stats.tokens or 1, temperature=temperature, stats=stats)
        logp = torch.log_softmax(logits / temperature, -1).gather(1, batch.labels[:, None])[:, 0]
        undivided = torch.log_softmax(logits, -1).gather(1, batch.labels[:, None])[:, 0]
    assert stats.tokens > 30
    assert torch.exp(logp - batch.logprobs).sub(1).abs().max() < 1e-4
    assert stats.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert stats.clipped == 0
    if temperature != 1.0:  # neither no temperature nor a log-probability divided by it
        assert (undivided - batch.logprobs).abs().mean() > 0.05
        assert (undivided / temperature - batch.logprobs).abs().mean() > 0.05


# --- the loss -------------------------------------------------------------------------------


def test_the_normaliser_is_the_batchs_tokens_not_a_mean_of_means_nor_a_constant_length():
    # +1 on 2 tokens, -1 on 8, all ratios 1. Global token mean (2 - 8)/10 = -0.6; mean of the two
    # answers' means 0; sum over constant length 8: (2 - 8)/16 = -0.375. The loss is its negative.
    short = sample([1], [3] * 2, advantage=1.0)
    long = sample([1], [4] * 8, advantage=-1.0)
    logits, batch = on_policy([short, long])
    assert loss_of(logits, batch, normaliser=10).item() == pytest.approx(0.6, abs=1e-6)
    parts = [loss_of(*on_policy([s]), normaliser=10).item() for s in (short, long)]
    assert parts == pytest.approx([-0.2, 0.8], abs=1e-6)
    assert sum(parts) == pytest.approx(0.6, abs=1e-6)  # however the batch is cut


def test_the_loss_does_not_depend_on_padding_width():
    pair = [sample([1], [3] * 2), sample([1], [4] * 8, advantage=-1.0)]
    wide = sample([1] * 9, [5] * 20, advantage=0.0)  # pads the others from 8 to 20
    for samples in (pair, [*pair, wide]):
        loss = loss_of(*on_policy(samples), normaliser=10)
        assert loss.item() == pytest.approx(0.6, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "flows"),
    [
        (1.5, 1.0, 1.2, False),  # already likelier than the clip allows: no more push up
        (1.5, -1.0, -1.5, True),  # likelier and bad: the full, unclipped, penalty
        (0.5, 1.0, 0.5, True),  # rarer and good: the full push up
        (0.5, -1.0, -0.8, False),  # already rarer than the clip allows: no more push down
        (1.1, 2.0, 2.2, True),  # inside the clip, where both terms are equal
        (0.9, -2.0, -1.8, True),
    ],
)
def test_the_clip_takes_the_pessimistic_side_for_both_signs(ratio, advantage, objective, flows):
    p = 0.3
    logits = torch.tensor([[math.log(p), math.log(1 - p)]], requires_grad=True)
    old = math.log(p) - math.log(ratio)
    batch = token_batch([sample([0], [0], logprobs=[old], advantage=advantage)], pad_id=1)
    stats = LossStats()
    loss = loss_of(logits, batch, normaliser=1, clip=0.2, stats=stats)
    assert loss.item() == pytest.approx(-objective, rel=1e-5)
    loss.backward()
    # d(-ratio A)/dz = -A ratio (1 - p, -(1 - p)), with p the softmax of the chosen token
    expected = -advantage * ratio * (1 - p) if flows else 0.0
    assert logits.grad[0].tolist() == pytest.approx([expected, -expected], rel=1e-5, abs=0)
    assert stats.clipped == (not flows)
    assert stats.ratio_max == pytest.approx(ratio, rel=1e-5)


def test_temperature_divides_logits_not_log_probabilities():
    z = torch.tensor([[1.0, -0.5, 2.0]])
    batch = token_batch([sample([0], [2], logprobs=[-0.3])], pad_id=0)
    t = 0.5
    p = math.exp(2 / t) / sum(math.exp(v / t) for v in z[0].tolist())
    loss = loss_of(z, batch, normaliser=1, temperature=t, clip=0.9)
    assert loss.item() == pytest.approx(-p / math.exp(-0.3), rel=1e-5)


def test_stats_are_token_sums_with_the_gap_over_completed_responses_only():
    samples = [
        sample([0], [1, 2], logprobs=[-1.0, -1.0], finish="length"),
        sample([0], [1], logprobs=[-math.log(4) + 0.25]),
    ]
    stats = LossStats()
    for s in samples:
        loss_of(torch.zeros(len(s.response), 4), token_batch([s], 0), normaliser=3, stats=stats)
    said = stats.to_dict()
    assert said["entropy"] == pytest.approx(math.log(4), rel=1e-6)  # uniform over 4
    assert said["logprob_gap"] == pytest.approx(0.25, rel=1e-5)
    assert said["ratio_max"] == pytest.approx(math.exp(-0.25), rel=1e-5)
    assert stats.tokens == 3


def test_without_a_completed_response_there_is_no_gap_rather_than_a_gap_of_zero():
    stats = LossStats()
    batch = token_batch([sample([0], [1], finish="length")], 0)
    loss_of(torch.zeros(1, 4), batch, normaliser=1, stats=stats)
    assert stats.to_dict()["logprob_gap"] is None


def test_a_microbatch_without_tokens_gives_zero_and_no_nan():
    model = tiny("llama").eval()
    batch, stats = token_batch([sample([1, 2], []), sample([3], [])], pad_id=0), LossStats()
    opt = LoGRA(model, rank=4)
    loss = loss_of(batch.logits(model), batch, normaliser=5, stats=stats)
    loss.backward()
    assert loss.item() == 0
    assert (stats.tokens, stats.loss, stats.ratio_max) == (0, 0.0, 0.0)
    assert opt.sketch.flat.abs().max() == 0
    assert all(math.isfinite(v) for v in stats.to_dict().values() if v is not None)


# --- microbatches ---------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 12, 40, 75, 10_000])
def test_microbatches_hold_every_sample_once_within_the_padded_limit(limit):
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 20, (30, 2), generator=g).tolist()
    samples = [sample([1] * p, [2] * r, advantage=float(i)) for i, (p, r) in enumerate(sizes)]
    pieces = microbatches(samples, limit)
    assert sorted(s.advantage for p in pieces for s in p) == [float(i) for i in range(30)]
    for piece in pieces:
        padded = token_batch(piece, 0).input_ids.numel()
        assert padded <= limit or len(piece) == 1
    if limit == 10_000:
        assert len(pieces) == 1
    if limit == 1:
        assert len(pieces) == 30


def cut_step(pieces, samples):
    """S and the weights after one step over `pieces`, and the step count."""
    model = tiny("qwen2", sharpness=1.0).eval()
    opt = LoGRA(model, rank=16, seed=3, update_ratio=1e-3)
    tokens = sum(len(s.response) for s in samples)
    for piece in pieces:
        batch = token_batch(piece, pad_id=0)
        loss_of(batch.logits(model), batch, normaliser=tokens).backward()
    S = opt.sketch.flat.clone()
    assert opt.step().skipped is None
    weights = torch.cat([x.module.weight.flatten() for x in opt.sketch.layers.values()])
    return S, weights, opt


def test_cutting_the_batch_changes_neither_sketch_nor_weights_nor_the_step_count():
    samples = random_samples(range(1, 13))
    whole = cut_step([samples], samples)
    before = torch.cat(
        [
            m.weight.detach().flatten()
            for n, m in tiny("qwen2", sharpness=1.0).named_modules()
            if n.endswith("proj")
        ]
    )
    assert whole[0].norm() > 0
    assert not torch.equal(whole[1], before)
    for size in (4, 1):
        pieces = [samples[i : i + size] for i in range(0, 12, size)]
        S, weights, opt = cut_step(pieces, samples)
        assert (S - whole[0]).norm() < 1e-6 * whole[0].norm()
        # RowAdam divides by row norms, so that a near-zero row turns rounding into a relative
        # error of its own: the update, not only the weight, is compared.
        assert (weights - whole[1]).abs().max() < 1e-6
        assert (weights - whole[1]).norm() < 1e-3 * (whole[1] - before).norm()
        assert (opt.t, opt.draw) == (1, 2)  # once a step, not once a microbatch
