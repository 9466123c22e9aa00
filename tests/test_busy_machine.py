"""What MAX queues is done before it is needed, when threads wait for a CPU too."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from max.dtype import DType

from cases import FAMILIES, seed_operands, update_operands
from kpool_graph import TailRing, reference
from models import declare, to_storage
from serving import CopySlots

FAMILY = next(each for each in FAMILIES if each.decode.dtype == DType.float32)
SEED, DECODE = FAMILY.seed_tail, FAMILY.decode
COPY = declare(CopySlots(SEED.dtype, SEED.head_dim, SEED.ring_len))
# Were the ring filled late, tens of them would be lost.
STEPS = 20_000


@pytest.fixture
def busy_machine():
    """Gives every CPU more to do than it can."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    yield
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("busy_machine")
def test_no_step_on_a_new_ring_is_lost(models):
    """A prompt leaves its tail, a fork takes it, and its first decode closes a pool."""
    rng = np.random.default_rng(0)
    ring = TailRing(1024, SEED.kpool, SEED.head_dim, SEED.dtype, SEED.ring_len)
    prompt = seed_operands(rng, SEED, [(1022, 0, SEED.kpool - 1)])
    source, fork = np.array([[1022], [1023]], np.uint32)
    step = update_operands(rng, DECODE, [np.array([SEED.kpool - 1])], fork)
    want = np.zeros(ring.shape, np.float32)
    reference.seed_tail(want, *prompt, kpool=SEED.kpool)
    want[fork] = want[source]
    exact, _ = reference.tail_update(want, *step, kpool=SEED.kpool)
    lost = 0

    for _ in range(STEPS):
        buffer = ring.allocate()
        models[SEED](buffer, *prompt)
        models[COPY](buffer, source, fork)
        pooled, _ = models[DECODE](buffer, *step)
        lost += not np.allclose(pooled, exact) or not np.array_equal(
            to_storage(buffer), want
        )
    assert lost == 0
