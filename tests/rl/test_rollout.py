"""The rollout engine: exact ids, exact log-probabilities, lengths that never look at token values.

Expected log-probabilities come from a separate float64 forward pass of the whole sequence without
padding or cache, or from a model whose next-token probability is known in closed form.
"""

import copy
import hashlib
import json
import math

import pytest
import torch
import transformers as hf

from logra_lab.errors import InputError
from logra_lab.rl.policies import Policy, load_policy, make_policy
from logra_lab.rl.rollout import HFEngine
from logra_lab.rl.sampling import NonFiniteLogits, sample_inverse_cdf, sampling_uniforms

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ARCHITECTURES = {
    "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
    "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
    "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
}


class Numbers:
    """A tokenizer whose text is the ids themselves."""

    chat_template = None

    def __init__(self, eos: int | None = 1, pad: int | None = 0) -> None:
        self.eos_token_id, self.pad_token_id = eos, pad

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))


def tiny(kind: str = "qwen2", vocab: int = 61, sharpness: float = 20.0) -> hf.PreTrainedModel:
    """A random model; `sharpness` scales the logits, 1 leaves them nearly uniform."""
    config, model_class = ARCHITECTURES[kind]
    torch.manual_seed(0)
    model = model_class(config(vocab_size=vocab, **SIZES))
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return model


def successor(eos: tuple[int, ...], pad: int, p: float = 0.97) -> Policy:
    """A vocabulary of 7 in which (t + 1) mod 7 follows t with probability p, else uniform.

    The layers add nothing, so the final state is the one-hot embedding times √hidden (RMSNorm of
    a one-hot vector); the logit of the successor is ln(6p / (1 − p)), the others 0.
    """
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=7, **SIZES))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(7, SIZES["hidden_size"]))
        logit = math.log(6 * p / (1 - p)) / math.sqrt(SIZES["hidden_size"])
        model.lm_head.weight.copy_(torch.eye(7, SIZES["hidden_size"]).roll(1, 0) * logit)
    model.config.eos_token_id = list(eos)
    return make_policy(model, Numbers(eos=None, pad=pad), "successor")


def recompute(model: hf.PreTrainedModel, prompt: list[int], response: list[int], t: float):
    """Log-probabilities [len(response)] by one float64 forward pass of the unpadded sequence."""
    exact = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        logits = exact(torch.tensor([prompt + response]), use_cache=False).logits[0]
    rows = torch.log_softmax(logits / t, -1)[len(prompt) - 1 : -1]
    return rows[torch.arange(len(response)), torch.tensor(response)]


def prompts_of(n: int, vocab: int, longest: int = 9) -> list[list[int]]:
    """n prompts of lengths 1 to `longest`, in no order of length."""
    generator = torch.Generator().manual_seed(n)
    lengths = torch.randint(1, longest + 1, (n,), generator=generator).tolist()
    return [torch.randint(0, vocab, (k,), generator=generator).tolist() for k in lengths]


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_a_full_forward_pass_at_the_sampling_temperature(kind, temperature):
    model = tiny(kind)
    policy = make_policy(model, Numbers(), kind)
    prompts = prompts_of(20, 61)
    engine = HFEngine(policy, temperature=temperature, max_new_tokens=12, batch_size=8)
    out = engine.generate(prompts, [f"k{i}" for i in range(20)])
    assert out.prompt_ids == prompts
    for prompt, response, logprobs in zip(prompts, out.response_ids, out.logprobs, strict=True):
        assert logprobs.dtype == torch.float32
        assert logprobs.shape == (len(response),)
        assert not logprobs.is_inference()  # they enter the loss later
        expected = recompute(model, prompt, response, temperature)
        torch.testing.assert_close(logprobs.double(), expected, atol=1e-4, rtol=0)


def test_left_padding_keeps_positions_of_a_model_with_absolute_positions():
    config = hf.GPT2Config(vocab_size=61, n_embd=64, n_layer=2, n_head=2, n_positions=64)
    config.bos_token_id = config.eos_token_id = None
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wpe.weight.mul_(50)  # a shift by one position changes the logits a lot
    prompts = prompts_of(12, 61)
    policy = make_policy(model, Numbers(), "gpt2")
    out = HFEngine(policy, max_new_tokens=6).generate(prompts, [str(i) for i in range(12)])
    for prompt, response, logprobs in zip(prompts, out.response_ids, out.logprobs, strict=True):
        expected = recompute(model, prompt, response, 1.0)
        torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


def test_alignment_on_a_model_with_known_logprobs_where_a_shift_by_one_would_show():
    out = HFEngine(successor((6,), 0), max_new_tokens=40).generate(
        [[i % 6] for i in range(60)], [str(i) for i in range(60)]
    )
    seen = 0
    for prompt, response, logprobs in zip(
        out.prompt_ids, out.response_ids, out.logprobs, strict=True
    ):
        for before, token, value in zip(prompt + response, response, logprobs, strict=False):
            p = 0.97 if token == (before + 1) % 7 else 0.005
            # RMSNorm's ε (1e-6 beside a mean square of 1/64) lowers the logit by 1.7e-4
            assert value.item() == pytest.approx(math.log(p), abs=3e-4)
            seen += 1
    assert seen > 100


LEAKY = {
    "do_sample": True,
    "top_p": 0.8,
    "top_k": 5,
    "temperature": 0.3,
    "repetition_penalty": 1.3,
    "no_repeat_ngram_size": 2,
    "suppress_tokens": [3, 4, 5],
    "min_new_tokens": 5,
    "eos_token_id": [7, 9],
}


def folder_policy(path, settings: dict) -> Policy:
    """A model folder with a generation_config.json of its own, loaded as a user would."""
    tiny(vocab=64, sharpness=1.0).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(settings))
    model = hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return make_policy(model, Numbers(eos=1), "folder")


def test_a_folders_generation_config_changes_nothing_but_the_stop_ids(tmp_path):
    leaky = folder_policy(tmp_path / "leaky", LEAKY)
    assert leaky.model.generation_config.repetition_penalty == 1.3  # the trap is set
    clean = folder_policy(tmp_path / "clean", {"eos_token_id": [7, 9]})
    assert leaky.eos_ids == clean.eos_ids == (1, 7, 9)
    prompts, keys = prompts_of(64, 64), [str(i) for i in range(64)]
    a, b = (HFEngine(p, max_new_tokens=20).generate(prompts, keys) for p in (leaky, clean))
    assert a.response_ids == b.response_ids
    assert a.finish == b.finish
    assert all(torch.equal(x, y) for x, y in zip(a.logprobs, b.logprobs, strict=True))
    assert leaky.model.generation_config.repetition_penalty == 1.3  # and is still there


def test_the_whole_vocabulary_is_sampled_with_its_softmax_probabilities(tmp_path):
    policy = folder_policy(tmp_path, LEAKY)
    n, vocab, temperature = 12_800, 64, 0.5
    engine = HFEngine(policy, temperature=temperature, max_new_tokens=1, batch_size=3200)
    out = engine.generate([[11, 12]] * n, [f"draw {i}" for i in range(n)])
    counts = torch.bincount(torch.tensor(out.response_ids)[:, 0], minlength=vocab).double()
    with torch.no_grad():
        logits = policy.model(torch.tensor([[11, 12]])).logits[0, -1].double()
    p = torch.softmax(logits / temperature, -1)
    assert (p * n).min() > 50  # so that every id must appear, and chi-square applies
    assert (counts > 0).all()
    # Pearson's statistic has mean vocab − 1 and variance 2 (vocab − 1): a band of 4 deviations.
    chi2 = ((counts - n * p) ** 2 / (n * p)).sum().item()
    assert abs(chi2 - (vocab - 1)) < 4 * math.sqrt(2 * (vocab - 1))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_first_token_frequency_of_a_peaked_model_lies_in_the_binomial_band(temperature):
    policy = make_policy(tiny(sharpness=30.0), Numbers(), "peaked")
    n = 4000
    engine = HFEngine(policy, temperature=temperature, max_new_tokens=1, batch_size=1000)
    out = engine.generate([[5, 6, 7]] * n, [f"{temperature}:{i}" for i in range(n)])
    first = torch.tensor(out.response_ids)[:, 0]
    with torch.no_grad():
        logits = policy.model(torch.tensor([[5, 6, 7]])).logits[0, -1].double()
    p = torch.softmax(logits / temperature, -1)
    for token in p.topk(5).indices.tolist():
        share, want = (first == token).double().mean().item(), p[token].item()
        assert abs(share - want) < 4 * math.sqrt(want * (1 - want) / n)  # 4 deviations


@pytest.mark.parametrize(
    ("eos", "pad", "prompt", "limit", "response", "finish"),
    [
        ((3, 5), 0, [0], 6, [1, 2, 3], "stop"),  # first of two stop ids
        ((3, 5), 0, [3], 6, [4, 5], "stop"),  # second of two; one in the prompt does not count
        ((3,), 0, [2], 6, [3], "stop"),  # length 1
        ((3,), 0, [0], 3, [1, 2, 3], "stop"),  # stops at the very limit
        ((3,), 0, [0], 2, [1, 2], "length"),  # one token short of it
        ((3,), 0, [3], 1, [4], "length"),  # limit 1
        ((5,), 5, [2], 6, [3, 4, 5], "stop"),  # pad is the stop id: it is still part of it
        ((5,), 2, [0], 6, [1, 2, 3, 4, 5], "stop"),  # pad id in the middle
        ((6,), 5, [2], 3, [3, 4, 5], "length"),  # pad id as the last token of a cut response
    ],
)
def test_lengths_and_finish_come_from_the_engine_never_from_token_values(
    eos, pad, prompt, limit, response, finish
):
    policy = successor(eos, pad, p=0.97)
    engine = HFEngine(policy, max_new_tokens=limit, greedy=True)
    # A companion that goes on longest keeps the batch running after the row is done.
    companion = [max(eos)]
    out = engine.generate([prompt, companion], ["a", "b"])
    assert out.response_ids[0] == response
    assert out.finish[0] == finish
    assert len(out.logprobs[0]) == len(response)
    # the text is that of the response without the id that ends it
    body = response[:-1] if finish == "stop" else response
    assert out.texts[0] == " ".join(map(str, body))


def test_a_rows_tokens_depend_on_its_key_alone_not_on_the_batch_around_it():
    policy = load_policy("small")
    pairs = [(a, b) for a in (3, 42, 99) for b in (0, 7, 58, 61)]
    prompts = [policy.encode(f"{a}+{b}=") for a, b in pairs]
    keys = [f"0:1:{a}+{b}:0" for a, b in pairs]
    whole = HFEngine(policy, max_new_tokens=16).generate(prompts, keys)
    assert len({tuple(r) for r in whole.response_ids}) > 6
    shuffled = [7, 2, 11, 0, 5, 9, 1, 10, 3, 8, 4, 6]
    for order, batch_size in ((shuffled, 5), (shuffled[::-1], 64), (range(12), 1)):
        engine = HFEngine(policy, max_new_tokens=16, batch_size=batch_size)
        part = engine.generate([prompts[i] for i in order], [keys[i] for i in order])
        for place, i in enumerate(order):
            assert part.response_ids[place] == whole.response_ids[i]
            assert part.finish[place] == whole.finish[i]
            torch.testing.assert_close(part.logprobs[place], whole.logprobs[i], atol=1e-4, rtol=0)
    other = HFEngine(policy, max_new_tokens=16).generate(prompts, [k + "!" for k in keys])
    assert other.response_ids != whole.response_ids


def philox_reference(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers, from Salmon et al., SC 2011, section 3.3."""
    for _ in range(10):
        low, high = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        mask = 0xFFFFFFFF
        counter = [
            (high >> 32) ^ counter[1] ^ key[0],
            high & mask,
            (low >> 32) ^ counter[3] ^ key[1],
            low & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def test_uniforms_follow_the_written_scheme():
    keys = ["0:1:a:0", "0:1:b:0"]
    got = sampling_uniforms(keys, 3)
    for i, text in enumerate(keys):
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        key = [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]
        for t in range(3):
            words = philox_reference([t, 0, 3, 1], list(key))
            assert got[i, t].item() == ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


def test_inverse_cdf_takes_half_open_intervals_and_never_a_probability_of_zero():
    logprobs = torch.tensor([[0.5, 0.0, 0.25, 0.25, 0.0]]).log().expand(6, -1)
    uniforms = torch.tensor([0.0, 0.4999, 0.5, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert sample_inverse_cdf(logprobs, uniforms).tolist() == [0, 0, 2, 2, 3, 3]


def test_inverse_cdf_reaches_every_id_of_a_large_vocabulary():
    vocab = 150_000
    logprobs = torch.full((1, vocab), -math.log(vocab))
    for i in (0, 1, vocab // 2, vocab - 2, vocab - 1):
        middle = torch.tensor([(i + 0.5) / vocab], dtype=torch.float64)
        assert sample_inverse_cdf(logprobs, middle).item() == i


def test_inverse_cdf_reaches_a_last_id_that_a_float32_running_sum_would_lose():
    logprobs = torch.tensor([[0.0, math.log(1e-9)]])  # float32 numbers near 1 are 6e-8 apart
    uniforms = torch.tensor([1 - 1.5e-9, 1 - 0.5e-9], dtype=torch.float64)
    assert sample_inverse_cdf(logprobs.expand(2, -1), uniforms).tolist() == [0, 1]


def test_greedy_takes_the_most_probable_token():
    model = tiny()
    policy = make_policy(model, Numbers(), "greedy")
    out = HFEngine(policy, max_new_tokens=5, greedy=True).generate([[4, 5]], ["unused"])
    ids = [4, 5]
    for token in out.response_ids[0]:
        with torch.no_grad():
            assert token == model(torch.tensor([ids])).logits[0, -1].argmax().item()
        ids.append(token)


def test_modes_and_config_are_restored_with_gradient_checkpointing_and_after_an_error():
    model = tiny()
    policy = make_policy(model, Numbers(), "modes")
    expected = HFEngine(policy, max_new_tokens=8).generate([[4, 5]], ["k"])
    model.train()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.model.layers[1].eval()  # a mixture of modes is kept as it is
    modes = [module.training for module in model.modules()]
    config = model.generation_config
    out = HFEngine(policy, max_new_tokens=8).generate([[4, 5]], ["k"])
    assert out.response_ids == expected.response_ids

    def unchanged() -> bool:
        return (
            [module.training for module in model.modules()] == modes
            and model.generation_config is config
            and model.config.use_cache is False
        )

    assert unchanged()
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    with pytest.raises(NonFiniteLogits, match=r"token 0 .*1 of 1 rows"):
        HFEngine(policy, max_new_tokens=8).generate([[4, 5]], ["k"])
    assert unchanged()


def test_a_peft_model_samples_like_its_base_whatever_the_folder_says(tmp_path):
    peft = pytest.importorskip("peft")
    policy = folder_policy(tmp_path, LEAKY)
    prompts, keys = prompts_of(16, 64), [str(i) for i in range(16)]
    base = HFEngine(policy, max_new_tokens=12).generate(prompts, keys)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    policy.model = peft.get_peft_model(policy.model, lora)  # LoRA starts as the identity
    out = HFEngine(policy, max_new_tokens=12).generate(prompts, keys)
    assert out.response_ids == base.response_ids
    assert policy.model.get_base_model().generation_config.top_k == 5


@pytest.mark.parametrize(
    ("settings", "prompts", "keys", "message"),
    [
        ({"temperature": 0.0}, [[1]], ["a"], "temperature 0.0"),
        ({"temperature": -1.0}, [[1]], ["a"], "temperature -1.0"),
        ({"temperature": float("nan")}, [[1]], ["a"], "temperature nan"),
        ({"max_new_tokens": 0}, [[1]], ["a"], "max_new_tokens 0"),
        ({"batch_size": 0}, [[1]], ["a"], "batch_size 0"),
        ({}, [], [], "no prompts"),
        ({}, [[1], []], ["a", "b"], "prompt 1 is empty"),
        ({}, [[1], [2]], ["a"], "2 prompts but 1 keys"),
        ({}, [[1, 61]], ["a"], "expected 0..60"),
        ({}, [[1, -1]], ["a"], "expected 0..60"),
        ({"max_new_tokens": 128}, [[1]], ["a"], "128 positions"),
    ],
)
def test_bad_input_is_named(settings, prompts, keys, message):
    policy = make_policy(tiny(), Numbers(), "bad")
    with pytest.raises(InputError, match=message):
        HFEngine(policy, **{"max_new_tokens": 4, **settings}).generate(prompts, keys)
