"""Builds the GPU benchmark and packs it for a machine that has a GPU and no MAX.

Usage, from the repository's root:

    python -m benchmarks.gpu.pack [--arch nvidia:90a] [FILE.tar.gz]

On the other machine: unpack, then `kpool-gpu-bench/run > results.csv`. That needs
the GPU's driver, glibc and libstdc++, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mojo
from mojo.run import subprocess_run_mojo

from .static import HERE, ROOT

NAME = "kpool-gpu-bench"
PROGRAM = "device"
# What the program and its libraries ask for, beyond the system's own.
LIBRARIES = (
    "libKGENCompilerRTShared.so",
    "libAsyncRTMojoBindings.so",
    "libMSupportGlobals.so",
    "libAsyncRTRuntimeGlobals.so",
)
RUN = f"""#!/bin/sh
# Prints CSV and the aims; status 1 if a result is wrong.
here=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH="$here/lib:$LD_LIBRARY_PATH" exec "$here/{PROGRAM}" "$@"
"""


def library_dir() -> Path:
    """Returns the folder of MAX's runtime libraries."""
    (package,) = mojo.__path__
    return Path(package).parent / "modular" / "lib"


def build(program: Path, arch: str) -> None:
    """Cross-builds the benchmark; no GPU is needed.

    Args:
        program: Where it goes.
        arch: The GPU, as `mojo build --target-accelerator` names it.

    Raises:
        RuntimeError: If it does not compile.
    """
    command = ["build", "-I", str(ROOT), "--target-accelerator", arch]
    # The linker for AMD leaves its libraries behind.
    with tempfile.TemporaryDirectory() as folder, temporary_folder(folder):
        run = subprocess_run_mojo(
            [*command, str(HERE / "device.mojo"), "-o", str(program)],
            capture_output=True,
            text=True,
        )
    if run.returncode != 0:
        raise RuntimeError(f"the GPU benchmark does not compile:\n{run.stderr}")


@contextlib.contextmanager
def temporary_folder(folder: str) -> Iterator[None]:
    """Lets the programs that are started meanwhile have temporary files there.

    Args:
        folder: The folder.

    Yields:
        Nothing.
    """
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        if before is not None:
            os.environ["TMPDIR"] = before


def pack(folder: Path, arch: str) -> None:
    """Fills a folder with the program, its libraries and a script that runs it.

    Args:
        folder: The folder, empty.
        arch: The GPU.
    """
    (folder / "lib").mkdir()
    build(folder / PROGRAM, arch)
    for library in LIBRARIES:
        source = library_dir() / library
        (folder / "lib" / library).write_bytes(source.read_bytes())
    script = folder / "run"
    script.write_text(RUN)
    script.chmod(0o755)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line, or None for the process's own.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.pack")
    parser.add_argument("--arch", default="nvidia:90a", help="GPU to build for")
    parser.add_argument("file", nargs="?", default=f"build/{NAME}.tar.gz", type=Path)
    options = parser.parse_args(arguments)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        pack(Path(directory), options.arch)
        with tarfile.open(options.file, "w:gz") as archive:
            archive.add(directory, NAME)
    print(
        f"{options.file}: for {options.arch} on {platform.machine()} Linux,"
        f" {options.file.stat().st_size >> 10} KiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
