"""The three methods behind one interface, each against its definition."""

import runpy
from pathlib import Path

import pytest
import torch
import transformers as hf

from logra_lab import kl
from logra_lab.errors import InputError
from logra_lab.optimizer import LoGRA
from logra_lab.rl.learners import make_learner
from logra_lab.rl.policies import make_policy

HERE = Path(__file__).parent
shared = runpy.run_path(str(HERE / "training.py"))
rollout_tests = runpy.run_path(str(HERE / "test_rollout.py"))
tiny, Numbers = rollout_tests["tiny"], rollout_tests["Numbers"]
tiny_config, same = shared["tiny_config"], shared["same"]
METHODS = ["logra", "adam", "lora"]
IDS = torch.arange(24).reshape(2, 12)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def learner_of(method, model=None, **settings):
    policy = make_policy(tiny(sharpness=3.0) if model is None else model, Numbers(), "tiny")
    return make_learner(policy, tiny_config(method=method, **settings)), policy


def backward(model, scale=1.0):
    logits = model(IDS, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    (scale * loss).backward()


def probe(model):
    return [lambda: model(IDS, use_cache=False).logits.flatten(0, 1)]


def test_adam_is_adamw_without_decay_on_the_target_matrices_alone():
    learner, policy = learner_of("adam", learning_rate=1e-3)
    # The definition, in float64: Kingma & Ba 2015, algorithm 1, with torch's defaults.
    b1, b2, eps, lr = 0.9, 0.999, 1e-8, 1e-3
    start = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    m = {n: torch.zeros_like(w, dtype=torch.float64) for n, w in learner.weights().items()}
    v = {n: torch.zeros_like(x) for n, x in m.items()}
    w = {n: x.double().clone() for n, x in learner.weights().items()}
    assert {n.split(".")[-2] for n in w} == set(PROJECTIONS)
    for t in (1, 2, 3):
        backward(policy.model)
        for name, parameter in policy.model.named_parameters():
            if name in w:
                g = parameter.grad.double()
                m[name] = b1 * m[name] + (1 - b1) * g
                v[name] = b2 * v[name] + (1 - b2) * g.square()
                root = (v[name] / (1 - b2**t)).sqrt() + eps
                w[name] = w[name] - lr * m[name] / (1 - b1**t) / root
            else:
                assert parameter.grad is None
        assert learner.step(None, gap=None).t == t
    for name, parameter in policy.model.named_parameters():
        if name in w:
            torch.testing.assert_close(parameter.double(), w[name], atol=2e-6, rtol=0)
            assert not torch.equal(parameter, start[name])
        else:
            assert torch.equal(parameter, start[name]), name


def test_adam_accumulates_over_microbatches_and_forgets_after_the_step():
    once, first = learner_of("adam")
    twice, second = learner_of("adam")
    backward(first.model)
    backward(second.model, 0.5)
    backward(second.model, 0.5)
    once.step(None, gap=None)
    twice.step(None, gap=None)
    for name, weight in once.weights().items():
        torch.testing.assert_close(weight, twice.weights()[name], atol=1e-6, rtol=0)
    assert all(p.grad is None for p in first.model.parameters())


def test_lora_trains_adapters_of_the_rank_and_nothing_else():
    model = tiny(sharpness=3.0)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        expected = model(IDS).logits
    learner, policy = learner_of("lora", model, rank=8, learning_rate=1e-2)
    with torch.no_grad():
        assert torch.equal(policy.model(IDS).logits, expected)  # it starts as the identity
    names = list(learner.weights())
    assert len(names) == 2 * 7 * 2  # A and B, seven matrices, two layers
    assert all("lora_A" in n or "lora_B" in n for n in names)
    assert {min(w.shape) for w in learner.weights().values()} == {8}
    assert {n for n, p in policy.model.named_parameters() if p.requires_grad} == set(names)
    for _ in range(2):
        backward(policy.model)
        assert learner.step(probe(policy.model), gap=None).kl_realised > 0
    base = policy.model.get_base_model()
    for name, parameter in base.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, start[name.replace("base_layer.", "")]), name
    assert all(w.abs().max() > 0 for w in learner.weights().values())


def test_lora_adapters_are_a_function_of_the_run_seed_and_leave_the_users_generator_alone():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    first = learner_of("lora", tiny(), seed=4)[0].weights()
    torch.manual_seed(11)
    model = tiny()  # draws from the generator itself, so the state is set again below
    torch.manual_seed(11)
    again = learner_of("lora", model, seed=4)[0].weights()
    assert torch.equal(torch.rand(3), expected)
    assert same(first, again)
    assert not same(first, learner_of("lora", tiny(), seed=5)[0].weights())


def test_logra_takes_every_setting_of_the_configuration():
    settings = {
        "rank": 4, "seed": 9, "targets": ("q_proj", "down_proj"), "share_inputs": False,
        "projection": "gaussian", "refresh": False, "update_ratio": 1e-3, "beta2": 0.5,
        "variant": "norm_preserving", "wire": "float32",
    }  # fmt: skip
    learner, policy = learner_of("logra", **settings, temperature=0.7, kl_method="off")
    direct_model = tiny(sharpness=3.0).eval()
    direct = LoGRA(direct_model, **settings)
    for _ in range(2):
        backward(policy.model)
        backward(direct_model)
        learner.step(None, gap=None)
        direct.step()
    ours = {n: m.weight for n, m in policy.model.named_modules() if n.endswith("proj")}
    theirs = {n: m.weight for n, m in direct_model.named_modules() if n.endswith("proj")}
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize(
    ("settings", "horizon"),
    [({"steps": 7}, 7), ({"steps": 7, "updates_per_batch": 2}, 14), ({"kl_horizon": 300}, 300)],
)
def test_the_budget_anneals_over_the_updates_of_the_run_unless_told(settings, horizon):
    learner, _ = learner_of("logra", kl_start=2e-4, kl_end=2e-5, temperature=0.7, **settings)
    budget = learner.control.budget
    assert budget == kl.Budget(2e-4, 2e-5, horizon)
    assert (budget(1), budget(horizon)) == (pytest.approx(2e-4), pytest.approx(2e-5))
    assert learner.control.temperature == 0.7


@pytest.mark.parametrize("method", METHODS)
def test_realised_kl_is_that_of_the_step_at_the_sampling_temperature(method):
    T = 0.7
    learner, policy = learner_of(method, temperature=T, kl_method="fd", learning_rate=1e-3)
    with torch.no_grad():
        old = probe(policy.model)[0]().double()
    backward(policy.model)
    report = learner.step(probe(policy.model), gap=None)
    with torch.no_grad():
        new = probe(policy.model)[0]().double()
    p, q = torch.log_softmax(old / T, -1), torch.log_softmax(new / T, -1)
    expected = (p.exp() * (p - q)).sum(-1).mean().item()
    assert report.kl_realised == pytest.approx(expected, rel=1e-2)
    assert expected > 1e-7


@pytest.mark.parametrize("method", METHODS)
def test_measuring_can_be_left_out_and_changes_no_weight(method):
    results = []
    for measure in (True, False):
        learner, policy = learner_of(method, measure_kl=measure, kl_method="fd")
        backward(policy.model)
        report = learner.step(probe(policy.model), gap=None)
        assert (report.kl_realised is not None) is measure
        results.append(learner.weights())
    assert same(*results)


@pytest.mark.parametrize("method", METHODS)
def test_discarded_gradients_are_gone(method):
    first, one = learner_of(method)
    second, two = learner_of(method)
    backward(one.model, 100.0)
    first.discard()
    backward(one.model)
    backward(two.model)
    first.step(None, gap=None)
    second.step(None, gap=None)
    assert same(first.weights(), second.weights())


@pytest.mark.parametrize("method", METHODS)
def test_state_and_weights_carry_a_learner_over_to_the_bit(method):
    first, one = learner_of(method)
    for _ in range(2):
        backward(one.model)
        first.step(None, gap=None)
    second, two = learner_of(method)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        for name, weight in second.weights().items():  # the very storage, not a copy of it
            weight.copy_(first.weights()[name])
    for learner, policy in ((first, one), (second, two)):
        backward(policy.model)
        assert learner.step(None, gap=None).t == 3
    assert same(first.weights(), second.weights())
    assert same(first.state_dict(), second.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_targets_that_the_model_lacks_are_named(method):
    with pytest.raises(InputError, match=r"\['qproj'\] name no linear layer of Qwen2ForCausalLM"):
        learner_of(method, targets=("qproj",))


@pytest.mark.parametrize("method", METHODS)
def test_a_model_without_linear_targets_is_refused(method):
    config = hf.GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2, eos_token_id=1)
    with pytest.raises(InputError, match="name no linear layer of GPT2LMHeadModel"):
        learner_of(method, hf.GPT2LMHeadModel(config))


@pytest.mark.parametrize("method", METHODS)
def test_tied_targets_are_refused(method):
    model = tiny()
    layers = model.model.layers
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(InputError, match="up_proj' shares its weight with"):
        learner_of(method, model)


@pytest.mark.parametrize("method", METHODS)
def test_quantised_targets_are_refused(method):
    model = tiny()
    packed = torch.zeros(64, 64, dtype=torch.int8)
    model.model.layers[0].self_attn.o_proj.weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(InputError, match=r"o_proj' is Linear with weight torch.int8"):
        learner_of(method, model)


@pytest.mark.parametrize("method", ["logra", "lora"])
def test_a_rank_beyond_the_layer_is_refused(method):
    with pytest.raises(InputError, match="rank"):
        learner_of(method, rank=65)  # the hidden size is 64
