"""What the demo's ops must have done, from the operands the graphs reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from . import reference

Array = npt.NDArray[Any]

# The graphs return bfloat16 values in float32 arrays.
_BFLOAT16 = np.dtype(np.uint16)


@dataclass
class Request:
    """One text: its tokens, what the graphs made of them, what the checks found.

    Attributes:
        name: What the table calls it.
        token_ids: `[tokens]` int32.
        keys: Key of each position so far, `[head_dim]` float32 that holds
            bfloat16 values.
        gates: Gate scores likewise.
        decode_pools: Pools that decode has closed.
        largest_error: Largest distance of a pooled channel from the oracle.
        largest_share: Largest ratio of that distance to its tolerance.
        seconds: Time of the model calls that took tokens of this request.
    """

    name: str
    token_ids: Array
    keys: list[Array] = field(default_factory=list)
    gates: list[Array] = field(default_factory=list)
    decode_pools: int = 0
    largest_error: float = 0.0
    largest_share: float = 0.0
    seconds: float = 0.0


@dataclass
class Tally:
    """Counts comparisons and keeps the first that failed."""

    checked: int = 0
    differing: int = 0
    first: str = ""

    def add(self, problem: str) -> None:
        """Counts one comparison.

        Args:
            problem: What differs; empty if nothing does.
        """
        self.checked += 1
        if problem:
            self.differing += 1
            self.first = self.first or problem


class Oracle:
    """Compares decode rows and the ring with each request's own history.

    Attributes:
        rows: Decode rows compared.
        entries: Live ring entries compared.
    """

    def __init__(self, ape: Array) -> None:
        """Starts with nothing compared.

        Args:
            ape: `[kpool, head_dim]` float32.
        """
        self._ape = ape
        self._kpool = len(ape)
        self.rows = Tally()
        self.entries = Tally()

    def check_row(
        self, request: Request, position: int, pooled: Array, closed_pool: int
    ) -> None:
        """Compares what one decode row returned.

        Args:
            request: The row's request, its history up to `position`.
            position: Position of the row's token; negative if it is padding.
            pooled: `[head_dim]`.
            closed_pool: Pool id, or -1.
        """
        pool, member = divmod(position, self._kpool)
        if position < 0 or member != self._kpool - 1:
            pool = -1
        problem = ""
        if closed_pool != pool:
            problem = f"closed_pool must be {pool}, got {closed_pool}"
        elif pool < 0:
            if pooled.any():
                problem = "pooled must be zero where no pool closes"
        else:
            request.decode_pools += 1
            problem = self._pool_problem(request, pool, pooled)
        self.rows.add(problem and f"{request.name}, position {position}: {problem}")

    def _pool_problem(self, request: Request, pool: int, pooled: Array) -> str:
        members = slice(pool * self._kpool, (pool + 1) * self._kpool)
        keys = np.stack(request.keys[members])
        gates = np.stack(request.gates[members])
        exact = reference.pool(keys, gates, self._ape)
        ulp = reference.ulp(exact, _BFLOAT16)
        tolerance = reference.pool_tolerance(keys, gates, self._ape, ulp)
        error = np.abs(pooled - exact)
        # np.maximum, unlike max, lets a NaN through.
        request.largest_error = float(np.maximum(request.largest_error, error.max()))
        share = error / tolerance
        request.largest_share = float(np.maximum(request.largest_share, share.max()))
        within = error <= tolerance
        if within.all():
            return ""
        return (
            f"pool {pool} differs from the oracle in {np.sum(~within)} of"
            f" {within.size} channels, by up to {error.max():.2g}"
        )

    def check_ring(self, ring: Array, request: Request, slot: int) -> None:
        """Compares the tokens of a request's unfinished pool, bit for bit.

        Args:
            ring: `[max_slots, 2, ring_len, head_dim]`.
            request: The request, its history up to date.
            slot: Its slot.
        """
        length = len(request.keys)
        for position in range(length // self._kpool * self._kpool, length):
            entry = position % ring.shape[2]
            wrong = [
                name
                for plane, name, history in (
                    (reference.KEYS, "key", request.keys),
                    (reference.GATES, "gate score", request.gates),
                )
                if ring[slot, plane, entry].tobytes() != history[position].tobytes()
            ]
            self.entries.add(
                f"{request.name}, position {position}: entry {entry} of slot {slot}"
                f" does not hold this token's {' and '.join(wrong)}"
                if wrong
                else ""
            )
