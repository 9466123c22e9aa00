"""A ragged step's closed pools, each with its id and its request's slot."""

from __future__ import annotations

from max.dtype import DType
from max.graph import BufferValue, TensorValue, ops

from ._rows import count, owners_of, spread
from .ops import ragged_update, ring_close, seed_tail
from .pools import compress, pool_row_offsets

ThreeValues = tuple[TensorValue, TensorValue, TensorValue]
ClosedPools = ThreeValues


def close_ragged(
    tail: BufferValue,
    k: TensorValue,
    gate: TensorValue,
    ape: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    slot_idx: TensorValue,
    *,
    kpool: int,
    three_ops: bool = False,
) -> ClosedPools:
    """Takes a ragged step, and tells whose the pools are that it closes.

    Args:
        tail: `[max_slots, 2, ring_len, head_dim]`, the ring; updated in place.
        k: `[total_tokens, head_dim]` keys, dtype of the ring.
        gate: `[total_tokens, head_dim]` gate scores, dtype of the ring.
        ape: `[kpool, head_dim]` float32, within-pool position embedding.
        input_row_offsets: `[batch + 1]` uint32, first token row of each request.
        cache_lengths: `[batch]` uint32, tokens before this step.
        slot_idx: `[batch]` uint32, slot of each request.
        kpool: Tokens per pool.
        three_ops: Whether `ring_close`, `compress` and `seed_tail` do the step in
            place of `ragged_update`. The rows are others then.

    Returns:
        pooled `[rows, head_dim]`, dtype of the ring; closed_pool `[rows]` int32, -1
        where unused; slots `[rows]` int64, of no meaning where unused.
    """
    close = _in_three_ops if three_ops else _in_one_op
    tables = (input_row_offsets, cache_lengths, slot_idx)
    return close(tail, (k, gate, ape), tables, kpool)


def _in_one_op(
    tail: BufferValue, members: ThreeValues, tables: ThreeValues, kpool: int
) -> ClosedPools:
    pooled, closed_pool = ragged_update(tail, *members, *tables, kpool=kpool)
    first, _, slots = (ops.cast(table, DType.int64) for table in tables)
    # Request r's rows begin at `(first[r] + r * spare) // kpool`; times kpool, that
    # needs no division.
    spare = kpool - 1
    begin = first + count(first.shape[0], first) * spare
    rows = count(pooled.shape[0], first) * kpool + spare
    return pooled, closed_pool, spread(slots, owners_of(begin, rows))


def _in_three_ops(
    tail: BufferValue, members: ThreeValues, tables: ThreeValues, kpool: int
) -> ClosedPools:
    k, gate, _ = members
    input_row_offsets, cache_lengths, slot_idx = tables
    pending, pending_pool = ring_close(tail, *members, *tables, kpool=kpool)
    offsets = pool_row_offsets(cache_lengths, input_row_offsets, kpool)
    whole = compress(*members, input_row_offsets, offsets, cache_lengths, kpool=kpool)
    seed_tail(tail, k, gate, *tables, kpool=kpool)

    first, cached, slots = (
        ops.cast(table, DType.int64) for table in (offsets, cache_lengths, slot_idx)
    )
    rows = count(whole.shape[0], first)
    owners = owners_of(first, rows)
    # The first pool that a request completes alone is ceil(cached / kpool).
    pool_before = (cached + (kpool - 1)) // kpool
    pool_before -= ops.rebind(first[:-1], cached.shape)
    whole_pool = ops.max(spread(pool_before, owners) + rows, -1)
    return (
        ops.concat([pending, whole]),
        ops.concat([pending_pool, ops.cast(whole_pool, DType.int32)]),
        ops.concat([slots, spread(slots, owners)]),
    )
