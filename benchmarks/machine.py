"""What the figures were measured with, and on how many CPUs."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import platformdirs

_PACKAGES = ("max", "numpy", "torch", "jax", "transformers")


def versions() -> str:
    """Lists what is timed.

    Returns:
        Names and versions, `-` for what is not installed.
    """
    found = [f"python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{package} -")
    return ", ".join(found)


def cpu() -> str:
    """Names the processor.

    Returns:
        Its model, family and CPUs, as far as the system tells.
    """
    fields = {}
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip(), value.strip())
    name = fields.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields.get('model', '?')})"
    return f"{name}, {os.cpu_count()} CPUs"


def environment(threads: int) -> dict[str, str]:
    """Makes the variables of a process that uses so many threads.

    The libraries read them when they are imported, so they are set from outside.

    Args:
        threads: Threads of each provider.

    Returns:
        The whole environment.
    """
    count, several = str(threads), str(threads > 1).lower()
    return {
        **os.environ,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OPENBLAS_NUM_THREADS": count,
        "NPROC": count,
        "XLA_FLAGS": f"--xla_cpu_multi_thread_eigen={several}",
        "JAX_PLATFORMS": "cpu",
        # No helper processes beside the one that is timed.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # It would be in the folder for temporary files.
        "TORCHINDUCTOR_CACHE_DIR": platformdirs.user_cache_dir("torchinductor"),
    }


def bind(threads: int) -> None:
    """Binds this process to so many CPUs, where the system can.

    MAX makes one thread for each CPU that the process may use, so this comes before
    its first session.

    Args:
        threads: CPUs.
    """
    if hasattr(os, "sched_setaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, allowed[-threads:])
