"""What the tests of the training loop share (no test lives here)."""

import copy
from collections.abc import Callable

import torch

from logra_lab.rl.config import TrainConfig, make_config
from logra_lab.rl.loop import load_tasks
from logra_lab.rl.policies import load_policy
from logra_lab.rl.run import Run
from logra_lab.rl.verifiers import Outcome, Problem, Score, check_sum

TINY = {
    "steps": 3,
    "prompts_per_step": 24,
    "train_problems": 96,
    "eval_problems": 8,
    "eval_samples": 1,
    "max_new_tokens": 8,
    "rank": 8,
}
CLOCK = ("seconds_", "peak_memory")  # the only fields that may differ between equal runs

CORRECT, WRONG = Score(Outcome.correct, 1.0), Score(Outcome.wrong, 0.0)
TIMEOUT, ERROR = Score(Outcome.timeout, None), Score(Outcome.error, None, "broken")


def tiny_config(**settings) -> TrainConfig:
    return make_config(**TINY | settings)


class Judge:
    """A scorer in this process: `rule(text, problem, row)` gives each Score."""

    def __init__(self, rule: Callable[[str, Problem, int], Score] | None = None) -> None:
        self.rule = rule or judge_sums

    def score(self, texts, problems, finish) -> list[Score]:
        return [self.rule(t, p, i) for i, (t, p) in enumerate(zip(texts, problems, strict=True))]


def judge_sums(text: str, problem: Problem, row: int) -> Score:
    return CORRECT if check_sum(text, problem) is Outcome.correct else WRONG


def alternate(text: str, problem: Problem, row: int) -> Score:
    """Rewards that always differ within a batch, whatever the policy says."""
    return CORRECT if row % 2 else WRONG


def tiny_run(rule=None, policy=None, **settings) -> Run:
    config = tiny_config(**settings)
    train, held_out = load_tasks(config)
    run = Run(config, policy or load_policy("small"), train, held_out, Judge(rule))
    run.learner.run = "tiny"  # a random id otherwise; the tests compare whole states
    return run


def snapshot(run: Run) -> dict:
    """All that a skipped step must leave alone, as a copy."""
    state = copy.deepcopy(run.state_dict())
    frozen = {n: p.detach().clone() for n, p in run.policy.model.named_parameters()}
    return {
        "every parameter": frozen,
        "learner": state["learner"],
        "baseline": state["baseline"],
        "version": state["version"],
        "draw": getattr(run.learner, "draw", None),
    }


def same(a, b) -> bool:
    """Equality to the bit of nested plain values and tensors."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def numbers(line: dict) -> dict:
    """A step's record without wall times and memory."""
    return {k: v for k, v in line.items() if not k.startswith(CLOCK)}
