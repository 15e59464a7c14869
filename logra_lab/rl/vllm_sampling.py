"""What VLLMEngine asks vLLM to sample, and what it accepts as an answer."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from logra_lab.errors import InputError, LograError

# The values of vLLM's sampling settings that leave softmax(logits / T) alone.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "bad_words": (None,),
    "structured_outputs": (None,),
    "thinking_token_budget": (None,),
}


class RolloutError(LograError):
    """vLLM's answer is not what was asked for: counts or log-probabilities are wrong."""


def refuse_other_distributions(sampling: Mapping[str, Any]) -> None:
    """Raise `InputError` for a setting under which tokens are not drawn from softmax(logits / T).

    Truncation renormalises: with top_k the engine's log-probability exceeds the trainer's by the
    logarithm of the kept mass, and every PPO ratio is wrong.
    """
    for name, value in sampling.items():
        if name not in NEUTRAL:
            raise InputError(f"sampling setting {name!r} is not known; expected {list(NEUTRAL)}")
        if value not in NEUTRAL[name]:
            raise InputError(
                f"{name}={value!r} changes the distribution that is sampled, and the trainer's "
                f"log-probabilities would not match; expected {NEUTRAL[name][0]!r}"
            )


def seed_of(key: str) -> int:
    """The seed of a row: 8 bytes of BLAKE2b of its key, without the sign bit."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def read_output(output: Any) -> tuple[list[int], Tensor, str]:
    """Ids, logprobs and finish reason of one vLLM completion; `RolloutError` if they disagree."""
    ids = list(output.token_ids)
    listed = output.logprobs or []
    if not ids or len(listed) != len(ids):
        raise RolloutError(f"{len(ids)} sampled ids, but {len(listed)} log-probabilities")
    if output.finish_reason not in ("stop", "length"):
        raise RolloutError(f"a response ended by {output.finish_reason!r}: expected stop or length")
    pairs = list(zip(ids, listed, strict=True))
    missing = [i for i, (token, found) in enumerate(pairs) if token not in found]
    if missing:
        raise RolloutError(f"no log-probability for the sampled id at position {missing[0]}")
    values = [found[token].logprob for token, found in pairs]
    if not all(map(math.isfinite, values)):
        raise RolloutError(f"log-probabilities are not finite: {values[:8]}; the weights diverged")
    return ids, torch.tensor(values), output.finish_reason


def sampling_params(
    key: str, temperature: float, max_new_tokens: int, eos_ids: Sequence[int]
) -> Any:
    """vLLM's `SamplingParams` of one row: nothing is left to a default or to a model folder."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=1,
        temperature=temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=seed_of(key),
        max_tokens=max_new_tokens,
        min_tokens=0,
        stop_token_ids=list(eos_ids),
        logprobs=0,  # of the sampled token alone
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
