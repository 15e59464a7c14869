"""The torch paths in graphs that inductor compiles, as `torch.compile` does by default. The other
tests stop at AOT autograd, where the rules of an operator show.

Expected values are the eager ones, which the neighbours compare with references of their own.
"""

import shutil

import jaxtyping
import pytest
import torch

from logra_lab import kl, rowadam
from logra_lab.projection import Projection
from logra_lab.sketch import accumulate
from logra_lab.sync.update import Slot, ThinUpdate, apply
from logra_lab.sync.wire import ThinLayer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
]
P = Projection("m", 40, 9, seed=7)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # dynamo cannot trace it
    torch._dynamo.reset()


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_one(function, *inputs):
    """(eager, compiled) results; and that inductor has run, and on one graph."""
    from torch._inductor import metrics

    metrics.reset()
    eager = function(*inputs)
    compiled = torch.compile(function, fullgraph=True)(*inputs)
    assert metrics.generated_kernel_count > 0
    return eager, compiled


def test_project_gram_and_signs_among_other_operations():
    x, tokens, D = draw(4, 7, 40), draw(4, 7, seed=1), draw(6, 9, seed=2)

    def both(x, tokens, D):
        sketch = P.project(x.cos(), tokens.abs()).sin()
        return sketch * 2, P.squared_norm(D * 3), x.flatten(0, 1) @ P.matrix().T

    with torch.no_grad():
        eager, compiled = as_one(both, x, tokens, D)
    torch.testing.assert_close(compiled, eager)


def test_gradients_of_project_and_of_the_kl_formulas():
    # Where a gradient is wanted, dynamo leaves the graph for a function that has a jvp.
    labels = torch.tensor([0, 8, 3, 3, 1])

    def loss(x, other):
        z = P.project(x)
        logp, entropy = kl.logprob_entropy(z, labels, 0.9)
        parts = kl.variance_kl(z, other, 0.9), kl.realised_kl(z, other, 0.9), logp, entropy
        return torch.stack(parts).sum()

    found = []
    for function in (loss, torch.compile(loss)):
        x, other = (draw(*s, seed=n).requires_grad_() for n, s in enumerate(((5, 40), (5, 9))))
        found.append((function(x, other), *torch.autograd.grad(function(x, other), (x, other))))
    assert all(grad.abs().max() > 1e-3 for grad in found[0][1:])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_a_sketch_that_is_added_to_scaled_and_applied_in_place():
    layers = {"a": 4, "b": 2}
    H, inputs, weight, v = draw(10, 6), draw(10, 9, seed=1), draw(6, 40, seed=2), torch.ones(6)
    thin, U = ThinLayer("m", 6, 40, site="m"), draw(6, 9, seed=3) * 1e-3
    update = ThinUpdate.round(U, [thin], run="run", base=0, seed=7, draw=0)

    def step(H, inputs, weight, v):
        S = torch.zeros(6, 9)
        accumulate(S, H, inputs * 2)
        before = S.sum()
        moved = rowadam.row_adam_(S, v, layers, 3)
        copy = weight * 1
        apply(update, [Slot("m", copy, slice(0, 6), slice(0, 40))])
        return before, S, moved, copy

    with torch.no_grad():
        eager, compiled = as_one(step, H, inputs, weight, v)
    torch.testing.assert_close(compiled, eager)
    assert torch.equal(compiled[-1], eager[-1])  # sums of integers have no order
    assert not torch.equal(eager[-1], weight)
