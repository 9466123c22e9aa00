"""Faults seen in other serving code, through SlotPool and the compiled ops.

Cases by number; the ramp recipe is told in `ramp`.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from max.dtype import DType

from asserts import assert_same_bits
from kpool_graph import OperandError, SlotError, SlotPool, TailRing, min_ring_len
from models import Ring, SeedTail, TailUpdate, compile_together, declare
from ramp import DRAFT, UNTOUCHED, prefill, ramp, step, untouched
from serving import CopySlots, refused

F32, U32 = DType.float32, np.uint32
SEED = declare(SeedTail(F32, 8, 4, 4))
WIDE_SEED = declare(SeedTail(F32, 8, 4, 6))
DECODE = declare(TailUpdate(F32, 8, 4, 1, 4))
THREE = declare(TailUpdate(F32, 8, 4, 3, 4))
THREE_WIDE = declare(TailUpdate(F32, 8, 4, 3, 6))
STEPS_OF = {
    1: (DECODE, DECODE),
    2: (declare(TailUpdate(F32, 8, 4, 2, 5)), declare(TailUpdate(F32, 8, 4, 2, 4))),
    3: (THREE_WIDE, THREE),
}
COPY = declare(CopySlots(F32, 8, 4))
STACKED = declare(CopySlots(F32, 8, 6, (3,)))


def ring_of(op, max_slots=9, **fields):
    return TailRing(max_slots, op.kpool, op.head_dim, op.dtype, op.ring_len, **fields)


class Server:
    """A ring and its pool, driven as an engine would."""

    def __init__(self, models, op, max_slots=9):
        self.models = models
        self.op = op
        self.pool = SlotPool(ring_of(op, max_slots))
        self.ring = untouched(op, max_slots)

    def prefill(self, op, name, count):
        """Seeds a request's next ramp tokens."""
        (slot,) = self.pool.slot_idx([name])
        prefill(self.models, op, self.ring, slot, self.pool.length(name), count)
        self.pool.advance(name, count, seeded=True)

    def step(self, names, keys=None, may_reject=0):
        """Decodes the next tokens of each request, and returns what closed."""
        positions = self.pool.positions(names, self.op.next_n)
        slots = self.pool.slot_idx(names)
        for name in names:
            self.pool.advance(name, self.op.next_n, may_reject=may_reject)
        return step(self.models, self.op, self.ring, positions, keys, slots)

    def copy(self):
        """Runs the copies that forks wait for."""
        self.models[COPY](self.ring, *self.pool.take_copies())


def slot_error(call, *arguments, **keywords):
    with pytest.raises(SlotError) as error:
        call(*arguments, **keywords)
    return str(error.value)


def test_case_1_a_wide_ring_takes_rejected_drafts(models):
    """Case 1: one of three tokens stays, and pool 0 is right all the same."""
    server = Server(models, THREE_WIDE)
    server.pool.claim("a")
    server.prefill(WIDE_SEED, "a", 2)
    provisional = server.step(["a"], [[2, DRAFT, DRAFT]], may_reject=2)
    assert provisional == [[(0, (0 + 1 + 2 + DRAFT) / 4)]]
    server.pool.rewind("a", 3)
    assert server.step(["a"], may_reject=2) == [[(0, 1.5)]]


def test_case_1_the_plain_ring_is_refused_before_and_after_the_step(models):
    """Case 1: the pool says so at the step and at the rewind; the ring would not."""
    server = Server(models, THREE)
    server.pool.claim("a")
    server.prefill(SEED, "a", 2)
    assert slot_error(server.pool.advance, "a", 3, may_reject=2) == (
        "advance: request 'a' appends 3 tokens of which 2 may be rejected: ring_len"
        " must be at least kpool - 1 + 2 (5), got 4; use"
        " TailRing(speculative_tokens=1)"
    )
    server.step(["a"], [[2, DRAFT, DRAFT]])
    assert "needs tokens 0 to 2, and slot 0 holds none before 1" in slot_error(
        server.pool.rewind, "a", 3
    )
    assert step(models, THREE, server.ring, [[3, 4, 5]]) == [[(0, 251.5)]]


POOLED_ROWS = 20_000


def run_patterns(call, next_n, commits_at_least, starts=range(12)):
    """Decodes the ramp with every accept pattern over six steps from every start.

    A slot pool is told what some thousands of the rows do.

    Returns:
        `[rows]` bool, whether a row's pools came out wrong; and of the rows that the
        slot pool knows, `[rows]` bool, whether it refused one of their rewinds.
    """
    op = call.op
    patterns = list(product(range(commits_at_least, next_n + 1), repeat=6))
    accepted = np.tile(np.array(patterns), (len(starts), 1))
    start = np.repeat(starts, len(patterns))
    rows = len(start)
    known = np.random.default_rng(3).permutation(rows)[:POOLED_ROWS]
    pool = SlotPool(ring_of(op, rows))
    for row in known.tolist():
        pool.claim(row)
        pool.advance(row, int(start[row]))
    tail = np.full((rows, 2, op.ring_len, op.head_dim), UNTOUCHED, np.float32)
    for first in starts:
        for position in range(first - first % 4, first):
            tail[start == first, :, position % op.ring_len] = [[position], [0]]
    ring = Ring(tail, F32)
    refused_rewind = np.zeros(rows, bool)
    value = np.full((rows, 32), np.nan)
    length = start.copy()
    for turn in range(6):
        positions = length[:, np.newaxis] + np.arange(next_n)
        drafts = np.arange(next_n) >= accepted[:, turn, np.newaxis]
        k = ramp(op, np.where(drafts, DRAFT, positions))
        pooled, closed = call(
            ring,
            k,
            np.zeros_like(k),
            np.zeros((4, op.head_dim), np.float32),
            positions.astype(np.int32),
            np.arange(rows, dtype=U32),
        )
        for column in range(op.columns):
            (closing,) = np.nonzero(closed[:, column] >= 0)
            value[closing, closed[closing, column]] = pooled[closing, column, 0]
        length += accepted[:, turn]
        for row in known[~refused_rewind[known]].tolist():
            pool.advance(row, next_n)
            try:
                pool.rewind(row, int(length[row]))
            except SlotError:
                refused_rewind[row] = True
    ids = np.arange(value.shape[1])
    due = (start[:, np.newaxis] // 4 <= ids) & (ids < length[:, np.newaxis] // 4)
    wrong = (due & (value != 4 * ids + 1.5)).any(axis=1)
    return wrong, known, refused_rewind[known]


@pytest.mark.parametrize("next_n", sorted(STEPS_OF))
def test_case_3_every_accept_pattern_is_right_or_refused(models, next_n):
    """Case 3: the wide ring is exact; the plain one up to two tokens a step."""
    wide, plain = (models[op] for op in STEPS_OF[next_n])
    wrong, _, refusals = run_patterns(wide, next_n, 0)
    assert not wrong.any() and not refusals.any()
    wrong, known, refusals = run_patterns(plain, next_n, 1)
    assert wrong.any() == refusals.any() == (next_n > 2)
    assert not (wrong[known] & ~refusals).any(), "wrong, and nothing was refused"


@pytest.mark.slow
def test_case_3_every_accept_pattern_of_wider_steps_is_right_or_refused():
    """Case 3 for four to eight tokens a step: 11.7 million patterns and starts."""
    ops = {
        next_n: [TailUpdate(F32, 1, 4, next_n, ring) for ring in (next_n + 3, 4)]
        for next_n in range(4, 9)
    }
    compiled = compile_together([op for pair in ops.values() for op in pair])
    rows = 0
    for next_n, (wide, plain) in ops.items():
        for start in range(12):
            wrong, _, refusals = run_patterns(compiled[wide], next_n, 0, [start])
            assert not wrong.any() and not refusals.any()
            rows += len(wrong)
        wrong, known, refusals = run_patterns(compiled[plain], next_n, 1, [3])
        assert wrong.any()
        assert not (wrong[known] & ~refusals).any()
    assert rows == 12 * sum((next_n + 1) ** 6 for next_n in ops)


@pytest.mark.parametrize("next_n", range(1, 9))
def test_case_3_an_unsafe_pair_is_refused_by_its_bound(next_n):
    """Case 3: each ring takes the widest step of its bound and no wider one."""
    for ring_len in range(4, 13):
        pool = SlotPool(TailRing(1, 4, 8, ring_len=ring_len))
        pool.claim("a")
        bound = min_ring_len(4, next_n)
        if ring_len < bound:
            message = slot_error(pool.advance, "a", next_n, may_reject=next_n)
            assert f"kpool - 1 + {next_n} ({bound}), got {ring_len}" in message
        else:
            assert pool.advance("a", next_n, may_reject=next_n) == next_n


def test_case_6_resuming_where_members_are_gone_is_refused(models):
    """Case 6: length 11, resumed at 5 in the plain ring."""
    server = Server(models, DECODE)
    server.pool.claim("a")
    for _ in range(11):
        server.step(["a"])
    message = slot_error(server.pool.rewind, "a", 5)
    assert "request 'a' of length 11 cannot go on at 5" in message
    assert "rewind to 4 and feed them again" in message
    for position in (5, 6):
        assert step(models, DECODE, server.ring, [[position]]) == [[]]
    spoilt = step(models, DECODE, server.ring, [[7]])
    assert spoilt == [[(1, (8 + 5 + 6 + 7) / 4)]]
    server.pool.rewind("a", 4)
    assert [server.step(["a"]) for _ in range(4)][-1] == [[(1, 5.5)]]


def test_case_9_no_slot_outside_the_ring_exists(models):
    """Case 9: 33 slots; 96 is an error with both numbers wherever it turns up."""
    server = Server(models, DECODE, max_slots=33)
    slots = [server.pool.claim(name) for name in range(33)]
    assert sorted(slots) == list(range(33))
    assert "all 33 are owned" in slot_error(server.pool.claim, 96)
    k = ramp(DECODE, [[0]])
    message = refused(
        models[DECODE],
        server.ring,
        k,
        k,
        np.zeros((4, 8), np.float32),
        np.zeros((1, 1), np.int32),
        np.array([96], U32),
    )
    assert message == "tail_update: slot_idx[0] must be below max_slots (33), got 96"
    with pytest.raises(OperandError, match=r"below max_slots \(33\), got 96"):
        server.pool.ring.poison_slots(server.ring.buffer, [96])
    closed = [server.step(range(33)) for _ in range(4)][-1]
    assert closed == [[(0, 1.5)]] * 33


def test_case_15_a_padded_batch_touches_no_slot(models):
    """Case 15: every slot is owned, and five of eight rows are padding."""
    server = Server(models, THREE)
    names = list("abcdefghi")
    for name in names:
        server.pool.claim(name)
        server.prefill(SEED, name, 2)
    assert server.pool.free_slots == 0
    before = server.ring.storage()
    live = ["c", "i", "e"]
    positions, slots = server.pool.pad_to(
        8, server.pool.positions(live, 3), server.pool.slot_idx(live)
    )
    closed = step(models, THREE, server.ring, positions, slots=slots)
    assert closed == [[(0, 1.5)]] * 3 + [[]] * 5
    after = server.ring.storage()
    others = np.delete(np.arange(9), server.pool.slot_idx(live))
    assert_same_bits(after[others], before[others], "slots of nobody in the batch")


def test_case_16_a_full_ring_and_a_double_release_are_refused(models):
    """Case 16: capacity 4, ids 1 and 5; no slot is ever given out twice."""
    server = Server(models, DECODE, max_slots=4)
    pool = server.pool
    assert pool.claim(1) != pool.claim(5)
    pool.claim(2)
    pool.claim(3)
    assert "finds no free slot: all 4 are owned" in slot_error(pool.claim, 4)
    pool.release(2)
    assert "request 2 owns no slot" in slot_error(pool.release, 2)
    assert pool.free_slots == 1
    pool.claim(6)
    assert "finds no free slot" in slot_error(pool.claim, 7)
    live = [1, 5, 3, 6]
    assert len(set(pool.slot_idx(live).tolist())) == 4
    assert [server.step(live) for _ in range(4)][-1] == [[(0, 1.5)]] * 4


def test_case_17_a_reused_slot_leaks_nothing(models):
    """Case 17: a slot full of another request, then three tokens and a decode."""
    server = Server(models, DECODE, max_slots=1)
    server.pool.claim("old")
    for _ in range(7):
        server.step(["old"], [[DRAFT]])
    server.pool.release("old")
    server.pool.claim("new")
    server.prefill(SEED, "new", 3)
    assert server.step(["new"]) == [[(0, 1.5)]]


def test_case_17_an_unseeded_start_is_refused_and_poison_shows_it(models):
    """Case 17: a prefix of 6 without a seed; and what it would have read."""
    ring = ring_of(DECODE, max_slots=2, poison=True)
    device = untouched(DECODE, max_slots=2)
    pool = SlotPool(ring, buffers=[device.buffer])
    message = slot_error(pool.claim, "a", cached_tokens=6)
    assert message.startswith("claim: unseeded mid-pool start: request 'a' has 6")
    slot = pool.claim("a", cached_tokens=4)
    assert step(models, DECODE, device, [[6]], slots=[slot]) == [[]]
    k = ramp(DECODE, [[7]])
    pooled, closed = models[DECODE](
        device,
        k,
        np.zeros_like(k),
        np.zeros((4, 8), np.float32),
        np.array([[7]], np.int32),
        np.array([slot], U32),
    )
    assert closed.tolist() == [[1]]
    assert np.isnan(pooled).all()


def test_case_18_a_prefix_hit_is_cut_and_seeded_again(models):
    """Case 18: a hit of 10 tokens; 8 and 9 are fed again, and pool 2 is right."""
    server = Server(models, DECODE)
    assert server.pool.usable_prefix(10) == 8
    server.pool.claim("a", cached_tokens=server.pool.usable_prefix(10))
    server.prefill(SEED, "a", 2)
    assert server.step(["a"]) == [[]]
    assert server.step(["a"]) == [[(2, 9.5)]]
    assert "page_size (10) must be a multiple of kpool (4)" in slot_error(
        SlotPool, server.pool.ring, page_size=10
    )


def test_case_19_a_request_is_saved_and_restored_into_another_slot(models):
    """Case 19: out of slot 3, which another request then gets, and into slot 5."""
    server = Server(models, DECODE)
    pool = server.pool
    for name in range(3):
        pool.claim(name)
    assert pool.claim("a") == 3
    for _ in range(10):
        server.step(["a"])
    held = server.ring.storage()[3]
    pool.fork("a", "saved")
    server.copy()
    pool.release("a")
    assert pool.claim("owner") == 3
    for _ in range(6):
        server.step(["owner"], [[DRAFT]])
    assert pool.fork("saved", "a") == 5
    server.copy()
    pool.release("saved")
    assert_same_bits(server.ring.storage()[5], held, "keys and gates restored")
    new_owner = server.ring.storage()[3]
    assert [server.step(["a"]) for _ in range(2)] == [[[]], [[(2, 9.5)]]]
    assert_same_bits(server.ring.storage()[3], new_owner, "slot of the new owner")


def test_case_20_a_fork_is_copied_in_every_layer(models):
    """Case 20: slot 1 to slot 4 of a ring stacked over three layers."""
    op = STACKED
    ring = TailRing(6, 4, op.head_dim, F32, op.ring_len)
    pool = SlotPool(ring)
    for name in range(4):
        pool.claim(name)
    assert pool.fork(1, "fork") == 4
    rng = np.random.default_rng(20)
    tail = rng.standard_normal((3, *ring.shape)).astype(np.float32)
    stacked = Ring(tail, F32)
    models[op](stacked, *pool.take_copies(layers=3))
    after = stacked.storage()
    assert_same_bits(after[:, 4], tail[:, 1], "the fork's slots")
    assert_same_bits(after[:, [0, 1, 2, 3, 5]], tail[:, [0, 1, 2, 3, 5]], "others")
