"""Rejected drafts: which rings they cannot spoil, and that shorter ones they do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from max.dtype import DType

from asserts import assert_same_bits
from cases import KPOOLS, normal, poison
from kpool_graph import OperandError, TailRing, min_ring_len
from models import Array, Ring, TailUpdate, bits, compile_together, declare

F32, HEAD_DIM = DType.float32, 8
STEPS, HISTORIES = 50, 200
NEXT_NS = range(1, 9)


def op_of(kpool, next_n, ring_len):
    return TailUpdate(F32, HEAD_DIM, kpool, next_n, ring_len)


def rings_of(kpool, next_n):
    """The rings to try: both bounds, and one entry less than each."""
    bounds = [min_ring_len(kpool, next_n, commits) for commits in (0, 1)]
    tried = {*bounds, *(bound - 1 for bound in bounds)}
    return sorted(ring_len for ring_len in tried if ring_len >= kpool)


def ops_of(kpool, next_ns):
    return {op_of(kpool, 1, kpool)} | {
        op_of(kpool, next_n, ring_len)
        for next_n in next_ns
        for ring_len in rings_of(kpool, next_n)
    }


USUAL = ((2, 4), (3, 8), (4, 3), (16, 5))
for usual_kpool, usual_next_n in USUAL:
    for usual_op in ops_of(usual_kpool, [usual_next_n]):
        declare(usual_op)


@dataclass(frozen=True)
class Histories:
    """Many requests of one kpool, by rows, and what they pool to without drafts.

    Attributes:
        kpool: Tokens per pool.
        phase: `[rows]`, committed tokens before the first step: every one below
            kpool, each in `HISTORIES` rows.
        keys: `[rows, tokens, head_dim]`, every committed token's key.
        gates: The same of its gate score.
        ape: `[kpool, head_dim]`.
        pools: `[rows, pools, head_dim]`, decoded one token at a time.
    """

    kpool: int
    phase: Array
    keys: Array
    gates: Array
    ape: Array
    pools: Array


def histories(models, kpool, most_tokens):
    """Draws requests and decodes them one token at a time, in a plain ring."""
    rng = np.random.default_rng(kpool)
    phase = np.repeat(np.arange(kpool), HISTORIES)
    tokens = -(-(kpool + most_tokens) // kpool) * kpool
    keys = normal(rng, (len(phase), tokens, HEAD_DIM), F32)
    gates = normal(rng, keys.shape, F32, 2)
    ape = normal(rng, (kpool, HEAD_DIM), F32)
    pools = np.empty((len(phase), tokens // kpool, HEAD_DIM), np.float32)
    op = op_of(kpool, 1, kpool)
    ring = Ring(poison(rng, (len(phase), 2, kpool, HEAD_DIM), F32), F32)
    slots = rng.permutation(len(phase)).astype(np.uint32)
    for position in range(tokens):
        now = slice(position, position + 1)
        pooled, closed = models[op](
            ring,
            keys[:, now].copy(),
            gates[:, now].copy(),
            ape,
            np.full((len(phase), 1), position, np.int32),
            slots,
        )
        if position % kpool == kpool - 1:
            assert (closed == position // kpool).all()
            pools[:, position // kpool] = pooled[:, 0]
    assert np.isfinite(pools).all()
    return Histories(kpool, phase, keys, gates, ape, pools)


def speculate(call, past, commits_at_least):
    """Decodes the same requests in wide steps of which random parts are rejected.

    Returns:
        Visible pools that were compared, and how many of them differ.
    """
    op, rows = call.op, len(past.phase)
    rng = np.random.default_rng([op.kpool, op.next_n, op.ring_len, commits_at_least])
    tail = poison(rng, (rows, 2, op.ring_len, HEAD_DIM), F32)
    slots = rng.permutation(rows)
    for position in range(op.kpool - 1):
        waiting = np.flatnonzero(past.phase > position)
        tail[slots[waiting], 0, position % op.ring_len] = past.keys[waiting, position]
        tail[slots[waiting], 1, position % op.ring_len] = past.gates[waiting, position]
    ring = Ring(tail, F32)
    stored = poison(rng, past.pools.shape, F32)
    # Room for pools that only rejected drafts ever close.
    stored = np.pad(stored, ((0, 0), (0, op.next_n + 1), (0, 0)))
    length = past.phase.copy()
    row = np.arange(rows)
    every_row = row[:, np.newaxis]
    for _ in range(STEPS):
        committed = rng.integers(commits_at_least, op.next_n, rows, endpoint=True)
        positions = length[:, np.newaxis] + np.arange(op.next_n)
        drafts = np.arange(op.next_n) >= committed[:, np.newaxis]
        known = np.minimum(positions, past.keys.shape[1] - 1)
        keys, gates = past.keys[every_row, known], past.gates[every_row, known]
        keys[drafts] = normal(rng, keys[drafts].shape, F32, 100)
        gates[drafts] = normal(rng, keys[drafts].shape, F32, 3)
        pooled, closed = call(
            ring,
            keys,
            gates,
            past.ape,
            positions.astype(np.int32),
            slots.astype(np.uint32),
        )
        for column in range(op.columns):
            (closing,) = np.nonzero(closed[:, column] >= 0)
            stored[closing, closed[closing, column]] = pooled[closing, column]
        length += committed
    compared = different = 0
    for pool in range(past.pools.shape[1]):
        visible = row[length // op.kpool > pool]
        got, want = stored[visible, pool], past.pools[visible, pool]
        compared += len(visible)
        different += np.count_nonzero((bits(got) != bits(want)).any(axis=1))
    return compared, different


def check(models, past, next_n, commits):
    """Tries the bound and, where that can fail, one entry less.

    Returns:
        Pools found equal.
    """
    kpool = past.kpool
    bound = min_ring_len(kpool, next_n, commits)
    compared, different = speculate(models[op_of(kpool, next_n, bound)], past, commits)
    assert compared > 0
    assert different == 0, f"ring_len {bound}: {different} of {compared} pools differ"
    if kpool > 1 and bound > kpool:
        short = models[op_of(kpool, next_n, bound - 1)]
        assert speculate(short, past, commits)[1] > 0, f"ring_len {bound - 1} will do"
    return compared


@pytest.mark.parametrize("commits", [0, 1])
@pytest.mark.parametrize(("kpool", "next_n"), USUAL)
def test_the_bound_is_enough_and_one_entry_less_is_not(models, kpool, next_n, commits):
    check(models, histories(models, kpool, STEPS * next_n), next_n, commits)


@pytest.mark.slow
@pytest.mark.parametrize("kpool", KPOOLS)
def test_the_bound_is_exact_for_every_width(kpool, capsys):
    compiled = compile_together(sorted(ops_of(kpool, NEXT_NS), key=lambda op: op.name))
    past = histories(compiled, kpool, STEPS * max(NEXT_NS))
    compared = sum(
        check(compiled, past, next_n, commits)
        for next_n in NEXT_NS
        for commits in (0, 1)
    )
    with capsys.disabled():
        print(f"\nkpool {kpool}: {compared} visible pools equal", end=" ")


@pytest.mark.parametrize("kpool", KPOOLS)
def test_the_bound_is_the_contracts(kpool):
    for next_n in range(1, 17):
        assert min_ring_len(kpool, next_n) == kpool - 1 + next_n
        at_least_one = min_ring_len(kpool, next_n, commits_at_least=1)
        assert at_least_one == max(kpool, kpool + next_n - 2)
        assert min_ring_len(kpool, next_n, commits_at_least=next_n) == kpool
        assert TailRing(3, kpool, 8, speculative_tokens=next_n - 1).ring_len == (
            min_ring_len(kpool, next_n)
        )


def test_an_impossible_bound_is_refused():
    with pytest.raises(OperandError) as error:
        min_ring_len(0, 0, -1)
    assert str(error.value).splitlines() == [
        "min_ring_len: kpool must be at least 1, got 0",
        "min_ring_len: next_n must be at least 1, got 0",
        "min_ring_len: commits_at_least must be at least 0, got -1",
    ]


def test_a_ring_may_be_longer_than_speculation_needs_but_not_shorter():
    assert TailRing(3, 4, 8, ring_len=16, speculative_tokens=3).ring_len == 16
    assert TailRing(3, 4, 8, ring_len=7, speculative_tokens=3).ring_len == 7
    with pytest.raises(OperandError) as error:
        TailRing(3, 4, 8, ring_len=6, speculative_tokens=3)
    assert str(error.value) == (
        "TailRing: ring_len (6) must be at least kpool + speculative_tokens (7), or be"
        " left out"
    )
    with pytest.raises(OperandError) as error:
        TailRing(3, 4, 8, speculative_tokens=-1)
    assert "TailRing: speculative_tokens must be at least 0, got -1" in str(error.value)


def test_the_histories_start_in_every_phase(models):
    past = histories(models, 4, 8)
    assert np.bincount(past.phase).tolist() == [HISTORIES] * 4
    assert_same_bits(past.pools, histories(models, 4, 8).pools)
