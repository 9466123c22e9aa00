"""A ring of more than 2**31 elements: addresses that 32 bits cannot hold."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from max.dtype import DType

from asserts import assert_same_bits
from cases import any_bits, normal
from kpool_graph import TailRing
from models import Ring, SeedTail, TailUpdate, compile_together
from ragged_models import RaggedUpdate
from serving import CopySlots

KPOOL, HEAD_DIM, RING_LEN, BF16 = 4, 128, 8, DType.bfloat16
SLOT_ELEMENTS = 2 * RING_LEN * HEAD_DIM
BOUNDARY = 2**31 // SLOT_ELEMENTS
RING = TailRing(BOUNDARY + 9, KPOOL, HEAD_DIM, BF16, ring_len=RING_LEN)
# Both sides of 2**31 bytes and of 2**31 elements, and what each would be mistaken
# for if an address lost its upper bits.
SLOTS = np.array(
    [
        BOUNDARY - 1,
        0,
        BOUNDARY,
        1,
        BOUNDARY + 1,
        BOUNDARY // 2 - 1,
        BOUNDARY // 2,
        BOUNDARY // 2 + 1,
        BOUNDARY + 8,
        8,
    ],
    np.uint32,
)
MEMORY_WANTED = RING.nbytes + 2**30

SEED = SeedTail(BF16, HEAD_DIM, KPOOL, RING_LEN)
UPDATE = TailUpdate(BF16, HEAD_DIM, KPOOL, 2, RING_LEN)
RAGGED = RaggedUpdate(BF16, HEAD_DIM, KPOOL, RING_LEN)
COPY = CopySlots(BF16, HEAD_DIM, RING_LEN)


def available_memory() -> int:
    """Reads how many bytes a new process may use; endless where nothing says so."""
    info = Path("/proc/meminfo")
    if not info.exists():
        return 2**63
    lines = dict(line.split(":") for line in info.read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


@pytest.mark.slow
def test_slots_on_both_sides_of_two_to_the_31_are_right():
    """Each op does to the big ring what it does to a ring of ten slots."""
    if available_memory() < MEMORY_WANTED:
        pytest.skip(
            f"{MEMORY_WANTED >> 20} MiB of memory wanted for the ring,"
            f" {available_memory() >> 20} available"
        )
    assert np.prod(RING.shape, dtype=np.int64) > 2**31
    calls = compile_together([SEED, UPDATE, RAGGED, COPY])
    rng = np.random.default_rng(31)
    big = RING.allocate()
    # Shares the ring's memory: a copy would double it.
    stored = big.view(DType.uint16, RING.shape).to_numpy()
    stored[SLOTS] = any_bits(rng, (len(SLOTS), *RING.shape[1:]), BF16)
    small = Ring(stored[SLOTS], BF16)
    compact = np.arange(len(SLOTS), dtype=np.uint32)
    position = np.zeros(len(SLOTS), np.int64)
    ape = rng.standard_normal((KPOOL, HEAD_DIM)).astype(np.float32)

    def both(op, *operands, slots=(SLOTS, compact)):
        """Runs an op on both rings, and requires all it leaves to agree."""
        outputs = []
        for tail, tables in zip((big, small.buffer), slots, strict=True):
            tables = tables if isinstance(tables, tuple) else (tables,)
            outputs.append(calls[op](tail, *operands, *tables))
        for at, (got, want) in enumerate(zip(*outputs, strict=True)):
            assert_same_bits(got, want, f"{op.name}: output {at}")
        assert_same_bits(stored[SLOTS], small.storage(), f"{op.name}: slots")
        return outputs[0]

    def ragged(op, counts, *extra):
        total = int(counts.sum())
        k, gate = (normal(rng, (total, HEAD_DIM), BF16) for _ in range(2))
        offsets = np.cumsum([0, *counts]).astype(np.uint32)
        outputs = both(op, k, gate, *extra, offsets, position.astype(np.uint32))
        position[:] += counts
        return outputs

    ragged(SEED, rng.integers(1, 12, len(SLOTS)))
    _, closed = ragged(RAGGED, rng.integers(1, 12, len(SLOTS)), ape)
    assert (closed >= 0).any()
    closures = 0
    for _ in range(6):
        k, gate = (normal(rng, (len(SLOTS), 2, HEAD_DIM), BF16) for _ in range(2))
        positions = (position[:, np.newaxis] + np.arange(2)).astype(np.int32)
        _, closed = both(UPDATE, k, gate, ape, positions)
        position += 2
        closures += np.count_nonzero(closed >= 0)
    assert closures >= 2 * len(SLOTS)
    order = rng.permutation(len(SLOTS))
    pairs = tuple((each, each[order]) for each in (SLOTS, compact))
    both(COPY, slots=pairs)

    stored[SLOTS] = 0
    flat = stored.reshape(-1)
    for first in range(0, flat.size, 2**28):
        assert not flat[first : first + 2**28].any(), "a slot of nobody was written"
