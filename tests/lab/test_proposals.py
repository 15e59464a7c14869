"""A real batch, a proposal held still, and first steps compared, on the shipped policy."""

import math

import pytest
import torch

from logra_lab import kl
from logra_lab.errors import InputError
from logra_lab.lab import directions
from logra_lab.lab.presets import preset
from logra_lab.lab.proposals import interleaved, propose, shares_by_kind
from logra_lab.lab.real_batch import real_batch
from logra_lab.probe import predict
from logra_lab.rl.loop import load_tasks, preset_config
from logra_lab.rl.policies import load_policy

RHO = 2e-3


@pytest.fixture(scope="module")
def batch():
    config = preset_config(preset("smoke"), train_problems=64, eval_problems=8)
    return real_batch(load_policy("small"), load_tasks(config)[0], config, 24)


@pytest.fixture(scope="module")
def proposal(batch):
    return propose(batch, 8, rho=RHO, variant="plain")


def weights(batch):
    return {name: p.detach().clone() for name, p in batch.policy.model.named_parameters()}


def test_dense_gradients_are_those_whose_sketch_the_batch_makes_and_leave_no_trace(batch):
    flags = [p.requires_grad for p in batch.policy.model.parameters()]
    G = batch.dense_gradients()
    assert [p.requires_grad for p in batch.policy.model.parameters()] == flags
    assert all(p.grad is None for p in batch.policy.model.parameters())
    sketch = batch.sketch(8, draw=3)
    sketch.remove()
    assert len(G) == len(sketch.layers) == 28
    for path, layer in sketch.layers.items():
        expected = G[path] @ layer.site.projection.matrix().T
        torch.testing.assert_close(layer.S, expected, rtol=1e-3, atol=1e-6)


def test_losses_of_the_pieces_add_up_and_equal_rewards_are_refused(batch):
    # On the rollout's own weights every ratio is 1: the loss is −Σ A·length / N.
    total = sum(s.advantage * len(s.response) for s in batch.samples)
    assert batch.mean_loss() == pytest.approx(-total / batch.tokens, abs=1e-5)
    config = batch.config
    with pytest.raises(InputError, match="no learning signal"):
        real_batch(batch.policy, load_tasks(config)[0], config, 1)


def test_a_proposal_has_the_size_rho_as_a_dense_matrix_and_changes_no_weight(batch, proposal):
    before = weights(batch)
    forward = batch.probe(8)
    proposal.logits(forward, 3.0)
    proposal.tangent(forward)
    kept = weights(batch)
    assert all(torch.equal(before[name], kept[name]) for name in before)
    dense = directions.of_proposal(proposal)
    norm = math.hypot(*(x.norm().item() for x in dense.values()))
    targets = math.hypot(*(before[f"{path}.weight"].norm().item() for path in dense))
    assert norm == pytest.approx(RHO * targets, rel=1e-4)
    assert proposal.norm == pytest.approx(norm, rel=1e-4)
    assert proposal.random(1).norm == pytest.approx(norm, rel=1e-4)
    only = proposal.only("k_proj")
    assert only.norm == pytest.approx(norm, rel=1e-4)
    elsewhere = [value for path, value in only.squared_norms().items() if "k_proj" not in path]
    assert elsewhere == [0.0] * 24
    with pytest.raises(InputError, match="no direction"):
        proposal.only("nothing")


def test_the_tangent_is_what_predict_sees_and_logits_are_those_of_moved_weights(batch, proposal):
    forward = batch.probe(8)
    with torch.no_grad():
        z = forward()
    predicted = predict(proposal.sketch, proposal.U, forward, method="jvp").kl
    found = kl.variance_kl(z, proposal.tangent(forward)).mean().item()
    assert found == pytest.approx(predicted, rel=1e-4)
    with torch.no_grad(), directions.moved(batch.policy, directions.of_proposal(proposal), 2.0):
        moved = forward()
    torch.testing.assert_close(proposal.logits(forward, 2.0), moved, rtol=1e-3, atol=1e-3)
    assert torch.dist(moved, z) > 1e-2


def test_a_change_is_scaled_to_its_kl_and_weights_come_back_to_the_bit(batch):
    before, forward, G = weights(batch), batch.probe(8), batch.dense_gradients()
    downhill = {path: -g for path, g in G.items()}
    scale = directions.at_kl(batch, downhill, forward, 1e-3)
    with torch.no_grad():
        z = forward()
        with directions.moved(batch.policy, downhill, scale):
            assert kl.realised_kl(z, forward()).mean().item() == pytest.approx(1e-3, rel=0.03)
    assert directions.gain(batch, downhill, scale) > 0
    uphill = directions.at_kl(batch, G, forward, 1e-3)
    assert directions.gain(batch, G, uphill) < 0
    after = weights(batch)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_first_steps_are_the_known_ones(batch):
    G = batch.dense_gradients()
    steps = directions.first_steps(batch, G, 4, rho=RHO)
    for path, g in G.items():
        live = g.abs() > 1e-5  # beside ε = 1e-8, Adam's first step is the sign
        torch.testing.assert_close(
            steps["dense Adam"][path][live], -g.sign()[live], rtol=1e-2, atol=0
        )
        assert torch.linalg.matrix_rank(steps["LoRA"][path], tol=1e-4) <= 4
        assert torch.linalg.matrix_rank(steps["GaLore"][path], tol=1e-4) <= 4
    kept = [
        math.hypot(*(x.norm().item() for x in steps[f"LoGRA, {v}"].values()))
        for v in ("plain", "norm-preserving")
    ]
    assert kept[0] == pytest.approx(kept[1], rel=1e-4)  # both of size ρ


def test_shares_are_by_last_name_and_rounds_are_interleaved():
    shares = shares_by_kind({"a.q": 1.0, "b.q": 2.0, "a.v": 1.0})
    assert shares == {"q": 0.75, "v": 0.25}
    order = []
    seconds = interleaved({n: lambda n=n: order.append(n) for n in "ab"}, 3)
    assert order == list("ababab")
    assert [len(rounds) for rounds in seconds.values()] == [3, 3]
