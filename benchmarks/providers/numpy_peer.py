"""The ops in NumPy, vectorised over rows, in place where NumPy can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kpool_graph import bfloat16

from .. import cases
from ..cases import HEAD_DIM
from ..operands import Array, Outcome, Problem
from . import indices
from .base import Prepared

NAME = "numpy"


def prepare(problem: Problem) -> Prepared:
    """Copies the operands.

    Args:
        problem: The case.

    Returns:
        Its step.
    """
    given = {
        # Row tables as NumPy indexes with them.
        name: array.astype(np.int64)
        if array.dtype.kind in "iu" and array.dtype != np.uint16
        else array.copy()
        for name, array in problem.operands.items()
    }
    function, kpool = _FUNCTIONS[problem.case.op], problem.case.kpool

    def read(outputs: Any) -> Outcome:
        pooled, ints = outputs
        values = None if pooled is None else _widen(pooled)
        return Outcome(values, ints, given.get("tail"))

    return Prepared(lambda: function(**given, kpool=kpool), read)


def _widen(storage: Array) -> Array:
    return bfloat16.decode(storage) if storage.dtype == np.uint16 else storage


def _narrow(values: Array, dtype: np.dtype[Any]) -> Array:
    if dtype != np.uint16:
        return values
    # Keys here are finite: NaN needs no care of its own.
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def _pool(keys: Array, gates: Array, ape: Array) -> Array:
    """Pools `[rows, kpool, head_dim]` members into `[rows, head_dim]`."""
    weights = _widen(gates) + ape
    weights -= weights.max(axis=1, keepdims=True)
    np.exp(weights, out=weights)
    total = weights.sum(axis=1)
    weights *= _widen(keys)
    pooled = weights.sum(axis=1)
    pooled /= total
    return _narrow(pooled, keys.dtype)


def _tail_update(
    tail: Array,
    k: Array,
    gate: Array,
    ape: Array,
    positions: Array,
    slot_idx: Array,
    *,
    kpool: int,
) -> tuple[Array, Array]:
    batch, next_n, _ = k.shape
    flat = tail.reshape(-1, HEAD_DIM)
    entries = (slot_idx[:, None] * (2 * kpool) + positions % kpool).reshape(-1)
    if next_n == 1:
        flat[entries] = k[:, 0]
        flat[entries + kpool] = gate[:, 0]
        last = positions[:, 0]
        ids = np.where(last % kpool == kpool - 1, last // kpool, -1)
    else:
        _, ids, tokens, waiting = indices.decode_pools(np, positions, kpool)
    chosen = np.flatnonzero(ids >= 0)
    whole = len(chosen) == batch
    pooled = np.empty if whole else np.zeros
    pooled = pooled((batch, 1, HEAD_DIM), k.dtype)
    if len(chosen):
        slots = tail.take(slot_idx if whole else slot_idx[chosen], axis=0)
        if next_n > 1:
            mine = ~waiting[chosen]
            rows = tokens[chosen][mine]
            slots[:, 0][mine] = k.reshape(-1, HEAD_DIM)[rows]
            slots[:, 1][mine] = gate.reshape(-1, HEAD_DIM)[rows]
        pooled[chosen, 0] = _pool(slots[:, 0], slots[:, 1], ape)
    if next_n > 1:
        flat[entries] = k.reshape(-1, HEAD_DIM)
        flat[entries + kpool] = gate.reshape(-1, HEAD_DIM)
    return pooled, ids[:, None]


def _compress(
    k: Array,
    gate: Array,
    ape: Array,
    input_row_offsets: Array,
    pool_row_offsets: Array,
    cache_lengths: Array,
    *,
    kpool: int,
) -> tuple[Array, None]:
    shape = (-1, kpool, HEAD_DIM)
    return _pool(k.reshape(shape), gate.reshape(shape), ape), None


def _ragged_update(
    tail: Array,
    k: Array,
    gate: Array,
    ape: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    slot_idx: Array,
    *,
    kpool: int,
) -> tuple[Array, Array]:
    tables = (input_row_offsets, cache_lengths, len(k), kpool)
    owner, ids, tokens, waiting = indices.ragged_pools(np, *tables)
    pooled = np.zeros((len(ids), HEAD_DIM), k.dtype)
    chosen = np.flatnonzero(ids >= 0)
    tokens, waiting = tokens[chosen], waiting[chosen]
    keys, gates = k[tokens], gate[tokens]
    row, member = np.nonzero(waiting)
    slots = slot_idx[owner[chosen[row]]]
    keys[row, member] = tail[slots, 0, member]
    gates[row, member] = tail[slots, 1, member]
    pooled[chosen] = _pool(keys, gates, ape)
    _stash(tail, k, gate, slot_idx, indices.newest(np, *tables))
    return pooled, ids


def _seed_tail(
    tail: Array,
    k: Array,
    gate: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    slot_idx: Array,
    *,
    kpool: int,
) -> tuple[None, None]:
    tables = (input_row_offsets, cache_lengths, len(k), kpool)
    _stash(tail, k, gate, slot_idx, indices.unfinished(np, *tables))
    return None, None


def _stash(
    tail: Array, k: Array, gate: Array, slot_idx: Array, stash: indices.Stash
) -> None:
    row, column = np.nonzero(stash.keeps)
    tokens, entries = stash.tokens[row, column], stash.entries[row, column]
    tail[slot_idx[row], 0, entries] = k[tokens]
    tail[slot_idx[row], 1, entries] = gate[tokens]


def _expand_topk(
    pool_ids: Array, input_row_offsets: Array, cache_lengths: Array, *, kpool: int
) -> tuple[None, Array]:
    selection = indices.select(np, pool_ids, input_row_offsets, cache_lengths, kpool)
    packed = pool_ids
    if not selection.valid.all():
        packed = np.zeros_like(pool_ids)
        row, column = np.nonzero(selection.valid)
        packed[row, selection.rank[row, column]] = pool_ids[row, column]
    return None, indices.expand(np, packed, selection, kpool)


_FUNCTIONS: dict[str, Callable[..., tuple[Array | None, Array | None]]] = {
    cases.TAIL_UPDATE: _tail_update,
    cases.COMPRESS: _compress,
    cases.RAGGED_UPDATE: _ragged_update,
    cases.SEED_TAIL: _seed_tail,
    cases.EXPAND_TOPK: _expand_topk,
}
