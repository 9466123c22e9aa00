"""Figures read off GPU code: PTX, ptxas's report, gfx942 assembly."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

# Bytes per thread of a memory access, widest first.
WIDTHS = (16, 8, 4, 2)

PTX_INSTRUCTION = re.compile(r"^\s+(?:@!?%p\d+\s+)?([a-z][\w.:]*)[^;]*;", re.M)
PTX_ACCESS = re.compile(r"(ld|st)\.(global|local)\b.*?(?:\.v(\d))?\.[a-z](\d+)$")
PTXAS_REGISTERS = re.compile(r"Used (\d+) registers")
PTXAS_STACK = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
GCN_INSTRUCTION = re.compile(r"^\t((?:s|v|ds|global|flat|scratch|buffer)_\w+)", re.M)
GCN_ACCESS = re.compile(
    r"(global|flat|scratch|buffer)_(load|store)_(dwordx4|dwordx3|dwordx2|dword|.*)"
)
GCN_BYTES = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4}


def find_ptxas() -> str | None:
    """Returns CUDA's assembler: from PATH, a CUDA folder or a wheel."""
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    wheels = glob.glob(
        os.path.join(sysconfig.get_path("purelib"), "nvidia", "*", "bin", "ptxas")
    )
    for place in ("ptxas", os.path.join(cuda, "bin", "ptxas"), *wheels):
        if found := shutil.which(place):
            return found
    return None


def count_accesses(
    accesses: Iterable[tuple[str, str, int]],
) -> tuple[dict[str, int], int]:
    """Sorts memory accesses by width.

    Args:
        accesses: Kind (`ld` or `st`), memory (`global` or `local`) and bytes.

    Returns:
        The columns `loads16` to `stores2`, and the accesses of local memory.
    """
    widths: Counter[str] = Counter()
    local = 0
    for kind, memory, size in accesses:
        if memory == "local":
            local += 1
            continue
        # Three dwords are as good as two and one.
        parts = (8, 4) if size == 12 else (max(size, 2),)
        for part in parts:
            widths[f"{'loads' if kind == 'ld' else 'stores'}{part}"] += 1
    names = [f"{kind}{width}" for kind in ("loads", "stores") for width in WIDTHS]
    return {name: widths[name] for name in names}, local


def read_ptx(text: str) -> dict[str, int | None]:
    """Reads a kernel's figures from its PTX.

    Args:
        text: The PTX.

    Returns:
        The columns that need no ptxas.
    """
    opcodes = PTX_INSTRUCTION.findall(text)
    accesses = []
    for opcode in opcodes:
        if found := PTX_ACCESS.match(opcode):
            kind, memory, lanes, bits = found.groups()
            accesses.append((kind, memory, int(lanes or 1) * int(bits) // 8))
    widths, local = count_accesses(accesses)
    return {"instructions": len(opcodes), "local": local, **widths}


def run_ptxas(path: Path, ptxas: str) -> dict[str, int | None]:
    """Lets ptxas allocate a kernel's registers.

    Args:
        path: The PTX.
        ptxas: CUDA's assembler.

    Returns:
        The columns that it decides.
    """
    run = subprocess.run(
        [ptxas, "-v", "-arch=sm_90a", "-o", os.devnull, str(path)],
        capture_output=True,
        text=True,
    )
    report = run.stdout + run.stderr
    registers, stack = PTXAS_REGISTERS.search(report), PTXAS_STACK.search(report)
    if run.returncode != 0 or not registers or not stack:
        raise RuntimeError(f"ptxas refused {path.name}:\n{report}")
    frame, stored, loaded = map(int, stack.groups())
    return {
        "registers": int(registers[1]),
        "spills": stored + loaded,
        "scratch": frame,
    }


def read_gcn(text: str) -> dict[str, int | None]:
    """Reads a kernel's figures from its gfx942 assembly.

    Args:
        text: The assembly, with its metadata.

    Returns:
        Every column.
    """

    def metadata(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        if not found:
            raise RuntimeError(f"gfx942 assembly has no .{name}")
        return int(found[1])

    opcodes = GCN_INSTRUCTION.findall(text)
    accesses = []
    for opcode in opcodes:
        if found := GCN_ACCESS.match(opcode):
            memory, kind, width = found.groups()
            accesses.append(
                (
                    "ld" if kind == "load" else "st",
                    "global" if memory in ("global", "flat") else "local",
                    GCN_BYTES.get(width, 2),
                )
            )
    widths, local = count_accesses(accesses)
    return {
        "registers": metadata("vgpr_count") + metadata("agpr_count"),
        "scalar_registers": metadata("sgpr_count"),
        "instructions": len(opcodes),
        "spills": metadata("vgpr_spill_count") + metadata("sgpr_spill_count"),
        "scratch": metadata("private_segment_fixed_size"),
        "local": local,
        **widths,
    }
