"""A policy cut among ranks by FSDP2: every rank reads, and keeps, its own rows only.

The model is built without weights, cut block by block, and filled from the folder's safetensors:
no process ever holds the whole model. Buffers that no file holds (rotary frequencies) are made by
the model itself, as always.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from logra_lab.errors import InputError
from logra_lab.ranks import Ranks, local
from logra_lab.rl.policies import Policy, make_policy


def sharded_policy(
    folder: Path,
    ranks: Ranks,
    mesh: DeviceMesh,
    *,
    bfloat16: bool = False,
    offload: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Policy:
    """The policy in a model folder as FSDP2 modules over `mesh`, frozen, shards of type `dtype`.

    bfloat16: gather and compute in bfloat16 (the shards stay as they are). offload: keep the shards
    on the host. Raises `InputError` when the folder's files lack a weight. Memory: 4 bytes a
    parameter over the ranks, and one block whole while it computes.
    """
    device = torch.device(mesh.device_type)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    model = empty_model(folder, dtype)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bfloat16 else None)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": precision, "reshard_after_forward": True}
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, **options)
    fully_shard(model, **options)  # embedding, head and norms; tied ones stay one parameter
    _materialise(model, torch.device("cpu") if offload else device, device)
    with weight_files(folder) as files:
        for name, parameter in model.named_parameters():
            if name not in files:
                raise InputError(
                    f"model folder {folder}: no safetensors file holds {name}; save the model "
                    "there with save_pretrained"
                )
            rows = ranks.rows(parameter.shape[0])
            if rows.stop > rows.start:
                local(parameter).copy_(files[name].get_slice(name)[rows])
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return make_policy(model, tokenizer, str(folder))


def empty_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The folder's model with parameters on no device, buffers computed as usual."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval().requires_grad_(False)


def _materialise(model: nn.Module, weights: torch.device, buffers: torch.device) -> None:
    """Memory for the shards, not yet filled; buffers go where the model computes."""

    def place(x: Tensor) -> Tensor:
        return torch.empty_like(x, device=weights) if x.is_meta else x.to(buffers)

    model._apply(place)


@contextmanager
def weight_files(folder: Path) -> Iterator[dict[str, Any]]:
    """The open safetensors file of every weight, by its name; nothing is read yet."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        where = json.loads(index.read_text())["weight_map"]
    elif (folder / "model.safetensors").is_file():
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            where = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        raise InputError(
            f"model folder {folder} holds no model.safetensors: save the model there with "
            "save_pretrained, or convert its weights"
        )
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(safe_open(folder / name, framework="pt"))
            for name in sorted(set(where.values()))
        }
        yield {weight: opened[name] for weight, name in where.items()}
