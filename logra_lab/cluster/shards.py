"""The weights of a group's checkpoint: sharded files of one version, and the updates after it.

shards/NNNNNNNN/   the trained matrices of a version, by torch.distributed.checkpoint
journal/           every update since, and a base now and then
checkpoint.pt      moments and counters of the last step, and which shards they build on
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from logra_lab.atomic import previous_path
from logra_lab.rl.checkpoint import NAME, CheckpointError
from logra_lab.rl.learners import LoGRALearner
from logra_lab.rl.publish import JOURNAL
from logra_lab.sync.journal_files import verify
from logra_lab.sync.journal_replay import Replay
from logra_lab.sync.update import apply


class Source(NamedTuple):
    """Where weights come from: a folder of shards or a base file, else the policy as it is loaded;
    then these versions of the journal."""

    shards: str | None
    base: str | None
    updates: range


def folder_of(run_dir: Path, version: int) -> Path:
    return run_dir / "shards" / f"{version:08d}"


def find_source(run_dir: Path, state: dict[str, Any]) -> Source:
    """The shards that the checkpoint `state` names if they are whole and the journal leads on from
    there, else the journal's own base: the same bits. Raises `CheckpointError` when neither does.
    """
    target, version, shards, problem = state["learner"]["t"], 0, None, ""
    for saved in state["shards"]:
        version, folder = saved["version"], folder_of(run_dir, saved["version"])
        if digests(folder) != saved["digests"]:
            problem = f"checkpoint {folder} is damaged or not whole"
        shards = str(folder)
    since = range(version + 1, target + 1)
    journal = Replay.open(run_dir / JOURNAL) if (run_dir / JOURNAL).is_dir() else None
    held = set() if journal is None else set(journal.contents.updates)
    if not problem and set(since) <= held:
        return Source(shards, None, since)
    problem = problem or f"the checkpoint's weights are of version {version}, its state of {target}"
    if journal is None or target not in journal.versions():
        raise CheckpointError(
            f"{problem}, and no journal in {run_dir} leads to version {target}: resume from the "
            f"checkpoint before, {previous_path(run_dir / NAME)}, in the place of {NAME}"
        )
    base, updates = journal.route(None, target)
    assert base is not None
    path = journal.contents.bases[base].path
    verify(path)  # ranks read their rows of it, unchecked
    return Source(None, str(path), updates)


@torch.no_grad()
def read(
    source: Source, run_dir: Path, learner: LoGRALearner, group: dist.ProcessGroup | None = None
) -> None:
    """Fill the learner's weights, or this rank's rows of them; shards may come from another number
    of ranks. A collective of `group`, if there is one."""
    if source.shards is not None:
        alone = group is None
        dcp.load(weights(learner), checkpoint_id=source.shards, process_group=group, no_dist=alone)
    elif source.base is not None:
        with safe_open(source.base, framework="pt") as base:
            for slot in learner.slots():
                slot.weight.copy_(base.get_slice(slot.layer)[slot.rows])
    if source.updates:
        journal = Replay.open(run_dir / JOURNAL)
        for version in source.updates:
            apply(journal.update(version), learner.slots())


def weights(learner: LoGRALearner) -> dict[str, Any]:
    """The trained matrices by state-dict key, as FSDP holds them."""
    layers = learner.sketch.layers.items()
    return {f"{path}.weight": layer.module.weight.detach() for path, layer in layers}


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder."""
    found = {}
    for path in sorted(folder.glob("*")):
        with open(path, "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
