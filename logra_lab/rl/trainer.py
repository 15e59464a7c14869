"""Model and learner: samples in, one update out; on one process, or on one rank of several.

Over ranks every method is a collective. A batch is dealt so that all ranks run the same number of
forward passes, of like size; the normaliser, the loss, α and the reason of a skip come from sums
over all ranks, so that no rank decides anything alone.
"""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from logra_lab.errors import InputError
from logra_lab.optimizer import StepReport, frobenius
from logra_lab.probe import Forward
from logra_lab.ranks import ALONE, Ranks, local
from logra_lab.rl import ppo
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.learners import make_learner
from logra_lab.rl.policies import Policy
from logra_lab.rl.prefix import can_share
from logra_lab.rl.recompute import recomputed_layers


@dataclass(frozen=True)
class Share:
    """What one rank gets of a batch.

    pieces: microbatches to learn from; probe: those to predict KL on. An empty one stands for a
    pass that this rank runs for the others' sake, on `filler`. tokens: of the whole batch.
    """

    pieces: list[list[ppo.Sample]]
    probe: list[list[ppo.Sample]]
    filler: ppo.Sample
    tokens: int


@dataclass(frozen=True)
class Taken:
    """An update, or why there is none: the step's report, the loss's numbers, seconds of passes."""

    report: StepReport
    stats: dict[str, float | None]
    seconds_train: float


def deal(samples: Sequence[ppo.Sample], config: TrainConfig, ranks: int) -> list[Share]:
    """A batch cut into microbatches and dealt to ranks; the probe has the batch's first responses.

    Sorted by length, so that the passes which ranks run side by side are of like size.
    """
    cut = config.probe_tokens
    looked_at = [
        ppo.Sample(s.prompt, s.response[:cut], s.logprobs[:cut], s.finish, s.advantage)
        for s in samples[: config.probe_responses]
    ]
    tokens = sum(len(s.response) for s in samples)
    filler = min(samples, key=lambda s: len(s.prompt) + len(s.response))
    learned = _dealt(samples, config.microbatch_tokens, ranks)
    probe = _dealt(looked_at, config.microbatch_tokens, ranks)
    return [Share(*both, filler, tokens) for both in zip(learned, probe, strict=True)]


def _dealt(samples: Sequence[ppo.Sample], limit: int, ranks: int) -> list[list[list[ppo.Sample]]]:
    pieces = ppo.microbatches(samples, limit)
    while len(pieces) % ranks:  # halve the longest passes until all ranks have work
        place = max(range(len(pieces)), key=lambda i: (len(pieces[i]) > 1, _padded(pieces[i])))
        piece = pieces[place]
        if len(piece) == 1:
            pieces += [[]] * (-len(pieces) % ranks)
            break
        pieces[place : place + 1] = [piece[: len(piece) // 2], piece[len(piece) // 2 :]]
    return [pieces[rank::ranks] for rank in range(ranks)]


def _padded(piece: Sequence[ppo.Sample]) -> int:
    return len(piece) * (max(len(s.prompt) for s in piece) + max(len(s.response) for s in piece))


class Trainer:
    """The trained policy and its learner."""

    def __init__(self, policy: Policy, config: TrainConfig, ranks: Ranks = ALONE) -> None:
        self.policy, self.config, self.ranks = policy, config, ranks
        self.learner = make_learner(policy, config, ranks)  # may wrap policy.model (LoRA)
        self.norm_at_start = self._frozen_norm()
        self.batches: list[ppo.TokenBatch] = []
        self.filler: ppo.TokenBatch | None = None
        self.looks: list[Forward] = []
        self.tokens = 0

    @property
    def size(self) -> int:
        """Ranks among which a batch is dealt."""
        return self.ranks.size

    def load(self, shares: Sequence[Share]) -> None:
        """Take a batch, of which there is one share for each rank; updates follow."""
        share = shares[self.ranks.rank]
        work = share.pieces + share.probe
        self.filler = None if all(work) else self.batch([share.filler])
        self.batches = [self._batch(piece) for piece in share.pieces]
        self.looks = [self._look(piece) for piece in share.probe]
        self.tokens = share.tokens

    def update(self, *, fresh: bool) -> Taken:
        """Forward and backward over the microbatches, then the learner's step.

        fresh: the weights are those that generated the batch, so that its mismatch counts.
        """
        config, stats, begun = self.config, ppo.LossStats(), time.perf_counter()
        for batch in self.batches:
            with self.autocast(), recomputed_layers(self.policy.model, config.checkpointing):
                logits = batch.logits(self.policy.model)
            if batch is self.filler:
                logits[:0].sum().backward()  # nothing to learn, and every collective all the same
                continue
            loss = ppo.ppo_loss(
                logits,
                batch,
                normaliser=self.tokens,
                temperature=config.temperature,
                clip=config.clip,
                stats=stats,
            )
            loss.backward()
            del logits, loss
        stats = stats.over(self.ranks)
        seconds = time.perf_counter() - begun
        if not math.isfinite(stats.loss):
            self.learner.discard()
            report = StepReport(self.learner.t, skipped=f"the loss is {stats.loss}")
        else:
            gap = stats.to_dict()["logprob_gap"] if fresh else None
            report = self.learner.step(self.looks, gap=gap)
        return Taken(report, stats.to_dict(), seconds)

    def _batch(self, piece: list[ppo.Sample]) -> ppo.TokenBatch:
        return self.batch(piece) if piece else cast(ppo.TokenBatch, self.filler)

    def _look(self, piece: list[ppo.Sample]) -> Forward:
        batch = self._batch(piece)

        def logits() -> Tensor:
            with self.autocast():
                seen = batch.logits(self.policy.model)
            return seen if piece else seen[:0]

        return logits

    def batch(self, samples: Sequence[ppo.Sample]) -> ppo.TokenBatch:
        # A prefix takes a pass of its own, which over ranks would have to be every rank's.
        share = self.size == 1 and self.config.checkpointing == "none"
        share = share and can_share(self.policy.model)
        return ppo.token_batch(samples, self.policy.pad_id, self.device, share_prefix=share)

    @property
    def device(self) -> torch.device:
        return self.ranks.device or self.policy.model.device

    def autocast(self) -> Any:
        if self.config.autocast == "none" or self.size > 1:  # FSDP2 has its own mixed precision
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @property
    def run(self) -> str:
        """Id of the run in its thin updates."""
        return self.learner.run

    def targets(self) -> dict[str, Tensor]:
        """The trained matrices by the layer names of updates."""
        return self.learner.targets()

    def _frozen_norm(self) -> float:
        """Norm of all parameters that are not trained: another policy has another one."""
        trained = self.learner.weights().keys()
        named = self.policy.model.named_parameters()
        norms = [frobenius(torch.atleast_2d(local(p))) for n, p in named if n not in trained]
        return math.sqrt(self.ranks.totals(math.hypot(*norms) ** 2)[0])

    def state_dict(self) -> dict[str, Any]:
        return {
            "frozen_norm": self.norm_at_start,
            "learner": self.learner.state_dict(),
            "weights": self.learner.weights(),
        }

    def check_frozen(self, state: dict[str, Any]) -> None:
        """Raise `InputError` if the checkpoint is of a policy with other frozen weights."""
        if not math.isclose(self.norm_at_start, state["frozen_norm"], rel_tol=1e-5):
            raise InputError(
                f"the policy's frozen weights have norm {self.norm_at_start:.9g}, the checkpoint's "
                f"{state['frozen_norm']:.9g}: load the same policy"
            )

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; `InputError` says what does not fit, before anything is changed."""
        weights = self.learner.weights()
        shapes = {name: weight.shape for name, weight in weights.items()}
        theirs = {name: weight.shape for name, weight in state["weights"].items()}
        if shapes != theirs:
            odd = sorted({name for name, _ in shapes.items() ^ theirs.items()})
            raise InputError(f"checkpoint and model differ in {odd[:5]}: load the same policy")
        self.check_frozen(state)
        self.learner.load_state_dict(state["learner"])
        for name, weight in weights.items():
            weight.copy_(state["weights"][name])
