"""What the GPU compilers make of every kernel, and the table that keeps it.

No GPU is needed: the Mojo compiler writes PTX for sm_90a and assembly for gfx942.
Registers, spills and stack of sm_90a come from `ptxas`, which CUDA brings; without
it they are None.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mojo.run import subprocess_run_mojo

from .. import ROOT
from .assembly import find_ptxas, read_gcn, read_ptx, run_ptxas

HERE = Path(__file__).resolve().parent
TABLE = HERE / "static.csv"
ARCHES = ("sm_90a", "gfx942")
OURS, PEER = "kpool_graph", "in_tree"
PROGRAMS = {OURS: HERE / "emit_ours.mojo", PEER: HERE / "emit_in_tree.mojo"}


@dataclass(frozen=True)
class Row:
    """One kernel, compiled for one GPU.

    Attributes:
        arch: The GPU.
        provider: `kpool_graph`, or `in_tree` for MAX's own kernel.
        kernel: The op.
        kpool: Tokens per pool.
        next_n: Tokens a step brings; the ring holds `kpool - 1 + next_n` entries.
            `any` for a kernel that depends on neither.
        dtype: Element type.
        registers: Registers per thread (vector registers on gfx942).
        scalar_registers: Scalar registers per wave, on gfx942.
        instructions: PTX instructions, or machine instructions on gfx942.
        loads16: Loads from global memory of 16 bytes per thread; `loads8` to
            `loads2` and the stores likewise.
        local: Loads and stores of thread-local memory.
        spills: Bytes that ptxas spills, or registers that gfx942 spills, scalar
            ones included.
        scratch: Bytes of stack or scratch per thread.
    """

    arch: str
    provider: str
    kernel: str
    kpool: int
    next_n: str
    dtype: str
    registers: int | None
    scalar_registers: int | None
    instructions: int
    loads16: int
    loads8: int
    loads4: int
    loads2: int
    stores16: int
    stores8: int
    stores4: int
    stores2: int
    local: int
    spills: int | None
    scratch: int | None

    @property
    def key(self) -> tuple[str, str, str, int, str, str]:
        """What the row is about, without its figures."""
        return (
            self.arch,
            self.provider,
            self.kernel,
            self.kpool,
            self.next_n,
            self.dtype,
        )

    @property
    def name(self) -> str:
        """The key in words, for messages."""
        return (
            f"{self.arch} {self.provider} {self.kernel} kpool={self.kpool} "
            f"next_n={self.next_n} {self.dtype}"
        )


def read(path: Path, arch: str, provider: str, ptxas: str | None) -> Row:
    """Reads one emitted kernel.

    Args:
        path: `OP.KPOOL.NEXT_N.DTYPE.asm`.
        arch: The GPU.
        provider: Whose kernel it is.
        ptxas: CUDA's assembler, or None.

    Returns:
        Its row.
    """
    kernel, kpool, next_n, dtype, _ = path.name.split(".")
    figures: dict[str, Any] = dict.fromkeys(
        ("registers", "scalar_registers", "spills", "scratch")
    )
    if arch == "gfx942":
        figures |= read_gcn(path.read_text())
    else:
        figures |= read_ptx(path.read_text())
        if ptxas:
            figures |= run_ptxas(path, ptxas)
    return Row(arch, provider, kernel, int(kpool), next_n, dtype, **figures)


def emit(arch: str, provider: str, root: Path, op: str, directory: Path) -> None:
    """Writes the GPU code of a provider's kernels.

    Args:
        arch: The GPU.
        provider: Whose kernels.
        root: Folder that holds the package `kernels`.
        op: The only op wanted, or an empty text for all.
        directory: Where the files go.
    """
    command = ["run", "-I", str(root), "-D", f"arch={arch}", "-D", f"op={op}"]
    run = subprocess_run_mojo(
        [*command, str(PROGRAMS[provider]), str(directory)],
        capture_output=True,
        text=True,
    )
    if run.returncode != 0:
        raise RuntimeError(f"{PROGRAMS[provider].name} failed:\n{run.stderr}")


def measure(
    providers: Iterable[str] = (OURS, PEER),
    arches: Iterable[str] = ARCHES,
    root: Path = ROOT,
    op: str = "",
) -> list[Row]:
    """Compiles kernels and reads what became of them, two compilers at a time.

    Args:
        providers: Whose kernels.
        arches: For which GPUs.
        root: Folder that holds the package `kernels`.
        op: The only op wanted, or an empty text for all.

    Returns:
        The rows, in the table's order.
    """
    ptxas = find_ptxas()

    def job(task: tuple[str, str]) -> list[Row]:
        with tempfile.TemporaryDirectory() as directory:
            emit(*task, root, op, Path(directory))
            paths = sorted(Path(directory).iterdir())
            return [read(path, *task, ptxas) for path in paths]

    tasks = [(arch, provider) for provider in providers for arch in arches]
    with ThreadPoolExecutor(max_workers=2) as pool:
        rows = [row for part in pool.map(job, tasks) for row in part]
    return sorted(rows, key=lambda row: (row.kernel, row.key))


def write_table(rows: Iterable[Row], path: Path = TABLE) -> None:
    """Writes rows as CSV; what was not measured is blank.

    Args:
        rows: The rows.
        path: The file.
    """
    with path.open("w", newline="") as file:
        names = [field.name for field in fields(Row)]
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def read_table(path: Path = TABLE) -> list[Row]:
    """Reads what `write_table` wrote.

    Args:
        path: The file.

    Returns:
        The rows.
    """
    texts = ("arch", "provider", "kernel", "next_n", "dtype")
    rows = []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            values: dict[str, Any] = {
                name: value if name in texts else int(value) if value else None
                for name, value in line.items()
            }
            rows.append(Row(**values))
    return rows
