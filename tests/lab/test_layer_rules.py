"""The methods of the one-layer race against independent computations."""

import math

import pytest
import torch
from torch import nn

from logra_lab.errors import InputError
from logra_lab.lab import layer_race, layer_rules
from logra_lab.lab.layer_rules import Adam, GaLore, LoGRA, LoRA


def gradients(d, k, count=7):
    return torch.randn(count, d, k, generator=torch.Generator().manual_seed(5))


def test_adam_is_torchs_bias_correction_and_epsilon_included():
    weight = nn.Parameter(torch.zeros(5, 3))
    torchs = torch.optim.Adam([weight], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    ours, W = Adam(), torch.zeros(5, 3)
    for G in gradients(5, 3):
        weight.grad = G.clone()
        torchs.step()
        W += ours.step(G.clone(), 0.01)
        torch.testing.assert_close(W, weight.detach(), rtol=1e-5, atol=1e-8)


def test_lora_is_adam_on_both_factors_of_the_product_by_autograd():
    d, k, r = 5, 4, 2
    rule = LoRA(d, k, r, seed=3)
    B, A = (nn.Parameter(x.clone()) for x in (rule.B, rule.A))
    torchs = torch.optim.Adam([B, A], lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    W = torch.zeros(d, k)
    for G in gradients(d, k):
        torchs.zero_grad()
        ((B @ A) * G).sum().backward()  # d loss / d(BA) = G
        torchs.step()
        W += rule.step(G, 0.01)
        torch.testing.assert_close(W, (B @ A).detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("d", "k"), [(4, 6), (6, 4)])
def test_galore_steps_within_the_leading_singular_vectors_of_the_shorter_side(d, k):
    rule, G = GaLore(2, every=3), gradients(d, k)
    left, _, right = torch.linalg.svd(G[0], full_matrices=False)
    inside = left[:, :2] @ left[:, :2].T if d <= k else right[:2].T @ right[:2]
    for one in G[:3]:  # the subspace of the first gradient, until the fourth
        change = rule.step(one, 0.1)
        projected = inside @ change if d <= k else change @ inside
        torch.testing.assert_close(projected, change, rtol=1e-4, atol=1e-6)
    change = rule.step(G[3], 0.1)
    projected = inside @ change if d <= k else change @ inside
    assert torch.dist(projected, change) > 0.1 * change.norm()
    # First step: Adam's, on the projected gradient: signs.
    first = GaLore(2, every=3).step(G[0], 0.1)
    Q = left[:, :2] if d <= k else right[:2].T
    expected = Q @ (Q.T @ G[0]).sign() if d <= k else (G[0] @ Q).sign() @ Q.T
    torch.testing.assert_close(first, -0.1 * expected, rtol=1e-4, atol=1e-6)


def test_logra_steps_have_the_length_asked_for_and_rows_within_a():
    G = gradients(6, 24)  # wide enough that two draws share no row of signs
    fixed, redrawn = LoGRA(3, redraw=False), LoGRA(3)
    changes = [[rule.step(one, 0.5) for one in G[:2]] for rule in (fixed, redrawn)]
    for change in (*changes[0], *changes[1]):
        assert change.norm().item() == pytest.approx(0.5, rel=1e-5)
    assert torch.linalg.matrix_rank(torch.cat(changes[0]), tol=1e-5) == 3
    assert torch.linalg.matrix_rank(torch.cat(changes[1]), tol=1e-5) == 6
    # Rows of equal norm √r at t = 1, before the length is set.
    norms = (changes[0][0] @ torch.linalg.pinv(fixed.projection(24, 1).matrix())).norm(dim=1)
    torch.testing.assert_close(norms, norms.mean().expand(6), rtol=1e-4, atol=1e-6)


def test_numbers_held_are_those_of_the_tensors_kept():
    d, k, r = 6, 4, 2
    rules = {"dense Adam": Adam(), "LoRA": LoRA(d, k, r, 0), "GaLore": GaLore(r, 1)}
    rules["LoGRA"] = LoGRA(r)
    for method, rule in rules.items():
        rule.step(gradients(d, k)[0], 0.1)
        held = layer_rules.state_numbers(method, d, k, r)
        own = d * r if method == "LoGRA" else 0  # S is gradient buffer and kept
        assert sum(t.numel() for t in rule.kept()) == held["state"] + own, method
    with pytest.raises(InputError, match="'SGD' is unknown"):
        layer_rules.state_numbers("SGD", d, k, r)
    with pytest.raises(InputError, match="raise it"):
        layer_rules.equal_ranks(64, 64, 2)


def test_excess_and_gradient_are_those_of_the_weighted_loss():
    layer = layer_race.make_layer(3, 5, seed=1)
    W = torch.randn(3, 5, generator=torch.Generator().manual_seed(2))
    # E over x of ½ Σ c (x·(w − w*))² has the gradient c (w − w*): the mean of many samples.
    G = layer.gradient(W, 200_000, torch.Generator().manual_seed(3))
    expected = layer.c[:, None] * (W - layer.best)
    assert torch.dist(G, expected) < 0.02 * expected.norm()  # 1/√200,000 and the noise
    by_hand = sum(
        0.5 * c * (w - b) ** 2
        for c, row, best in zip(layer.c, W, layer.best, strict=True)
        for w, b in zip(row, best, strict=True)
    )
    assert layer.excess(W) == pytest.approx(float(by_hand), rel=1e-5)


def test_floors_are_reached_by_the_best_of_their_kind_and_by_nothing_below():
    layer = layer_race.make_layer(6, 8, seed=1)
    root = layer.c.sqrt()[:, None]
    U, s, Vh = torch.linalg.svd(root * layer.best, full_matrices=False)
    best = (U[:, :2] * s[:2]) @ Vh[:2] / root
    assert layer.excess(best) == pytest.approx(layer.floor_of_rank(2), rel=1e-4)
    A = LoGRA(3, redraw=False).projection(8, 1).matrix()
    within = layer.best @ torch.linalg.pinv(A) @ A
    assert layer.excess(within) == pytest.approx(layer.floor_of_rows(A), rel=1e-4)
    assert layer_race.make_layer(6, 8, rank=2, seed=1).floor_of_rank(2) < 1e-8


def test_the_best_rate_is_the_one_with_the_least_final_excess_of_all_layers():
    layers = [layer_race.make_layer(8, 8, seed=seed) for seed in range(2)]
    one = layer_race.Contestant("dense Adam", 8, lambda seed: Adam())
    best, curves, rule = layer_race.tuned(one, layers, steps=20, n=16)
    finals = {
        lr: sum(
            layer_race.race(layer, Adam(), lr, steps=20, n=16, seed=seed)[-1].item()
            for seed, layer in enumerate(layers)
        )
        for lr in one.rates
    }
    assert best == min(finals, key=finals.get)
    assert math.fsum(curve[-1] for curve in curves) == pytest.approx(finals[best])
    assert [len(curve) for curve in curves] == [21, 21]
    assert rule.t == 20
