"""Who holds which rows, and sums, gathers and scattered sums of real processes of a gloo group."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from logra_lab.ranks import ALONE, Ranks, local

ROOT = Path(__file__).resolve().parents[1]
SIZES = (1, 2, 3, 7, 8)  # rows of a matrix, of which three ranks get even, uneven and no shares


def ranks(rank, size):
    one = Ranks()
    one.rank, one.size = rank, size
    return one


@pytest.mark.parametrize("d", SIZES)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_rows_are_cut_as_torch_chunk_cuts_them(d, size):
    """FSDP2 cuts with torch.chunk, which gives fewer pieces where rows do not suffice."""
    pieces = [list(piece) for piece in torch.arange(d).chunk(size)]
    pieces += [[]] * (size - len(pieces))
    for rank in range(size):
        assert list(range(d))[ranks(rank, size).rows(d)] == [int(i) for i in pieces[rank]]


def test_alone_everything_is_done_already():
    x = torch.randn(5, 2)
    assert ALONE.sum(x) is x
    assert ALONE.totals(1.5, 2) == [1.5, 2.0]
    assert ALONE.largest(-3.0) == -3.0
    assert ALONE.gather(x, 5) is x
    assert ALONE.scatter_sum(x).wait() is x
    assert ALONE.rows(5) == slice(0, 5)


def test_local_is_the_memory_of_the_weight_without_its_graph():
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    local(weight).add_(1)
    assert weight.sum() == 4


MEMBER = """
    import json, sys
    import torch, torch.distributed as dist
    from logra_lab.ranks import GroupRanks

    rank, size, address, sizes = map(json.loads, sys.argv[1:])
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    ranks = GroupRanks(dist.group.WORLD)
    told = {"sum": ranks.sum(torch.tensor([1.0, rank])).tolist(),
            "totals": ranks.totals(0.1, 2.0**60, rank), "largest": ranks.largest(-rank - 1.0)}
    for d in sizes:
        whole = torch.arange(2.0 * d).reshape(d, 2)
        span = ranks.rows(d)
        told[f"gather {d}"] = torch.equal(ranks.gather(whole[span], d), whole)
        told[f"vector {d}"] = torch.equal(ranks.gather(whole[span, 0], d), whole[:, 0])
        first = ranks.scatter_sum(whole * (rank + 1))   # two on their way at once
        second = ranks.scatter_sum(whole + rank)
        factor = size * (size + 1) / 2
        told[f"scatter {d}"] = [torch.equal(first.wait(), whole[span] * factor),
            torch.equal(second.wait(), size * whole[span] + size * (size - 1) / 2)]
    dist.destroy_process_group()
    print(json.dumps(told))
"""


def test_three_processes_sum_gather_and_scatter_uneven_and_empty_shares(tmp_path):
    """Catches padding left in a gather, rows of a neighbour, and totals in float32."""
    size, script = 3, tmp_path / "member.py"
    script.write_text(textwrap.dedent(MEMBER))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = json.dumps(f"tcp://127.0.0.1:{probe.getsockname()[1]}")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    members = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(size), address, json.dumps(SIZES)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for rank in range(size)
    ]
    try:
        told = [json.loads(member.communicate(timeout=300)[0]) for member in members]
    finally:
        for member in members:
            member.kill()
    for answer in told:
        assert answer["sum"] == [3.0, 0.0 + 1.0 + 2.0]
        assert answer["totals"] == [pytest.approx(0.3, abs=1e-15), 3 * 2.0**60, 3.0]
        assert answer["largest"] == -1.0
        for d in SIZES:
            assert answer[f"gather {d}"], d
            assert answer[f"vector {d}"], d
            assert answer[f"scatter {d}"] == [True, True], d
