"""How far engines part from their trainer: receivers follow a real training run, step by step.

The trainer trains and generates with its own weights, so that all receivers see the same updates.
After a step each is compared with what it should serve, the trainer's float32 weights cast to the
serving type: weight by weight, and as a policy on fixed sequences.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from logra_lab import kl
from logra_lab.errors import InputError
from logra_lab.projection import canonical_path
from logra_lab.rl import ppo
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.engines import cast_model
from logra_lab.rl.loop import load_tasks
from logra_lab.rl.policies import Policy
from logra_lab.rl.run import Run
from logra_lab.rl.scoring import ScoringPool
from logra_lab.sketch import find_targets
from logra_lab.sync.receiver import Place, Receiver
from logra_lab.sync.update import ThinUpdate


@dataclass(frozen=True)
class Follower:
    """A receiver: the wire type in which it gets the updates, its mode, the type it serves."""

    wire: str = "int8"
    mode: str = "exact"
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """Such as "plain bfloat16, int8 wire"."""
        return f"{self.mode} {str(self.dtype).removeprefix('torch.')}, {self.wire} wire"


def follow(
    policy: Policy,
    config: TrainConfig,
    followers: Sequence[Follower],
    *,
    probes: int = 32,
    every: int = 1,
    on_update: Callable[[ThinUpdate], None] | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Train a copy of `policy` for `config.steps` and compare those who follow it, every so many
    steps and at the end. The trainer applies what `config.wire` sends; a follower on another wire
    gets that factor rounded once more, as where a trainer does not apply what it sends.

    Args:
        probes: sequences on which policies are compared: held-out prompts with responses that the
            policy gave before training, at the run's temperature.
        on_update, on_step: called with each update the trainer applied, and each step's record.

    Returns one row a comparison and follower: `step`, `version`, `follower` (its name), and
        differing: served weights whose bits are not those of the trainer's cast. weights: of all.
        max_error: largest |served − cast|. relative_error: its norm over that of the training so
        far, ‖W_t − W_0‖. step_rms: RMS of an entry of the last update. logprob_gap: mean absolute
        difference of the log-probabilities of the probes' tokens, nats. kl: KL(cast ‖ served) a
        token, nats; both by float32 arithmetic on the served values, so that they tell of the
        weights alone and are zero for equal ones. digest: `Receiver.digest`.

    Raises `InputError` for a run that has an engine of its own, or makes no thin updates. Memory:
    the model three times in float32, and what each receiver holds.
    """
    if config.engine != "shared" or config.method != "logra":
        raise InputError(
            f"drift of method {config.method!r} with engine {config.engine!r}: expected 'logra' "
            "and 'shared', the trainer's own"
        )
    own = dataclasses.replace(policy, model=copy.deepcopy(policy.model))
    train, held_out = load_tasks(config)
    with ScoringPool(train.verifier, config.score_workers, config.score_timeout) as scorer:
        run = Run(config, own, train, held_out, scorer)
        return _Race(run, followers, probes, on_update).rows(every, on_step)


def rewired(update: ThinUpdate, wire: str) -> ThinUpdate:
    """The same step in another wire type: the factor that was applied, rounded once more.

    From int8 that changes nothing: integers up to 127 times a power of two are bfloat16 numbers.
    """
    if wire == update.wire:
        return update
    U = torch.cat([update.factor(x.name, dtype=torch.float64) for x in update.layers])
    return ThinUpdate.round(
        U.mul_(math.sqrt(update.rank)),
        update.layers,
        run=update.run,
        base=update.base,
        seed=update.seed,
        draw=update.draw,
        wire=wire,
        kind=update.kind,
    )


class _Race:
    """One trainer and those who follow it."""

    def __init__(
        self,
        run: Run,
        followers: Sequence[Follower],
        probes: int,
        on_update: Callable[[ThinUpdate], None] | None,
    ) -> None:
        self.run, self.on_update = run, on_update
        self.trained: Mapping[str, Tensor] = run.learner.targets()
        self.start = _copy(self.trained)
        self.judge = _Judge(run, probes, {x.dtype for x in followers})
        self.receivers = [(x, self._receiver(x)) for x in followers]
        run.publisher.publish = self._publish  # type: ignore[method-assign]

    def rows(
        self, every: int, on_step: Callable[[dict[str, Any]], None] | None
    ) -> list[dict[str, Any]]:
        run, steps, found = self.run, self.run.config.steps, []
        while run.step < steps:
            due = (run.step + 1) % every == 0 or run.step + 1 == steps
            before = _copy(self.trained) if due else {}
            line = run.one_step()
            if on_step is not None:
                on_step(line)
            if due:
                found += self._compare(before)
        return found

    def _receiver(self, follower: Follower) -> Receiver:
        places = [
            Place.whole(name, torch.empty_like(weight, dtype=follower.dtype))
            for name, weight in self.trained.items()
        ]
        receiver = Receiver(places, mode=follower.mode)
        receiver.load(self.run.learner.run, 0, self.trained)
        return receiver

    def _publish(self, update: ThinUpdate) -> list[str]:
        if self.on_update is not None:
            self.on_update(update)
        sent = {wire: rewired(update, wire) for wire in {x.wire for x, _ in self.receivers}}
        for follower, receiver in self.receivers:
            receiver.apply(sent[follower.wire])
        return []

    def _compare(self, before: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        numbers = sum(weight.numel() for weight in self.trained.values())
        moved = _distance(self.trained, self.start)
        common = {
            "step": self.run.step,
            "version": self.run.version,
            "weights": numbers,
            "step_rms": _distance(self.trained, before) / math.sqrt(numbers),
        }
        rows, right = [], {}
        for follower, receiver in self.receivers:
            cast = {name: w.to(follower.dtype) for name, w in self.trained.items()}
            served = {place.layer: place.served for place in receiver.places}
            if follower.dtype not in right:
                right[follower.dtype] = self.judge.logprobs(cast, follower.dtype)
            found = receiver.difference(self.trained).values()
            rows.append(
                {"follower": follower.name}
                | common
                | {
                    "differing": sum(count for count, _ in found),
                    "max_error": max(largest for _, largest in found),
                    "relative_error": _distance(served, cast) / moved if moved else 0.0,
                    **self.judge.compare(
                        right[follower.dtype], self.judge.logprobs(served, follower.dtype)
                    ),
                    "digest": receiver.digest(),
                }
            )
        return rows


class _Judge:
    """Log-probabilities under any target weights on fixed sequences; other weights are cast."""

    def __init__(self, run: Run, probes: int, dtypes: set[torch.dtype]) -> None:
        problems = run.held_out.problems[:probes]
        prompts = [run.policy.encode(problem.prompt) for problem in problems]
        rollout = run.engine.generate(prompts, [f"drift:{problem.id}" for problem in problems])
        parts = zip(prompts, rollout.response_ids, rollout.logprobs, rollout.finish, strict=True)
        self.batch = run.trainer.batch(
            [ppo.Sample(p, ids, logp, end, 0.0) for p, ids, logp, end in parts]
        )
        self.temperature, self.kinds = run.config.temperature, run.config.targets
        # The trainer's sketch leaves copies of its model alone.
        self.models: dict[torch.dtype, Any] = {
            dtype: cast_model(cast_model(copy.deepcopy(run.policy.model), dtype), torch.float32)
            for dtype in dtypes
        }

    @torch.no_grad()
    def logprobs(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Float[Tensor, "n V"]:
        model = self.models[dtype]
        for path, module in find_targets(model, self.kinds).items():
            module.weight.copy_(weights[canonical_path(path)])
        return (self.batch.logits(model) / self.temperature).log_softmax(-1)

    def compare(self, right: Tensor, mine: Tensor) -> dict[str, float]:
        chosen = self.batch.labels[:, None]
        gap = (right.gather(1, chosen) - mine.gather(1, chosen)).abs()
        return {
            "logprob_gap": gap.double().mean().item(),
            "kl": kl.realised_kl(right, mine).double().mean().item(),
        }


def _copy(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in weights.items()}


def _distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """‖a − b‖ over all layers."""
    return math.hypot(*((a[n].float() - b[n].float()).norm().item() for n in a))
