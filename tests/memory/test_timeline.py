"""The watched training step: what is alive at which moment, and that its sketches add up."""

from typing import Any

import pytest
import torch

from logra_lab.errors import InputError
from logra_lab.memory.timeline import GRADIENT, SKETCH, accumulated, text_loss, timeline
from logra_lab.rl.policies import load_policy
from logra_lab.sketch import TARGETS, Sketch, find_targets


@pytest.fixture(scope="module")
def model() -> Any:
    return load_policy("small").model


@pytest.fixture(scope="module")
def ids(model: Any) -> torch.Tensor:
    return torch.randint(3, 51, (12, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("checkpointing", ["none", "non_reentrant"])
def test_dense_gradients_stay_from_the_first_microbatch_on_and_sketched_ones_never_exist(
    model: Any, ids: torch.Tensor, checkpointing: str
) -> None:
    targets = find_targets(model, TARGETS).values()
    whole = 4 * sum(m.weight.numel() for m in targets)
    largest = 4 * max(m.weight.numel() for m in targets)
    dense = timeline(model, ids.split(4), rank=None, checkpointing=checkpointing)
    gradients = dense.bytes[GRADIENT]
    assert gradients[dense.end("forward 1")] == 0
    for number in (1, 2, 3):
        assert gradients[dense.end(f"backward {number}")] == whole
    assert whole < dense.most(GRADIENT) <= whole + largest  # a new one, before it is added
    thin = timeline(model, ids.split(4), rank=8, checkpointing=checkpointing)
    assert thin.most(GRADIENT) == 0
    assert set(thin.bytes[SKETCH]) == {4 * 8 * sum(m.out_features for m in targets)}
    assert thin.peak < dense.peak
    assert len(thin.total) == len(thin.bytes[SKETCH])


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non_reentrant"])
@pytest.mark.parametrize("rows", [1, 3, 5, 12])
def test_sketches_of_microbatches_add_up_to_that_of_the_batch_also_when_recomputed(
    model: Any, ids: torch.Tensor, rows: int, checkpointing: str
) -> None:
    # Issue E: 1e-6. Twice-counted tokens would double it, a mean of means shift it by per cents.
    sketch = Sketch(model, 8)
    text_loss(model, ids, ids.numel()).backward()
    whole = sketch.flat.clone()
    sketch.remove()
    S = accumulated(model, ids.split(rows), 8, checkpointing)
    assert torch.dist(S, whole) / torch.linalg.vector_norm(whole) < 1e-6


def test_activations_of_a_weights_shape_are_refused_not_mistaken(model: Any) -> None:
    with pytest.raises(InputError, match="a microbatch of 128 tokens"):
        timeline(model, [torch.zeros(2, 64, dtype=torch.long)], rank=None)
