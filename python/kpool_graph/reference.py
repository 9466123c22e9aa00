"""The ops in float64 NumPy and plain loops: what the kernels are checked against.

Independent of the kernels, and of MAX. Rings, keys and gate scores are arrays of
float32, float16, or uint16 that holds bfloat16 bits; copies move those bits, and
arithmetic is float64 on the values they stand for. Results are float64, not
rounded to the ring's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from . import bfloat16

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

KEYS = 0
GATES = 1

# Significand bits with the hidden one, and the exponent of the smallest subnormal,
# of what an array of this dtype stores.
_FORMATS = {
    np.dtype(np.float32): (24, -149),
    np.dtype(np.float16): (11, -24),
    np.dtype(np.uint16): (8, -133),
}


def values(storage: Array) -> Float64Array:
    """Reads stored elements as numbers.

    Args:
        storage: float32, float16, or uint16 bfloat16 bits, any shape.

    Returns:
        float64, same shape.
    """
    if storage.dtype == np.uint16:
        storage = bfloat16.decode(storage)
    # Widening a signalling NaN counts as an invalid operation.
    with np.errstate(invalid="ignore"):
        return storage.astype(np.float64)


def pool(keys: Array, gates: Array, ape: Array) -> Float64Array:
    """Pools the members of one pool, each channel on its own.

    Args:
        keys: `[kpool, head_dim]` stored keys, oldest member first.
        gates: `[kpool, head_dim]` stored gate scores.
        ape: `[kpool, head_dim]` float32.

    Returns:
        `[head_dim]` float64: sum_m w[m] * key[m] / sum_m w[m] with
        w[m] = exp(logit[m] - max_m logit[m]), logit = gate + ape.
    """
    key = values(keys)
    if len(key) == 1:
        return np.asarray(key[0])
    with np.errstate(all="ignore"):
        logit = values(gates) + ape.astype(np.float64)
        weight = np.exp(logit - logit.max(axis=0))
        return np.asarray((weight * key).sum(axis=0) / weight.sum(axis=0))


def ulp(exact: Float64Array, storage: np.dtype[Any]) -> Float64Array:
    """Measures the spacing of a dtype's numbers around exact values.

    Args:
        exact: float64, any shape.
        storage: What arrays of the dtype are stored as: float32, float16, or uint16
            for bfloat16.

    Returns:
        float64, same shape. Never below the spacing of the subnormals.
    """
    precision, smallest = _FORMATS[storage]
    exponent = np.frexp(exact)[1].astype(np.int64) - precision
    exponent[exact == 0] = smallest
    return np.asarray(np.ldexp(1.0, np.maximum(exponent, smallest)))


def pool_tolerance(
    keys: Array, gates: Array, ape: Array, ulp: Float64Array
) -> Float64Array:
    """Bounds the distance of a float32 pooled key from the exact one.

    One unit in the last place for the final rounding, and
    `(kpool + 8 + 2 max|logit|) * 2**-24 * max|key|` for what float32 logits,
    exponentials, sums and cancellation cost. Members whose gate score is -inf do not
    count.

    Args:
        keys: `[kpool, head_dim]` stored keys.
        gates: `[kpool, head_dim]` stored gate scores.
        ape: `[kpool, head_dim]` float32.
        ulp: `[head_dim]`, the ring dtype's spacing at the exact result.

    Returns:
        `[head_dim]` float64.
    """
    score = values(gates)
    # A member at -inf weighs nothing, so it must not widen the bound either.
    silent = np.isneginf(score)
    with np.errstate(all="ignore"):
        logit = np.where(silent, 0.0, np.abs(score + ape.astype(np.float64)))
        logit = logit.max(axis=0)
        size = np.where(silent, 0.0, np.abs(values(keys))).max(axis=0)
        return np.asarray(ulp + (len(keys) + 8 + 2 * logit) * 2.0**-24 * size)


def chunks(
    input_row_offsets: Array, cache_lengths: Array
) -> Iterator[tuple[int, int, int, int]]:
    """Reads a ragged batch's row tables.

    Args:
        input_row_offsets: `[batch + 1]`.
        cache_lengths: `[batch]`.

    Yields:
        For each request its index, its first token's row, that token's position, and
        the position after its last token.
    """
    for request in range(len(cache_lengths)):
        first = int(input_row_offsets[request])
        start = int(cache_lengths[request])
        yield request, first, start, start + int(input_row_offsets[request + 1]) - first


def seed_tail(
    tail: Array,
    k: Array,
    gate: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    slot_idx: Array,
    *,
    kpool: int,
) -> None:
    """Leaves each request's trailing tokens in the ring, updated in place.

    Args:
        tail: `[max_slots, 2, ring_len, head_dim]`.
        k: `[total_tokens, head_dim]`.
        gate: `[total_tokens, head_dim]`.
        input_row_offsets: `[batch + 1]`.
        cache_lengths: `[batch]`.
        slot_idx: `[batch]`.
        kpool: Tokens per pool.
    """
    ring_len = tail.shape[2]
    for request, first, start, end in chunks(input_row_offsets, cache_lengths):
        for position in range(start, end):
            if position >= end // kpool * kpool:
                row = first + position - start
                entry = position % ring_len
                tail[slot_idx[request], KEYS, entry] = k[row]
                tail[slot_idx[request], GATES, entry] = gate[row]


def tail_update(
    tail: Array,
    k: Array,
    gate: Array,
    ape: Array,
    positions: Array,
    slot_idx: Array,
    *,
    kpool: int,
) -> tuple[Float64Array, npt.NDArray[np.int32]]:
    """Stashes tokens one by one and closes each pool as its last one arrives.

    Args:
        tail: `[max_slots, 2, ring_len, head_dim]`, updated in place.
        k: `[batch, next_n, head_dim]`.
        gate: `[batch, next_n, head_dim]`.
        ape: `[kpool, head_dim]` float32.
        positions: `[batch, next_n]`; negative marks padding.
        slot_idx: `[batch]`.
        kpool: Tokens per pool.

    Returns:
        pooled `[batch, ceil(next_n / kpool), head_dim]` float64, zero where
        unused, and closed_pool `[batch, ceil(next_n / kpool)]` int32, -1 where
        unused.
    """
    ring_len = tail.shape[2]
    batch, next_n, head_dim = k.shape
    columns = -(-next_n // kpool)
    pooled = np.zeros((batch, columns, head_dim))
    closed_pool = np.full((batch, columns), -1, np.int32)
    for row in range(batch):
        column = 0
        for token in range(next_n):
            position = int(positions[row, token])
            if position < 0:
                continue
            slot = tail[slot_idx[row]]
            slot[KEYS, position % ring_len] = k[row, token]
            slot[GATES, position % ring_len] = gate[row, token]
            if position % kpool != kpool - 1:
                continue
            entries = [
                member % ring_len
                for member in range(position - kpool + 1, position + 1)
            ]
            pooled[row, column] = pool(slot[KEYS, entries], slot[GATES, entries], ape)
            closed_pool[row, column] = position // kpool
            column += 1
    return pooled, closed_pool
