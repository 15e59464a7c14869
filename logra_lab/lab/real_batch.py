"""One judged PPO batch of a policy, outside any loop: what notebooks look at gradients and KL with.

The parts are the loop's own (`rl.ppo`, `rl.rollout`, `rl.scoring`); nothing is trained here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.probe import Forward
from logra_lab.projection import canonical_path
from logra_lab.rl import ppo
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.policies import Policy
from logra_lab.rl.prefix import can_share
from logra_lab.rl.rollout import HFEngine
from logra_lab.rl.scoring import ScoringPool
from logra_lab.rl.tasks import Task
from logra_lab.sketch import Sketch, find_targets


@dataclass(frozen=True)
class RealBatch:
    """Responses of `policy` with their advantages, padded once; N = generated tokens in all."""

    policy: Policy
    config: TrainConfig
    samples: list[ppo.Sample]
    batches: list[ppo.TokenBatch]
    accuracy: float

    @property
    def tokens(self) -> int:
        return sum(len(sample.response) for sample in self.samples)

    def loss(self, batch: ppo.TokenBatch) -> Tensor:
        """This microbatch's share of the PPO loss; the shares add up to the batch's."""
        logits = batch.logits(self.policy.model)
        temperature, clip = self.config.temperature, self.config.clip
        return ppo.ppo_loss(
            logits, batch, normaliser=self.tokens, temperature=temperature, clip=clip
        )

    def backward(self) -> None:
        """Forward and backward over all microbatches: fills sketches, or gradients."""
        for batch in self.batches:
            self.loss(batch).backward()

    @torch.no_grad()
    def mean_loss(self) -> float:
        """The PPO loss of the batch at the current weights."""
        return sum(self.loss(batch).item() for batch in self.batches)

    def probe(self, responses: int) -> Forward:
        """Logits [positions, V] of the first `responses` responses, for `probe.predict`."""
        batch = pad(self.policy, self.samples[:responses])
        return lambda: batch.logits(self.policy.model)

    def dense_gradients(self) -> dict[str, Tensor]:
        """G [d, k] of every target by path. For comparison: the method never forms it."""
        modules = find_targets(self.policy.model, self.config.targets)
        flags = {p: p.requires_grad for p in self.policy.model.parameters()}
        self.policy.model.requires_grad_(False)
        for module in modules.values():
            module.weight.requires_grad_(True)
        try:
            self.backward()
            found = {canonical_path(path): m.weight.grad for path, m in modules.items()}
        finally:
            for parameter, flag in flags.items():
                parameter.grad = None
                parameter.requires_grad_(flag)
        missing = [path for path, G in found.items() if G is None]
        if missing:
            raise InputError(f"no gradient reached {missing}: does the batch have a signal?")
        return {path: G for path, G in found.items() if G is not None}

    def sketch(self, rank: int, *, seed: int = 0, draw: int = 1, kind: str = "sign") -> Sketch:
        """A sketch of this batch's gradient; call its `remove()` before the next one."""
        sketch = Sketch(
            self.policy.model,
            rank,
            seed=seed,
            draw=draw,
            targets=self.config.targets,
            share_inputs=self.config.share_inputs,
            projection=kind,
        )
        self.backward()
        return sketch


def pad(policy: Policy, samples: Sequence[ppo.Sample]) -> ppo.TokenBatch:
    """Samples as one padded batch on the policy's device."""
    share = can_share(policy.model)
    return ppo.token_batch(samples, policy.pad_id, policy.model.device, share_prefix=share)


def real_batch(
    policy: Policy, task: Task, config: TrainConfig, size: int, *, start: int = 0
) -> RealBatch:
    """Generate and judge one response to each of `size` problems, from problem `start` on.

    The baseline is the batch's own mean reward, as in the first step of a run. Raises `InputError`
    when all rewards are equal: such a batch has no gradient to look at.
    """
    problems = list(task.problems[start : start + size])
    engine = HFEngine(
        policy,
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.generate_batch,
    )
    keys = [f"{config.seed}:batch:{start + i}" for i in range(len(problems))]
    rollout = engine.generate([policy.encode(problem.prompt) for problem in problems], keys)
    with ScoringPool(task.verifier, config.score_workers, config.score_timeout) as scorer:
        scores = scorer.score(rollout.texts, problems, rollout.finish)
    rewards = [score.reward for score in scores if score.reward is not None]
    if len(set(rewards)) < 2:
        raise InputError(f"{size} responses have equal rewards: no learning signal; ask for more")
    mean = sum(rewards) / len(rewards)
    samples = ppo.judged_samples(rollout, scores, mean)
    pieces = ppo.microbatches(samples, config.microbatch_tokens)
    return RealBatch(policy, config, samples, [pad(policy, piece) for piece in pieces], mean)
