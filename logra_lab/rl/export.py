"""Hand a trained policy on as a plain Hugging Face folder, together with its record."""

import copy
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from logra_lab.atomic import sync_folder
from logra_lab.errors import InputError, LograError
from logra_lab.rl import checkpoint
from logra_lab.rl.config import make_config
from logra_lab.rl.run_files import RecordError, raw_steps, read_manifest

if TYPE_CHECKING:
    from logra_lab.rl.learners import LoGRALearner
    from logra_lab.rl.policies import Policy


class ExportRefused(LograError):
    """A policy may not leave a run whose record does not say how good it is."""


def export_policy(run_dir: str | Path, policy: "Policy", out_dir: str | Path) -> Path:
    """Write model, tokenizer and the run's `manifest.json` to the new folder `out_dir`.

    The folder appears whole or not at all; peft adapters (LoRA) are merged into the weights, in a
    copy of the model. Raises `ExportRefused` when the record holds no
    evaluation, or none after the last update that was logged; `InputError` when `out_dir` is a
    file or a folder that is not empty; `RecordError` when the system refuses a write.
    """
    run_dir, out_dir = Path(run_dir), Path(out_dir)
    check_evaluated(run_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise InputError(f"export to {out_dir}: it exists; name a folder that does not")
    temporary = out_dir.with_name(f".{out_dir.name}.tmp")
    try:
        if temporary.exists():  # left by a crash
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        _plain_model(policy).save_pretrained(temporary)
        policy.tokenizer.save_pretrained(temporary)
        shutil.copyfile(run_dir / "manifest.json", temporary / "manifest.json")
        _publish(temporary, out_dir)
    except OSError as error:
        raise RecordError(f"export to {out_dir}: {error.strerror or error}") from error
    finally:
        if temporary.exists():
            shutil.rmtree(temporary)
    return out_dir


def trained_policy(run_dir: str | Path) -> "Policy":
    """The policy of a run's last checkpoint, whole and in this process; LoRA keeps its adapters.

    Raises `CheckpointError` and `RecordError` for files that lack or are damaged, and as
    `check_saved`.
    """
    from logra_lab.rl.policies import load_policy
    from logra_lab.rl.trainer import Trainer

    run_dir = Path(run_dir)
    alone: dict[str, Any] = {"trainers": 0, "engines": 0, "cpu_offload": False, "ray_address": None}
    alone |= {"overlap": False, "engine_tensor_parallel": 1, "transport": "auto"}
    config = make_config(**read_manifest(run_dir)["config"] | alone)
    state = checkpoint.load(run_dir / checkpoint.NAME)
    check_saved(run_dir, state["step"])
    trainer = Trainer(load_policy(config.policy), config)
    if "weights" in state:
        trainer.load_state_dict(state)
    else:  # of a group of trainers
        from logra_lab.cluster import shards

        trainer.check_frozen(state)
        trainer.learner.load_state_dict(state["learner"])
        source = shards.find_source(run_dir, state)
        shards.read(source, run_dir, cast("LoGRALearner", trainer.learner))
    return trainer.policy


def _plain_model(policy: "Policy") -> Any:
    """The model itself, or a copy of it with peft adapters merged into its weights."""
    if not hasattr(policy.model, "merge_and_unload"):
        return policy.model
    wrapper: Any = copy.deepcopy(policy.model)
    return wrapper.merge_and_unload()


def check_evaluated(run_dir: Path) -> None:
    """Raise `ExportRefused` unless an evaluation followed the last update that was logged."""
    evaluated = [entry["step"] for entry in read_manifest(run_dir)["evaluations"]]
    updates = [step["step"] for step in raw_steps(run_dir) if step.get("skipped") is None]
    if not evaluated:
        problem = "holds no evaluation"
    elif updates and max(evaluated) < updates[-1]:
        problem = f"ends with an evaluation after step {max(evaluated)}, but an update at step "
        problem += f"{updates[-1]} followed"
    else:
        return
    raise ExportRefused(
        f"export: the record of {run_dir} {problem}; go on to the run's end, which evaluates (the "
        "train command again, with --resume), or evaluate the policy on held-out problems and add "
        "the result to the record (RunRecord.add_evaluation), then export"
    )


def check_saved(run_dir: Path, step: int) -> None:
    """Raise `ExportRefused` if an update lies between the last evaluation and the checkpoint of
    `step`: the run was killed between the two, and its record is not about these weights."""
    evaluated = [entry["step"] for entry in read_manifest(run_dir)["evaluations"]]
    if not evaluated:
        return  # `check_evaluated` says so
    low, high = sorted((step, max(evaluated)))
    skipped = {line["step"] for line in raw_steps(run_dir) if line.get("skipped") is not None}
    if not skipped.issuperset(range(low + 1, high + 1)):
        raise ExportRefused(
            f"export: the checkpoint of {run_dir} is of step {step}, its last evaluation of step "
            f"{max(evaluated)}: resume the run to its end, then export"
        )


def _publish(temporary: Path, out_dir: Path) -> None:
    for file in temporary.rglob("*"):
        if file.is_file():
            with open(file, "rb") as written:
                os.fsync(written.fileno())
    sync_folder(temporary)
    temporary.replace(out_dir)
    sync_folder(out_dir.parent)
