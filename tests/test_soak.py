"""Two thousand requests through sixty-four slots: every pooled key is its own."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import numpy as np
import pytest
from max.dtype import DType

from cases import normal
from kpool_graph import SlotPool, TailRing
from kpool_graph.testing import ListModel
from models import Ring, TailUpdate, compile_together
from ragged_models import RaggedUpdate
from serving import CopySlots

DTYPE, KPOOL, NEXT_N, HEAD_DIM = DType.bfloat16, 4, 4, 16
RING = TailRing(64, KPOOL, HEAD_DIM, DTYPE, speculative_tokens=NEXT_N - 1, poison=True)
REQUESTS = 2_000
# What an allocator may hold on to without a leak; 100 KiB a request would pass it.
MEMORY_MARGIN = 64 * 2**20

RAGGED = RaggedUpdate(DTYPE, HEAD_DIM, KPOOL, RING.ring_len)
DECODE = TailUpdate(DTYPE, HEAD_DIM, KPOOL, NEXT_N, RING.ring_len)
COPY = CopySlots(DTYPE, HEAD_DIM, RING.ring_len)


def resident_bytes() -> int:
    """Reads the process's memory in use; its peak where only that is known."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Engine:
    """A server that keeps pooled keys by request and pool id.

    Every request's tokens are known to a list model, and each pooled key is
    compared with the oracle when its request ends, however it ends.
    """

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.calls = compile_together([RAGGED, DECODE, COPY])
        shape = (RING.max_slots, 2, RING.ring_len, HEAD_DIM)
        self.ring = Ring(np.zeros(shape, np.uint16), DTYPE)
        self.pool = SlotPool(RING, buffers=[self.ring.buffer])
        self.model = ListModel(RING.max_slots, KPOOL, RING.ring_len)
        self.ape = self.rng.standard_normal((KPOOL, HEAD_DIM)).astype(np.float32)
        self.prompt, self.left, self.first_pool, self.keys = {}, {}, {}, {}
        self.arrived = self.ended = self.checked = 0
        self.happened = dict.fromkeys(
            ("fork", "abort", "move", "reject", "reject_all", "cached", "padding"), 0
        )

    def tokens(self, count, scale=1.0):
        k, gate = (
            normal(self.rng, (count, HEAD_DIM), DTYPE, each) for each in (scale, 2)
        )
        return list(zip(k, gate, strict=True))

    def arrive(self):
        name = self.arrived
        self.arrived += 1
        cached = 0
        if self.rng.random() < 0.1:
            cached = self.pool.usable_prefix(int(self.rng.integers(40)))
            self.happened["cached"] += 1
        slot = self.pool.claim(name, cached)
        self.model.claim(name, slot, self.tokens(cached))
        self.start(name, cached // KPOOL, int(self.rng.integers(0, 150)), {})

    def start(self, name, first_pool, prompt, keys):
        self.first_pool[name], self.prompt[name] = first_pool, prompt
        self.left[name] = int(self.rng.integers(1, 150))
        self.keys[name] = keys

    def end(self, name):
        for pool in range(self.first_pool[name], self.model.visible(name)):
            self.model.check_pooled(name, pool, self.keys[name][pool], self.ape)
            self.checked += 1
        self.pool.release(name)
        self.model.release(name)
        for table in (self.first_pool, self.prompt, self.left, self.keys):
            del table[name]
        self.ended += 1

    def fork(self, source, name):
        slot = self.pool.fork(source, name)
        self.model.fork(source, name, slot)
        self.start(name, self.first_pool[source], self.prompt[source], {})
        self.keys[name] = dict(self.keys[source])

    def disturb(self):
        """Forks, aborts and moves some of the requests."""
        for source in list(self.left):
            chance = self.rng.random()
            if chance < 0.002:
                self.end(source)
                self.happened["abort"] += 1
            elif chance < 0.006 and self.pool.free_slots:
                if self.arrived < REQUESTS:
                    self.fork(source, self.arrived)
                    self.arrived += 1
                    self.happened["fork"] += 1
            elif chance < 0.01 and self.pool.free_slots:
                left = self.left[source]
                self.fork(source, "moving")
                self.copy()
                for table in (self.pool, self.model):
                    table.release(source)
                self.fork("moving", source)
                self.left[source] = left
                self.copy()
                for table in (self.pool, self.model):
                    table.release("moving")
                for table in (self.first_pool, self.prompt, self.left, self.keys):
                    del table["moving"]
                self.happened["move"] += 1
        self.copy()

    def copy(self):
        self.calls[COPY](self.ring, *self.pool.take_copies())

    def store(self, name, pools, rows):
        for pool, key in zip(pools, rows, strict=True):
            self.keys[name][pool] = key

    def settle(self, name, brought, accepted):
        """Takes rejected drafts back, and counts what was decoded."""
        length = self.pool.length(name)
        if accepted < brought:
            self.pool.rewind(name, length - brought + accepted)
            self.model.rewind(name, length - brought + accepted)
            self.happened["reject" if accepted else "reject_all"] += 1
        self.left[name] -= accepted

    def draw_step(self, name):
        """Draws a decode step: real tokens, then drafts that will be rejected."""
        brought = int(self.rng.integers(1, NEXT_N, endpoint=True))
        accepted = int(self.rng.integers(0, brought, endpoint=True))
        accepted = min(accepted, self.left[name])
        return self.tokens(accepted) + self.tokens(brought - accepted, 50), accepted

    def ragged_step(self, names):
        """Prefills, and decodes some requests along with it."""
        starts = [self.pool.length(name) for name in names]
        steps, offsets = [], [0]
        for name in names:
            if self.prompt[name]:
                count = min(int(self.rng.integers(0, 40)), self.prompt[name])
                steps.append((self.tokens(count), None))
            else:
                steps.append(self.draw_step(name))
            offsets.append(offsets[-1] + len(steps[-1][0]))
        tokens = [token for step, _ in steps for token in step]
        kv = np.array(tokens, np.uint16).reshape(-1, 2, HEAD_DIM)
        pooled, closed = self.calls[RAGGED](
            self.ring,
            kv[:, 0].copy(),
            kv[:, 1].copy(),
            self.ape,
            np.array(offsets, np.uint32),
            np.array(starts, np.uint32),
            self.pool.slot_idx(names),
        )
        used = 0
        for row, (name, (step, accepted)) in enumerate(zip(names, steps, strict=True)):
            count = len(step)
            may_reject = 0 if accepted is None else count
            self.pool.advance(name, count, may_reject=may_reject)
            due = self.model.append(name, step)
            first = (offsets[row] + row * (KPOOL - 1)) // KPOOL
            rows = slice(first, first + len(due))
            assert closed[rows].tolist() == list(due)
            self.store(name, due, pooled[rows])
            used += len(due)
            if accepted is None:
                self.prompt[name] -= count
            else:
                self.settle(name, count, accepted)
        assert np.count_nonzero(closed >= 0) == used

    def decode_step(self, names):
        """Decodes requests in a batch of a round size, with drafts."""
        batch = -(-len(names) // 8) * 8
        self.happened["padding"] += batch - len(names)
        positions, slots = self.pool.pad_to(
            batch, self.pool.positions(names, NEXT_N), self.pool.slot_idx(names)
        )
        # Padded tokens carry NaN, and must not be looked at.
        kv = np.full((2, batch, NEXT_N, HEAD_DIM), 0x7FC0, np.uint16)
        steps = [self.draw_step(name) for name in names]
        for row, (step, _) in enumerate(steps):
            positions[row, len(step) :] = -1
            kv[:, row, : len(step)] = np.array(step).swapaxes(0, 1)
        pooled, closed = self.calls[DECODE](
            self.ring, kv[0], kv[1], self.ape, positions, slots
        )
        assert (closed[len(names) :] == -1).all()
        for row, (name, (step, accepted)) in enumerate(zip(names, steps, strict=True)):
            self.pool.advance(name, len(step), may_reject=len(step))
            due = self.model.append(name, step)
            assert [pool for pool in closed[row].tolist() if pool >= 0] == list(due)
            self.store(name, due, pooled[row, : len(due)])
            self.settle(name, len(step), accepted)

    def step(self):
        for _ in range(self.rng.poisson(2)):
            if self.arrived < REQUESTS and self.pool.free_slots:
                self.arrive()
        self.disturb()
        names = list(self.left)
        self.rng.shuffle(names)
        ragged = [
            name for name in names if self.prompt[name] or self.rng.random() < 0.1
        ]
        decoding = [name for name in names if name not in ragged]
        if ragged:
            self.ragged_step(ragged)
        if decoding:
            self.decode_step(decoding)
        for name in names:
            if not self.prompt[name] and self.left[name] <= 0:
                self.end(name)


@pytest.mark.slow
def test_two_thousand_requests_share_sixty_four_slots(capsys):
    engine = Engine(64)
    steps = early = peak = most = 0
    while engine.ended < REQUESTS:
        engine.step()
        steps += 1
        most = max(most, len(engine.left))
        peak = max(peak, resident_bytes())
        if engine.ended < REQUESTS // 10:
            early = peak
        if steps % 50 == 0:
            tail = engine.ring.storage()
            for name in engine.left:
                engine.model.check_ring(name, tail)
    with capsys.disabled():
        print(
            f"\n{engine.ended} requests, {steps} steps, up to {most} at once:"
            f" {engine.checked} pooled keys right; {engine.happened}; peak memory"
            f" {peak / 2**20:.0f} MiB, {early / 2**20:.0f} MiB in the first tenth",
            end=" ",
        )
    assert engine.pool.free_slots == RING.max_slots
    assert most == RING.max_slots
    assert engine.checked > 20_000
    assert min(engine.happened.values()) > 100
    assert peak < early + MEMORY_MARGIN
