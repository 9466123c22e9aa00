"""compress against the oracle: which tokens are pooled, where, and how exactly."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from max.dtype import DType

from asserts import assert_pooled, assert_same_bits
from cases import (
    CASES,
    DTYPES,
    HEAD_DIMS,
    KPOOLS,
    any_bits,
    ape_for,
    batches,
    encode,
    from_bits,
    normal,
)
from kpool_graph import reference_ragged
from kpool_graph.reference import values
from models import bits, declare
from ragged_asserts import run_compress
from ragged_models import (
    COMPRESSES,
    Compress,
    eighths,
    every_phase,
    ragged_operands,
    random_requests,
)

GLM = declare(Compress(DType.bfloat16, 128, 4))
KPOOL_4 = (
    declare(Compress(DType.float32, 8, 4)),
    declare(Compress(DType.float16, 8, 4)),
    GLM,
)


def name(op):
    return op.name.removeprefix("compress_")


every_geometry = pytest.mark.parametrize("op", COMPRESSES, ids=name)
every_dtype = pytest.mark.parametrize("op", KPOOL_4, ids=name)
few_and_many_pools = pytest.mark.parametrize(
    "pools", [20, 1024], ids=["one_thread", "many_threads"]
)


def test_the_geometries_meet_in_every_pair_that_matters():
    assert {op.head_dim for op in COMPRESSES} == set(HEAD_DIMS)
    assert {op.kpool for op in COMPRESSES} == set(KPOOLS)
    assert {(op.dtype, op.head_dim % 16 == 0) for op in COMPRESSES} == set(
        product(DTYPES, (True, False))
    )


@every_geometry
@pytest.mark.parametrize("case", CASES)
def test_every_geometry_and_batch_matches_the_oracle(models, op, case):
    rng = np.random.default_rng(1)
    requests = batches(op.kpool, op.kpool)[case].requests
    run_compress(models[op], *ragged_operands(rng, op, requests))


@every_geometry
def test_every_alignment_and_count_in_one_batch_matches_the_oracle(models, op):
    rng = np.random.default_rng(2)
    requests = every_phase(op.kpool)
    pooled, pool_rows = run_compress(models[op], *ragged_operands(rng, op, requests))
    assert 0 < pool_rows[-1] <= len(pooled)


@pytest.mark.parametrize("rows", [64, 1024])
def test_a_large_batch_matches_the_oracle(models, rows):
    rng = np.random.default_rng(3)
    requests = random_requests(rng, rows, 12)
    run_compress(models[GLM], *ragged_operands(rng, GLM, requests))


def test_cache_lengths_are_unsigned_and_positions_64_bit(models):
    rng = np.random.default_rng(4)
    requests = [(0, 2**31 - 1, 17), (1, 2**32 - 3, 15), (2, 16_777_219, 9)]
    _, pool_rows = run_compress(models[GLM], *ragged_operands(rng, GLM, requests))
    assert pool_rows.tolist() == [0, 4, 7, 9]


def test_token_rows_that_no_request_owns_are_not_pooled(models):
    rng = np.random.default_rng(5)
    requests = [(0, 0, 9), (1, 3, 14), (2, 0, 8)]
    k, gate, ape, offsets, lengths, _ = ragged_operands(rng, GLM, requests)
    # The first request's rows and the last one's are nobody's here.
    pooled, pool_rows = run_compress(
        models[GLM], k, gate, ape, offsets[1:3], lengths[1:2]
    )
    assert (len(pooled), pool_rows.tolist()) == (7, [0, 3])


@every_dtype
def test_rows_past_the_last_pool_are_zero_whatever_the_memory_held(models, op):
    rng = np.random.default_rng(6)
    ape = ape_for(rng, op)
    none = np.zeros(1, np.uint32)
    k, gate = (any_bits(rng, (64, op.head_dim), op.dtype) for _ in range(2))
    full = np.array([0, 64], np.uint32)
    for _ in range(3):
        # Fills an output of the same size with NaN, and frees it.
        models[op](k, gate, ape, full, full // 4, none)
        requests = [(0, 0, 7), (1, 1, 50), (2, 2, 7)]
        _, pool_rows = run_compress(models[op], *ragged_operands(rng, op, requests))
        assert pool_rows[-1] < 16


@every_geometry
def test_a_large_call_equals_its_parts(models, op):
    rng = np.random.default_rng(7)
    # Enough elements for several threads, and parts small enough for one.
    count = 150_000 // (op.kpool * op.head_dim) + 8
    requests = [(row, row % op.kpool, 2 * op.kpool + row % 3) for row in range(count)]
    k, gate, ape, offsets, lengths, _ = ragged_operands(rng, op, requests)
    _, pool_rows = reference_ragged.compress(
        k[:, :1], gate[:, :1], ape[:, :1], offsets, lengths, kpool=op.kpool
    )
    (pooled,) = models[op](k, gate, ape, offsets, pool_rows, lengths)
    for first, last in eighths(count):
        own = slice(offsets[first], offsets[last])
        rows = pool_rows[first : last + 1]
        (alone,) = models[op](
            k[own],
            gate[own],
            ape,
            offsets[first : last + 1] - offsets[first],
            rows - rows[0],
            lengths[first:last],
        )
        alone = alone[: rows[-1] - rows[0]]
        assert_same_bits(pooled[rows[0] : rows[-1]], alone, f"pools from {first} on")


def pool_whole(models, op, keys, gates, ape):
    """Pools keys `[pools, 4, head_dim]` of one request."""
    pools = len(keys)
    tokens = 4 * pools
    (pooled,) = models[op](
        keys.reshape(tokens, -1),
        gates.reshape(tokens, -1),
        ape,
        np.array([0, tokens], np.uint32),
        np.array([0, pools], np.uint32),
        np.zeros(1, np.uint32),
    )
    return pooled


def assert_whole_pools(models, op, rng, keys, gates):
    ape = ape_for(rng, op)
    pooled = pool_whole(models, op, keys, gates, ape)
    for pool, got in enumerate(pooled):
        assert_pooled(got, keys[pool], gates[pool], ape, op.dtype, f"pool {pool}")


@every_dtype
@few_and_many_pools
@pytest.mark.parametrize("key_scale", [1e-37, 1e-4, 1, 1e4])
@pytest.mark.parametrize("gate_scale", [0.01, 5, 1000])
def test_accuracy_holds_at_every_scale(models, op, pools, key_scale, gate_scale):
    rng = np.random.default_rng(8)
    shape = (pools, 4, op.head_dim)
    keys = normal(rng, shape, op.dtype, key_scale)
    assert_whole_pools(models, op, rng, keys, normal(rng, shape, op.dtype, gate_scale))


@every_dtype
@few_and_many_pools
@pytest.mark.parametrize("gates", ["any_gate", "finite_gates"])
def test_any_bit_pattern_matches_the_oracle(models, op, pools, gates):
    rng = np.random.default_rng(9)
    shape = (pools, 4, op.head_dim)
    draw = any_bits if gates == "any_gate" else normal
    keys = any_bits(rng, shape, op.dtype)
    assert_whole_pools(models, op, rng, keys, draw(rng, shape, op.dtype))


@every_dtype
@few_and_many_pools
def test_subnormal_keys_are_pooled_as_accurately_as_others(models, op, pools):
    rng = np.random.default_rng(10)
    shape = (pools, 4, op.head_dim)
    # At most 7 bits: subnormal in every dtype.
    keys = from_bits(rng.integers(0, 2**7, shape), op.dtype)
    assert_whole_pools(models, op, rng, keys, normal(rng, shape, op.dtype, 3))


@every_dtype
@pytest.mark.parametrize("signs", ["++++", "----", "++--", "+++-"])
def test_keys_whose_sum_would_overflow_have_a_finite_mean(models, op, signs):
    rng = np.random.default_rng(11)
    infinity = bits(encode(np.inf, op.dtype))
    largest = values(from_bits(infinity - 1, op.dtype))
    column = [largest if sign == "+" else -largest for sign in signs]
    shape = (1, 4, op.head_dim)
    keys = encode(np.repeat(column, op.head_dim).reshape(shape), op.dtype)
    gates = normal(rng, shape, op.dtype)
    ape = ape_for(rng, op)
    pooled = pool_whole(models, op, keys, gates, ape)
    assert np.isfinite(values(pooled)).all()
    assert_pooled(pooled[0], keys[0], gates[0], ape, op.dtype, signs)


@every_dtype
@pytest.mark.parametrize("member", range(4))
@pytest.mark.parametrize("operand", ["key", "gate"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_value_stays_in_its_channel_and_pool(models, op, member, operand, value):
    rng = np.random.default_rng(12)
    shape = (5, 4, op.head_dim)
    clean = [normal(rng, shape, op.dtype) for _ in range(2)]
    bad = [array.copy() for array in clean]
    bad[0 if operand == "key" else 1][2, member, 5] = encode(value, op.dtype)
    ape = ape_for(rng, op)
    want = pool_whole(models, op, *clean, ape)
    got = pool_whole(models, op, *bad, ape)
    assert_pooled(got[2], bad[0][2], bad[1][2], ape, op.dtype, "the bad pool")
    got[2, 5] = want[2, 5]
    assert_same_bits(got, want, "all other channels")
