"""The training configuration: what it refuses, and that its defaults are the contract's."""

import json

import pytest

from logra_lab.errors import InputError
from logra_lab.lab.presets import PRESETS
from logra_lab.rl.config import TrainConfig, make_config
from logra_lab.rl.loop import preset_config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stepz": 3}, "'stepz' is no setting; did you mean 'steps'"),
        ({"rank": 0}, "rank: Input should be greater than or equal to 1"),
        ({"rank": True}, "rank is True"),
        ({"temperature": True}, "temperature is True"),
        ({"rank": 2.5}, "rank: Input should be a valid integer"),
        ({"method": "sgd"}, "method: Input should be 'logra', 'adam' or 'lora'"),
        ({"temperature": 0}, "temperature: Input should be greater than 0"),
        ({"temperature": float("inf")}, "temperature: Input should be a finite number"),
        ({"update_ratio": float("nan")}, "update_ratio: Input should be a finite number"),
        ({"clip": 1.0}, "clip: Input should be less than 1"),
        ({"baseline_decay": 1.0}, "baseline_decay: Input should be less than 1"),
        ({"steps": 0}, "steps: Input should be greater than or equal to 1"),
        ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
        ({"targets": "q_proj"}, "targets: Input should be a valid tuple"),
        ({"checkpointing": "yes"}, "checkpointing: Input should be 'none', 'reentrant' or"),
        ({"kl_start": 0.0}, "kl_start: Input should be greater than 0"),
        ({"kl_end": 1e-4}, "kl_end needs kl_start"),
        ({"kl_start": 1e-3, "kl_method": "off"}, "kl_method must not be 'off'"),
        ({"kl_start": 1e-3, "method": "adam"}, "method 'adam' has no KL control"),
        ({"engines": 2}, "engines on Ray have weights of their own: engine 'hf' or 'vllm'"),
        ({"engines": 2, "engine": "hf", "engine_tensor_parallel": 2}, "needs engine 'vllm'"),
        ({"engine": "vllm", "engine_tensor_parallel": 2}, "engines of at least 1"),
        ({"engine": "hf", "overlap": True}, "transport and overlap need engines on Ray"),
        ({"ray_address": "auto"}, "ray_address needs engines or trainers"),
        ({"engine_timeout": 0}, "engine_timeout: Input should be greater than 0"),
        ({"rank": 0, "steps": 0}, "rank: .*; steps: |steps: .*; rank: "),  # all of them at once
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(settings, message):
    with pytest.raises(InputError, match=f"training configuration: .*({message})"):
        make_config(**settings)


def test_defaults_are_those_of_the_contract():
    c = make_config()
    assert (c.temperature, c.clip, c.baseline_decay, c.updates_per_batch) == (1.0, 0.2, 0.9, 1)
    assert (c.beta2, c.alpha_max, c.refresh, c.projection) == (0.95, 3.0, True, "sign")
    assert c.warn_after_equal_rewards == 20
    assert c.measure_kl


def test_a_configuration_survives_json_as_the_manifest_keeps_it():
    config = make_config(targets=("q_proj",), task_params={"max_value": 9}, kl_start=1e-3)
    assert TrainConfig(**json.loads(json.dumps(config.model_dump(mode="json")))) == config


def test_a_configuration_cannot_be_changed_under_a_run():
    with pytest.raises(ValueError, match="frozen"):
        make_config().rank = 3


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_a_configuration_with_its_own_values(name):
    preset = PRESETS[name]
    config = preset_config(preset)
    shared = TrainConfig.model_fields.keys() & vars(preset).keys() - {"task_params"}
    assert {n: getattr(config, n) for n in shared} == {n: getattr(preset, n) for n in shared}
    assert config.task_params == dict(preset.task_params)


def test_settings_override_the_preset_and_the_baselines_have_no_budget():
    config = preset_config(PRESETS["smoke"], method="lora", steps=2)
    assert (config.method, config.steps, config.kl_start, config.kl_end) == ("lora", 2, None, None)
    with pytest.raises(InputError, match="has no KL control"):
        preset_config(PRESETS["smoke"], method="adam", kl_start=1e-3)
