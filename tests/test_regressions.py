"""Faults seen in other k-pool and state-ring code, by their case numbers.

The ramp recipe: the key of position p is p in every channel, gate and ape are 0,
so pool q is exactly `kpool * q + (kpool - 1) / 2`. A rejected draft's key is 1000
and an untouched ring is 777.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from max.driver import Buffer
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, ops

import kpool_graph
from asserts import (
    assert_pooled,
    assert_same_bits,
    message,
    run_seed_tail,
    run_tail_update,
)
from cases import (
    DTYPES,
    KPOOLS,
    SENTINEL,
    TAIL_UPDATES,
    encode,
    normal,
    ring_for,
    seed_operands,
    update_operands,
)
from kpool_graph.reference import values
from models import (
    OwnGraph,
    Ring,
    SeedTail,
    TailUpdate,
    compile_together,
    declare,
    to_buffer,
    to_storage,
)

F32, F16, BF16 = DType.float32, DType.float16, DType.bfloat16
SEED = declare(SeedTail(F32, 8, 4, 4))
WIDE_SEED = declare(SeedTail(F32, 8, 4, 6))
DECODE = declare(TailUpdate(F32, 8, 4, 1, 4))
TWO = declare(TailUpdate(F32, 8, 4, 2, 4))
THREE = declare(TailUpdate(F32, 8, 4, 3, 4))
THREE_WIDE = declare(TailUpdate(F32, 8, 4, 3, 6))
NINE = declare(TailUpdate(F32, 8, 4, 9, 4))
THIRTY_THREE = declare(TailUpdate(F16, 96, 16, 33, 48))
GLM = declare(TailUpdate(BF16, 128, 4, 4, 7))
IN_EACH_DTYPE = tuple(declare(TailUpdate(dtype, 32, 4, 4, 7)) for dtype in DTYPES)
DRAFT = 1000


def untouched(op, max_slots=9):
    shape = (max_slots, 2, op.ring_len, op.head_dim)
    return Ring(encode(np.full(shape, SENTINEL), op.dtype), op.dtype)


def ramp(op, keys):
    """Fills every channel of a token with its number."""
    keys = np.asarray(keys, np.float64)[..., np.newaxis]
    return encode(np.repeat(keys, op.head_dim, axis=-1), op.dtype)


def prefill(models, op, ring, slot, start, count):
    """Seeds one request's ramp tokens."""
    k = ramp(op, np.arange(start, start + count))
    models[op](
        ring,
        k,
        np.zeros_like(k),
        np.array([0, count], np.uint32),
        np.array([start], np.uint32),
        np.array([slot], np.uint32),
    )


def step(models, op, ring, positions, keys=None, slots=(0,)):
    """Decodes ramp tokens.

    Returns:
        The pools that closed, as (id, value) a row, and every channel agrees.
    """
    positions = np.array(positions, np.int32)
    k = ramp(op, np.maximum(positions, 0) if keys is None else keys)
    pooled, closed = models[op](
        ring,
        k,
        np.zeros_like(k),
        np.zeros((op.kpool, op.head_dim), np.float32),
        positions,
        np.array(slots, np.uint32),
    )
    assert (pooled == pooled[..., :1]).all()
    return [
        [
            (int(pool), float(value))
            for pool, value in zip(row, values(pooled[at, :, 0]), strict=True)
            if pool >= 0
        ]
        for at, row in enumerate(closed)
    ]


@pytest.mark.parametrize(
    ("op", "seed", "value"),
    [(THREE_WIDE, WIDE_SEED, 1.5), (THREE, SEED, 251.5)],
    ids=["ring_len_6_is_exact", "ring_len_4_is_the_limit"],
)
def test_case_1_rejected_drafts_spoil_only_a_ring_that_is_too_short(
    models, op, seed, value
):
    """Case 1: one of three drafts rejected, its ring entry a live member's or not."""
    ring = untouched(op)
    prefill(models, seed, ring, 0, 0, 2)
    closed = step(models, op, ring, [[2, 3, 4]], [[2, DRAFT, DRAFT]])
    assert closed == [[(0, (0 + 1 + 2 + DRAFT) / 4)]]
    assert step(models, op, ring, [[3, 4, 5]]) == [[(0, value)]]


def test_case_5_a_pool_closed_by_a_rejected_draft_closes_again(models):
    """Case 5: both steps report pool 0, and the second one is right."""
    ring = untouched(TWO)
    prefill(models, SEED, ring, 0, 0, 2)
    first = step(models, TWO, ring, [[2, 3]], [[2, DRAFT]])
    assert first == [[(0, (0 + 1 + 2 + DRAFT) / 4)]]
    assert step(models, TWO, ring, [[3, 4]]) == [[(0, 1.5)]]


def test_case_8_slots_outside_the_ring_are_errors_of_both_ops(models):
    """Case 8: every row would store and close, one slot is right, three are not."""
    slots = np.array([1, 8, 3545, 2**32 - 1], np.uint32)
    want = "slot_idx[1] must be below max_slots (8), got 8"
    ring = untouched(DECODE, max_slots=8)
    before = ring.storage()
    with pytest.raises(ValueError) as error:
        step(models, DECODE, ring, [[3], [7], [11], [15]], slots=slots)
    assert message(error) == f"tail_update: {want}"
    with pytest.raises(ValueError) as error:
        models[SEED](
            ring,
            ramp(SEED, np.arange(4)),
            ramp(SEED, np.arange(4)),
            np.arange(5, dtype=np.uint32),
            np.arange(4, dtype=np.uint32),
            slots,
        )
    assert message(error) == f"seed_tail: {want}"
    assert_same_bits(ring.storage(), before, "ring")


def test_case_12_a_step_wider_than_two_pools_laps_the_ring(models):
    """Case 12: nine tokens in a ring of four, bit-identical every run."""
    runs = []
    for _ in range(3):
        ring = untouched(NINE)
        closed = step(models, NINE, ring, [range(9)], slots=[6])
        assert closed == [[(0, 1.5), (1, 5.5)]]
        runs.append(ring.storage())
        assert_same_bits(runs[-1], runs[0], "ring")
    assert runs[0][6, 0, :, 0].tolist() == [8, 5, 6, 7]
    assert (np.delete(runs[0], 6, axis=0) == SENTINEL).all()


def test_case_12_ids_fill_in_order_and_the_rest_is_minus_one(models):
    """Case 12: the id columns of nine tokens at kpool 4."""
    k = ramp(NINE, np.arange(9))[np.newaxis]
    pooled, closed = models[NINE](
        untouched(NINE),
        k,
        np.zeros_like(k),
        np.zeros((4, 8), np.float32),
        np.arange(9, dtype=np.int32)[np.newaxis],
        np.zeros(1, np.uint32),
    )
    assert closed.tolist() == [[0, 1, -1]]
    assert_same_bits(pooled[0, 2], np.zeros(8, np.float32), "unused column")


@pytest.mark.parametrize(("tokens", "seeded"), [(1023, 3), (1024, 0)])
def test_case_12_a_chunk_seeds_what_its_last_pool_lacks(models, tokens, seeded):
    """Case 12: 1,023 tokens leave three behind and 1,024 none."""
    runs = []
    for _ in range(3):
        ring = untouched(SEED)
        prefill(models, SEED, ring, 2, 0, tokens)
        runs.append(ring.storage())
        assert_same_bits(runs[-1], runs[0], "ring")
    want = [1020.0, 1021.0, 1022.0][:seeded] + [SENTINEL] * (4 - seeded)
    assert runs[0][2, 0, :, 0].tolist() == want
    assert np.count_nonzero(runs[0][2, 1, :, 0] == 0) == seeded
    assert (np.delete(runs[0], 2, axis=0) == SENTINEL).all()


def test_case_13_only_the_named_slots_change(models):
    """Case 13: slots out of order, then one slot for three live rows."""
    ring = untouched(DECODE)
    keys = [[50], [20], [70]]
    step(models, DECODE, ring, [[0], [0], [0]], keys, slots=[5, 2, 7])
    stored = ring.storage()
    for slot, key in ((5, 50), (2, 20), (7, 70)):
        assert (stored[slot, 0, 0] == key).all()
        assert (stored[slot, 1, 0] == 0).all()
        assert (stored[slot, :, 1:] == SENTINEL).all()
    assert (np.delete(stored, [5, 2, 7], axis=0) == SENTINEL).all()

    with pytest.raises(ValueError) as error:
        step(models, DECODE, ring, [[1], [1], [1]], slots=[0, 0, 0])
    assert message(error) == (
        "tail_update: slot_idx[1] must differ from every other row's with real"
        " tokens, got 0 a second time"
    )
    assert_same_bits(ring.storage(), stored, "ring")


@pytest.mark.parametrize("op", [DECODE, NINE], ids=["next_n_1", "next_n_9"])
def test_case_14_padded_rows_leave_a_parked_request_alone(models, op):
    """Case 14: slot 0 is a parked request's, and padding names it."""
    rng = np.random.default_rng(14)
    ring = Ring(ring_for(rng, op, [(0, 7)]), op.dtype)
    before = ring.storage()
    padding = np.full(op.next_n, -1)
    real = np.where(np.arange(op.next_n) == 0, 0, -1)
    operands = update_operands(
        rng, op, [real, real, padding, padding], [3, 1, 0, 2**32 - 1]
    )
    _, closed = run_tail_update(models[op], ring, *operands)
    assert (closed[2:] == -1).all()
    assert_same_bits(ring.storage()[0], before[0], "the parked request's slot")


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


@pytest.mark.parametrize("op", IN_EACH_DTYPE, ids=lambda op: op.dtype.name)
def test_case_36_each_dtype_runs_on_the_cpu(models, op):
    """Case 36: two ramp pools, and the second once more after a rewind."""
    ring = untouched(op)
    assert step(models, op, ring, [range(4)], slots=[2]) == [[(0, 1.5)]]
    assert step(models, op, ring, [range(4, 8)], slots=[2]) == [[(1, 5.5)]]
    assert step(models, op, ring, [range(6, 10)], slots=[2]) == [[(1, 5.5)]]
