"""docs/semantics.md: its example by hand is what the reference computes."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from kpool_graph import reference, reference_ragged
from kpool_graph.cli import main

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = (DOCS / "semantics.md").read_text(encoding="utf-8")
TABLE = re.compile(r"^\|(.+)\|\n\|[-|]+\|\n((?:\|.+\|\n)+)", re.MULTILINE)
EMPTY = -99.0
KPOOL, RING_LEN = 2, 3
APE = np.array([[math.log(3)], [0]], np.float32)


def tables() -> dict[str, list[dict[str, str]]]:
    """Reads the page's tables, by their first column's heading."""
    found = {}
    for heading, body in TABLE.findall(PAGE):
        columns = [cell.strip() for cell in heading.split("|")]
        rows = [line.strip("|\n").split("|") for line in body.splitlines()]
        found[columns[0]] = [
            dict(zip(columns, map(str.strip, row), strict=True)) for row in rows
        ]
    return found


def number(cell: str) -> float:
    if cell == ".":
        return EMPTY
    return math.log(float(cell[3:])) if cell.startswith("ln ") else float(cell)


def numbers(cell: str) -> list[int]:
    return [int(part) for part in cell.split(",")]


@pytest.fixture(scope="module")
def tokens() -> dict[str, np.ndarray]:
    rows = tables()["position"]
    assert [int(row["position"]) for row in rows] == list(range(5))
    return {
        name: np.array([[number(row[name])] for row in rows], np.float32)
        for name in ("k", "gate")
    }


def test_pooled_keys_by_hand_are_the_formulas(tokens):
    for pool, worked_out in ((0, 7), (1, 6)):
        members = slice(pool * KPOOL, (pool + 1) * KPOOL)
        pooled = reference.pool(tokens["k"][members], tokens["gate"][members], APE)
        assert pooled == pytest.approx(worked_out, rel=1e-6)
        assert f"{worked_out}" in PAGE


def test_the_calls_leave_the_ring_and_the_outputs_of_the_table(tokens):
    tail = np.full((1, 2, RING_LEN, 1), EMPTY, np.float32)
    for row in tables()["positions"]:
        positions = np.array([numbers(row["positions"])], np.int32)
        # What padding brings is of no account.
        step = {name: each[positions] for name, each in tokens.items()}
        pooled, closed_pool = reference.tail_update(
            tail, step["k"], step["gate"], APE, positions, np.array([0]), kpool=KPOOL
        )
        entries = [number(row[f"entry {entry}"]) for entry in range(RING_LEN)]
        assert tail[0, 0, :, 0].tolist() == entries
        assert closed_pool.tolist() == [numbers(row["closed_pool"])]
        assert pooled[0, 0, 0] == pytest.approx(number(row["pooled"]), rel=1e-6)


def test_ragged_rows_stand_where_the_table_says():
    rows = tables()["request"]
    begins, ends = zip(
        *(numbers(row["input_row_offsets"]) for row in rows), strict=True
    )
    assert begins[1:] == ends[:-1]
    total = ends[-1]
    zeros = np.zeros((total, 1), np.float32)
    _, closed_pool = reference_ragged.ragged_update(
        np.zeros((2, 2, RING_LEN, 1), np.float32),
        zeros,
        zeros,
        APE,
        np.array([0, *ends], np.uint32),
        np.array([int(row["cache_lengths"]) for row in rows], np.uint32),
        np.arange(len(rows), dtype=np.uint32),
        kpool=KPOOL,
    )
    for row in rows:
        first, closed = int(row["first row"]), numbers(row["closed_pool"])
        assert closed_pool[first : first + len(closed)].tolist() == closed


def test_the_trace_command_draws_the_pages_figure(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [command] = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    program, *arguments = shlex.split(command)
    assert program == "kpool" and main(arguments) == 0
    drawn = (tmp_path / "trace.svg").read_text(encoding="utf-8")
    assert drawn == (DOCS / "figures" / "trace.svg").read_text(encoding="utf-8")
