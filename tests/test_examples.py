"""The examples run, and show what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.slow
def test_the_indexer_example_prints_the_spans_that_a_query_selects() -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "indexer.py")], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    for path in (EXAMPLES / "texts").glob("*.txt"):
        assert path.stem in run.stdout, run.stdout
