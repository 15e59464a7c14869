"""Bytes that are alive, operation by operation: a dispatch mode watches tensors come and go."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """While it is entered, the bytes of storages that operations made and that still exist.

    Args:
        kind: sorts a new tensor into a category, by default one for all.

    What existed before is not counted, nor what an operation allocates and frees within itself (a
    kernel's workspace, blocks of A in a projection). Several views count once, as their storage.
    Forward, recomputation and backward are seen alike, on the thread that entered it; backward on
    CUDA runs on another one.

    Attributes: `events`, for each operation its name and the bytes alive after it, by category;
        `marks`, (number of an event, text). Cost: Python for every operation.
    """

    def __init__(self, kind: Callable[[Tensor], str] = lambda tensor: "bytes") -> None:
        super().__init__()
        self.kind = kind
        self.events: list[tuple[str, Counter[str]]] = []
        self.marks: list[tuple[int, str]] = []
        self.now: Counter[str] = Counter()
        self._seen: dict[int, weakref.ref[Any]] = {}

    def mark(self, text: str) -> None:
        """Name this place: an event of its own, after all that the last operation let go of."""
        self.marks.append((len(self.events), text))
        self.events.append((text, Counter(self.now)))

    @property
    def total(self) -> int:
        return sum(self.now.values())

    def most(self, *kinds: str) -> int:
        """The largest sum over time, of all categories or of these."""
        picked = (
            sum(n for k, n in now.items() if not kinds or k in kinds) for _, now in self.events
        )
        return max(picked, default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):  # an operand of unknown origin existed before
                self._meet(tensor, counts=False)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._meet(tensor, counts=True)
        self.events.append((str(func), Counter(self.now)))
        return out

    def _meet(self, tensor: Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # may be used again once the storage is gone, hence the reference
        known = self._seen.get(key)
        if known is not None and known() is storage:
            return
        size, kind = (storage.nbytes(), self.kind(tensor)) if counts else (0, "")

        def gone(ref: weakref.ref[Any]) -> None:
            self.now[kind] -= size
            if self._seen.get(key) is ref:
                del self._seen[key]

        self._seen[key] = weakref.ref(storage, gone)
        self.now[kind] += size


def saved_bytes(run: Callable[[], Any], model: torch.nn.Module) -> int:
    """Bytes that autograd packs while `run` runs, each storage once, parameters left out.

    What `run` returns is kept until the count is done, and with it the graph.
    """
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = tensor  # alive until counted: its place cannot be used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = run()
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del graph
    return size
