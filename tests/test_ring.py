"""TailRing: the ring's sizes, type and memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from max.driver import CPU
from max.dtype import DType
from max.graph import DeviceRef

from asserts import assert_same_bits, run_tail_update
from cases import DTYPES, TAIL_UPDATES, update_operands
from kpool_graph import OperandError, TailRing, tail_update
from models import STORAGE, Call, OwnGraph, Ring, TailUpdate, declare, to_storage

GLM = TAIL_UPDATES[-1]
OP = TailUpdate(DType.float16, 40, 4, 2, 5)
OP_RING = TailRing(6, 4, 40, DType.float16, ring_len=5)


def update(*operands):
    return tail_update(*operands, kpool=4)


STATIC_RING = declare(
    OwnGraph(
        "ring_of_static_size", update, (OP_RING.buffer_type(), *OP.input_types[1:])
    )
)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_sizes_follow_from_the_fields(dtype):
    ring = TailRing(7, 4, 96, dtype, ring_len=9)
    assert ring.shape == (7, 2, 9, 96)
    assert ring.nbytes == 7 * 2 * 9 * 96 * STORAGE[dtype].itemsize


def test_the_ring_is_one_pool_long_and_bfloat16_unless_told_otherwise():
    ring = TailRing(7, 4, 96)
    assert (ring.ring_len, ring.dtype) == (4, DType.bfloat16)


@pytest.mark.parametrize("device", [DeviceRef.CPU(), DeviceRef.GPU()], ids=str)
def test_the_buffer_type_is_the_rings_on_the_device_asked_for(device):
    ring = TailRing(7, 4, 96, DType.float16, ring_len=9)
    kind = ring.buffer_type(device)
    assert [int(size) for size in kind.shape] == [7, 2, 9, 96]
    assert (kind.dtype, kind.device) == (DType.float16, device)


def test_the_buffer_type_is_the_cpus_unless_told_otherwise():
    assert TailRing(7, 4, 96).buffer_type().device == DeviceRef.CPU()


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_an_allocated_ring_is_zero(dtype):
    ring = TailRing(3, 4, 100, dtype, ring_len=5)
    for buffer in (ring.allocate(), ring.allocate(CPU())):
        assert (buffer.dtype, tuple(buffer.shape)) == (dtype, ring.shape)
        assert_same_bits(to_storage(buffer), np.zeros(ring.shape, STORAGE[dtype]))


def test_an_allocated_ring_is_filled_when_the_call_returns(models):
    """A fill that goes on wipes what the first step stashes; this one takes long."""
    ring = TailRing(2**16, GLM.kpool, GLM.head_dim, GLM.dtype, GLM.ring_len)
    last = ring.max_slots - 1
    k, gate, *tables = update_operands(
        np.random.default_rng(0), GLM, [np.arange(GLM.next_n)], [last]
    )
    for _ in range(5):
        buffer = ring.allocate()
        models[GLM](buffer, k, gate, *tables)
        stashed = to_storage(buffer)[last, :, : GLM.next_n]
        assert_same_bits(stashed, np.concatenate([k, gate]), "last slot")


def test_an_allocated_ring_fits_a_graph_of_its_buffer_type_and_persists(models):
    rng = np.random.default_rng(1)
    ring = Ring(np.zeros(OP_RING.shape, np.float16), OP.dtype)
    ring.buffer = OP_RING.allocate()
    call = Call(OP, models[STATIC_RING].model)
    closed = []
    for start in (0, 2, 4, 6):
        operands = update_operands(rng, OP, [[start, start + 1]], [5])
        closed += run_tail_update(call, ring, *operands)[1].tolist()
    assert closed == [[-1], [0], [-1], [1]]


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        ({"max_slots": 0}, ["max_slots must be at least 1, got 0"]),
        ({"head_dim": -8}, ["head_dim must be at least 1, got -8"]),
        ({"ring_len": 3}, ["ring_len (3) must be at least kpool (4)"]),
        ({"ring_len": -1}, ["ring_len (-1) must be at least kpool (4)"]),
        ({"kpool": 0}, ["kpool must be at least 1, got 0"]),
        (
            {"dtype": DType.float64},
            ["dtype must be float32 or float16 or bfloat16, got float64"],
        ),
        (
            {"max_slots": 0, "ring_len": 2, "dtype": DType.int8},
            [
                "max_slots must be at least 1, got 0",
                "ring_len (2) must be at least kpool (4)",
                "dtype must be float32 or float16 or bfloat16, got int8",
            ],
        ),
    ],
    ids=str,
)
def test_an_impossible_ring_is_refused(fields, messages):
    good = {"max_slots": 7, "kpool": 4, "head_dim": 96}
    with pytest.raises(OperandError) as error:
        TailRing(**{**good, **fields})
    assert str(error.value).splitlines() == [f"TailRing: {line}" for line in messages]


def test_a_ring_cannot_be_changed_behind_its_buffers_back():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TailRing(7, 4, 96).kpool = 2
