"""A shared prefix is computed once, and nothing but the cost changes."""

import runpy
from pathlib import Path

import pytest
import torch

from logra_lab.errors import InputError
from logra_lab.probe import predict
from logra_lab.rl import ppo
from logra_lab.rl.policies import Policy
from logra_lab.rl.prefix import can_share, common_prefix
from logra_lab.rl.rollout import HFEngine
from logra_lab.sketch import Sketch

tiny_llm = runpy.run_path(str(Path(__file__).parents[1] / "reference.py"))["tiny_llm"]
PREFIX = list(range(1, 11))


def samples() -> list[ppo.Sample]:
    """Five prompts of different lengths after ten equal tokens, responses of 1 to 5 tokens."""
    made = []
    for i in range(5):
        prompt = PREFIX + [20 + i] * (i + 1)
        response = [3 + i] * (i + 1)
        made.append(ppo.Sample(prompt, response, torch.full((i + 1,), -3.0), "stop", i - 1.5))
    return made


@pytest.mark.parametrize(
    ("prompts", "length"),
    [
        ([[*PREFIX, i] for i in range(20, 24)], 10),
        ([[*PREFIX, i] for i in range(20, 23)], 0),  # three rows: not worth a pass
        ([[*PREFIX[:7], i, 1] for i in range(20, 24)], 0),  # seven tokens: neither
        ([PREFIX, [*PREFIX, 1], [*PREFIX, 2], [*PREFIX, 3]], 9),  # one token stays outside
        ([PREFIX] * 4, 9),
    ],
)
def test_prefix_catches_a_prompt_with_no_token_of_its_own_left(prompts, length):
    assert common_prefix(prompts) == length


@pytest.mark.parametrize("arch", ["Qwen2", "Qwen3", "Llama"])
def test_sharing_catches_prefix_gradients_counted_once_instead_of_in_every_row(arch):
    """Logits, loss and sketch as computed row by row, to float32 rounding; fewer token rows."""
    model = tiny_llm(arch)
    sketch = Sketch(model, 4)
    rows = []
    layer = next(iter(sketch.layers.values())).module
    layer.register_forward_hook(lambda m, args, out: rows.append(out.shape[:-1].numel()))
    seen = []
    for share in (True, False):
        sketch.zero_()
        rows.clear()
        batch = ppo.token_batch(samples(), 0, share_prefix=share)
        logits = batch.logits(model)
        ppo.ppo_loss(logits, batch, normaliser=15, temperature=1.0, clip=0.2).backward()
        seen.append((logits.detach(), sketch.flat.clone(), sum(rows)))
    (z, S, once), (z_rows, S_rows, every) = seen
    torch.testing.assert_close(z, z_rows, rtol=1e-4, atol=1e-5)
    assert float((S - S_rows).norm() / S_rows.norm()) < 1e-5
    # 5 rows of 10 prefix + 5 padded prompt + 5 padded response tokens, against 10 + 5 × 10
    assert (once, every) == (60, 100)


@pytest.mark.parametrize("method", ["jvp", "fd"])
def test_probe_catches_a_prefix_that_does_not_move_with_the_update(method):
    model = tiny_llm("Qwen2")
    sketch = Sketch(model, 4)
    torch.manual_seed(0)
    U = torch.randn_like(sketch.flat) * 0.01
    values = [
        predict(sketch, U, lambda b=batch: b.logits(model), method=method).kl
        for batch in (ppo.token_batch(samples(), 0, share_prefix=s) for s in (True, False))
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-4)


class Numbers:
    eos_token_id, pad_token_id, chat_template = 1, 0, None

    def decode(self, ids, **_):
        return " ".join(map(str, ids))


WINDOWED = {
    "Mistral": {"sliding_window": 8},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
}


@pytest.mark.parametrize("arch", WINDOWED)
def test_sliding_windows_catch_padding_that_takes_the_place_of_prompt_tokens(arch):
    """Padding between the prefix and a short prompt's rest would fill the window."""
    model = tiny_llm(arch, **WINDOWED[arch])
    assert not can_share(model)
    prompts = [[*PREFIX, *range(20, 20 + n)] for n in (1, 4, 9, 2)]
    engine = HFEngine(Policy(model, Numbers(), arch, (1,), 0), max_new_tokens=6)
    together = engine.generate(prompts, list("abcd"))
    made = []
    for i, prompt in enumerate(prompts):
        alone = engine.generate([prompt], ["abcd"[i]])
        assert alone.response_ids[0] == together.response_ids[i]
        logprobs, finish = together.logprobs[i], together.finish[i]
        made.append(ppo.Sample(prompt, together.response_ids[i], logprobs, finish, 1.0))
    with torch.no_grad():
        batch = ppo.token_batch(made, 0, share_prefix=False)
        logp = batch.logits(model).log_softmax(-1).gather(1, batch.labels[:, None])[:, 0]
        torch.testing.assert_close(logp, batch.logprobs, rtol=1e-4, atol=1e-5)
        with pytest.raises(InputError, match="share_prefix=False"):
            ppo.token_batch(made, 0).logits(model)


@pytest.mark.parametrize("arch", ["Qwen2", "Qwen3", "Llama"])
def test_models_with_full_attention_share(arch):
    assert can_share(tiny_llm(arch))
