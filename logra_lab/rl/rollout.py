"""Rollout with Hugging Face generation: exact token ids and exact log-probabilities.

`HFEngine` drives `model.generate`, but one logits processor decides every token (see `sampling`):
it draws from softmax(logits / T) over the whole vocabulary, records log softmax(logits / T) of the
choice, and leaves the chosen token as the only possible one. So nothing that a model folder
keeps in its `generation_config.json` can change what is sampled.

Lengths and finish reasons are kept by the engine; masks never look at token values, so a pad id
equal to an end-of-sequence id, or sampled in the middle of a response, is harmless.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from logra_lab.errors import InputError
from logra_lab.rl.policies import Policy
from logra_lab.rl.prefix import can_share, common_prefix, prefix_cache
from logra_lab.rl.sampling import Sampler, StopWhenSampled, sampling_uniforms


@dataclass
class Rollout:
    """Responses in the order of the prompts; all lists have one entry a row.

    Attributes:
        prompt_ids, response_ids: token ids; a response includes its end-of-sequence token.
        logprobs: log softmax(logits / T) of each response token, float32 [length of response].
        finish: "stop" (ended by an end-of-sequence token) or "length" (cut at the limit).
        texts: decoded responses, for rewards and display only: training uses the ids.
    """

    prompt_ids: list[list[int]]
    response_ids: list[list[int]]
    logprobs: list[Float[Tensor, " length"]]
    finish: list[str]
    texts: list[str]


class Generates(Protocol):
    """What an evaluation needs of an engine."""

    def generate(self, prompt_ids: list[list[int]], keys: list[str]) -> Rollout: ...


@contextmanager
def _generating(model: Any) -> Iterator[None]:
    """Eval mode and a bare generation config for the time of a rollout; then as it was.

    `generate` fills every setting that is left at None from `model.generation_config`, and copies
    entries it does not know (transformers 5.19, `_prepare_generation_config`), so the model's own
    config is put aside rather than overridden field by field.
    """
    training = [module for module in model.modules() if module.training]
    # A peft wrapper hands its own config down to the model inside, so both are put aside.
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    configs = [(m, m.generation_config) for m in (model, base)]
    model.eval()
    for m, _ in configs:
        m.generation_config = GenerationConfig()
    try:
        yield
    finally:
        for m, config in configs:
            m.generation_config = config
        for module in training:
            module.training = True


class HFEngine:
    """Samples responses from a policy with `model.generate`.

    Args:
        policy: model, tokenizer and stop ids; the model is used in place, never copied.
        temperature: T > 0; logits are divided by it.
        max_new_tokens: response length limit, at least 1.
        batch_size: rows a forward pass; prompts are sorted by length and left-padded, and what
            all of them begin with is computed once.
        greedy: take the most probable token instead of sampling (for evaluation only).

    Raises `InputError` for a limit or batch size below 1 or a temperature that is not positive.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        temperature: float = 1.0,
        max_new_tokens: int,
        batch_size: int = 64,
        greedy: bool = False,
    ) -> None:
        if not 0 < temperature < float("inf"):
            raise InputError(
                f"temperature {temperature}: expected a positive number; for the most probable "
                "token use greedy=True"
            )
        for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
            if value < 1:
                raise InputError(f"{name} {value}: expected at least 1")
        self.policy, self.temperature, self.greedy = policy, temperature, greedy
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size

    def generate(self, prompt_ids: list[list[int]], keys: list[str]) -> Rollout:
        """One response a prompt; keys[i] alone determines the random numbers of row i.

        Equal prompts with equal keys give equal responses. Raises `InputError` for no prompts, an
        empty prompt, ids outside the vocabulary, or a length beyond the model's positions, and
        `NonFiniteLogits`. Modes and configuration of the model are restored in every case.
        """
        self._check(prompt_ids, keys)
        order = sorted(range(len(prompt_ids)), key=lambda i: len(prompt_ids[i]))
        responses: dict[int, tuple[list[int], Tensor, str]] = {}
        # no_grad, not inference_mode: the log-probabilities enter the PPO loss later on.
        with _generating(self.policy.model), torch.no_grad():
            for start in range(0, len(order), self.batch_size):
                rows = order[start : start + self.batch_size]
                batch = self._batch([prompt_ids[i] for i in rows], [keys[i] for i in rows])
                responses.update(zip(rows, batch, strict=True))
        ids, logprobs, finish = zip(*(responses[i] for i in range(len(order))), strict=True)
        texts = [self.policy.decode(response) for response in ids]
        return Rollout(
            [list(p) for p in prompt_ids], list(ids), list(logprobs), list(finish), texts
        )

    def _batch(
        self, prompts: list[list[int]], keys: list[str]
    ) -> list[tuple[list[int], Tensor, str]]:
        """Ids, logprobs and finish reason of one batch of rows."""
        model: Any = self.policy.model
        device = model.device
        n = common_prefix(prompts) if can_share(model) else 0
        width = max(map(len, prompts))
        pad = self.policy.pad_id
        gaps = [width - len(p) for p in prompts]
        rows = [p[:n] + [pad] * gap + p[n:] for p, gap in zip(prompts, gaps, strict=True)]
        ids = torch.tensor(rows, device=device)
        mask = torch.ones_like(ids)
        for row, gap in enumerate(gaps):
            mask[row, n : n + gap] = 0
        uniforms = None if self.greedy else sampling_uniforms(keys, self.max_new_tokens)
        sampler = Sampler(
            uniforms, len(prompts), self.max_new_tokens, self.temperature, self.policy, device
        )
        model.generate(
            ids,
            attention_mask=mask,
            past_key_values=prefix_cache(model, prompts[0][:n], len(rows)) if n else None,
            generation_config=GenerationConfig(
                max_new_tokens=self.max_new_tokens,
                do_sample=False,
                num_beams=1,
                use_cache=True,
                pad_token_id=pad,
            ),
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([StopWhenSampled(sampler)]),
        )
        lengths, stopped = sampler.lengths.tolist(), sampler.stopped.tolist()
        chosen, logprobs = sampler.ids.tolist(), sampler.logprobs.cpu()
        return [
            (chosen[i][:n], logprobs[i, :n].clone(), "stop" if stopped[i] else "length")
            for i, n in enumerate(lengths)
        ]

    def _check(self, prompt_ids: list[list[int]], keys: list[str]) -> None:
        if not prompt_ids:
            raise InputError("no prompts to generate from: expected at least one")
        if len(keys) != len(prompt_ids):
            raise InputError(f"{len(prompt_ids)} prompts but {len(keys)} keys: expected one each")
        size = self.policy.vocab_size
        positions: int | None = getattr(self.policy.model.config, "max_position_embeddings", None)
        for i, prompt in enumerate(prompt_ids):
            if not prompt:
                raise InputError(f"prompt {i} is empty: expected at least one token id")
            if not 0 <= min(prompt) <= max(prompt) < size:
                raise InputError(
                    f"prompt {i} holds token ids {min(prompt)}..{max(prompt)}, expected 0.."
                    f"{size - 1}; encode prompts with the policy's own tokenizer"
                )
            if positions is not None and len(prompt) + self.max_new_tokens > positions:
                raise InputError(
                    f"prompt {i} has {len(prompt)} tokens; with max_new_tokens "
                    f"{self.max_new_tokens} it exceeds the model's {positions} positions; "
                    "shorten the prompt or lower max_new_tokens"
                )
