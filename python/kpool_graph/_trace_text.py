"""What a trace shows, in text."""

from __future__ import annotations

from collections.abc import Sequence

from ._trace_steps import Pool, Step, Trace

_EMPTY = "."


def report(traces: Sequence[Trace]) -> str:
    """Writes what happened on each ring.

    Args:
        traces: The same steps on one ring each.

    Returns:
        The text, with a final newline.
    """
    parts = [headline(traces[0])]
    for each in traces:
        parts.append("\n".join([title(each), *_table(each), verdict(each)]))
    return "\n\n".join(parts) + "\n"


def headline(trace: Trace) -> str:
    """Says what the steps are like.

    Args:
        trace: What happened on one ring.

    Returns:
        A line.
    """
    tokens = f"{trace.next_n} tokens" if trace.next_n > 1 else "one token"
    line = f"Pools of {trace.kpool} tokens. Each step appends {tokens}"
    if not trace.reject:
        return f"{line}, none of them rejected."
    many = trace.reject > 1
    drafts = f"the last {trace.reject} of them" if many else "the last of them"
    return f"{line} and rejects {drafts}, which stand in brackets."


def title(trace: Trace) -> str:
    """Names a ring.

    Args:
        trace: What happened on it.

    Returns:
        A line.
    """
    kind = "the plain ring" if trace.ring_len == trace.kpool else "a wide ring"
    return f"ring_len {trace.ring_len}, {kind}"


def verdict(trace: Trace) -> str:
    """Counts the pools that came out wrong.

    Args:
        trace: What happened on one ring.

    Returns:
        A line.
    """
    wrong = sum(bool(pool.strays) for pool in trace.pools)
    return f"Pools closed for good: {len(trace.pools)}. Wrong: {wrong}."


def events(step: Step) -> list[str]:
    """Says which pools a step closed, and what its rejection cost.

    Args:
        step: The step.

    Returns:
        A sentence each.
    """
    said = [_closing(pool) for pool in step.closed]
    said += [
        f"{write.token} took entry {write.entry} from {write.replaced}, still needed"
        for write in step.lost
    ]
    return said


def _closing(pool: Pool) -> str:
    members = " ".join(str(member or "?") for member in pool.members)
    if pool.strays:
        return f"pool {pool.id} closes WRONG: {members}"
    if pool.provisional:
        return f"pool {pool.id} closes, to be closed again: {members}"
    return f"pool {pool.id} closes: {members}"


def _table(trace: Trace) -> list[str]:
    numbers = [f"entry {entry}" for entry in range(trace.ring_len)]
    rows = [["step", "token > entry", *numbers, ""]]
    for number, step in enumerate(trace.steps, 1):
        writes = "  ".join(f"{each.token} > {each.entry}" for each in step.writes)
        held = [str(token or _EMPTY) for token in step.entries]
        first, *others = events(step) or [""]
        rows.append([str(number), writes, *held, first])
        blank = [""] * (2 + trace.ring_len)
        rows += [[*blank, each] for each in others]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for step_cell, writes, *held, said in rows:
        cells = [step_cell.rjust(widths[0]), writes.ljust(widths[1])]
        for cell, width in zip(held, widths[2:-1], strict=True):
            cells.append(cell.rjust(width))
        lines.append("  ".join([*cells, said]).rstrip())
    return lines
