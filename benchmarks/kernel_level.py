"""Builds and runs the Mojo program that times the kernels without MAX around them."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mojo.run import subprocess_run_mojo

from . import ROOT, machine
from .cases import CLOSING, OPEN, TAIL_UPDATE
from .rows import COPY, KERNEL, OK, OURS, Row

PROGRAM = ROOT / "benchmarks" / "cpu" / "bodies.mojo"
COLUMNS = (
    "case",
    "provider",
    "dtype",
    "n",
    "kpool",
    "next_n",
    "median_ns",
    "p20_ns",
    "p80_ns",
    "bytes_moved",
)
# Of the time over the copy's, round by round.
RATIOS = ("over_copy_median", "over_copy_p20", "over_copy_p80")
SINGLE = "kernel"
ALL_THREADS = "kernel_all_threads"


def run(kernels: Path, quick: bool, command: str) -> list[Row]:
    """Times the kernels.

    Args:
        kernels: Folder of the Mojo package.
        quick: Whether to give the program `--quick`, for which it times fewer cases.
        command: What reruns it.

    Returns:
        Rows of level `kernel`; none if there is no such program.

    Raises:
        RuntimeError: If it does not build, or does not run to its end.
    """
    if not PROGRAM.is_file():
        print(f"{PROGRAM.relative_to(ROOT)} is missing: skipped", file=sys.stderr)
        return []
    print("kernels without MAX", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        # The program imports the package by the name that its folder has.
        (Path(folder) / "kernels").symlink_to(kernels.resolve())
        program = Path(folder) / "program"
        build = subprocess_run_mojo(
            ["build", "-I", folder, str(PROGRAM), "-o", str(program)],
            capture_output=True,
            text=True,
        )
        if build.returncode != 0:
            raise RuntimeError(f"{PROGRAM.name} does not build:\n{build.stderr}")
        options = ["--quick"] if quick else []
        done = subprocess.run([program, *options], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{PROGRAM.name} failed:\n{done.stderr}")
    return parse(done.stdout.splitlines(), command)


def parse(lines: Iterable[str], command: str) -> list[Row]:
    """Reads what the program prints.

    Args:
        lines: CSV with the columns `COLUMNS`, and `RATIOS` if it has them. A case has
            a line for `copy`, for `kernel` and maybe for `kernel_all_threads`. It is
            named as in `cases`, with `_<n>_requests` after it for a ragged batch.
        command: What reruns it.

    Returns:
        For each kernel its row and one of the copy. Without `RATIOS`, a ratio is that
        of the medians, and its spread that of the quantiles farthest apart.

    Raises:
        ValueError: If a line has other columns, or its copy is missing.
    """
    read = list(csv.DictReader(lines))
    for line in read:
        if tuple(line) not in (COLUMNS, (*COLUMNS, *RATIOS)):
            raise ValueError(f"columns must be {COLUMNS}, got {tuple(line)}")
    copies = {_case(line): line for line in read if line["provider"] == COPY}
    found = []
    for line in read:
        if line["provider"] != COPY:
            if _case(line) not in copies:
                raise ValueError(f"there is no copy beside {_case(line)}")
            found += _pair(line, copies[_case(line)], command)
    return found


def _case(line: dict[str, str]) -> tuple[str, ...]:
    return tuple(line[name] for name in ("case", "dtype", "n", "kpool", "next_n"))


def _pair(ours: dict[str, str], copy: dict[str, str], command: str) -> list[Row]:
    threads = {SINGLE: 1, ALL_THREADS: os.cpu_count() or 1}[ours["provider"]]
    ragged = re.fullmatch(r"(.*)_(\d+)_requests", ours["case"])
    if ragged:
        name, requests, next_n = ragged[1], int(ragged[2]), 0
    else:
        name = OPEN if ours["case"] == TAIL_UPDATE else ours["case"]
        next_n = int(ours["next_n"])
        requests = int(ours["n"]) if next_n else 1
    row = Row(
        level=KERNEL,
        case=name,
        provider=OURS,
        status=OK,
        op=TAIL_UPDATE if name in (CLOSING, OPEN) else name,
        dtype=ours["dtype"],
        n=int(ours["n"]),
        requests=requests,
        kpool=int(ours["kpool"]),
        next_n=next_n,
        threads=threads,
        bytes_moved=int(ours["bytes_moved"]),
        ratio=1.0,
        ratio_p20=1.0,
        ratio_p80=1.0,
        versions=machine.versions(),
        cpu=machine.cpu(),
        command=command,
    )
    middle, low, high = _over_copy(ours, copy)
    ratios = {"ratio": 1 / middle, "ratio_p20": 1 / high, "ratio_p80": 1 / low}
    return [
        replace(row, **_times(ours)),
        replace(row, provider=COPY, **_times(copy), **ratios),
    ]


def _times(line: dict[str, str]) -> dict[str, float]:
    return {
        f"{each}_us": float(line[f"{each}_ns"]) / 1000
        for each in ("median", "p20", "p80")
    }


def _over_copy(ours: dict[str, str], copy: dict[str, str]) -> tuple[float, ...]:
    if RATIOS[0] in ours:
        return tuple(float(ours[name]) for name in RATIOS)
    mine, other = _times(ours), _times(copy)
    return (
        mine["median_us"] / other["median_us"],
        mine["p20_us"] / other["p80_us"],
        mine["p80_us"] / other["p20_us"],
    )
