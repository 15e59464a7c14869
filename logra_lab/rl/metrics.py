"""Every number a run logs, defined once, and the strict JSON it is written as.

JSON has no NaN or infinity (RFC 8259, section 6): they are written as the strings "NaN",
"Infinity" and "-Infinity", and `from_json` turns those back into floats in every field whose unit
is not "text". null means "not measured in this step".
"""

import json
import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

from logra_lab.errors import InputError


class Metric(NamedTuple):
    """Unit and meaning of a logged value."""

    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "step": Metric("count", "batches drawn so far, 1-based; skipped ones count"),
    "t": Metric("count", "updates applied so far: RowAdam's and the budget's t"),
    "version": Metric("count", "version of the weights after this step"),
    "engine_version": Metric("count", "version that generated the batch; null: the trainer's own"),
    "staleness": Metric("count", "updates between the weights that generated and those trained"),
    "engines": Metric(
        "mixed", "a group of engines: busy and idle shares, restarts, memory, faults"
    ),
    "trainers": Metric("mixed", "ranks of the trainer group: process, device, memory so far"),
    "reward_mean": Metric("reward", "mean reward of the judged responses of the batch"),
    "accuracy": Metric("share", "correct responses among the judged ones of the batch"),
    "baseline": Metric("reward", "baseline subtracted in this step, made from earlier batches"),
    "advantage_max": Metric("reward", "largest |reward - baseline| of the batch"),
    "response_tokens_mean": Metric("tokens", "mean response length of the batch"),
    "truncated_share": Metric("share", "responses that ended at the token limit"),
    "outcomes": Metric("count", "responses by outcome: correct, wrong, unparsable, timeout, error"),
    "tokens": Metric("tokens", "generated tokens in the loss, its normaliser"),
    "loss": Metric("reward", "clipped PPO loss per generated token, before the update"),
    "clip_share": Metric("share", "tokens whose gradient the clip removed"),
    "ratio_max": Metric("ratio", "largest probability ratio of trainer to rollout at a token"),
    "logprob_gap": Metric("nats/token", "mean of rollout minus trainer log-probability"),
    "entropy": Metric("nats/token", "mean entropy of the sampling distribution"),
    "sketch_norm": Metric("norm", "Frobenius norm of the gradient sketch S over all layers"),
    "update_norm": Metric("norm", "Frobenius norm of the applied update U A over all layers"),
    "update_ratio": Metric("ratio", "update_norm over the Frobenius norm of the target weights"),
    "kl_predicted_full": Metric("nats/token", "KL(1): predicted for the whole proposal, alpha = 1"),
    "kl_predicted": Metric("nats/token", "alpha squared times KL(1): predicted for the step taken"),
    "kl_realised": Metric(
        "nats/token",
        "measured after the update on the probe's positions (autocast: to rounding)",
    ),
    "kl_budget": Metric("nats/token", "budget of this step, mismatch subtracted"),
    "alpha": Metric("ratio", "step scale that the KL controller chose"),
    "kl_method": Metric("text", "estimator of KL(1), as named in the configuration"),
    "mismatch": Metric("nats/token", "running mismatch m of rollout and trainer"),
    "updates": Metric("mixed", "KL predicted and realised, alpha, clip share: one entry an update"),
    "sync_bytes": Metric("bytes", "numbers of the thin updates of this step, in their wire type"),
    "skipped": Metric("text", "why the step changed nothing; null for a step that was taken"),
    "warnings": Metric("text", "list of warnings raised in this step"),
    "seconds_generate": Metric("s", "wall time of generation"),
    "seconds_score": Metric("s", "wall time of scoring"),
    "seconds_train": Metric("s", "wall time of forward and backward over the microbatches"),
    "seconds_update": Metric("s", "wall time of the update: probe, step, realised KL"),
    "seconds_sync": Metric("s", "wall time of writing the update and of the engine taking it"),
    "seconds_step": Metric("s", "wall time of the whole step"),
    "peak_memory_mib": Metric("MiB", "highest resident memory of the process so far (ru_maxrss)"),
}

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def dumps(value: Any, *, indent: int | None = None, where: str = "value") -> str:
    """Strict JSON of plain values, pure ASCII.

    Tuples become lists, paths text, enum members their values, numbers of numpy and one-element
    tensors plain numbers. Raises `InputError` naming the key path of anything else.
    """
    return json.dumps(_plain(value, where), allow_nan=False, indent=indent)


def from_json(line: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed line with its non-finite numbers back as floats."""
    text = {name for name, metric in METRICS.items() if metric.unit == "text"}
    return {name: value if name in text else _revive(value) for name, value in line.items()}


def check_names(values: Mapping[str, Any]) -> None:
    """Raise `InputError` for a name that `METRICS` does not define."""
    unknown = sorted(set(values) - set(METRICS))
    if unknown:
        raise InputError(
            f"metrics: unknown {unknown}; define them in logra_lab.rl.metrics.METRICS "
            f"(unit and meaning) or use one of {sorted(METRICS)}"
        )


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str | PurePath):
        return str.__str__(value) if isinstance(value, str) else str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _number(float(value))
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if callable(getattr(value, "item", None)) and getattr(value, "shape", None) == ():
        return _plain(value.item(), where)  # a numpy scalar or a tensor without dimensions
    raise InputError(f"record {where}: expected a plain value, got {type(value).__name__}")


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise InputError(f"record {where}: keys must be text, got {key!r}")
    return str.__str__(key)


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _revive(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _revive(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_revive(item) for item in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
