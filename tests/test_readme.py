"""What the README shows is what happens."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kpool_graph import reference

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def python_block(marker: str) -> str:
    (block,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if marker in block
    ]
    return block


def test_quickstart_runs_and_checks_itself(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(python_block("InferenceSession"), "README.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "0 [[-1]]",
        "1 [[-1]]",
        "2 [[-1]]",
        "3 [[0]]",
    ]


def test_equivalent_numpy_is_equivalent() -> None:
    scope: dict[str, object] = {}
    exec(compile(python_block("def tail_update_row"), "README.md", "exec"), scope)
    rng = np.random.default_rng(0)
    tail = rng.standard_normal((3, 2, 6, 8), np.float32)
    k, gate = rng.standard_normal((2, 1, 7, 8), np.float32)
    ape = rng.standard_normal((3, 8), np.float32)
    positions = np.arange(5, 12, dtype=np.int32)[None]
    wanted_tail = tail.copy()
    pooled, closed_pool = reference.tail_update(
        wanted_tail, k, gate, ape, positions, np.array([1], np.uint32), kpool=3
    )

    closed = list(scope["tail_update_row"](tail[1], k[0], gate[0], ape, positions[0]))

    np.testing.assert_array_equal(tail, wanted_tail)
    assert [pool for pool, _ in closed] == closed_pool[0].tolist()
    np.testing.assert_allclose([key for _, key in closed], pooled[0], rtol=1e-5)
