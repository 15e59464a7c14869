"""Activation checkpointing of a Hugging Face model, for the training forward alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.modeling_layers import GradientCheckpointingLayer


@contextmanager
def recomputed_layers(model: Any, mode: str) -> Iterator[None]:
    """Forward passes inside recompute decoder layers in backward, with dropout still off.

    transformers recomputes a layer only while the layer itself is in training mode, so that flag
    is set on the layers alone; and it lets the embedding's output ask for a gradient, which
    reentrant checkpoints need above frozen parameters. Both only inside: neither generation nor a
    KL probe goes backward, and forward-mode AD refuses the second.
    """
    if mode == "none":
        yield
        return
    model.gradient_checkpointing_enable({"use_reentrant": mode == "reentrant"})
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.training = training
        model.gradient_checkpointing_disable()
        model.disable_input_require_grads()
