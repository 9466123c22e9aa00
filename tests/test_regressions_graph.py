"""Faults seen in other code, by case number: graphs, buffers that persist, reuse."""

from __future__ import annotations

from itertools import product

import numpy as np
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, ops

import kpool_graph
from asserts import assert_same_bits, run_tail_update
from cases import normal, ring_for, update_operands
from models import (
    OwnGraph,
    Ring,
    SeedTail,
    TailUpdate,
    declare,
    to_buffer,
    to_storage,
)
from ramp import ramp, untouched

F32 = DType.float32
SEED = declare(SeedTail(F32, 8, 4, 4))
DECODE = declare(TailUpdate(F32, 8, 4, 1, 4))
TWO = declare(TailUpdate(F32, 8, 4, 2, 4))
GLM = declare(TailUpdate(DType.bfloat16, 128, 4, 4, 7))


def test_case_21_one_model_over_buffers_that_change_equals_fresh_runs(models):
    """Case 21: ten executions, positions and slot_idx rewritten in place."""
    rng = np.random.default_rng(21)
    call, op = models[GLM], GLM
    k, gate, ape, *tables = update_operands(
        rng, op, [np.arange(4), np.arange(4)], [0, 1]
    )
    held = [to_buffer(k, op.dtype), to_buffer(gate, op.dtype), to_buffer(ape, F32)]
    changing = [Buffer.from_numpy(table) for table in tables]
    ring = Ring(normal(rng, (9, 2, op.ring_len, op.head_dim), op.dtype), op.dtype)
    pools = 0
    for run in range(10):
        fresh_ring = Ring(ring.storage(), op.dtype)
        starts = np.array([[run], [40 - run]])
        changing[0].to_numpy()[:] = starts + np.arange(4)
        changing[1].to_numpy()[:] = [3 * run % 9, (3 * run + 1) % 9]
        outputs = call.run(ring.buffer, *held, *changing)
        pooled, closed = map(to_storage, outputs)
        fresh = call(fresh_ring, k, gate, ape, *map(to_storage, changing))
        assert_same_bits(pooled, fresh[0], f"pooled of run {run}")
        assert_same_bits(closed, fresh[1], f"closed_pool of run {run}")
        assert_same_bits(ring.storage(), fresh_ring.storage(), f"ring of run {run}")
        pools += np.count_nonzero(closed >= 0)
    assert pools >= 2


def test_case_22_outputs_kept_from_one_run_survive_the_next(models):
    """Case 22: the outputs of run i are not the memory of run i + 1."""
    rng = np.random.default_rng(22)
    ring = Ring(ring_for(rng, GLM), GLM.dtype)
    kept = []
    for run in range(5):
        k, gate, *tables = update_operands(rng, GLM, [np.arange(4) + 4 * run], [2])
        outputs = models[GLM].run(
            ring.buffer, to_buffer(k, GLM.dtype), to_buffer(gate, GLM.dtype), *tables
        )
        kept.append((outputs, [to_storage(each) for each in outputs]))
    for run, (outputs, seen) in enumerate(kept):
        for output, before in zip(outputs, seen, strict=True):
            assert_same_bits(to_storage(output), before, f"output of run {run}")
    assert [seen[1].tolist() for _, seen in kept] == [[[run]] for run in range(5)]


LAYERS = 4


def four_layers(*inputs):
    rings, (k, gate, ape, positions, slot_idx) = inputs[:LAYERS], inputs[LAYERS:]
    outputs = []
    for layer, ring in enumerate(rings):
        scaled = k * ops.constant(layer + 1, F32, DeviceRef.CPU())
        outputs += kpool_graph.tail_update(
            ring, scaled, gate, ape, positions, slot_idx, kpool=4
        )
    return outputs


def same_ring_twice(tail, k, gate, ape, positions, next_positions, slot_idx):
    first = kpool_graph.tail_update(tail, k, gate, ape, positions, slot_idx, kpool=4)
    second = kpool_graph.tail_update(
        tail, k, gate, ape, next_positions, slot_idx, kpool=4
    )
    return [*first, *second]


def seeded_then_decoded(tail, k, gate, offsets, lengths, slots, k1, gate1, ape, pos):
    kpool_graph.seed_tail(tail, k, gate, offsets, lengths, slots, kpool=4)
    return kpool_graph.tail_update(tail, k1, gate1, ape, pos, slots, kpool=4)


def no_output_used(*inputs):
    kpool_graph.tail_update(*inputs, kpool=4)
    return ()


TWO_TYPES = TWO.input_types
FOUR_LAYERS = declare(
    OwnGraph("four_layers", four_layers, (*[TWO.ring_type] * LAYERS, *TWO_TYPES[1:]))
)
SAME_RING_TWICE = declare(
    OwnGraph("same_ring_twice", same_ring_twice, (*TWO_TYPES[:5], *TWO_TYPES[4:]))
)
SEEDED_THEN_DECODED = declare(
    OwnGraph(
        "seeded_then_decoded",
        seeded_then_decoded,
        (
            *SEED.input_types,
            *DECODE.input_types[1:5],
        ),
    )
)
NO_OUTPUT_USED = declare(OwnGraph("no_output_used", no_output_used, tuple(TWO_TYPES)))


def test_case_23_four_layers_in_one_graph_equal_four_graphs(models):
    """Case 23: one graph, four layers, each with its own ring."""
    rng = np.random.default_rng(23)
    requests = [(4, 6), (0, 3), (8, 1)]
    k, gate, ape, positions, slots = update_operands(
        rng, TWO, [np.arange(s, s + 2) for _, s in requests], [r[0] for r in requests]
    )
    tails = [ring_for(rng, TWO, requests) for _ in range(LAYERS)]
    rings = [Ring(tail, F32) for tail in tails]
    outputs = models[FOUR_LAYERS](*rings, k, gate, ape, positions, slots)
    for layer, tail in enumerate(tails):
        alone = Ring(tail, F32)
        scaled = k * np.float32(layer + 1)
        want = models[TWO](alone, scaled, gate, ape, positions, slots)
        assert (want[1] >= 0).any()
        for got, single in zip(outputs[2 * layer : 2 * layer + 2], want, strict=True):
            assert_same_bits(got, single, f"layer {layer}")
        assert_same_bits(rings[layer].storage(), alone.storage(), f"ring {layer}")


def test_case_23_a_second_op_on_a_ring_sees_the_first_ones_stores(models):
    """Case 23: two successive updates of one ring in one graph."""
    ring = untouched(TWO)
    k = ramp(TWO, [[5, 7]])
    zero_gate, zero_ape = np.zeros_like(k), np.zeros((4, 8), np.float32)
    first, second = np.array([[0, 1]], np.int32), np.array([[2, 3]], np.int32)
    _, closed_first, pooled, closed = models[SAME_RING_TWICE](
        ring, k, zero_gate, zero_ape, first, second, np.array([3], np.uint32)
    )
    assert (closed_first.tolist(), closed.tolist()) == ([[-1]], [[0]])
    assert (pooled == 6).all()
    assert ring.storage()[3, 0, :, 0].tolist() == [5, 7, 5, 7]


def test_case_23_decode_sees_what_prefill_stored_in_the_same_graph(models):
    """Case 23: seed_tail, then tail_update, on one ring in one graph."""
    ring = untouched(DECODE)
    k, last = ramp(SEED, range(3)), ramp(DECODE, [[3]])
    pooled, closed = models[SEEDED_THEN_DECODED](
        ring,
        k,
        np.zeros_like(k),
        np.array([0, 3], np.uint32),
        np.zeros(1, np.uint32),
        np.array([5], np.uint32),
        last,
        np.zeros_like(last),
        np.zeros((4, 8), np.float32),
        np.array([[3]], np.int32),
    )
    assert closed.tolist() == [[0]]
    assert (pooled == 1.5).all()


def test_case_24_the_ring_is_updated_when_no_output_is_used(models):
    """Case 24: an op whose results nobody reads still runs."""
    rng = np.random.default_rng(24)
    operands = update_operands(rng, TWO, [np.arange(2), np.arange(6, 8)], [4, 1])
    tail = ring_for(rng, TWO, [(4, 0), (1, 6)])
    unused, used = Ring(tail, F32), Ring(tail, F32)
    assert models[NO_OUTPUT_USED](unused, *operands) == []
    models[TWO](used, *operands)
    assert_same_bits(unused.storage(), used.storage(), "ring")
    assert (unused.storage()[4] != tail[4]).any()


def test_case_32_one_model_runs_at_any_batch_and_ring_size(models):
    """Case 32: batches of 1, 7 and 64, rings of several max_slots, one load."""
    rng = np.random.default_rng(32)
    for rows, max_slots in product((1, 7, 64), (64, 65, 300)):
        slots = rng.permutation(max_slots)[:rows]
        starts = rng.integers(0, 50, rows)
        tail = ring_for(rng, GLM, zip(slots, starts, strict=True), max_slots)
        positions = [np.arange(start, start + 4) for start in starts]
        operands = update_operands(rng, GLM, positions, slots)
        run_tail_update(models[GLM], Ring(tail, GLM.dtype), *operands)
