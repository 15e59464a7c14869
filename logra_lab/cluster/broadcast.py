"""Bytes from one process to several at once, over a torch.distributed group of their own.

The group is built beside the process's default group, which vLLM needs for itself: gloo on CPUs,
NCCL on GPUs, rendezvous through a store that the sender hosts, under a name that no earlier group
had. Every wait has a limit, on both sides. NCCL has been run by nobody yet: there was no machine
with two GPUs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist

from logra_lab.sync.errors import SyncError


class Broadcast:
    """One end of a group: rank 0 sends, the others receive.

    Use `serve` for the store, once, and `join` for a group, anew whenever its members change.
    """

    def __init__(self, group: Any, device: str, limit: float) -> None:
        self.group, self.device, self.limit = group, device, limit

    @staticmethod
    def serve(host: str) -> Any:
        """A store on a free port of this machine, `store.port`, through which groups meet."""
        return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)

    @classmethod
    def join(
        cls, host: str, port: int, name: str, *, rank: int, size: int, limit: float, device: str
    ) -> "Broadcast":
        """Meet the other ranks of group `name`. Raises `SyncError` after `limit` seconds."""
        wait = timedelta(seconds=limit)
        try:
            store = dist.TCPStore(host, port, is_master=False, timeout=wait)
            named = dist.PrefixStore(name, store)
            if device == "cuda":
                group = _nccl(named, rank, size, wait)
            else:
                group = _gloo(named, rank, size, wait, host)
        except (RuntimeError, ValueError) as error:
            raise SyncError(
                f"rank {rank} met not all of the {size} ranks of group {name!r} within "
                f"{limit:g} s: {error!s:.200}"
            ) from error
        return cls(group, device, limit)

    def send(self, data: bytes) -> None:
        """Send to all ranks. Raises `SyncError` after the limit, or when a rank has ended."""
        self._run(torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device))

    def receive(self, size: int) -> bytes:
        """The `size` bytes that rank 0 sends. Raises as `send`."""
        buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._run(buffer)
        data: bytes = buffer.cpu().numpy().tobytes()
        return data

    def close(self) -> None:
        """Let go of the connections, also in the middle of something."""
        self.group.abort() if self.device == "cuda" else self.group.shutdown()
        self.group = None

    def _run(self, buffer: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=self.limit)
        try:
            self.group.broadcast([buffer], options).wait(timedelta(seconds=self.limit))
            if self.device == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise SyncError(
                f"a broadcast failed, or took over {self.limit:g} s: {error!s:.200}"
            ) from error


def _gloo(store: Any, rank: int, size: int, wait: timedelta, host: str) -> Any:
    backend: Any = dist.ProcessGroupGloo  # its stubs lack what follows
    options = backend._Options()
    options._timeout = wait
    # By name a machine may find itself at an address that others, or a firewall, do not accept.
    local = host in ("127.0.0.1", "localhost")
    device = backend.create_device(hostname=host) if local else backend.create_default_device()
    options._devices = [device]
    return backend(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, wait: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = wait
    with _no_abort():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _no_abort() -> Iterator[None]:
    """A wait that is over raises, where NCCL's watchdog would end the process (its default)."""
    settings = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
