"""A prefix that all prompts of a batch share is computed once, with its gradient.

A system message and the wording of a task are the same in every row. Their keys and values are
computed for one row and repeated, so that the rows' gradients add up in the one prefix: the same
sketch, from fewer tokens. SmolLM2 on two-term sums shares 35 of about 47 prompt tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

# Below this the second forward pass costs more than it saves.
_MIN_TOKENS, _MIN_ROWS = 8, 4


def common_prefix(prompts: Sequence[list[int]]) -> int:
    """Length of the prefix worth sharing: 0, or at least 8 tokens of 4 or more prompts.

    At least one token of each prompt stays outside: its logits are needed row by row.
    """
    first, last = min(prompts), max(prompts)  # lexicographic: their prefix is everybody's
    n = min(map(len, prompts)) - 1
    same = next((i for i in range(n) if first[i] != last[i]), n)
    return same if same >= _MIN_TOKENS and len(prompts) >= _MIN_ROWS else 0


def prefix_cache(model: Any, prefix: Sequence[int], rows: int) -> DynamicCache:
    """Keys and values of `prefix`, computed once and repeated for `rows`; differentiable."""
    ids = torch.tensor([list(prefix)], device=model.device)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(rows)
    return cache
