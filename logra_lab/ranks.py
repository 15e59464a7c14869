"""Who holds which rows: one process holds all, or the ranks of a group share every matrix.

Row sharding is FSDP2's: W [d, k] is cut along its rows as torch.chunk cuts, ⌈d / ranks⌉ rows a
rank, so that the last ranks may hold fewer rows, or none. S, D, U and v follow their rows of W.
What the step decides it decides from sums over all ranks, so that every rank decides the same.
"""

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor


class Ranks:
    """One process, which holds every row; all its sums and gathers are done already."""

    size, rank = 1, 0
    device: torch.device | None = None  # where a rank computes; None: where its weights are

    def rows(self, d: int) -> slice:
        """The rows of a [d, …] matrix that this rank holds; empty for a rank beyond them."""
        chunk = -(-d // self.size)
        return slice(min(self.rank * chunk, d), min((self.rank + 1) * chunk, d))

    def sum(self, x: Tensor) -> Tensor:
        """x summed over the ranks, in place."""
        return x

    def totals(self, *values: float) -> list[float]:
        """Plain numbers summed over the ranks, in float64."""
        return self.sum(torch.tensor(values, dtype=torch.float64)).tolist()

    def largest(self, value: float) -> float:
        """The largest value of any rank."""
        return value

    def gather(self, x: Tensor, d: int) -> Tensor:
        """The whole [d, …] matrix, of which every rank gives its rows x."""
        return x

    def scatter_sum(self, whole: Float[Tensor, "d r"]) -> "Arriving":
        """This rank's rows of Σ over ranks of `whole`; on their way when this returns."""
        return Arriving(whole)


class Arriving:
    """Rows on their way from other ranks; `wait` gives them."""

    def __init__(self, rows: Tensor, work: Any = None) -> None:
        self.rows, self.work = rows, work

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.rows


class GroupRanks(Ranks):
    """The ranks of a torch.distributed group.

    Every method but `rows` is a collective: all ranks call it, in the same order.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self.group, self.device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.group)
        return x

    def largest(self, value: float) -> float:
        x = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x.item()

    def gather(self, x: Tensor, d: int) -> Tensor:
        """Cost: d rows in memory, and as many over the wire."""
        whole = x.new_empty(self.size * -(-d // self.size), *x.shape[1:])
        dist.all_gather_single(whole, self._padded(x, len(whole) // self.size), self.group)
        return whole[:d]

    def scatter_sum(self, whole: Float[Tensor, "d r"]) -> Arriving:
        d = len(whole)
        chunk = -(-d // self.size)
        out = whole.new_empty(chunk, *whole.shape[1:])
        padded = self._padded(whole, chunk * self.size)
        work = dist.reduce_scatter_single(out, padded, group=self.group, async_op=True)
        span = self.rows(d)
        return Arriving(out[: span.stop - span.start], work)

    @staticmethod
    def _padded(x: Tensor, rows: int) -> Tensor:
        if len(x) == rows:
            return x.contiguous()
        return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


ALONE = Ranks()


def local(weight: Tensor) -> Tensor:
    """The rows of a weight that this process holds, to read or to write in place."""
    weight = weight.detach()
    return weight.to_local() if isinstance(weight, DTensor) else weight
