"""What a training run is made of: one flat, checked table that a notebook, the command line and
the manifest share. Unknown names are refused; defaults are those of the contract."""

from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from logra_lab.errors import InputError
from logra_lab.sketch import TARGETS


class TrainConfig(BaseModel):
    """Settings of one run. KL in nats per generated token, lengths in tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    # What is trained, on what, by which method.
    policy: str = "small"
    task: str = "sums"
    task_params: dict[str, Any] = {}
    eval_task: str | None = None  # judged by the same verifier; None: held-out problems of `task`
    train_problems: int = Field(4096, ge=1)
    method: Literal["logra", "adam", "lora"] = "logra"
    seed: int = Field(0, ge=0, lt=1 << 63)

    # The batch.
    steps: int = Field(100, ge=1)
    prompts_per_step: int = Field(256, ge=1)
    updates_per_batch: int = Field(1, ge=1)
    max_new_tokens: int = Field(16, ge=1)
    temperature: float = Field(1.0, gt=0)
    clip: float = Field(0.2, gt=0, lt=1)
    baseline_decay: float = Field(0.9, ge=0, lt=1)

    # The update.
    targets: tuple[str, ...] = TARGETS
    rank: int = Field(32, ge=1)
    update_ratio: float = Field(2e-3, gt=0)
    variant: Literal["norm_preserving", "plain"] = "plain"
    projection: Literal["sign", "gaussian"] = "sign"
    share_inputs: bool = True
    refresh: bool = True
    beta2: float = Field(0.95, ge=0, lt=1)
    wire: Literal["int8", "float32", "bfloat16"] = "int8"  # type in which U is applied and sent
    learning_rate: float = Field(5e-5, gt=0)  # of the baselines; LoGRA's size is update_ratio

    # KL control: no kl_start is no control; kl_end anneals over kl_horizon (default: steps).
    kl_start: float | None = Field(None, gt=0)
    kl_end: float | None = Field(None, gt=0)
    kl_horizon: int | None = Field(None, ge=1)
    alpha_max: float = Field(3.0, gt=0)
    kl_method: Literal["auto", "jvp", "fd", "off"] = "auto"
    probe_responses: int = Field(8, ge=1)
    probe_tokens: int = Field(4096, ge=1)  # of each probe response, at most
    measure_kl: bool = True
    subtract_mismatch: bool = False

    # Who generates: the trainer's own model, or an engine that thin updates keep in step.
    engine: Literal["shared", "hf", "vllm"] = "shared"
    serving_dtype: Literal["float32", "bfloat16"] = "float32"
    receiver: Literal["exact", "plain"] = "exact"
    max_prompt_tokens: int = Field(512, ge=1)  # vLLM reserves room for the longest request
    # The journal keeps a base and at most so many updates after it, then begins anew; 0: none.
    journal_every: int = Field(0, ge=0)
    kv_cache_mib: int = Field(256, ge=1)  # of each vLLM engine, for keys and values

    # Groups of actors on Ray (logra_lab.cluster); 0: in this process.
    trainers: int = Field(0, ge=0)
    cpu_offload: bool = False  # the trainers' shards of weights stay on the host
    trainer_timeout: float = Field(1800.0, gt=0)  # seconds for any one call of the trainers
    engines: int = Field(0, ge=0)
    engine_tensor_parallel: int = Field(1, ge=1)  # processes, and GPUs, of each vLLM engine
    transport: Literal["auto", "object_store", "group"] = "auto"  # of updates to the engines
    # Seconds for a piece of a batch, or an update, before an engine is taken for dead.
    engine_timeout: float = Field(600.0, gt=0)
    # Generate the next batch while this one is trained on; a stale batch tells no mismatch.
    overlap: bool = False
    ray_address: str | None = None  # "auto" or host:port of a cluster; None: a local Ray

    # How it is computed.
    microbatch_tokens: int = Field(2048, ge=1)  # padded, of one forward and backward
    generate_batch: int = Field(256, ge=1)
    autocast: Literal["none", "bfloat16"] = "none"
    checkpointing: Literal["none", "reentrant", "non_reentrant"] = "none"
    score_workers: int = Field(1, ge=1)
    score_timeout: float = Field(5.0, gt=0)

    # Evaluation and records.
    eval_problems: int = Field(256, ge=1)
    eval_samples: int = Field(8, ge=1)
    eval_every: int = Field(0, ge=0)  # 0: before and after only
    checkpoint_every: int = Field(25, ge=0)  # 0: only at the end and on Ctrl-C
    warn_after_equal_rewards: int = Field(20, ge=2)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_value_as_number(cls, settings: dict[str, Any]) -> dict[str, Any]:
        for name, value in settings.items():  # pydantic would read true as 1
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and field.annotation is not bool:
                raise ValueError(f"{name} is {value}, which is no value for it")
        return settings

    @model_validator(mode="after")
    def _agree(self) -> "TrainConfig":
        if self.kl_end is not None and self.kl_start is None:
            raise ValueError("kl_end needs kl_start")
        if self.kl_start is not None and self.kl_method == "off":
            raise ValueError("kl_start is a budget and needs a probe: kl_method must not be 'off'")
        if self.kl_start is not None and self.method != "logra":
            raise ValueError(f"method {self.method!r} has no KL control: leave kl_start out")
        if self.method != "logra" and (self.engine != "shared" or self.journal_every):
            raise ValueError(
                f"method {self.method!r} makes no thin updates: engine must be 'shared' and "
                "journal_every 0"
            )
        if self.engine == "shared" and (self.serving_dtype, self.receiver) != ("float32", "exact"):
            raise ValueError(
                "engine 'shared' generates with the trainer's own weights: serving_dtype and "
                "receiver go with engine 'hf' or 'vllm'"
            )
        if self.trainers and (self.method != "logra" or not self.engines):
            raise ValueError("trainers on Ray need method 'logra' and engines of at least 1")
        if self.cpu_offload and not self.trainers:
            raise ValueError("cpu_offload needs trainers on Ray: trainers of at least 1")
        if self.engines and self.engine == "shared":
            raise ValueError("engines on Ray have weights of their own: engine 'hf' or 'vllm'")
        if self.engine_tensor_parallel > 1 and not (self.engines and self.engine == "vllm"):
            raise ValueError("engine_tensor_parallel needs engine 'vllm' and engines of at least 1")
        if not self.engines and (self.transport != "auto" or self.overlap):
            raise ValueError("transport and overlap need engines on Ray: engines of at least 1")
        if self.ray_address is not None and not (self.engines or self.trainers):
            raise ValueError("ray_address needs engines or trainers on Ray: at least 1 of them")
        if self.wire == "int8" and self.projection != "sign" and self.method == "logra":
            raise ValueError(
                f"projection {self.projection!r} has no exact sums: set wire to 'float32'"
            )
        return self


def make_config(**settings: Any) -> TrainConfig:
    """A checked configuration; `InputError` says which settings are wrong, and how."""
    try:
        return TrainConfig(**settings)
    except ValidationError as error:
        wrong = [_worded(e["loc"], e["type"], e["msg"]) for e in error.errors(include_url=False)]
        raise InputError("training configuration: " + "; ".join(wrong)) from None


def _worded(place: tuple[Any, ...], kind: str, message: str) -> str:
    """A line of pydantic's in the words of a user."""
    name = ".".join(map(str, place))
    if kind == "extra_forbidden":
        near = get_close_matches(name, TrainConfig.model_fields, 1)
        hint = f"did you mean {near[0]!r}?" if near else "see logra_lab/rl/config.py"
        return f"{name!r} is no setting; {hint}"
    text = message.removeprefix("Value error, ")
    return f"{name}: {text}" if name else text
