"""Starting vLLM without side effects on the process that asks for it.

vLLM is configured by environment variables, which its own processes inherit; in process, it also
replaces `torch.set_num_threads`, seeds the global generators and opens a process group. What can
be put back is put back. What cannot, in process and on the CPU: memory of this process is bound to
the machine's first NUMA node, some stream functions of `torch.cuda` are replaced by ones that do
nothing, and torch's distributed package is in use until the engine is closed.
"""

import logging
import multiprocessing
import os
import random
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.utils import logging as hf_logging

from logra_lab.errors import InputError
from logra_lab.sync.vllm_plugin import OWNER

GUARD = (
    "; vLLM's processes import the main script first: put its work under "
    "`if __name__ == '__main__':`"
)
_CLOSE_SECONDS = 30.0  # vLLM's own 5 s may cut its processes off before they have cleaned up
# Engines of this process, held here since vLLM shuts down what is garbage-collected.
_living: list[Any] = []
_closed: list[Any] = []


def refuse_unguarded() -> None:
    """Raise `InputError` in a process that is being spawned by this very line of a script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError(
            f"VLLMEngine starts processes, and this is one of them{GUARD}, or use in_process=True"
        )


@contextmanager
def quiet_start(*, in_process: bool, threads: int, eager: bool, verbose: bool) -> Iterator[None]:
    """The time in which vLLM is imported and its processes are started.

    Sets what vLLM reads from the environment and restores the environment, the generators of
    `random`, numpy and torch, and `torch.set_num_threads`. The processes never see Ctrl-C, which is
    for the run, and end when this process does. Raises `InputError` in process when
    `torch.distributed` is in use, since vLLM would take over its process group.
    """
    if in_process and not _living and torch.distributed.is_initialized():
        raise InputError(
            "in_process=True needs torch.distributed for itself, which this process has "
            "initialised: use in_process=False"
        )
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # a fork would not load the plugin again
        OWNER: str(os.getpid()),
        "VLLM_NO_USAGE_STATS": "1",
        # Binding by vLLM would give each rank a NUMA node of its own, and leave none to others.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        # Workers that have let go of everything still linger for all of their grace period.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
    }
    if not verbose:
        settings |= {"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
        settings |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    if eager and not in_process:
        # The rank of a logprob, which nobody reads, is compiled: seconds, and needs a compiler.
        settings["TORCH_COMPILE_DISABLE"] = "1"
    environment, set_threads = dict(os.environ), torch.set_num_threads
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    os.environ.update(settings)
    try:
        with _quiet_logger(verbose), nullcontext() if in_process else _ctrl_c_later():
            yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_num_threads = set_threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def hold(llm: Any) -> None:
    """Note an engine that lives in this process."""
    _living.append(llm)


def default_threads(ranks: int) -> int:
    """A rank's share of the processors that this process may use, one left out; at least one.

    vLLM's scheduler and the calling process poll: with 2 threads on 2 processors a small policy
    samples six times slower than with 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, ((cores or 1) - 1) // ranks)


def shut_down(llm: Any, *, in_process: bool, group: str) -> None:
    """End vLLM's processes; in process, at once or with the last engine of this process.

    `group` is the beginning of the names of its shared memory; "" for none. vLLM's shutdown in
    process takes down the process group that all its engines there share.
    """
    if not in_process:
        llm.llm_engine.engine_core.shutdown(timeout=_CLOSE_SECONDS)
        # vLLM 0.32 leaves what its CPU ranks shared: 4 MiB a rank and engine.
        for path in Path("/dev/shm").glob(f"{group}-*-cpushm_*") if group else ():
            path.unlink(missing_ok=True)
        return
    _living.remove(llm)
    _closed.append(llm)
    while _closed and not _living:
        _closed.pop().llm_engine.engine_core.shutdown()


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """SIGINT waits until the end; what is started meanwhile inherits the mask and never gets it.

    A terminal sends Ctrl-C to all processes of the run, and vLLM's would end in mid-step.
    """
    resource_tracker.ensure_running()  # its start would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _quiet_logger(verbose: bool) -> Iterator[None]:
    """Errors only, also where vLLM was imported before the environment could say so."""
    if verbose:
        yield
        return
    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # of the model that is saved for the engine
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if bars:
            hf_logging.enable_progress_bar()
