"""One process of a run: verify each provider, then time those that are right."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from . import machine, operands, timing, verify
from .cases import Case
from .operands import Problem
from .providers import Prepare, choose, many
from .providers.base import Prepared
from .rows import (
    COPY,
    EMPTY,
    EXECUTE,
    FAILED,
    GRAPH,
    NOT_INSTALLED,
    OK,
    OURS,
    WRONG,
    Row,
)
from .timing import Effort

# Ops that a graph of many has more than a graph of one.
MORE_OPS = 16


@dataclass(frozen=True)
class Conditions:
    """What every row of a run repeats.

    Attributes:
        threads: CPUs of the process.
        quick: Whether fewer cases and rounds are wanted.
        command: What reruns it.
    """

    threads: int
    quick: bool
    command: str

    @property
    def effort(self) -> Effort:
        """How long to time."""
        return timing.QUICK if self.quick else timing.FULL


def run(
    cases: Iterable[Case],
    providers: Iterable[str],
    prepare: Mapping[str, Prepare],
    conditions: Conditions,
) -> list[Row]:
    """Runs cases, and tells of each on stderr.

    Args:
        cases: What.
        providers: Who; those that `prepare` lacks are not installed.
        prepare: How each gets ready.
        conditions: Of the run.

    Returns:
        A row for each provider, case and level.
    """
    rows = []
    for case in cases:
        print(case.id, file=sys.stderr, flush=True)
        problem = operands.make(case)
        names = choose(providers, case, conditions.threads, conditions.quick)
        rows += _run_execute(problem, names, prepare, conditions)
        if case.in_graph and {OURS, EMPTY} & set(names):
            rows += _run_graph(problem, names, prepare, conditions)
    return rows


def _run_execute(
    problem: Problem,
    names: list[str],
    prepare: Mapping[str, Prepare],
    conditions: Conditions,
) -> list[Row]:
    ready, status = _get_ready(problem, names, prepare)
    steps = {name: prepared.step for name, prepared in ready.items()}
    times = timing.interleave(steps, conditions.effort) if steps else {}
    return _rows(EXECUTE, problem, status, times, conditions)


def _run_graph(
    problem: Problem,
    names: list[str],
    prepare: Mapping[str, Prepare],
    conditions: Conditions,
) -> list[Row]:
    """Times one more op in a graph: graphs of one and of many, and their difference."""
    ops = [name for name in names if name in (OURS, EMPTY)]
    yardstick = [name for name in names if name == COPY]
    single, status = _get_ready(problem, [*ops, *yardstick], prepare)
    several, more = _get_ready(problem, [many(name) for name in ops], prepare)
    status.update({name: more[many(name)] for name in ops if status[name] == OK})
    steps = {name: each.step for name, each in {**single, **several}.items()}
    # A difference of two times is noisier than either.
    effort = replace(conditions.effort, rounds=2 * conditions.effort.rounds + 1)
    measured = timing.interleave(steps, effort) if steps else {}
    times = {name: measured[name] for name in yardstick}
    for name in ops:
        if status[name] == OK:
            times[name] = (measured[many(name)] - measured[name]) / MORE_OPS
    return _rows(GRAPH, problem, status, times, conditions)


def _get_ready(
    problem: Problem, names: Iterable[str], prepare: Mapping[str, Prepare]
) -> tuple[dict[str, Prepared], dict[str, str]]:
    """Prepares and verifies; only providers that are right come back ready."""
    ready, status = {}, {}
    for name in names:
        if name not in prepare:
            status[name] = NOT_INSTALLED
            continue
        try:
            prepared = prepare[name](problem)
            outputs = prepared.step()
            found = (
                ""
                if name.startswith(EMPTY)
                else verify.mismatch(problem, prepared.read(outputs))
            )
        except Exception as error:
            status[name] = FAILED
            print(f"  {name} failed: {error!r}", file=sys.stderr)
            continue
        if found:
            status[name] = WRONG
            print(f"  {name} is wrong: {found}", file=sys.stderr)
        else:
            status[name], ready[name] = OK, prepared
    return ready, status


def _rows(
    level: str,
    problem: Problem,
    status: Mapping[str, str],
    times: Mapping[str, np.ndarray],
    conditions: Conditions,
) -> list[Row]:
    case = problem.case
    rows = []
    for provider, state in status.items():
        row = Row(
            level=level,
            case=case.name,
            provider=provider,
            status=state,
            op=case.op,
            dtype=case.dtype,
            n=case.n,
            requests=case.requests,
            kpool=case.kpool,
            next_n=case.next_n,
            threads=conditions.threads,
            bytes_moved=problem.bytes_moved,
            versions=machine.versions(),
            cpu=machine.cpu(),
            command=conditions.command,
        )
        if state == OK:
            middle, low, high = timing.percentiles(times[provider] / 1000)
            row = replace(row, median_us=middle, p20_us=low, p80_us=high)
            if OURS in times:
                ratios = times[provider] / times[OURS]
                middle, low, high = timing.percentiles(ratios)
                row = replace(row, ratio=middle, ratio_p20=low, ratio_p80=high)
        rows.append(row)
    return rows
