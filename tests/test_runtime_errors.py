"""What the ops refuse while running on a CPU: before a byte is written."""

from __future__ import annotations

import numpy as np
import pytest
from max.dtype import DType
from max.graph import TensorType

import kpool_graph
from asserts import assert_same_bits, message, run_seed_tail, run_tail_update
from cases import (
    BAD_SLOTS,
    MAX_SLOTS,
    any_bits,
    ring_for,
    seed_operands,
    update_operands,
)
from models import (
    HOST,
    OwnGraph,
    Ring,
    SeedTail,
    TailUpdate,
    bits,
    declare,
    to_buffer,
    to_storage,
)

SEED = declare(SeedTail(DType.bfloat16, 128, 4, 4))
UPDATE = declare(TailUpdate(DType.bfloat16, 128, 4, 4, 7))
F32, U32, I32 = DType.float32, DType.uint32, DType.int32
SMALL_SEED = SeedTail(F32, 8, 4, 4)
SMALL_UPDATE = TailUpdate(F32, 8, 4, 3, 4)


def unrelated(dtype, operand, *sizes):
    """Types an operand whose sizes the graph does not relate to another's."""
    shape = [size if isinstance(size, int) else f"{operand}_{size}" for size in sizes]
    return TensorType(dtype, shape, HOST)


def loose_seed(*operands):
    kpool_graph.seed_tail(*operands, kpool=4)
    return ()


def loose_update(*operands):
    return kpool_graph.tail_update(*operands, kpool=4)


LOOSE_SEED = declare(
    OwnGraph(
        "loose_seed_tail",
        loose_seed,
        (
            SMALL_SEED.ring_type,
            unrelated(F32, "k", "rows", "width"),
            unrelated(F32, "gate", "rows", "width"),
            unrelated(U32, "offsets", "rows"),
            unrelated(U32, "lengths", "rows"),
            unrelated(U32, "slots", "rows"),
        ),
    )
)
LOOSE_UPDATE = declare(
    OwnGraph(
        "loose_tail_update",
        loose_update,
        (
            SMALL_UPDATE.ring_type,
            unrelated(F32, "k", "rows", 3, "width"),
            unrelated(F32, "gate", "rows", "tokens", "width"),
            unrelated(F32, "ape", "rows", "width"),
            unrelated(I32, "positions", "rows", "tokens"),
            unrelated(U32, "slots", "rows"),
        ),
    )
)


def refused(call, ring, *operands):
    """Requires an error that left the ring alone, and returns its text."""
    before = ring.storage()
    with pytest.raises(ValueError) as error:
        call(ring, *operands)
    assert_same_bits(ring.storage(), before, "ring after the error")
    return message(error)


def good_step(rng, op=UPDATE):
    """Three rows that store, of which the last two also close a pool."""
    n = op.next_n
    positions = [np.arange(start, start + n) for start in (0, 6, 11)]
    return list(update_operands(rng, op, positions, [5, 2, 7]))


@pytest.mark.parametrize(("row", "slot", "text"), BAD_SLOTS)
def test_tail_update_refuses_a_bad_slot(models, row, slot, text):
    rng = np.random.default_rng(1)
    step = good_step(rng)
    ring = Ring(ring_for(rng, UPDATE), UPDATE.dtype)
    step[4][row] = slot
    assert refused(models[UPDATE], ring, *step) == f"tail_update: slot_idx{text}"
    step[4][:] = [5, 2, 7]
    run_tail_update(models[UPDATE], ring, *step)


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        ([4, 5, 7, 8], "from 4, got 7 at token 2"),
        ([4, 5, 5, 6], "from 4, got 5 at token 2"),
        ([7, 6, 5, 4], "from 7, got 6 at token 1"),
        ([3, 7, 11, 15], "from 3, got 7 at token 1"),
        ([4, -1, 6, 7], "from 4, got 6 at token 2"),
        ([-1, 0, -1, 0], "from 0, got 0 at token 3"),
        ([2**31 - 1, 0, 1, 2], "from 2147483647, got 0 at token 1"),
    ],
    ids=str,
)
def test_tail_update_refuses_positions_that_are_not_consecutive(
    models, positions, text
):
    rng = np.random.default_rng(2)
    step = good_step(rng)
    good = step[3].copy()
    ring = Ring(ring_for(rng, UPDATE), UPDATE.dtype)
    step[3][1] = positions
    assert refused(models[UPDATE], ring, *step) == (
        f"tail_update: positions[1] must be consecutive {text}"
    )
    step[3][:] = good
    run_tail_update(models[UPDATE], ring, *step)


@pytest.mark.parametrize(
    ("operand", "index", "value", "text"),
    [
        ("slots", 0, 9, "slot_idx[0] must be below max_slots (9), got 9"),
        ("slots", 2, 3545, "slot_idx[2] must be below max_slots (9), got 3545"),
        (
            "slots",
            1,
            2**32 - 1,
            "slot_idx[1] must be below max_slots (9), got 4294967295",
        ),
        (
            "slots",
            2,
            5,
            "slot_idx[2] must differ from every other row's with real tokens, got 5"
            " a second time",
        ),
        (
            "offsets",
            1,
            12,
            "input_row_offsets[2] must not be below input_row_offsets[1] (12), got 10",
        ),
        (
            "offsets",
            3,
            14,
            "input_row_offsets[3] must be at most total_tokens (13), got 14",
        ),
        (
            "offsets",
            3,
            2**32 - 1,
            "input_row_offsets[3] must be at most total_tokens (13), got 4294967295",
        ),
    ],
)
def test_seed_tail_refuses_a_bad_row_table(models, operand, index, value, text):
    rng = np.random.default_rng(3)
    operands = seed_operands(rng, SEED, [(5, 0, 3), (2, 4, 7), (7, 9, 3)])
    ring = Ring(ring_for(rng, SEED), SEED.dtype)
    table = operands[4 if operand == "slots" else 2]
    good, table[index] = int(table[index]), value
    assert refused(models[SEED], ring, *operands) == f"seed_tail: {text}"
    table[index] = good
    run_seed_tail(models[SEED], ring, *operands)


def test_seed_tail_refuses_a_slot_even_where_no_token_would_stay(models):
    rng = np.random.default_rng(4)
    operands = seed_operands(rng, SEED, [(0, 0, 3), (MAX_SLOTS, 0, 4)])
    ring = Ring(ring_for(rng, SEED), SEED.dtype)
    assert refused(models[SEED], ring, *operands) == (
        "seed_tail: slot_idx[1] must be below max_slots (9), got 9"
    )


@pytest.mark.parametrize("last_row_is_bad", [True, False])
def test_a_bad_row_of_a_large_batch_stops_every_row(models, last_row_is_bad):
    rng = np.random.default_rng(5)
    rows = 1024
    positions = np.tile(np.arange(4, dtype=np.int32), (rows, 1))
    step = update_operands(rng, UPDATE, positions, range(rows))
    ring = Ring(ring_for(rng, UPDATE, max_slots=rows), UPDATE.dtype)
    step[4][-1 if last_row_is_bad else 0] = rows
    assert "must be below max_slots (1024), got 1024" in refused(
        models[UPDATE], ring, *step
    )


SEED_SHAPES = {
    "k": (3, 8),
    "gate": (3, 8),
    "input_row_offsets": (3,),
    "cache_lengths": (2,),
    "slot_idx": (2,),
}
UPDATE_SHAPES = {
    "k": (3, 3, 8),
    "gate": (3, 3, 8),
    "ape": (4, 8),
    "positions": (3, 3),
    "slot_idx": (3,),
}
DTYPES = {
    "positions": np.int32,
    "input_row_offsets": np.uint32,
    "cache_lengths": np.uint32,
    "slot_idx": np.uint32,
}


def zeros(shapes):
    return [
        np.zeros(shape, DTYPES.get(operand, np.float32))
        for operand, shape in shapes.items()
    ]


@pytest.mark.parametrize(
    ("operand", "axis", "size"),
    [
        (operand, axis, size)
        for operand, shape in UPDATE_SHAPES.items()
        for axis in range(len(shape))
        if (operand, axis) not in {("k", 1), ("slot_idx", 0)}
        for size in (shape[axis] - 1, shape[axis] + 1)
    ],
)
def test_tail_update_refuses_sizes_that_disagree(models, operand, axis, size):
    shape = list(UPDATE_SHAPES[operand])
    wanted, shape[axis] = shape[axis], size
    ring = Ring(np.full((4, 2, 4, 8), 777, np.float32), F32)
    text = refused(
        models[LOOSE_UPDATE], ring, *zeros({**UPDATE_SHAPES, operand: tuple(shape)})
    )
    assert text == (
        f"tail_update: {operand}.shape[{axis}] must be {wanted}, got {size}"
    )


@pytest.mark.parametrize(
    ("operand", "axis", "size", "wanted"),
    [
        ("k", 1, 7, 8),
        ("k", 1, 9, 8),
        ("gate", 0, 2, 3),
        ("gate", 0, 4, 3),
        ("gate", 1, 7, 8),
        ("input_row_offsets", 0, 2, 3),
        ("input_row_offsets", 0, 4, 3),
        ("cache_lengths", 0, 1, 2),
        ("cache_lengths", 0, 3, 2),
    ],
)
def test_seed_tail_refuses_sizes_that_disagree(models, operand, axis, size, wanted):
    shape = list(SEED_SHAPES[operand])
    shape[axis] = size
    ring = Ring(np.full((4, 2, 4, 8), 777, np.float32), F32)
    text = refused(
        models[LOOSE_SEED], ring, *zeros({**SEED_SHAPES, operand: tuple(shape)})
    )
    assert text == (f"seed_tail: {operand}.shape[{axis}] must be {wanted}, got {size}")


def test_slots_for_fewer_rows_than_there_are_tokens_are_refused(models):
    ring = Ring(np.full((4, 2, 4, 8), 777, np.float32), F32)
    assert (
        refused(models[LOOSE_UPDATE], ring, *zeros({**UPDATE_SHAPES, "slot_idx": (2,)}))
        == "tail_update: k.shape[0] must be 2, got 3"
    )


def test_sizes_that_agree_at_run_time_work_though_the_graph_did_not_know(models):
    ring = Ring(np.full((4, 2, 4, 8), 777, np.float32), F32)
    *tokens, _ = zeros(UPDATE_SHAPES)
    tokens[3][:] = np.arange(3)
    _, closed = models[LOOSE_UPDATE](ring, *tokens, np.array([3, 0, 1], np.uint32))
    assert closed.tolist() == [[-1], [-1], [-1]]
    k, gate, offsets, lengths, slots = zeros(SEED_SHAPES)
    offsets[1:], slots[1] = (1, 3), 2
    models[LOOSE_SEED](ring, k, gate, offsets, lengths, slots)
    stored = np.argwhere(bits(ring.storage()[:, 0, :, 0]) == 0).tolist()
    assert stored == [
        [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2],
        [2, 0], [2, 1], [3, 0], [3, 1], [3, 2],
    ]  # fmt: skip


STRIDES = {
    "every_other_slot": (slice(0, None, 2), slice(None), slice(0, 4), slice(None)),
    "wider_slots": (slice(None), slice(None), slice(0, 4), slice(None)),
    "wider_entries": (slice(None), slice(None), slice(0, 4), slice(0, 8)),
}


@pytest.mark.parametrize("view", STRIDES)
def test_case_7_a_strided_ring_is_refused_by_both_ops(models, view):
    """Regression case 7: a view with a larger slot stride."""
    rng = np.random.default_rng(6)
    memory = any_bits(rng, (8, 2, 6, 10), F32)
    if view != "wider_entries":
        memory = np.ascontiguousarray(memory[..., :8])
    if view == "every_other_slot":
        memory = np.ascontiguousarray(memory[:, :, :4])
    buffer = to_buffer(memory, F32)
    strided = buffer[STRIDES[view]]
    assert not strided.is_contiguous
    k, gate, ape, positions, slots = zeros(UPDATE_SHAPES)
    positions[:], slots[:] = np.arange(3), np.arange(3)
    offsets = np.array([0, 1, 2, 3], np.uint32)
    for call, operands in (
        (models[LOOSE_UPDATE], (k, gate, ape, positions, slots)),
        (models[LOOSE_SEED], (k[0], gate[0], offsets, slots, slots)),
    ):
        with pytest.raises(ValueError, match="non-contiguous"):
            call(strided, *operands)
        assert_same_bits(to_storage(buffer), memory, "memory under the view")
