"""What the ops are run on: geometries, batches, and values.

Arrays are in storage form: float32, float16, or uint16 that holds bfloat16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from max.dtype import DType

from kpool_graph import bfloat16
from models import STORAGE, Array, Ring, SeedTail, TailUpdate, bits, declare

DTYPES = (DType.float32, DType.float16, DType.bfloat16)
HEAD_DIMS = (8, 32, 64, 96, 100, 128, 256)
KPOOLS = (1, 2, 3, 4, 8, 16)

_F32, _F16, _BF16 = DTYPES

# dtype, head_dim, kpool, next_n, ring_len. Every kpool meets every next_n of
# interest; test_tail_update.py lists the other pairs that must meet.
TAIL_UPDATES: tuple[TailUpdate, ...] = tuple(
    declare(TailUpdate(dtype, head_dim, kpool, next_n, ring_len))
    for dtype, head_dim, kpool, next_n, ring_len in (
        (_BF16, 100, 1, 1, 1),
        (_F32, 128, 1, 2, 1),
        (_BF16, 100, 1, 3, 1),
        (_F16, 96, 1, 16, 16),
        (_BF16, 256, 2, 1, 17),
        (_F16, 8, 2, 2, 3),
        (_F32, 32, 2, 3, 2),
        (_F16, 128, 2, 5, 2),
        (_BF16, 256, 2, 16, 17),
        (_F16, 32, 3, 1, 9),
        (_BF16, 96, 3, 2, 3),
        (_F32, 256, 3, 3, 3),
        (_F16, 100, 3, 4, 6),
        (_F16, 32, 3, 7, 9),
        (_F32, 64, 3, 16, 18),
        (_F32, 8, 4, 1, 4),
        (_F16, 128, 4, 3, 6),
        (_F16, 64, 4, 4, 4),
        (_BF16, 256, 4, 5, 8),
        (_F32, 8, 4, 9, 4),
        (_F32, 100, 4, 16, 4),
        (_F32, 96, 8, 1, 16),
        (_BF16, 32, 8, 7, 14),
        (_BF16, 128, 8, 8, 8),
        (_F32, 96, 8, 9, 16),
        (_BF16, 8, 8, 16, 23),
        (_F16, 256, 8, 17, 24),
        (_BF16, 64, 16, 1, 16),
        (_F32, 100, 16, 15, 16),
        (_BF16, 32, 16, 16, 16),
        (_BF16, 64, 16, 17, 16),
        (_F16, 96, 16, 33, 48),
        # GLM-5.3-Flash.
        (_BF16, 128, 4, 1, 4),
        (_BF16, 128, 4, 4, 7),
    )
)


@dataclass(frozen=True)
class Family:
    """Ops that share a ring: prefill, decode by one, and a wide step."""

    seed_tail: SeedTail
    decode: TailUpdate
    wide: TailUpdate


def _family(
    dtype: DType, head_dim: int, kpool: int, next_n: int, ring_len: int
) -> Family:
    return Family(
        declare(SeedTail(dtype, head_dim, kpool, ring_len)),
        declare(TailUpdate(dtype, head_dim, kpool, 1, ring_len)),
        declare(TailUpdate(dtype, head_dim, kpool, next_n, ring_len)),
    )


FAMILIES: tuple[Family, ...] = (
    _family(_BF16, 100, 1, 3, 1),
    _family(_BF16, 256, 2, 16, 17),
    _family(_F16, 32, 3, 7, 9),
    _family(_F32, 8, 4, 9, 4),
    _family(_F32, 96, 8, 9, 16),
    _family(_BF16, 64, 16, 17, 16),
)

SEED_TAILS: tuple[SeedTail, ...] = tuple(
    family.seed_tail for family in FAMILIES
) + tuple(
    declare(SeedTail(dtype, head_dim, kpool, ring_len))
    for dtype, head_dim, kpool, ring_len in (
        (_F32, 256, 1, 2),
        (_F16, 128, 2, 2),
        (_F32, 64, 3, 3),
        (_BF16, 128, 4, 4),
        (_F16, 8, 4, 7),
        (_F16, 96, 8, 8),
        (_F32, 128, 16, 33),
    )
)


@dataclass(frozen=True)
class Case:
    """A batch of requests, each (slot, start position, tokens).

    Attributes:
        requests: Slots are distinct, in a ring of `MAX_SLOTS`.
        why: What the case is there to catch.
    """

    requests: tuple[tuple[int, int, int], ...]
    why: str


MAX_SLOTS = 9


def batches(kpool: int, ring_len: int) -> dict[str, Case]:
    """The batches that every geometry is run on.

    Args:
        kpool: Tokens per pool.
        ring_len: Ring entries per slot.

    Returns:
        The cases, by id.
    """
    lap = 3 * ring_len * kpool
    last = 2**31 - 1
    return {
        "empty_batch": Case((), "nothing to do is legal"),
        "zero_tokens": Case(((2, 5, 0), (0, 0, 0)), "rows that bring nothing"),
        "one_token": Case(((3, 0, 1),), "the least a row can bring"),
        "one_token_closes": Case(((3, kpool - 1, 1),), "all members but one are old"),
        "kpool_minus_1": Case(((4, 0, kpool - 1),), "stops just before a pool"),
        "kpool": Case(((4, 0, kpool),), "stops with a pool"),
        "kpool_plus_1": Case(((4, 0, kpool + 1),), "stops just after a pool"),
        "mid_pool": Case(((1, kpool // 2, 2 * kpool),), "starts inside a pool"),
        "ring_wrap": Case(
            ((5, lap - 1, ring_len + 1),), "the last entry, then entry 0 again"
        ),
        "slots_out_of_order": Case(
            tuple((slot, 11 + row, 2 + row) for row, slot in enumerate((7, 0, 8, 3))),
            "a row's ring is its slot's, in every phase of a pool",
        ),
        "million": Case(
            ((6, 2**20 - kpool - 1, 2 * kpool), (2, 2**20 + 1, 3)),
            "positions that float32 or 16-bit arithmetic would lose",
        ),
        "last_position": Case(
            ((0, last - 2 * kpool, 2 * kpool + 1),), "the last int32 positions"
        ),
    }


# The batches by name; they have the same ones whatever the sizes.
CASES = tuple(batches(1, 1))


def encode(values: Array | Sequence[float] | float, dtype: DType) -> Array:
    """Rounds numbers to storage form, in dense memory."""
    if dtype == DType.bfloat16:
        values = bfloat16.encode(values)
    return np.array(values, STORAGE[dtype], order="C")


def normal(
    rng: np.random.Generator, shape: Iterable[int], dtype: DType, scale: float = 1
) -> Array:
    """Draws finite values around zero."""
    return encode(scale * rng.standard_normal(tuple(shape)), dtype)


def any_bits(rng: np.random.Generator, shape: Iterable[int], dtype: DType) -> Array:
    """Draws every bit pattern: NaN, infinities and subnormals among them."""
    drawn = rng.bytes(int(np.prod(tuple(shape))) * STORAGE[dtype].itemsize)
    return np.frombuffer(drawn, STORAGE[dtype]).reshape(tuple(shape)).copy()


def from_bits(patterns: Array, dtype: DType) -> Array:
    """Takes integers as the bit patterns of a dtype's elements."""
    storage = STORAGE[dtype]
    return np.asarray(patterns).astype(f"u{storage.itemsize}").view(storage)


def poison(rng: np.random.Generator, shape: Iterable[int], dtype: DType) -> Array:
    """Draws NaNs of any sign and payload: a read of one shows in a result."""
    return from_bits(
        bits(any_bits(rng, shape, dtype)) | bits(encode(np.nan, dtype)), dtype
    )


def ape_for(rng: np.random.Generator, op: SeedTail | TailUpdate) -> Array:
    """Draws a within-pool position embedding of an op."""
    return rng.standard_normal((op.kpool, op.head_dim)).astype(np.float32)


def ring_for(
    rng: np.random.Generator,
    op: SeedTail | TailUpdate,
    requests: Iterable[tuple[int, int, int]] = (),
    max_slots: int = MAX_SLOTS,
) -> Array:
    """Makes a ring that is poison except where requests have live entries.

    Args:
        rng: Source of values.
        op: Whose ring it is.
        requests: (slot, next position, ...) of each.
        max_slots: Slots.

    Returns:
        Storage `[max_slots, 2, ring_len, head_dim]`.
    """
    tail = poison(rng, (max_slots, 2, op.ring_len, op.head_dim), op.dtype)
    for slot, start, *_ in requests:
        for position in range(start - start % op.kpool, start):
            tail[slot, :, position % op.ring_len] = normal(
                rng, (2, op.head_dim), op.dtype
            )
    return tail


# Which of a row's tokens are real. One letter a token, the middle one repeated
# to fill the row: x is a token, . is padding.
PADDINGS = {
    "none": "xxx",
    "first": ".xx",
    "middle": "x.x",
    "last": "xx.",
    "outside": ".x.",
    "all": "...",
}


def padding_mask(padding: str, next_n: int) -> Array:
    """Stretches one of `PADDINGS` to a row.

    Args:
        padding: Its letters.
        next_n: Tokens per row.

    Returns:
        `[next_n]` bool, true for a real token.
    """
    first, middle, last = padding
    letters = (first + middle * (next_n - 2) + last)[:next_n]
    return np.array([letter == "x" for letter in letters])


def place(start: int, mask: Array) -> Array:
    """Numbers a row's real tokens.

    Args:
        start: Position of the first.
        mask: `[next_n]` bool, true for a real token.

    Returns:
        `[next_n]` int32; padding gets assorted negative numbers.
    """
    padding = -1 - np.arange(len(mask), dtype=np.int64) ** 3
    numbered = start + np.cumsum(mask, dtype=np.int64) - 1
    return np.where(mask, numbered, padding).astype(np.int32)


def update_operands(
    rng: np.random.Generator,
    op: TailUpdate,
    positions: Sequence[Array],
    slots: Sequence[int],
) -> tuple[Array, ...]:
    """Draws the operands of one tail_update.

    Args:
        rng: Source of values.
        op: The op.
        positions: One `[next_n]` array a row.
        slots: One a row.

    Returns:
        k, gate, ape, positions, slot_idx.
    """
    shape = (len(slots), op.next_n, op.head_dim)
    return (
        normal(rng, shape, op.dtype),
        normal(rng, shape, op.dtype, 2),
        ape_for(rng, op),
        np.array(positions, np.int32).reshape(shape[:2]),
        np.array(slots, np.uint32),
    )


def batch_on_ring(
    op: Any, case: str, draw_operands: Callable[..., Sequence[Array]]
) -> tuple[Ring, Sequence[Array]]:
    """Draws one of `batches`, with the ring that it finds.

    Args:
        op: The op.
        case: Which.
        draw_operands: `seed_operands`, or what takes the same.

    Returns:
        The ring and the operands.
    """
    rng = np.random.default_rng(1)
    requests = batches(op.kpool, op.ring_len)[case].requests
    ring = Ring(ring_for(rng, op, requests), op.dtype)
    return ring, draw_operands(rng, op, requests)


def seed_operands(
    rng: np.random.Generator,
    op: SeedTail,
    requests: Sequence[tuple[int, int, int]],
) -> tuple[Array, ...]:
    """Draws the operands of one seed_tail.

    Args:
        rng: Source of values.
        op: The op.
        requests: (slot, cached tokens, new tokens) of each.

    Returns:
        k, gate, input_row_offsets, cache_lengths, slot_idx.
    """
    slots, starts, counts = np.array(requests, np.int64).reshape(-1, 3).T
    offsets = np.concatenate(([0], np.cumsum(counts)))
    shape = (int(offsets[-1]), op.head_dim)
    return (
        normal(rng, shape, op.dtype),
        normal(rng, shape, op.dtype),
        offsets.astype(np.uint32),
        starts.astype(np.uint32),
        slots.astype(np.uint32),
    )


# Row, slot, and what `slot_idx` is refused with, where slots 5, 2 and 7 of a ring of
# `MAX_SLOTS` are right.
BAD_SLOTS = (
    (0, MAX_SLOTS, "[0] must be below max_slots (9), got 9"),
    (2, 3545, "[2] must be below max_slots (9), got 3545"),
    (1, 2**32 - 1, "[1] must be below max_slots (9), got 4294967295"),
    (
        2,
        5,
        "[2] must differ from every other row's with real tokens, got 5 a second time",
    ),
)
