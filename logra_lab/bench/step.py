"""One training step without rollout: LoGRA against dense fused AdamW and peft LoRA.

Same model, batch and targets; arms take turns, and a figure is the median over rounds of the ratio
of process CPU time to AdamW's in the same round. Qwen2 architecture, hidden 1024, 4 layers,
intermediate 4096, 16 heads (4 of keys and values), vocabulary 4096, 2 × 512 tokens, float32; the
probe sees 1 × 256 tokens. One thread: with two, the one that waits spins, and its spinning would
count as CPU time.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from logra_lab import kl
from logra_lab.bench import Figure, figure, say
from logra_lab.optimizer import KLControl, LoGRA
from logra_lab.sketch import TARGETS, find_targets

Step = Callable[[], Any]


def run(quick: bool) -> dict[str, Figure]:
    """Interleaved ratios, and the bytes of each method at rank 64."""
    size = {"hidden_size": 128} if quick else {}
    tokens, ranks, rounds = (64, (8, 16), 2) if quick else (512, (64, 256), 7)
    low, high = ranks
    torch.set_num_threads(1)
    bench = _Bench(tokens, size)
    arms = {
        "adamw": bench.adamw(),
        "logra_r64": bench.logra(low),
        "logra_r256": bench.logra(high),
        "peft_r64": bench.lora(low),
        "peft_r256": bench.lora(high),
        "logra_r64_jvp": bench.logra(low, "jvp"),
        "logra_r64_fd": bench.logra(low, "fd"),
        "logra_r64_kl": bench.logra(low, "jvp", measure=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(rounds + 1):  # the first round warms up and is not counted
        for name, step in arms.items():
            start = time.process_time()
            step()
            if turn:
                seconds[name].append(time.process_time() - start)
        say(f"round {turn} of {rounds}: AdamW {(seconds['adamw'] or [0])[-1]:.2f} s of CPU")

    def ratio(a: str, b: str = "adamw") -> list[float]:
        return [x / y for x, y in zip(seconds[a], seconds[b], strict=True)]

    kl_cost = [
        (x - y) / z
        for x, y, z in zip(
            seconds["logra_r64_kl"], seconds["logra_r64_jvp"], seconds["adamw"], strict=True
        )
    ]
    memory = {name: bench.mebibytes(arm) for name, arm in bench.memory_arms(low).items()}
    return {
        "logra_r64": figure(ratio("logra_r64"), "× AdamW", "<= 0.78"),
        "logra_r256": figure(ratio("logra_r256"), "× AdamW", "<= 0.88"),
        "lora_r64": figure(ratio("logra_r64", "peft_r64"), "LoGRA / LoRA", "< 1"),
        "lora_r256": figure(ratio("logra_r256", "peft_r256"), "LoGRA / LoRA", "< 1"),
        "peft_r64": figure(ratio("peft_r64"), "× AdamW"),
        "peft_r256": figure(ratio("peft_r256"), "× AdamW"),
        "logra_r64_jvp": figure(ratio("logra_r64_jvp"), "× AdamW", "<= 0.95"),
        "logra_r64_fd": figure(ratio("logra_r64_fd"), "× AdamW", "<= 0.95"),
        "realised_kl": figure(kl_cost, "of an AdamW step"),
        "mib_logra_r64": figure(memory["logra"], "MiB", "<= 310"),
        "mib_adamw": figure(memory["adamw"], "MiB"),
        "mib_lora_r64": figure(memory["lora"], "MiB"),
    }


class _Bench:
    """Builds the arms; each owns a model with the same weights."""

    def __init__(self, tokens: int, size: dict[str, int]) -> None:
        from transformers import Qwen2Config

        hidden = size.get("hidden_size", 1024)
        self.config = Qwen2Config(
            hidden_size=hidden,
            intermediate_size=4 * hidden,
            num_hidden_layers=4,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 256),
            vocab_size=4096,
        )
        torch.manual_seed(0)
        self.ids = torch.randint(0, 4096, (2, tokens))
        self.probe_ids = torch.randint(0, 4096, (1, tokens // 2))

    def model(self) -> Any:
        from transformers import Qwen2ForCausalLM

        torch.manual_seed(1)
        return Qwen2ForCausalLM(self.config).requires_grad_(False)

    def loss(self, model: Any) -> torch.Tensor:
        return model(input_ids=self.ids, labels=self.ids, use_cache=False).loss

    def adam_step(self, model: Any, parameters: list[Any], state: dict[str, Any]) -> Step:
        state["optimizer"] = torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.0, fused=True)
        state["model"], state["owned"] = model, parameters

        def step() -> None:
            self.loss(model).backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()

        return step

    def adamw(self, state: dict[str, Any] | None = None) -> Step:
        model = self.model()
        weights = [m.weight.requires_grad_(True) for m in find_targets(model, TARGETS).values()]
        return self.adam_step(model, weights, {} if state is None else state)

    def lora(self, rank: int, state: dict[str, Any] | None = None) -> Step:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=rank, lora_alpha=rank, target_modules=list(TARGETS))
        model = get_peft_model(self.model(), lora)
        adapters = [p for p in model.parameters() if p.requires_grad]
        return self.adam_step(model, adapters, {} if state is None else state)

    def logra(
        self,
        rank: int,
        method: str = "off",
        *,
        measure: bool = False,
        state: dict[str, Any] | None = None,
    ) -> Step:
        model = self.model()
        budget = None if method == "off" else kl.Budget(1e-4)
        opt = LoGRA(model, rank=rank, control=KLControl(budget, method=method, measure=measure))
        if state is not None:
            state.update(model=model, logra=opt)

        def probe() -> torch.Tensor:
            return model(input_ids=self.probe_ids, use_cache=False).logits[0]

        def step() -> None:
            self.loss(model).backward()
            skipped = opt.step(None if method == "off" else probe).skipped
            if skipped:
                raise RuntimeError(f"bench step was skipped: {skipped}")

        return step

    def memory_arms(self, rank: int) -> dict[str, dict[str, Any]]:
        states: dict[str, dict[str, Any]] = {"adamw": {}, "lora": {}, "logra": {}}
        self.adamw(states["adamw"])()
        self.lora(rank, states["lora"])()
        self.logra(rank, state=states["logra"])()
        return states

    def mebibytes(self, state: dict[str, Any]) -> float:
        """Gradients or sketches + optimizer state + activations that the graph keeps, in MiB.

        Activations are the storages autograd packs during a forward, parameters left out, each
        counted once. LoRA's adapter weights are not counted, only their gradients and moments.
        """
        model = state["model"]
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.loss(model)
        activations = sum(kept.values())
        del loss
        if "logra" in state:
            own = [state["logra"].sketch.flat, state["logra"].v]
        else:
            moments = [
                x for s in state["optimizer"].state.values() for x in s.values() if x.numel() > 1
            ]
            own = moments + state["owned"]  # a gradient is as large as its parameter
        return (activations + sum(x.numel() * x.element_size() for x in own)) / 2**20
