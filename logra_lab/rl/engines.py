"""The engines that a run can generate with, behind one interface, and how each is kept in step.

shared   Hugging Face generation with the trainer's own model: nothing to synchronise
hf       the same with a copy of the model in a serving type, which thin updates reach
vllm     vLLM in processes of its own, or in this one; see `vllm_engine`
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.projection import canonical_path
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.outcomes import Problem
from logra_lab.rl.policies import Policy
from logra_lab.rl.rollout import Generates, HFEngine, Rollout
from logra_lab.sketch import find_targets
from logra_lab.sync.base_file import check_base
from logra_lab.sync.receiver import Place, Receiver
from logra_lab.sync.update import ThinUpdate


class Engine(Generates, Protocol):
    """What a run needs of an engine that has weights of its own."""

    @property
    def version(self) -> int | None: ...
    def sync(self, update: ThinUpdate) -> bool: ...
    def full_sync(
        self, base: str | Path | Mapping[str, Tensor], run: str, version: int
    ) -> None: ...
    def forget(self, why: str) -> None: ...
    def close(self) -> None: ...


class CopyEngine(HFEngine):
    """`HFEngine` on a copy of the policy in a serving type, kept at the trainer's version.

    Args: as `HFEngine`; dtype: of the served weights and of the computation; receiver: see
    `Receiver`. targets: the layers that updates will hold.

    Generation is refused (`NeedsFullSync`) while the version is unknown. Memory: the model once
    in `dtype`, and with receiver "exact" 4 bytes a target weight unless float32 is served.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        temperature: float = 1.0,
        max_new_tokens: int,
        batch_size: int = 64,
        dtype: torch.dtype = torch.float32,
        receiver: str = "exact",
        targets: tuple[str, ...],
    ) -> None:
        model = cast_model(copy.deepcopy(policy.model), dtype)
        own = dataclasses.replace(policy, model=model.requires_grad_(False))
        super().__init__(
            own, temperature=temperature, max_new_tokens=max_new_tokens, batch_size=batch_size
        )
        places = [
            Place.whole(canonical_path(path), module.weight.data)
            for path, module in find_targets(model, targets).items()
        ]
        self.receiver = Receiver(places, mode=receiver)

    @property
    def version(self) -> int | None:
        return self.receiver.version

    def generate(self, prompt_ids: list[list[int]], keys: list[str]) -> Rollout:
        self.receiver.require_version()
        return super().generate(prompt_ids, keys)

    def sync(self, update: ThinUpdate) -> bool:
        """Apply an update; False when it was the last one. Raises as `Receiver.apply`."""
        return self.receiver.apply(update)

    def full_sync(self, base: str | Path | Mapping[str, Tensor], run: str, version: int) -> None:
        """Take all targets from tensors by layer name, or from a sealed base file.

        Raises `ShapeMismatch`, `DigestMismatch`, `WrongRun`, `VersionGap` (the file is of another
        run or version), `InputError` (no such file), with the weights as they were.
        """
        if isinstance(base, Mapping):
            self.receiver.load(run, version, base)
            return
        check_base(Path(base), run, version)
        with safe_open(base, framework="pt") as file:
            self.receiver.load(run, version, {n: file.get_slice(n) for n in file.keys()})  # noqa: SIM118

    def forget(self, why: str) -> None:
        self.receiver.forget(why)

    def close(self) -> None:
        """Nothing to end: the copy goes with the object."""


def cast_model(model: Any, dtype: torch.dtype) -> Any:
    """The model in another type, in place, as `from_pretrained` would load it there.

    What no checkpoint holds keeps its type: `model.to` would round the rotary frequencies too,
    and in bfloat16 a position of some hundreds is then off by a radian.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return model


def check_prompts(policy: Policy, config: TrainConfig, problems: Sequence[Problem]) -> None:
    """Raise `InputError` at the start for a prompt that would fail when it is drawn."""
    longest = max(len(policy.encode(problem.prompt)) for problem in problems)
    if longest > config.max_prompt_tokens:
        raise InputError(
            f"task {config.task!r} has a prompt of {longest} tokens, max_prompt_tokens is "
            f"{config.max_prompt_tokens}: raise it, vLLM reserves room for the longest request"
        )


def make_engine(policy: Policy, config: TrainConfig) -> HFEngine | Engine:
    """The engine of `config.engine`; its weights are unknown until the first full sync."""
    if config.engine == "vllm":
        from logra_lab.rl.vllm_engine import VLLMEngine

        return VLLMEngine(
            policy,
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            max_prompt_tokens=config.max_prompt_tokens,
            dtype=config.serving_dtype,
            receiver=config.receiver,
            targets=config.targets,
            kv_cache_bytes=config.kv_cache_mib << 20,
        )
    if config.engine == "hf":
        return CopyEngine(
            policy,
            temperature=config.temperature,
            max_new_tokens=config.max_new_tokens,
            batch_size=config.generate_batch,
            dtype=getattr(torch, config.serving_dtype),
            receiver=config.receiver,
            targets=config.targets,
        )
    return HFEngine(
        policy,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.generate_batch,
    )
