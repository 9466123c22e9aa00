"""copy_slots: whole slots, every read before every write."""

from __future__ import annotations

import numpy as np
import pytest
from max.dtype import DType
from max.graph import BufferType, Graph, TensorType

from asserts import assert_same_bits
from cases import DTYPES, any_bits
from kpool_graph import OperandError, copy_slots
from models import HOST, Ring, declare
from serving import CopySlots, refused

# Slots of 16-byte multiples, and of sizes that no vector divides.
RINGS = tuple(
    declare(CopySlots(dtype, head_dim, ring_len))
    for dtype, head_dim, ring_len in (
        (DType.float32, 8, 4),
        (DType.float16, 7, 3),
        (DType.bfloat16, 12, 5),
    )
)
STACKED = tuple(
    declare(CopySlots(dtype, 8, 6, stacked))
    for dtype, stacked in ((DType.float32, (3,)), (DType.bfloat16, ("layers", 2)))
)
SMALL = RINGS[0]
every_ring = pytest.mark.parametrize(
    "op", RINGS + STACKED, ids=lambda op: op.name.removeprefix("copy_slots_")
)


def tail_for(rng, op, max_slots, layers=3):
    stacked = [layers if isinstance(axis, str) else axis for axis in op.stacked]
    shape = (*stacked, max_slots, 2, op.ring_len, op.head_dim)
    return any_bits(rng, shape, op.dtype)


def copied(tail, src, dst):
    """Copies slots in NumPy, whose indexing reads first."""
    want = tail.copy()
    slots = want.reshape(-1, *tail.shape[-3:])
    slots[dst] = slots[src]
    return want


def run(models, op, tail, src, dst):
    ring = Ring(tail, op.dtype)
    assert models[op](ring, np.array(src, np.uint32), np.array(dst, np.uint32)) == []
    return ring.storage()


@every_ring
def test_random_pairs_equal_numpy(models, op):
    rng = np.random.default_rng(1)
    for _ in range(100):
        tail = tail_for(rng, op, int(rng.integers(1, 13)), int(rng.integers(1, 5)))
        slots = int(np.prod(tail.shape[:-3]))
        pairs = rng.integers(0, slots + 1)
        src = rng.integers(0, slots, pairs)
        dst = rng.permutation(slots)[:pairs]
        assert_same_bits(run(models, op, tail, src, dst), copied(tail, src, dst))


@every_ring
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ([], []),
        ([2], [2]),
        ([4], [1]),
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([1, 2, 3, 4], [0, 1, 2, 3]),
        ([0, 1, 2, 3, 4], [1, 2, 3, 4, 0]),
        ([0, 5], [5, 0]),
        ([3, 3, 3], [0, 5, 3]),
    ],
    ids=[
        "none",
        "itself",
        "one",
        "chain",
        "chain_backwards",
        "circle",
        "swap",
        "one_source",
    ],
)
def test_overlapping_pairs_are_read_before_they_are_written(models, op, src, dst):
    tail = tail_for(np.random.default_rng(2), op, 6)
    got = run(models, op, tail, src, dst)
    assert_same_bits(got, copied(tail, src, dst))


def test_many_slots_are_copied_at_once(models):
    rng = np.random.default_rng(3)
    tail = tail_for(rng, SMALL, 5000)
    order = rng.permutation(5000)
    got = run(models, SMALL, tail, order, np.roll(order, 1))
    assert_same_bits(got, copied(tail, order, np.roll(order, 1)))


@every_ring
def test_a_flattened_layer_has_its_own_slots(models, op):
    """A stacked ring's slot `s` of layer `l` is `l * max_slots + s`."""
    tail = tail_for(np.random.default_rng(4), op, 6)
    layers = int(np.prod(tail.shape[:-4]))
    src, dst = np.arange(layers) * 6 + 1, np.arange(layers) * 6 + 4
    got = run(models, op, tail, src, dst)
    assert_same_bits(got[..., 4, :, :, :], tail[..., 1, :, :, :], "copied")
    others = [0, 1, 2, 3, 5]
    assert_same_bits(got[..., others, :, :, :], tail[..., others, :, :, :], "others")


@every_ring
@pytest.mark.parametrize(
    ("src", "dst", "text"),
    [
        ([1, 36], [0, 2], "src_slots[1] must be below max_slots (36), got 36"),
        (
            [1, 2],
            [2**32 - 1, 0],
            "dst_slots[0] must be below max_slots (36), got 4294967295",
        ),
        ([1, 2, 3], [4, 5, 4], "dst_slots[2] must differ from every other"),
        ([1, 2, 3], [4, 5], "dst_slots.shape[0] must be 3, got 2"),
        ([], [4], "dst_slots.shape[0] must be 0, got 1"),
    ],
    ids=["source", "destination", "twice", "too_few", "too_many"],
)
def test_bad_pairs_leave_the_ring_alone(models, op, src, dst, text):
    rng = np.random.default_rng(5)
    layers = {0: 36, 1: 12, 2: 6}[len(op.stacked)]
    tail = tail_for(rng, op, layers, 3)
    assert np.prod(tail.shape[:-3]) == 36
    ring = Ring(tail, op.dtype)
    message = refused(
        models[op], ring, np.array(src, np.uint32), np.array(dst, np.uint32)
    )
    assert message.startswith(f"copy_slots: {text}")
    models[op](ring, np.array([1], np.uint32), np.array([0], np.uint32))
    assert_same_bits(ring.storage(), copied(tail, [1], [0]))


def build(ring, src, dst):
    with Graph("bad", input_types=[ring, src, dst]) as graph:
        copy_slots(*graph.inputs)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_operands_that_cannot_be_slots_are_refused(dtype):
    ring = BufferType(dtype, ("max_slots", 2, 4, 8), HOST)
    good = TensorType(DType.uint32, ("pairs",), HOST)
    signed = TensorType(DType.int64, ("pairs",), HOST)
    matrix = TensorType(DType.uint32, ("pairs", 2), HOST)
    with pytest.raises(OperandError) as error:
        build(ring, signed, matrix)
    assert str(error.value).splitlines() == [
        "copy_slots: src_slots.dtype must be uint32, got int64",
        "copy_slots: dst_slots.rank must be 1 ([pairs]), got 2",
    ]
    with pytest.raises(OperandError, match=r"copy_slots: tail must be a graph buffer"):
        build(TensorType(dtype, ("max_slots", 2, 4, 8), HOST), good, good)
    with pytest.raises(OperandError, match=r"copy_slots: tail\.shape\[2\] must be 2"):
        build(BufferType(dtype, (3, "max_slots", 3, 4, 8), HOST), good, good)
    with pytest.raises(OperandError, match=r"copy_slots: tail\.rank must be 4"):
        build(BufferType(dtype, (2, 4, 8), HOST), good, good)
