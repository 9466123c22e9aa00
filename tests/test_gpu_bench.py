"""The GPU benchmark builds without a GPU, and its checks see a wrong result."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from mojo.run import subprocess_run_mojo

from benchmarks.gpu.pack import LIBRARIES, PROGRAM, pack
from benchmarks.gpu.static import HERE, ROOT


@pytest.mark.slow
def test_benchmark_checks_pass_what_is_right_and_nothing_else() -> None:
    run = subprocess_run_mojo(
        ["run", "-I", str(ROOT), str(HERE / "test_oracle.mojo")],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"[1-9]\d* passed , 0 failed , 0 skipped", run.stdout)


@pytest.mark.slow
def test_pack_holds_all_that_the_program_needs(tmp_path: Path) -> None:
    pack(tmp_path, "nvidia:90a")
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")}
    assert files == {f"lib/{library}" for library in LIBRARIES}
    # The libraries beside the script win over the builder's own.
    linked = subprocess.run(
        ["ldd", str(tmp_path / PROGRAM)],
        env={"LD_LIBRARY_PATH": str(tmp_path / "lib")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    ours = re.findall(r"(\S+) => (\S+)", linked)
    assert {name for name, path in ours if path.startswith(str(tmp_path))} == set(
        LIBRARIES
    )
    # Everything else is the system's.
    assert not [path for _, path in ours if "site-packages" in path]
    # Here or on a machine with a GPU, the script finds the program.
    run = subprocess.run([tmp_path / "run"], capture_output=True, text=True)
    assert "error while loading shared libraries" not in run.stderr
