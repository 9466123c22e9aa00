"""Runs the Mojo tests, one process a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mojo.run import subprocess_run_mojo

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "tests" / "kernels").glob("test_*.mojo"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_mojo_file_passes(path: Path) -> None:
    run = subprocess_run_mojo(
        ["run", "-I", str(ROOT), str(path)], capture_output=True, text=True
    )
    summary = re.search(r"(\d+) passed , (\d+) failed , (\d+) skipped", run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert summary, run.stdout
    passed, failed, skipped = map(int, summary.groups())
    assert passed > 0
    assert failed == skipped == 0
