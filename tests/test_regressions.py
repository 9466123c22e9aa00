"""Faults seen in other code, by case number: speculation, addressing, slots."""

from __future__ import annotations

import numpy as np
import pytest
from max.dtype import DType

from asserts import assert_same_bits, message, run_tail_update
from cases import ring_for, update_operands
from models import Ring, SeedTail, TailUpdate, declare
from ramp import DRAFT, UNTOUCHED, prefill, ramp, step, untouched

F32 = DType.float32
SEED = declare(SeedTail(F32, 8, 4, 4))
WIDE_SEED = declare(SeedTail(F32, 8, 4, 6))
DECODE = declare(TailUpdate(F32, 8, 4, 1, 4))
TWO = declare(TailUpdate(F32, 8, 4, 2, 4))
THREE = declare(TailUpdate(F32, 8, 4, 3, 4))
THREE_WIDE = declare(TailUpdate(F32, 8, 4, 3, 6))
NINE = declare(TailUpdate(F32, 8, 4, 9, 4))


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
    assert (np.delete(runs[0], 6, axis=0) == UNTOUCHED).all()


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
    want = [1020.0, 1021.0, 1022.0][:seeded] + [UNTOUCHED] * (4 - seeded)
    assert runs[0][2, 0, :, 0].tolist() == want
    assert np.count_nonzero(runs[0][2, 1, :, 0] == 0) == seeded
    assert (np.delete(runs[0], 2, axis=0) == UNTOUCHED).all()


def test_case_13_only_the_named_slots_change(models):
    """Case 13: slots out of order, then one slot for three live rows."""
    ring = untouched(DECODE)
    keys = [[50], [20], [70]]
    step(models, DECODE, ring, [[0], [0], [0]], keys, slots=[5, 2, 7])
    stored = ring.storage()
    for slot, key in ((5, 50), (2, 20), (7, 70)):
        assert (stored[slot, 0, 0] == key).all()
        assert (stored[slot, 1, 0] == 0).all()
        assert (stored[slot, :, 1:] == UNTOUCHED).all()
    assert (np.delete(stored, [5, 2, 7], axis=0) == UNTOUCHED).all()

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
