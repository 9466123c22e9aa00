"""SlotPool: what it gives out, what it tracks, and what it refuses."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from max.dtype import DType

import models
from cases import DTYPES
from kpool_graph import OperandError, SlotError, SlotPool, TailRing, to_buffer
from kpool_graph.reference import values
from kpool_graph.slots import PADDING_SLOT


def pool_of(max_slots=4, kpool=4, **fields):
    return SlotPool(TailRing(max_slots, kpool, 8, DType.float32, **fields))


def refused(call, *arguments, **keywords):
    with pytest.raises(SlotError) as error:
        call(*arguments, **keywords)
    return str(error.value)


def test_slots_are_distinct_and_come_back():
    pool = pool_of(3)
    assert sorted(pool.claim(name) for name in "abc") == [0, 1, 2]
    slots = pool.slot_idx("cab")
    assert (slots.dtype, slots.tolist()) == (np.uint32, [2, 0, 1])
    assert (len(pool), pool.free_slots) == (3, 0)
    pool.release("b")
    assert (len(pool), pool.free_slots) == (2, 1)
    assert pool.claim("d") == 1


def test_an_empty_batch_has_no_slots():
    pool = pool_of()
    assert pool.slot_idx([]).shape == (0,)
    assert pool.positions([], 3).shape == (0, 3)


def test_positions_go_on_where_the_request_is():
    pool = pool_of()
    pool.claim("a")
    pool.claim("b", 8)
    pool.advance("a", 3)
    positions = pool.positions(["b", "a"], 2)
    assert (positions.dtype, positions.tolist()) == (np.int32, [[8, 9], [3, 4]])


def test_padding_rows_have_no_position_and_no_slot_of_anyone():
    pool = pool_of()
    for name in "abcd":
        pool.claim(name)
    positions, slots = pool.pad_to(3, pool.positions("d", 2), pool.slot_idx("d"))
    assert (positions.dtype, slots.dtype) == (np.int32, np.uint32)
    assert positions.tolist() == [[0, 1], [-1, -1], [-1, -1]]
    assert slots.tolist() == [3, PADDING_SLOT, PADDING_SLOT]
    full = pool.pad_to(1, pool.positions("d", 2), pool.slot_idx("d"))
    assert full[1].tolist() == [3]
    assert refused(pool.pad_to, 1, positions, slots) == (
        "pad_to: 3 rows do not fit a batch of 1; split them"
    )


def test_a_full_pool_refuses():
    pool = pool_of(2)
    pool.claim("a")
    pool.claim("b")
    assert refused(pool.claim, "c") == (
        "claim: request 'c' finds no free slot: all 2 are owned; release a request"
        " first, or use a ring with more max_slots"
    )
    assert refused(pool.fork, "a", "c").startswith("fork: request 'c' finds no free")
    pool.release("a")
    pool.claim("c")


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("release", ("x",)),
        ("slot_idx", (["x"],)),
        ("length", ("x",)),
        ("positions", (["x"], 1)),
        ("advance", ("x", 1)),
        ("rewind", ("x", 0)),
        ("fork", ("x", "y")),
    ],
)
@pytest.mark.parametrize("was_claimed", [False, True])
def test_a_request_without_a_slot_is_refused(call, arguments, was_claimed):
    pool = pool_of()
    if was_claimed:
        pool.claim("x")
        pool.release("x")
    assert refused(getattr(pool, call), *arguments) == (
        f"{call}: request 'x' owns no slot: it was never claimed, or is released"
        " already; claim it first"
    )
    assert pool.free_slots == 4


def test_a_request_owns_one_slot():
    pool = pool_of()
    pool.claim(17)
    pool.claim(5)
    want = "request 17 owns slot 0 already; release it first"
    assert refused(pool.claim, 17) == f"claim: {want}"
    assert refused(pool.fork, 5, 17) == f"fork: {want}"
    assert pool.free_slots == 2


def test_a_request_has_one_row():
    pool = pool_of()
    pool.claim("a")
    pool.claim("b")
    assert refused(pool.slot_idx, ["a", "b", "a"]) == (
        "slot_idx: request 'a' occurs twice; give it one row a call"
    )


def test_a_start_in_the_middle_of_a_pool_is_refused():
    pool = pool_of()
    assert refused(pool.claim, "a", 6) == (
        "claim: unseeded mid-pool start: request 'a' has 6 cached tokens, no multiple"
        " of kpool (4), and no slot holds tokens 4 to 5; claim with cached_tokens=4"
        " and feed them again"
    )
    assert refused(pool.claim, "a", -4) == (
        "claim: request 'a': cached_tokens must be at least 0, got -4"
    )
    assert pool.free_slots == 4
    pool.claim("a", pool.usable_prefix(6))
    assert pool.length("a") == 4


@pytest.mark.parametrize(
    ("hit", "usable"), [(0, 0), (3, 0), (4, 4), (10, 8), (1023, 1020)]
)
def test_a_prefix_hit_is_cut_to_whole_pools(hit, usable):
    assert pool_of().usable_prefix(hit) == usable


@pytest.mark.parametrize("page_size", [6, 0, -4])
def test_a_page_that_cuts_a_pool_is_refused(page_size):
    ring = TailRing(4, 4, 8)
    assert refused(SlotPool, ring, page_size=page_size) == (
        f"SlotPool: page_size ({page_size}) must be a multiple of kpool (4), so that"
        " no page ends in the middle of a pool"
    )
    SlotPool(ring, page_size=128)


@pytest.mark.parametrize("to_length", [-1, 6])
def test_a_rewind_stays_within_the_request(to_length):
    pool = pool_of()
    pool.claim("a")
    pool.advance("a", 5)
    assert refused(pool.rewind, "a", to_length) == (
        f"rewind: request 'a' of length 5 cannot go on at {to_length}; go on at 0 to 5"
    )


def test_a_rewind_past_what_the_slot_holds_is_refused():
    pool = pool_of()
    pool.claim("a")
    pool.advance("a", 11)
    assert refused(pool.rewind, "a", 5) == (
        "rewind: request 'a' of length 11 cannot go on at 5: that needs tokens 4 to 4,"
        " and slot 0 holds none before 7 in its 4 entries; rewind to 4 and feed them"
        " again, or use a ring with more speculative_tokens"
    )
    assert pool.length("a") == 11
    pool.rewind("a", 4)
    pool.advance("a", 2)
    pool.rewind("a", 5)
    assert pool.length("a") == 5


def test_what_seed_tail_did_not_stash_cannot_be_rewound_into():
    pool = pool_of(ring_len=16)
    pool.claim("a")
    pool.advance("a", 11, seeded=True)
    assert "holds none before 8 in its 16 entries" in refused(pool.rewind, "a", 7)
    pool.rewind("a", 10)
    pool.rewind("a", 4)


@pytest.mark.parametrize(
    ("fields", "may_reject", "text"),
    [
        ({}, 2, "ring_len must be at least kpool - 1 + 2 (5), got 4"),
        ({"ring_len": 6}, 4, "ring_len must be at least kpool - 1 + 4 (7), got 6"),
        (
            {"speculative_tokens": 3},
            5,
            "ring_len must be at least kpool - 1 + 5 (8), got 7",
        ),
    ],
    ids=str,
)
def test_a_step_wider_than_the_ring_allows_is_refused(fields, may_reject, text):
    pool = pool_of(**fields)
    pool.claim("a")
    message = refused(pool.advance, "a", 6, may_reject=may_reject)
    assert message == (
        f"advance: request 'a' appends 6 tokens of which {may_reject} may be rejected:"
        f" {text}; use TailRing(speculative_tokens={may_reject - 1})"
    )
    assert pool.length("a") == 0
    pool.advance("a", 6, may_reject=may_reject - 1)


def test_seeded_tokens_cannot_be_rejected():
    pool = pool_of(speculative_tokens=4)
    pool.claim("a")
    assert refused(pool.advance, "a", 2, may_reject=1, seeded=True) == (
        "advance: request 'a' appends 2 tokens of which 1 may be rejected, but"
        " seed_tail stashes too few of them; use tail_update or ragged_update"
    )


@pytest.mark.parametrize(("n_tokens", "may_reject"), [(2, 3), (2, -1), (-1, 0)])
def test_a_step_has_no_fewer_tokens_than_it_may_lose(n_tokens, may_reject):
    pool = pool_of()
    pool.claim("a")
    assert refused(pool.advance, "a", n_tokens, may_reject=may_reject) == (
        f"advance: request 'a' cannot append {n_tokens} tokens of which {may_reject}"
        " may be rejected; use 0 <= may_reject <= n_tokens"
    )


def test_a_fork_starts_with_what_the_source_holds():
    pool = pool_of()
    pool.claim("a")
    pool.advance("a", 11)
    assert pool.fork("a", "b") == 1
    assert pool.length("b") == 11
    src, dst = pool.take_copies()
    assert (src.dtype, dst.dtype) == (np.uint32, np.uint32)
    assert (src.tolist(), dst.tolist()) == ([0], [1])
    assert "slot 1 holds none before 7" in refused(pool.rewind, "b", 5)
    pool.advance("b", 1)
    assert (pool.length("a"), pool.length("b")) == (11, 12)
    pool.fork("b", "c")
    stacked = [each.tolist() for each in pool.take_copies(layers=3)]
    assert stacked == [[1, 5, 9], [2, 6, 10]]
    assert [each.tolist() for each in pool.take_copies()] == [[], []]


def test_a_fork_of_a_fork_reads_the_first_source():
    pool = pool_of()
    pool.claim("a")
    pool.fork("a", "b")
    pool.fork("b", "c")
    pool.release("b")
    src, dst = pool.take_copies()
    assert (src.tolist(), dst.tolist()) == ([0], [2])
    pool.fork("c", "d")
    assert [each.tolist() for each in pool.take_copies()] == [[2], [1]]


def test_until_forks_are_copied_no_step_is_made():
    pool = pool_of()
    pool.claim("a")
    pool.fork("a", "b")
    want = "1 forks wait to be copied; run copy_slots(tail, *pool.take_copies()) first"
    assert refused(pool.slot_idx, ["a"]) == f"slot_idx: {want}"
    assert refused(pool.advance, "a", 1) == f"advance: {want}"
    assert refused(pool.release, "a") == (
        "release: slot 0 of request 'a' is yet to be copied to 1 forks; run"
        " copy_slots(tail, *pool.take_copies()) first"
    )
    pool.release("b")
    pool.slot_idx(["a"])
    pool.release("a")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("layers", [(), (3,)], ids=["one_layer", "stacked"])
def test_a_poisoned_slot_is_nan_when_it_is_claimed(dtype, layers):
    ring = TailRing(5, 4, 12, dtype, speculative_tokens=1, poison=True)
    buffer = to_buffer(np.zeros((*layers, *ring.shape)), dtype)
    pool = SlotPool(ring, buffers=[buffer])
    pool.claim("a")
    pool.claim("b")
    pool.fork("a", "c")
    stored = values(models.to_storage(buffer)).reshape(-1, *ring.shape)
    assert np.isnan(stored[:, :3]).all()
    assert (stored[:, 3:] == 0).all()


def test_poison_is_there_when_the_claim_returns():
    ring = TailRing(64, 4, 128, DType.float32, poison=True)
    buffer = ring.allocate()
    shared = np.from_dlpack(buffer)
    pool = SlotPool(ring, buffers=[buffer])
    for _ in range(5_000):
        shared[:] = 0
        slot = pool.claim("request")
        # A queued copy would come late, over what the next op stashes.
        assert np.isnan(shared[slot]).all()
        pool.release("request")


def test_a_ring_without_poison_is_left_alone():
    ring = TailRing(3, 4, 12, DType.float32)
    buffer = ring.allocate()
    SlotPool(ring, buffers=[buffer]).claim("a")
    assert (models.to_storage(buffer) == 0).all()


def test_poison_without_a_buffer_is_refused():
    assert refused(SlotPool, TailRing(3, 4, 8, poison=True)) == (
        "SlotPool: poison=True needs the ring's buffers: pass buffers=[ring.allocate(),"
        " ...]"
    )


def test_poison_of_what_is_not_the_ring_is_refused():
    ring = TailRing(3, 4, 8, DType.float32)
    with pytest.raises(OperandError) as error:
        ring.poison_slots(TailRing(3, 4, 8, DType.float16).allocate(), [0, 3, -1])
    assert str(error.value).splitlines() == [
        "poison_slots: buffer must be float32 [3, 2, 4, 8], or several stacked, got"
        " float16 [3, 2, 4, 8]",
        "poison_slots: slots must be below max_slots (3), got 3",
        "poison_slots: slots must be below max_slots (3), got -1",
    ]


def test_a_failed_poison_loses_no_slot():
    ring = TailRing(2, 4, 8, DType.float32, poison=True)
    pool = SlotPool(ring, buffers=[TailRing(2, 4, 9, DType.float32).allocate()])
    with pytest.raises(OperandError):
        pool.claim("a")
    assert (pool.free_slots, len(pool)) == (2, 0)


def test_threads_never_share_a_slot():
    pool = pool_of(16)
    owned, lock = set(), threading.Lock()

    def serve(worker):
        rng = random.Random(worker)
        for turn in range(500):
            name = (worker, turn)
            slot = pool.claim(name)
            with lock:
                assert slot not in owned
                owned.add(slot)
            pool.advance(name, rng.randrange(9))
            assert pool.slot_idx([name]).tolist() == [slot]
            with lock:
                owned.remove(slot)
            pool.release(name)

    with ThreadPoolExecutor(8) as workers:
        list(workers.map(serve, range(8)))
    assert (pool.free_slots, len(pool)) == (16, 0)
