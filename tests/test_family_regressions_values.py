"""Faults seen in other code, by case number: values, widths, long caches."""

from __future__ import annotations

import numpy as np
import pytest
from max.dtype import DType
from max.graph import Graph, TensorType

import kpool_graph
from asserts import assert_pooled
from cases import ring_for
from models import HOST, Ring, declare
from ragged_asserts import run_compress, run_ragged_update, run_ring_close
from ragged_models import (
    GLM,
    IN_EACH_DTYPE,
    ExpandTopk,
    PoolRowOffsets,
    RaggedUpdate,
    RingClose,
    on_keys,
    on_ring,
    ragged_operands,
    row_tables,
)

GLM_CLOSE = on_ring(RingClose, GLM)
GLM_RAGGED = on_ring(RaggedUpdate, GLM)
EXPAND = declare(ExpandTopk(4, 512, True))
ROWS = declare(PoolRowOffsets(4))
COMPRESS_IN_EACH_DTYPE = [on_keys(op) for op in IN_EACH_DTYPE]


def thousand_pools(rng, op):
    return ragged_operands(rng, op, [(0, 0, 1_500), (1, 0, 2_500)])


@pytest.mark.parametrize("op", COMPRESS_IN_EACH_DTYPE, ids=lambda op: op.dtype.name)
def test_case_26_a_thousand_random_pools_are_within_the_bound(models, op):
    """Case 26: random keys and gates, non-zero ape."""
    rng = np.random.default_rng(26)
    _, rows = run_compress(models[op], *thousand_pools(rng, op))
    assert rows[-1] == 1_000


@pytest.mark.parametrize("op", COMPRESS_IN_EACH_DTYPE, ids=lambda op: op.dtype.name)
@pytest.mark.parametrize("mistake", ["ape_is_zero", "two_ape_rows_swapped"])
def test_case_26_the_check_notices_a_wrong_ape(models, op, mistake):
    """Case 26, the control: every pool must fail against a wrong oracle."""
    rng = np.random.default_rng(26)
    k, gate, ape, *rest = thousand_pools(rng, op)
    pooled, _ = run_compress(models[op], k, gate, ape, *rest)
    wrong = ape * 0 if mistake == "ape_is_zero" else ape[[0, 2, 1, 3]]
    for row, got in enumerate(pooled):
        members = slice(4 * row, 4 * row + 4)
        with pytest.raises(AssertionError, match="channels are wrong"):
            assert_pooled(got, k[members], gate[members], wrong, op.dtype, "")


@pytest.mark.parametrize(("tail", "width"), [(True, 2051), (False, 2048)])
def test_case_29_the_width_is_that_of_the_pools_and_the_tail(models, tail, width):
    """Case 29: topk 2048 at kpool 4, with and without the newest positions."""
    types = [
        TensorType(DType.int32, ("total_tokens", 2048 // 4), HOST),
        TensorType(DType.uint32, ("offsets",), HOST),
        TensorType(DType.uint32, ("batch",), HOST),
    ]
    with Graph("width", input_types=types) as graph:
        selected = kpool_graph.expand_topk(
            *graph.inputs, kpool=4, always_select_tail=tail
        )
    assert (selected.dtype, int(selected.shape[1])) == (DType.int32, width)
    op = declare(ExpandTopk(4, 512, tail))
    ids = np.arange(512, dtype=np.int32)[np.newaxis]
    (got,) = models[op](ids, *row_tables((0, 2050, 1))[:2])
    assert got.tolist() == [list(range(2051))[:width]]


# Of these lengths, 1,048,573 leaves one member of a pool in the ring, and 16,777,219,
# which float32 cannot hold, three.
LONG = [(6, 1_048_573, 3), (1, 16_777_219, 6), (3, 16_777_219, 1)]


def test_case_31_long_caches_have_exact_offsets(models):
    """Case 31: cache lengths 1,048,573 and 16,777,219."""
    offsets, lengths, _ = row_tables(*LONG)
    (rows,) = models[ROWS](lengths, offsets)
    assert rows.dtype == np.uint32
    assert rows.tolist() == [0, 0, 1, 1]


def test_case_31_long_caches_close_the_right_pools(models):
    """Case 31: the same lengths through the ops."""
    rng = np.random.default_rng(31)
    operands = ragged_operands(rng, GLM, LONG)
    ring = Ring(ring_for(rng, GLM, LONG), GLM.dtype)
    _, closed = run_ring_close(models[GLM_CLOSE], ring, *operands)
    assert (closed.dtype, closed.tolist()) == (
        np.int32,
        [262_143, 4_194_304, 4_194_304],
    )
    _, rows = run_compress(models[on_keys(GLM)], *operands)
    assert (rows.dtype, rows.tolist()) == (np.uint32, [0, 0, 1, 1])
    _, closed = run_ragged_update(models[GLM_RAGGED], ring, *operands)
    assert closed.dtype == np.int32
    assert closed[closed >= 0].tolist() == [262_143, 4_194_304, 4_194_305, 4_194_304]


def test_case_31_long_caches_select_exact_positions(models):
    """Case 31: the same lengths in expand_topk."""
    ids = np.full((2, EXPAND.pool_topk), -1, np.int32)
    ids[:, 0] = [262_142, 4_194_303]
    offsets, lengths, _ = row_tables((0, 1_048_573, 1), (1, 16_777_219, 1))
    (selected,) = models[EXPAND](ids, offsets, lengths)
    assert selected.dtype == np.int32
    assert [[p for p in row if p >= 0] for row in selected.tolist()] == [
        [*range(1_048_568, 1_048_572), 1_048_572, 1_048_573],
        [*range(16_777_212, 16_777_216)],
    ]
