"""The same bytes, counted in a real step on the CPU: what the closed forms are held against.

One process in float32, so FSDP's buffers, offload and bfloat16 masters are not among them: those
stay computed, and the tables say so. A CPU's attention keeps what CUDA's flash attention keeps.
"""

import copy
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from logra_lab.errors import InputError
from logra_lab.memory.arch import from_config
from logra_lab.memory.live import LiveBytes, saved_bytes
from logra_lab.memory.plan import Setup, learn
from logra_lab.optimizer import LoGRA
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.learners import AdamLearner, make_learner
from logra_lab.rl.policies import Policy
from logra_lab.rl.recompute import recomputed_layers

#: What the forward leaves for backward: in the plan several terms that begin with this word.
SAVED = "saved for backward"


@dataclass(frozen=True)
class Measured:
    """Bytes by the names of the plan's terms, and the largest sum of a whole step."""

    terms: dict[str, int]
    peak: int


def alone(setup: Setup) -> Setup:
    """The setup that can be measured here: one process, float32."""
    return replace(setup, fsdp=1, dtype="float32", offload=False)


def compare(model: PreTrainedModel, method: str, setup: Setup) -> list[dict[str, Any]]:
    """Predicted beside measured, a row a term: ``term``, ``predicted``, ``measured``, ``off``.

    Terms that one process cannot show are absent; the last row is the peak of the step. The model
    is copied. Raises what `learn` and `measure` raise.
    """
    setup = alone(setup)
    arch = from_config(model.config, type(model).__name__)
    cost, found = learn(arch, method, setup), measure(model, method, setup)
    predicted: Counter[str] = Counter()
    for term in cost.terms:
        predicted[SAVED if term.name.startswith("saved") else term.name] += term.bytes
    rows = [
        (name, size, found.terms[name]) for name, size in predicted.items() if name in found.terms
    ]
    rows.append(("peak of the step", cost.bytes, found.peak))
    return [{"term": name, "predicted": a, "measured": b, "off": a / b - 1} for name, a, b in rows]


def measure(model: PreTrainedModel, method: str, setup: Setup) -> Measured:
    """Run two microbatches and a step of `method` on a copy of the model, and count.

    The second microbatch is the one counted, as gradients are there already. Raises `InputError`
    for a setup that is not `alone` and for a model on another device or in another type.
    """
    weight = next(model.parameters())
    if setup != alone(setup) or weight.device.type != "cpu" or weight.dtype != torch.float32:
        raise InputError(
            f"measuring is done in one process, in float32 on the CPU; got fsdp {setup.fsdp}, "
            f"{setup.dtype}, a model in {weight.dtype} on {weight.device}: use alone(setup)"
        )
    policy = Policy(copy.deepcopy(model), None, "measured", (0,), 0)
    weights = _bytes(list(policy.model.parameters()))
    settings: dict[str, Any] = {"method": method, "rank": setup.rank, "kl_method": "off"}
    learner = make_learner(policy, TrainConfig(**settings))
    mode = "non_reentrant" if setup.checkpointing else "none"
    ids = torch.randint(policy.vocab_size, (1, setup.tokens), generator=_generator())
    step(policy.model, ids, mode)  # gradients appear
    vocab = policy.vocab_size

    with LiveBytes(lambda x: "logits" if x.shape[-1:] == (vocab,) else "rest") as live:
        logits, loss = forward(policy.model, ids, mode)
        kept, held = live.now["rest"], logits.untyped_storage().nbytes()
        loss.backward()
        del logits, loss
    terms = {
        SAVED: kept,
        "logits, float32": held,
        "log-softmax and gradients": live.most("logits") - held,
    }
    if setup.checkpointing:
        terms["one block, recomputed"] = _recomputed(policy.model, ids)
    standing = _standing(learner, method, weights)
    terms |= standing
    report = learner.step(None, gap=None)
    if report.update is not None:
        sent = [report.update.values, cast(Tensor, report.update.exponents)]
        terms["the update that travels"] = _bytes(sent)
    if method != "logra":  # Adam's moments exist after the first step
        standing = _standing(learner, method, weights)
        terms |= {name: size for name, size in standing.items() if "moments" in name}
    return Measured(terms, live.most() + sum(terms[name] for name in standing))


def forward(model: nn.Module, ids: Tensor, checkpointing: str) -> tuple[Tensor, Tensor]:
    """Logits and mean cross-entropy of a row of ids, as the training loop computes them."""
    with recomputed_layers(model, checkpointing):
        logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
    return logits, nn.functional.cross_entropy(logits, ids.flatten())


def step(model: nn.Module, ids: Tensor, checkpointing: str) -> None:
    """Forward and backward of one microbatch."""
    _, loss = forward(model, ids, checkpointing)
    loss.backward()


def cache_bytes(model: PreTrainedModel, tokens: int) -> int:
    """Bytes of the keys and values that a forward pass of `tokens` leaves in the cache."""
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=_generator())
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    return _bytes([x for layer in cache.layers for x in (layer.keys, layer.values)])


def _recomputed(model: nn.Module, ids: Tensor) -> int:
    """What one block keeps when it is computed once more: the mean over blocks.

    Reentrant checkpoints, whose recomputation packs as every forward does.
    """
    _, loss = forward(model, ids, "reentrant")
    depth = len(cast(Any, model).get_decoder().layers)
    return saved_bytes(loss.backward, model) // depth


def _standing(learner: Any, method: str, weights: int) -> dict[str, int]:
    if isinstance(learner, LoGRA):
        return {
            "float32 master weights": weights,
            "sketches S, then D and U": _bytes([learner.sketch.flat]),
            "row moments": _bytes([learner.v]),
        }
    assert isinstance(learner, AdamLearner)
    own = list(learner.parameters.values())
    grads = [p.grad for p in own if p.grad is not None]
    state = learner.optimizer.state.values()
    moments = _bytes([x for s in state for x in s.values() if x.numel() > 1])
    if method == "adam":
        return {
            "float32 master weights": weights,
            "gradients": _bytes(grads),
            "Adam's two moments": moments,
        }
    return {
        "frozen weights": weights,
        "adapters": _bytes(own),
        "gradients of the adapters": _bytes(grads),
        "Adam's two moments": moments,
    }


def _bytes(tensors: list[Any]) -> int:
    """Bytes of tensors, shared ones once."""
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
