"""Random batches of tail_update, drawn by hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from cases import MAX_SLOTS, ape_for, normal, place
from models import Ring

seeds = st.integers(0, 2**32 - 1)
slots = st.integers(0, MAX_SLOTS - 1)
stray_slots = st.one_of(slots, st.sampled_from([MAX_SLOTS, 3545, 2**32 - 1]))


def draw_start(data, room):
    """Draws a position with room for that many tokens below 2**31."""
    return data.draw(
        st.one_of(
            st.integers(0, 40),
            st.integers(2**20 - 20, 2**20 + 20),
            st.integers(2**31 - room - 40, 2**31 - room),
        ),
        label="start",
    )


@dataclass(frozen=True)
class Row:
    """One row of a tail_update batch; a start of -1 marks padding only."""

    slot: int
    start: int
    mask: tuple[bool, ...]

    def positions(self):
        return place(max(self.start, 0), np.array(self.mask))


def draw_rows(data, op):
    """Draws rows with distinct slots and any padding."""
    owned = data.draw(st.lists(slots, min_size=1, max_size=6, unique=True))
    masks = st.lists(st.booleans(), min_size=op.next_n, max_size=op.next_n)
    return [
        Row(slot, draw_start(data, op.next_n), tuple(data.draw(masks)))
        for slot in owned
    ]


class Step:
    """A tail_update batch with fixed values, to be run in several ways."""

    def __init__(self, rng, op, rows, draw=normal):
        self.rows = rows
        shape = (op.next_n, op.head_dim)
        self.values = [
            (draw(rng, shape, op.dtype), draw(rng, shape, op.dtype)) for _ in rows
        ]
        self.ape = ape_for(rng, op)
        self.op = op

    def run(self, call, tail, order):
        """Runs some of the rows, in an order.

        Returns:
            pooled, closed_pool and the ring that is left.
        """
        ring = Ring(tail, self.op.dtype)
        keys, gates = zip(*(self.values[row] for row in order), strict=True)
        pooled, closed = call(
            ring,
            np.stack(keys),
            np.stack(gates),
            self.ape,
            np.stack([self.rows[row].positions() for row in order]),
            np.array([self.rows[row].slot for row in order], np.uint32),
        )
        return pooled, closed, ring.storage()


def pieces(total, sizes, largest):
    """Cuts a total into the sizes given, as far as they go, and then the largest."""
    cut = []
    while total:
        size = min(sizes.pop() if sizes else largest, total)
        cut.append(size)
        total -= size
    return cut
