"""What the vLLM tests share: when they run, tiny policies, a trainer to follow (no test here)."""

import hashlib
import importlib.util
import os
import platform
import runpy
import sys
from pathlib import Path

import pytest
import torch

from logra_lab.rl.policies import Policy
from logra_lab.sync.mapping import target_paths
from logra_lab.sync.update import Slot, ThinUpdate, apply
from logra_lab.sync.wire import ThinLayer

tiny_llm = runpy.run_path(str(Path(__file__).with_name("reference.py")))["tiny_llm"]

# vLLM's CPU wheel exists for Linux x86_64, and CI has to have it there: missing, the tests fail.
_required = bool(os.environ.get("CI")) and sys.platform == "linux"
_required = _required and platform.machine() == "x86_64"
needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None and not _required,
    reason="vLLM is not installed (`make vllm`); the Hugging Face engine stands in for it",
)

VOCABULARY = 61
# vLLM's CPU backend needs head_dim >= 32. Qwen3's heads do not add up to its hidden size.
SIZES = {
    "Qwen2": {"hidden_size": 128},
    "Qwen3": {"hidden_size": 96, "head_dim": 32},
    "Llama": {"hidden_size": 128},
}


class Numbers:
    """A tokenizer of numbers in words; not the inverse of anything."""

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


def tiny_policy(arch="Qwen2", *, eos_ids=(7,), tokenizer=None, **settings):
    """A random policy that vLLM can serve; biases are random too, so that one lost is noticed."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    model = tiny_llm(arch, **SIZES[arch], **(sizes | settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3, generator=generator)
    return Policy(model, tokenizer or Numbers(), arch, tuple(eos_ids), 0)


class Trainer:
    """Float32 weights of a policy and the thin updates that move them."""

    def __init__(self, policy, run="run", version=0, rank=4):
        self.model, self.run, self.version, self.rank = policy.model, run, version, rank
        names = target_paths(policy.model.config.num_hidden_layers)
        self.weights = {n: policy.model.get_parameter(f"{n}.weight").data for n in names}
        self.start = {n: w.clone() for n, w in self.weights.items()}
        self.layers = [ThinLayer(n, *w.shape, n) for n, w in self.weights.items()]

    def restart(self, run, version=0):
        """The weights of the beginning, as another run."""
        self.run, self.version = run, version
        for name, weight in self.weights.items():
            weight.copy_(self.start[name])

    def update(self, scale, kinds=None, **changes):
        """A random update that starts from this version; only layers of some kinds move."""
        torch.manual_seed(self.version + 17)
        blocks = [
            torch.randn(x.d, self.rank) * scale * (kinds is None or x.name.split(".")[-1] in kinds)
            for x in self.layers
        ]
        settings = {"run": self.run, "base": self.version, "seed": 3, "draw": self.version}
        layers = changes.pop("layers", self.layers)
        return ThinUpdate.round(torch.cat(blocks), layers, **(settings | changes))

    def step(self, scale=0.02, kinds=None):
        """Move, and say how."""
        update = self.update(scale, kinds)
        apply(update, [Slot.whole(n, w) for n, w in self.weights.items()])
        self.version = update.version
        return update

    def logprobs(self, prompt, response, temperature=1.0):
        """log softmax(logits / T) of the response's ids by Hugging Face, teacher-forced."""
        ids = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            logits = self.model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
        return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]


def gaps(trainer, rollout, temperature=1.0):
    """|trainer − engine| of every sampled token's log-probability."""
    rows = zip(rollout.prompt_ids, rollout.response_ids, rollout.logprobs, strict=True)
    return torch.cat(
        [(trainer.logprobs(p, r, temperature) - logprobs).abs() for p, r, logprobs in rows]
    )


def cast_digest(weights, dtype, parts=None):
    """SHA-256 over weights cast to the served type: all of them, or (name, rows, columns) parts."""
    whole = slice(None)
    digest = hashlib.sha256()
    for name, rows, columns in parts or [(n, whole, whole) for n in weights]:
        cast = weights[name][rows, columns].to(dtype).contiguous()
        digest.update(cast.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def prompts(count=4, length=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count, length), generator=generator).tolist()


def names(count):
    """Sampling keys."""
    return [f"key {i}" for i in range(count)]
