"""The table of model shapes against transformers' own models, built without weights."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
)
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from logra_lab.errors import InputError
from logra_lab.sketch import TARGETS, find_targets
from logra_lab.sync.shapes import MODELS
from logra_lab.sync.update import ThinUpdate
from logra_lab.sync.wire import payload_bytes

# Sizes as in the models' config.json.
QWEN = {"tie_word_embeddings": False, "num_hidden_layers": 28}
QWEN_27B = Qwen3_5TextConfig(
    hidden_size=5120,
    intermediate_size=17408,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    vocab_size=248320,
    tie_word_embeddings=False,
)
LINEAR = ("in_proj_qkv", "in_proj_z", "out_proj")
CONFIGS: dict[str, tuple[PreTrainedConfig, tuple[str, ...]]] = {
    "Qwen2.5-1.5B": (
        Qwen2Config(
            **{**QWEN, "tie_word_embeddings": True},
            hidden_size=1536,
            intermediate_size=8960,
            num_attention_heads=12,
            num_key_value_heads=2,
            vocab_size=151936,
        ),
        TARGETS,
    ),
    "Qwen2.5-7B": (
        Qwen2Config(
            **QWEN,
            hidden_size=3584,
            intermediate_size=18944,
            num_attention_heads=28,
            num_key_value_heads=4,
            vocab_size=152064,
        ),
        TARGETS,
    ),
    "27B": (QWEN_27B, TARGETS),
    "27B with linear attention": (QWEN_27B, (*TARGETS, *LINEAR)),
}


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_size_are_those_of_the_model_that_transformers_builds(name: str) -> None:
    config, kinds = CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = {path: tuple(m.weight.shape) for path, m in find_targets(model, kinds).items()}
    assert {x.name: (x.d, x.k) for x in MODELS[name].layers} == found
    assert MODELS[name].parameters == sum(p.numel() for p in model.parameters())


def test_qwen25_has_the_published_number_of_parameters() -> None:
    # 1.54B and 7.61B on the model pages, the second cut rather than rounded.
    assert MODELS["Qwen2.5-1.5B"].parameters == pytest.approx(1.54e9, abs=1e7)
    assert MODELS["Qwen2.5-7B"].parameters == pytest.approx(7.61e9, abs=1e7)


def test_an_update_of_a_shape_weighs_its_closed_form_and_reads_back() -> None:
    shape = MODELS["Qwen2.5-1.5B"]
    data = shape.update(4).to_bytes()
    rows = 28 * (1536 + 256 + 256 + 1536 + 8960 + 8960 + 1536)  # q k v o gate up down
    assert payload_bytes(shape.shapes, 4) == rows * 5
    assert rows * 5 < len(data) < rows * 5 + 256 * len(shape.layers)
    assert ThinUpdate.from_bytes(data).layers == shape.layers


def test_a_rank_above_the_smallest_k_is_refused() -> None:
    with pytest.raises(InputError, match="rank 1537"):
        MODELS["Qwen2.5-1.5B"].update(1537)
