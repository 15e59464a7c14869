"""The trainer group: ranks as Ray actors, with the interface of `rl.trainer.Trainer`.

A rank that is lost takes the group with it, since no rank has more than its rows: the others are
ended at once, and the run resumes from its last step. That is what the checkpoint is made for: the
weights are sharded files of some version, the journal holds the updates after it, and moments and
counters are small enough to be written every step.
"""

import os
import shutil
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from logra_lab.cluster import shards
from logra_lab.cluster.node import Cluster, ClusterError
from logra_lab.cluster.pieces import read_only
from logra_lab.cluster.seats import kill_actor
from logra_lab.cluster.trainer_rank import TrainerRank
from logra_lab.errors import LograError
from logra_lab.rl.checkpoint import CheckpointError
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.trainer import Share, Taken

_GRACE = 3.0  # seconds in which the rank that failed first is looked for


class TrainersLost(ClusterError):
    """A rank ended or hung: all are ended, and the run can be resumed."""


class TrainerGroup:
    """`Trainer` over the ranks that `config.trainers` asks for, in the places of `cluster`.

    Args:
        folder: model folder of the policy. run_dir: of checkpoints and journal, which the ranks
            have to reach (a shared file system on several nodes).
        dtype: of the weights; float64 is for comparisons.

    Raises what a rank raises, `TrainersLost` when one ends or does not answer in time, and then for
    ever. Cost: 10 to 20 s of start for each two cores.
    """

    def __init__(
        self,
        config: TrainConfig,
        cluster: Cluster,
        folder: Path,
        run_dir: Path,
        *,
        dtype: str = "float32",
    ) -> None:
        import ray

        self.size, self.limit = config.trainers, config.trainer_timeout
        self.run_dir = run_dir.absolute()  # on a cluster at hand the ranks start in other folders
        self.run = uuid.uuid4().hex[:12]
        self.t = 0
        self.memory: list[dict[str, Any]] = []
        self.saved: list[dict[str, Any]] = []  # folders of shards, the last two
        self.node_id = cluster.node_id
        self.places: list[dict[str, Any]] = []  # process and node of each rank
        # One thread for the one processor that a rank asks for: results then do not depend on what
        # the environment of a driver says.
        one = {"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}}
        make: Any = ray.remote(TrainerRank)  # one call at a time, and never restarted
        self.ranks = [
            make.options(**cluster.options(i), runtime_env=one).remote() for i in range(self.size)
        ]
        try:
            self.places = self._get([a.__ray_call__.remote(_place) for a in self.ranks], "start")
            address = self._get([self.ranks[0].reserve.remote(self.places[0]["host"])], "start")[0]
            settings = config.model_dump(mode="json")
            common = (settings, str(folder), self.run)
            self._get(
                [
                    actor.join.remote(*common, rank, self.size, address, dtype)
                    for rank, actor in enumerate(self.ranks)
                ],
                "load the policy",
            )
            self.memory = self._all("describe")
        except BaseException:
            self.close()
            raise
        self.device = torch.device(self.memory[0]["device"])

    def load(self, shares: Sequence[Share]) -> None:
        """Hand the ranks a batch, once for all through the object store."""
        self._all("load", list(shares))

    def update(self, *, fresh: bool) -> Taken:
        answers = self._all("update", fresh)
        self.memory = [memory for _, memory in answers]
        taken = cast(Taken, answers[0][0])
        self.t = taken.report.t
        return taken

    def targets(self) -> Mapping[str, Tensor]:
        """The trained matrices whole, on this host: 4 bytes a weight."""
        return {name: read_only(whole) for name, whole in self._all("targets")[0].items()}

    def state_dict(self) -> dict[str, Any]:
        """Moments, counters and where the weights are: small, unlike the weights."""
        return {**self._all("state")[0], "shards": self.saved[-1:]}

    def save(self, version: int) -> None:
        """The weights of `version` into `shards/`: whole or not at all."""
        if self.saved and self.saved[-1]["version"] == version:
            return  # steps since then were skipped, and the checkpoint builds on that folder
        folder = shards.folder_of(self.run_dir, version)
        partial = folder.with_suffix(".partial")
        try:
            for old in (partial, folder):
                if old.exists():  # cut off, or of a branch that was given up
                    shutil.rmtree(old)
            partial.parent.mkdir(parents=True, exist_ok=True)
            self._all("save", str(partial))
            digests = shards.digests(partial)
            partial.rename(folder)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"checkpoint {folder} could not be written: {error.strerror or error}; the one "
                "before and the journal are whole: make room, then resume"
            ) from error
        self.saved = [*self.saved[-1:], {"version": version, "digests": digests}]

    def prune(self) -> None:
        """Remove shards that neither the checkpoint nor the one before it names."""
        kept = {shards.folder_of(self.run_dir, saved["version"]).name for saved in self.saved}
        for folder in (self.run_dir / "shards").glob("*"):
            if folder.name not in kept:
                shutil.rmtree(folder)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, of any number of ranks; `CheckpointError` if files lack."""
        source = shards.find_source(self.run_dir, state)
        own = {k: state[k] for k in ("learner", "frozen_norm")}
        self._all("restore", own, source, str(self.run_dir))
        self.run, self.t = state["learner"]["run"], state["learner"]["t"]
        self.saved = list(state["shards"]) if source.base is None else []  # else of no more use

    def close(self) -> None:
        """End the ranks; may be called twice."""
        import ray

        for actor in self.ranks:
            ray.kill(actor)
        for place in self.places:
            if place["node_id"] == self.node_id:
                kill_actor(place["pid"])  # a stopped process hears of no request
        self.ranks = []

    def _all(self, method: str, *args: Any) -> list[Any]:
        if not self.ranks:
            raise TrainersLost("the trainers have ended; go on with --resume")
        import ray

        args = tuple(ray.put(x) if isinstance(x, list | dict) else x for x in args)
        return self._get([getattr(a, method).remote(*args) for a in self.ranks], method)

    def _get(self, calls: list[Any], what: str) -> list[Any]:
        """All results; at the first failure the ranks are ended, as they wait for each other."""
        import ray

        deadline = time.monotonic() + self.limit + 10  # the ranks' own limit comes first
        waiting = list(calls)
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
            if not done:
                self.close()
                raise TrainersLost(
                    f"trainers {[calls.index(c) for c in waiting]} did not {what} within "
                    f"{self.limit:g} s and were ended: go on with --resume, or a longer "
                    "trainer_timeout"
                )
            try:
                ray.get(done[0])
            except ray.exceptions.RayError as error:
                problem = self._first_cause(calls, error, what)
                self.close()
                raise problem from error
        return ray.get(calls)

    def _first_cause(self, calls: list[Any], error: Exception, what: str) -> Exception:
        """A rank that ended, rather than those whose collectives then failed; else the error."""
        import ray

        done, _ = ray.wait(calls, num_returns=len(calls), timeout=_GRACE)
        for call in done:
            try:
                ray.get(call)
            except ray.exceptions.RayActorError:
                return TrainersLost(
                    f"trainer {calls.index(call)} ended (killed, or out of memory?) while asked to "
                    f"{what}; the others were ended too: go on with --resume"
                )
            except ray.exceptions.RayTaskError as other:
                if isinstance(other.cause, LograError | OSError):
                    return other.cause
        return TrainersLost(f"trainers failed to {what}: {str(error).strip().splitlines()[-1]}")


def _place(_: Any) -> dict[str, Any]:
    """Run in an actor: its process, and the node with its address."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    return {"pid": os.getpid(), "node_id": node_id, "host": ray.util.get_node_ip_address()}
