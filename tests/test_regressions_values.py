"""Faults seen in other code, by case number: dtypes, values, shapes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from max.dtype import DType
from max.graph import Graph, TensorType

import kpool_graph
from asserts import assert_pooled, assert_same_bits, run_seed_tail, run_tail_update
from cases import (
    DTYPES,
    KPOOLS,
    TAIL_UPDATES,
    encode,
    ring_for,
    seed_operands,
    update_operands,
)
from kpool_graph.reference import values
from models import Ring, SeedTail, TailUpdate, compile_together, declare
from ramp import ramp, step, untouched

F32, F16, BF16 = DTYPES
SEED = declare(SeedTail(F32, 8, 4, 4))
TWO = declare(TailUpdate(F32, 8, 4, 2, 4))
THIRTY_THREE = declare(TailUpdate(F16, 96, 16, 33, 48))
IN_EACH_DTYPE = tuple(declare(TailUpdate(dtype, 32, 4, 4, 7)) for dtype in DTYPES)


@pytest.mark.parametrize(
    ("ring", "operand", "dtype", "text"),
    [
        (BF16, "k", F16, "k.dtype must be bfloat16, got float16"),
        (BF16, "k", F32, "k.dtype must be bfloat16, got float32"),
        (BF16, "gate", F32, "gate.dtype must be bfloat16, got float32"),
        (F32, "k", BF16, "k.dtype must be float32, got bfloat16"),
        (F32, "ape", BF16, "ape.dtype must be float32, got bfloat16"),
        (F32, "positions", DType.int64, "positions.dtype must be int32, got int64"),
        (F32, "slot_idx", DType.int32, "slot_idx.dtype must be uint32, got int32"),
    ],
    ids=lambda each: each.name if isinstance(each, DType) else each,
)
def test_case_25_both_dtypes_of_a_mismatch_are_named(ring, operand, dtype, text):
    """Case 25: a mismatch is refused while the graph is built, same width or not."""
    names = ("tail", "k", "gate", "ape", "positions", "slot_idx")
    types = dict(zip(names, TailUpdate(ring, 8, 4, 2, 4).input_types, strict=True))
    types[operand] = TensorType(dtype, types[operand].shape, types[operand].device)
    with (
        Graph("mismatch", input_types=list(types.values())) as graph,
        pytest.raises(kpool_graph.OperandError) as error,
    ):
        kpool_graph.tail_update(*graph.inputs, kpool=4)
    assert str(error.value) == f"tail_update: {text}"


def thousand_pools(rng, op):
    rows = 1000
    positions = np.tile(np.arange(4, dtype=np.int32), (rows, 1))
    return update_operands(rng, op, positions, range(rows))


@pytest.mark.parametrize("op", IN_EACH_DTYPE, ids=lambda op: op.dtype.name)
def test_case_26_a_thousand_random_pools_are_within_the_bound(models, op):
    """Case 26: random keys and gates, non-zero ape."""
    rng = np.random.default_rng(26)
    ring = Ring(ring_for(rng, op, max_slots=1000), op.dtype)
    _, closed = run_tail_update(models[op], ring, *thousand_pools(rng, op))
    assert (closed == 0).all()


@pytest.mark.parametrize("op", IN_EACH_DTYPE, ids=lambda op: op.dtype.name)
@pytest.mark.parametrize("mistake", ["ape_is_zero", "two_ape_rows_swapped"])
def test_case_26_the_check_notices_a_wrong_ape(models, op, mistake):
    """Case 26, the control: every pool must fail against a wrong oracle."""
    rng = np.random.default_rng(26)
    k, gate, ape, positions, slots = thousand_pools(rng, op)
    ring = Ring(ring_for(rng, op, max_slots=1000), op.dtype)
    pooled, _ = models[op](ring, k, gate, ape, positions, slots)
    wrong = ape * 0 if mistake == "ape_is_zero" else ape[[0, 2, 1, 3]]
    for row in range(1000):
        assert_pooled(pooled[row, 0], k[row], gate[row], ape, op.dtype, f"row {row}")
        with pytest.raises(AssertionError, match="channels are wrong"):
            assert_pooled(pooled[row, 0], k[row], gate[row], wrong, op.dtype, "")


def test_case_27_empty_batches_and_requests_are_legal(models):
    """Case 27: B=0, offsets [0,3,3,7], zero tokens, every position padded."""
    rng = np.random.default_rng(27)
    ring = Ring(ring_for(rng, SEED), F32)
    run_seed_tail(models[SEED], ring, *seed_operands(rng, SEED, []))
    requests = [(4, 0, 3), (8, 2, 0), (1, 5, 4)]
    operands = seed_operands(rng, SEED, requests)
    assert operands[2].tolist() == [0, 3, 3, 7]
    run_seed_tail(models[SEED], ring, *operands)
    run_seed_tail(models[SEED], ring, *seed_operands(rng, SEED, [(4, 3, 0), (8, 2, 0)]))
    before = ring.storage()
    run_tail_update(models[TWO], ring, *update_operands(rng, TWO, [], []))
    padding = [np.array([-1, -1])] * 3
    operands = update_operands(rng, TWO, padding, [0, 0, 99])
    _, closed = run_tail_update(models[TWO], ring, *operands)
    assert (closed == -1).all()
    assert_same_bits(ring.storage(), before, "ring")


def exact_ramp(call):
    """Requires the pools of a ramp, fed in full steps, to be exact."""
    op = call.op
    ring = untouched(op, max_slots=2)
    total = op.next_n * max(3, -(-2 * op.kpool // op.next_n))
    closed = []
    for start in range(0, total, op.next_n):
        positions = [range(start, start + op.next_n)]
        closed += step({op: call}, op, ring, positions, slots=[1])[0]
    for pool, value in closed:
        exact = op.kpool * pool + (op.kpool - 1) / 2
        assert value == values(encode(exact, op.dtype)), (pool, value, exact)
    assert [pool for pool, _ in closed] == list(range(total // op.kpool))


@pytest.mark.parametrize("op", TAIL_UPDATES, ids=lambda op: op.name)
def test_case_28_a_ramp_is_exact_in_every_geometry(models, op):
    """Case 28: kpool, next_n and head_dim in the mix of the geometry table."""
    exact_ramp(models[op])


@pytest.mark.slow
def test_case_28_a_ramp_is_exact_in_all_of_its_geometries():
    """Case 28: every kpool with every next_n and head_dim that the case lists."""
    geometries = [
        TailUpdate(F32, head_dim, kpool, next_n, kpool)
        for head_dim, kpool in product((8, 64, 128, 256), KPOOLS)
        for next_n in sorted({1, kpool - 1, kpool, kpool + 1, 2 * kpool + 1} - {0})
    ]
    for call in compile_together(geometries).values():
        exact_ramp(call)


def test_case_28_a_step_of_33_tokens_at_kpool_16_fills_two_of_three_columns(models):
    """Case 28: ids [0, 1, -1]."""
    op = THIRTY_THREE
    k = ramp(op, np.arange(33))[np.newaxis]
    pooled, closed = models[op](
        untouched(op),
        k,
        np.zeros_like(k),
        np.zeros((16, op.head_dim), np.float32),
        np.arange(33, dtype=np.int32)[np.newaxis],
        np.zeros(1, np.uint32),
    )
    assert closed.tolist() == [[0, 1, -1]]
    assert values(pooled[0, :, 0]).tolist() == [7.5, 23.5, 0]


@pytest.mark.parametrize("op", IN_EACH_DTYPE, ids=lambda op: op.dtype.name)
def test_case_36_each_dtype_runs_on_the_cpu(models, op):
    """Case 36: two ramp pools, and the second once more after a rewind."""
    ring = untouched(op)
    assert step(models, op, ring, [range(4)], slots=[2]) == [[(0, 1.5)]]
    assert step(models, op, ring, [range(4, 8)], slots=[2]) == [[(1, 5.5)]]
    assert step(models, op, ring, [range(6, 10)], slots=[2]) == [[(1, 5.5)]]
