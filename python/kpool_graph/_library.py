"""Where the kernels are, and how a graph gets them."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tempfile
from pathlib import Path

import platformdirs
from max.graph import Graph
from mojo.run import subprocess_run_mojo

from ._shipped import first_with, shipped

# The compiler bakes the file's stem into it as the module's name.
LIBRARY_NAME = "kpool_ops.mojoc"
SOURCE_VARIABLE = "KPOOL_GRAPH_KERNELS"
# MAX has no op of this name, so a graph that knows it has our kernels.
MARKER_OP = "mo.mla.kpool.tail_update"
_REGISTRATION = re.compile(r'^@extensibility\.register\("([^"]+)"\)', re.MULTILINE)


class KernelBuildError(RuntimeError):
    """The kernels could not be found or compiled."""


def source_dir() -> Path:
    """Finds the Mojo sources.

    Returns:
        The folder that the environment variable KPOOL_GRAPH_KERNELS names; else
        the one inside the installed package; else the source tree's.

    Raises:
        KernelBuildError: If none of them holds a Mojo package.
    """
    override = os.environ.get(SOURCE_VARIABLE)
    folders = [Path(override)] if override else shipped("kernels")
    try:
        return first_with("__init__.mojo", folders)
    except FileNotFoundError as error:
        raise KernelBuildError(
            f"the Mojo kernels of kpool_graph are missing: {error}."
            " Reinstall the package"
            + (f", or unset {SOURCE_VARIABLE}." if override else ".")
        ) from None


def registered_ops() -> list[str]:
    """Lists the ops that the sources promise.

    Returns:
        Their names, in the order of files and lines.

    Raises:
        KernelBuildError: If the sources are missing.
    """
    return [
        name
        for path in sorted(source_dir().glob("*.mojo"))
        for name in _REGISTRATION.findall(path.read_text(encoding="utf-8"))
    ]


@functools.cache
def mojo_version() -> str:
    """Asks the Mojo compiler for its version.

    Returns:
        What `mojo --version` prints, such as `Mojo 1.2.0 (2016d0cd)`.

    Raises:
        KernelBuildError: If there is no Mojo compiler.
    """
    try:
        run = subprocess_run_mojo(["--version"], capture_output=True, check=True)
    except Exception as error:
        raise KernelBuildError(
            f"no Mojo compiler: {error}. Install it with `pip install max`."
        ) from error
    return str(run.stdout.decode().strip())


def kernels_path() -> Path:
    """Compiles the kernels, once for each state of their sources.

    The result lies in the user's cache, in a folder named by a hash of the
    sources and the compiler's version: an edited kernel or another compiler
    never meets a stale file, and checkouts that agree share MAX's own compile
    cache, which knows kernels by their path.

    Returns:
        A precompiled Mojo package, for `Graph(custom_extensions=[...])` or
        `KernelLibrary`. The graph builders of this package add it by themselves.

    Raises:
        KernelBuildError: If the sources or the compiler are missing, or the
            sources do not compile.
    """
    source = source_dir()
    digest = hashlib.sha256(mojo_version().encode())
    for path in sorted(source.glob("*.mojo")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    cache = Path(platformdirs.user_cache_dir("kpool_graph"))
    library = cache / digest.hexdigest()[:16] / LIBRARY_NAME
    if not library.is_file():
        _compile(source, library)
    return library


def _compile(source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    # Built aside and renamed, so that no other process reads half a file.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        staged = Path(folder) / library.name
        run = subprocess_run_mojo(
            ["precompile", str(source), "-o", str(staged)], capture_output=True
        )
        if run.returncode != 0:
            raise KernelBuildError(
                f"the kernels in {source} do not compile with"
                f" {mojo_version()}:\n{run.stderr.decode()}"
            )
        os.replace(staged, library)


def load_kernels() -> None:
    """Gives the graph being built our kernels, unless it has them already.

    Raises:
        LookupError: If no graph is being built.
        KernelBuildError: See `kernels_path`.
    """
    graph = Graph.current
    library, loaded = kernels_path(), graph.kernel_libraries_paths
    # MAX refuses an op registered twice, so kernels that the caller loaded from
    # elsewhere stay. Asking for the op takes a second: only if there are any.
    if library in loaded or (loaded and MARKER_OP in graph._kernel_library):
        return
    graph._import_kernels([library])
