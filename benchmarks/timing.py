"""The clock: providers take turns, so that a noisy machine is noisy for all."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

# A sample much longer than a clock read and a Python call.
SAMPLE_NS = 100_000
MOST_SAMPLES = 5

Step = Callable[[], object]


@dataclass(frozen=True)
class Effort:
    """How long to time.

    Attributes:
        rounds: Turns of each provider.
        turn_ns: Time a turn takes, for a provider that is faster than that.
        case_ns: Time all turns may take; slow providers get fewer of them, though
            never fewer than `LEAST_ROUNDS`.
    """

    rounds: int
    turn_ns: int
    case_ns: int


QUICK = Effort(rounds=15, turn_ns=1_500_000, case_ns=20_000_000_000)
FULL = Effort(rounds=41, turn_ns=3_000_000, case_ns=20_000_000_000)
# Fewer tell nothing of the spread.
LEAST_ROUNDS = 11


def interleave(
    steps: Mapping[str, Step], effort: Effort
) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Times steps in turn.

    Args:
        steps: What to call, by name. Called before: compiled and verified.
        effort: How long.

    Returns:
        For each, nanoseconds a call, one for each round: a round's are from moments
        next to one another.
    """
    plans = {name: _plan(step, effort) for name, step in steps.items()}
    once_around = sum(plan.turn_ns for plan in plans.values())
    affordable = max(LEAST_ROUNDS, int(effort.case_ns / once_around))
    rounds = min(effort.rounds, affordable)
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            # No provider always follows the same other one's cache lines.
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                plan, step = plans[name], steps[name]
                step()
                samples = [_sample(step, plan.calls) for _ in range(plan.samples)]
                times[name].append(float(np.median(samples)))
    finally:
        if collecting:
            gc.enable()
    return {name: np.array(values) for name, values in times.items()}


@dataclass(frozen=True)
class _Plan:
    calls: int
    samples: int
    turn_ns: float


def _plan(step: Step, effort: Effort) -> _Plan:
    step()
    once = min(_sample(step, 1) for _ in range(3))
    calls = max(1, int(np.ceil(SAMPLE_NS / once)))
    samples = min(MOST_SAMPLES, max(1, int(effort.turn_ns / (calls * once))))
    return _Plan(calls, samples, (1 + calls * samples) * once)


def _sample(step: Step, calls: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(calls):
        step()
    return max(1, time.perf_counter_ns() - begin) / calls


def percentiles(values: np.ndarray) -> tuple[float, float, float]:
    """Summarises one number a round.

    Args:
        values: `[rounds]`.

    Returns:
        Median, 20th and 80th percentile.
    """
    low, middle, high = np.percentile(values, (20, 50, 80))
    return float(middle), float(low), float(high)
