"""One rank of the trainer group: the `Trainer` of a policy whose rows are cut among the ranks.

Nothing here knows Ray; `trainers` makes an actor of it. Every method but `reserve` and `describe`
is a collective: all ranks run it, in the same order.
"""

import os
import socket
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh

from logra_lab.cluster import shards
from logra_lab.cluster.sharded import sharded_policy
from logra_lab.projection import canonical_path
from logra_lab.ranks import GroupRanks
from logra_lab.rl.config import make_config
from logra_lab.rl.environment import peak_memory_mib
from logra_lab.rl.learners import LoGRALearner
from logra_lab.rl.trainer import Share, Taken, Trainer


class TrainerRank:
    """See the module. Made empty, so that rank 0 can say where the ranks meet; then `join`."""

    def reserve(self, host: str) -> str:
        """An address on this host, with a free port: where the ranks meet if this is rank 0."""
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def join(
        self,
        settings: dict[str, Any],
        folder: str,
        run: str,
        rank: int,
        size: int,
        address: str,
        dtype: str = "float32",
    ) -> None:
        """Meet the other ranks at `address`, and read this one's rows of the policy in `folder`."""
        config = make_config(**settings)
        cuda = torch.cuda.is_available()
        limit = timedelta(seconds=config.trainer_timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            init_method=f"tcp://{address}",
            rank=rank,
            world_size=size,
            timeout=limit,
        )
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.ranks = GroupRanks(dist.new_group(timeout=limit), device)
        policy = sharded_policy(
            Path(folder),
            self.ranks,
            init_device_mesh("cuda" if cuda else "cpu", (size,)),
            bfloat16=config.autocast == "bfloat16",
            offload=config.cpu_offload,
            dtype=getattr(torch, dtype),
        )
        self.trainer = Trainer(policy, config, self.ranks)
        self.learner.run = run

    def describe(self) -> dict[str, Any]:
        """Where and how this rank runs; memory in MiB, highest so far."""
        gpu = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None
        return {
            "pid": os.getpid(),
            "device": str(self.trainer.device),
            "backend": dist.get_backend(),
            "host_mib": peak_memory_mib(),
            "gpu_mib": gpu,
        }

    def load(self, shares: list[Share]) -> None:
        self.trainer.load(shares)

    def update(self, fresh: bool) -> tuple[Taken | None, dict[str, Any]]:
        """`Trainer.update`; all ranks come to the same, and rank 0 tells it. Each its memory."""
        taken = self.trainer.update(fresh=fresh)
        if self.ranks.rank:
            return None, self.describe()
        if (update := taken.report.update) is not None:
            taken = replace(taken, report=replace(taken.report, update=update.to("cpu")))
        return taken, self.describe()

    def targets(self) -> dict[str, np.ndarray] | None:
        """The trained matrices whole, on rank 0: 4 bytes a weight on its host."""
        found = {}
        for path, layer in self.learner.sketch.layers.items():
            whole = self.ranks.gather(layer.weight, layer.d)
            if self.ranks.rank == 0:
                found[canonical_path(path)] = whole.cpu().numpy()
        return None if self.ranks.rank else found

    def state(self) -> dict[str, Any] | None:
        """What a checkpoint holds beside the weights, on rank 0: moments, counters, the norm."""
        state = self.learner.state_dict()
        if self.ranks.rank:
            return None
        return {"learner": state, "frozen_norm": self.trainer.norm_at_start}

    def save(self, folder: str) -> None:
        """Write the trained weights to a new folder, each rank its rows.

        Raises `OSError` on every rank when the system refuses one of them a write.
        """
        group = self.ranks.group
        try:
            dcp.save(shards.weights(self.learner), checkpoint_id=folder, process_group=group)
        except CheckpointException as error:  # no Exception, so Ray would take it for a crash
            rank, (problem, _) = min(error.failures.items())
            number = getattr(problem, "errno", None)
            raise OSError(number, f"rank {rank}: {problem}") from None

    def restore(self, state: dict[str, Any], source: shards.Source, run_dir: str) -> None:
        """Weights from `source`, moments and counters of `state`."""
        self.trainer.check_frozen(state)
        self.learner.load_state_dict(state["learner"])
        shards.read(source, Path(run_dir), self.learner, self.ranks.group)

    def leave(self) -> None:
        dist.destroy_process_group()

    @property
    def learner(self) -> LoGRALearner:
        return cast(LoGRALearner, self.trainer.learner)
