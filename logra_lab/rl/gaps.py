"""Trainer and engine on the same tokens: do they give them the same log-probabilities?"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from logra_lab.rl.rollout import Rollout


@torch.no_grad()
def logprobs_of(
    model: Any, rollout: Rollout, *, temperature: float = 1.0, prefix: tuple[Any, int] | None = None
) -> list[Float[Tensor, "n"]]:
    """log softmax(logits / T) of every sampled token, teacher-forced, a tensor for each response.

    `prefix`, (another model, m), takes the keys and values of the first m ids of every prompt from
    that model: what an engine computes that kept them over an update. Cost: a forward pass a row.
    """
    found = []
    for prompt, response in zip(rollout.prompt_ids, rollout.response_ids, strict=True):
        ids = torch.tensor([[*prompt, *response]], device=model.device)
        cache, cached = None, 0
        if prefix is not None:
            other, cached = prefix
            cache = DynamicCache(config=other.config)
            other(ids[:, :cached], past_key_values=cache)
        logits = model(ids[:, cached:], past_key_values=cache).logits[0, -len(response) - 1 : -1]
        logp = (logits.float() / temperature).log_softmax(-1)
        found.append(logp.gather(1, ids[0, -len(response) :, None])[:, 0])
    return found


def gaps(
    model: Any, rollout: Rollout, *, temperature: float = 1.0, prefix: tuple[Any, int] | None = None
) -> Float[Tensor, "n"]:
    """|engine − model| of every sampled token's log-probability, in nats; see `logprobs_of`."""
    rows = logprobs_of(model, rollout, temperature=temperature, prefix=prefix)
    return torch.cat([(a - b).abs() for a, b in zip(rows, rollout.logprobs, strict=True)])
