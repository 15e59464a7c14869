"""The engine's side of synchronisation inside vLLM: one `Receiver` in every worker process.

vLLM creates `ThinTransferEngine` in each worker and calls, on all of them,

    init_weight_transfer_engine → start_weight_update → update_weights → finish_weight_update

Only plain values travel: the sealed bytes of a thin update, or the path of a sealed base. A rank
validates everything in `update_weights` and writes in `finish_weight_update`, and writes only if
every rank of the tensor-parallel group has validated.

Failures of an update are recorded, not raised: vLLM 0.32 stops at the first worker that raises
and leaves the answers of the others in their queues, so that the next call reads an old answer.
`ThinWorker.logra_report` tells the outcome.
"""

import re
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

from logra_lab.errors import InputError, LograError
from logra_lab.sync import errors, sealed
from logra_lab.sync.errors import NeedsFullSync, PayloadError, SyncError, UnsupportedRolloutBackend
from logra_lab.sync.mapping import TARGETS, Geometry, Shard, shards, target_paths
from logra_lab.sync.receiver import Place, Receiver
from logra_lab.sync.update import ThinUpdate
from logra_lab.sync.vllm_plugin import require_support

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Receiver mode, the kinds of layers that are trained, and the largest update in bytes."""

    mode: str = "exact"
    targets: list[str] = field(default_factory=lambda: list(TARGETS))
    max_bytes: int = 8 << 30


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The bytes of a thin update, or the path of a sealed base with the run and version it is."""

    update: bytes | None = None
    base: str | None = None
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
            self._refuse_config()
            parts = self._shards(init_info.targets)
            weights = {part.parameter: self._weight(part) for part in parts}
            for parameter in weights:
                self._check_reads(parameter)
            places = [
                Place(s.layer, s.d, s.k, s.rows, s.columns, weights[s.parameter][s.place])
                for s in parts
            ]
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
        weights = self._base(Path(base))
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

    def _refuse_config(self) -> None:
        """Only whole, unquantised models without adapters, of the known architectures."""
        names = list(self.model_config.architectures)
        config = self.vllm_config
        if not set(names) & set(ARCHITECTURES):
            raise UnsupportedRolloutBackend(
                f"architecture {names} is not mapped; expected one of {ARCHITECTURES}"
            )
        for what, wrong in (
            ("quantisation", self.model_config.quantization is not None),
            ("LoRA adapters", config.lora_config is not None),
            ("pipeline parallelism", self.parallel_config.pipeline_parallel_size > 1),
            ("weight offloading", config.offload_config.uva.cpu_offload_gb > 0),
        ):
            if wrong:
                raise UnsupportedRolloutBackend(f"thin updates do not go with {what}: turn it off")

    def _shards(self, targets: list[str]) -> list[Shard]:
        config = self.model_config.hf_text_config
        heads = config.num_attention_heads
        geometry = Geometry(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        )
        paths = target_paths(config.num_hidden_layers, targets)
        group = get_tp_group()
        return shards(paths, geometry, rank=group.rank_in_group, size=group.world_size)

    def _weight(self, part: Shard) -> torch.Tensor:
        """The parameter that holds a shard, in the expected shape."""
        parameters = dict(self.model.named_parameters())
        weight = parameters.get(part.parameter)
        shape = None if weight is None else tuple(weight.shape)
        if weight is None or shape != part.shape or not weight.is_floating_point():
            kind = None if weight is None else weight.dtype
            raise UnsupportedRolloutBackend(
                f"{part.parameter}: expected a float tensor of shape {list(part.shape)}, got "
                f"{shape and list(shape)} {kind}; the engine packs or converts its weights. Start "
                "it through logra_lab.rl.vllm_engine.VLLMEngine, or use the Hugging Face engine"
            )
        return weight.data

    def _check_reads(self, parameter: str) -> None:
        """The layer's GEMM reads this very tensor, all of it: of ones, it sums the inputs."""
        name = parameter.removesuffix(".weight")
        layer = self.model.get_submodule(name)
        weight = layer.weight.data
        x = torch.ones(3, weight.shape[1], dtype=weight.dtype, device=weight.device)
        kept = weight.clone()
        try:
            weight.fill_(1)
            y = layer.quant_method.apply(layer, x, None)
        finally:
            weight.copy_(kept)
        if y.shape != (3, weight.shape[0]) or not bool(((y / x.shape[1] - 1).abs() < 0.02).all()):
            raise UnsupportedRolloutBackend(
                f"{name}: its GEMM does not read {parameter}, so an update would change nothing; "
                "turn off whatever packs the weights, or use the Hugging Face engine"
            )

    def _check_storages(self, receiver: Receiver) -> None:
        """A reload may have given the model other tensors than those found at the start."""
        parameters = dict(self.model.named_parameters())
        for name, pointer in self._storages.items():
            if parameters[name].data_ptr() != pointer:
                receiver.forget("the model was given other tensors")
                raise UnsupportedRolloutBackend(
                    f"{name} is no longer the tensor found at the start: build the engine anew"
                )

    def _base(self, path: Path) -> Mapping[str, Any]:
        """Layers of a sealed base; each rank reads only its own rows and columns, at `load`."""
        try:
            sealed.read_meta(path)
            file = self._open.enter_context(safe_open(path, "pt"))
        except OSError as error:
            raise InputError(f"base {path} cannot be read in the engine: {error}") from error
        return _Lazy(file)


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

    def logra_forget(self, why: str) -> None:
        self.weight_transfer_engine._receiver().forget(why)


def worded(error: Exception) -> str:
    """An error as text that survives process boundaries with its type: see `raise_worded`."""
    return f"logra_lab[{type(error).__name__}: {error}]"


def raise_worded(text: str) -> None:
    """Raise the error that `worded` wrote somewhere in a text; nothing if there is none."""
    found = re.search(r"logra_lab\[(\w+): (.*)\]", text, re.DOTALL)
    if found is None:
        return
    known = {"InputError": InputError, **vars(errors)}.get(found[1])
    if isinstance(known, type) and issubclass(known, LograError):
        raise known(found[2])
    raise SyncError(f"in the engine, {found[1]}: {found[2]}")


def _all_ranks(good: bool) -> bool:
    """Whether all ranks of the tensor-parallel group say so."""
    group = get_tp_group()
    if group.world_size == 1:
        return good
    votes = torch.tensor([int(good)])
    torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group.cpu_group)
    return bool(votes.item())
