"""What a run ran on: versions, commit, hardware, peak memory. Plain values for a JSON record."""

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import logra_lab
from logra_lab import kernels

_PACKAGES = ("torch", "transformers", "numpy")


def versions() -> dict[str, Any]:
    """Versions of Python, this library and what its numbers depend on; None if not installed.

    `commit` is the git commit of the library's own checkout and `modified` whether its files
    differ from it; both None for an installed copy or without git.
    """
    found = {name: _version(name) for name in _PACKAGES}
    commit, modified = _commit(Path(logra_lab.__file__).parent)
    return {
        "python": platform.python_version(),
        "logra_lab": _version("logra-lab"),
        **found,
        "commit": commit,
        "modified": modified,
    }


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, memory in MiB, GPUs by name."""
    cuda = torch.cuda.is_available()
    return {
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if cuda
        else [],
    }


def compute(device: torch.device | str, config: Mapping[str, Any]) -> dict[str, Any]:
    """The device of a run, whose kernels compute on it (``"torch"`` or ``"triton"``), and under
    ``"triton"`` which operations torch computes none the less, by the run's settings.

    Policies are float32. Raises `InputError` where LOGRA_LAB_KERNELS forces a choice that cannot
    run there.
    """
    chosen = kernels.backend(device)
    rest = kernels.left_to_torch(
        dtype=torch.float32,
        projection=config.get("projection", "sign"),
        wire=config.get("wire", "int8"),
        ranks=config.get("trainers", 0),
    )
    return {
        "device": str(torch.device(device)),
        "kernels": chosen,
        "by_torch": rest if chosen == "triton" else None,
    }


def peak_memory_mib() -> float:
    """Highest resident memory of this process since it began, in MiB (`getrusage` ru_maxrss).

    ru_maxrss is in KiB on Linux and in bytes on macOS (getrusage(2) of each). It never falls, so
    it also holds what the process did before a run; processes of a scoring pool are not in it.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def peak_gpu_memory_mib() -> float | None:
    """Highest memory that tensors took on the GPU in use, in MiB; None without a GPU."""
    return torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _commit(package: Path) -> tuple[str | None, bool | None]:
    # A virtual environment may lie inside somebody else's repository: the package must be tracked.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None
    commit = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", ".")
    return commit, None if changes is None else bool(changes)


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
