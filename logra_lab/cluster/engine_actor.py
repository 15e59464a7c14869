"""One engine in a process of its own: the body of a Ray actor of an `EngineGroup`.

Settings come as plain values and the policy by its name; base weights and updates come as arrays of
the object store, which are read where they lie, or over a group (`broadcast`). Every answer is a
dictionary of plain values that also tells the version, the memory and the seconds it took.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import psutil
import torch

from logra_lab.cluster.broadcast import Broadcast
from logra_lab.cluster.pieces import pack, read_only
from logra_lab.errors import InputError
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.engines import CopyEngine, make_engine
from logra_lab.rl.environment import versions
from logra_lab.rl.policies import load_policy, policy_folder
from logra_lab.sync.errors import NeedsFullSync, SyncError, VersionGap, WrongRun
from logra_lab.sync.update import ThinUpdate


class EngineActor:
    """Holds an engine of `settings`; nothing is loaded before `open`, so that its errors come back
    typed."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.config = TrainConfig(**settings)
        self.engine: Any = None
        self.run: str | None = None
        self.broadcast: Broadcast | None = None

    def hello(self) -> dict[str, Any]:
        """Process and node, before anything that takes time."""
        import ray

        return {"pid": os.getpid(), "node_id": ray.get_runtime_context().get_node_id()}

    def open(self) -> dict[str, Any]:
        """Make the engine. Raises as `VLLMEngine`, `CopyEngine` and `load_policy` do."""
        return self._timed(self._open)

    def generate(self, prompt_ids: list[list[int]], keys: list[str]) -> dict[str, Any]:
        """The engine's `generate`, packed."""
        return self._timed(lambda: {"rollout": pack(self._made().generate(prompt_ids, keys))})

    def catch_up(self, base: Any, run: str, version: int, updates: Sequence[Any]) -> dict[str, Any]:
        """A full sync from `base` of `version`, then the updates that follow it, in order.

        Args: base: path of a sealed file, or arrays by layer; updates: references to sealed bytes.
        The bits are those of an engine that got the base and every update when they were made.
        """

        def work() -> dict[str, Any]:
            import ray

            self.forget("a full sync did not come to its end")
            whole = base if isinstance(base, str) else {n: read_only(a) for n, a in base.items()}
            self._made().full_sync(whole, run, version)
            self.run = run
            for reference in updates:
                self._made().sync(ThinUpdate.from_bytes(ray.get(reference).tobytes()))
            return {}

        return self._timed(work)

    def sync(self, data: np.ndarray) -> dict[str, Any]:
        """Apply an update from its sealed bytes. Raises as `Receiver.apply`."""
        return self._timed(lambda: self._apply(data.tobytes()))

    def join(self, host: str, port: int, name: str, rank: int, size: int, limit: float) -> None:
        """Become rank `rank` of a group, in which updates will come; an earlier one is left."""
        self._leave()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.broadcast = Broadcast.join(
            host, port, name, rank=rank, size=size, limit=limit, device=device
        )

    def prepare(self, run: str, base: int) -> None:
        """Whether `receive` would take this update: before anyone waits for anyone."""
        version = self._made().version
        if version is None:
            raise NeedsFullSync("the engine's weights are of unknown version")
        if run != self.run:
            raise WrongRun(f"the update is of run {run!r}, the weights of {self.run!r}")
        if base != version:
            raise VersionGap(f"the update leads from version {base}, the weights are {version}")

    def receive(self, size: int) -> dict[str, Any]:
        """Take part in one broadcast, and apply what came."""

        def work() -> dict[str, Any]:
            if self.broadcast is None:
                raise SyncError("this engine has joined no group")
            try:
                data = self.broadcast.receive(size)
            except SyncError:
                self._leave()
                raise
            return self._apply(data)

        return self._timed(work)

    def forget(self, why: str) -> None:
        self.run = None
        self._made().forget(why)

    def digests(self) -> list[str]:
        """SHA-256 of the served weights of each rank."""
        engine = self._made()
        return [engine.receiver.digest()] if isinstance(engine, CopyEngine) else engine.digests()

    def close(self) -> None:
        self._leave()
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    def _open(self) -> dict[str, Any]:
        config = self.config
        if config.engine == "vllm":
            from logra_lab.rl.vllm_engine import VLLMEngine

            ranks = config.engine_tensor_parallel
            self.engine = VLLMEngine(
                policy_folder(config.policy),
                temperature=config.temperature,
                max_new_tokens=config.max_new_tokens,
                max_prompt_tokens=config.max_prompt_tokens,
                dtype=config.serving_dtype,
                tensor_parallel=ranks,
                in_process=ranks == 1,
                receiver=config.receiver,
                targets=config.targets,
                kv_cache_bytes=config.kv_cache_mib << 20,
                threads=1,
            )
        else:
            self.engine = make_engine(load_policy(config.policy), config)
        return {"versions": versions(), "device": "cuda" if torch.cuda.is_available() else "cpu"}

    def _made(self) -> Any:
        if self.engine is None:
            raise InputError("this engine is not open: call open first")
        return self.engine

    def _apply(self, data: bytes) -> dict[str, Any]:
        return {"applied": self._made().sync(ThinUpdate.from_bytes(data))}

    def _leave(self) -> None:
        left, self.broadcast = self.broadcast, None
        if left is not None:
            left.close()

    def _timed(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        start = time.perf_counter()
        answer = work()
        seconds = time.perf_counter() - start
        return answer | {"version": self._made().version, "seconds": seconds} | _memory()


def _memory() -> dict[str, Any]:
    """MiB of this process and its children, and of all that is in use on its GPU (or None)."""
    mine = psutil.Process()
    host = 0
    for process in (mine, *mine.children(recursive=True)):
        try:
            host += process.memory_info().rss
        except psutil.Error:  # ended meanwhile
            continue
    gpu = None
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        gpu = (total - free) / 2**20
    return {"host_mib": host / 2**20, "gpu_mib": gpu}
