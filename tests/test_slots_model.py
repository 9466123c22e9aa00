"""SlotPool against the list model: random operations, every answer compared."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kpool_graph import SlotError, SlotPool, TailRing
from kpool_graph.testing import ListModel


def refused(call, *arguments):
    with pytest.raises(SlotError) as error:
        call(*arguments)
    return str(error.value)


class Twin:
    """A SlotPool and a ListModel that are told the same things.

    Every answer of the pool is required to be the model's. Tokens brought by
    seed_tail are final by contract, so the pool may refuse to rewind before them
    where by chance the slot still holds enough.
    """

    def __init__(self, max_slots, kpool, ring_len):
        ring = TailRing(max_slots, kpool, 8, ring_len=ring_len)
        self.pool = SlotPool(ring)
        self.model = ListModel(max_slots, kpool, ring_len)
        self.ring = ring
        self.final = {}
        self.names = 0
        self.rewinds = {True: 0, False: 0}

    def claim(self, pools, remainder):
        name, cached = self.names, pools * self.ring.kpool + remainder
        self.names += 1
        if remainder:
            assert "unseeded mid-pool start" in refused(self.pool.claim, name, cached)
        elif len(self.model.slots) == self.ring.max_slots:
            assert "finds no free slot" in refused(self.pool.claim, name, cached)
        else:
            slot = self.pool.claim(name, cached)
            assert slot not in self.model.slots.values()
            self.model.claim(name, slot, [object() for _ in range(cached)])
            self.final[name] = 0

    def release(self, name):
        self.pool.release(name)
        self.model.release(name)
        assert "owns no slot" in refused(self.pool.release, name)

    def append(self, name, count, seeded):
        start = self.pool.length(name)
        end = self.pool.advance(name, count, seeded=seeded)
        tokens = [object() for _ in range(count)]
        if seeded:
            self.model.seed(name, tokens)
            if end - end % self.ring.kpool > start:
                self.final[name] = end - end % self.ring.kpool
        else:
            self.model.append(name, tokens)

    def rewind(self, name, to_length):
        possible = self.model.can_rewind(name, to_length)
        if to_length % self.ring.kpool and to_length < self.final[name]:
            possible = False
        self.rewinds[possible] += 1
        if not possible:
            assert "cannot go on at" in refused(self.pool.rewind, name, to_length)
            return
        self.pool.rewind(name, to_length)
        self.model.rewind(name, to_length)
        self.final[name] = min(self.final[name], to_length)

    def fork(self, source, name):
        slot = self.pool.fork(source, name)
        assert slot not in self.model.slots.values()
        src, dst = self.pool.take_copies()
        assert src.tolist() == [self.model.slots[source]]
        assert dst.tolist() == [slot]
        self.model.fork(source, name, slot)
        self.final[name] = self.final[source]

    def check(self, name):
        assert self.pool.length(name) == len(self.model.tokens[name])
        assert self.pool.slot_idx([name])[0] == self.model.slots[name]


def drive(twin, rng, operations):
    """Does random operations, most of them on live requests."""
    ring = twin.ring
    for _ in range(operations):
        names = list(twin.model.slots)
        choice = rng.random()
        if not names or choice < 0.04:
            twin.claim(rng.randrange(3), rng.randrange(9) // 8 % ring.kpool)
            continue
        name = rng.choice(names)
        length = len(twin.model.tokens[name])
        if choice < 0.07 or length > 60:
            twin.release(name)
        elif choice < 0.1 and len(names) < ring.max_slots:
            twin.fork(name, twin.names)
            twin.names += 1
        elif choice < 0.55:
            twin.append(name, rng.randrange(2 * ring.ring_len), rng.random() < 0.1)
        elif choice < 0.95:
            twin.rewind(name, max(0, length - rng.randrange(ring.ring_len + 2)))
        else:
            twin.check(name)


GEOMETRIES = [(3, 1, 1), (5, 2, 3), (4, 3, 8), (6, 4, 4), (5, 4, 7), (3, 8, 19)]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_random_operations_agree_with_lists(geometry):
    twin = Twin(*geometry)
    drive(twin, random.Random(str(geometry)), 5_000)
    assert twin.rewinds[True] > 100
    assert twin.ring.kpool == 1 or twin.rewinds[False] > 100


def test_a_million_random_operations_agree_with_lists():
    done = 0
    for seed, geometry in enumerate(GEOMETRIES * 4):
        twin = Twin(*geometry)
        drive(twin, random.Random(seed), 42_000)
        done += 42_000
    assert done >= 1_000_000


class Serving(RuleBasedStateMachine):
    """The same operations, in sequences that hypothesis can shrink."""

    @initialize(geometry=st.sampled_from(GEOMETRIES))
    def start(self, geometry):
        self.twin = Twin(*geometry)

    def pick(self, index):
        names = sorted(self.twin.model.slots)
        return names[index % len(names)] if names else None

    @rule(pools=st.integers(0, 3), remainder=st.sampled_from([0, 0, 0, 1]))
    def claim(self, pools, remainder):
        self.twin.claim(pools, remainder % self.twin.ring.kpool)

    @rule(index=st.integers(0, 5), count=st.integers(0, 20), seeded=st.booleans())
    def append(self, index, count, seeded):
        if (name := self.pick(index)) is not None:
            self.twin.append(name, count, seeded)

    @rule(index=st.integers(0, 5), back=st.integers(0, 20))
    def rewind(self, index, back):
        if (name := self.pick(index)) is not None:
            length = len(self.twin.model.tokens[name])
            self.twin.rewind(name, max(0, length - back))

    @rule(index=st.integers(0, 5))
    def fork(self, index):
        name = self.pick(index)
        if name is not None and len(self.twin.model.slots) < self.twin.ring.max_slots:
            self.twin.fork(name, self.twin.names)
            self.twin.names += 1

    @rule(index=st.integers(0, 5))
    def release(self, index):
        if (name := self.pick(index)) is not None:
            self.twin.release(name)

    @invariant()
    def agrees(self):
        for name in self.twin.model.slots:
            self.twin.check(name)


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=60, stateful_step_count=40)
