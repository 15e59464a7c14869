"""Damaged and hostile thin updates, thousands of them, against the reader and a receiver."""

import random
import tracemalloc
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from logra_lab.bench.mutations import mutate, split
from logra_lab.sync.errors import SyncError
from logra_lab.sync.receiver import Place, Receiver
from logra_lab.sync.update import ThinUpdate
from logra_lab.sync.wire import ThinLayer

LAYERS = (ThinLayer("q", 6, 8, "q"), ThinLayer("k", 5, 8, "q"), ThinLayer("o", 7, 11, "o"))
BASE = 3  # the receiver's version
# What a reader may use beside the payload and its tensors: 48 bytes of Python objects for each byte
# of header (see `sealed.unpack`), and a constant for exceptions and their texts.
PER_HEADER_BYTE, SLACK = 48, 1 << 16


def fuzz(tries: int, seed: int = 0) -> dict[str, int]:
    """How many of `tries` mutated payloads were refused with a typed error or accepted; of the
    rest, crashes: other exceptions. partial: errors after which weights or version had changed.
    oversized: payloads whose reading took more memory than twice their size and the terms above,
    with every tensor of the reader counted as if it stayed. Cost: a millisecond a try.
    """
    rng = random.Random(seed)
    payloads = [_payload(wire, run) for run in ("fuzz", "other") for wire in ("int8", "float32")]
    weights = {x.name: torch.randn(x.d, x.k, generator=_generator(1)) for x in LAYERS}
    served = {name: torch.zeros_like(w, dtype=torch.bfloat16) for name, w in weights.items()}
    receiver = Receiver([Place.whole(name, w) for name, w in served.items()])
    names = ("tried", "refused", "accepted", "partial", "crashes", "oversized")
    count = dict.fromkeys(names, 0)
    _try(receiver, payloads[0])  # torch imports a part of itself when a dispatch mode first begins
    for _ in range(tries):
        # Some tries meet a receiver that has already made the step.
        if receiver.version != BASE and (receiver.version is None or rng.random() < 0.2):
            receiver.load("fuzz", BASE, weights)
        data = mutate(rng, payloads)
        before = _state(receiver)
        outcome, used = _try(receiver, data)
        count["tried"] += 1
        count[outcome] += 1
        count["partial"] += outcome != "accepted" and _state(receiver) != before
        count["oversized"] += used > 2 * len(data) + PER_HEADER_BYTE * len(split(data)[0]) + SLACK
    return count


def _try(receiver: Receiver, data: bytes) -> tuple[str, int]:
    """What became of a payload, and the bytes that reading it took, its own included."""
    outcome, update, allocated = "accepted", None, _Allocated()
    tracemalloc.start()
    try:
        with allocated:
            update = ThinUpdate.from_bytes(data, max_bytes=1 << 20)
    except SyncError:
        outcome = "refused"
    except Exception:  # noqa: BLE001  every other exception is what the fuzzer looks for
        outcome = "crashes"
    finally:
        used = len(data) + tracemalloc.get_traced_memory()[1] + allocated.bytes
        tracemalloc.stop()
    try:
        if update is not None:
            receiver.apply(update)
    except SyncError:
        outcome = "refused"
    except Exception:  # noqa: BLE001
        outcome = "crashes"
    return outcome, used


class _Allocated(TorchDispatchMode):
    """Adds up the bytes of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if _is_tensor(x)}
        for x in tree_leaves(out):
            if _is_tensor(x) and x.untyped_storage().data_ptr() not in known:
                self.bytes += x.untyped_storage().nbytes()
        return out


def _is_tensor(x: Any) -> bool:
    return isinstance(x, torch.Tensor)


def _state(receiver: Receiver) -> tuple[Any, ...]:
    """Everything that an error must leave alone, floats as bytes."""
    tensors = [t for slot in receiver.slots for t in (slot.weight, slot.served) if t is not None]
    raw = b"".join(t.view(torch.uint8).numpy().tobytes() for t in tensors)
    return raw, receiver.run, receiver.version


def _payload(wire: str, run: str) -> bytes:
    U = torch.randn(sum(x.d for x in LAYERS), 4, generator=_generator(2))
    update = ThinUpdate.round(U, LAYERS, run=run, base=BASE, seed=5, draw=3, wire=wire)
    return update.to_bytes()


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
