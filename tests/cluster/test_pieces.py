"""A batch in pieces: nothing twice, nothing missed, and small ones last."""

import random

import pytest
import torch

from logra_lab.cluster.pieces import MIN_ROWS, cut, pack, unpack
from logra_lab.rl.rollout import Rollout


@pytest.mark.parametrize("engines", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 24, 31, 256, 1000])
def test_pieces_hold_every_row_once_and_in_order(rows, engines):
    pieces = cut(rows, engines)
    assert [row for piece in pieces for row in piece] == list(range(rows))
    assert all(len(piece) >= MIN_ROWS for piece in pieces[:-1])


def test_an_engine_begins_with_half_its_share_and_the_rest_comes_in_quarters():
    # 256 rows on 4 engines: shares of 64.
    assert [len(piece) for piece in cut(256, 4)] == [32] * 4 + [16] * 8


def test_responses_come_back_as_they_went_in_whatever_their_lengths():
    generator = random.Random(0)
    lengths = [3, 0, 1, 5, 2, 4]  # of nothing too: a row must not take its neighbour's tokens
    ids = [[generator.randrange(1 << 20) for _ in range(n)] for n in lengths]
    logprobs = [torch.randn(n) for n in lengths]
    prompts = [[i] for i in range(6)]
    finish = ["stop", "length"] * 3
    texts = [f"text {i}" for i in range(6)]
    parts = []
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        span = slice(start, stop)
        parts.append(
            pack(Rollout(prompts[span], ids[span], logprobs[span], finish[span], texts[span]))
        )
    joined = unpack(prompts, parts)
    assert (joined.prompt_ids, joined.response_ids) == (prompts, ids)
    assert (joined.finish, joined.texts) == (finish, texts)
    assert all(torch.equal(a, b) for a, b in zip(joined.logprobs, logprobs, strict=True))
    assert all(row.dtype == torch.float32 for row in joined.logprobs)
