"""How results are judged: ring bits exactly, pooled keys within one bound.

Arrays are in storage form: float32, float16, or uint16 that holds bfloat16 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from max.dtype import DType

from kpool_graph import reference
from kpool_graph.testing import wrong_channels
from models import STORAGE, Array, Call, Ring, bits

# What opens the kernels' errors.
OPS = (
    "compress",
    "copy_slots",
    "expand_topk",
    "ragged_update",
    "ring_close",
    "seed_tail",
    "tail_update",
)


def ulp(values: Array, dtype: DType) -> Array:
    """Measures the spacing of a dtype's numbers around exact values.

    Args:
        values: float64.
        dtype: The dtype.

    Returns:
        float64, same shape. Never below the spacing of the subnormals.
    """
    return reference.ulp(values, STORAGE[dtype])


def assert_same_bits(got: Array, want: Array, what: str = "array") -> None:
    """Requires two arrays to be equal bit for bit, NaN payloads included."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape), what
    wrong = np.argwhere(bits(got) != bits(want))
    if len(wrong):
        at = tuple(map(int, wrong[0]))
        raise AssertionError(
            f"{what}: {len(wrong)} of {want.size} elements differ, first at"
            f" {list(at)}: got {bits(got)[at]:#x} ({got[at]}), want"
            f" {bits(want)[at]:#x} ({want[at]})"
        )


def assert_pooled(
    got: Array, keys: Array, gates: Array, ape: Array, dtype: DType, what: str
) -> None:
    """Requires a pooled key to be as close to the exact one as float32 allows.

    Args:
        got: `[head_dim]`, the pooled key.
        keys: `[kpool, head_dim]`, the members' keys, oldest first.
        gates: `[kpool, head_dim]`, their gate scores.
        ape: `[kpool, head_dim]` float32.
        dtype: What the storage arrays hold.
        what: Opens the failure text.
    """
    if len(keys) == 1:
        assert_same_bits(got, keys[0], what)
        return
    wrong = wrong_channels(got, keys, gates, ape)
    if wrong.any():
        channel = int(np.argmax(wrong))
        exact = reference.pool(keys, gates, ape)
        tolerance = reference.pool_tolerance(keys, gates, ape, ulp(exact, dtype))
        value = reference.values(got)
        error = np.abs(value - exact)
        raise AssertionError(
            f"{what}: {np.count_nonzero(wrong)} of {len(wrong)} channels are"
            f" wrong, first {channel}: got {value[channel]!r}, exact"
            f" {exact[channel]!r}, off by {error[channel]:.3g}, allowed"
            f" {tolerance[channel]:.3g}"
        )


def pool_members(
    before: Array,
    k: Array,
    gate: Array,
    positions: Array,
    slot: int,
    pool: int,
    kpool: int,
) -> tuple[Array, Array]:
    """Gathers one pool's members for a row of tail_update.

    Args:
        before: The ring before the call.
        k: `[next_n, head_dim]`, the row's keys.
        gate: `[next_n, head_dim]`, its gate scores.
        positions: `[next_n]`, its positions.
        slot: Its slot.
        pool: Pool id.
        kpool: Tokens per pool.

    Returns:
        keys and gates `[kpool, head_dim]`, from this call where it brings the
        member, else from the ring.
    """
    token_of = {int(p): token for token, p in enumerate(positions)}
    members = []
    for position in range(pool * kpool, (pool + 1) * kpool):
        if position in token_of:
            token = token_of[position]
            members.append((k[token], gate[token]))
        else:
            entry = position % before.shape[2]
            members.append((before[slot, 0, entry], before[slot, 1, entry]))
    keys, gates = zip(*members, strict=True)
    return np.stack(keys), np.stack(gates)


def run_seed_tail(call: Call, ring: Ring, *operands: Array) -> None:
    """Runs seed_tail and requires the whole ring to be the oracle's.

    Args:
        call: The compiled op.
        ring: The ring.
        *operands: k, gate, input_row_offsets, cache_lengths, slot_idx.
    """
    want = ring.storage()
    reference.seed_tail(want, *operands, kpool=call.op.kpool)
    assert call(ring, *operands) == []
    assert_same_bits(ring.storage(), want, "ring")


def run_tail_update(
    call: Call,
    ring: Ring,
    k: Array,
    gate: Array,
    ape: Array,
    positions: Array,
    slot_idx: Array,
) -> tuple[Array, Array]:
    """Runs tail_update and requires everything it writes to be the oracle's.

    Args:
        call: The compiled op.
        ring: The ring.
        k: Operand of the op, as are the rest.
        gate: See `kpool_graph.tail_update`.
        ape: See there.
        positions: See there.
        slot_idx: See there.

    Returns:
        pooled and closed_pool.
    """
    op = call.op
    before = ring.storage()
    want_ring = before.copy()
    exact, want_closed = reference.tail_update(
        want_ring, k, gate, ape, positions, slot_idx, kpool=op.kpool
    )
    pooled, closed = call(ring, k, gate, ape, positions, slot_idx)
    np.testing.assert_array_equal(closed, want_closed, strict=True)
    assert_same_bits(ring.storage(), want_ring, "ring")
    assert pooled.shape == exact.shape
    for row, column in np.ndindex(*closed.shape):
        pool = int(closed[row, column])
        what = f"row {row}, column {column}, pool {pool}"
        if pool < 0:
            zeros = np.zeros_like(pooled[row, column])
            assert_same_bits(pooled[row, column], zeros, what)
            continue
        members = pool_members(
            before, k[row], gate[row], positions[row], slot_idx[row], pool, op.kpool
        )
        np.testing.assert_array_equal(
            reference.pool(*members, ape), exact[row, column], what
        )
        assert_pooled(pooled[row, column], *members, ape, op.dtype, what)
    return pooled, closed


def own_line(error: BaseException) -> str:
    """Takes our line out of what MAX raises around a kernel's error."""
    lines = [
        line
        for line in str(error).splitlines()
        if line.startswith(tuple(f"{op}: " for op in OPS))
    ]
    assert len(lines) == 1, str(error)
    return lines[0]


def message(error: Any) -> str:
    """Takes our line out of what `pytest.raises` caught."""
    return own_line(error.value)
