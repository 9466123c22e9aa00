"""Requests fed through one ring, in every way that the ops offer.

A way is a function of (models, traffic, counts, rng) that brings the next `counts`
tokens of each request, in one call and a random row order.
"""

from __future__ import annotations

import numpy as np

from cases import any_bits, place
from models import Ring
from ragged_asserts import first_rows
from ragged_models import ragged_batch

STRAY_SLOT = 3545


class Traffic:
    """Requests on their way through one ring, and the pools that came out."""

    def __init__(self, op, requests, tail, ape):
        self.op = op
        self.requests = requests
        self.ring = Ring(tail, op.dtype)
        self.ape = ape
        self.done = [0] * len(requests)
        self.pools = {}

    def take(self, counts, order):
        """Brings each request's next tokens, as the rows of a batch in an order."""
        parts = [(self.requests[at], self.done[at], counts[at]) for at in order]
        for at in order:
            self.done[at] += counts[at]
        return parts

    def emit(self, request, pool, key):
        assert (request, pool) not in self.pools, "a pool closed twice"
        self.pools[request, pool] = key

    def live(self):
        """Reads the ring entries that later results depend on."""
        tail = self.ring.storage()
        return {
            (at, position): tail[each.slot, :, position % self.op.ring_len]
            for at, each in enumerate(self.requests)
            for end in [each.start + self.done[at]]
            for position in range(end - end % self.op.kpool, end)
        }


def by_tail_update(op):
    def feed(models, traffic, counts, rng):
        order = rng.permutation(len(counts))
        shape = (len(order), op.next_n, op.head_dim)
        # Padded tokens carry poison, and must not be looked at.
        keys, gates = (any_bits(rng, shape, op.dtype) for _ in range(2))
        positions = np.zeros(shape[:2], np.int32)
        parts = traffic.take(counts, order)
        for row, (request, done, count) in enumerate(parts):
            mask = rng.permutation(op.next_n) < count
            keys[row, mask] = request.k[done : done + count]
            gates[row, mask] = request.gate[done : done + count]
            positions[row] = place(request.start + done, mask)
        slot_idx = np.array([request.slot for request, *_ in parts], np.uint32)
        pooled, closed = models[op](
            traffic.ring, keys, gates, traffic.ape, positions, slot_idx
        )
        for row, column in np.argwhere(closed >= 0):
            traffic.emit(order[row], int(closed[row, column]), pooled[row, column])

    return feed


def batch(traffic, counts, order):
    """Builds a ragged call; requests that bring nothing name no slot of the ring."""
    k, gate, offsets, lengths, slot_idx = ragged_batch(
        traffic.op, traffic.take(counts, order)
    )
    slot_idx[np.diff(offsets) == 0] = STRAY_SLOT
    return k, gate, traffic.ape, offsets, lengths, slot_idx


def emit_whole(traffic, order, lengths, whole, pool_rows):
    """Takes compress's pools, whose ids follow from the cached lengths."""
    for row, at in enumerate(order):
        first_pool = -(-int(lengths[row]) // traffic.op.kpool)
        own = whole[pool_rows[row] : pool_rows[row + 1]]
        for pool, key in enumerate(own, first_pool):
            traffic.emit(at, pool, key)


def by_three_ops(op):
    def feed(models, traffic, counts, rng):
        order = rng.permutation(len(counts))
        operands = batch(traffic, counts, order)
        pooled, closed, whole, pool_rows = models[op](traffic.ring, *operands)
        for row in np.flatnonzero(closed >= 0):
            traffic.emit(order[row], int(closed[row]), pooled[row])
        emit_whole(traffic, order, operands[4], whole, pool_rows)

    return feed


def by_ragged_update(op):
    def feed(models, traffic, counts, rng):
        order = rng.permutation(len(counts))
        operands = batch(traffic, counts, order)
        pooled, closed = models[op](traffic.ring, *operands)
        firsts = first_rows(operands[3], op.kpool)
        for row in np.flatnonzero(closed >= 0):
            at = order[np.searchsorted(firsts, row, side="right") - 1]
            traffic.emit(at, int(closed[row]), pooled[row])

    return feed


def by_prefill(compress, seed_tail):
    def feed(models, traffic, counts, rng):
        order = rng.permutation(len(counts))
        k, gate, ape, offsets, lengths, slot_idx = batch(traffic, counts, order)
        whole = np.diff(offsets) // compress.kpool
        pool_rows = np.cumsum([0, *whole]).astype(np.uint32)
        (pooled,) = models[compress](k, gate, ape, offsets, pool_rows, lengths)
        models[seed_tail](traffic.ring, k, gate, offsets, lengths, slot_idx)
        emit_whole(traffic, order, lengths, pooled, pool_rows)

    return feed
