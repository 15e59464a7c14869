"""The presets for GPUs against the memory plan, and what `logra-lab train` makes of them."""

import pytest

from logra_lab.errors import InputError
from logra_lab.lab.presets import PRESETS, preset
from logra_lab.memory.models import PRESETS as MODELS
from logra_lab.memory.plan import Setup, learn, serve
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.loop import placed_config

GIB = 2**30
CARD = 80e9 / GIB  # an H100's


def costs(name: str, fsdp: int) -> tuple[float, float, float]:
    """GiB: a step at the upper end of its range; serving without, and with, the preset's cache."""
    config = placed_config(preset(name))
    arch = MODELS[config.policy.removeprefix("Qwen/")]
    setup = Setup(rank=config.rank, fsdp=fsdp, tokens=config.microbatch_tokens)
    terms = [t for t in serve(arch, setup, follow=True).terms if not t.name.startswith("cache")]
    bare = sum(t.high for t in terms) / GIB
    return learn(arch, "logra", setup).high / GIB, bare, bare + config.kv_cache_mib / 1024


def test_one_gpu_fits_trainer_and_engine_together_and_not_only_one_at_a_time():
    step, bare, served = costs("one_gpu", fsdp=1)
    assert step < 22
    assert bare < 9
    assert step + served < 40


def test_eight_gpu_fits_a_card_each_with_a_tenth_to_spare():
    step, bare, served = costs("eight_gpu", fsdp=4)
    assert step < 42
    assert bare < 41
    assert max(step, served) < 0.9 * CARD


@pytest.mark.parametrize(("name", "sequences"), [("one_gpu", 73), ("eight_gpu", 109)])
def test_the_cache_holds_as_many_sequences_as_the_preset_says(name, sequences):
    config = placed_config(preset(name))
    # Published configurations: 28 blocks, 2 and 4 heads of 128 for keys and for values; bfloat16.
    heads = {"one_gpu": 2, "eight_gpu": 4}[name]
    length = config.max_prompt_tokens + config.max_new_tokens
    assert length == 4096
    assert config.kv_cache_mib * 2**20 // (length * 28 * heads * 128 * 2 * 2) == sequences


def test_eight_gpu_is_four_and_four_with_two_probe_responses_a_rank_and_resumes_by_the_step():
    config = placed_config(preset("eight_gpu"))
    assert (config.trainers, config.engines, config.engine) == (4, 4, "vllm")
    assert (config.autocast, config.serving_dtype) == ("bfloat16", "bfloat16")
    assert config.checkpointing == "non_reentrant"
    assert config.probe_responses == 2 * config.trainers
    assert config.journal_every > 0
    assert placed_config(preset("eight_gpu"), trainers=0, engines=2).engines == 2


@pytest.mark.parametrize("method", ["adam", "lora"])
def test_the_baselines_stay_in_one_process_with_the_types_of_the_preset(method):
    config = placed_config(preset("eight_gpu"), method=method)
    assert (config.trainers, config.engines, config.engine) == (0, 0, "shared")
    assert (config.autocast, config.checkpointing) == ("bfloat16", "non_reentrant")
    with pytest.raises(InputError, match="engine must be 'shared'"):
        placed_config(preset("eight_gpu"), method=method, engine="vllm")


@pytest.mark.parametrize("name", PRESETS)
def test_a_placement_holds_settings_only_and_none_twice_within_a_preset(name):
    names = [key for key, _ in preset(name).placement]
    assert set(names) <= TrainConfig.model_fields.keys()
    assert len(names) == len(set(names))
    assert not set(names) & vars(preset(name)).keys()  # nor one that the preset has as a field
