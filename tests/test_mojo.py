"""Runs the Mojo tests, one process a file."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from mojo.run import subprocess_run_mojo

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "tests" / "kernels").glob("test_*.mojo"))


SCHEDULES = [path for path in FILES if path.stem.endswith("_schedule")]


def check(run: subprocess.CompletedProcess[str]) -> None:
    summary = re.search(r"(\d+) passed , (\d+) failed , (\d+) skipped", run.stdout)
    assert run.returncode == 0, run.stdout + run.stderr
    assert summary, run.stdout
    passed, failed, skipped = map(int, summary.groups())
    assert passed > 0
    assert failed == skipped == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_mojo_file_passes(path: Path) -> None:
    check(
        subprocess_run_mojo(
            ["run", "-I", str(ROOT), str(path)], capture_output=True, text=True
        )
    )


def build(*options: str, source: Path, program: Path) -> None:
    run = subprocess_run_mojo(
        ["build", "-I", str(ROOT), *options, str(source), "-o", str(program)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("path", SCHEDULES, ids=lambda path: path.stem)
def test_bodies_pass_under_the_address_sanitizer(path: Path, tmp_path: Path) -> None:
    program = tmp_path / path.stem
    options = ("--sanitize", "address", "-D", "ASSERT=all")
    build(*options, source=path, program=program)
    run = subprocess.run([program], capture_output=True, text=True)
    assert "AddressSanitizer" not in run.stderr, run.stderr
    check(run)


OUT_OF_BOUNDS = """
from kernels.vectors import load


def main():
    var values = List[Float32](length=8, fill=1)
    print(load[4](values.unsafe_ptr(), 6))
"""


@pytest.mark.slow
def test_the_address_sanitizer_sees_a_load_past_the_end(tmp_path: Path) -> None:
    source, program = tmp_path / "past_the_end.mojo", tmp_path / "past_the_end"
    source.write_text(OUT_OF_BOUNDS)
    build("--sanitize", "address", source=source, program=program)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode != 0
    assert "heap-buffer-overflow" in run.stderr
