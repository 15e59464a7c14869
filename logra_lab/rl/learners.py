"""The three methods behind one interface: LoGRA, dense Adam on the same matrices, LoRA (peft).

A learner owns what is trainable. `step` turns accumulated gradients into one update, or skips it
and says why; `discard` forgets them. The baselines measure the realised KL of their steps on the
same probe, and have no control over it.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from logra_lab import kl
from logra_lab.errors import InputError
from logra_lab.optimizer import KLControl, LoGRA, StepReport, frobenius
from logra_lab.probe import Forward
from logra_lab.ranks import ALONE, Ranks
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.policies import Policy
from logra_lab.sketch import find_targets


class Learner(Protocol):
    """What the loop needs of a method. `run` and `targets` go with thin updates only."""

    run: str
    t: int

    def targets(self) -> dict[str, Tensor]: ...
    def step(self, probe: Sequence[Forward] | None, *, gap: float | None) -> StepReport: ...
    def discard(self) -> None: ...
    def weights(self) -> dict[str, Tensor]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class LoGRALearner(LoGRA):
    """`LoGRA` with the loop's extra methods."""

    def targets(self) -> dict[str, Tensor]:
        """The trained matrices by the layer names of updates."""
        return {slot.layer: slot.weight for slot in self.slots()}

    def discard(self) -> None:
        self.sketch.zero_()

    def weights(self) -> dict[str, Tensor]:
        """The trained matrices by state-dict key."""
        return {f"{path}.weight": layer.weight for path, layer in self.sketch.layers.items()}


class AdamLearner:
    """`torch.optim.AdamW` (fused, no weight decay) on given parameters; everything else frozen."""

    run = ""  # it makes no thin updates

    def targets(self) -> dict[str, Tensor]:
        return {}

    def __init__(
        self, model: nn.Module, parameters: dict[str, nn.Parameter], config: TrainConfig
    ) -> None:
        self.parameters = parameters
        model.requires_grad_(False)
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(
            list(parameters.values()), lr=config.learning_rate, weight_decay=0.0, fused=True
        )
        self.t, self.temperature = 0, config.temperature
        self.measure = config.measure_kl and config.kl_method != "off"

    def step(self, probe: Sequence[Forward] | None, *, gap: float | None = None) -> StepReport:
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = math.sqrt(sum(frobenius(g) ** 2 for g in grads))
        if norm == 0 or not math.isfinite(norm):
            self.discard()
            return StepReport(self.t, skipped=f"the gradient's norm is {norm}")
        realised = None
        if probe is not None and self.measure:
            with torch.no_grad():
                old = [forward() for forward in probe]
                self.optimizer.step()
                pairs = [(z, forward()) for z, forward in zip(old, probe, strict=True)]
                values = torch.cat([kl.realised_kl(a, b, self.temperature) for a, b in pairs])
                realised = values.double().mean().item()
        else:
            self.optimizer.step()
        self.discard()
        self.t += 1
        return StepReport(self.t, sketch_norm=norm, kl_realised=realised)

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.parameters.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.t, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))  # torch keeps its tensors
        self.t = state["t"]


def make_learner(policy: Policy, config: TrainConfig, ranks: Ranks = ALONE) -> Learner:
    """The learner of `config.method`, attached to the policy's model; over ranks LoGRA only.

    LoRA replaces `policy.model` by its peft wrapper; rank r, alpha = r, no dropout.
    """
    if config.method == "logra":
        return LoGRALearner(
            policy.model,
            rank=config.rank,
            seed=config.seed,
            targets=config.targets,
            share_inputs=config.share_inputs,
            projection=config.projection,
            refresh=config.refresh,
            update_ratio=config.update_ratio,
            beta2=config.beta2,
            variant=config.variant,
            control=_control(config),
            wire=config.wire,
            ranks=ranks,
        )
    linears = find_targets(policy.model, config.targets)
    if config.method == "adam":
        dense = {
            f"{path}.weight": cast(nn.Parameter, module.weight) for path, module in linears.items()
        }
        return AdamLearner(policy.model, dense, config)
    from peft import LoraConfig, get_peft_model

    for path, module in linears.items():
        if config.rank > module.in_features:
            raise InputError(
                f"rank {config.rank} does not fit layer {path!r} with k = {module.in_features} "
                "inputs: choose a rank of at most k, or other targets"
            )
    lora = LoraConfig(r=config.rank, lora_alpha=config.rank, target_modules=list(linears))
    gpus = [policy.model.device] if policy.model.device.type == "cuda" else []
    with torch.random.fork_rng(gpus):  # peft draws A from the global generator
        torch.manual_seed(config.seed)
        policy.model = get_peft_model(policy.model, lora)  # type: ignore[assignment]
    policy.model.eval()
    adapters = {n: p for n, p in policy.model.named_parameters() if p.requires_grad}
    return AdamLearner(policy.model, adapters, config)


def _control(config: TrainConfig) -> KLControl:
    budget = None
    if config.kl_start is not None:
        horizon = config.kl_horizon or config.steps * config.updates_per_batch
        budget = kl.Budget(config.kl_start, config.kl_end, horizon)
    return KLControl(
        budget=budget,
        alpha_max=config.alpha_max,
        method=config.kl_method,
        temperature=config.temperature,
        subtract_mismatch=config.subtract_mismatch,
        measure=config.measure_kl,
    )
