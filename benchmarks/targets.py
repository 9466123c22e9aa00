"""What was aimed at on a CPU, and what a run reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .cases import BFLOAT16, CLOSING, COMPRESS, DECODE, FLOAT32, OPEN
from .rows import COPY, EXECUTE, GRAPH, KERNEL, OK, OURS, OURS_NEAR, Row

LEAST = "at least"
MOST = "at most"


@dataclass(frozen=True)
class Reached:
    """A figure and its spread.

    Attributes:
        value: The figure.
        low: Lower end of its spread.
        high: Upper end.
        beside: What the figure stands beside where it is no ratio.
    """

    value: float
    low: float
    high: float
    beside: str = ""


@dataclass(frozen=True)
class Target:
    """One aim.

    Attributes:
        text: What of.
        aim: The figure aimed at.
        side: `at least` or `at most`.
        measure: Finds the figure among a run's rows, None if it was not measured.
        unit: What the figure counts.
    """

    text: str
    aim: float
    side: str
    measure: Callable[[Sequence[Row]], Reached | None]
    unit: str = "x"

    def holds(self, reached: Reached) -> bool:
        """Tells whether a figure is on the right side.

        Args:
            reached: The figure.

        Returns:
            True if it is.
        """
        if self.side == LEAST:
            return reached.value >= self.aim
        return reached.value <= self.aim


def find(rows: Sequence[Row], provider: str, **wanted: object) -> Row | None:
    """Looks for a row that has times.

    Args:
        rows: Of one run.
        provider: Whose.
        **wanted: Values of its columns.

    Returns:
        The first such row.
    """
    wanted = {"provider": provider, "status": OK, **wanted}
    for row in rows:
        if all(getattr(row, name) == value for name, value in wanted.items()):
            return row
    return None


def _faster_than(
    provider: str, **wanted: object
) -> Callable[[Sequence[Row]], Reached | None]:
    def measure(rows: Sequence[Row]) -> Reached | None:
        row = find(rows, provider, **wanted)
        if row is None or row.ratio is None:
            return None
        return Reached(row.ratio, row.ratio_p20 or 0, row.ratio_p80 or 0)

    return measure


def _over(provider: str, **wanted: object) -> Callable[[Sequence[Row]], Reached | None]:
    def measure(rows: Sequence[Row]) -> Reached | None:
        faster = _faster_than(provider, **wanted)(rows)
        if faster is None or not faster.low:
            return None
        return Reached(1 / faster.value, 1 / faster.high, 1 / faster.low)

    return measure


def _microseconds(**wanted: object) -> Callable[[Sequence[Row]], Reached | None]:
    def measure(rows: Sequence[Row]) -> Reached | None:
        row, copies = find(rows, OURS, **wanted), _over(COPY, **wanted)(rows)
        if row is None or row.median_us is None:
            return None
        beside = f"{copies.value:.3g} copies of its bytes" if copies else "no copy"
        return Reached(row.median_us, row.p20_us or 0, row.p80_us or 0, beside)

    return measure


_CLOSING_256 = {"case": CLOSING, "n": 256, "kpool": 4, "next_n": 1}
_OPEN_256 = {**_CLOSING_256, "case": OPEN}
_COMPRESS_32K = {"case": COMPRESS, "n": 32768}
_DECODE_128K = {"case": DECODE, "n": 131072}


def _kernel(text: str, aim: float, threads: int = 1, **wanted: object) -> Target:
    text = f"kernel over a copy of its bytes, {text}"
    measure = _over(COPY, level=KERNEL, threads=threads, **wanted)
    return Target(text, aim, MOST, measure)


def _execute(provider: str, aim: float, dtype: str = FLOAT32) -> Target:
    text = f"execute, 256 rows close, {dtype}, over {provider}"
    wanted = {**_CLOSING_256, "level": EXECUTE, "dtype": dtype, "threads": 1}
    measure = _faster_than(provider, **wanted)
    return Target(text, aim, LEAST, measure)


def _one_more(batch: int, aim: float, threads: int = 1) -> Target:
    rows = "row closes" if batch == 1 else "rows close"
    wanted = {**_CLOSING_256, "level": GRAPH, "dtype": FLOAT32, "n": batch}
    wanted["threads"] = threads
    text = f"one more op in a graph, {batch} {rows}, float32"
    if threads > 1:
        text += ", two threads"
    return Target(text, aim, MOST, _microseconds(**wanted), "µs")


TARGETS = (
    _kernel("256 rows close, float32", 1.6, dtype=FLOAT32, **_CLOSING_256),
    _kernel("256 rows close, bfloat16", 2.5, dtype=BFLOAT16, **_CLOSING_256),
    _kernel("256 rows, nothing closes, float32", 1.1, dtype=FLOAT32, **_OPEN_256),
    _kernel("compress 32k, float32", 1.7, dtype=FLOAT32, **_COMPRESS_32K),
    _kernel("compress 32k, bfloat16", 1.3, dtype=BFLOAT16, **_COMPRESS_32K),
    _kernel(
        "compress 32k, bfloat16, two threads",
        1.1,
        threads=2,
        dtype=BFLOAT16,
        **_COMPRESS_32K,
    ),
    _execute("numpy", 6),
    _execute("torch", 7),
    _execute("torch.compile", 3),
    _execute("jax", 3.5),
    _execute("jax", 10, BFLOAT16),
    _execute("max ops", 25),
    _one_more(1, 2),
    _one_more(256, 45),
    _one_more(256, 45, threads=2),
    Target(
        "a decoded token at 128k context over the rebuild",
        1e4,
        LEAST,
        _faster_than("transformers", **_DECODE_128K),
    ),
    Target(
        "a decoded token at 1M context over one at 1k",
        1.1,
        MOST,
        _over(OURS_NEAR, case=DECODE, n=1048576),
    ),
)
