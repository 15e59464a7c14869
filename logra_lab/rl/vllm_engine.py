"""Rollout with vLLM: the interface of `HFEngine`, kept at the trainer's version by thin updates.

Token ids go in, token ids come out; the log-probability of every sampled token is that of
softmax(logits / T), which PPO needs, so that every setting which changes the distribution is
refused. The engine starts with its version unknown and refuses to generate until a full sync.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from logra_lab.errors import InputError
from logra_lab.rl import vllm_process
from logra_lab.rl.policies import Policy, folder_policy
from logra_lab.rl.rollout import Rollout
from logra_lab.rl.vllm_sampling import (
    RolloutError,
    read_output,
    refuse_other_distributions,
    sampling_params,
)
from logra_lab.sync.errors import SyncError
from logra_lab.sync.mapping import TARGETS
from logra_lab.sync.vllm_client import VLLMClient
from logra_lab.sync.vllm_plugin import BACKEND, require_entry_point, require_support
from logra_lab.sync.wording import find_error


class VLLMEngine(VLLMClient):
    """Samples responses from a policy with vLLM, in its own processes or in this one.

    Args:
        model: a `Policy`, or the folder of a saved one (config, weights, tokenizer).
        temperature: T in [0.01, 2], vLLM's own bounds.
        max_new_tokens, max_prompt_tokens: limits of a response and of a prompt.
        dtype: type in which weights are served, "float32", "bfloat16" or "float16".
        tensor_parallel: ranks; a process each.
        in_process: run vLLM in this process, for notebooks; see `vllm_process` for what it leaves.
        receiver: "exact" or "plain", see `logra_lab.sync.receiver`.
        targets: kinds of layers that updates will hold.
        kv_cache_bytes: memory for keys and values. threads: of each rank on the CPU; by default
            all processors but one are shared out. In process, torch's own number counts.
        sampling: vLLM sampling settings, checked to be without effect on the distribution.
        enforce_eager, verbose: vLLM's own; verbose lets it log.

    Raises `InputError` for a setting, and `UnsupportedRolloutBackend` where vLLM is missing, is
    another version, or computes from weights that an update cannot reach. Cost: 5 to 20 s; the
    weights once in the engine's type, and with receiver "exact" 4 bytes a target weight unless
    float32 is served. Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        model: str | Path | Policy,
        *,
        temperature: float = 1.0,
        max_new_tokens: int,
        max_prompt_tokens: int = 512,
        dtype: str = "float32",
        tensor_parallel: int = 1,
        in_process: bool = False,
        receiver: str = "exact",
        targets: Sequence[str] = TARGETS,
        kv_cache_bytes: int = 256 << 20,
        threads: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        enforce_eager: bool = True,
        verbose: bool = False,
    ) -> None:
        vllm_process.refuse_unguarded()
        refuse_other_distributions(sampling or {})
        if not 0.01 <= temperature <= 2:
            raise InputError(f"temperature {temperature}: vLLM takes 0.01 to 2")
        for name, value in (
            ("max_new_tokens", max_new_tokens),
            ("max_prompt_tokens", max_prompt_tokens),
            ("tensor_parallel", tensor_parallel),
        ):
            if value < 1:
                raise InputError(f"{name} {value}: expected at least 1")
        if in_process and tensor_parallel > 1:
            raise InputError("tensor parallelism needs a process a rank: use in_process=False")
        self._model = model
        self.temperature, self.eager, self.in_process = temperature, enforce_eager, in_process
        self.max_new_tokens, self.max_prompt_tokens = max_new_tokens, max_prompt_tokens
        threads = threads or vllm_process.default_threads(tensor_parallel)
        with (
            tempfile.TemporaryDirectory(prefix="logra_lab_vllm_") as scratch,
            vllm_process.quiet_start(
                in_process=in_process, threads=threads, eager=enforce_eager, verbose=verbose
            ),
        ):
            require_support()
            require_entry_point()
            folder = Path(scratch)
            if isinstance(model, Policy):
                self.policy = model
                model.model.save_pretrained(folder)
            else:
                folder = Path(model)
                self.policy = folder_policy(folder)
            self._check_length()
            self.llm = self._start(folder, dtype, tensor_parallel, kv_cache_bytes)
            self._group = ""
            if in_process:
                vllm_process.hold(self.llm)
            try:
                if tensor_parallel > 1:
                    self._group = self.llm.collective_rpc("logra_group")[0]
                super().__init__(self.llm, mode=receiver, targets=targets)
            except BaseException:
                self.close()
                raise

    def _start(self, folder: Path, dtype: str, ranks: int, kv_cache_bytes: int) -> Any:
        from vllm import LLM

        try:
            return LLM(
                model=str(folder),
                skip_tokenizer_init=True,
                dtype=dtype,  # type: ignore[arg-type]  # vLLM checks it
                tensor_parallel_size=ranks,
                distributed_executor_backend="mp" if ranks > 1 else None,
                enforce_eager=self.eager,
                kv_cache_memory_bytes=kv_cache_bytes,
                # Its share of the card is that and the weights; vLLM would refuse to start where
                # less than 92 % is free, and beside a trainer on the same card it never is.
                gpu_memory_utilization=0.01,
                max_model_len=self.max_prompt_tokens + self.max_new_tokens,
                generation_config="vllm",  # the folder's own would change the distribution
                logprobs_mode="processed_logprobs",  # of softmax(logits / T)
                weight_transfer_config={"backend": BACKEND},
                worker_extension_cls="logra_lab.sync.vllm_transfer.ThinWorker",
                use_tqdm_on_load=False,
            )
        except Exception as error:
            guard = "" if self.in_process else vllm_process.GUARD
            raise find_error(str(error)) or SyncError(
                f"vLLM did not start from {folder}: {error}; verbose=True shows its log{guard}"
            ) from error

    def generate(self, prompt_ids: list[list[int]], keys: list[str]) -> Rollout:
        """One response a prompt; keys[i] alone seeds the random numbers of row i.

        Raises `InputError` for prompts as `HFEngine` does, `NeedsFullSync` while the version is
        unknown, and `RolloutError` when vLLM's log-probabilities are not one for each id, or when
        its processes have ended.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        self._check_prompts(prompt_ids, keys)
        params = [
            sampling_params(key, self.temperature, self.max_new_tokens, self.policy.eos_ids)
            for key in keys
        ]
        # Compiled, the rank of each logprob, which nobody reads, would cost seconds at first.
        stance = torch.compiler.set_stance("force_eager" if self.eager else "default")
        with self.lock, stance:
            self.require_version()
            prompts = [{"prompt_token_ids": list(ids)} for ids in prompt_ids]
            try:
                outputs = self.llm.generate(prompts, params, use_tqdm=False)
            except EngineDeadError as error:
                self._forget_locally("vLLM's processes have ended")
                raise RolloutError(
                    "vLLM's processes ended while generating (killed, or out of memory?); start "
                    "again from the last checkpoint; verbose=True shows vLLM's log"
                ) from error
        if len(outputs) != len(prompt_ids):
            raise RolloutError(f"{len(prompt_ids)} prompts, but vLLM returned {len(outputs)}")
        rows = [read_output(output.outputs[0]) for output in outputs]
        ids, logprobs, finish = (list(column) for column in zip(*rows, strict=True))
        texts = [self.policy.decode(row) for row in ids]
        return Rollout([list(p) for p in prompt_ids], ids, logprobs, finish, texts)

    def reload(self) -> None:
        """Read the model folder's weights again: the version is unknown until a full sync.

        Raises `InputError` if the engine was made from a policy in memory.
        """
        if isinstance(self._model, Policy):
            raise InputError(
                "the engine was made from a policy in memory, there is no folder to read again; "
                "use full_sync"
            )
        super().reload()

    def close(self) -> None:
        """End vLLM's processes, or free what it holds in this one; may be called twice.

        In process, memory is freed when the last engine of the process is closed.
        """
        llm, self.llm = self.llm, None
        if llm is not None:
            self._forget_locally("the engine is closed")
            vllm_process.shut_down(llm, in_process=self.in_process, group=self._group)

    def __enter__(self) -> "VLLMEngine":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _check_length(self) -> None:
        positions = getattr(self.policy.model.config, "max_position_embeddings", None)
        length = self.max_prompt_tokens + self.max_new_tokens
        if positions is not None and length > positions:
            raise InputError(
                f"max_prompt_tokens {self.max_prompt_tokens} and max_new_tokens "
                f"{self.max_new_tokens} exceed the model's {positions} positions; lower one"
            )

    def _check_prompts(self, prompt_ids: list[list[int]], keys: list[str]) -> None:
        if not prompt_ids:
            raise InputError("no prompts to generate from: expected at least one")
        if len(keys) != len(prompt_ids):
            raise InputError(f"{len(prompt_ids)} prompts but {len(keys)} keys: expected one each")
        size = self.policy.vocab_size
        for i, prompt in enumerate(prompt_ids):
            if not 0 < len(prompt) <= self.max_prompt_tokens:
                raise InputError(
                    f"prompt {i} has {len(prompt)} tokens, expected 1 to {self.max_prompt_tokens}; "
                    "build the engine with a larger max_prompt_tokens"
                )
            if not 0 <= min(prompt) <= max(prompt) < size:
                raise InputError(
                    f"prompt {i} holds token ids {min(prompt)}..{max(prompt)}, expected 0.."
                    f"{size - 1}; encode prompts with the policy's own tokenizer"
                )
