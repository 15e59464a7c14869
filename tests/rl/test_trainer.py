"""Dealing a batch to ranks: the same number of passes for each, and nobody's sample lost."""

import pytest
import torch

from logra_lab.rl.config import make_config
from logra_lab.rl.ppo import Sample
from logra_lab.rl.trainer import deal


def samples(lengths, prompt=4):
    return [
        Sample([1] * prompt, [i] * n, torch.zeros(n), "stop", 0.5) for i, n in enumerate(lengths)
    ]


def padded(piece):
    return len(piece) * (max(len(s.prompt) for s in piece) + max(len(s.response) for s in piece))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 32])
def test_every_rank_runs_as_many_passes_and_every_sample_is_in_one(count, ranks):
    config = make_config(microbatch_tokens=40, probe_responses=3, probe_tokens=5)
    batch = samples([1 + 3 * i % 17 for i in range(count)])
    shares = deal(batch, config, ranks)
    for part in ("pieces", "probe"):
        assert len({len(getattr(share, part)) for share in shares}) == 1, part
    dealt = [s for share in shares for piece in share.pieces for s in piece]
    assert sorted(map(id, dealt)) == sorted(map(id, batch))
    looked_at = [s.response for share in shares for piece in share.probe for s in piece]
    assert sorted(looked_at) == sorted(s.response[:5] for s in batch[:3])
    assert {share.tokens for share in shares} == {sum(len(s.response) for s in batch)}
    empty = sum(not piece for share in shares for piece in share.pieces)
    assert empty == max(0, ranks - count)  # only where samples are fewer than ranks


def test_passes_side_by_side_are_of_like_size():
    """Round robin over sorted pieces; blocks of pieces would give one rank all the long ones."""
    config = make_config(microbatch_tokens=64)
    batch = samples([2] * 20 + [30] * 20)
    left, right = deal(batch, config, 2)
    for a, b in zip(left.pieces, right.pieces, strict=True):
        assert padded(a) <= 2 * padded(b)
        assert padded(b) <= 2 * padded(a)


def test_no_piece_grows_beyond_the_limit_when_it_is_dealt():
    config = make_config(microbatch_tokens=50)
    for share in deal(samples(range(1, 30)), config, 3):
        assert all(padded(piece) <= 50 or len(piece) == 1 for piece in share.pieces)


def test_the_filler_is_the_cheapest_sample():
    batch = [*samples([9, 9]), *samples([2], prompt=1), *samples([9])]
    assert deal(batch, make_config(), 8)[0].filler is batch[2]
