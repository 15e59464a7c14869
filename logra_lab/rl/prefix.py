"""A prefix that all prompts of a batch share is computed once, with its gradient.

A system message and the wording of a task are the same in every row. Their keys and values are
computed for one row and repeated, so that the rows' gradients add up in the one prefix: the same
sketch, from fewer tokens. SmolLM2 on two-term sums shares 35 of about 47 prompt tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from logra_lab.errors import InputError

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


def can_share(model: Any) -> bool:
    """Whether every layer attends to the whole past.

    Padding lies between the shared prefix and the rest of a shorter prompt. A sliding window or a
    chunk counts places, padding included, and a recurrent layer keeps no keys to repeat.
    """
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None)
    if types is not None:
        return set(types) == {"full_attention"}
    windows = ("sliding_window", "attention_chunk_size")
    windowed = any(getattr(config, name, None) is not None for name in windows)
    windowed |= "local" in getattr(config, "attention_layers", ())  # GPT-Neo
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return not windowed and not getattr(base, "_is_stateful", False)


def prefix_cache(model: Any, prefix: Sequence[int], rows: int) -> DynamicCache:
    """Keys and values of `prefix`, computed once and repeated for `rows`; differentiable.

    Raises `InputError` for a model whose layers do not all attend to the whole past.
    """
    if not can_share(model):
        raise InputError(
            f"{type(model).__name__} attends within a window, where padding behind a shared prefix "
            "takes places: make the token batch with share_prefix=False"
        )
    ids = torch.tensor([list(prefix)], device=model.device)
    cache = DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(rows)
    return cache
