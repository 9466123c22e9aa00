"""seed_tail against the oracle: which tokens stay, where, and nothing else."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from max.dtype import DType

from asserts import assert_same_bits, run_seed_tail
from cases import (
    CASES,
    DTYPES,
    HEAD_DIMS,
    KPOOLS,
    SEED_TAILS,
    any_bits,
    batch_on_ring,
    poison,
    ring_for,
    seed_operands,
)
from models import Ring, SeedTail, declare

GLM = declare(SeedTail(DType.bfloat16, 128, 4, 4))
OF_EACH_DTYPE = tuple(declare(SeedTail(dtype, 32, 4, 7)) for dtype in DTYPES)


def name(op):
    return op.name.removeprefix("seed_tail_")


every_geometry = pytest.mark.parametrize("op", SEED_TAILS, ids=name)


def test_the_geometries_meet_in_every_pair_that_matters():
    assert {op.head_dim for op in SEED_TAILS} == set(HEAD_DIMS)
    assert {(op.dtype, op.head_dim % 16 == 0) for op in SEED_TAILS} == set(
        product(DTYPES, (True, False))
    )
    assert {(op.kpool, op.ring_len == op.kpool) for op in SEED_TAILS} == set(
        product(KPOOLS, (True, False))
    )


@every_geometry
@pytest.mark.parametrize("case", CASES)
def test_every_geometry_and_batch_matches_the_oracle(models, op, case):
    ring, operands = batch_on_ring(op, case, seed_operands)
    run_seed_tail(models[op], ring, *operands)


@every_geometry
def test_a_pool_fills_over_many_short_chunks(models, op):
    rng = np.random.default_rng(2)
    ring = Ring(ring_for(rng, op), op.dtype)
    for start in range(2 * op.ring_len + 1):
        requests = [(4, start, 1), (1, 2 * start, 2)]
        run_seed_tail(models[op], ring, *seed_operands(rng, op, requests))


@pytest.mark.parametrize("rows", [64, 1024])
def test_a_large_batch_matches_the_oracle(models, rows):
    rng = np.random.default_rng(3)
    slots = rng.permutation(rows + 3)[:rows]
    starts = rng.integers(0, 2**20, rows)
    counts = rng.integers(0, 12, rows)
    ring = Ring(ring_for(rng, GLM, max_slots=rows + 3), GLM.dtype)
    requests = list(zip(slots, starts, counts, strict=True))
    run_seed_tail(models[GLM], ring, *seed_operands(rng, GLM, requests))


def test_cache_lengths_are_unsigned_and_positions_64_bit(models):
    rng = np.random.default_rng(4)
    requests = [(3, 2**31 - 1, 7), (0, 2**32 - 3, 5), (5, 16_777_219, 3)]
    ring = Ring(ring_for(rng, GLM), GLM.dtype)
    run_seed_tail(models[GLM], ring, *seed_operands(rng, GLM, requests))


def test_token_rows_that_no_request_owns_are_ignored(models):
    rng = np.random.default_rng(5)
    k, gate, offsets, lengths, slots = seed_operands(
        rng, GLM, [(2, 0, 4), (7, 9, 5), (1, 3, 6)]
    )
    ring = Ring(ring_for(rng, GLM), GLM.dtype)
    # The first request's rows and the last one's are nobody's here.
    run_seed_tail(models[GLM], ring, k, gate, offsets[1:3], lengths[1:2], slots[1:2])


def test_a_request_without_tokens_may_carry_any_slot(models):
    rng = np.random.default_rng(6)
    requests = [(2**32 - 1, 5, 0), (2, 4, 3), (2, 7, 0), (9, 0, 0)]
    ring = Ring(ring_for(rng, GLM), GLM.dtype)
    run_seed_tail(models[GLM], ring, *seed_operands(rng, GLM, requests))


@pytest.mark.parametrize("op", OF_EACH_DTYPE, ids=name)
def test_every_bit_pattern_is_copied_unchanged(models, op):
    rng = np.random.default_rng(7)
    _, _, *tables = seed_operands(rng, op, [(slot, 0, 3) for slot in range(8)])
    k, gate = (any_bits(rng, (24, op.head_dim), op.dtype) for _ in range(2))
    tail = poison(rng, (8, 2, op.ring_len, op.head_dim), op.dtype)
    ring = Ring(tail, op.dtype)
    run_seed_tail(models[op], ring, k, gate, *tables)
    seeded = ring.storage()[:, :, :3]
    assert_same_bits(seeded[:, 0].reshape(k.shape), k, "keys")
    assert_same_bits(seeded[:, 1].reshape(gate.shape), gate, "gate scores")
