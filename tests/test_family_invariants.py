"""The invariants of the contract across the whole family, on random traffic."""

from __future__ import annotations

from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asserts import assert_same_bits
from cases import MAX_SLOTS, any_bits, ape_for, poison, ring_for
from drawn import pieces
from models import Ring
from ragged_asserts import first_rows, run_compress, run_ragged_update
from ragged_models import (
    RAGGED_FAMILIES,
    RAGGED_UPDATES,
    Request,
    draw_request,
    ragged_batch,
    ragged_operands,
)
from traffic import (
    Traffic,
    by_prefill,
    by_ragged_update,
    by_tail_update,
    by_three_ops,
)

# Rings in which any suffix of a step of `wide.next_n` tokens may be rejected.
REWINDING = [
    family
    for family in RAGGED_FAMILIES
    if family.wide.ring_len >= family.wide.kpool - 1 + family.wide.next_n
]
SINGLE_MEMBER = [op for op in RAGGED_UPDATES if op.kpool == 1]

every_family = pytest.mark.parametrize(
    "family", RAGGED_FAMILIES, ids=lambda family: family.wide.name
)
seeds = st.integers(0, 2**32 - 1)
slots = st.integers(0, MAX_SLOTS - 1)


def aligned_starts(kpool, room):
    """Draws pool boundaries with room for that many tokens below 2**31."""
    million, last = 2**20 // kpool, (2**31 - room) // kpool
    return st.one_of(
        st.integers(0, 10),
        st.integers(million - 2, million + 2),
        st.integers(last - 2, last),
    ).map(lambda pool: pool * kpool)


def draw_requests(data, rng, op, room):
    """Draws requests that start on a pool boundary, in slots of their own."""
    return [
        draw_request(
            rng,
            op,
            slot,
            data.draw(aligned_starts(op.kpool, room), label="start"),
            data.draw(st.integers(0, room), label="tokens"),
        )
        for slot in data.draw(
            st.lists(slots, min_size=1, max_size=4, unique=True), label="slots"
        )
    ]


def draw_steps(data, requests, size, largest, label):
    """Cuts every request's tokens, and deals the parts to steps."""
    cuts = [
        pieces(len(each.k), data.draw(st.lists(size, max_size=6), label=label), largest)
        for each in requests
    ]
    return list(zip_longest(*cuts, fillvalue=0))


def assert_same_entries(got, want, what):
    assert got.keys() == want.keys(), what
    for key, value in got.items():
        assert_same_bits(value, want[key], f"{what}: {key}")


@every_family
@given(data=st.data(), seed=seeds)
def test_every_way_to_feed_requests_gives_the_same_pools(models, family, data, seed):
    op, rng = family.ragged_update, np.random.default_rng(seed)
    next_n = family.wide.next_n
    room = 2 * op.kpool + next_n
    requests = draw_requests(data, rng, op, room)
    tail = ring_for(rng, op)
    ape = ape_for(rng, op)

    def feed(way, steps):
        traffic = Traffic(op, requests, tail, ape)
        for counts in steps:
            way(models, traffic, counts, rng)
        assert traffic.done == [len(each.k) for each in requests]
        return traffic

    def steps(size, largest, label):
        return draw_steps(data, requests, size, largest, label)

    any_size, ones = st.integers(0, room), st.just(1)
    decoded = feed(by_tail_update(family.decode), steps(ones, 1, "decode"))
    assert set(decoded.pools) == {
        (at, pool)
        for at, each in enumerate(requests)
        for pool in range(each.start // op.kpool, each.end // op.kpool)
    }
    ways = {
        "speculative steps": feed(
            by_tail_update(family.wide),
            steps(st.integers(0, next_n), next_n, "speculative steps"),
        ),
        "chunks": feed(by_three_ops(family.three_ops), steps(any_size, room, "chunks")),
        "chunks and decodes": feed(
            by_ragged_update(op),
            steps(st.one_of(ones, any_size), room, "chunks and decodes"),
        ),
        "one prefill": feed(
            by_prefill(family.compress, family.seed_tail),
            [[len(each.k) for each in requests]],
        ),
    }
    for way, traffic in ways.items():
        assert_same_entries(traffic.pools, decoded.pools, f"pools of {way}")
        assert_same_entries(traffic.live(), decoded.live(), f"live entries of {way}")
    after = decoded.ring.storage()
    for way in ("speculative steps", "chunks and decodes"):
        assert_same_bits(ways[way].ring.storage(), after, f"ring after {way}")
    others = sorted(set(range(MAX_SLOTS)) - {each.slot for each in requests})
    for way, traffic in ways.items():
        untouched = traffic.ring.storage()[others]
        assert_same_bits(untouched, tail[others], f"slots of nobody after {way}")


@every_family
@pytest.mark.parametrize("stem", ["three_ops", "ragged_update"])
@given(data=st.data(), seed=seeds)
def test_neighbours_and_row_order_change_no_bit(models, family, stem, data, seed):
    op, rng = getattr(family, stem), np.random.default_rng(seed)
    way = {"three_ops": by_three_ops, "ragged_update": by_ragged_update}[stem](op)
    requests = draw_requests(data, rng, op, 3 * op.kpool)
    cached = [data.draw(st.integers(0, len(each.k))) for each in requests]
    tail = ring_for(rng, op)
    for each, done in zip(requests, cached, strict=True):
        for at in range(done - done % op.kpool, done):
            entry = (each.start + at) % op.ring_len
            tail[each.slot, :, entry] = each.k[at], each.gate[at]
    ape = ape_for(rng, op)

    def run(chosen):
        traffic = Traffic(op, [requests[at] for at in chosen], tail, ape)
        traffic.done = [cached[at] for at in chosen]
        counts = [len(requests[at].k) - cached[at] for at in chosen]
        way(models, traffic, counts, rng)
        return traffic

    together = run(range(len(requests)))
    after = together.ring.storage()
    owned = []
    for at, each in enumerate(requests):
        alone = run([at])
        owned.append(each.slot)
        mine = {
            (0, pool): key for (who, pool), key in together.pools.items() if who == at
        }
        assert_same_entries(mine, alone.pools, f"pools of request {at}")
        assert_same_bits(
            after[each.slot], alone.ring.storage()[each.slot], f"slot {each.slot}"
        )
    others = sorted(set(range(MAX_SLOTS)) - set(owned))
    assert_same_bits(after[others], tail[others], "slots of nobody")


@pytest.mark.parametrize("family", REWINDING, ids=lambda family: family.wide.name)
@given(data=st.data(), seed=seeds)
def test_any_suffix_of_a_step_may_be_rejected(models, family, data, seed):
    op, rng = family.ragged_update, np.random.default_rng(seed)
    next_n = family.wide.next_n
    room = 3 * op.kpool + 2 * next_n
    requests = draw_requests(data, rng, op, room)
    ring = Ring(ring_for(rng, op), op.dtype)
    ape = ape_for(rng, op)
    done = [0] * len(requests)
    pools = {}

    def run(brought):
        """Brings (request, true tokens, rejected tokens after them) rows."""
        rows = []
        for at, accepted, rejected in brought:
            each = requests[at]
            now = slice(done[at], done[at] + accepted)
            draft = poison(rng, (2, rejected, op.head_dim), op.dtype)
            k = np.concatenate([each.k[now], draft[0]])
            gate = np.concatenate([each.gate[now], draft[1]])
            start = each.start + done[at]
            rows.append((Request(each.slot, start, k, gate), 0, len(k)))
            done[at] += accepted
        k, gate, *tables = ragged_batch(op, rows)
        pooled, closed = models[op](ring, k, gate, ape, *tables)
        firsts = first_rows(tables[0], op.kpool)
        for row in np.flatnonzero(closed >= 0):
            at = brought[np.searchsorted(firsts, row, side="right") - 1][0]
            # A provisional pool closes again, and whoever stores it overwrites it.
            pools[at, int(closed[row])] = pooled[row]

    steps = st.lists(
        st.tuples(
            st.sampled_from(["chunk", "draft"]),
            st.integers(0, room),
            st.integers(0, next_n),
        ),
        min_size=len(requests),
        max_size=len(requests),
    )
    for step in data.draw(st.lists(steps, max_size=8), label="steps"):
        brought = []
        for at, (kind, accepted, drafted) in enumerate(step):
            left = len(requests[at].k) - done[at]
            if kind == "chunk":
                brought.append((at, min(accepted, left), 0))
            else:
                accepted = min(accepted % (drafted + 1), left)
                brought.append((at, accepted, drafted - accepted))
        run(brought)
    run([(at, len(each.k) - done[at], 0) for at, each in enumerate(requests)])

    never_rejected = Traffic(op, requests, ring_for(rng, op), ape)
    by_prefill(family.compress, family.seed_tail)(
        models, never_rejected, [len(each.k) for each in requests], rng
    )
    kept = {
        (at, pool): key
        for (at, pool), key in pools.items()
        if (pool + 1) * op.kpool <= requests[at].end
    }
    assert_same_entries(kept, never_rejected.pools, "pools")
    tail = ring.storage()
    live = {
        key: tail[requests[key[0]].slot, :, key[1] % op.ring_len]
        for key in never_rejected.live()
    }
    assert_same_entries(live, never_rejected.live(), "live entries")


@every_family
@given(data=st.data(), seed=seeds)
def test_every_output_element_of_ragged_update_is_written(models, family, data, seed):
    op, rng = family.ragged_update, np.random.default_rng(seed)
    counts = st.tuples(st.integers(0, 40), st.integers(0, 2 * op.kpool))
    drawn = data.draw(st.lists(counts, max_size=6))
    requests = [(slot, *each) for slot, each in enumerate(drawn)]
    rows = (sum(n for _, _, n in requests) + len(requests) * (op.kpool - 1)) // op.kpool
    # Memory that MAX is likely to hand out again: full of NaN and pool ids.
    k, gate, *rest = ragged_operands(rng, op, [(0, 0, rows * op.kpool)])
    dirty = Ring(ring_for(rng, op), op.dtype)
    models[op](dirty, any_bits(rng, k.shape, op.dtype), gate, *rest)

    ring = Ring(ring_for(rng, op, requests), op.dtype)
    operands = ragged_operands(rng, op, requests)
    _, closed = run_ragged_update(models[op], ring, *operands)
    assert len(closed) == rows


@pytest.mark.parametrize("op", SINGLE_MEMBER, ids=lambda op: op.name)
@given(data=st.data(), seed=seeds)
def test_with_one_member_the_pooled_key_is_the_key(models, op, data, seed):
    rng = np.random.default_rng(seed)
    counts = st.tuples(st.integers(0, 2**20), st.integers(0, 9))
    drawn = data.draw(st.lists(counts, max_size=6))
    requests = [(slot, *each) for slot, each in enumerate(drawn)]
    k, gate, ape, *tables = ragged_operands(rng, op, requests)
    k, gate = (any_bits(rng, each.shape, op.dtype) for each in (k, gate))
    ape = rng.choice(np.array([np.nan, np.inf, -np.inf, 3e38], np.float32), ape.shape)
    ring = Ring(ring_for(rng, op), op.dtype)
    pooled, closed = models[op](ring, k, gate, ape, *tables)
    assert_same_bits(pooled, k, "pooled")
    assert closed.tolist() == [
        cached + i for _, cached, count in requests for i in range(count)
    ]


def test_with_one_member_compress_copies_the_key(models):
    op, rng = RAGGED_FAMILIES[0].compress, np.random.default_rng(1)
    assert op.kpool == 1
    k, gate, ape, *tables = ragged_operands(rng, op, [(0, 7, 5), (1, 0, 0), (2, 3, 9)])
    k, gate = (any_bits(rng, each.shape, op.dtype) for each in (k, gate))
    pooled, _ = run_compress(models[op], k, gate, ape * np.float32(np.nan), *tables)
    assert_same_bits(pooled, k, "pooled")


@every_family
@pytest.mark.parametrize(
    "requests",
    [[], [(5, 3, 0)], [(5, 3, 0), (2, 8, 0)]],
    ids=["empty_batch", "zero_tokens", "zero_tokens_twice"],
)
def test_calls_that_bring_nothing_change_nothing(models, family, requests):
    op, rng = family.ragged_update, np.random.default_rng(2)
    tail = any_bits(rng, (MAX_SLOTS, 2, op.ring_len, op.head_dim), op.dtype)
    ring = Ring(tail, op.dtype)
    operands = ragged_operands(rng, op, requests)
    pooled, closed = models[op](ring, *operands)
    rows = len(requests) * (op.kpool - 1) // op.kpool
    assert_same_bits(pooled, np.zeros((rows, op.head_dim), tail.dtype), "pooled")
    assert closed.tolist() == [-1] * rows
    pooled, closed, whole, pool_rows = models[family.three_ops](ring, *operands)
    zeros = np.zeros((len(requests), op.head_dim), tail.dtype)
    assert_same_bits(pooled, zeros, "pooled of ring_close")
    assert closed.tolist() == [-1] * len(requests)
    assert whole.shape == (0, op.head_dim)
    assert pool_rows.tolist() == [0] * (len(requests) + 1)
    assert_same_bits(ring.storage(), tail, "ring")
