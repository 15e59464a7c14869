"""How the bytes of an update get from the group's process to all its engines, once each.

object_store   put once into Ray's store; every engine of a node reads the same memory
group          broadcast over a torch.distributed group: gloo on CPUs, NCCL on GPUs

Both answer which engines refused and why. In a group nobody waits for somebody who cannot come:
first every engine says whether it would take the update, then those who would meet, then the bytes
go. A group is built anew when its members change or one of them failed.
"""

import uuid
from collections.abc import Callable
from typing import Any, Protocol

import torch

from logra_lab.cluster.broadcast import Broadcast
from logra_lab.cluster.seats import EngineLost, Seat, Seats, Task
from logra_lab.errors import LograError
from logra_lab.sync.errors import SyncError
from logra_lab.sync.update import ThinUpdate

GROUP_SECONDS = 60.0  # to meet, and for one broadcast
Note = Callable[[Seat, Task, Any], None]


class Transport(Protocol):
    """`send` returns, by seat, the errors of engines that are alive and did not take the update."""

    name: str

    def send(
        self, update: ThinUpdate, data: bytes, reference: Any, members: list[Seat], note: Note
    ) -> dict[Seat, LograError]: ...
    def close(self) -> None: ...


def make_transport(name: str, seats: Seats) -> Transport:
    """By name; "auto" is the group on GPUs, and on CPUs the object store, which is no slower."""
    if name == "auto":
        name = "group" if torch.cuda.is_available() else "object_store"
    return GroupTransport(seats) if name == "group" else StoreTransport(seats)


class StoreTransport:
    """Through Ray's object store, where the group keeps its updates in any case."""

    name = "object_store"

    def __init__(self, seats: Seats) -> None:
        self.seats = seats

    def send(
        self, update: ThinUpdate, data: bytes, reference: Any, members: list[Seat], note: Note
    ) -> dict[Seat, LograError]:
        for seat in members:
            self.seats.ask(seat, "sync", reference)
        return _refusals(self.seats, members, note)

    def close(self) -> None:
        """Nothing is open."""


class GroupTransport:
    """Over a broadcast group of this process and the engines."""

    name = "group"

    def __init__(self, seats: Seats) -> None:
        self.seats = seats
        self._store: Any = None
        self._end: Broadcast | None = None
        self._members: list[Any] = []  # the actors, by rank − 1

    def send(
        self, update: ThinUpdate, data: bytes, reference: Any, members: list[Seat], note: Note
    ) -> dict[Seat, LograError]:
        for seat in members:
            self.seats.ask(seat, "prepare", update.run, update.base)
        refused = _refusals(self.seats, members, note)
        members = [s for s in members if s not in refused and s.free and s.version == update.base]
        if not members:
            return refused
        if [seat.actor for seat in members] != self._members:
            failed = self._meet(members, note)
            if self._end is None:
                return refused | failed
        for seat in members:
            self.seats.ask(seat, "receive", len(data))
        assert self._end is not None
        failure = None
        try:
            self._end.send(data)
        except SyncError as error:
            failure = error
        failed = _refusals(self.seats, members, note)
        if failure or failed or any(seat.version != update.version for seat in members):
            self.close()
        return refused | failed

    def close(self) -> None:
        """Leave the group; the store stays for the next one."""
        left, self._end, self._members = self._end, None, []
        if left is not None:
            left.close()

    def _meet(self, members: list[Seat], note: Note) -> dict[Seat, LograError]:
        """A new group of these engines; nobody has joined one if there are errors."""
        self.close()
        host = self.seats.cluster.host
        if self._store is None:
            self._store = Broadcast.serve(host)
        name, size = uuid.uuid4().hex, len(members) + 1
        place = (host, self._store.port, name)
        for rank, seat in enumerate(members, 1):
            self.seats.ask(seat, "join", *place, rank, size, GROUP_SECONDS)
        failure: LograError | None = None
        end = None
        try:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            end = Broadcast.join(*place, rank=0, size=size, limit=GROUP_SECONDS, device=device)
        except SyncError as error:
            failure = error
        failed = _refusals(self.seats, members, note)
        if failure is None and not failed and all(seat.free for seat in members):
            self._end, self._members = end, [seat.actor for seat in members]
            return {}
        if end is not None:
            end.close()
        failure = failure or next(iter(failed.values()), SyncError("an engine died while joining"))
        return {seat: failure for seat in members if seat.free} | failed


def _refusals(seats: Seats, members: list[Seat], note: Note) -> dict[Seat, LograError]:
    """Wait until the members' tasks have ended; the errors of those that are still there."""
    asked = {id(seat.task) for seat in members}
    refused: dict[Seat, LograError] = {}

    def both(seat: Seat, task: Task, answer: Any) -> None:
        note(seat, task, answer)
        mine = id(task) in asked
        if mine and isinstance(answer, LograError) and not isinstance(answer, EngineLost):
            refused[seat] = answer

    seats.all_done(members, both)
    return refused
