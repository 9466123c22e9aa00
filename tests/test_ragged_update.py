"""ragged_update against the oracle: pools, their rows, and the ring."""

from __future__ import annotations

import numpy as np
import pytest

from asserts import assert_same_bits
from cases import CASES, any_bits, batch_on_ring, poison, ring_for
from models import Ring
from ragged_asserts import first_rows, run_ragged_update
from ragged_models import (
    GLM,
    IN_EACH_DTYPE,
    RAGGED_UPDATES,
    RaggedUpdate,
    every_phase,
    on_ring,
    ragged_operands,
    random_requests,
)

BF16 = on_ring(RaggedUpdate, GLM)
F32, F16, _ = (on_ring(RaggedUpdate, op) for op in IN_EACH_DTYPE)


def name(op):
    return op.name.removeprefix("ragged_update_")


every_geometry = pytest.mark.parametrize("op", RAGGED_UPDATES, ids=name)
every_dtype = pytest.mark.parametrize("op", [F32, F16, BF16], ids=name)


@every_geometry
@pytest.mark.parametrize("case", CASES)
def test_every_geometry_and_batch_matches_the_oracle(models, op, case):
    ring, operands = batch_on_ring(op, case, ragged_operands)
    run_ragged_update(models[op], ring, *operands)


@every_geometry
def test_every_alignment_and_count_in_one_batch_matches_the_oracle(models, op):
    rng = np.random.default_rng(2)
    requests = every_phase(op.kpool)
    ring = Ring(ring_for(rng, op, requests, max_slots=len(requests)), op.dtype)
    _, closed = run_ragged_update(models[op], ring, *ragged_operands(rng, op, requests))
    assert np.count_nonzero(closed >= 0) == sum(
        (cached + count) // op.kpool - cached // op.kpool
        for _, cached, count in requests
    )


@every_geometry
def test_a_pool_fills_over_many_short_chunks(models, op):
    rng = np.random.default_rng(3)
    ring = Ring(ring_for(rng, op), op.dtype)
    for start in range(2 * op.ring_len + 1):
        requests = [(4, start, 1), (1, 2 * start, 2)]
        run_ragged_update(models[op], ring, *ragged_operands(rng, op, requests))


@every_geometry
def test_a_chunk_longer_than_the_ring_leaves_its_newest_tokens(models, op):
    rng = np.random.default_rng(4)
    counts = [op.ring_len - 1, op.ring_len, op.ring_len + 1, 3 * op.ring_len]
    requests = [(slot, 7 + slot, count) for slot, count in enumerate(counts)]
    ring = Ring(ring_for(rng, op, requests), op.dtype)
    k, gate, *rest = ragged_operands(rng, op, requests)
    run_ragged_update(models[op], ring, k, gate, *rest)
    offsets = rest[1]
    for (slot, start, count), last in zip(requests, offsets[1:], strict=True):
        kept = min(count, op.ring_len)
        entries = [(start + count - kept + i) % op.ring_len for i in range(kept)]
        rows = slice(int(last) - kept, int(last))
        stored = ring.storage()[slot][:, entries]
        assert_same_bits(stored[0], k[rows], f"keys of slot {slot}")
        assert_same_bits(stored[1], gate[rows], f"gate scores of slot {slot}")


@pytest.mark.parametrize("rows", [64, 1024])
def test_a_large_batch_matches_the_oracle(models, rows):
    rng = np.random.default_rng(5)
    requests = random_requests(rng, rows, 12)
    ring = Ring(ring_for(rng, BF16, requests, max_slots=rows + 3), BF16.dtype)
    operands = ragged_operands(rng, BF16, requests)
    _, closed = run_ragged_update(models[BF16], ring, *operands)
    assert np.count_nonzero(closed >= 0) > rows


def test_cache_lengths_are_unsigned_and_positions_64_bit(models):
    rng = np.random.default_rng(6)
    requests = [(3, 2**31 - 1, 7), (0, 2**32 - 3, 5), (5, 16_777_219, 3)]
    ring = Ring(ring_for(rng, BF16, requests), BF16.dtype)
    operands = ragged_operands(rng, BF16, requests)
    _, closed = run_ragged_update(models[BF16], ring, *operands)
    assert closed.tolist() == [2**29 - 1, 2**29, 2**30 - 1, -1, 2**22, -1]


def test_each_request_has_the_row_range_that_the_formula_gives(models):
    rng = np.random.default_rng(7)
    # Offsets 0, 1, 1, 10, 16: rows from 0, 1, 1, 4 of 16 + 4 * 3 tokens' worth.
    requests = [(0, 3, 1), (1, 3, 0), (2, 2, 9), (3, 4, 6)]
    ring = Ring(ring_for(rng, BF16, requests), BF16.dtype)
    operands = ragged_operands(rng, BF16, requests)
    assert first_rows(operands[3], 4).tolist() == [0, 1, 1, 4]
    _, closed = run_ragged_update(models[BF16], ring, *operands)
    assert closed.tolist() == [0, 0, 1, -1, 1, -1, -1]


def test_token_rows_that_no_request_owns_are_ignored(models):
    rng = np.random.default_rng(8)
    requests = [(2, 3, 4), (7, 9, 5), (1, 3, 6)]
    k, gate, ape, offsets, lengths, slots = ragged_operands(rng, BF16, requests)
    ring = Ring(ring_for(rng, BF16, requests), BF16.dtype)
    # The first request's rows and the last one's are nobody's here.
    _, closed = run_ragged_update(
        models[BF16], ring, k, gate, ape, offsets[1:3], lengths[1:2], slots[1:2]
    )
    assert closed.tolist() == [-1, 2, -1, -1]


def test_a_request_without_tokens_may_carry_any_slot(models):
    rng = np.random.default_rng(9)
    requests = [(2**32 - 1, 5, 0), (2, 3, 3), (2, 7, 0), (9, 0, 0)]
    ring = Ring(ring_for(rng, BF16, requests[1:2]), BF16.dtype)
    operands = ragged_operands(rng, BF16, requests)
    _, closed = run_ragged_update(models[BF16], ring, *operands)
    assert closed[closed >= 0].tolist() == [0]


@every_dtype
def test_every_bit_pattern_is_stashed_unchanged_and_pooled_as_it_is(models, op):
    rng = np.random.default_rng(10)
    requests = [(slot, 5 * slot, 3 + slot % 6) for slot in range(200)]
    operands = ragged_operands(rng, op, requests)
    operands[:2] = (any_bits(rng, operands[0].shape, op.dtype) for _ in range(2))
    tail = any_bits(rng, (200, 2, op.ring_len, op.head_dim), op.dtype)
    run_ragged_update(models[op], Ring(tail, op.dtype), *operands)


@every_geometry
def test_a_large_call_equals_its_requests_alone(models, op):
    rng = np.random.default_rng(11)
    count = 150_000 // (2 * op.ring_len * op.head_dim) + 1
    requests = [
        (count - 1 - row, op.kpool + row % op.kpool, 2 * op.kpool + row % 3)
        for row in range(count)
    ]
    tail = ring_for(rng, op, requests, max_slots=count)
    k, gate, ape, offsets, lengths, slots = ragged_operands(rng, op, requests)
    together, one_by_one = Ring(tail, op.dtype), Ring(tail, op.dtype)
    pooled, closed = models[op](together, k, gate, ape, offsets, lengths, slots)
    firsts = first_rows(offsets, op.kpool)
    for row in range(count):
        own = slice(offsets[row], offsets[row + 1])
        alone, closed_alone = models[op](
            one_by_one,
            k[own],
            gate[own],
            ape,
            np.array([0, requests[row][2]], np.uint32),
            lengths[row : row + 1],
            slots[row : row + 1],
        )
        real = np.count_nonzero(closed_alone >= 0)
        rows = slice(firsts[row], firsts[row] + real)
        assert closed[rows].tolist() == closed_alone[:real].tolist()
        assert_same_bits(pooled[rows], alone[:real], f"pools of request {row}")
    assert_same_bits(together.storage(), one_by_one.storage(), "ring")


@every_dtype
def test_unused_rows_are_zero_whatever_the_memory_held(models, op):
    rng = np.random.default_rng(12)
    tail = poison(rng, (9, 2, op.ring_len, op.head_dim), op.dtype)
    ring = Ring(tail, op.dtype)
    sparse = [(slot, 4 * slot, 1 + slot % 3) for slot in range(9)]
    rows = (sum(count for *_, count in sparse) + 9 * 3) // 4
    for _ in range(3):
        # Fills outputs of the same size with NaN and pool ids, and frees them.
        k, gate, *rest = ragged_operands(rng, op, [(0, 4, 4 * rows)])
        k = any_bits(rng, k.shape, op.dtype)
        _, closed = models[op](ring, k, gate, *rest)
        assert closed.tolist() == list(range(1, rows + 1))
        _, closed = run_ragged_update(
            models[op], ring, *ragged_operands(rng, op, sparse)
        )
        assert closed.tolist() == [-1] * rows
