"""What the ragged ops refuse, while a graph is built and while it runs on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType

import kpool_graph
from asserts import assert_same_bits, message
from cases import MAX_SLOTS, any_bits, ring_for
from kpool_graph import OperandError
from models import HOST, OwnGraph, Ring, declare, to_buffer, to_storage
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

GPU = DeviceRef.GPU()
F32, F16, BF16 = DType.float32, DType.float16, DType.bfloat16
I32, U32, I64 = DType.int32, DType.uint32, DType.int64

RING = BufferType(F32, ("max_slots", 2, 4, 8), HOST)
TOKENS = TensorType(F32, ("total_tokens", 8), HOST)
APE = TensorType(F32, (4, 8), HOST)
OFFSETS = TensorType(U32, ("batch_plus_1",), HOST)
REQUESTS = TensorType(U32, ("batch",), HOST)
ON_RING = {
    "tail": RING,
    "k": TOKENS,
    "gate": TOKENS,
    "ape": APE,
    "input_row_offsets": OFFSETS,
    "cache_lengths": REQUESTS,
    "slot_idx": REQUESTS,
}
OPERANDS = {
    "ring_close": ON_RING,
    "ragged_update": ON_RING,
    "compress": {
        "k": TOKENS,
        "gate": TOKENS,
        "ape": APE,
        "input_row_offsets": OFFSETS,
        "pool_row_offsets": OFFSETS,
        "cache_lengths": REQUESTS,
    },
    "expand_topk": {
        "pool_ids": TensorType(I32, ("total_tokens", 3), HOST),
        "input_row_offsets": OFFSETS,
        "cache_lengths": REQUESTS,
    },
    "pool_row_offsets": {"cache_lengths": REQUESTS, "input_row_offsets": OFFSETS},
}
# What each operand's axes are called, and which dtype it must have.
WANTED = {
    "tail": ("max_slots, 2, ring_len, head_dim", "float32 or float16 or bfloat16"),
    "k": ("total_tokens, head_dim", "float32"),
    "gate": ("total_tokens, head_dim", "float32"),
    "ape": ("kpool, head_dim", "float32"),
    "input_row_offsets": ("batch + 1", "uint32"),
    "pool_row_offsets": ("batch + 1", "uint32"),
    "cache_lengths": ("batch", "uint32"),
    "slot_idx": ("batch", "uint32"),
    "pool_ids": ("total_tokens, pool_topk", "int32"),
}
# The operand that fixes the device of the others, and how it is called.
OWNERS = {
    "ring_close": ("tail", "the ring"),
    "ragged_update": ("tail", "the ring"),
    "compress": ("k", "k"),
    "expand_topk": ("pool_ids", "pool_ids"),
    "pool_row_offsets": ("cache_lengths", "cache_lengths"),
}
EVERY_OPERAND = [
    (op, operand) for op, operands in OPERANDS.items() for operand in operands
]
every_operand = pytest.mark.parametrize(("op", "operand"), EVERY_OPERAND)


def build(op, kpool=4, **changed):
    """Builds a graph of one op with some operands of another type."""
    types = {**OPERANDS[op], **changed}
    with Graph(op, input_types=list(types.values())) as graph:
        return getattr(kpool_graph, op)(*graph.inputs, kpool=kpool)


def refusal(op, **changed):
    """Returns the lines of what the builder raises, without the op's name."""
    with pytest.raises(OperandError) as error:
        build(op, **changed)
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"{op}: ") for line in lines)
    return [line.removeprefix(f"{op}: ") for line in lines]


def like(old, **changed):
    """Copies a type with another dtype, shape or device."""
    parts = {"dtype": old.dtype, "shape": old.shape, "device": old.device}
    return type(old)(**{**parts, **changed})


@pytest.mark.parametrize("op", OPERANDS)
def test_the_operands_that_the_other_tests_change_are_right_as_they_are(op):
    build(op)


@every_operand
def test_a_wrong_rank_is_refused(op, operand):
    old = OPERANDS[op][operand]
    axes, _ = WANTED[operand]
    rank = len(axes.split(", "))
    wrong = like(old, shape=(*old.shape, 1))
    assert refusal(op, **{operand: wrong})[0] == (
        f"{operand}.rank must be {rank} ([{axes}]), got {rank + 1}"
    )


@every_operand
def test_a_wrong_dtype_is_refused(op, operand):
    wrong = like(OPERANDS[op][operand], dtype=I64)
    _, wanted = WANTED[operand]
    if (op, operand) == ("compress", "k"):
        wanted = "float32 or float16 or bfloat16"
    assert refusal(op, **{operand: wrong})[0] == (
        f"{operand}.dtype must be {wanted}, got int64"
    )


@pytest.mark.parametrize("op", ["ring_close", "ragged_update"])
def test_a_ring_of_an_impossible_dtype_is_the_only_thing_reported(op):
    assert refusal(op, tail=like(RING, dtype=I32)) == [
        "tail.dtype must be float32 or float16 or bfloat16, got int32"
    ]


def test_keys_of_an_impossible_dtype_are_the_only_thing_reported():
    assert refusal("compress", k=like(TOKENS, dtype=I32)) == [
        "k.dtype must be float32 or float16 or bfloat16, got int32"
    ]


@pytest.mark.parametrize("op", ["ring_close", "ragged_update", "compress"])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_gate_scores_of_another_dtype_than_the_keys_are_refused(op, dtype):
    assert refusal(op, gate=like(TOKENS, dtype=dtype)) == [
        f"gate.dtype must be float32, got {dtype.name}"
    ]


@every_operand
def test_a_wrong_device_is_refused(op, operand):
    wrong = like(OPERANDS[op][operand], device=GPU)
    owner, called = OWNERS[op]
    if operand == owner:
        wanted = [
            f"{other}.device must be {called}'s, gpu:0, got cpu:0"
            for other in OPERANDS[op]
            if other != owner
        ]
    else:
        wanted = [f"{operand}.device must be {called}'s, cpu:0, got gpu:0"]
    assert sorted(refusal(op, **{operand: wrong})) == sorted(wanted)


@every_operand
def test_a_tensor_and_a_buffer_are_not_exchangeable(op, operand):
    old = OPERANDS[op][operand]
    kind = TensorType if operand == "tail" else BufferType
    line = refusal(op, **{operand: kind(old.dtype, old.shape, old.device)})[0]
    if operand == "tail":
        assert line.startswith("tail must be a graph buffer (a BufferType input)")
        assert "got a TensorValue of float32" in line
    else:
        assert line.startswith(f"{operand} must be a graph tensor, got a BufferValue")
        assert f"of {old.dtype.name}" in line


@pytest.mark.parametrize("op", ["ring_close", "ragged_update", "compress"])
@pytest.mark.parametrize(
    ("operand", "shape", "wanted"),
    [
        ("gate", ("t", 16), "gate.shape[1] must be head_dim (8), got 16"),
        ("ape", (3, 8), "ape.shape[0] must be kpool (4), got 3"),
        ("ape", (4, 16), "ape.shape[1] must be head_dim (8), got 16"),
        ("ape", (5, 1), "ape.shape[0] must be kpool (4), got 5"),
    ],
)
def test_an_operand_of_another_size_is_refused(op, operand, shape, wanted):
    wrong = like(OPERANDS[op][operand], shape=shape)
    assert refusal(op, **{operand: wrong})[0] == wanted


@pytest.mark.parametrize("op", ["ring_close", "ragged_update"])
def test_keys_of_another_head_dim_than_the_rings_are_refused(op):
    assert refusal(op, k=like(TOKENS, shape=("t", 16))) == [
        "k.shape[1] must be head_dim (8), got 16"
    ]


@pytest.mark.parametrize("op", ["ring_close", "ragged_update"])
def test_known_sizes_that_differ_are_refused(op):
    assert refusal(
        op,
        k=like(TOKENS, shape=(5, 8)),
        gate=like(TOKENS, shape=(4, 8)),
        cache_lengths=like(REQUESTS, shape=(2,)),
        slot_idx=like(REQUESTS, shape=(3,)),
    ) == [
        "gate.shape[0] must be total_tokens (5), got 4",
        "slot_idx.shape[0] must be batch (2), got 3",
    ]


def test_known_sizes_of_compress_that_differ_are_refused():
    assert refusal(
        "compress",
        k=like(TOKENS, shape=(5, 8)),
        gate=like(TOKENS, shape=(4, 8)),
        input_row_offsets=like(OFFSETS, shape=(3,)),
        pool_row_offsets=like(OFFSETS, shape=(4,)),
    ) == [
        "gate.shape[0] must be total_tokens (5), got 4",
        "pool_row_offsets.shape[0] must be batch + 1 (3), got 4",
    ]


@pytest.mark.parametrize("op", OPERANDS)
def test_known_row_offsets_that_are_not_one_more_than_the_batch_are_refused(op):
    changed = {
        operand: like(old, shape=(3,))
        for operand, old in OPERANDS[op].items()
        if old in (OFFSETS, REQUESTS)
    }
    assert "input_row_offsets.shape[0] must be batch + 1 (4), got 3" in refusal(
        op, **changed
    )


@pytest.mark.parametrize("op", ["ring_close", "ragged_update"])
@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        (("s", 3, 4, 8), "tail.shape[1] must be 2, got 3"),
        (("s", "planes", 4, 8), "tail.shape[1] must be 2, got planes"),
        (("s", 2, 3, 8), "ring_len (3) must be at least kpool (4)"),
        (
            ("s", 2, "ring_len", 8),
            "ring_len must be known while the graph is built, got ring_len",
        ),
        (
            ("s", 2, 4, "width"),
            "head_dim must be known while the graph is built, got width",
        ),
        (("s", 2, 4, 0), "head_dim must be at least 1, got 0"),
    ],
)
def test_an_impossible_ring_is_refused(op, shape, wanted):
    assert wanted in refusal(op, tail=like(RING, shape=shape))


@pytest.mark.parametrize("op", OPERANDS)
@pytest.mark.parametrize("kpool", [0, -2])
def test_an_impossible_kpool_is_refused(op, kpool):
    assert f"kpool must be at least 1, got {kpool}" in refusal(op, kpool=kpool)


@pytest.mark.parametrize(
    ("op", "operand", "axis"),
    [("compress", "k", "head_dim"), ("expand_topk", "pool_ids", "pool_topk")],
)
@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        (0, "must be at least 1, got 0"),
        ("width", "must be known while the graph is built, got width"),
    ],
)
def test_a_size_that_fixes_the_output_must_be_known_and_positive(
    op, operand, axis, size, wanted
):
    wrong = like(OPERANDS[op][operand], shape=("t", size))
    assert f"{axis} {wanted}" in refusal(op, **{operand: wrong})


@pytest.mark.parametrize("op", OPERANDS)
def test_all_problems_of_a_call_are_reported_together(op):
    wrong = {
        operand: like(OPERANDS[op][operand], dtype=I64, shape=(1, 1, 1))
        for operand in ("input_row_offsets", "cache_lengths")
    }
    assert sorted(refusal(op, **wrong)) == [
        "cache_lengths.dtype must be uint32, got int64",
        "cache_lengths.rank must be 1 ([batch]), got 3",
        "input_row_offsets.dtype must be uint32, got int64",
        "input_row_offsets.rank must be 1 ([batch + 1]), got 3",
    ]


@pytest.mark.parametrize("op", OPERANDS)
def test_an_operand_that_is_no_graph_value_is_named(op):
    operands = OPERANDS[op]
    with Graph("numbers", input_types=list(operands.values())) as graph:
        inputs = dict(zip(operands, graph.inputs, strict=True))
        inputs["cache_lengths"] = 3
        with pytest.raises(OperandError) as error:
            getattr(kpool_graph, op)(*inputs.values(), kpool=4)
    assert str(error.value) == f"{op}: cache_lengths must be a graph tensor, got a int"


CLOSE = on_ring(RingClose, GLM)
UPDATE = on_ring(RaggedUpdate, GLM)
COMPRESS = on_keys(GLM)
EXPAND = declare(ExpandTopk(3, 4, True))
RUN_ON_RING = {CLOSE: run_ring_close, UPDATE: run_ragged_update}
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


@on_a_ring
@pytest.mark.parametrize(
    ("row", "slot", "text"),
    [
        (0, MAX_SLOTS, "[0] must be below max_slots (9), got 9"),
        (2, 3545, "[2] must be below max_slots (9), got 3545"),
        (1, 2**32 - 1, "[1] must be below max_slots (9), got 4294967295"),
        (
            2,
            5,
            "[2] must differ from every other row's with real tokens, got 5 a second"
            " time",
        ),
    ],
)
def test_a_bad_slot_is_refused(models, op, row, slot, text):
    rng = np.random.default_rng(1)
    operands = ragged_operands(rng, op, GOOD)
    ring = Ring(ring_for(rng, op, GOOD), op.dtype)
    slots = operands[5]
    good, slots[row] = int(slots[row]), slot
    error = refused_by_ring(models[op], ring, *operands)
    assert error == f"{op.stem}: slot_idx{text}"
    slots[row] = good
    RUN_ON_RING[op](models[op], ring, *operands)


@on_a_ring
@bad_offsets
def test_bad_row_offsets_are_refused(models, op, at, value, text):
    rng = np.random.default_rng(2)
    operands = ragged_operands(rng, op, GOOD)
    ring = Ring(ring_for(rng, op, GOOD), op.dtype)
    offsets = operands[3]
    good, offsets[at] = int(offsets[at]), value
    error = refused_by_ring(models[op], ring, *operands)
    assert error == f"{op.stem}: input_row_offsets{text}"
    offsets[at] = good
    RUN_ON_RING[op](models[op], ring, *operands)


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


def unrelated(dtype, operand, *sizes):
    """Types an operand whose sizes the graph does not relate to another's."""
    shape = [size if isinstance(size, int) else f"{operand}_{size}" for size in sizes]
    return TensorType(dtype, shape, HOST)


def loose(op, *fixed):
    """Declares a graph of an op that knows only what it must of its sizes."""

    def body(*operands):
        outputs = getattr(kpool_graph, op)(*operands, kpool=4)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    types = [
        unrelated(old.dtype, operand, *map(str, range(old.rank)))
        for operand, old in list(OPERANDS[op].items())[1:]
    ]
    return declare(OwnGraph(f"loose_{op}", body, (*fixed, *types)))


LOOSE = {
    "ring_close": loose("ring_close", RING),
    "ragged_update": loose("ragged_update", RING),
    "compress": loose("compress", unrelated(F32, "k", "rows", 8)),
    "expand_topk": loose("expand_topk", unrelated(I32, "pool_ids", "rows", 3)),
}
SHAPES = {
    "k": (3, 8),
    "gate": (3, 8),
    "ape": (4, 8),
    "pool_ids": (3, 3),
    "input_row_offsets": (3,),
    "pool_row_offsets": (3,),
    "cache_lengths": (2,),
    "slot_idx": (2,),
}


def zeros(op, **changed):
    """Makes the operands of a loose graph, after its ring."""
    return [
        np.zeros(changed.get(operand, SHAPES[operand]), old.dtype.to_numpy())
        for operand, old in OPERANDS[op].items()
        if operand != "tail"
    ]


def small_ring(op):
    """Makes the ring of a loose graph, if it has one."""
    if "tail" not in OPERANDS[op]:
        return []
    return [Ring(np.full((4, 2, 4, 8), 777, np.float32), F32)]


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
        for operand in OPERANDS[op]
        if operand != "tail"
        for axis in range(len(SHAPES[operand]))
        if (operand, axis) not in GIVEN[op]
        for change in (-1, 1)
    ],
)
def test_sizes_that_disagree_are_refused(models, op, operand, axis, change):
    shape = list(SHAPES[operand])
    shape[axis] += change
    rings = small_ring(op)
    before = [ring.storage() for ring in rings]
    text = refused(models[LOOSE[op]], *rings, *zeros(op, **{operand: tuple(shape)}))
    wanted, got = SHAPES[operand][axis], shape[axis]
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
    memory = any_bits(rng, (8, 2, 6, 10), F32)
    if view != "wider_entries":
        memory = np.ascontiguousarray(memory[..., :8])
    if view == "every_other_slot":
        memory = np.ascontiguousarray(memory[:, :, :4])
    buffer = to_buffer(memory, F32)
    strided = buffer[STRIDES[view]]
    assert not strided.is_contiguous
    with pytest.raises(ValueError, match="non-contiguous"):
        models[LOOSE[op]](strided, *zeros(op))
    assert_same_bits(to_storage(buffer), memory, "memory under the view")


def test_pool_row_offsets_of_a_batch_that_disagrees_are_refused(models):
    call = models[declare(PoolRowOffsets(4))]
    with pytest.raises(ValueError):
        call(np.zeros(3, np.uint32), np.zeros(3, np.uint32))
    (rows,) = call(np.zeros(2, np.uint32), np.array([0, 4, 8], np.uint32))
    assert rows.tolist() == [0, 1, 2]
