"""The ragged ops run against the oracle; conventions as in `asserts`."""

from __future__ import annotations

import numpy as np

from asserts import assert_pooled, assert_same_bits, pool_members
from kpool_graph import reference, reference_ragged
from models import Array, Call, Ring


def _assert_pool(
    got: Array,
    exact: Array,
    before: Array,
    operands: tuple[Array, ...],
    request: int,
    pool: int,
    call: Call,
) -> None:
    k, gate, ape, offsets, lengths, slots = operands
    kpool = call.op.kpool
    first, start = int(offsets[request]), int(lengths[request])
    brought = range(max(pool * kpool, start), (pool + 1) * kpool)
    rows = slice(first + brought.start - start, first + brought.stop - start)
    assert rows.stop <= offsets[request + 1]
    members = pool_members(
        before, k[rows], gate[rows], brought, slots[request], pool, kpool
    )
    what = f"request {request}, pool {pool}"
    np.testing.assert_array_equal(reference.pool(*members, ape), exact, what)
    assert_pooled(got, *members, ape, call.op.dtype, what)


def run_ring_close(call: Call, ring: Ring, *operands: Array) -> tuple[Array, Array]:
    """Runs ring_close, and requires the oracle's results and an untouched ring.

    Args:
        call: The compiled op.
        ring: The ring.
        *operands: k, gate, ape, input_row_offsets, cache_lengths, slot_idx.

    Returns:
        pooled and closed_pool.
    """
    before = ring.storage()
    exact, want_closed = reference_ragged.ring_close(
        before, *operands, kpool=call.op.kpool
    )
    pooled, closed = call(ring, *operands)
    np.testing.assert_array_equal(closed, want_closed, strict=True)
    assert_same_bits(ring.storage(), before, "ring")
    assert pooled.shape == exact.shape
    for request, pool in enumerate(closed.tolist()):
        got = pooled[request]
        if pool < 0:
            assert_same_bits(got, np.zeros_like(got), f"unused row {request}")
        else:
            _assert_pool(got, exact[request], before, operands, request, pool, call)
    return pooled, closed


def run_ragged_update(call: Call, ring: Ring, *operands: Array) -> tuple[Array, Array]:
    """Runs ragged_update and requires everything it writes to be the oracle's.

    Args:
        call: The compiled op.
        ring: The ring.
        *operands: k, gate, ape, input_row_offsets, cache_lengths, slot_idx.

    Returns:
        pooled and closed_pool.
    """
    before = ring.storage()
    want_ring = before.copy()
    kpool = call.op.kpool
    exact, want_closed = reference_ragged.ragged_update(
        want_ring, *operands, kpool=kpool
    )
    pooled, closed = call(ring, *operands)
    np.testing.assert_array_equal(closed, want_closed, strict=True)
    assert_same_bits(ring.storage(), want_ring, "ring")
    assert pooled.shape == exact.shape
    firsts = first_rows(operands[3], kpool)
    for row, pool in enumerate(closed.tolist()):
        if pool < 0:
            zeros = np.zeros_like(pooled[row])
            assert_same_bits(pooled[row], zeros, f"unused row {row}")
        else:
            request = int(np.searchsorted(firsts, row, side="right")) - 1
            _assert_pool(pooled[row], exact[row], before, operands, request, pool, call)
    return pooled, closed


def first_rows(input_row_offsets: Array, kpool: int) -> Array:
    """Finds where ragged_update puts each request's pools.

    Args:
        input_row_offsets: `[batch + 1]`.
        kpool: Tokens per pool.

    Returns:
        `[batch]` int64.
    """
    offsets = input_row_offsets[:-1].astype(np.int64)
    return (offsets + np.arange(len(offsets)) * (kpool - 1)) // kpool


def run_compress(call: Call, *operands: Array) -> tuple[Array, Array]:
    """Runs compress and requires every row of its output to be the oracle's.

    Args:
        call: The compiled op.
        *operands: k, gate, ape, input_row_offsets, cache_lengths; what may follow
            is not looked at.

    Returns:
        pooled, and the pool_row_offsets that it was run with.
    """
    k, gate, ape, offsets, lengths, *_ = operands
    kpool = call.op.kpool
    exact, pool_rows = reference_ragged.compress(
        k, gate, ape, offsets, lengths, kpool=kpool
    )
    (pooled,) = call(k, gate, ape, offsets, pool_rows, lengths)
    assert pooled.shape == exact.shape
    no_ring, no_slots = np.empty(0), np.zeros_like(lengths)
    for request, start in enumerate(lengths.tolist()):
        for row in range(pool_rows[request], pool_rows[request + 1]):
            pool = -(-start // kpool) + row - int(pool_rows[request])
            _assert_pool(
                pooled[row],
                exact[row],
                no_ring,
                (k, gate, ape, offsets, lengths, no_slots),
                request,
                pool,
                call,
            )
    unused = pooled[pool_rows[-1] :]
    assert_same_bits(unused, np.zeros_like(unused), "rows past the last pool")
    return pooled, pool_rows


def run_expand_topk(call: Call, *operands: Array) -> Array:
    """Runs expand_topk and requires the oracle's positions.

    Args:
        call: The compiled op.
        *operands: pool_ids, input_row_offsets, cache_lengths.

    Returns:
        The positions.
    """
    op = call.op
    want = reference_ragged.expand_topk(
        *operands, kpool=op.kpool, always_select_tail=op.always_select_tail
    )
    (got,) = call(*operands)
    np.testing.assert_array_equal(got, want, strict=True)
    return got
