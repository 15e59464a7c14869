"""Run a configuration from its first step to its last: tasks, records, checkpoints, Ctrl-C."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logra_lab.errors import InputError
from logra_lab.rl import checkpoint
from logra_lab.rl.config import TrainConfig, make_config
from logra_lab.rl.evaluate import EvalResult
from logra_lab.rl.interrupt import StopRequest
from logra_lab.rl.outcomes import Verifier
from logra_lab.rl.policies import Policy, load_policy, on_gpu
from logra_lab.rl.records import RunRecord
from logra_lab.rl.run import Run, check_settings
from logra_lab.rl.scoring import ScoringPool
from logra_lab.rl.tasks import Task, load_task

if TYPE_CHECKING:
    from logra_lab.lab.presets import Preset

EVAL_SEED, TRAIN_SEED = 1, 2  # of the problem generators: the same problems for every run seed
CHECKPOINT = checkpoint.NAME


def load_tasks(config: TrainConfig, verifier: Verifier | None = None) -> tuple[Task, Task]:
    """(training, held-out) problems; no held-out prompt occurs in training.

    Held-out prompts are distinct; training draws them as often as the task does.
    """
    common: dict[str, Any] = {"params": config.task_params, "verifier": verifier}
    other = config.eval_task if config.eval_task != config.task else None
    held_out = load_task(
        other or config.task,
        size=config.eval_problems,
        seed=EVAL_SEED,
        **({"verifier": verifier} if other else common),
    )
    seen = {problem.prompt for problem in held_out}
    train = load_task(
        config.task,
        size=config.train_problems,
        seed=TRAIN_SEED,
        exclude=seen,
        distinct=False,
        **common,
    )
    if train.verifier != held_out.verifier:
        raise InputError(
            f"eval_task {other!r} is judged by {held_out.verifier.name!r}, task {config.task!r} by "
            f"{train.verifier.name!r}: a run has one verifier; choose tasks that share it"
        )
    return train, held_out


def train(
    config: TrainConfig,
    run_dir: str | Path,
    *,
    resume: bool = False,
    policy: Policy | None = None,
    verifier: Verifier | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    on_phase: Callable[[str], None] = lambda _: None,
) -> tuple[Run, list[EvalResult]]:
    """Run `config` to its last step in `run_dir`; return the run and its evaluations.

    Writes `manifest.json`, `steps.jsonl` and `checkpoint.pt`. Ctrl-C ends the step under way,
    saves and raises KeyboardInterrupt; `resume=True` goes on from the checkpoint. `on_phase` hears
    of what takes long between steps.
    """
    run_dir = Path(run_dir)
    saved = checkpoint.load(run_dir / CHECKPOINT) if resume else None
    if saved is not None:
        check_settings(config, saved)  # before anything is loaded or started
    train_task, held_out = load_tasks(config, verifier)
    with ExitStack() as stack:
        scorer = stack.enter_context(
            ScoringPool(train_task.verifier, config.score_workers, config.score_timeout)
        )
        parts: Any = None
        if config.trainers or config.engines:
            from logra_lab.cluster import groups  # needs Ray

            policy, *parts = groups.make(config, policy, run_dir, stack)
        policy = policy or on_gpu(load_policy(config.policy))
        run = Run(config, policy, train_task, held_out, scorer, parts)
        stack.callback(run.publisher.close)
        if saved is not None:
            run.load_state_dict(saved)
        saved = None  # a second copy of the weights
        record = stack.enter_context(
            RunRecord.open(
                run_dir,
                config.model_dump(mode="json"),
                seeds={"run": config.seed, "eval": EVAL_SEED, "train": TRAIN_SEED},
                verifier=train_task.verifier,
                resume_step=run.step if resume else None,
                device=run.trainer.device,
            )
        )
        run.publisher.open_journal(run_dir, run.trainer.run, run.version)
        stop = stack.enter_context(StopRequest())
        results = list(_steps(run, record, stop, run_dir, on_step, on_phase))
        return run, results


def _steps(
    run: Run,
    record: RunRecord,
    stop: StopRequest,
    run_dir: Path,
    on_step: Callable[[dict[str, Any]], None] | None,
    on_phase: Callable[[str], None],
) -> Iterator[EvalResult]:
    config = run.config

    def judged() -> EvalResult:
        on_phase(f"evaluating at step {run.step}")
        result = run.evaluate()
        record.add_evaluation(
            task=config.task,
            size=len(run.held_out),
            seed=EVAL_SEED,
            step=run.step,
            result=result.to_dict(),
        )
        return result

    def due() -> bool:
        at_end = run.step in (0, config.steps)
        return at_end or bool(config.eval_every and run.step % config.eval_every == 0)

    # Ctrl-C may have come between a step and its evaluation.
    if due() and all(done["step"] != run.step for done in record.manifest["evaluations"]):
        yield judged()
    while run.step < config.steps:
        line = run.one_step()
        run.keep(run_dir)
        record.log(**line)
        run.publisher.shorten(run.version)
        if on_step is not None:
            on_step(line)
        save = config.checkpoint_every and run.step % config.checkpoint_every == 0
        if save or stop.requested or run.step == config.steps:
            run.save(run_dir)
        if stop.requested:
            raise KeyboardInterrupt
        if due():
            yield judged()


def preset_config(preset: "Preset", **settings: Any) -> TrainConfig:
    """The preset's training run as a configuration; `settings` override single fields."""
    base: dict[str, Any] = {
        "policy": preset.policy,
        "task": preset.task,
        "task_params": dict(preset.task_params),
        "eval_task": preset.eval_task,
        "train_problems": preset.train_problems,
        "steps": preset.steps,
        "prompts_per_step": preset.prompts_per_step,
        "rank": preset.rank,
        "update_ratio": preset.update_ratio,
        "variant": preset.variant,
        "kl_start": preset.kl_start,
        "kl_end": preset.kl_end,
        "max_new_tokens": preset.max_new_tokens,
        "temperature": preset.temperature,
        "eval_problems": preset.eval_problems,
        "eval_samples": preset.eval_samples,
    }
    if settings.get("method", "logra") != "logra":
        base |= {"kl_start": None, "kl_end": None}  # the baselines have no KL control
    return make_config(**(base | settings))


def placed_config(preset: "Preset", **settings: Any) -> TrainConfig:
    """The same run where `logra-lab train` puts it: in the preset's groups of processes."""
    placement = dict(preset.placement)
    if settings.get("method", "logra") != "logra":  # the baselines are one process
        placement = {name: placement[name] for name in placement.keys() & _ONE_PROCESS}
    return preset_config(preset, **(placement | settings))


_ONE_PROCESS = {"autocast", "checkpointing", "microbatch_tokens", "probe_responses"}
