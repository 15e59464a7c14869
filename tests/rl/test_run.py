"""One training step: what it draws, what it changes, and what it leaves alone when it skips.

The small shipped policy and a scorer in this process; the loss and the update themselves are
tested in `test_ppo.py` and `test_optimizer.py`.
"""

import math
import random
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch
import transformers as hf
from transformers.modeling_layers import GradientCheckpointingLayer

from logra_lab import probe
from logra_lab.errors import InputError
from logra_lab.rl import ppo
from logra_lab.rl.policies import make_policy
from logra_lab.rl.rollout import Rollout
from logra_lab.rl.run import draw_batch
from logra_lab.rl.tasks import load_task

shared = runpy.run_path(str(Path(__file__).with_name("training.py")))
CORRECT, WRONG, TIMEOUT, ERROR = (shared[n] for n in ("CORRECT", "WRONG", "TIMEOUT", "ERROR"))
tiny_run, snapshot, same, numbers = (shared[n] for n in ("tiny_run", "snapshot", "same", "numbers"))
alternate = shared["alternate"]
METHODS = ["logra", "adam", "lora"]


def always(score):
    return lambda text, problem, row: score


# --- the batch ------------------------------------------------------------------------------


def test_every_epoch_is_a_new_order_of_all_problems_and_steps_continue_where_the_last_ended():
    task = load_task("sums", size=10, seed=2)
    steps = [[p.id for p in draw_batch(task, 5, step, 4)] for step in range(1, 6)]
    drawn = [name for step in steps for name in step]
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == sorted(p.id for p in task)
    assert drawn[:10] != drawn[10:20]
    assert steps[2] == [p.id for p in draw_batch(task, 5, 3, 4)]  # of the step alone
    assert steps[0] != [p.id for p in draw_batch(task, 6, 1, 4)]


def test_drawing_a_batch_leaves_the_global_generator_alone():
    task = load_task("sums", size=10, seed=2)
    random.seed(0)
    expected = random.random()
    random.seed(0)
    draw_batch(task, 0, 1, 25)  # a batch longer than the task
    assert random.random() == expected


def test_sampling_keys_name_run_step_problem_and_sample():
    run = tiny_run(seed=7)
    a, b = run.train[0], run.train[1]
    assert run.sampling_keys([a, b, a], 3) == [f"7:3:{a.id}:0", f"7:3:{b.id}:0", f"7:3:{a.id}:1"]


# --- a taken step ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_the_record_tells_what_the_batch_and_the_step_were(method):
    run = tiny_run(alternate, method=method)
    lines = [run.one_step() for _ in range(3)]
    for number, line in enumerate(lines, 1):
        assert line["skipped"] is None
        assert (line["step"], line["version"], line["t"]) == (number, number, number)
        assert line["outcomes"] == {"correct": 12, "wrong": 12}
        assert (line["reward_mean"], line["baseline"]) == (0.5, pytest.approx(0.5))
        assert line["advantage_max"] == pytest.approx(0.5)
        assert line["kl_realised"] > 0  # of every step, in all methods
        assert line["ratio_max"] == pytest.approx(1.0, abs=1e-4)  # on policy
        assert line["clip_share"] == 0
        assert abs(line["logprob_gap"]) < 1e-5
        assert line["tokens"] == pytest.approx(24 * line["response_tokens_mean"])
        assert line["warnings"] == []
    assert (run.baseline.count, run.version) == (3, 3)


def test_the_baseline_of_a_step_is_made_of_earlier_batches():
    by_step = {1: 6, 2: 18, 3: 12}  # rows judged correct, of 24
    run = tiny_run(lambda text, problem, row: CORRECT if row < by_step[run.step] else WRONG)
    b = [run.one_step()["baseline"] for _ in range(3)]
    assert b == pytest.approx([0.25, 0.25, (0.9 * 0.25 + 0.75) / 1.9])


def test_realised_kl_agrees_with_a_measurement_outside_the_loop():
    run = tiny_run(alternate, probe_responses=24, kl_start=1e-4, kl_method="jvp")
    seen = {}
    load = run.trainer.load

    def spy(shares):
        samples = [sample for piece in shares[0].probe for sample in piece]
        seen["batch"] = ppo.token_batch(samples, run.policy.pad_id)
        seen["before"] = seen["batch"].logits(run.policy.model).detach()
        load(shares)

    run.trainer.load = spy
    line = run.one_step()
    with torch.no_grad():
        old = torch.log_softmax(seen["before"].double(), -1)
        new = torch.log_softmax(seen["batch"].logits(run.policy.model).double(), -1)
    expected = (old.exp() * (old - new)).sum(-1).mean().item()
    assert line["kl_realised"] == pytest.approx(expected, rel=2e-2)
    assert line["kl_predicted"] == pytest.approx(1e-4, rel=1e-5)
    assert line["kl_realised"] == pytest.approx(1e-4, rel=0.3)


def test_probe_tokens_cut_each_probe_response_and_nothing_of_the_loss():
    run = tiny_run(alternate, probe_responses=4, probe_tokens=2)
    seen = {}
    load, generate = run.trainer.load, run.engine.generate

    def keep(prompts, keys):
        seen["rollout"] = generate(prompts, keys)
        return seen["rollout"]

    def spy(shares):
        load(shares)
        seen["positions"] = sum(len(look()) for look in run.trainer.looks)

    run.engine.generate, run.trainer.load = keep, spy
    line = run.one_step()
    first = [len(ids) for ids in seen["rollout"].response_ids if ids][:4]
    assert seen["positions"] == sum(min(2, length) for length in first) <= 8
    assert line["tokens"] > 24


def test_two_updates_a_batch_make_the_clip_bind_and_each_has_its_own_draw_and_version(monkeypatch):
    run = tiny_run(alternate, updates_per_batch=2, update_ratio=0.05, clip=0.05)
    passes, draws = [], []
    loss, step = ppo.ppo_loss, run.learner.step

    def keep_logits(logits, batch, **settings):
        logits.retain_grad()
        passes.append((logits, batch, settings["stats"]))
        return loss(logits, batch, **settings)

    def keep_draw(probe, *, gap):
        before = {n: w.clone() for n, w in run.learner.weights().items()}
        draw = run.learner.draw
        signs = run.learner.sketch.sites[0].projection.matrix().clone()
        report = step(probe, gap=gap)
        moved = any(not torch.equal(w, before[n]) for n, w in run.learner.weights().items())
        draws.append((draw, signs, moved, report.kl_realised))
        return report

    monkeypatch.setattr(ppo, "ppo_loss", keep_logits)
    monkeypatch.setattr(run.learner, "step", keep_draw)
    line = run.one_step()
    assert line["skipped"] is None
    assert (line["version"], run.learner.t, run.baseline.count) == (2, 2, 1)
    (draw1, signs1, moved1, kl1), (draw2, signs2, moved2, kl2) = draws
    assert (draw1, draw2, run.learner.draw) == (1, 2, 3)
    assert not torch.equal(signs1, signs2)
    assert moved1
    assert moved2
    assert min(kl1, kl2) > 0

    assert line["clip_share"] > 0
    assert line["ratio_max"] > 1.05
    (first, batch1, stats1), (second, batch2, stats2) = passes
    assert stats1.clipped == 0
    assert batch1 is batch2  # the rollout's own log-probabilities both times
    logp = torch.log_softmax(second.detach(), -1).gather(1, batch2.labels[:, None])[:, 0]
    ratio, A = torch.exp(logp - batch2.logprobs), batch2.advantages
    bound = ((A > 0) & (ratio > 1.05)) | ((A < 0) & (ratio < 0.95))
    assert bound.sum().item() == stats2.clipped > 0
    assert (~bound).any()
    assert line["clip_share"] == pytest.approx(bound.float().mean().item())
    assert second.grad[bound].abs().max() == 0
    assert (second.grad[~bound].abs().amax(1) > 0).all()
    assert (first.grad.abs().amax(1) > 0).all()


def test_a_response_that_was_not_judged_is_in_neither_loss_nor_baseline():
    verdicts = [CORRECT, WRONG, TIMEOUT, ERROR]
    run = tiny_run(lambda text, problem, row: verdicts[row % 4])
    seen = []
    make = ppo.microbatches

    def spy(samples, limit):
        seen.append(list(samples))
        return make(samples, limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "microbatches", spy)
        line = run.one_step()
    assert line["outcomes"] == {"correct": 6, "error": 6, "timeout": 6, "wrong": 6}
    assert (line["reward_mean"], line["accuracy"]) == (0.5, 0.5)
    assert sorted(s.advantage for s in seen[0]) == [-0.5] * 6 + [0.5] * 6
    assert line["tokens"] == sum(len(s.response) for s in seen[0])
    assert run.baseline.value(0.0) == pytest.approx(0.5)


def test_training_sees_the_engines_ids_and_never_encodes_the_text_again():
    run = tiny_run(alternate)
    generate, encode = run.engine.generate, run.policy.encode
    allowed = {p.prompt for p in run.train}
    seen = {}

    def spy(prompts, keys):
        seen["rollout"] = generate(prompts, keys)
        return seen["rollout"]

    def refuse(text):
        assert text in allowed, f"{text!r} was encoded: retokenised"
        return encode(text)

    run.engine.generate, run.policy.encode = spy, refuse
    labels = []
    make = ppo.token_batch
    with pytest.MonkeyPatch.context() as patch:

        def keep(samples, *rest, **settings):
            labels.append([s.response for s in samples])
            return make(samples, *rest, **settings)

        patch.setattr(ppo, "token_batch", keep)
        assert run.one_step()["skipped"] is None
    assert sorted(labels[0]) == sorted(seen["rollout"].response_ids)


def test_microbatch_size_changes_the_step_by_no_more_than_rounding():
    whole, cut = tiny_run(alternate), tiny_run(alternate, microbatch_tokens=30)
    lines = whole.one_step(), cut.one_step()
    for name in ("loss", "sketch_norm", "update_norm", "entropy", "kl_realised"):
        assert lines[0][name] == pytest.approx(lines[1][name], rel=1e-3), name
    assert lines[0]["tokens"] == lines[1]["tokens"]
    for name, weight in whole.learner.weights().items():
        torch.testing.assert_close(weight, cut.learner.weights()[name], atol=1e-5, rtol=0)


# --- skipped steps --------------------------------------------------------------------------


def broken_logprobs(run, patch):
    generate = run.engine.generate

    def nan(prompts, keys):
        out = generate(prompts, keys)
        out.logprobs[3] = out.logprobs[3] * float("nan")
        return out

    patch.setattr(run.engine, "generate", nan)


def gradient_times(factor):
    """The loss stays as it is; the gradient below the last norm is multiplied."""

    def fault(run, patch):
        def multiply(module, args, output):
            if output.requires_grad:
                output.register_hook(lambda g: g * factor)

        base = getattr(run.policy.model, "base_model", run.policy.model)
        norm = next(m for n, m in base.named_modules() if n.endswith("norm") and "layers" not in n)
        handle = norm.register_forward_hook(multiply)
        run.mend = handle.remove

    return fault


def no_tokens(run, patch):
    def generate(prompts, keys):
        n = len(prompts)
        return Rollout(prompts, [[]] * n, [torch.zeros(0)] * n, ["length"] * n, [""] * n)

    patch.setattr(run.engine, "generate", generate)


def unpredictable(run, patch):
    patch.setattr(probe, "variance_kl", lambda z, *_: torch.full(z.shape[:1], torch.nan))


def judging(score):
    return lambda run, patch: patch.setattr(run.scorer, "rule", always(score))


FAULTS = {
    "all timeouts": (judging(TIMEOUT), "no generated tokens of a judged response", METHODS),
    "all errors": (judging(ERROR), "no generated tokens of a judged response", METHODS),
    "no tokens": (no_tokens, "no generated tokens of a judged response", METHODS),
    "equal rewards": (judging(CORRECT), r"max\|A\| is 0.0e\+00", METHODS),
    "loss not finite": (broken_logprobs, "the loss is nan", METHODS),
    "gradient not finite": (gradient_times(math.inf), "not finite|norm is (nan|inf)", METHODS),
    "zero gradient": (gradient_times(0.0), "sketch is zero|norm is 0.0", METHODS),
    "prediction not finite": (unpredictable, r"predicted KL\(1\) is nan", ["logra"]),
}


@pytest.mark.parametrize(
    ("name", "method"), [(n, m) for n, (_, _, methods) in FAULTS.items() for m in methods]
)
def test_a_skipped_step_leaves_no_trace_but_its_reason(name, method):
    fault, reason, _ = FAULTS[name]
    settings = {"method": method, "prompts_per_step": 8, "kl_method": "jvp"}
    run, clean = tiny_run(alternate, **settings), tiny_run(alternate, **settings)
    run.mend = lambda: None
    before = snapshot(run)
    with pytest.MonkeyPatch.context() as patch:
        fault(run, patch)
        line = run.one_step()
        run.mend()
    run.scorer.rule = alternate
    assert line["skipped"] is not None
    assert re.search(reason, line["skipped"])
    assert (line["version"], line["t"], line.get("alpha")) == (0, 0, None)
    assert line.get("kl_realised") is None
    assert same(snapshot(run), before)
    # The next step is that of a run which never met the fault.
    clean.step = 1
    expected, then = clean.one_step(), run.one_step()
    assert then["skipped"] is None
    assert numbers(then) == numbers(expected)
    assert same(snapshot(run), snapshot(clean))


@pytest.mark.parametrize(("mean", "taken"), [(0.9995, False), (0.998, True)])
def test_an_advantage_below_a_thousandth_is_no_signal(mean, taken):
    run = tiny_run(always(CORRECT), prompts_per_step=4)
    run.baseline.ema, run.baseline.count = 0.1 * mean, 1
    line = run.one_step()
    assert line["advantage_max"] == pytest.approx(1 - mean)
    assert (line["skipped"] is None) is taken
    assert run.baseline.count == (2 if taken else 1)


def test_a_further_update_that_is_skipped_is_a_warning_on_a_step_that_was_taken():
    run = tiny_run(alternate, updates_per_batch=2)
    step, calls = run.learner.step, []

    def second_fails(probe, *, gap):
        calls.append(1)
        if len(calls) == 2:
            run.learner.sketch.flat.fill_(torch.nan)
        return step(probe, gap=gap)

    run.learner.step = second_fails
    line = run.one_step()
    assert (line["skipped"], line["version"], run.baseline.count) == (None, 1, 1)
    assert "a further update was skipped" in line["warnings"][0]


def warned(run, steps):
    """The steps whose record warns of no learning signal."""
    out = []
    for _ in range(steps):
        line = run.one_step()
        if any("no learning signal" in w for w in line["warnings"]):
            out.append(line["step"])
    return out


FAST = {"prompts_per_step": 2, "max_new_tokens": 1, "kl_method": "off"}


def test_the_twentieth_batch_of_identical_rewards_warns_and_not_the_nineteenth():
    assert warned(tiny_run(always(WRONG), **FAST), 41) == [20, 40]


def test_identical_rewards_warn_although_the_baseline_was_another():
    run = tiny_run(always(CORRECT), **FAST)
    run.baseline.ema, run.baseline.count = 0.05, 1
    assert warned(run, 21) == [20]
    assert run.version > 15  # these steps were taken


def test_one_batch_with_two_rewards_starts_the_count_again():
    run = tiny_run(lambda text, problem, row: CORRECT if run.step == 15 and row else WRONG, **FAST)
    assert warned(run, 36) == [35]


def test_unjudged_batches_count_as_no_signal():
    assert warned(tiny_run(always(TIMEOUT), **FAST), 21) == [20]


def test_batches_of_one_with_rewards_that_differ_learn_and_do_not_warn():
    rule = lambda text, problem, row: CORRECT if run.step % 2 else WRONG  # noqa: E731
    run = tiny_run(rule, **FAST | {"prompts_per_step": 1})
    run.baseline.ema, run.baseline.count = 0.05, 1
    assert warned(run, 25) == []
    assert run.version == 25
    assert math.isfinite(run.baseline.ema)


# --- checkpointed activations ---------------------------------------------------------------


def test_a_fresh_run_of_batches_of_one_is_not_silent_for_ever():
    """Field report I6, rewards 1, 0, 1, 1: the first is its own baseline (A = 0, skipped), the
    second is judged against 1, the third against the bias-corrected (0.1·0 + 0.9·0.1·1)/0.19."""
    rewards = iter([CORRECT, WRONG, CORRECT, CORRECT])
    run = tiny_run(lambda *_: next(rewards), prompts_per_step=1)
    lines = [run.one_step() for _ in range(4)]
    assert lines[0]["skipped"] is not None
    assert [line["skipped"] for line in lines[1:]] == [None] * 3
    ema = [0.1, 0.09, 0.181]  # 0.9·m + 0.1·r
    expected = [1.0, *(m / (1 - 0.9 ** (i + 1)) for i, m in enumerate(ema))]
    assert [line["baseline"] for line in lines] == pytest.approx(expected)
    assert run.version == 3


def dropout_policy():
    """A model whose attention would drop half of everything in training mode."""
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, attention_dropout=0.5, eos_token_id=1,
        pad_token_id=0, max_position_embeddings=64,
    )  # fmt: skip

    class Characters:
        chat_template, eos_token_id, pad_token_id = None, 1, 0

        def __call__(self, text):
            return type("Encoded", (), {"input_ids": [ord(c) % 64 for c in text]})

        def decode(self, ids, **_):
            return " ".join(map(str, ids))

    return make_policy(hf.Qwen2ForCausalLM(config), Characters(), "dropout")


@pytest.mark.parametrize("method", METHODS)
def test_recomputed_layers_give_the_same_step_run_twice_forward_and_let_the_probe_through(
    method, monkeypatch
):
    calls = []
    forward = hf.models.qwen2.modeling_qwen2.Qwen2DecoderLayer.forward

    def counted(self, *args, **kwargs):
        calls.append(torch.is_grad_enabled())
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(hf.models.qwen2.modeling_qwen2.Qwen2DecoderLayer, "forward", counted)
    results = {}
    for mode in ("none", "non_reentrant", "reentrant"):
        budget = {"kl_start": 1e-4} if method == "logra" else {}
        run = tiny_run(
            alternate,
            dropout_policy(),
            method=method,
            checkpointing=mode,
            kl_method="jvp",
            **budget,
        )
        calls.clear()
        with warnings.catch_warnings():
            # A probe that falls back, and a checkpoint that cuts the graph, say so in a warning.
            warnings.filterwarnings("error", message="no forward-mode rule|None of the inputs")
            lines = [numbers(run.one_step()) for _ in range(2)]
        assert all(line["skipped"] is None and line["kl_realised"] > 0 for line in lines)
        results[mode] = lines, {n: w.clone() for n, w in run.learner.weights().items()}
        results[mode, "forwards"] = len(calls)
        assert not any(m.training for m in run.policy.model.modules())
        assert not any(
            m.gradient_checkpointing
            for m in run.policy.model.modules()
            if isinstance(m, GradientCheckpointingLayer)
        )
    for mode in ("non_reentrant", "reentrant"):
        # 3 layers, 2 steps, 1 microbatch: each training forward of a layer runs once more
        assert results[mode, "forwards"] == results["none", "forwards"] + 6
        for plain, line in zip(results["none"][0], results[mode][0], strict=True):
            for name in ("loss", "sketch_norm", "kl_realised", "kl_predicted", "ratio_max"):
                near = pytest.approx(plain[name], rel=1e-4) if plain[name] else plain[name]
                assert line[name] == near, name
        for name, weight in results["none"][1].items():
            torch.testing.assert_close(results[mode][1][name], weight, atol=1e-6, rtol=0)


def test_bfloat16_autocast_trains_float32_weights_and_shows_the_mismatch():
    run = tiny_run(alternate, autocast="bfloat16", subtract_mismatch=True, kl_start=1e-3)
    line = run.one_step()
    assert line["skipped"] is None
    assert all(w.dtype == torch.float32 for w in run.learner.weights().values())
    assert 0 < abs(line["logprob_gap"]) < 0.1
    assert line["mismatch"] == pytest.approx(0.3 * max(0.0, line["logprob_gap"]))
    assert line["kl_budget"] == pytest.approx(max(1e-3 - line["mismatch"], 5e-4))


# --- state ----------------------------------------------------------------------------------


def test_state_is_refused_as_a_whole_when_the_policy_is_another():
    run = tiny_run(alternate)
    run.one_step()
    state = run.state_dict()
    other = tiny_run(alternate)
    with torch.no_grad():
        other.policy.model.get_input_embeddings().weight.mul_(1.01)
    changed = tiny_run(alternate, other.policy)
    before = snapshot(changed)
    with pytest.raises(InputError, match=r"frozen weights have norm .* load the same policy"):
        changed.load_state_dict(state)
    assert same(snapshot(changed), before)

    shape = tiny_run(alternate, dropout_policy())
    before = snapshot(shape)
    with pytest.raises(InputError, match="checkpoint and model differ in"):
        shape.load_state_dict(state)
    assert same(snapshot(shape), before)


@pytest.mark.parametrize(
    "change", [{"rank": 4}, {"seed": 1, "temperature": 0.9}, {"targets": ("q_proj",)}]
)
def test_state_is_refused_with_the_names_of_the_settings_that_differ(change):
    run, other = tiny_run(alternate), tiny_run(alternate, **change)
    with pytest.raises(InputError, match=f"other settings: {', '.join(change)} differ"):
        other.load_state_dict(run.state_dict())


def test_steps_may_grow_on_resume_unless_the_budget_anneals_over_them():
    tiny_run(steps=9).load_state_dict(tiny_run(steps=3).state_dict())
    annealed = {"kl_start": 1e-3, "kl_end": 1e-4}
    with pytest.raises(InputError, match="steps differ"):
        tiny_run(steps=9, **annealed).load_state_dict(tiny_run(steps=3, **annealed).state_dict())
    annealed["kl_horizon"] = 3
    tiny_run(steps=9, **annealed).load_state_dict(tiny_run(steps=3, **annealed).state_dict())


def test_a_file_that_holds_no_run_is_refused_by_what_it_lacks():
    with pytest.raises(InputError, match=r"no checkpoint of a run: it lacks \['baseline'"):
        tiny_run().load_state_dict({"step": 3, "config": {}})
