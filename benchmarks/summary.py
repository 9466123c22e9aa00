"""The tables of a run: ratios with their spread."""

from __future__ import annotations

from collections.abc import Sequence

from .rows import NOT_INSTALLED, OK, OURS, Row
from .targets import TARGETS, Reached, Target

_INTRODUCTION = """\
Each figure is a provider's time over ours in the same interleaved run: the median of
the rounds, then their 20th to 80th percentile. Above 1, ours is faster; below 1, the
provider. `copy` copies as many bytes as the op must move; `empty` is a graph with the
same inputs and outputs whose op does nothing. Operands stay in memory between calls,
caches are warm, and a process may use as many CPUs as a table says threads. Peers do
less than the ops: they take no padding and check no operand, and those of `compress`
take whole pools from position 0 on.

Levels: `execute` is one call from Python; `graph` is one more op in a graph, a
sixteenth of what a graph of 17 takes longer than a graph of 1; `kernel` is the kernel
called from Mojo, without MAX."""


def text(rows: Sequence[Row]) -> str:
    """Writes the tables of a run.

    Args:
        rows: Of one run.

    Returns:
        The text, with a final newline.
    """
    if not rows:
        return "No rows.\n"
    parts = [_INTRODUCTION]
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = (row.level, row.case, row.dtype, row.kpool, row.next_n, row.threads)
        groups.setdefault(key, []).append(row)
    parts += [_table(group) for group in groups.values()]
    parts.append(_aims(rows))
    parts += _absent(rows)
    parts.append(f"CPU: {rows[0].cpu}\nVersions: {rows[0].versions}")
    commands = dict.fromkeys(row.command for row in rows)
    parts.append("\n".join(f"Run by: {command}" for command in commands))
    return "\n\n".join(parts) + "\n"


def spread(middle: float, low: float, high: float) -> str:
    """Writes a figure with its spread.

    Args:
        middle: Median.
        low: 20th percentile.
        high: 80th percentile.

    Returns:
        Such as `3.1 (2.9..3.4)`.
    """
    return f"{_digits(middle)} ({_digits(low)}..{_digits(high)})"


def _digits(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def _table(rows: list[Row]) -> str:
    first = rows[0]
    threads = "1 thread" if first.threads == 1 else f"{first.threads} threads"
    step = f", next_n {first.next_n}" if first.next_n else ""
    title = (
        f"{first.level}: {first.case}, {first.dtype}, kpool {first.kpool}{step},"
        f" {threads}"
    )
    sizes = list(dict.fromkeys((row.n, row.requests) for row in rows))
    shown = [row for row in rows if row.status != NOT_INSTALLED]
    providers = dict.fromkeys(row.provider for row in shown if row.provider != OURS)
    cells = {(row.provider, row.n, row.requests): row for row in shown}
    lines = [["", *(_size(*size, first.op) for size in sizes)]]
    lines += [
        [provider, *(_cell(cells.get((provider, *size))) for size in sizes)]
        for provider in providers
    ]
    ours = [cells.get((OURS, *size)) for size in sizes]
    lines.append([f"{OURS}, µs", *(_times(row) for row in ours)])
    return title + "\n" + _columns(lines)


def _size(n: int, requests: int, op: str) -> str:
    return f"{n:,}" if requests in (n, 1) else f"{n:,} in {requests}"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row.status != OK:
        return row.status
    if row.ratio is None:
        return "no ratio"
    return spread(row.ratio, row.ratio_p20 or 0, row.ratio_p80 or 0)


def _times(row: Row | None) -> str:
    if row is None:
        return ""
    if row.status != OK:
        return row.status
    return spread(row.median_us or 0, row.p20_us or 0, row.p80_us or 0)


def _columns(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    written = []
    for name, *cells in lines:
        padded = (
            cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)
        )
        written.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(written)


def _aims(rows: Sequence[Row]) -> str:
    lines = [["aim on a CPU", "aim", "reached", ""]]
    for target in TARGETS:
        reached = target.measure(rows)
        aim = f"{target.side} {target.aim:g} {target.unit}"
        lines.append([target.text, aim, *_reached(target, reached)])
    return _columns(lines)


def _reached(target: Target, reached: Reached | None) -> list[str]:
    if reached is None:
        return ["not measured", ""]
    figure = spread(reached.value, reached.low, reached.high)
    if reached.beside:
        figure += f", {reached.beside}"
    return [figure, "holds" if target.holds(reached) else "missed"]


def _absent(rows: Sequence[Row]) -> list[str]:
    absent = dict.fromkeys(row.provider for row in rows if row.status == NOT_INSTALLED)
    return ["Not installed: " + ", ".join(absent)] if absent else []
