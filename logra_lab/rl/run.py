"""One training step on one page: `Run.one_step`.

generate → score → advantage → forward and backward → update → synchronise → record. Everything
random is a function of (seed, step, problem, sample), so a resumed run continues bit for bit
(not with vLLM, whose batches depend on timing: log-probabilities differ in their last bits), and a
skipped step leaves weights, moments, baseline, version, draw and t as they were.
"""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from logra_lab.errors import InputError
from logra_lab.rl import checkpoint, ppo
from logra_lab.rl.config import TrainConfig
from logra_lab.rl.engines import Engine, check_prompts, make_engine
from logra_lab.rl.environment import peak_memory_mib
from logra_lab.rl.evaluate import EvalResult, evaluate
from logra_lab.rl.learners import Learner
from logra_lab.rl.outcomes import Problem, Score
from logra_lab.rl.policies import Policy
from logra_lab.rl.publish import Publisher
from logra_lab.rl.rollout import HFEngine, Rollout
from logra_lab.rl.scoring import ScoringPool
from logra_lab.rl.tasks import Task
from logra_lab.rl.trainer import Trainer, deal

if TYPE_CHECKING:
    from logra_lab.cluster.trainers import TrainerGroup


def draw_batch(task: Task, seed: int, step: int, size: int) -> list[Problem]:
    """Problems of step 1, 2, …: consecutive cuts of one shuffle of the task per epoch."""
    order: dict[int, list[int]] = {}
    batch = []
    for place in range((step - 1) * size, step * size):
        epoch, index = divmod(place, len(task))
        if epoch not in order:
            order[epoch] = list(range(len(task)))
            random.Random(f"{seed}:order:{epoch}").shuffle(order[epoch])
        batch.append(task[order[epoch][index]])
    return batch


class Run:
    """A policy, a trainer, an engine and a scorer, and the state that a checkpoint holds.

    `parts`: trainer and engine that are groups of processes; by default both are made here.
    """

    def __init__(
        self,
        config: TrainConfig,
        policy: Policy,
        train: Task,
        held_out: Task,
        scorer: ScoringPool,
        parts: "tuple[Trainer | TrainerGroup, HFEngine | Engine] | None" = None,
    ) -> None:
        self.config, self.policy, self.scorer = config, policy, scorer
        self.train, self.held_out = train, held_out
        if config.engine == "vllm":
            check_prompts(policy, config, [*train.problems, *held_out.problems])
        self.trainer: Any
        self.engine: Any
        self.trainer, self.engine = parts or (Trainer(policy, config), make_engine(policy, config))
        self.publisher = Publisher(
            self.engine, self.trainer.targets, journal_every=config.journal_every
        )
        self.baseline = ppo.RewardBaseline(config.baseline_decay)
        self.ahead: Ahead | None = None  # the next batch, if it is being generated already
        self.step = self.version = 0
        self.equal_rewards = 0  # batches in a row whose rewards all were …
        self.equal_value: float | None = None

    def one_step(self) -> dict[str, Any]:
        """One batch: its record, with `skipped` naming the reason when nothing was changed."""
        config, clock = self.config, Clock()
        self.step += 1
        problems, rollout, engine_version = self.rollout()
        clock.lap("seconds_generate")
        scores = self.scorer.score(rollout.texts, problems, rollout.finish)
        clock.lap("seconds_score")

        rewards = [s.reward for s in scores if s.reward is not None]
        mean = math.fsum(rewards) / len(rewards) if rewards else 0.0
        b = self.baseline.value(mean)
        samples = ppo.judged_samples(rollout, scores, b)
        record = self.describe(rollout, scores, rewards, mean, b)
        skipped, before = self.no_signal(samples), self.version
        if skipped is None:
            self.trainer.load(deal(samples, config, self.trainer.size))
            record["tokens"] = sum(len(s.response) for s in samples)
            for _ in range(config.updates_per_batch):
                # a later update of the batch no longer has the weights that generated it
                fresh = self.version == (before if engine_version is None else engine_version)
                skipped = self.update(fresh=fresh, record=record, clock=clock)
            if self.version > before:
                self.baseline.update(mean)
                if skipped is not None:  # some, but not all, of the batch's updates
                    record["warnings"].append(f"a further update was skipped: {skipped}")
                    skipped = None
        elif len(rewards) == 1 and self.baseline.count == 0:
            # A first batch of one is silenced by its own mean. Were it forgotten, as skipped
            # batches are, every next one would be a first batch again, and none would be learned.
            self.baseline.update(mean)
        record |= (
            clock.seconds
            | self.groups()
            | {
                "engine_version": engine_version,
                "staleness": 0 if engine_version is None else before - engine_version,
                "version": self.version,
                "t": self.version,
                "skipped": skipped,
                "seconds_step": clock.total(),
                "peak_memory_mib": peak_memory_mib(),
            }
        )
        return record

    def rollout(self) -> tuple[list[Problem], Rollout, int | None]:
        """This step's problems and responses, and the version that generated them.

        With overlap the next batch is begun at once: it is generated while this one is trained on,
        by weights one update behind. `publish` waits until it is done.
        """
        ahead = self.ahead if self.ahead and self.ahead.step == self.step else self.begin(self.step)
        rollout = ahead.result()
        self.ahead = None
        if self.config.overlap and self.step < self.config.steps:
            self.ahead = self.begin(self.step + 1)
        return ahead.problems, rollout, ahead.version

    def begin(self, step: int) -> "Ahead":
        """Draw the batch of a step and have it generated, in the background with overlap."""
        config = self.config
        problems = draw_batch(self.train, config.seed, step, config.prompts_per_step)
        prompts = [self.policy.encode(problem.prompt) for problem in problems]
        version = self.publisher.ready(self.trainer.run, self.version)
        if config.overlap:
            result = self.engine.start(prompts, self.sampling_keys(problems, step)).result
        else:
            rollout = self.engine.generate(prompts, self.sampling_keys(problems, step))
            result = lambda: rollout  # noqa: E731
        return Ahead(step, problems, version, result)

    def groups(self) -> dict[str, Any]:
        """What groups of processes tell of a step: idle shares, restarts, memory."""
        found = {}
        if hasattr(self.engine, "stats"):
            found["engines"] = self.engine.stats()
        if not isinstance(self.trainer, Trainer):
            found["trainers"] = self.trainer.memory
        return found

    def update(self, *, fresh: bool, record: dict[str, Any], clock: "Clock") -> str | None:
        """One update of the trainer's, published; the reason if it was skipped."""
        taken = self.trainer.update(fresh=fresh)
        clock.lap("seconds_update", of_which=("seconds_train", taken.seconds_train))
        report, skipped = taken.report, taken.report.skipped
        record |= taken.stats
        if skipped is None:
            self.version += 1
            record |= {k: v for k, v in report.to_dict().items() if k not in ("t", "skipped")}
            names = ("kl_predicted", "kl_realised", "alpha", "clip_share")
            record["updates"].append({name: record[name] for name in names})
            if report.update is not None:
                record["warnings"] += self.publisher.publish(report.update)
                record["sync_bytes"] = record.get("sync_bytes", 0) + report.update.nbytes
                clock.lap("seconds_sync")
        return skipped

    def no_signal(self, samples: list[ppo.Sample]) -> str | None:
        if not samples:
            return "no generated tokens of a judged response"
        largest = max(abs(s.advantage) for s in samples)
        return None if largest >= 1e-3 else f"max|A| is {largest:.1e}: no learning signal"

    def describe(
        self, rollout: Rollout, scores: Sequence[Score], rewards: list[float], mean: float, b: float
    ) -> dict[str, Any]:
        """The part of the record that generation and scoring decide; raises the warning."""
        outcomes = Counter(str(s.outcome) for s in scores)
        value = rewards[0] if rewards else None
        if len(set(rewards)) > 1:
            self.equal_rewards = 0
        else:  # all ones, then all zeros, does tell something, unless the baseline follows at once
            silent = value in (self.equal_value, b)
            self.equal_rewards = self.equal_rewards + 1 if silent else 1
        self.equal_value = value
        limit = self.config.warn_after_equal_rewards
        warnings = []
        if self.equal_rewards and self.equal_rewards % limit == 0:
            warnings.append(
                f"no learning signal: {self.equal_rewards} batches of identical rewards "
                f"(all {'unjudged' if value is None else value}); look at the verifier and the task"
            )
        lengths = [len(ids) for ids in rollout.response_ids]
        return {
            "step": self.step,
            "reward_mean": mean if rewards else None,
            "accuracy": outcomes["correct"] / len(rewards) if rewards else None,
            "baseline": b,
            "advantage_max": max((abs(r - b) for r in rewards), default=None),
            "response_tokens_mean": sum(lengths) / len(lengths),
            "truncated_share": sum(f == "length" for f in rollout.finish) / len(lengths),
            "outcomes": dict(sorted(outcomes.items())),
            "warnings": warnings,
            "updates": [],
        }

    def sampling_keys(self, problems: list[Problem], step: int) -> list[str]:
        """(run, step, prompt, sample) of each row; a prompt drawn twice is sample 0 and 1."""
        seen: Counter[str] = Counter()
        keys = []
        for problem in problems:
            keys.append(f"{self.config.seed}:{step}:{problem.id}:{seen[problem.id]}")
            seen[problem.id] += 1
        return keys

    def evaluate(self) -> EvalResult:
        self.publisher.ready(self.trainer.run, self.version)
        return evaluate(
            self.engine,
            self.policy,
            self.held_out,
            self.scorer,
            samples=self.config.eval_samples,
            run_seed=self.config.seed,
            tag="held-out",
        )

    @property
    def learner(self) -> Learner:
        """The learner of a trainer in this process."""
        return self.trainer.learner

    def state_dict(self) -> dict[str, Any]:
        return {
            "config": self.config.model_dump(mode="json"),
            "step": self.step,
            "version": self.version,
            "equal_rewards": self.equal_rewards,
            "equal_value": self.equal_value,
            "baseline": {"ema": self.baseline.ema, "count": self.baseline.count},
            **self.trainer.state_dict(),
        }

    def keep(self, run_dir: Path) -> None:
        """After every step, before it is reported: what a group of trainers needs to go on here.

        In one process nothing: its checkpoints are whole, and come at their own times.
        """
        if not isinstance(self.trainer, Trainer) and self.publisher.journal is not None:
            checkpoint.save(run_dir / checkpoint.NAME, self.state_dict())

    def save(self, run_dir: Path) -> None:
        """A checkpoint; the one before stays beside it."""
        if not isinstance(self.trainer, Trainer):
            self.trainer.save(self.version)
        checkpoint.save(run_dir / checkpoint.NAME, self.state_dict())
        if not isinstance(self.trainer, Trainer):
            self.trainer.prune()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; `InputError` says what does not fit, before anything is changed."""
        check_settings(self.config, state)
        missing = self.state_dict().keys() - state.keys()
        if missing:
            raise InputError(f"this is no checkpoint of a run: it lacks {sorted(missing)}")
        self.trainer.load_state_dict(state)
        self.publisher.forget("the run was restored from a checkpoint")
        self.step, self.version = state["step"], state["version"]
        self.equal_rewards, self.equal_value = state["equal_rewards"], state["equal_value"]
        self.baseline.ema = state["baseline"]["ema"]
        self.baseline.count = state["baseline"]["count"]


def check_settings(config: TrainConfig, state: dict[str, Any]) -> None:
    """Raise `InputError` unless a run of `config` may go on from the checkpoint `state`.

    What may change: when to stop and save, and who computes (a group's number of ranks too).
    """
    free = {"steps", "checkpoint_every", "eval_every", "ray_address", "transport"}
    free |= {"engines", "engine_tensor_parallel", "engine_timeout", "trainer_timeout"}
    mine, theirs = config.model_dump(mode="json"), state.get("config", {})
    if mine["trainers"] and theirs.get("trainers"):
        free |= {"trainers", "cpu_offload"}
    if mine["kl_end"] is not None and mine["kl_horizon"] is None:
        free.remove("steps")  # the budget anneals over them
    changed = [k for k in mine if k not in free and theirs.get(k) != mine[k]]
    if theirs and changed:
        raise InputError(
            f"the checkpoint was made with other settings: {', '.join(changed)} differ; "
            "resume with its own, or start a new run"
        )
    if state.get("step", 0) > config.steps:
        raise InputError(
            f"the checkpoint is at step {state['step']}, beyond steps = {config.steps}"
        )


class Ahead(NamedTuple):
    """A batch that is generated, or about to be: `result` waits for it."""

    step: int
    problems: list[Problem]
    version: int | None
    result: Callable[[], Rollout]


class Clock:
    """Wall seconds by name; `lap` closes the stretch since the last one."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str, of_which: tuple[str, float] = ("", 0.0)) -> None:
        """`of_which`: another name, and the seconds of the stretch that go there."""
        now = time.perf_counter()
        other, part = of_which
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last - part
        if other:
            self.seconds[other] = self.seconds.get(other, 0.0) + part
        self.last = now

    def total(self) -> float:
        return time.perf_counter() - self.start
