"""The invariants of the contract, as properties of random traffic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asserts import assert_pooled, assert_same_bits
from cases import (
    DTYPES,
    FAMILIES,
    MAX_SLOTS,
    any_bits,
    ape_for,
    normal,
    place,
    ring_for,
    seed_operands,
)
from drawn import Row, Step, draw_rows, draw_start, pieces, seeds, slots, stray_slots
from models import Ring, TailUpdate, declare

SINGLE_MEMBER = tuple(declare(TailUpdate(dtype, 32, 1, 3, 2)) for dtype in DTYPES)
SMALL_AND_BIG = tuple(declare(TailUpdate(dtype, 32, 4, 4, 7)) for dtype in DTYPES)

every_family = pytest.mark.parametrize(
    "family", FAMILIES, ids=lambda family: family.wide.name
)


@every_family
@given(data=st.data(), seed=seeds)
def test_any_split_of_a_request_gives_the_same_bits(models, family, data, seed):
    op, rng = family.wide, np.random.default_rng(seed)
    total = data.draw(st.integers(1, 2 * op.kpool + op.next_n), label="tokens")
    start = draw_start(data, total)
    slot = data.draw(slots, label="slot")
    k = normal(rng, (total, op.head_dim), op.dtype)
    gate = normal(rng, (total, op.head_dim), op.dtype, 2)
    ape = ape_for(rng, op)
    tail = ring_for(rng, op, [(slot, start)])

    def decode(op, ring, first, steps):
        """Feeds tokens from index `first` on, and returns {pool id: key}."""
        pools = {}
        for count, mask in steps:
            shape = (1, op.next_n, op.head_dim)
            # Padded tokens carry poison, and must not be looked at.
            keys, gates = (any_bits(rng, shape, op.dtype) for _ in range(2))
            keys[0, mask] = k[first : first + count]
            gates[0, mask] = gate[first : first + count]
            pooled, closed = models[op](
                ring,
                keys,
                gates,
                ape,
                place(start + first, mask)[np.newaxis],
                np.array([slot], np.uint32),
            )
            for pool, key in zip(closed[0].tolist(), pooled[0], strict=True):
                if pool >= 0:
                    assert pool not in pools
                    pools[pool] = key
            first += count
        return pools

    by_one = Ring(tail, op.dtype)
    pools = decode(family.decode, by_one, 0, [(1, np.array([True]))] * total)
    last = start + total
    assert list(pools) == list(range(start // op.kpool, last // op.kpool))

    def drawn_steps(count, label):
        sizes = data.draw(st.lists(st.integers(1, op.next_n)), label=label)
        masks = []
        for size in pieces(count, sizes, op.next_n):
            real = data.draw(st.permutations([1] * size + [0] * (op.next_n - size)))
            masks.append((size, np.array(real, bool)))
        return masks

    wide = Ring(tail, op.dtype)
    wide_pools = decode(op, wide, 0, drawn_steps(total, "wide steps"))
    assert_same_pools(wide_pools, pools)
    assert_same_bits(wide.storage(), by_one.storage(), "ring after wide steps")

    prefilled = data.draw(st.integers(0, total), label="prefilled")
    chunked = Ring(tail, op.dtype)
    done = 0
    sizes = data.draw(st.lists(st.integers(0, total)), label="chunks")
    for size in pieces(prefilled, sizes, total):
        models[family.seed_tail](
            chunked,
            k[done : done + size],
            gate[done : done + size],
            np.array([0, size], np.uint32),
            np.array([start + done], np.uint32),
            np.array([slot], np.uint32),
        )
        done += size
    rest = decode(
        op, chunked, prefilled, drawn_steps(total - prefilled, "steps after prefill")
    )
    first_pool = (start + prefilled) // op.kpool
    assert_same_pools(rest, {p: key for p, key in pools.items() if p >= first_pool})
    for position in range(last - last % op.kpool, last):
        entry = position % op.ring_len
        assert_same_bits(
            chunked.storage()[slot, :, entry],
            by_one.storage()[slot, :, entry],
            f"live entry of position {position}",
        )


def assert_same_pools(got, want):
    assert list(got) == list(want)
    for pool, key in got.items():
        assert_same_bits(key, want[pool], f"pool {pool}")


@every_family
@given(data=st.data(), seed=seeds)
def test_neighbours_row_order_and_padded_rows_change_no_bit(models, family, data, seed):
    op, rng = family.wide, np.random.default_rng(seed)
    call = models[op]
    rows = draw_rows(data, op)
    alone = len(rows)
    for slot in data.draw(st.lists(stray_slots, max_size=3), label="padded slots"):
        rows.append(Row(slot, -1, (False,) * op.next_n))
    step = Step(rng, op, rows)
    tail = ring_for(rng, op, [(row.slot, row.start) for row in rows[:alone]])
    order = data.draw(st.permutations(range(len(rows))), label="order")
    pooled, closed, after = step.run(call, tail, order)

    owned = set()
    for row in range(alone):
        at = order.index(row)
        pooled_alone, closed_alone, after_alone = step.run(call, tail, [row])
        assert_same_bits(pooled[at], pooled_alone[0], f"pooled of row {row}")
        assert closed[at].tolist() == closed_alone[0].tolist()
        slot = rows[row].slot
        owned.add(slot)
        assert_same_bits(after[slot], after_alone[slot], f"slot {slot}")
    others = sorted(set(range(MAX_SLOTS)) - owned)
    assert_same_bits(after[others], tail[others], "slots of nobody")
    padded = [order.index(row) for row in range(alone, len(rows))]
    assert (closed[padded] == -1).all()


@every_family
@given(data=st.data(), seed=seeds)
def test_the_order_of_prefilled_requests_changes_no_bit(models, family, data, seed):
    op, rng = family.seed_tail, np.random.default_rng(seed)
    owned = data.draw(st.lists(slots, min_size=1, max_size=6, unique=True))
    counts = st.integers(0, 2 * op.kpool + 1)
    requests = [(slot, draw_start(data, 99), data.draw(counts)) for slot in owned]
    k, gate, offsets, lengths, slot_idx = seed_operands(rng, op, requests)
    tail = ring_for(rng, op)
    together = Ring(tail, op.dtype)
    models[op](together, k, gate, offsets, lengths, slot_idx)

    one_by_one = Ring(tail, op.dtype)
    for row in data.draw(st.permutations(range(len(requests))), label="order"):
        own = slice(offsets[row], offsets[row + 1])
        models[op](
            one_by_one,
            k[own],
            gate[own],
            np.array([0, requests[row][2]], np.uint32),
            lengths[row : row + 1],
            slot_idx[row : row + 1],
        )
    assert_same_bits(one_by_one.storage(), together.storage(), "ring")


@pytest.mark.parametrize("op", SMALL_AND_BIG, ids=lambda op: op.dtype.name)
def test_the_size_of_the_batch_changes_no_bit(models, op):
    rng = np.random.default_rng(1)
    count = 1024
    rows = [Row(slot, 0, (True,) * op.next_n) for slot in range(count)]
    step = Step(rng, op, rows, any_bits)
    tail = ring_for(rng, op, max_slots=count)
    pooled, closed, after = step.run(models[op], tail, range(count))
    assert (closed == 0).all()
    for row in range(count):
        pooled_alone, _, after_alone = step.run(models[op], tail, [row])
        assert_same_bits(pooled[row], pooled_alone[0], f"pooled of row {row}")
        assert_same_bits(after[row], after_alone[row], f"slot {row}")


@every_family
@given(data=st.data(), seed=seeds)
def test_padding_changes_nothing_and_closes_nothing(models, family, data, seed):
    op, rng = family.wide, np.random.default_rng(seed)
    padded_slots = data.draw(st.lists(stray_slots, min_size=1, max_size=8))
    rows = [Row(slot, -1, (False,) * op.next_n) for slot in padded_slots]
    step = Step(rng, op, rows, any_bits)
    tail = any_bits(rng, (MAX_SLOTS, 2, op.ring_len, op.head_dim), op.dtype)
    pooled, closed, after = step.run(models[op], tail, range(len(rows)))
    assert_same_bits(after, tail, "ring")
    assert (closed == -1).all()
    assert_same_bits(pooled, np.zeros_like(pooled), "pooled")


@pytest.mark.parametrize("op", SINGLE_MEMBER, ids=lambda op: op.dtype.name)
@given(data=st.data(), seed=seeds)
def test_with_one_member_the_pooled_key_is_the_key(models, op, data, seed):
    rng = np.random.default_rng(seed)
    rows = draw_rows(data, op)
    step = Step(rng, op, rows, any_bits)
    step.ape = rng.choice(
        np.array([np.nan, np.inf, -np.inf, 3e38, 0], np.float32), step.ape.shape
    )
    tail = ring_for(rng, op)
    pooled, closed, _ = step.run(models[op], tail, range(len(rows)))
    for row, (keys, _) in enumerate(step.values):
        mask = np.array(rows[row].mask)
        real = np.count_nonzero(mask)
        assert_same_bits(pooled[row, :real], keys[mask], f"row {row}")
        assert closed[row, :real].tolist() == rows[row].positions()[mask].tolist()


@every_family
@given(data=st.data(), seed=seeds)
def test_every_output_element_is_written(models, family, data, seed):
    op, rng = family.wide, np.random.default_rng(seed)
    rows = draw_rows(data, op)
    step = Step(rng, op, rows)
    # Memory that MAX is likely to hand out again: full of NaN and pool ids.
    everything = [Row(row.slot, 0, (True,) * op.next_n) for row in rows]
    dirty = Step(rng, op, everything, any_bits)
    dirty.run(models[op], ring_for(rng, op), range(len(rows)))

    tail = ring_for(rng, op, [(row.slot, row.start) for row in rows])
    pooled, closed, _ = step.run(models[op], tail, range(len(rows)))
    for row, (was, keys) in enumerate(zip(closed, pooled, strict=True)):
        real = [int(p) for p in rows[row].positions() if p >= 0]
        pools = [p // op.kpool for p in real if p % op.kpool == op.kpool - 1]
        assert was.tolist() == pools + [-1] * (op.columns - len(pools))
        unused = keys[len(pools) :]
        assert_same_bits(unused, np.zeros_like(unused), f"unused of row {row}")


# One step of traffic: prefill or decode, and for some slots how many tokens, and
# whether a new request takes the slot over first.
traffic = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "decode"]),
        st.dictionaries(
            st.integers(0, 4),
            st.tuples(st.integers(0, 9), st.sampled_from([False] * 4 + [True])),
            max_size=5,
        ),
    ),
    min_size=1,
    max_size=12,
)


@every_family
@given(steps=traffic, seed=seeds)
def test_any_traffic_pools_each_requests_own_tokens(models, family, steps, seed):
    op, rng = family.wide, np.random.default_rng(seed)
    ape = ape_for(rng, op)
    ring = Ring(ring_for(rng, op, max_slots=5), op.dtype)
    # The model: every token of the request that owns the slot, and nothing else.
    history = {slot: [] for slot in range(5)}
    for kind, rows in steps:
        brought = {}
        for slot, (count, takes_over) in rows.items():
            if takes_over:
                history[slot] = []
            count = min(count, op.next_n) if kind == "decode" else count
            brought[slot] = [
                normal(rng, (2, op.head_dim), op.dtype) for _ in range(count)
            ]
        starts = {slot: len(history[slot]) for slot in brought}
        for slot, tokens in brought.items():
            history[slot] += tokens
        slot_idx = np.array(list(brought), np.uint32)
        if kind == "prefill":
            tokens = [token for each in brought.values() for token in each]
            kv = np.array(tokens, ring.storage().dtype).reshape(-1, 2, op.head_dim)
            counts = [len(each) for each in brought.values()]
            models[family.seed_tail](
                ring,
                kv[:, 0].copy(),
                kv[:, 1].copy(),
                np.cumsum([0, *counts]).astype(np.uint32),
                np.array(list(starts.values()), np.uint32),
                slot_idx,
            )
            continue
        shape = (len(brought), op.next_n, op.head_dim)
        keys, gates = (any_bits(rng, shape, op.dtype) for _ in range(2))
        positions = np.full(shape[:2], -1, np.int32)
        for row, (slot, tokens) in enumerate(brought.items()):
            where = np.sort(rng.permutation(op.next_n)[: len(tokens)])
            for token, (key, gate) in zip(where, tokens, strict=True):
                keys[row, token], gates[row, token] = key, gate
            positions[row, where] = starts[slot] + np.arange(len(tokens))
        pooled, closed = models[op](ring, keys, gates, ape, positions, slot_idx)
        for row, slot in enumerate(brought):
            due = range(starts[slot] // op.kpool, len(history[slot]) // op.kpool)
            assert [p for p in closed[row].tolist() if p >= 0] == list(due)
            for key, pool in zip(pooled[row, : len(due)], due, strict=True):
                members = history[slot][pool * op.kpool : (pool + 1) * op.kpool]
                assert_pooled(
                    key,
                    np.stack([member[0] for member in members]),
                    np.stack([member[1] for member in members]),
                    ape,
                    op.dtype,
                    f"slot {slot}, pool {pool}",
                )


@every_family
def test_calls_that_bring_nothing_change_nothing(models, family):
    rng = np.random.default_rng(1)
    seed, op = family.seed_tail, family.wide
    ring = Ring(any_bits(rng, (3, 2, op.ring_len, op.head_dim), op.dtype), op.dtype)
    before = ring.storage()
    none = np.zeros(0, np.uint32)
    no_tokens = normal(rng, (0, op.head_dim), op.dtype)
    models[seed](ring, no_tokens, no_tokens, np.zeros(1, np.uint32), none, none)
    models[seed](
        ring,
        no_tokens,
        no_tokens,
        np.zeros(3, np.uint32),
        np.array([5, 2], np.uint32),
        np.array([0, 7], np.uint32),
    )
    no_rows = normal(rng, (0, op.next_n, op.head_dim), op.dtype)
    pooled, closed = models[op](
        ring,
        no_rows,
        no_rows,
        ape_for(rng, op),
        np.zeros((0, op.next_n), np.int32),
        none,
    )
    assert pooled.shape == (0, op.columns, op.head_dim)
    assert closed.shape == (0, op.columns)
    assert_same_bits(ring.storage(), before, "ring")
