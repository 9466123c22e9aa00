"""Whole graphs compile for GPUs that this machine does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kpool_graph._library import registered_ops

SCRIPT = Path(__file__).with_name("gpu_graph.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "api, arch",
    [("cuda", "sm_90"), ("cuda", "sm_100"), ("hip", "gfx942")],
    ids=["sm_90", "sm_100", "gfx942"],
)
def test_graph_of_every_op_compiles_for(api: str, arch: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(SCRIPT), api, arch],
        # The linker for gfx942 leaves its libraries behind.
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    lines = run.stdout.splitlines()
    print(f"{arch}:", *lines, sep="\n  ")
    assert run.returncode == 0, run.stderr
    assert lines[-1] == "compiled"
    compiled = {line.split()[0] for line in lines[:-1]}
    assert compiled == set(registered_ops())
