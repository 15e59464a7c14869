"""Ray for one run: a local one that begins and ends with this process, or a cluster at hand.

    cluster = start(config.ray_address, Needs.of(config))
    ...                      # actors, placed with cluster.options(bundle)
    cluster.stop()

A local Ray listens on 127.0.0.1 only (it has no passwords), reports nothing, prints nothing here,
and leaves no process and no file behind, by `guardian`, even when this process is killed.
"""

import functools
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from logra_lab.cluster import guardian
from logra_lab.errors import InputError, LograError
from logra_lab.rl.config import TrainConfig

_PLACEMENT_SECONDS = 60.0
_TRIES = 3
_REACH_SECONDS = 10.0
STORE_BYTES = 512 << 20


class ClusterError(LograError):
    """Actors or the cluster failed beyond what a run can mend by itself."""


@dataclass(frozen=True)
class Needs:
    """What a run asks of a cluster: a bundle of processors and GPUs for each actor.

    Attributes: trainers, engines: actors of each kind. tensor_parallel: processes of an engine.
        gpus: whether each of these processes has a GPU of its own.
    """

    trainers: int = 0
    engines: int = 0
    tensor_parallel: int = 1
    gpus: bool = False

    @classmethod
    def of(cls, config: TrainConfig) -> "Needs":
        return cls(
            trainers=config.trainers,
            engines=config.engines,
            tensor_parallel=config.engine_tensor_parallel,
            gpus=torch.cuda.is_available(),
        )

    def bundles(self) -> list[dict[str, float]]:
        """Resources by actor, the trainers first: bundle i of `Cluster.options`."""
        sizes = [1] * self.trainers + [self.tensor_parallel] * self.engines
        return [{"CPU": float(n)} | ({"GPU": float(n)} if self.gpus else {}) for n in sizes]

    def total(self) -> dict[str, float]:
        kinds = ("CPU", "GPU") if self.gpus else ("CPU",)
        return {kind: sum(bundle[kind] for bundle in self.bundles()) for kind in kinds}

    def worded(self) -> str:
        gpu = " and a GPU" if self.gpus else ""
        parts = [f"{self.trainers} trainers with a CPU{gpu} each"] if self.trainers else []
        if self.engines:
            ranks = f" and each of its {self.tensor_parallel} ranks" * (self.tensor_parallel > 1)
            parts.append(f"{self.engines} engines with a CPU{gpu} for each{ranks}")
        return ", ".join(parts) or "nothing"


@dataclass
class Cluster:
    """Reserved places on a Ray that is up. `host` is this node's address, as the others see it."""

    needs: Needs
    host: str
    node_id: str
    local: bool
    _placement: Any = None
    _guardian: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def options(self, bundle: int) -> dict[str, Any]:
        """Arguments of an actor's `.options(…)` that put it into a bundle of the reservation."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        resources = self.needs.bundles()[bundle]
        return {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0.0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self._placement, placement_group_bundle_index=bundle
            ),
        }

    def stop(self) -> None:
        """Give the places back, and end a Ray that `start` has started; may be called twice.

        At most 40 s: what has not ended by then was killed.
        """
        import ray
        from ray.util import remove_placement_group

        if self._placement is not None and ray.is_initialized():
            remove_placement_group(self._placement)
        self._placement = None
        watcher, self._guardian = self._guardian, None
        if self.local and ray.is_initialized() and watcher is not None:
            ray.shutdown()
        if watcher is not None:
            assert watcher.stdin is not None
            watcher.stdin.close()
            watcher.wait(guardian._LIMIT + 10)

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()


def start(
    address: str | None,
    needs: Needs,
    *,
    cpus: int | None = None,
    store_bytes: int = STORE_BYTES,
) -> Cluster:
    """Ray with places for `needs`; call it in the main thread.

    Args:
        address: None starts a local Ray; "auto" or "host:port" joins a cluster. Where this process
            uses Ray already, that one is taken, and `Cluster.stop` leaves it up.
        cpus: that a local Ray hands out; by default as many as needed, be there as many or not.
        store_bytes: of a local Ray's object store, which holds base weights and updates.

    Raises `InputError` where Ray is not installed or the cluster is too small, saying what is
    needed and there, and `ClusterError` when the places are not free within a minute. Cost: 5 to
    15 s of start on two cores.
    """
    ray = _import_ray(local=address is None)
    total = needs.total()
    watcher = None
    if not ray.is_initialized():
        if address is None:
            _check({"CPU": total["CPU"], "GPU": torch.cuda.device_count()}, needs, "this machine")
            watcher = _start_local(ray, int(total["CPU"]) if cpus is None else cpus, store_bytes)
        else:
            _join(ray, address)
    try:
        where = "this machine" if address is None else f"the cluster at {address!r}"
        _check(ray.cluster_resources(), needs, where)
        context = ray.get_runtime_context()
        host = ray.util.get_node_ip_address()
        cluster = Cluster(needs, host, context.get_node_id(), address is None, None, watcher)
        if needs.bundles():
            cluster._placement = _place(ray, needs, where)
        return cluster
    except BaseException:
        if watcher is not None:
            Cluster(needs, "", "", True, None, watcher).stop()
        raise


def _import_ray(*, local: bool) -> Any:
    """Ray, told before its import to keep quiet, and to stay on this machine if it is local."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Errors of its servers would be printed here; those that matter come back as exceptions.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")
    if local:  # Ray 2.60 replaces 127.0.0.1 by the machine's address unless clusters are off
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError(
            "engines and trainers as processes of their own need Ray, which is not installed: "
            "pip install -e '.[cluster]' -c constraints.txt, or set engines and trainers to 0"
        ) from error
    return ray


def _start_local(ray: Any, cpus: int, store_bytes: int) -> "subprocess.Popen[bytes]":
    if threading.current_thread() is not threading.main_thread():
        raise InputError("start Ray in the main thread: its servers end with the thread")
    for left in reversed(range(_TRIES)):
        try:
            return _try_local(ray, cpus, store_bytes)
        except ValueError as error:  # of the object store: more than /dev/shm, or than the memory
            raise InputError(
                f"Ray does not start with an object store of {store_bytes / 1e9:.1f} GB, which "
                f"holds the trained weights up to three times: {error!s:.300}"
            ) from error
        except Exception as error:  # Ray raises no narrower one
            if "timed out during startup" not in str(error):
                raise
            if not left:
                raise ClusterError(
                    f"Ray's servers did not start within its 30 s, {_TRIES} times: is this machine "
                    "busy, or out of memory? Try again when it has less to do"
                ) from error
    raise AssertionError


def _try_local(ray: Any, cpus: int, store_bytes: int) -> "subprocess.Popen[bytes]":
    """Start once: Ray gives its servers 30 s, which a busy machine may not have for them."""
    # Paths of sockets may have 107 characters, so not in a long TMPDIR.
    folder = tempfile.mkdtemp(prefix="logra_ray_", dir="/tmp" if os.name == "posix" else None)
    command = [sys.executable, str(Path(guardian.__file__)), folder]
    watcher = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # whoever reads this process's output shall see it end
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    on_term = signal.getsignal(signal.SIGTERM)
    try:
        with _fewer_servers(ray):
            ray.init(
                address="local",
                num_cpus=max(1, cpus),
                num_gpus=torch.cuda.device_count(),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=store_bytes,
                _temp_dir=folder,
                _system_config={"prestart_worker_first_driver": False},  # we start actors only
            )
    except BaseException:
        assert watcher.stdin is not None
        watcher.stdin.close()
        raise
    finally:
        signal.signal(signal.SIGTERM, on_term)  # Ray would have it exit at once, cleaning nothing
    return watcher


@contextmanager
def _fewer_servers(ray: Any) -> Iterator[None]:
    """No autoscaler and no log monitor, which have nothing to do here.

    Each imports for two seconds of a core, just while the servers that count have 30 s to come up.
    `ray.init` has no argument for it; Ray 2.60 takes these where `ray start` would put them.
    """
    module = ray._private.parameter
    before = module.RayParams
    module.RayParams = functools.partial(before, no_monitor=True, include_log_monitor=False)
    try:
        yield
    finally:
        module.RayParams = before


def _join(ray: Any, address: str) -> None:
    try:
        _reach(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(
            f"there is no Ray cluster at {address!r} ({error!s:.200}): start one with "
            "`ray start --head`, or leave ray_address out for a local one"
        ) from error


def _reach(address: str) -> None:
    """Raise `OSError` where nobody listens at "host:port": Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_REACH_SECONDS).close()


def _check(there: dict[str, float], needs: Needs, where: str) -> None:
    """Raise `InputError` where resources of a kind are fewer than needed."""
    for kind, count in needs.total().items():
        if there.get(kind, 0) < count:
            raise InputError(
                f"{where} has {there.get(kind, 0):g} {kind}s, the run needs {count:g} "
                f"({needs.worded()}): lower trainers, engines or engine_tensor_parallel, or "
                + ("use a larger machine" if where == "this machine" else "add nodes to it")
            )


def _place(ray: Any, needs: Needs, where: str) -> Any:
    """A placement group, or `ClusterError` if it is not there in time."""
    from ray.util import placement_group, remove_placement_group

    group = placement_group(needs.bundles(), strategy="PACK")
    if group.wait(timeout_seconds=_PLACEMENT_SECONDS):
        return group
    free = {k: v for k, v in ray.available_resources().items() if k in ("CPU", "GPU")}
    remove_placement_group(group)
    raise ClusterError(
        f"{where} did not give {needs.worded()} within {_PLACEMENT_SECONDS:g} s; free are {free}: "
        "wait for what else runs there, or lower trainers, engines or engine_tensor_parallel "
        "(an engine's ranks have to be on one node)"
    )
