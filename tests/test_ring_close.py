"""ring_close against the oracle: which pools close, from which members."""

from __future__ import annotations

import numpy as np
import pytest

from asserts import assert_same_bits
from cases import CASES, any_bits, batch_on_ring, ring_for
from models import Ring
from ragged_asserts import run_ring_close
from ragged_models import (
    GLM,
    IN_EACH_DTYPE,
    RING_CLOSES,
    RingClose,
    eighths,
    every_phase,
    on_ring,
    ragged_operands,
    random_requests,
)

BF16 = on_ring(RingClose, GLM)
WIDE_RING = next(op for op in RING_CLOSES if (op.kpool, op.ring_len) == (8, 16))


def name(op):
    return op.name.removeprefix("ring_close_")


every_geometry = pytest.mark.parametrize("op", RING_CLOSES, ids=name)
every_dtype = pytest.mark.parametrize(
    "op", [on_ring(RingClose, op) for op in IN_EACH_DTYPE], ids=name
)


@every_geometry
@pytest.mark.parametrize("case", CASES)
def test_every_geometry_and_batch_matches_the_oracle(models, op, case):
    ring, operands = batch_on_ring(op, case, ragged_operands)
    run_ring_close(models[op], ring, *operands)


@every_geometry
def test_every_alignment_and_count_in_one_batch_matches_the_oracle(models, op):
    rng = np.random.default_rng(2)
    requests = every_phase(op.kpool)
    ring = Ring(ring_for(rng, op, requests, max_slots=len(requests)), op.dtype)
    _, closed = run_ring_close(models[op], ring, *ragged_operands(rng, op, requests))
    reached = [
        cached // op.kpool
        if cached % op.kpool and (cached + count) // op.kpool > cached // op.kpool
        else -1
        for _, cached, count in requests
    ]
    assert closed.tolist() == reached
    assert op.kpool == 1 or max(reached) == 5


@pytest.mark.parametrize("op", [op for op in RING_CLOSES if op.kpool > 1], ids=name)
def test_a_pending_pool_is_found_wherever_it_lies_in_the_ring(models, op):
    rng = np.random.default_rng(3)
    last = op.ring_len
    requests = [(last - pool, (pool + 1) * op.kpool - 1, 1) for pool in range(last + 1)]
    ring = Ring(ring_for(rng, op, requests, max_slots=last + 1), op.dtype)
    _, closed = run_ring_close(models[op], ring, *ragged_operands(rng, op, requests))
    assert closed.tolist() == list(range(last + 1))


@pytest.mark.parametrize("rows", [64, 1024])
def test_a_large_batch_matches_the_oracle(models, rows):
    rng = np.random.default_rng(4)
    requests = random_requests(rng, rows, 12)
    ring = Ring(ring_for(rng, BF16, requests, max_slots=rows + 3), BF16.dtype)
    _, closed = run_ring_close(
        models[BF16], ring, *ragged_operands(rng, BF16, requests)
    )
    assert np.count_nonzero(closed >= 0) > rows // 2


def test_cache_lengths_are_unsigned_and_positions_64_bit(models):
    rng = np.random.default_rng(5)
    requests = [(3, 2**31 - 1, 7), (0, 2**32 - 3, 5), (5, 16_777_219, 3)]
    ring = Ring(ring_for(rng, BF16, requests), BF16.dtype)
    _, closed = run_ring_close(
        models[BF16], ring, *ragged_operands(rng, BF16, requests)
    )
    assert closed.tolist() == [2**29 - 1, 2**30 - 1, 2**22]


def test_token_rows_that_no_request_owns_close_nothing(models):
    rng = np.random.default_rng(6)
    requests = [(2, 3, 4), (7, 9, 5), (1, 3, 6)]
    k, gate, ape, offsets, lengths, slots = ragged_operands(rng, BF16, requests)
    ring = Ring(ring_for(rng, BF16, requests), BF16.dtype)
    # The first request's rows and the last one's are nobody's here.
    _, closed = run_ring_close(
        models[BF16], ring, k, gate, ape, offsets[1:3], lengths[1:2], slots[1:2]
    )
    assert closed.tolist() == [2]


def test_a_request_without_tokens_may_carry_any_slot(models):
    rng = np.random.default_rng(7)
    requests = [(2**32 - 1, 5, 0), (2, 3, 3), (2, 7, 0), (9, 0, 0)]
    ring = Ring(ring_for(rng, BF16, requests[1:2]), BF16.dtype)
    _, closed = run_ring_close(
        models[BF16], ring, *ragged_operands(rng, BF16, requests)
    )
    assert closed.tolist() == [-1, 0, -1, -1]


def test_a_chunk_of_many_pools_closes_only_the_pending_one(models):
    rng = np.random.default_rng(8)
    requests = [(4, 10, 100), (2, 8, 100)]
    ring = Ring(ring_for(rng, WIDE_RING, requests), WIDE_RING.dtype)
    _, closed = run_ring_close(
        models[WIDE_RING], ring, *ragged_operands(rng, WIDE_RING, requests)
    )
    assert closed.tolist() == [1, -1]


@every_dtype
@pytest.mark.parametrize("values", ["tokens", "ring", "both"])
def test_any_bit_pattern_matches_the_oracle(models, op, values):
    rng = np.random.default_rng(9)
    requests = [(slot, 4 * slot + slot % 3 + 1, 4) for slot in range(200)]
    tail = ring_for(rng, op, requests, max_slots=200)
    operands = ragged_operands(rng, op, requests)
    if values != "tokens":
        tail = any_bits(rng, tail.shape, op.dtype)
    if values != "ring":
        operands[:2] = (any_bits(rng, operands[0].shape, op.dtype) for _ in range(2))
    _, closed = run_ring_close(models[op], Ring(tail, op.dtype), *operands)
    assert closed.tolist() == list(range(200))


@every_geometry
def test_a_large_call_equals_its_parts(models, op):
    rng = np.random.default_rng(10)
    # Enough elements for several threads, and parts small enough for one.
    count = 150_000 // (2 * op.kpool * op.head_dim) + 8
    requests = [
        (count - 1 - row, op.kpool + row % op.kpool, op.kpool) for row in range(count)
    ]
    tail = ring_for(rng, op, requests, max_slots=count)
    k, gate, ape, offsets, lengths, slots = ragged_operands(rng, op, requests)
    ring = Ring(tail, op.dtype)
    pooled, closed = models[op](ring, k, gate, ape, offsets, lengths, slots)
    for first, last in eighths(count):
        own = slice(offsets[first], offsets[last])
        alone, closed_alone = models[op](
            ring,
            k[own],
            gate[own],
            ape,
            offsets[first : last + 1] - offsets[first],
            lengths[first:last],
            slots[first:last],
        )
        assert closed[first:last].tolist() == closed_alone.tolist()
        assert_same_bits(pooled[first:last], alone, f"pools from {first} on")


@every_dtype
def test_unused_rows_are_zero_whatever_the_memory_held(models, op):
    rng = np.random.default_rng(11)
    ring = Ring(any_bits(rng, (9, 2, op.ring_len, op.head_dim), op.dtype), op.dtype)
    closing = [(slot, 3, 2) for slot in range(9)]
    open_still = [(slot, slot % 3, 2 - slot % 3) for slot in range(9)]
    for _ in range(3):
        # Fills outputs of the same size with NaN and pool ids, and frees them.
        operands = ragged_operands(rng, op, closing)
        assert (models[op](ring, *operands)[1] == 0).all()
        _, closed = run_ring_close(
            models[op], ring, *ragged_operands(rng, op, open_still)
        )
        assert (closed == -1).all()
