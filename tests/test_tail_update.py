"""tail_update against the oracle, over geometries, batches and values."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from max.dtype import DType

from asserts import assert_pooled, assert_same_bits, run_tail_update
from cases import (
    CASES,
    DTYPES,
    HEAD_DIMS,
    KPOOLS,
    PADDINGS,
    TAIL_UPDATES,
    any_bits,
    ape_for,
    batches,
    encode,
    from_bits,
    normal,
    padding_mask,
    place,
    ring_for,
    update_operands,
)
from kpool_graph.reference import values
from models import Ring, TailUpdate, bits, declare

# A pool of four that one step brings whole, in each dtype.
WHOLE_POOLS = tuple(declare(TailUpdate(dtype, 32, 4, 4, 7)) for dtype in DTYPES)
BIG_BATCH = declare(TailUpdate(DType.bfloat16, 128, 4, 4, 7))


def name(op):
    return op.name.removeprefix("tail_update_")


every_geometry = pytest.mark.parametrize("op", TAIL_UPDATES, ids=name)
every_dtype = pytest.mark.parametrize("op", WHOLE_POOLS, ids=name)
few_and_many_rows = pytest.mark.parametrize(
    "rows", [64, 1024], ids=["one_thread", "many_threads"]
)


def test_the_geometries_meet_in_every_pair_that_matters():
    widths = {
        kpool: {1, kpool - 1, kpool, kpool + 1, 2 * kpool + 1, 16} - {0}
        for kpool in KPOOLS
    }
    assert {(op.kpool, op.next_n) for op in TAIL_UPDATES} >= {
        (kpool, next_n) for kpool in KPOOLS for next_n in widths[kpool]
    }
    plain_or_wide = {(op.ring_len == op.kpool, op.head_dim) for op in TAIL_UPDATES}
    assert plain_or_wide == set(product((True, False), HEAD_DIMS))
    assert {(op.dtype, op.head_dim) for op in TAIL_UPDATES} == set(
        product(DTYPES, HEAD_DIMS)
    )
    assert {(op.dtype, op.kpool) for op in TAIL_UPDATES} == set(product(DTYPES, KPOOLS))


@every_geometry
@pytest.mark.parametrize("case", CASES)
def test_every_geometry_and_batch_matches_the_oracle(models, op, case):
    rng = np.random.default_rng(1)
    requests = batches(op.kpool, op.ring_len)[case].requests
    ring = Ring(ring_for(rng, op, requests), op.dtype)
    longest = max((count for _, _, count in requests), default=0)
    for done in range(0, max(longest, 1), op.next_n):
        positions = [
            place(start + done, np.arange(op.next_n) < count - done)
            for _, start, count in requests
        ]
        slots = [slot for slot, _, _ in requests]
        operands = update_operands(rng, op, positions, slots)
        run_tail_update(models[op], ring, *operands)


@every_geometry
@pytest.mark.parametrize("padding", PADDINGS)
def test_padding_anywhere_matches_the_oracle(models, op, padding):
    rng = np.random.default_rng(2)
    mask = padding_mask(PADDINGS[padding], op.next_n)
    requests = [(slot, 40 + phase) for phase, slot in enumerate((3, 0, 8, 5, 1))]
    ring = Ring(ring_for(rng, op, requests), op.dtype)
    positions = [place(start, mask) for _, start in requests]
    slots = [slot for slot, _ in requests]
    run_tail_update(models[op], ring, *update_operands(rng, op, positions, slots))


@pytest.mark.parametrize("rows", [64, 1024])
def test_a_large_batch_matches_the_oracle(models, rows):
    rng = np.random.default_rng(3)
    op = BIG_BATCH
    slots = rng.permutation(rows + 3)[:rows]
    starts = rng.integers(0, 2**20, rows)
    ring = ring_for(rng, op, zip(slots, starts, strict=True), max_slots=rows + 3)
    masks = rng.random((rows, op.next_n)) < 0.8
    positions = [place(start, mask) for start, mask in zip(starts, masks, strict=True)]
    operands = update_operands(rng, op, positions, slots)
    _, closed = run_tail_update(models[op], Ring(ring, op.dtype), *operands)
    assert np.count_nonzero(closed >= 0) > rows // 2


def run_whole_pools(models, op, rng, keys, gates):
    """Lets every row of a batch close pool 0 with tokens of this very call."""
    rows = len(keys)
    run_tail_update(
        models[op],
        Ring(ring_for(rng, op, max_slots=rows), op.dtype),
        keys,
        gates,
        ape_for(rng, op),
        np.tile(np.arange(4, dtype=np.int32), (rows, 1)),
        np.arange(rows, dtype=np.uint32),
    )


@every_dtype
@few_and_many_rows
@pytest.mark.parametrize("key_scale", [1e-37, 1e-4, 1, 1e4])
@pytest.mark.parametrize("gate_scale", [0.01, 5, 50, 1000])
def test_accuracy_holds_at_every_scale(models, op, rows, key_scale, gate_scale):
    rng = np.random.default_rng(4)
    shape = (rows, op.next_n, op.head_dim)
    keys = normal(rng, shape, op.dtype, key_scale)
    run_whole_pools(models, op, rng, keys, normal(rng, shape, op.dtype, gate_scale))


@every_dtype
@few_and_many_rows
@pytest.mark.parametrize("gates", ["any_gate", "finite_gates"])
def test_any_bit_pattern_matches_the_oracle(models, op, rows, gates):
    rng = np.random.default_rng(5)
    shape = (rows, op.next_n, op.head_dim)
    draw = any_bits if gates == "any_gate" else normal
    run_whole_pools(
        models, op, rng, any_bits(rng, shape, op.dtype), draw(rng, shape, op.dtype)
    )


def close_pool(models, op, keys, gates, ape=None):
    """Pools four members, and returns the pooled key."""
    ring = Ring(encode(np.full((1, 2, 7, 32), np.nan), op.dtype), op.dtype)
    pooled, closed = models[op](
        ring,
        keys[np.newaxis],
        gates[np.newaxis],
        np.zeros((4, 32), np.float32) if ape is None else ape,
        np.arange(4, dtype=np.int32)[np.newaxis],
        np.zeros(1, np.uint32),
    )
    assert closed.tolist() == [[0]]
    return pooled[0, 0]


@every_dtype
@pytest.mark.parametrize("signs", ["++++", "----", "++--", "+++-"])
@pytest.mark.parametrize("gate_scale", [0, 1])
def test_keys_whose_sum_would_overflow_have_a_finite_mean(
    models, op, signs, gate_scale
):
    rng = np.random.default_rng(6)
    infinity = bits(encode(np.inf, op.dtype))
    largest = values(from_bits(infinity - 1, op.dtype))
    column = [largest if sign == "+" else -largest for sign in signs]
    keys = encode(np.repeat(column, 32).reshape(4, 32), op.dtype)
    gates = normal(rng, (4, 32), op.dtype, gate_scale)
    ape = ape_for(rng, op)
    pooled = close_pool(models, op, keys, gates, ape)
    assert np.isfinite(values(pooled)).all()
    assert_pooled(pooled, keys, gates, ape, op.dtype, signs)


@every_dtype
@few_and_many_rows
def test_subnormal_keys_are_pooled_as_accurately_as_others(models, op, rows):
    rng = np.random.default_rng(7)
    shape = (rows, op.next_n, op.head_dim)
    # At most 7 bits: subnormal in every dtype.
    keys = from_bits(rng.integers(0, 2**7, shape), op.dtype)
    run_whole_pools(models, op, rng, keys, normal(rng, shape, op.dtype, 3))


@every_dtype
@pytest.mark.parametrize("member", range(4))
@pytest.mark.parametrize("operand", ["key", "gate"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_value_stays_in_its_channel_request_and_pool(
    models, op, member, operand, value
):
    rng = np.random.default_rng(8)
    clean = update_operands(
        rng, op, [np.arange(4), np.arange(4), np.arange(4, 8)], [0, 2, 1]
    )
    bad = [array.copy() for array in clean]
    row, channel = 1, 13
    bad[0 if operand == "key" else 1][row, member, channel] = encode(value, op.dtype)
    ring = ring_for(rng, op)
    rings = Ring(ring, op.dtype), Ring(ring, op.dtype)
    pooled_clean, _ = run_tail_update(models[op], rings[0], *clean)
    pooled_bad, _ = run_tail_update(models[op], rings[1], *bad)
    pooled_bad[row, 0, channel] = pooled_clean[row, 0, channel]
    assert_same_bits(pooled_bad, pooled_clean, "all other channels")

    # The request's next pool is clean again, in every channel.
    after = update_operands(rng, op, [np.arange(4, 8)], [2])
    assert_same_bits(
        run_tail_update(models[op], rings[1], *after)[0],
        run_tail_update(models[op], rings[0], *after)[0],
        "next pool",
    )


@every_dtype
@pytest.mark.parametrize("member", range(4))
def test_a_member_gated_by_minus_infinity_weighs_nothing(models, op, member):
    rng = np.random.default_rng(9)
    keys = normal(rng, (4, 32), op.dtype)
    gates = normal(rng, (4, 32), op.dtype)
    gates[member] = encode(-np.inf, op.dtype)
    ape = ape_for(rng, op)
    others = [m for m in range(4) if m != member]
    assert_pooled(
        close_pool(models, op, keys, gates, ape),
        keys[others],
        gates[others],
        ape[others],
        op.dtype,
        f"without member {member}",
    )


@every_dtype
@pytest.mark.parametrize(
    "gates",
    [[-np.inf] * 4, [np.inf, 0, 0, 0], [0, 0, 0, np.inf], [0, np.nan, 0, 0]],
    ids=["all_minus_inf", "first_plus_inf", "last_plus_inf", "one_nan"],
)
def test_a_pool_without_a_finite_maximum_is_nan(models, op, gates):
    gates = encode(np.repeat(np.array(gates)[:, np.newaxis], 32, axis=1), op.dtype)
    pooled = close_pool(models, op, encode(np.ones((4, 32)), op.dtype), gates)
    assert np.isnan(values(pooled)).all()
