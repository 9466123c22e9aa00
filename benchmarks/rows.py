"""The row of a result file, and the file: one CSV a run."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

OK = "ok"
WRONG = "wrong"
FAILED = "failed"
NOT_INSTALLED = "not installed"

OURS = "kpool_graph"
OURS_NEAR = "kpool_graph at 1k"
COPY = "copy"
EMPTY = "empty"

# What is called: a compiled graph from Python, one more op inside a graph, or the
# kernel from Mojo.
EXECUTE = "execute"
GRAPH = "graph"
KERNEL = "kernel"


@dataclass(frozen=True)
class Row:
    """One provider in one case.

    A row whose status is not `ok` has no times. Ratios are this provider's time over
    ours, taken round by round of an interleaved run: above 1, ours is faster.

    Attributes:
        level: `execute`, `graph` or `kernel`.
        case: What is done, such as `tail_update_closing`.
        provider: Who does it.
        status: `ok`; `wrong` if it does not agree with the oracle; `failed` if it
            raised; `not installed`.
        op: The op of the package that does it.
        dtype: Of the ring, or of the ids.
        n: Rows of a decode step, tokens of a ragged batch, or tokens of context.
        requests: Requests in the batch.
        kpool: Tokens per pool.
        next_n: Tokens a decode step appends per row; 0 for ragged ops.
        threads: CPUs the process may use.
        bytes_moved: Bytes the op must read and write, row tables apart.
        median_us: Microseconds a call.
        p20_us: A fifth of the rounds were faster.
        p80_us: A fifth of the rounds were slower.
        ratio: Median over the rounds.
        ratio_p20: 20th percentile.
        ratio_p80: 80th percentile.
        versions: Of everything that was timed.
        cpu: Model name.
        command: What reruns it.
    """

    level: str
    case: str
    provider: str
    status: str
    op: str
    dtype: str
    n: int
    requests: int
    kpool: int
    next_n: int
    threads: int
    bytes_moved: int
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    ratio: float | None = None
    ratio_p20: float | None = None
    ratio_p80: float | None = None
    versions: str = ""
    cpu: str = ""
    command: str = ""


_FIELDS = dataclasses.fields(Row)
_READERS = {
    "str": str,
    "int": int,
    "float | None": lambda text: float(text) if text else None,
}


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Writes rows, a header first.

    Args:
        path: The file; its folder is made.
        rows: What to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in _FIELDS])
        for row in rows:
            values = (getattr(row, field.name) for field in _FIELDS)
            writer.writerow(map(_as_text, values))


def _as_text(value: str | int | float | None) -> str:
    if value is None:
        return ""
    # Four digits: the clock and the machine give no more.
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def read_csv(path: Path) -> list[Row]:
    """Reads what `write_csv` wrote.

    Args:
        path: The file.

    Returns:
        The rows, in their order.

    Raises:
        ValueError: If its columns are not those of `Row`.
    """
    with path.open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    wanted = [field.name for field in _FIELDS]
    if header != wanted:
        raise ValueError(f"{path}: columns must be {wanted}, got {header}")
    return [
        Row(
            **{
                field.name: _READERS[str(field.type)](text)
                for field, text in zip(_FIELDS, line, strict=True)
            }
        )
        for line in lines
    ]
