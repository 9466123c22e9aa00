"""The ragged ops in float64 NumPy and plain loops; conventions as in `reference`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .reference import GATES, KEYS, Array, Float64Array, chunks, pool

Int32Array = npt.NDArray[np.int32]


def compress(
    k: Array,
    gate: Array,
    ape: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    *,
    kpool: int,
) -> tuple[Float64Array, npt.NDArray[np.uint32]]:
    """Pools the tokens whose pools arrive whole in this call.

    Args:
        k: `[total_tokens, head_dim]`.
        gate: `[total_tokens, head_dim]`.
        ape: `[kpool, head_dim]` float32.
        input_row_offsets: `[batch + 1]`.
        cache_lengths: `[batch]`.
        kpool: Tokens per pool.

    Returns:
        pooled `[total_tokens // kpool, head_dim]` float64, zero past the last pool,
        and pool_row_offsets `[batch + 1]` uint32, where each request's pools begin.
    """
    total, head_dim = k.shape
    pooled = np.zeros((total // kpool, head_dim))
    offsets = [0]
    for _, first, start, end in chunks(input_row_offsets, cache_lengths):
        row = offsets[-1]
        for position in range(start, end):
            last = position + kpool
            if position % kpool == 0 and last <= end:
                members = slice(first + position - start, first + last - start)
                pooled[row] = pool(k[members], gate[members], ape)
                row += 1
        offsets.append(row)
    return pooled, np.array(offsets, np.uint32)


def ring_close(
    tail: Array,
    k: Array,
    gate: Array,
    ape: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    slot_idx: Array,
    *,
    kpool: int,
) -> tuple[Float64Array, Int32Array]:
    """Closes the pool that each request had pending, if its chunk ends it.

    Args:
        tail: `[max_slots, 2, ring_len, head_dim]`, only read.
        k: `[total_tokens, head_dim]`.
        gate: `[total_tokens, head_dim]`.
        ape: `[kpool, head_dim]` float32.
        input_row_offsets: `[batch + 1]`.
        cache_lengths: `[batch]`.
        slot_idx: `[batch]`.
        kpool: Tokens per pool.

    Returns:
        pooled `[batch, head_dim]` float64, zero where nothing closed, and
        closed_pool `[batch]` int32, -1 there.
    """
    ring_len = tail.shape[2]
    batch = len(cache_lengths)
    pooled = np.zeros((batch, k.shape[1]))
    closed_pool = np.full(batch, -1, np.int32)
    for request, first, start, end in chunks(input_row_offsets, cache_lengths):
        begin = start // kpool * kpool
        if start == begin or end < begin + kpool:
            continue
        waiting = [position % ring_len for position in range(begin, start)]
        rows = [first + position - start for position in range(start, begin + kpool)]
        slot = tail[slot_idx[request]]
        pooled[request] = pool(
            np.concatenate([slot[KEYS, waiting], k[rows]]),
            np.concatenate([slot[GATES, waiting], gate[rows]]),
            ape,
        )
        closed_pool[request] = begin // kpool
    return pooled, closed_pool


def ragged_update(
    tail: Array,
    k: Array,
    gate: Array,
    ape: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    slot_idx: Array,
    *,
    kpool: int,
) -> tuple[Float64Array, Int32Array]:
    """Closes, compresses and stashes a whole ragged step.

    Args:
        tail: `[max_slots, 2, ring_len, head_dim]`, updated in place.
        k: `[total_tokens, head_dim]`.
        gate: `[total_tokens, head_dim]`.
        ape: `[kpool, head_dim]` float32.
        input_row_offsets: `[batch + 1]`.
        cache_lengths: `[batch]`.
        slot_idx: `[batch]`.
        kpool: Tokens per pool.

    Returns:
        pooled `[rows, head_dim]` float64 and closed_pool `[rows]` int32 with
        `rows = (total_tokens + batch * (kpool - 1)) // kpool`; request `r` from row
        `(input_row_offsets[r] + r * (kpool - 1)) // kpool` on; zero and -1 where
        unused.
    """
    total, head_dim = k.shape
    batch = len(cache_lengths)
    ring_len = tail.shape[2]
    rows = (total + batch * (kpool - 1)) // kpool
    pooled = np.zeros((rows, head_dim))
    closed_pool = np.full(rows, -1, np.int32)
    for request, first, start, end in chunks(input_row_offsets, cache_lengths):
        row = (first + request * (kpool - 1)) // kpool
        if start == end:
            continue
        slot = tail[slot_idx[request]]
        # All tokens the request can name now: live ring entries, then the chunk.
        keys, gates = {}, {}
        for position in range(start // kpool * kpool, start):
            keys[position] = slot[KEYS, position % ring_len].copy()
            gates[position] = slot[GATES, position % ring_len].copy()
        for position in range(start, end):
            keys[position] = k[first + position - start]
            gates[position] = gate[first + position - start]
            if position % kpool == kpool - 1:
                members = range(position - kpool + 1, position + 1)
                pooled[row] = pool(
                    np.array([keys[member] for member in members]),
                    np.array([gates[member] for member in members]),
                    ape,
                )
                closed_pool[row] = position // kpool
                row += 1
        for position in range(max(start, end - ring_len), end):
            slot[KEYS, position % ring_len] = keys[position]
            slot[GATES, position % ring_len] = gates[position]
    return pooled, closed_pool


def expand_topk(
    pool_ids: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    *,
    kpool: int,
    always_select_tail: bool = True,
) -> Int32Array:
    """Expands each query's selected pools to the token positions they cover.

    Args:
        pool_ids: `[total_tokens, pool_topk]`.
        input_row_offsets: `[batch + 1]`.
        cache_lengths: `[batch]`.
        kpool: Tokens per pool.
        always_select_tail: Whether positions that no complete pool covers follow.

    Returns:
        `[total_tokens, pool_topk * kpool]` int32, `kpool - 1` columns more with
        `always_select_tail`; packed, then -1.
    """
    total, pool_topk = pool_ids.shape
    columns = pool_topk * kpool + (kpool - 1 if always_select_tail else 0)
    selected = np.full((total, columns), -1, np.int32)
    for _, first, start, end in chunks(input_row_offsets, cache_lengths):
        for position in range(start, end):
            row, visible = first + position - start, position + 1
            positions: list[int] = []
            for pool_id in pool_ids[row]:
                if 0 <= pool_id < visible // kpool:
                    begin = int(pool_id) * kpool
                    positions += range(begin, begin + kpool)
            if always_select_tail:
                positions += range(visible - visible % kpool, visible)
            selected[row, : len(positions)] = positions
    return selected
