"""A case's operands, and what the oracle says comes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kpool_graph import bfloat16, reference, reference_ragged
from kpool_graph.reference import Array

from . import cases
from .cases import BFLOAT16, CLOSING, DECODE, HEAD_DIM, OPEN, POOL_TOPK, Case

# Rows of one step take other slots than 0, 1, 2, and the ring is no larger than a
# server's: it is what the ops of a graph that copy the ring pay for.
MIN_SLOTS = 512


@dataclass
class Outcome:
    """What one step leaves.

    Attributes:
        pooled: Pooled keys as numbers, or None.
        ints: Pool ids or positions, or None.
        tail: The ring in storage form, or None.
    """

    pooled: Array | None = None
    ints: Array | None = None
    tail: Array | None = None


@dataclass
class Problem:
    """A case made concrete.

    Attributes:
        case: The case.
        operands: Arrays in storage form (uint16 holds bfloat16 bits) by name, in the
            op's order. The ring has one slot more than its requests can own, the
            last: peers may write what they drop there.
        expected: Float64 pooled keys, and exact ints and ring bytes.
        tolerance: Bound on each pooled channel, shaped like it.
        bytes_moved: Bytes the op must read and write, row tables apart.
    """

    case: Case
    operands: dict[str, Array]
    expected: Outcome
    tolerance: Array = field(default_factory=lambda: np.zeros(()))
    bytes_moved: int = 0

    @property
    def sizes(self) -> dict[str, Any]:
        """The op's keyword arguments."""
        return {"kpool": self.case.kpool}


def make(case: Case, seed: int = 0) -> Problem:
    """Draws the operands and asks the oracle.

    Args:
        case: The case.
        seed: Of the random numbers.

    Returns:
        The problem. Requests are of unequal length and on any alignment, but for
        `compress`: whole pools from position 0 on, which peers only reshape.
    """
    rng = np.random.default_rng(seed)
    if case.op == cases.TAIL_UPDATE:
        operands = _decode_operands(case, rng)
    elif case.op == cases.EXPAND_TOPK:
        operands = _topk_operands(case, rng)
    else:
        operands = _ragged_operands(case, rng)
    expected = _ask_oracle(case, operands)
    problem = Problem(case, operands, expected)
    if expected.pooled is not None:
        problem.tolerance = _tolerance(case, operands, expected.pooled)
    problem.bytes_moved = _bytes_moved(case, operands, expected)
    return problem


def _draw(rng: np.random.Generator, case: Case, *shape: int) -> Array:
    values = rng.standard_normal(shape, np.float32)
    return bfloat16.encode(values) if case.dtype == BFLOAT16 else values


def _ring(rng: np.random.Generator, case: Case) -> tuple[Array, Array]:
    slots = max(MIN_SLOTS, case.requests)
    tail = _draw(rng, case, slots + 1, 2, case.kpool, HEAD_DIM)
    slot_idx = rng.permutation(slots)[: case.requests].astype(np.uint32)
    return tail, slot_idx


def _ape(rng: np.random.Generator, case: Case) -> Array:
    return rng.standard_normal((case.kpool, HEAD_DIM), np.float32)


def _decode_operands(case: Case, rng: np.random.Generator) -> dict[str, Array]:
    batch, kpool, next_n = case.requests, case.kpool, case.next_n
    tail, slot_idx = _ring(rng, case)
    if case.name == DECODE:
        start = np.array([case.n - 1])
    elif case.name == CLOSING:
        # A wide step ends its pool before its last token, so that it both closes
        # a pool and begins one.
        start = np.arange(batch) % 7 * kpool + kpool - max(1, next_n - 1)
    elif case.name == OPEN:
        start = np.arange(batch) % 7 * kpool + kpool - 1 - next_n
    else:
        raise ValueError(f"{case.id}: no such decode case")
    return {
        "tail": tail,
        "k": _draw(rng, case, batch, next_n, HEAD_DIM),
        "gate": _draw(rng, case, batch, next_n, HEAD_DIM),
        "ape": _ape(rng, case),
        "positions": (start[:, None] + np.arange(next_n)).astype(np.int32),
        "slot_idx": slot_idx,
    }


def _ragged_operands(case: Case, rng: np.random.Generator) -> dict[str, Array]:
    requests, kpool = case.requests, case.kpool
    # Whole pools for compress, any number of tokens for the others.
    unit = kpool if case.op == cases.COMPRESS else 1
    shares = rng.multinomial(case.n // unit - requests, np.full(requests, 1 / requests))
    lengths = (shares + 1) * unit
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32)
    cached = rng.integers(0, 64 * kpool, requests, dtype=np.uint32)
    tail, slot_idx = _ring(rng, case)
    k, gate = _draw(rng, case, case.n, HEAD_DIM), _draw(rng, case, case.n, HEAD_DIM)
    ape = _ape(rng, case)
    tables = {"input_row_offsets": offsets, "cache_lengths": cached}
    if case.op == cases.COMPRESS:
        cached[:] = 0
        pools = {"pool_row_offsets": offsets // np.uint32(kpool)}
        order = {"input_row_offsets": offsets, **pools, "cache_lengths": cached}
        return {"k": k, "gate": gate, "ape": ape, **order}
    tables["slot_idx"] = slot_idx
    if case.op == cases.SEED_TAIL:
        return {"tail": tail, "k": k, "gate": gate, **tables}
    return {"tail": tail, "k": k, "gate": gate, "ape": ape, **tables}


def _topk_operands(case: Case, rng: np.random.Generator) -> dict[str, Array]:
    cached = rng.integers(16384, 131072, case.requests, dtype=np.uint32)
    visible = (cached + 1) // case.kpool
    ids = rng.random((case.n, POOL_TOPK)) * visible[:, None]
    return {
        "pool_ids": ids.astype(np.int32),
        "input_row_offsets": np.arange(case.requests + 1, dtype=np.uint32),
        "cache_lengths": cached,
    }


def _ask_oracle(case: Case, operands: dict[str, Array]) -> Outcome:
    given = dict(operands)
    if "tail" in given:
        given["tail"] = given["tail"].copy()
    if case.op == cases.COMPRESS:
        del given["pool_row_offsets"]
        pooled, _ = reference_ragged.compress(**given, kpool=case.kpool)
        return Outcome(pooled=pooled)
    if case.op == cases.EXPAND_TOPK:
        return Outcome(ints=reference_ragged.expand_topk(**given, kpool=case.kpool))
    if case.op == cases.SEED_TAIL:
        reference.seed_tail(**given, kpool=case.kpool)
        return Outcome(tail=given["tail"])
    if case.op == cases.TAIL_UPDATE:
        pooled, closed = reference.tail_update(**given, kpool=case.kpool)
    else:
        pooled, closed = reference_ragged.ragged_update(**given, kpool=case.kpool)
    return Outcome(pooled, closed, given["tail"])


def _tolerance(case: Case, operands: dict[str, Array], exact: Array) -> Array:
    """Bounds each channel as `reference.pool_tolerance` does, with the largest
    logit and key of the whole case in place of the pool's own."""
    tokens = [
        operands["k"].reshape(-1, HEAD_DIM),
        operands["gate"].reshape(-1, HEAD_DIM),
    ]
    if "tail" in operands:
        ring = operands["tail"]
        tokens = [
            np.concatenate([mine, ring[:, plane].reshape(-1, HEAD_DIM)])
            for plane, mine in enumerate(tokens)
        ]
    key, score = (
        np.full((case.kpool, 1), np.abs(reference.values(part)).max(), np.float32)
        for part in tokens
    )
    ape = np.abs(operands["ape"]).max(keepdims=True)
    spacing = reference.ulp(exact, operands["k"].dtype)
    return reference.pool_tolerance(key, score, ape, spacing)


def _bytes_moved(case: Case, operands: dict[str, Array], expected: Outcome) -> int:
    if case.op == cases.EXPAND_TOPK:
        assert expected.ints is not None
        return operands["pool_ids"].nbytes + expected.ints.nbytes
    token = 2 * HEAD_DIM * operands["k"].itemsize
    tokens = operands["k"].size // HEAD_DIM
    if case.op == cases.COMPRESS:
        return tokens * token + tokens // case.kpool * token // 2
    if case.op == cases.TAIL_UPDATE:
        first = operands["positions"][:, 0].astype(np.int64)
        added = np.full(len(first), case.next_n)
    else:
        first = operands["cache_lengths"].astype(np.int64)
        added = np.diff(operands["input_row_offsets"].astype(np.int64))
    end = first + added
    if case.op == cases.SEED_TAIL:
        stashed = int(np.minimum(end % case.kpool, added).sum())
        return 2 * stashed * token
    closes = end // case.kpool > first // case.kpool
    waiting = int((first % case.kpool)[closes].sum())
    stashed = int(np.minimum(added, operands["tail"].shape[2]).sum())
    # Rows of pooled keys that stay unused are written too: zeros.
    assert expected.pooled is not None
    pooled = expected.pooled.size // HEAD_DIM * token // 2
    return tokens * token + waiting * token + stashed * token + pooled
