"""What must come of a right call that `fuzz` drew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fuzz import OPERANDS, U32, Fuzzed, Operands
from kpool_graph import reference, reference_ragged
from kpool_graph.testing import wrong_channels
from models import Array, bits


@dataclass(frozen=True)
class Request:
    """One request's tokens in a call, and where it left off."""

    slot: int
    start: int
    keys: Array
    gates: Array

    def members(self, op: Fuzzed, tail: Array | None, pool: int) -> tuple[Array, Array]:
        """Gathers a pool's keys and gate scores from the call and the ring."""
        members = []
        for position in range(pool * op.kpool, (pool + 1) * op.kpool):
            if position >= self.start:
                at = position - self.start
                members.append((self.keys[at], self.gates[at]))
            else:
                assert tail is not None
                entry = position % op.ring_len
                members.append((tail[self.slot, 0, entry], tail[self.slot, 1, entry]))
        keys, gates = zip(*members, strict=True)
        return np.stack(keys), np.stack(gates)


def requests(op: Fuzzed, operands: Operands) -> list[Request]:
    """Cuts a right call into its requests."""
    listed = []
    k, gate = operands["k"], operands["gate"]
    slots = operands.get("slot_idx", operands.get("cache_lengths"))
    assert slots is not None
    for row, slot in enumerate(slots):
        if op.tokens:
            positions = operands["positions"][row]
            own: Any = (row, positions >= 0)
            start = int(positions[positions >= 0][0]) if own[1].any() else 0
        else:
            offsets = operands["input_row_offsets"]
            own = slice(int(offsets[row]), int(offsets[row + 1]))
            start = int(operands["cache_lengths"][row])
        listed.append(Request(int(slot), start, k[own], gate[own]))
    return listed


def check(
    op: Fuzzed, operands: Operands, before: Array | None, after: Array | None, got: Any
) -> None:
    """Requires what a right call left and returned to be the oracle's.

    Args:
        op: The op.
        operands: Its operands.
        before: The ring before the call, if the op has one.
        after: The ring after it.
        got: Its outputs.
    """
    want = None if before is None else before.copy()
    arguments = [operands[name] for name in OPERANDS[op.op] if name != "tail"]
    if op.op == "expand_topk":
        want_ids = reference_ragged.expand_topk(*arguments, kpool=op.kpool)
        np.testing.assert_array_equal(got[0], want_ids)
        return
    if op.op == "copy_slots":
        assert want is not None and before is not None
        flat = want.reshape(-1, *want.shape[-3:])
        flat[arguments[1]] = before.reshape(flat.shape)[arguments[0]]
    with np.errstate(all="ignore"):
        stash: dict[str, Callable[..., Any]] = {
            "seed_tail": reference.seed_tail,
            "tail_update": reference.tail_update,
            "ragged_update": reference_ragged.ragged_update,
        }
        if op.op in stash:
            assert want is not None
            # A request that brings nothing names any slot; the oracle looks it up.
            arguments[-1] = arguments[-1] % U32(len(want))
            stash[op.op](want, *arguments, kpool=op.kpool)
    if want is not None:
        assert after is not None
        assert (bits(after) == bits(want)).all(), "ring"
    if len(got):
        check_pools(op, operands, before, got)


def check_pools(op: Fuzzed, operands: Operands, before: Array | None, got: Any) -> None:
    """Requires every pool of a call to be where it belongs, and zeros elsewhere."""
    kpool, pooled = op.kpool, got[0].copy()
    closed = got[1].copy() if len(got) > 1 else None
    for row, request in enumerate(requests(op, operands)):
        start, end = request.start, request.start + len(request.keys)
        due = range(start // kpool, end // kpool)
        cells: list[Any]
        if op.op == "compress":
            due = range(-(-start // kpool), end // kpool)
            first = int(operands["pool_row_offsets"][row])
            cells = [first + at for at in range(len(due))]
        elif op.op == "ring_close":
            due = due[: 1 if start % kpool else 0]
            cells = [row]
        elif op.op == "ragged_update":
            offset = int(operands["input_row_offsets"][row])
            first = (offset + row * (kpool - 1)) // kpool
            cells = [first + at for at in range(len(due))]
        else:
            cells = [(row, at) for at in range(len(due))]
        for cell, pool in zip(cells, due, strict=False):
            if closed is not None:
                assert closed[cell] == pool, (cell, closed[cell], pool)
                closed[cell] = -1
            keys, gates = request.members(op, before, pool)
            with np.errstate(all="ignore"):
                wrong = wrong_channels(pooled[cell], keys, gates, operands["ape"])
            assert not wrong.any(), (cell, pool)
            pooled[cell] = 0
    assert closed is None or (closed == -1).all()
    assert not bits(pooled).any(), "an unused row is not zero"
