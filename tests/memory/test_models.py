"""What of a model decides the bytes, against transformers' own models built without weights."""

import pytest
import torch
from transformers import (
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from logra_lab.errors import InputError
from logra_lab.memory.arch import from_config
from logra_lab.memory.models import PRESETS, find
from logra_lab.sketch import TARGETS, Sketch, find_targets
from logra_lab.sync.shapes import MODELS

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 200,
}
QWEN_7B = Qwen2Config(
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    vocab_size=152064,
    tie_word_embeddings=False,
)
MODELS_OF = {
    "qwen2, tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen2, untied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=32)),
    "llama with biases": (
        LlamaForCausalLM,
        LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, head_dim=24)),
    "qwen2.5-7b": (Qwen2ForCausalLM, QWEN_7B),
}


@pytest.mark.parametrize("name", MODELS_OF)
def test_parameters_and_trained_matrices_are_those_of_the_built_model(name: str) -> None:
    # Biases, a head width of its own and tied embeddings are what a wrong count would miss.
    build, config = MODELS_OF[name]
    arch = from_config(config, name)
    with torch.device("meta"):
        model = build(config)
    assert arch.parameters == sum(p.numel() for p in model.parameters())
    targets = find_targets(model, TARGETS).values()
    assert arch.targets == sum(m.weight.numel() for m in targets)
    assert arch.rows == sum(m.out_features for m in targets)
    outside = sum(p.numel() for n, p in model.named_parameters() if ".layers." not in n)
    assert arch.root == outside
    assert arch.block_parameters * arch.depth == arch.parameters - outside


def test_sites_are_those_that_the_sketch_projects_once() -> None:
    model = Qwen2ForCausalLM(MODELS_OF["qwen2, tied"][1])
    arch = from_config(model.config, "it")
    sketch = Sketch(model, 4)
    assert sum(b.count * b.sites for b in arch.blocks) == len(sketch.sites)
    assert sum(b.count * b.inputs for b in arch.blocks) == sum(s.k for s in sketch.sites)


def test_presets_have_the_matrices_of_the_shapes_that_updates_use() -> None:
    for name, arch in PRESETS.items():
        assert arch.targets == sum(d * k for d, k in MODELS[name].shapes)
        assert arch.rows == sum(d for d, _ in MODELS[name].shapes)
        assert arch.parameters == MODELS[name].parameters
    by_hand = from_config(QWEN_7B, "by hand")
    preset = PRESETS["Qwen2.5-7B"]
    assert (by_hand.blocks, by_hand.parameters) == (preset.blocks, preset.parameters)
    # arXiv:2412.15115, table 1, and the model card: 28 blocks, 4 heads of keys and values, 128 wide
    assert preset.kv == 28 * 2 * 4 * 128


def test_a_folder_and_the_shipped_policy_are_read(tmp_path) -> None:
    MODELS_OF["llama"][1].save_pretrained(tmp_path)
    assert find(str(tmp_path)).parameters == from_config(MODELS_OF["llama"][1], "").parameters
    assert find("small").parameters == 801_664  # data/MANIFEST.json


def test_the_hub_id_of_a_preset_needs_no_network(monkeypatch) -> None:
    """README: `logra-lab plan Qwen/Qwen2.5-7B`, on a node that may have none."""
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    assert find("Qwen/Qwen2.5-7B") is PRESETS["Qwen2.5-7B"]
    assert find("Qwen/Qwen2.5-1.5B") is PRESETS["Qwen2.5-1.5B"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Qwen2.5-8B", "did you mean 'Qwen2.5-7B'?"),
        ("someone/unknown-model", "is there a network connection?"),
        ("./nowhere", "no such folder"),
        ("tests", "the folder has no config.json"),
    ],
)
def test_what_cannot_be_found_is_named(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said.replace("?", r"\?")):
        find(name)


def test_blocks_without_a_closed_form_are_refused_not_guessed(tmp_path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="type 'gpt2'"):
        find(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        find(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ('{"model_type": "qwen2", "hidden_size": "x"}', "expected int, got str"),
        ('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 0}', "by zero"),
    ],
)
def test_a_config_with_values_of_another_kind_is_named_not_a_traceback(
    tmp_path, config: str, said: str
) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError, match=f"config.json cannot be read: .*{said}"):
        find(str(tmp_path))
