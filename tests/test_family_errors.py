"""What the ragged ops refuse while running on a CPU: before a byte is written."""

from __future__ import annotations

import numpy as np
import pytest
from max.dtype import DType
from max.graph import TensorType

import kpool_graph
from asserts import assert_same_bits, message
from cases import BAD_SLOTS, MAX_SLOTS, any_bits, ring_for
from models import HOST, OwnGraph, Ring, SeedTail, declare, to_buffer, to_storage
from ragged_asserts import (
    run_compress,
    run_expand_topk,
    run_ragged_update,
    run_ring_close,
)
from ragged_models import (
    GLM,
    ExpandTopk,
    PoolRowOffsets,
    RaggedUpdate,
    RingClose,
    on_keys,
    on_ring,
    ragged_operands,
)

RING = SeedTail(DType.float32, 8, 4, 4).ring_type
CLOSE = on_ring(RingClose, GLM)
UPDATE = on_ring(RaggedUpdate, GLM)
COMPRESS = on_keys(GLM)
EXPAND = declare(ExpandTopk(3, 4, True))
ROWS = declare(PoolRowOffsets(4))
RUN_ON_RING = {CLOSE: run_ring_close, UPDATE: run_ragged_update}
# Where the tables are among the operands.
TABLES = {"input_row_offsets": 3, "slot_idx": 5}
# Thirteen tokens; compress pools one request's: rows [0, 0, 1, 1].
GOOD = [(5, 0, 3), (2, 4, 7), (7, 9, 3)]

on_a_ring = pytest.mark.parametrize("op", RUN_ON_RING, ids=lambda op: op.stem)
bad_offsets = pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (2, 2, "[2] must not be below input_row_offsets[1] (3), got 2"),
        (3, 0, "[3] must not be below input_row_offsets[2] (10), got 0"),
        (3, 14, "[3] must be at most total_tokens (13), got 14"),
        (3, 2**32 - 1, "[3] must be at most total_tokens (13), got 4294967295"),
    ],
)


def refused(call, *operands):
    """Requires an error, and returns its text."""
    with pytest.raises(ValueError) as error:
        call(*operands)
    return message(error)


def refused_by_ring(call, ring, *operands):
    """Requires an error that left the ring alone, and returns its text."""
    before = ring.storage()
    text = refused(call, ring, *operands)
    assert_same_bits(ring.storage(), before, "ring after the error")
    return text


def check_refusal(models, op, operand, at, value, text):
    """Requires an error for one wrong entry of a table, and none once it is mended."""
    rng = np.random.default_rng(1)
    operands = ragged_operands(rng, op, GOOD)
    ring = Ring(ring_for(rng, op, GOOD), op.dtype)
    table = operands[TABLES[operand]]
    good, table[at] = int(table[at]), value
    assert refused_by_ring(models[op], ring, *operands) == f"{op.stem}: {operand}{text}"
    table[at] = good
    RUN_ON_RING[op](models[op], ring, *operands)


@on_a_ring
@pytest.mark.parametrize(("row", "slot", "text"), BAD_SLOTS)
def test_a_bad_slot_is_refused(models, op, row, slot, text):
    check_refusal(models, op, "slot_idx", row, slot, text)


@on_a_ring
@bad_offsets
def test_bad_row_offsets_are_refused(models, op, at, value, text):
    check_refusal(models, op, "input_row_offsets", at, value, text)


@bad_offsets
def test_compress_refuses_bad_row_offsets(models, at, value, text):
    rng = np.random.default_rng(3)
    k, gate, ape, offsets, lengths, _ = ragged_operands(rng, COMPRESS, GOOD)
    pool_rows = np.array([0, 0, 1, 1], np.uint32)
    good, offsets[at] = int(offsets[at]), value
    error = refused(models[COMPRESS], k, gate, ape, offsets, pool_rows, lengths)
    assert error == f"compress: input_row_offsets{text}"
    offsets[at] = good
    run_compress(models[COMPRESS], k, gate, ape, offsets, lengths)


@pytest.mark.parametrize(
    ("pool_rows", "text"),
    [
        (
            [1, 1, 2, 2],
            "[0] must be 0, the whole pools of the requests before it, got 1",
        ),
        (
            [0, 1, 1, 1],
            "[1] must be 0, the whole pools of the requests before it, got 1",
        ),
        (
            [0, 0, 2, 2],
            "[2] must be 1, the whole pools of the requests before it, got 2",
        ),
        (
            [0, 0, 0, 0],
            "[2] must be 1, the whole pools of the requests before it, got 0",
        ),
        (
            [0, 0, 1, 2**32 - 1],
            "[3] must be 1, the whole pools of the requests before it, got 4294967295",
        ),
    ],
    ids=str,
)
def test_compress_refuses_pool_row_offsets_that_disagree(models, pool_rows, text):
    rng = np.random.default_rng(4)
    k, gate, ape, offsets, lengths, _ = ragged_operands(rng, COMPRESS, GOOD)
    table = np.array(pool_rows, np.uint32)
    error = refused(models[COMPRESS], k, gate, ape, offsets, table, lengths)
    assert error == f"compress: pool_row_offsets{text}"
    run_compress(models[COMPRESS], k, gate, ape, offsets, lengths)


@bad_offsets
def test_expand_topk_refuses_bad_row_offsets(models, at, value, text):
    offsets = np.array([0, 3, 10, 13], np.uint32)
    lengths = np.array([0, 4, 9], np.uint32)
    ids = np.zeros((13, EXPAND.pool_topk), np.int32)
    good, offsets[at] = int(offsets[at]), value
    error = refused(models[EXPAND], ids, offsets, lengths)
    assert error == f"expand_topk: input_row_offsets{text}"
    offsets[at] = good
    run_expand_topk(models[EXPAND], ids, offsets, lengths)


@on_a_ring
def test_a_slot_is_refused_even_where_nothing_would_be_read_or_stashed(models, op):
    rng = np.random.default_rng(5)
    requests = [(0, 0, 4), (MAX_SLOTS, 0, 4)]
    ring = Ring(ring_for(rng, op), op.dtype)
    operands = ragged_operands(rng, op, requests)
    assert refused_by_ring(models[op], ring, *operands) == (
        f"{op.stem}: slot_idx[1] must be below max_slots (9), got 9"
    )


@on_a_ring
@pytest.mark.parametrize("row", [0, 1023])
def test_a_bad_row_of_a_large_batch_stops_every_row(models, op, row):
    rng = np.random.default_rng(6)
    requests = [(slot, 3, 4) for slot in range(1024)]
    ring = Ring(ring_for(rng, op, requests, max_slots=1024), op.dtype)
    operands = ragged_operands(rng, op, requests)
    operands[5][row] = 1024
    assert refused_by_ring(models[op], ring, *operands) == (
        f"{op.stem}: slot_idx[{row}] must be below max_slots (1024), got 1024"
    )


ON_RING = {
    "k": (3, 8),
    "gate": (3, 8),
    "ape": (4, 8),
    "input_row_offsets": (3,),
    "cache_lengths": (2,),
    "slot_idx": (2,),
}
# The operands that follow the ring, with sizes that agree.
SHAPES = {
    "ring_close": ON_RING,
    "ragged_update": ON_RING,
    "compress": {
        "k": (3, 8),
        "gate": (3, 8),
        "ape": (4, 8),
        "input_row_offsets": (3,),
        "pool_row_offsets": (3,),
        "cache_lengths": (2,),
    },
    "expand_topk": {
        "pool_ids": (3, 3),
        "input_row_offsets": (3,),
        "cache_lengths": (2,),
    },
}
FLOATS = {"k", "gate", "ape"}


def dtype_of(operand):
    if operand in FLOATS:
        return DType.float32
    return DType.int32 if operand == "pool_ids" else DType.uint32


def loose(op, **fixed):
    """Declares a graph of an op that knows only what it must of its sizes."""

    def body(*operands):
        outputs = getattr(kpool_graph, op)(*operands, kpool=4)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    types = [RING] if SHAPES[op] is ON_RING else []
    for operand, shape in SHAPES[op].items():
        sizes = [f"{operand}_{axis}" for axis in range(len(shape))]
        if operand in fixed:
            sizes[-1] = fixed[operand]
        types.append(TensorType(dtype_of(operand), sizes, HOST))
    return declare(OwnGraph(f"loose_{op}", body, tuple(types)))


LOOSE = {
    "ring_close": loose("ring_close"),
    "ragged_update": loose("ragged_update"),
    "compress": loose("compress", k=8),
    "expand_topk": loose("expand_topk", pool_ids=3),
}


def zeros(op, **changed):
    """Makes the operands of a loose graph, after its ring."""
    return [
        np.zeros(changed.get(operand, shape), dtype_of(operand).to_numpy())
        for operand, shape in SHAPES[op].items()
    ]


def small_ring(op):
    """Makes the ring of a loose graph, if it has one."""
    if SHAPES[op] is not ON_RING:
        return []
    return [Ring(np.full((4, 2, 4, 8), 777, np.float32), DType.float32)]


# What a call takes as given, because it is the first to say so.
GIVEN = {
    "ring_close": {("k", 0), ("slot_idx", 0)},
    "ragged_update": {("k", 0), ("slot_idx", 0)},
    "compress": {("k", 0), ("k", 1), ("cache_lengths", 0)},
    "expand_topk": {("pool_ids", 0), ("pool_ids", 1), ("cache_lengths", 0)},
}


@pytest.mark.parametrize(
    ("op", "operand", "axis", "change"),
    [
        (op, operand, axis, change)
        for op in LOOSE
        for operand, shape in SHAPES[op].items()
        for axis in range(len(shape))
        if (operand, axis) not in GIVEN[op]
        for change in (-1, 1)
    ],
)
def test_sizes_that_disagree_are_refused(models, op, operand, axis, change):
    shape = list(SHAPES[op][operand])
    wanted = shape[axis]
    shape[axis] += change
    rings = small_ring(op)
    before = [ring.storage() for ring in rings]
    text = refused(models[LOOSE[op]], *rings, *zeros(op, **{operand: tuple(shape)}))
    got = wanted + change
    assert text == f"{op}: {operand}.shape[{axis}] must be {wanted}, got {got}"
    for ring, was in zip(rings, before, strict=True):
        assert_same_bits(ring.storage(), was, "ring after the error")
    models[LOOSE[op]](*rings, *zeros(op))


@pytest.mark.parametrize("op", ["ring_close", "ragged_update"])
def test_slots_for_fewer_requests_than_there_are_are_refused(models, op):
    (ring,) = small_ring(op)
    operands = zeros(op, slot_idx=(1,))
    assert refused_by_ring(models[LOOSE[op]], ring, *operands) == (
        f"{op}: input_row_offsets.shape[0] must be 2, got 3"
    )


STRIDES = {
    "every_other_slot": (slice(0, None, 2), slice(None), slice(0, 4), slice(None)),
    "wider_slots": (slice(None), slice(None), slice(0, 4), slice(None)),
    "wider_entries": (slice(None), slice(None), slice(0, 4), slice(0, 8)),
}


@pytest.mark.parametrize("op", ["ring_close", "ragged_update"])
@pytest.mark.parametrize("view", STRIDES)
def test_case_7_a_strided_ring_is_refused(models, op, view):
    """Regression case 7: a view with a larger slot stride."""
    rng = np.random.default_rng(7)
    memory = any_bits(rng, (8, 2, 6, 10), DType.float32)
    if view != "wider_entries":
        memory = np.ascontiguousarray(memory[..., :8])
    if view == "every_other_slot":
        memory = np.ascontiguousarray(memory[:, :, :4])
    buffer = to_buffer(memory, DType.float32)
    strided = buffer[STRIDES[view]]
    assert not strided.is_contiguous
    with pytest.raises(ValueError, match="non-contiguous"):
        models[LOOSE[op]](strided, *zeros(op))
    assert_same_bits(to_storage(buffer), memory, "memory under the view")


def test_pool_row_offsets_of_a_batch_that_disagrees_are_refused(models):
    call = models[ROWS]
    for requests, offsets in ((3, 3), (1, 3), (2, 2)):
        with pytest.raises(ValueError, match="rebind shape check failed"):
            call(np.zeros(requests, np.uint32), np.zeros(offsets, np.uint32))
    (rows,) = call(np.zeros(2, np.uint32), np.array([0, 4, 8], np.uint32))
    assert rows.tolist() == [0, 1, 2]
