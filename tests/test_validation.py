"""What a graph builder refuses, and the text that says why."""

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
TAIL_UPDATE = {
    "tail": RING,
    "k": TensorType(F32, ("batch", 3, 8), HOST),
    "gate": TensorType(F32, ("batch", 3, 8), HOST),
    "ape": TensorType(F32, (4, 8), HOST),
    "positions": TensorType(I32, ("batch", 3), HOST),
    "slot_idx": TensorType(U32, ("batch",), HOST),
}
SEED_TAIL = {
    "tail": RING,
    "k": TensorType(F32, ("total_tokens", 8), HOST),
    "gate": TensorType(F32, ("total_tokens", 8), HOST),
    "input_row_offsets": TensorType(U32, ("batch_plus_1",), HOST),
    "cache_lengths": TensorType(U32, ("batch",), HOST),
    "slot_idx": TensorType(U32, ("batch",), HOST),
}
OPERANDS = {"tail_update": TAIL_UPDATE, "seed_tail": SEED_TAIL}
AXES = {
    "tail": "max_slots, 2, ring_len, head_dim",
    "ape": "kpool, head_dim",
    "positions": "batch, next_n",
    "slot_idx": "batch",
    "input_row_offsets": "batch + 1",
    "cache_lengths": "batch",
}
TOKEN_AXES = {
    "tail_update": "batch, next_n, head_dim",
    "seed_tail": "total_tokens, head_dim",
}
TABLES = {
    "positions": I32,
    "slot_idx": U32,
    "input_row_offsets": U32,
    "cache_lengths": U32,
    "ape": F32,
}
EVERY_OPERAND = [
    (op, operand) for op, operands in OPERANDS.items() for operand in operands
]


build, refusal = building(OPERANDS)


@pytest.mark.parametrize("op", OPERANDS)
def test_the_operands_that_the_other_tests_change_are_right_as_they_are(op):
    build(op)


@pytest.mark.parametrize(("op", "operand"), EVERY_OPERAND)
def test_a_wrong_rank_is_refused(op, operand):
    old = OPERANDS[op][operand]
    wrong = like(old, shape=(*old.shape, 1))
    axes = AXES.get(operand, TOKEN_AXES[op])
    rank = len(axes.split(", "))
    assert refusal(op, **{operand: wrong})[0] == (
        f"{operand}.rank must be {rank} ([{axes}]), got {rank + 1}"
    )


@pytest.mark.parametrize(("op", "operand"), EVERY_OPERAND)
def test_a_wrong_dtype_is_refused(op, operand):
    wrong = like(OPERANDS[op][operand], dtype=I64)
    wanted = "float32"
    if operand == "tail":
        wanted = "float32 or float16 or bfloat16"
    elif operand in TABLES:
        wanted = TABLES[operand].name
    assert f"{operand}.dtype must be {wanted}, got int64" in refusal(
        op, **{operand: wrong}
    )


@pytest.mark.parametrize("op", OPERANDS)
def test_a_ring_of_an_impossible_dtype_is_the_only_thing_reported(op):
    wrong = like(RING, dtype=I32)
    assert refusal(op, tail=wrong) == [
        "tail.dtype must be float32 or float16 or bfloat16, got int32"
    ]


@pytest.mark.parametrize(("op", "operand"), EVERY_OPERAND)
def test_a_wrong_device_is_refused(op, operand):
    wrong = like(OPERANDS[op][operand], device=GPU)
    if operand == "tail":
        wanted = [
            f"{other}.device must be the ring's, gpu:0, got cpu:0"
            for other in OPERANDS[op]
            if other != "tail"
        ]
    else:
        wanted = [f"{operand}.device must be the ring's, cpu:0, got gpu:0"]
    assert refusal(op, **{operand: wrong}) == wanted


@pytest.mark.parametrize(("op", "operand"), EVERY_OPERAND)
def test_a_tensor_and_a_buffer_are_not_exchangeable(op, operand):
    old = OPERANDS[op][operand]
    kind = TensorType if operand == "tail" else BufferType
    wrong = kind(old.dtype, old.shape, old.device)
    (line,) = refusal(op, **{operand: wrong})
    if operand == "tail":
        assert line.startswith("tail must be a graph buffer (a BufferType input)")
        assert "got a TensorValue of float32" in line
    else:
        assert line.startswith(f"{operand} must be a graph tensor, got a BufferValue")
        assert f"of {old.dtype.name}" in line


@pytest.mark.parametrize(
    ("op", "operand", "shape", "wanted"),
    [
        (
            "tail_update",
            "k",
            ("batch", 3, 16),
            "k.shape[2] must be head_dim (8), got 16",
        ),
        (
            "tail_update",
            "gate",
            ("batch", 3, 16),
            "gate.shape[2] must be head_dim (8), got 16",
        ),
        (
            "tail_update",
            "gate",
            ("batch", 2, 8),
            "gate.shape[1] must be next_n (3), got 2",
        ),
        ("tail_update", "ape", (3, 8), "ape.shape[0] must be kpool (4), got 3"),
        ("tail_update", "ape", (4, 16), "ape.shape[1] must be head_dim (8), got 16"),
        (
            "tail_update",
            "positions",
            ("batch", 2),
            "positions.shape[1] must be next_n (3), got 2",
        ),
        ("seed_tail", "k", ("t", 16), "k.shape[1] must be head_dim (8), got 16"),
        ("seed_tail", "gate", ("t", 16), "gate.shape[1] must be head_dim (8), got 16"),
    ],
)
def test_an_operand_of_another_size_is_refused(op, operand, shape, wanted):
    wrong = like(OPERANDS[op][operand], shape=shape)
    assert refusal(op, **{operand: wrong}) == [wanted]


def test_known_batch_sizes_that_differ_are_refused():
    assert refusal(
        "tail_update",
        k=TensorType(F32, (5, 3, 8), HOST),
        gate=TensorType(F32, (4, 3, 8), HOST),
        positions=TensorType(I32, (6, 3), HOST),
        slot_idx=TensorType(U32, (7,), HOST),
    ) == [
        "gate.shape[0] must be batch (5), got 4",
        "positions.shape[0] must be batch (5), got 6",
        "slot_idx.shape[0] must be batch (5), got 7",
    ]
    assert refusal(
        "seed_tail",
        k=TensorType(F32, (5, 8), HOST),
        gate=TensorType(F32, (4, 8), HOST),
        cache_lengths=TensorType(U32, (2,), HOST),
        slot_idx=TensorType(U32, (3,), HOST),
    ) == [
        "gate.shape[0] must be total_tokens (5), got 4",
        "slot_idx.shape[0] must be batch (2), got 3",
    ]


def test_known_row_offsets_that_are_not_one_more_than_the_batch_are_refused():
    assert refusal(
        "seed_tail",
        input_row_offsets=TensorType(U32, (3,), HOST),
        cache_lengths=TensorType(U32, (3,), HOST),
        slot_idx=TensorType(U32, (3,), HOST),
    ) == ["input_row_offsets.shape[0] must be batch + 1 (4), got 3"]


@pytest.mark.parametrize("op", OPERANDS)
@pytest.mark.parametrize(
    ("shape", "kpool", "wanted"),
    [
        (("s", 3, 4, 8), 4, "tail.shape[1] must be 2, got 3"),
        (("s", "planes", 4, 8), 4, "tail.shape[1] must be 2, got planes"),
        (("s", 2, 3, 8), 4, "ring_len (3) must be at least kpool (4)"),
        (
            ("s", 2, "ring_len", 8),
            4,
            "ring_len must be known while the graph is built, got ring_len",
        ),
        (
            ("s", 2, 4, "width"),
            4,
            "head_dim must be known while the graph is built, got width",
        ),
        (("s", 2, 4, 0), 4, "head_dim must be at least 1, got 0"),
        (("s", 2, 4, 8), 0, "kpool must be at least 1, got 0"),
        (("s", 2, 4, 8), -2, "kpool must be at least 1, got -2"),
    ],
)
def test_an_impossible_ring_or_kpool_is_refused(op, shape, kpool, wanted):
    assert wanted in refusal(op, kpool=kpool, tail=like(RING, shape=shape))


@pytest.mark.parametrize(
    ("next_n", "wanted"),
    [
        (0, "next_n must be at least 1, got 0"),
        ("n", "next_n must be known while the graph is built, got n"),
    ],
)
def test_an_impossible_next_n_is_refused(next_n, wanted):
    tokens = TensorType(F32, ("batch", next_n, 8), HOST)
    assert refusal(
        "tail_update",
        k=tokens,
        gate=tokens,
        positions=TensorType(I32, ("batch", next_n), HOST),
    ) == [wanted]


def test_all_problems_of_a_call_are_reported_together():
    assert refusal(
        "tail_update",
        k=TensorType(F16, ("batch", 3, 8), HOST),
        ape=TensorType(F32, (3, 8), GPU),
        positions=TensorType(I64, ("batch",), HOST),
        slot_idx=BufferType(U32, ("batch",), HOST),
    ) == [
        "k.dtype must be float32, got float16",
        "ape.device must be the ring's, cpu:0, got gpu:0",
        "ape.shape[0] must be kpool (4), got 3",
        "positions.dtype must be int32, got int64",
        "positions.rank must be 2 ([batch, next_n]), got 1",
        "slot_idx must be a graph tensor, got a BufferValue of uint32 [batch]",
    ]


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_an_operand_error_is_a_value_error_and_a_type_error(kind):
    with pytest.raises(kind):
        build("seed_tail", kpool=0)


def test_a_refused_call_leaves_the_graph_without_the_op():
    with Graph("refused", input_types=list(SEED_TAIL.values())) as graph:
        with pytest.raises(OperandError):
            kpool_graph.seed_tail(*graph.inputs, kpool=5)
        graph.output()
    assert "mo.mla.kpool" not in str(graph)


def test_an_operand_that_is_no_graph_value_is_named():
    with Graph("numbers", input_types=list(SEED_TAIL.values())) as graph:
        tail, k, gate, offsets, lengths, _ = graph.inputs
        with pytest.raises(OperandError) as error:
            kpool_graph.seed_tail(tail, k, gate, offsets, lengths, 3, kpool=4)
    assert str(error.value) == (
        "seed_tail: slot_idx must be a graph tensor, got an int"
    )
