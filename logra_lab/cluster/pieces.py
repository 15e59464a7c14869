"""A batch in pieces for several engines, and a piece's responses as plain arrays."""

import math
import warnings
from typing import Any

import numpy as np
import torch

from logra_lab.rl.rollout import Rollout

_ROUNDS = (0.5, 0.25, 0.25)
MIN_ROWS = 4


def cut(rows: int, engines: int) -> list[range]:
    """Pieces of a batch in the order in which they are handed out.

    Half of the batch in one piece an engine, the other half in two: an engine has a large batch to
    begin with, and whoever is done takes the small pieces, so that a slow one holds up at most a
    quarter of its share. Sizes depend on the numbers given and nothing else, so that a row meets
    the same neighbours whichever engine serves it. No piece has fewer than MIN_ROWS rows, but for
    the last.
    """
    pieces: list[range] = []
    start = 0
    for share in _ROUNDS:
        size = max(MIN_ROWS, math.ceil(rows * share / engines))
        for _ in range(engines):
            if start < rows:
                pieces.append(range(start, min(start + size, rows)))
                start = pieces[-1].stop
    return pieces


def pack(rollout: Rollout) -> dict[str, Any]:
    """Responses as flat arrays and lists of text; the prompts stay where they are."""
    logprobs = torch.cat([row.float() for row in rollout.logprobs]).numpy()
    return {
        "lengths": [len(ids) for ids in rollout.response_ids],
        "ids": np.array([i for ids in rollout.response_ids for i in ids], dtype=np.int32),
        "logprobs": logprobs,
        "finish": rollout.finish,
        "texts": rollout.texts,
    }


def unpack(prompts: list[list[int]], packed: list[dict[str, Any]]) -> Rollout:
    """The rollout of all prompts from their pieces, in the order of the prompts."""
    joined = Rollout([list(p) for p in prompts], [], [], [], [])
    for piece in packed:
        start = 0
        for length in piece["lengths"]:
            span = slice(start, start + length)
            joined.response_ids.append(piece["ids"][span].tolist())
            joined.logprobs.append(torch.tensor(piece["logprobs"][span]))
            start += length
        joined.finish += piece["finish"]
        joined.texts += piece["texts"]
    return joined


def read_only(array: np.ndarray) -> torch.Tensor:
    """The same memory as a tensor, which is only read: arrays of the object store are read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
