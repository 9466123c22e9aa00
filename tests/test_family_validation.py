"""What the builders of the ragged ops refuse, and the text that says why."""

from __future__ import annotations

import pytest
from max.dtype import DType
from max.graph import BufferType, DeviceRef, Graph, TensorType

import kpool_graph
from building import building, like
from kpool_graph import OperandError

HOST, GPU = DeviceRef.CPU(), DeviceRef.GPU()
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


build, refusal = building(OPERANDS)


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
    assert str(error.value) == f"{op}: cache_lengths must be a graph tensor, got an int"
