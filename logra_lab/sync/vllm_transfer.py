"""The engine's side of synchronisation inside vLLM: one `Receiver` in every worker process.

vLLM creates `ThinTransferEngine` in each worker and calls, on all of them,

    init_weight_transfer_engine → start_weight_update → update_weights → finish_weight_update

Only plain values travel: the sealed bytes of a thin update, or the path of a sealed base; where
the caller is in the worker's own process, base weights need not travel at all. A rank validates
everything in `update_weights` and writes in `finish_weight_update`, and writes only if every rank
of the tensor-parallel group has validated.

Failures of an update are recorded, not raised: vLLM 0.32 stops at the first worker that raises
and leaves the answers of the others in their queues, so that the next call reads an old answer.
`ThinWorker.logra_report` tells the outcome.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed import get_tp_group
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from logra_lab.errors import LograError
from logra_lab.sync.base_file import check_base
from logra_lab.sync.errors import (
    NeedsFullSync,
    PayloadError,
    SyncError,
    UnsupportedRolloutBackend,
)
from logra_lab.sync.mapping import TARGETS
from logra_lab.sync.receiver import Receiver
from logra_lab.sync.update import ThinUpdate
from logra_lab.sync.vllm_places import find_places
from logra_lab.sync.vllm_plugin import require_support
from logra_lab.sync.wording import worded


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Receiver mode, the kinds of layers that are trained, and the largest update in bytes."""

    mode: str = "exact"
    targets: list[str] = field(default_factory=lambda: list(TARGETS))
    max_bytes: int = 8 << 30


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The bytes of a thin update, or a base with the run and version it is: the path of a sealed
    file, or tensors by layer from a caller in this process."""

    update: bytes | None = None
    base: str | Mapping[str, torch.Tensor] | None = None
    run: str | None = None
    version: int | None = None


class ThinTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Receives thin updates and sealed bases into the parameters of one vLLM worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        require_support()
        super().__init__(*args)
        self.receiver: Receiver | None = None
        self._write: Callable[[], bool] | None = None
        self._failure: Exception | None = None
        self._applied = False
        self._open = ExitStack()
        self._storages: dict[str, int] = {}

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Find and test every target. Raises `UnsupportedRolloutBackend` (the weight is not what
        the GEMM reads, or is not there) and `InputError` (mode, targets, tensor-parallel size)."""
        try:
            weights, places = find_places(self.model, self.vllm_config, init_info.targets)
            self.receiver = Receiver(places, mode=init_info.mode)
        except LograError as error:
            raise type(error)(worded(error)) from error
        self._max_bytes = init_info.max_bytes
        self._storages = {name: weight.data_ptr() for name, weight in weights.items()}

    def start_weight_update(self) -> None:
        """Forget an earlier session."""
        self._write, self._failure, self._applied = None, None, False
        self._open.close()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Validate; nothing is written yet, and nothing is raised."""
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except Exception as error:  # noqa: BLE001  every rank has to answer, see above
            self._failure = error

    def receive_weights(self, update_info: UpdateInfo) -> None:
        receiver = self._receiver()
        self._check_storages(receiver)
        if update_info.update is not None:
            update = ThinUpdate.from_bytes(update_info.update, max_bytes=self._max_bytes)
            receiver.check(update)
            self._write = lambda: receiver.apply(update)
            return
        base, run, version = update_info.base, update_info.run, update_info.version
        if base is None or not run or version is None:
            raise PayloadError("expected 'update', or 'base' with its 'run' and 'version'")
        weights = base if isinstance(base, Mapping) else self._base(Path(base), run, version)
        receiver.check_load(weights)

        def load() -> bool:
            receiver.load(run, version, weights)
            return True

        self._write = load

    def finish_weight_update(self) -> None:
        """Write, if every rank can; the version is unknown on all ranks if one fails in writing."""
        try:
            if self._failure is None and self._write is None:
                self._failure = SyncError("finish_weight_update came without update_weights")
            if not _all_ranks(self._failure is None):
                self._failure = self._failure or SyncError("another rank refused the update")
                return
            assert self._write is not None
            try:
                self._applied = self._write()
                if self.device.type != "cpu":
                    torch.accelerator.synchronize()  # failures of kernels show here
            except Exception as error:  # noqa: BLE001  every rank has to answer, see above
                self._failure = error
            if not _all_ranks(self._failure is None):
                self._failure = self._failure or SyncError("another rank failed while writing")
                self._receiver().forget("a rank of its group failed while writing")
        finally:
            self._write = None
            self._open.close()

    def shutdown(self) -> None:
        self._open.close()

    def report(self) -> dict[str, Any]:
        """Outcome of the last session and what the weights are: plain values."""
        receiver = self._receiver()
        return {
            "failure": None if self._failure is None else worded(self._failure),
            "applied": self._applied,
            "run": receiver.run,
            "version": receiver.version,
            "why": receiver.why,
        }

    def _receiver(self) -> Receiver:
        if self.receiver is None:
            raise NeedsFullSync("call init_weight_transfer_engine first")
        return self.receiver

    def _check_storages(self, receiver: Receiver) -> None:
        """A reload may have given the model other tensors than those found at the start."""
        parameters = dict(self.model.named_parameters())
        for name, pointer in self._storages.items():
            if parameters[name].data_ptr() != pointer:
                receiver.forget("the model was given other tensors")
                raise UnsupportedRolloutBackend(
                    f"{name} is no longer the tensor found at the start: build the engine anew"
                )

    def _base(self, path: Path, run: str, version: int) -> Mapping[str, Any]:
        """Layers of a sealed base; each rank reads only its own rows and columns, at `load`."""
        check_base(path, run, version)
        return _Lazy(self._open.enter_context(safe_open(path, "pt")))


class _Lazy(Mapping[str, Any]):
    """Tensors of an open safetensors file, read where they are sliced."""

    def __init__(self, file: Any) -> None:
        self.file, self.names = file, set(file.keys())

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        return self.file.get_slice(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class ThinWorker:
    """What vLLM's workers learn through `worker_extension_cls`: calls that return plain values."""

    weight_transfer_engine: ThinTransferEngine

    def logra_report(self) -> dict[str, Any]:
        return self.weight_transfer_engine.report()

    def logra_digest(self) -> str:
        """SHA-256 of the served bytes of this rank's targets, in the order of the mapping."""
        return self.weight_transfer_engine._receiver().digest()

    def logra_group(self) -> str:
        """What the names of this group's shared memory begin with, on the CPU."""
        return os.environ.get("VLLM_DIST_IDENT", "")

    def logra_forget(self, why: str) -> None:
        self.weight_transfer_engine._receiver().forget(why)


def _all_ranks(good: bool) -> bool:
    """Whether all ranks of the tensor-parallel group say so."""
    group = get_tp_group()
    if group.world_size == 1:
        return good
    votes = torch.tensor([int(good)])
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group.cpu_group)
    return bool(votes.item())
