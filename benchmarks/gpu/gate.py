"""Holds the GPU kernels to their design, and to the figures they have reached.

Usage, from the repository's root:

    python -m benchmarks.gpu.gate          compare the kernels with static.csv
    python -m benchmarks.gpu.gate --write  measure them and rewrite static.csv
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable

from .assembly import find_ptxas
from .static import OURS, TABLE, Row, measure, read_table, write_table

NO_PTXAS = (
    "ptxas is not installed: registers, spills and stack of sm_90a are not checked"
)
POOL_REGISTERS = 64
MAX_BYTES = 16
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "int32": 4}
# What must not grow. Narrow accesses have rules of their own.
KEPT = ("registers", "scalar_registers", "instructions")
# The compilers fix these; another ptxas may place registers otherwise.
FIXED = ("instructions", "loads16", "loads2", "stores16", "stores2", "local")


def wide_accesses(row: Row) -> tuple[int, int, int]:
    """States the design: how wide a kernel reads and writes keys and scores.

    Args:
        row: The kernel.

    Returns:
        Bytes per access, and how many loads and stores of that width there must
        be at least.
    """
    size = DTYPE_BYTES[row.dtype]
    members = 2 * row.kpool
    pool_vector = min(MAX_BYTES, POOL_REGISTERS // row.kpool * size)
    if row.kernel in ("compress", "ring_close", "ragged_update"):
        return pool_vector, members, 1
    if row.kernel == "seed_tail":
        return MAX_BYTES, 2, 2
    if row.kernel.startswith("copy_slots"):
        return MAX_BYTES, 1, 1
    if row.kernel == "tail_update":
        # Launch and latency bound it: more threads, each with a short chain.
        return 2 * size, members, 2 * int(row.next_n) + 1
    if row.kernel == "expand_topk":
        return size, 1, 1
    raise ValueError(f"no design is stated for {row.kernel}")


def broken_rules(row: Row) -> list[str]:
    """Finds where a kernel is not what its design says.

    Args:
        row: The kernel, one of ours.

    Returns:
        A sentence a fault.
    """
    width, loads, stores = wide_accesses(row)
    faults = []
    for kind, wanted in (("loads", loads), ("stores", stores)):
        got = getattr(row, f"{kind}{width}")
        if got < wanted:
            faults.append(f"{kind}{width} must be at least {wanted}, got {got}")
        if narrow := getattr(row, f"{kind}2"):
            faults.append(f"{kind}2 must be 0, got {narrow}")
    for name in ("local", "spills", "scratch"):
        if got := getattr(row, name):
            faults.append(f"{name} must be 0, got {got}")
    return [f"{row.name}: {fault}" for fault in faults]


def problems(rows: Iterable[Row], table: Iterable[Row]) -> list[str]:
    """Compares measured kernels with their design and with the table.

    Args:
        rows: What was measured, of both providers.
        table: What the table says.

    Returns:
        A sentence a fault; none if all is well.
    """
    measured = {row.key: row for row in rows}
    kept = {row.key: row for row in table}
    faults = [f"{kept[key].name}: not emitted" for key in kept.keys() - measured]
    for key, row in measured.items():
        if row.provider == OURS:
            faults += broken_rules(row)
        if key not in kept:
            faults.append(f"{row.name}: not in {TABLE.name}")
            continue
        for name in KEPT if row.provider == OURS else FIXED:
            got, limit = getattr(row, name), getattr(kept[key], name)
            if got is None or limit is None:
                continue
            if row.provider == OURS and got > limit:
                faults.append(f"{row.name}: {name} must be at most {limit}, got {got}")
            if row.provider != OURS and got != limit:
                faults.append(f"{row.name}: {name} must be {limit}, got {got}")
    return sorted(faults)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: The command line, or None for the process's own.

    Returns:
        The exit status: 0 if all is well.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.gate")
    parser.add_argument("--write", action="store_true", help="rewrite the table")
    options = parser.parse_args(arguments)
    if not find_ptxas():
        print(NO_PTXAS, file=sys.stderr)
        if options.write:
            return 1
    rows = measure()
    if options.write:
        write_table(rows)
        print(f"wrote {len(rows)} rows to {TABLE}")
    faults = problems(rows, read_table())
    print(*faults or [f"{len(rows)} kernels: no fault"], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
