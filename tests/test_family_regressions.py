"""Faults seen in other code, by case number: ragged steps, and large ones."""

from __future__ import annotations

import numpy as np
import pytest
from max.dtype import DType

import kpool_graph
from asserts import assert_same_bits
from cases import ape_for, normal, ring_for
from kpool_graph import reference_ragged
from kpool_graph.reference import values
from models import Ring, SeedTail, TailUpdate, declare
from ragged_asserts import (
    first_rows,
    run_compress,
    run_ragged_update,
    run_ring_close,
)
from ragged_models import (
    GLM,
    IN_EACH_DTYPE,
    ExpandTopk,
    PoolRowOffsets,
    RaggedUpdate,
    RingClose,
    ThreeOps,
    draw_request,
    on_keys,
    on_ring,
    ragged_batch,
    ragged_operands,
    row_tables,
)
from ramp import DRAFT, UNTOUCHED, prefill, ramp, step, untouched

F32 = DType.float32
SEED = declare(SeedTail(F32, 8, 4, 4))
TWO = declare(TailUpdate(F32, 8, 4, 2, 4))
RAGGED = on_ring(RaggedUpdate, SEED)
THREE_OPS = on_ring(ThreeOps, SEED)
WIDE_RAGGED = on_ring(RaggedUpdate, IN_EACH_DTYPE[1])
GLM_RAGGED = on_ring(RaggedUpdate, GLM)
GLM_THREE_OPS = on_ring(ThreeOps, GLM)
EXPAND = declare(ExpandTopk(4, 512, True))
ROWS = declare(PoolRowOffsets(4))


def ragged_step(models, op, ring, *requests, keys=None):
    """Brings ramp tokens through ragged_update or the three ops.

    Returns:
        The pools that closed, as (id, value), those of ring_close first; every
        channel agrees.
    """
    if keys is None:
        keys = [
            p for _, cached, count in requests for p in range(cached, cached + count)
        ]
    k = ramp(op, keys)
    ape = np.zeros((op.kpool, op.head_dim), np.float32)
    offsets, lengths, slots = row_tables(*requests)
    pooled, closed, *whole = models[op](
        ring, k, np.zeros_like(k), ape, offsets, lengths, slots
    )
    pools = [(int(pool), key) for pool, key in zip(closed, pooled, strict=True)]
    if whole:
        compressed, rows = whole
        for request, cached in enumerate(lengths.tolist()):
            own = compressed[rows[request] : rows[request + 1]]
            pools += enumerate(own, -(-cached // op.kpool))
    assert all((key == key[:1]).all() for _, key in pools)
    return [(pool, float(values(key)[0])) for pool, key in pools if pool >= 0]


both_ways = pytest.mark.parametrize(
    "op", [RAGGED, THREE_OPS], ids=["ragged_update", "three_ops"]
)


@pytest.mark.parametrize(
    ("op", "value"),
    [(WIDE_RAGGED, 1.5), (RAGGED, 251.5)],
    ids=["ring_len_7_is_exact", "ring_len_4_is_the_limit"],
)
def test_case_1_rejected_drafts_spoil_only_a_ring_that_is_too_short(models, op, value):
    """Case 1: one of three drafts rejected, its ring entry a live member's or not."""
    ring = untouched(op)
    assert ragged_step(models, op, ring, (0, 0, 2)) == []
    closed = ragged_step(models, op, ring, (0, 2, 3), keys=[2, DRAFT, DRAFT])
    assert closed == [(0, (0 + 1 + 2 + DRAFT) / 4)]
    assert ragged_step(models, op, ring, (0, 3, 3)) == [(0, value)]


@both_ways
def test_case_2_nothing_of_a_slots_last_owner_survives(models, op):
    """Case 2: A does [6, 7, 8] and ends; B seeds 6 tokens, then does [6, 7, 8]."""
    ring = untouched(op)
    before = [40, 50, 60, 70, 80, 90]
    ragged_step(models, op, ring, (3, 0, 6), keys=before)
    a_ends = ragged_step(models, op, ring, (3, 6, 3), keys=[500, 600, 700])
    assert a_ends == [(1, (80 + 90 + 500 + 600) / 4)]
    assert ragged_step(models, op, ring, (3, 0, 6)) == [(0, 1.5)]
    assert ragged_step(models, op, ring, (3, 6, 3)) == [(1, 5.5)]


def test_case_4_a_step_that_may_be_rejected_goes_through_tail_update(models):
    """Case 4: verify tokens 6 and 7, of which only 6 is accepted."""
    ring = untouched(TWO)
    prefill(models, SEED, ring, 0, 0, 6)
    assert step(models, TWO, ring, [[6, 7]], [[6, DRAFT]]) == [[(1, 253.75)]]
    assert step(models, TWO, ring, [[7, 8]]) == [[(1, 5.5)]]


def test_case_4_ragged_update_may_be_rejected_too(models):
    """Case 4: as above, in a ring of kpool - 1 + 2 entries or more."""
    op = WIDE_RAGGED
    ring = untouched(op)
    ragged_step(models, op, ring, (0, 0, 6))
    closed = ragged_step(models, op, ring, (0, 6, 2), keys=[6, DRAFT])
    assert closed == [(1, 253.75)]
    assert ragged_step(models, op, ring, (0, 7, 2)) == [(1, 5.5)]


def test_case_4_seed_tail_forgets_a_rejected_steps_accepted_tokens(models):
    """Case 4, the limit: seed_tail stashes no member of a pool that looks done."""
    ring = untouched(TWO)
    prefill(models, SEED, ring, 0, 0, 6)
    prefill(models, SEED, ring, 0, 6, 2)
    # Token 6 is missing; in its entry, a gate score of 777 outweighs the others.
    assert step(models, TWO, ring, [[7, 8]]) == [[(1, UNTOUCHED)]]


def test_case_4_the_docstrings_say_which_op_takes_a_step_that_may_be_rejected():
    """Case 4: documented, where the duty is."""
    said = " ".join(kpool_graph.seed_tail.__doc__.split())
    assert "A step whose tokens may be rejected belongs to `tail_update`." in said
    said = " ".join(kpool_graph.ragged_update.__doc__.split())
    assert "`ring_len >= kpool - 1 + next_n` a step may be rejected in part." in said


@pytest.mark.parametrize("tokens", [16_384, 65_536])
@pytest.mark.parametrize("op", [GLM_RAGGED, GLM_THREE_OPS], ids=lambda op: op.stem)
def test_case_10_one_large_prefill_equals_its_chunks(models, op, tokens):
    """Case 10: 16,384 and 65,536 new tokens in one request, from an odd start."""
    rng = np.random.default_rng(10)
    request = draw_request(rng, op, 3, 5, tokens)
    tail = ring_for(rng, op, [(3, 5)])
    ape = ape_for(rng, op)

    def feed(ring, size):
        pools = {}
        for done in range(0, tokens, size):
            part = (request, done, min(size, tokens - done))
            k, gate, *rest = ragged_batch(op, [part])
            pooled, closed, *whole = models[op](ring, k, gate, ape, *rest)
            pools.update(
                (int(pool), key)
                for pool, key in zip(closed, pooled, strict=True)
                if pool >= 0
            )
            if whole:
                first = -(-(5 + done) // op.kpool)
                pools.update(enumerate(whole[0][: whole[1][-1]], first))
        return pools

    large, chunked = Ring(tail, op.dtype), Ring(tail, op.dtype)
    pools, want = feed(large, tokens), feed(chunked, 1000)
    assert pools.keys() == want.keys() == set(range(1, (5 + tokens) // 4))
    order = sorted(want)
    assert_same_bits(
        np.stack([pools[pool] for pool in order]),
        np.stack([want[pool] for pool in order]),
        "pools",
    )
    end = 5 + tokens
    live = [position % op.ring_len for position in range(end - end % 4, end)]
    assert_same_bits(
        large.storage()[3][:, live], chunked.storage()[3][:, live], "live entries"
    )


def test_case_10_a_large_selection_equals_its_chunks(models):
    """Case 10: expand_topk with 16,384 rows x 2,051 columns."""
    rng = np.random.default_rng(10)
    rows = 16_384
    ids = rng.integers(-1, 6_000, (rows, EXPAND.pool_topk), np.int32)
    offsets = np.array([0, rows // 2 + 1, rows], np.uint32)
    (selected,) = models[EXPAND](ids, offsets, np.array([0, 20_000], np.uint32))
    assert selected.shape == (16_384, 2_051)
    for first in range(0, rows, 1_000):
        part = ids[first : first + 1_000]
        bounds = np.clip(offsets.astype(int) - first, 0, len(part)).astype(np.uint32)
        cached = np.maximum(first - offsets[:2].astype(int), 0)
        cached[1] += 20_000
        (alone,) = models[EXPAND](part, bounds, cached.astype(np.uint32))
        np.testing.assert_array_equal(selected[first : first + 1_000], alone)
    some = slice(rows // 2 - 3, rows // 2 + 5)
    want = reference_ragged.expand_topk(
        ids[some],
        np.array([0, 4, 8], np.uint32),
        np.array([rows // 2 - 3, 20_000], np.uint32),
        kpool=4,
    )
    np.testing.assert_array_equal(selected[some], want)


def test_case_11_the_pools_of_two_requests_stand_side_by_side(models):
    """Case 11: lengths 9 and 6 from empty caches."""
    op = on_keys(SEED)
    k = ramp(op, [*range(9), *range(6)])
    offsets, lengths, _ = row_tables((0, 0, 9), (1, 0, 6))
    (rows,) = models[ROWS](lengths, offsets)
    assert rows.tolist() == [0, 2, 3]
    ape = np.zeros((4, 8), np.float32)
    (pooled,) = models[op](k, np.zeros_like(k), ape, offsets, rows, lengths)
    assert pooled.tolist() == [[1.5] * 8, [5.5] * 8, [1.5] * 8]


@both_ways
def test_case_11_two_requests_in_one_step(models, op):
    """Case 11: the same through the whole step."""
    closed = ragged_step(models, op, untouched(op), (4, 0, 9), (2, 0, 6))
    assert closed == [(0, 1.5), (1, 5.5), (0, 1.5)]


# Aligned and unaligned chunks, single tokens that close and that do not, a request
# inside one pool, and requests with nothing, whose slots nobody may look at.
MIXED = [
    (7, 8, 12),
    (0, 6, 9),
    (4, 3, 1),
    (3545, 5, 0),
    (2, 4, 1),
    (8, 9, 2),
    (2**32 - 1, 0, 0),
    (5, 0, 4),
    (1, 7, 30),
]


@pytest.mark.parametrize("op", IN_EACH_DTYPE, ids=lambda op: op.dtype.name)
def test_a_mixed_batch_goes_through_every_op(models, op):
    rng = np.random.default_rng(1)
    k, gate, ape, *rest = ragged_operands(rng, op, MIXED)
    tail = ring_for(rng, op, [each for each in MIXED if each[2]])
    ragged, close = on_ring(RaggedUpdate, op), on_ring(RingClose, op)
    operands = (k, gate, ape, *rest)
    ring = Ring(tail, op.dtype)
    pending, first = run_ring_close(models[close], ring, *operands)
    whole, rows = run_compress(models[on_keys(op)], *operands)
    pooled, closed = run_ragged_update(models[ragged], ring, *operands)
    assert first.tolist() == [-1, 1, 0, -1, -1, -1, -1, -1, 1]
    assert rows.tolist() == [0, 3, 4, 4, 4, 4, 4, 4, 5, 12]
    for request, row in enumerate(first_rows(rest[0], 4)):
        own = [*whole[rows[request] : rows[request + 1]]]
        if first[request] >= 0:
            own.insert(0, pending[request])
        assert np.count_nonzero(closed[row : row + len(own)] >= 0) == len(own)
        for got, want in zip(pooled[row : row + len(own)], own, strict=True):
            assert_same_bits(got, want, f"request {request}")


def test_a_mixed_ramp_is_exact(models):
    ring = untouched(RAGGED)
    live = [each for each in MIXED if each[2]]
    for slot, cached, _ in live:
        ragged_step(models, RAGGED, ring, (slot, 0, cached))
    assert ragged_step(models, RAGGED, ring, *MIXED) == [
        (pool, 4 * pool + 1.5)
        for _, cached, count in live
        for pool in range(cached // 4, (cached + count) // 4)
    ]


def test_a_prefilled_prompt_goes_on_in_tail_update(models):
    ring = untouched(RAGGED)
    assert ragged_step(models, RAGGED, ring, (6, 0, 11)) == [(0, 1.5), (1, 5.5)]
    assert step(models, TWO, ring, [[11, 12]], slots=[6]) == [[(2, 9.5)]]
    assert ragged_step(models, RAGGED, ring, (6, 13, 3)) == [(3, 13.5)]


def test_a_ring_that_one_op_spoiled_fails_the_oracle(models):
    """The control: a live entry changed on purpose must be noticed."""
    rng = np.random.default_rng(2)
    requests = [(4, 6, 2)]
    tail = ring_for(rng, GLM, requests)
    operands = ragged_operands(rng, GLM, requests)
    pooled, _ = run_ragged_update(models[GLM_RAGGED], Ring(tail, GLM.dtype), *operands)
    tail[4, 0, 5 % 4] = normal(rng, (GLM.head_dim,), GLM.dtype)
    changed, _ = run_ragged_update(models[GLM_RAGGED], Ring(tail, GLM.dtype), *operands)
    assert (pooled[0] != changed[0]).any()
