"""Does a step depend on how many ranks take it? One batch, taken by one process and by groups.

S, D, v, α and the weights are seen from inside a step, whole. With float64 weights they agree to
1e-6 and better. With float32 a few rows of D do not: where a row's gradient is rounding noise (some
queries and keys of the first block), RowAdam scales it up to full size, and noise depends on the
order of sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from logra_lab.cluster.node import Cluster
from logra_lab.cluster.trainer_rank import TrainerRank
from logra_lab.projection import canonical_path
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.learners import LoGRALearner
from logra_lab.rl.policies import load_policy
from logra_lab.rl.ppo import Sample
from logra_lab.rl.rollout import HFEngine
from logra_lab.rl.trainer import Trainer, deal
from logra_lab.sync.update import ThinUpdate


@dataclass(frozen=True)
class Seen:
    """A step from inside: all layers' rows one below the other, on the CPU; see `watch`."""

    S: Tensor
    D: Tensor
    v: Tensor
    W: dict[str, Tensor]
    alpha: float | None
    kl: float | None
    skipped: str | None
    update: ThinUpdate | None


class Hosts:
    """Processes that become the ranks of a group, and of another one, without starting anew.

    They take the first bundles of `cluster`.
    """

    def __init__(self, cluster: Cluster, count: int) -> None:
        import ray

        make: Any = ray.remote(TrainerRank)
        self.every = [make.options(**cluster.options(i)).remote() for i in range(count)]
        self.now: list[Any] = []

    def form(
        self, config: TrainConfig, folder: Path, size: int, dtype: str = "float64", run: str = "r"
    ) -> None:
        """A group of the first `size` processes, each with its rows of the policy in `folder`."""
        import ray

        self.run(TrainerRank.leave)
        self.now = self.every[:size]
        address = ray.get(self.now[0].reserve.remote("127.0.0.1"))
        settings = config.model_dump(mode="json")
        joins = [
            actor.join.remote(settings, str(folder), run, rank, size, address, dtype)
            for rank, actor in enumerate(self.now)
        ]
        ray.get(joins)

    def all(self, method: str, *args: Any) -> list[Any]:
        """A method of every rank."""
        import ray

        return ray.get([getattr(x, method).remote(*args) for x in self.now])  # type: ignore[no-any-return]

    def run(self, work: Callable[..., Any], *args: Any) -> list[Any]:
        """`work(rank, *args)` in every rank's process."""
        import ray

        return ray.get([x.__ray_call__.remote(work, *args) for x in self.now])  # type: ignore[no-any-return]

    def step(self, samples: Sequence[Sample], config: TrainConfig) -> list[Seen]:
        """One update on a batch, as every rank saw it."""
        self.all("load", deal(samples, config, len(self.now)))
        return self.run(watch_rank)

    def close(self) -> None:
        import ray

        for actor in self.every:
            ray.kill(actor)


def watch_rank(rank: TrainerRank) -> Seen:
    return watch(rank.trainer)


def watch(trainer: Trainer) -> Seen:
    """One update of the batch that is loaded; a collective. After a skip S, D and v are empty."""
    learner, ranks = cast(LoGRALearner, trainer.learner), trainer.ranks
    layers = learner.sketch.layers
    none = torch.empty(0)
    seen = {"S": none, "D": none, "v": none}
    propose = learner._propose

    def whole(rows: Tensor) -> Tensor:
        parts = [ranks.gather(rows[layer.rows], layer.d) for layer in layers.values()]
        return torch.cat(parts).cpu()

    def noted(t: int) -> Any:
        learner.sketch.settle()
        seen["S"] = whole(learner.sketch.flat)
        proposed = propose(t)
        seen["D"], seen["v"] = whole(learner.sketch.flat), whole(proposed[-1])
        return proposed

    learner.__dict__["_propose"] = noted
    try:
        report = trainer.update(fresh=True).report
    finally:
        del learner.__dict__["_propose"]
    W = {canonical_path(n): ranks.gather(x.weight, x.d).cpu().clone() for n, x in layers.items()}
    update = None if report.update is None else report.update.to("cpu")
    told = report.alpha, report.kl_predicted_full, report.skipped
    return Seen(**seen, W=W, alpha=told[0], kl=told[1], skipped=told[2], update=update)


def alone(config: TrainConfig, folder: Path, dtype: str = "float64", run: str = "r") -> Trainer:
    """The trainer of a policy folder in this process, with weights of a type."""
    policy = load_policy(str(folder))
    policy.model.to(getattr(torch, dtype))
    trainer = Trainer(policy, config)
    cast(LoGRALearner, trainer.learner).run = run
    return trainer


def rollout(folder: Path, config: TrainConfig, rows: int) -> list[Sample]:
    """A batch of the policy's own answers to sums, every other one with a reward."""
    policy = load_policy(str(folder))
    engine = HFEngine(policy, max_new_tokens=config.max_new_tokens)
    prompts = [policy.encode(f"{7 * i % 50}+{11 * i % 40}=") for i in range(rows)]
    made = engine.generate(prompts, [f"ranks:{i}" for i in range(rows)])
    fields = zip(made.prompt_ids, made.response_ids, made.logprobs, made.finish, strict=True)
    return [Sample(*row, 0.5 if i % 2 else -0.5) for i, row in enumerate(fields)]


def apart(a: Seen, b: Seen, before: dict[str, Tensor]) -> dict[str, float]:
    """How far two steps from the weights `before` lie apart, each relative to its size.

    S, D, v: ‖a − b‖ / ‖b‖. alpha: of α. W: ‖W_a − W_b‖ over the length of the step. int8: share of
    the update's integers that differ, exponents taken off; units: by how much at most.
    """
    found = {n: _relative(getattr(a, n), getattr(b, n)) for n in ("S", "D", "v")}
    found["alpha"] = abs((a.alpha or 0) / (b.alpha or 1) - 1)
    apart = torch.cat([(a.W[name] - b.W[name]).flatten() for name in before])
    moved = torch.cat([(b.W[name] - before[name]).flatten() for name in before])
    found["W"] = float(apart.norm() / moved.norm())
    if a.update is not None and b.update is not None and a.update.exponents is not None:
        found |= _integers(a.update, b.update)
    return found


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def _integers(a: ThinUpdate, b: ThinUpdate) -> dict[str, float]:
    assert a.exponents is not None
    assert b.exponents is not None
    finer = torch.minimum(a.exponents, b.exponents)
    one, two = (
        x.values.double() * torch.exp2((x.exponents - finer).double())[:, None]  # type: ignore[operator]
        for x in (a, b)
    )
    gap = (one - two).abs()
    return {"int8": float((gap > 0).double().mean()), "units": float(gap.max())}
