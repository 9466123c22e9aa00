"""Whether a provider computes what the oracle says."""

from __future__ import annotations

import numpy as np

from .operands import Outcome, Problem


def mismatch(problem: Problem, got: Outcome) -> str:
    """Compares what a step left with what it had to leave.

    Args:
        problem: The case.
        got: What the provider left.

    Returns:
        What is wrong first, or an empty string. Pooled keys may be off by the
        tolerance; pool ids, positions and ring bytes by nothing. The ring's last slot
        is nobody's.
    """
    want = problem.expected
    if want.ints is not None:
        if got.ints is None or got.ints.shape != want.ints.shape:
            return f"ids must be {want.ints.shape}, got {_shape(got.ints)}"
        if not np.array_equal(got.ints, want.ints):
            return f"{np.count_nonzero(got.ints != want.ints)} ids are wrong"
    if want.pooled is not None:
        if got.pooled is None or got.pooled.shape != want.pooled.shape:
            return f"pooled must be {want.pooled.shape}, got {_shape(got.pooled)}"
        error = np.abs(got.pooled.astype(np.float64) - want.pooled)
        wrong = ~(error <= problem.tolerance)
        if want.ints is not None:
            # Unused rows are zero, which takes no rounding.
            wrong |= (want.ints < 0)[..., None] & (got.pooled != 0)
        if wrong.any():
            return f"{np.count_nonzero(wrong)} pooled channels are off, by up to" + (
                f" {np.nanmax(error):.3g}"
            )
    if want.tail is not None:
        if got.tail is None or got.tail.shape != want.tail.shape:
            return f"the ring must be {want.tail.shape}, got {_shape(got.tail)}"
        bits = f"u{want.tail.itemsize}"
        slots = (got.tail[:-1].view(bits) != want.tail[:-1].view(bits)).any((1, 2, 3))
        if slots.any():
            return f"{np.count_nonzero(slots)} slots of the ring are wrong"
    return ""


def _shape(array: np.ndarray | None) -> object:
    return "nothing" if array is None else array.shape
