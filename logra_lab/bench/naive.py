"""LoGRA as one would first write it, and the arms of a training step on a GPU.

`NaiveLoGRA` keeps a float32 A for every matrix, drawn by torch, and forms D A [d, k]; the published
implementations do both. The direction and the size rule are the library's, which a test compares.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from logra_lab.optimizer import LoGRA
from logra_lab.rowadam import row_adam
from logra_lab.sketch import TARGETS, find_targets

SMALL = {"hidden": 64, "inner": 128, "heads": 4, "vocabulary": 256, "blocks": 2}
SMALL |= {"rank": 8, "batch": 2, "length": 16}


class _Keep(torch.autograd.Function):
    """Identity that keeps P; backward adds Hᵀ P to S in float32."""

    @staticmethod
    def forward(y: Tensor, P: Tensor, anchor: Tensor, S: Tensor) -> Tensor:
        return y.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, P, _, ctx.S = inputs
        ctx.save_for_backward(P)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        (H,), (P,) = grads, ctx.saved_tensors
        ctx.S.add_(H.flatten(0, -2).float().T @ P.flatten(0, -2).float())
        return H, None, None, None


class NaiveLoGRA:
    """RowAdam on sketches of every target of `model`, at update ratio ρ; no KL control."""

    def __init__(self, model: nn.Module, rank: int, rho: float = 6e-5) -> None:
        self.layers, self.rank, self.rho, self.t = find_targets(model, TARGETS), rank, rho, 0
        model.requires_grad_(False)
        self.S: dict[str, Tensor] = {}
        self.v: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            self.S[name] = layer.weight.new_zeros(layer.out_features, rank)
            self.v[name] = layer.weight.new_zeros(layer.out_features)
            layer.register_forward_hook(self._hook(name))
        self.anchor = next(iter(self.S.values())).new_zeros(()).requires_grad_()
        self.redraw()

    def redraw(self) -> None:
        """A [r, k] of every matrix, entries ±1/√r."""
        self.A = {
            name: torch.randn(self.rank, layer.in_features, device=layer.weight.device).sign()
            / math.sqrt(self.rank)
            for name, layer in self.layers.items()
        }

    def _hook(self, name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
            with torch.no_grad(), torch.autocast(y.device.type, enabled=False):
                P = args[0].to(y.dtype) @ self.A[name].to(y.dtype).T
            return _Keep.apply(y, P, self.anchor, self.S[name])

        return hook

    @torch.no_grad()
    def step(self) -> None:
        """W ← W − D A, with √Σ‖D A‖² = ρ √Σ‖W‖²."""
        self.t += 1
        D, change, weight = {}, 0.0, 0.0
        for name, layer in self.layers.items():
            D[name], self.v[name] = row_adam(self.S[name], self.v[name], self.t)
            change += (D[name] @ self.A[name]).square().sum().item()
            weight += layer.weight.square().sum().item()
        scale = self.rho * math.sqrt(weight / change)
        for name, layer in self.layers.items():
            layer.weight -= scale * (D[name] @ self.A[name])
            self.S[name].zero_()
        self.redraw()


def arms(
    device: str,
    *,
    hidden: int = 3584,
    inner: int = 18944,
    heads: int = 28,
    vocabulary: int = 152_064,
    blocks: int = 4,
    rank: int = 256,
    batch: int = 2,
    length: int = 2048,
) -> dict[str, Callable[[], Any]]:
    """A step (forward, backward, update) of LoGRA, dense AdamW and naive LoGRA, by name.

    The defaults are 4 of the 28 blocks of Qwen2.5-7B with tied embeddings, float32 weights,
    bfloat16 autocast, 4096 tokens. Each arm has a model of its own with the same weights; all
    train the same matrices.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 7),
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    ids = torch.arange(batch * length, device=device).remainder(vocabulary).view(batch, length)

    def model() -> Any:
        torch.manual_seed(0)
        with torch.device(device):
            return Qwen2ForCausalLM(config).requires_grad_(False)

    def backward(model: Any) -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    thin, dense, plain = model(), model(), model()
    weights = [m.weight.requires_grad_() for m in find_targets(dense, TARGETS).values()]
    adam = torch.optim.AdamW(weights, lr=1e-6, weight_decay=0.0, fused=True)
    ours, naive = LoGRA(thin, rank=rank), NaiveLoGRA(plain, rank)

    def logra_step() -> None:
        backward(thin)
        skipped = ours.step().skipped
        if skipped:
            raise RuntimeError(f"bench step was skipped: {skipped}")

    def adam_step() -> None:
        backward(dense)
        adam.step()
        adam.zero_grad()

    def naive_step() -> None:
        backward(plain)
        naive.step()

    return {"logra": logra_step, "adamw": adam_step, "naive": naive_step}
