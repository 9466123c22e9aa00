"""MAX's own graph helpers for the family, unmodified, on top of our kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from max.nn.kernels import (
    mla_kpool_compress,
    mla_kpool_expand_topk,
    mla_kpool_ring_close,
    mla_kpool_seed_tail,
)

from asserts import assert_same_bits
from cases import FAMILIES, normal, ring_for
from models import Ring, declare
from ragged_models import (
    EXPAND_TOPKS,
    IN_EACH_DTYPE,
    ExpandTopk,
    ThreeOps,
    every_phase,
    on_ring,
    ragged_operands,
    random_requests,
)


@dataclass(frozen=True)
class MaxThreeOps(ThreeOps):
    """ThreeOps as MAX's helpers build it."""

    stem = "max_three_ops"

    @property
    def builders(self):
        return mla_kpool_ring_close, mla_kpool_compress, mla_kpool_seed_tail


@dataclass(frozen=True)
class MaxExpandTopk(ExpandTopk):
    """ExpandTopk as MAX's helper builds it."""

    @property
    def name(self):
        return f"max_{super().name}"

    def body(self, *operands):
        return mla_kpool_expand_topk(
            *operands, kpool=self.kpool, always_select_tail=self.always_select_tail
        )


RINGS = (
    *IN_EACH_DTYPE,
    *(family.seed_tail for family in FAMILIES if family.seed_tail.kpool in (3, 16)),
)
THREE_OPS = {on_ring(ThreeOps, op): on_ring(MaxThreeOps, op) for op in RINGS}
EXPANSIONS = {
    op: declare(MaxExpandTopk(op.kpool, op.pool_topk, op.always_select_tail))
    for op in EXPAND_TOPKS
    if op.kpool in (2, 3, 4) and op.pool_topk < 9
}

both = pytest.mark.parametrize(
    ("ours", "theirs"), THREE_OPS.items(), ids=lambda op: op.name
)


def assert_same_step(models, ours, theirs, rings, operands):
    outputs = models[ours](rings[0], *operands)
    for want, got in zip(outputs, models[theirs](rings[1], *operands), strict=True):
        assert_same_bits(got, want, "output")
    assert_same_bits(rings[1].storage(), rings[0].storage(), "ring")
    return outputs


@both
def test_the_helpers_of_max_do_what_ours_do_over_random_batches(models, ours, theirs):
    rng = np.random.default_rng(1)
    # Every step finds what the one before left, in slots that change their owner.
    tail = normal(rng, (11, 2, ours.ring_len, ours.head_dim), ours.dtype)
    rings = [Ring(tail, ours.dtype), Ring(tail, ours.dtype)]
    for _ in range(20):
        requests = random_requests(rng, int(rng.integers(0, 9)), 3 * ours.kpool)
        operands = ragged_operands(rng, ours, requests)
        assert_same_step(models, ours, theirs, rings, operands)


@both
def test_the_helpers_of_max_do_what_ours_do_for_every_alignment(models, ours, theirs):
    rng = np.random.default_rng(2)
    requests = every_phase(ours.kpool)
    tail = ring_for(rng, ours, requests, max_slots=len(requests))
    rings = [Ring(tail, ours.dtype), Ring(tail, ours.dtype)]
    operands = ragged_operands(rng, ours, requests)
    _, closed, _, pool_rows = assert_same_step(models, ours, theirs, rings, operands)
    assert (closed >= 0).any()
    assert pool_rows[-1] > 0


@pytest.mark.parametrize(("ours", "theirs"), EXPANSIONS.items(), ids=lambda op: op.name)
def test_the_helper_of_max_expands_as_ours_does(models, ours, theirs):
    rng = np.random.default_rng(3)
    for _ in range(20):
        rows = int(rng.integers(0, 9))
        lengths = rng.integers(0, 60, rows).astype(np.uint32)
        counts = rng.integers(0, 9, rows)
        offsets = np.cumsum([0, *counts]).astype(np.uint32)
        ids = rng.integers(-3, 20, (offsets[-1], ours.pool_topk), np.int32)
        (want,) = models[ours](ids, offsets, lengths)
        (got,) = models[theirs](ids, offsets, lengths)
        assert_same_bits(got, want, "positions")
