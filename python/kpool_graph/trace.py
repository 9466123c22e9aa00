"""`kpool trace`: what a plain ring and a wide one hold, step by step."""

from __future__ import annotations

import sys
from pathlib import Path

from ._trace_steps import trace
from ._trace_svg import draw
from ._trace_text import report
from ._validate import OperandError, Problems
from .ring import min_ring_len


def run_trace(
    *,
    kpool: int,
    next_n: int,
    reject: int,
    ring_len: int | None,
    steps: int,
    svg: Path | None,
) -> int:
    """Prints one request's steps on a plain ring and on a wide one.

    Args:
        kpool: Tokens per pool.
        next_n: Tokens a step appends.
        reject: How many of them, the last ones, each step rejects.
        ring_len: Entries of the wide ring; if not given, as many as make any
            rejection safe.
        steps: Steps to take.
        svg: Where to draw the same as SVG, if anywhere.

    Returns:
        0, or 2 if the sizes are not possible.
    """
    problems = Problems("trace")
    for name, value, least in (
        ("kpool", kpool, 1),
        ("next_n", next_n, 1),
        ("reject", reject, 0),
        ("steps", steps, 1),
    ):
        problems.require_at_least(name, value, least)
    if reject >= next_n > 0:
        problems.add(f"reject ({reject}) must be below next_n ({next_n})")
    if ring_len is not None:
        problems.require_ring_len(ring_len, kpool)
    try:
        problems.raise_if_any()
    except OperandError as error:
        print(f"kpool {error}", file=sys.stderr)
        return 2
    wide = ring_len or min_ring_len(kpool, next_n)
    sizes = {"kpool": kpool, "next_n": next_n, "reject": reject, "steps": steps}
    traces = [trace(ring_len=each, **sizes) for each in sorted({kpool, wide})]
    print(report(traces), end="")
    if svg:
        svg.write_text(draw(traces), encoding="utf-8")
        print(f"\nwrote {svg}")
    return 0
