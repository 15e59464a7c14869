"""The trained matrices inside a vLLM worker: found, and shown to be what its GEMMs read."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_tp_group

from logra_lab.sync.errors import UnsupportedRolloutBackend
from logra_lab.sync.mapping import Geometry, Shard, shards, target_paths
from logra_lab.sync.receiver import Place

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def find_places(
    model: nn.Module, config: Any, targets: Sequence[str]
) -> tuple[dict[str, Tensor], list[Place]]:
    """The parameters that hold targets, by name, and where in them each target lies.

    Every layer is tested: its weight has the shape that the mapping expects, and its GEMM reads
    that tensor. Raises `UnsupportedRolloutBackend`, naming layer and remedy, and `InputError` for
    unknown targets or a tensor-parallel size that does not divide the model. Cost: a copy of one
    layer's weights at a time, and a forward pass of three rows through each.
    """
    _refuse_config(config)
    group = get_tp_group()
    hf = config.model_config.hf_text_config
    paths = target_paths(hf.num_hidden_layers, targets)
    parts = shards(paths, _geometry(hf), rank=group.rank_in_group, size=group.world_size)
    parameters = dict(model.named_parameters())
    weights = {part.parameter: _weight(part, parameters) for part in parts}
    for name in weights:
        _check_reads(model, name)
    places = [
        Place(
            part.layer, part.d, part.k, part.rows, part.columns, weights[part.parameter][part.place]
        )
        for part in parts
    ]
    return weights, places


def _geometry(hf: Any) -> Geometry:
    """Sizes by the rules of vLLM's own models: absent entries follow from the others."""
    heads = hf.num_attention_heads
    return Geometry(
        hidden=hf.hidden_size,
        intermediate=hf.intermediate_size,
        heads=heads,
        kv_heads=getattr(hf, "num_key_value_heads", None) or heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // heads,
    )


def _refuse_config(config: Any) -> None:
    """Only whole, unquantised models without adapters, of the known architectures."""
    names = list(config.model_config.architectures)
    if not set(names) & set(ARCHITECTURES):
        raise UnsupportedRolloutBackend(
            f"architecture {names} is not mapped; expected one of {ARCHITECTURES}"
        )
    for what, wrong in (
        ("quantisation", config.model_config.quantization is not None),
        ("LoRA adapters", config.lora_config is not None),
        ("pipeline parallelism", config.parallel_config.pipeline_parallel_size > 1),
        ("weight offloading", config.offload_config.uva.cpu_offload_gb > 0),
    ):
        if wrong:
            raise UnsupportedRolloutBackend(f"thin updates do not go with {what}: turn it off")


def _weight(part: Shard, parameters: dict[str, nn.Parameter]) -> Tensor:
    """The parameter that holds a shard, in the expected shape."""
    weight = parameters.get(part.parameter)
    found = "nothing" if weight is None else f"{list(weight.shape)} {weight.dtype}"
    if weight is None or weight.shape != part.shape or not weight.is_floating_point():
        raise UnsupportedRolloutBackend(
            f"{part.parameter}: expected a float tensor of shape {list(part.shape)}, got {found}; "
            "the engine packs or converts its weights. Start it through "
            "logra_lab.rl.vllm_engine.VLLMEngine, or use the Hugging Face engine"
        )
    return weight.data


def _check_reads(model: nn.Module, parameter: str) -> None:
    """The layer's GEMM reads this very tensor, all of it: of ones, it sums the inputs.

    A packed copy would go on answering from the old numbers; so would a part of one.
    """
    name = parameter.removesuffix(".weight")
    layer: Any = model.get_submodule(name)
    weight = layer.weight.data
    x = torch.ones(3, weight.shape[1], dtype=weight.dtype, device=weight.device)
    kept = weight.clone()
    try:
        weight.fill_(1)
        y = layer.quant_method.apply(layer, x, None)
    finally:
        weight.copy_(kept)
    if y.shape != (3, weight.shape[0]) or not bool(((y / x.shape[1] - 1).abs() < 0.02).all()):
        raise UnsupportedRolloutBackend(
            f"{name}: its GEMM does not read {parameter}, so an update would change nothing; "
            "turn off whatever packs the weights, or use the Hugging Face engine"
        )
