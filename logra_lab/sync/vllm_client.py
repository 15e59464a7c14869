"""The caller's side of synchronisation with a vLLM engine: order, versions and typed errors.

Every change of weights goes

    drain → update → reset the prefix cache → bump the version → resume

because cached keys and values belong to the weights that made them. The version is unknown from the
start, after a failure between first and last write, after sleep of level 2 and after a reload; then
only a full sync helps, and `require_version` refuses generation.
"""

import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from logra_lab.sync import sealed
from logra_lab.sync.errors import NeedsFullSync, PrefixCacheBusy, SyncError
from logra_lab.sync.update import ThinUpdate
from logra_lab.sync.wording import find_error


class VLLMClient:
    """Keeps the weights of a `vllm.LLM` with the backend "logra_lab" at a trainer's version.

    Args:
        llm: started with `weight_transfer_config={"backend": "logra_lab"}` and
            `worker_extension_cls="logra_lab.sync.vllm_transfer.ThinWorker"`.
        mode: receiver mode, "exact" or "plain". targets: kinds of layers that updates hold.

    Raises `UnsupportedRolloutBackend` when the engine computes from weights that an update cannot
    reach, `InputError` for a mode, targets or sizes. `lock` is held while weights change; whoever
    generates holds it too.
    """

    in_process = False  # whether vLLM's only worker is in this process, and can be handed tensors

    def __init__(self, llm: Any, *, mode: str, targets: Sequence[str]) -> None:
        self.llm = llm
        self.lock = threading.RLock()
        self.run: str | None = None
        self.version: int | None = None
        self._why = "it has not had a full sync yet"
        self._asleep = self._in_session = False
        info = {"mode": mode, "targets": list(targets)}
        self._call(llm.init_weight_transfer_engine, {"init_info": info})

    def require_version(self) -> int:
        """The version that is served; `NeedsFullSync` while it is unknown, `SyncError` asleep."""
        self._require_awake()
        if self.version is None:
            raise NeedsFullSync(f"the engine's weights are of unknown version: {self._why}")
        return self.version

    def sync(self, update: ThinUpdate) -> bool:
        """Apply a thin update on every rank; False when it was the last one already.

        Raises the errors of `Receiver.apply` with all weights as before, and `PrefixCacheBusy`
        when cached keys and values could not be dropped: then the version is unknown until the
        same update, sent again, succeeds.
        """
        return self._transfer({"update": update.to_bytes()})

    def full_sync(self, base: str | Path | Mapping[str, Tensor], run: str, version: int) -> None:
        """Take all targets from a sealed base file (float32), or from tensors by layer name.

        Raises `ShapeMismatch`, `DigestMismatch`, `WrongRun`, `VersionGap` (the file is of another
        run or version), `InputError` (no such file), `PrefixCacheBusy`. Cost of tensors: none in
        process; else a file of their size in the folder for temporary files, written and read.
        """
        about = {"run": run, "version": version}
        if not isinstance(base, Mapping):
            self._transfer({"base": str(Path(base).resolve())} | about)
            return
        if self.in_process:
            self._transfer({"base": base} | about)
            return
        with tempfile.TemporaryDirectory(prefix="logra_lab_base_") as scratch:
            tensors = {n: w.detach().float().cpu().contiguous() for n, w in base.items()}
            path = Path(scratch) / "base.safetensors"
            sealed.write(path, tensors, about)
            self._transfer({"base": str(path)} | about)

    def digests(self) -> list[str]:
        """SHA-256 of the served weights of each rank, in the order of `mapping.target_paths`."""
        found: list[str] = self._call(self.llm.collective_rpc, "logra_digest")
        return found

    def sleep(self, level: int = 1) -> None:
        """Sleep: level 1 keeps the weights, level 2 gives them up, and so the version."""
        with self.lock:
            self._require_awake()
            self._drained()
            if level >= 2:
                self.forget("sleep of level 2 gave the weights up")
            self._call(self.llm.sleep, level)
            self._asleep = True

    def wake_up(self) -> None:
        """End of sleep; after level 2 the next step must be a full sync."""
        with self.lock:
            self._call(self.llm.wake_up)
            self._asleep = False

    def reload(self) -> None:
        """Read the folder's weights again: the version is unknown until a full sync."""
        with self.lock:
            self._drained()
            self.forget("its weights were read from the folder again")
            self._call(self.llm.collective_rpc, "reload_weights")

    def _transfer(self, info: dict[str, Any]) -> bool:
        """drain → update → reset the prefix cache → bump the version, under the lock."""
        with self.lock:
            self._require_awake()
            self._drained()
            before = self.version, self._why
            reports = self._session(info)
            failures = [report["failure"] for report in reports if report["failure"]]
            states = {(report["run"], report["version"]) for report in reports}
            run, version = states.pop()
            if states or version is None:
                self.forget("ranks disagree" if states else reports[0]["why"])
            elif failures:
                self.version, self._why = before  # refused: everything is as it was
            if failures:
                own = [text for text in failures if "[SyncError: another rank" not in text]
                raise find_error((own or failures)[0]) or SyncError(failures[0])
            self._reset_prefix_cache()
            self.run, self.version = run, version
            self._call(self.llm.update_weight_version, f"{run}:{version}")
            return bool(reports[0]["applied"])

    def _session(self, info: dict[str, Any]) -> list[dict[str, Any]]:
        """One session of vLLM's protocol; the outcome on every rank."""
        if self._in_session:
            raise SyncError(
                "an earlier update was interrupted between its calls, and vLLM's workers may wait "
                "or hold unread answers: close this engine and start another"
            )
        self._forget_locally("an update did not come to its end")
        self._in_session = True
        self._call(self.llm.start_weight_update)
        self._call(self.llm.update_weights, {"update_info": info})
        self._call(self.llm.finish_weight_update)
        reports: list[dict[str, Any]] = self._call(self.llm.collective_rpc, "logra_report")
        self._in_session = False
        return reports

    def _reset_prefix_cache(self) -> None:
        if not self._call(self.llm.reset_prefix_cache):
            why = "its cached keys and values belong to earlier weights"
            self._forget_locally(why)
            raise PrefixCacheBusy(
                f"vLLM could not drop its prefix cache, {why}; nothing is generated until the same "
                "update, or a full sync, has been sent again with no request in flight"
            )

    def _drained(self) -> None:
        """Requests of this engine end before the lock is free; others are not ours to wait for."""
        if self.llm.llm_engine.has_unfinished_requests():
            raise PrefixCacheBusy(
                "requests are in flight, and their keys and values belong to the present weights; "
                "let them finish (llm.wait_for_completion()) before weights change"
            )

    def forget(self, why: str) -> None:
        """The weights are no longer known: nothing is generated until a full sync."""
        self._forget_locally(why)
        self._call(self.llm.collective_rpc, "logra_forget", args=(why,))
        self._call(self.llm.update_weight_version, "unknown")

    def _forget_locally(self, why: str) -> None:
        self.version, self._why = None, why

    def _require_awake(self) -> None:
        if self.llm is None:
            raise SyncError("the engine is closed: make a new one")
        if self._asleep:
            raise SyncError("the engine sleeps: call wake_up() first")

    def _call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call vLLM; an error of this package that comes back as text is raised as itself."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            known = find_error(str(error))
            if known is None:
                raise
            raise known from error
