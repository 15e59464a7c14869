"""Trainers and engines of a run as groups of processes on one Ray."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from logra_lab.cluster.engines import EngineGroup
from logra_lab.cluster.node import STORE_BYTES, Needs, start
from logra_lab.cluster.trainers import TrainerGroup
from logra_lab.errors import InputError
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.policies import Policy, folder_policy, load_policy, on_gpu, policy_folder
from logra_lab.rl.trainer import Trainer
from logra_lab.sketch import find_targets


def make(
    config: TrainConfig, policy: Policy | None, run_dir: Path, stack: ExitStack
) -> tuple[Policy, Trainer | TrainerGroup, EngineGroup]:
    """The policy as this process needs it, the trainer and the engines; `stack` ends them.

    With trainers of their own, no weights are loaded here. Raises as `node.start`, `TrainerGroup`
    and `EngineGroup` do, and `InputError` for a policy in memory: the processes load it by name.
    """
    if policy is not None:
        raise InputError("trainers and engines on Ray load the policy by its name: set policy")
    folder = policy_folder(config.policy)
    outline = folder_policy(folder)
    if config.trainers and not config.journal_every:
        raise InputError(
            "trainers on Ray keep a journal, so that a run that loses one goes on from its last "
            "step: set journal_every to 1 or more (50, say)"
        )
    # Of the trained matrices the engines' base, those on their way, and the base they become.
    trained = find_targets(outline.model, config.targets).values()
    store = STORE_BYTES + 3 * 4 * sum(module.weight.numel() for module in trained)
    cluster = stack.enter_context(start(config.ray_address, Needs.of(config), store_bytes=store))
    if not config.trainers:
        policy = on_gpu(load_policy(config.policy))
        trainer = Trainer(policy, config)
        engines = EngineGroup(config, cluster, trainer.targets)
        stack.callback(engines.close)
        return policy, trainer, engines
    with ThreadPoolExecutor(1) as pool:  # both take their time to start
        starting = pool.submit(TrainerGroup, config, cluster, folder, run_dir)
        try:
            engines = EngineGroup(config, cluster)
            stack.callback(engines.close)  # also if the trainers do not start
        finally:
            group = starting.result()
            stack.callback(group.close)
    engines.weights = group.targets
    return outline, group, engines
