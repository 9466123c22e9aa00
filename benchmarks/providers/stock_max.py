"""The ops out of MAX's own graph ops.

A ring is loaded whole, changed with scatter_nd and stored whole: MAX has no other way
to write rows of a buffer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from max.dtype import DType
from max.graph import BufferValue, Dim, DimLike, TensorValue, ops

from .. import cases
from ..cases import HEAD_DIM
from .max_ints import clip, constant, count, div, last, mod, to_int, where

NAME = "max ops"


def _pool(keys: TensorValue, gates: TensorValue, ape: TensorValue) -> TensorValue:
    """Pools `[rows, kpool, head_dim]` members into `[rows, head_dim]`.

    Member by member: MAX fuses a softmax written out, and its own needs transposes.
    """
    members = range(int(ape.shape[0]))
    logits = [ops.cast(gates[:, each], DType.float32) + ape[each] for each in members]
    largest = functools.reduce(ops.max, logits)
    weights = [ops.exp(logit - largest) for logit in logits]
    weighted = [
        weights[each] * ops.cast(keys[:, each], DType.float32) for each in members
    ]
    total = functools.reduce(ops.add, weights)
    return ops.cast(functools.reduce(ops.add, weighted) / total, keys.dtype)


def _put(
    ring: TensorValue,
    slots: TensorValue,
    entries: TensorValue,
    k: TensorValue,
    gate: TensorValue,
) -> TensorValue:
    """Writes `[tokens, head_dim]` at `[tokens]` slots and entries."""
    places = []
    for plane in (0, 1):
        planes = ops.broadcast_to(constant(plane, slots), slots.shape)
        places.append(ops.stack([slots, planes, entries], -1))
    return ops.scatter_nd(ring, ops.concat([k, gate]), ops.concat(places))


def _members(
    rows: TensorValue, tokens: TensorValue, held: TensorValue, waiting: TensorValue
) -> TensorValue:
    waiting = ops.broadcast_to(ops.unsqueeze(waiting, -1), held.shape)
    return ops.where(waiting, held, ops.gather(rows, tokens, axis=0))


def tail_update(
    tail: BufferValue,
    k: TensorValue,
    gate: TensorValue,
    ape: TensorValue,
    positions: TensorValue,
    slot_idx: TensorValue,
    *,
    kpool: int,
) -> Sequence[TensorValue]:
    """See `kpool_graph.tail_update`; no padding, `next_n` at most `kpool`."""
    batch, next_n = positions.shape[0], int(positions.shape[1])
    slots = to_int(slot_idx)
    ring = ops.buffer_load(tail)
    k, gate = (ops.reshape(part, (batch * next_n, HEAD_DIM)) for part in (k, gate))
    entries = ops.reshape(mod(positions, kpool), (batch * next_n,))
    spread = ops.broadcast_to(ops.unsqueeze(slots, 1), (batch, next_n))
    first = positions[:, 0]
    pool = div(first, kpool)
    closes = pool * kpool + kpool <= first + next_n
    ids = where(closes, pool, -1)
    written = _put(ring, ops.reshape(spread, (batch * next_n,)), entries, k, gate)
    if next_n == 1:
        held = ops.gather(written, slots, axis=0)
        keys, gates = held[:, 0], held[:, 1]
    else:
        held = ops.gather(ring, slots, axis=0)
        token = ops.unsqueeze(count(kpool, k), 0) - ops.unsqueeze(
            first - pool * kpool, 1
        )
        zero = constant(0, k)
        row = ops.unsqueeze(count(batch, k) * next_n, 1)
        tokens = row + clip(token, zero, constant(next_n - 1, k))
        keys = _members(k, tokens, held[:, 0], token < 0)
        gates = _members(gate, tokens, held[:, 1], token < 0)
    pooled = _zero_unless(closes, _pool(keys, gates, ape))
    ops.buffer_store(tail, written)
    return ops.unsqueeze(pooled, 1), ops.unsqueeze(ids, 1)


def _zero_unless(condition: TensorValue, pooled: TensorValue) -> TensorValue:
    zero = ops.constant(0, pooled.dtype, pooled.device)
    return ops.where(ops.unsqueeze(condition, 1), pooled, zero)


def compress(
    k: TensorValue,
    gate: TensorValue,
    ape: TensorValue,
    input_row_offsets: TensorValue,
    pool_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    *,
    kpool: int,
) -> Sequence[TensorValue]:
    """See `kpool_graph.compress`; whole pools from position 0 on."""
    pools = k.shape[0] // kpool
    k, gate = (
        ops.reshape(
            ops.rebind(part, (pools * kpool, HEAD_DIM)), (pools, kpool, HEAD_DIM)
        )
        for part in (k, gate)
    )
    return (_pool(k, gate, ape),)


def ragged_update(
    tail: BufferValue,
    k: TensorValue,
    gate: TensorValue,
    ape: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    slot_idx: TensorValue,
    *,
    kpool: int,
) -> Sequence[TensorValue]:
    """See `kpool_graph.ragged_update`."""
    total, batch, spare = k.shape[0], cache_lengths.shape[0], kpool - 1
    start, slots = to_int(cache_lengths), to_int(slot_idx)
    first, added = _lengths(input_row_offsets, batch)
    begin = div(first + count(batch, k) * spare, kpool)
    rows = (total + batch * spare) // kpool
    owner = _owners(begin, rows)
    row = count(rows, k)

    def of_owner(table: TensorValue) -> TensorValue:
        return ops.gather(table, owner, axis=0)

    pool = of_owner(div(start, kpool) - begin) + row
    closes = pool * kpool + kpool <= of_owner(start + added)
    position = ops.unsqueeze(pool * kpool, 1) + ops.unsqueeze(count(kpool, k), 0)
    token = position + ops.unsqueeze(of_owner(first - start), 1)
    tokens = clip(token, constant(0, k), last(total, k))
    waiting = position < ops.unsqueeze(of_owner(start), 1)
    ring = ops.buffer_load(tail)
    held = ops.gather(ring, of_owner(slots), axis=0)
    keys = _members(k, tokens, held[:, 0], waiting)
    gates = _members(gate, tokens, held[:, 1], waiting)
    pooled = _zero_unless(closes, _pool(keys, gates, ape))

    end = start + added
    newest = ops.unsqueeze(end - kpool, 1) + ops.unsqueeze(count(kpool, k), 0)
    keeps = newest >= ops.unsqueeze(start, 1)
    _stash(tail, ring, k, gate, newest, keeps, first - start, slots, kpool)
    return pooled, where(closes, pool, -1)


def _lengths(offsets: TensorValue, batch: Dim) -> tuple[TensorValue, TensorValue]:
    offsets = to_int(offsets)
    first = ops.rebind(offsets[:-1], (batch,))
    return first, ops.rebind(offsets[1:], (batch,)) - first


def _owners(begin: TensorValue, rows: DimLike) -> TensorValue:
    """Finds the request of each row: a mark where each begins, summed up."""
    marks = ops.broadcast_to(constant(0, begin), (rows,))
    one = ops.broadcast_to(constant(1, begin), begin.shape)
    marks = ops.scatter_nd_add(marks, one, ops.unsqueeze(begin, 1))
    return ops.cumsum(marks, axis=0) - 1


def _stash(
    tail: BufferValue,
    ring: TensorValue,
    k: TensorValue,
    gate: TensorValue,
    position: TensorValue,
    keeps: TensorValue,
    row_of_zero: TensorValue,
    slots: TensorValue,
    kpool: int,
) -> None:
    """Writes the tokens at `[batch, kpool]` positions; dropped ones go to the spare
    slot, the last."""
    size = position.shape[0] * kpool
    token = position + ops.unsqueeze(row_of_zero, 1)
    tokens = clip(token, constant(0, k), last(k.shape[0], k))
    spare = last(ring.shape[0], k)
    owned = ops.broadcast_to(ops.unsqueeze(slots, 1), position.shape)
    tokens = ops.reshape(tokens, (size,))
    ring = _put(
        ring,
        ops.reshape(ops.where(keeps, owned, spare), (size,)),
        ops.reshape(mod(position, kpool), (size,)),
        ops.gather(k, tokens, axis=0),
        ops.gather(gate, tokens, axis=0),
    )
    ops.buffer_store(tail, ring)


def seed_tail(
    tail: BufferValue,
    k: TensorValue,
    gate: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    slot_idx: TensorValue,
    *,
    kpool: int,
) -> Sequence[TensorValue]:
    """See `kpool_graph.seed_tail`."""
    start, slots = to_int(cache_lengths), to_int(slot_idx)
    first, added = _lengths(input_row_offsets, start.shape[0])
    end = start + added
    open_pool = ops.unsqueeze(div(end, kpool) * kpool, 1)
    position = open_pool + ops.unsqueeze(count(kpool, k), 0)
    keeps = ops.logical_and(
        position >= ops.unsqueeze(start, 1), position < ops.unsqueeze(end, 1)
    )
    ring = ops.buffer_load(tail)
    _stash(tail, ring, k, gate, position, keeps, first - start, slots, kpool)
    return ()


def expand_topk(
    pool_ids: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    *,
    kpool: int,
) -> Sequence[TensorValue]:
    """See `kpool_graph.expand_topk`."""
    queries, pool_topk = pool_ids.shape[0], int(pool_ids.shape[1])
    first, _ = _lengths(input_row_offsets, cache_lengths.shape[0])
    owner = _owners(first, queries)
    before = ops.gather(to_int(cache_lengths) - first, owner, axis=0)
    visible = ops.unsqueeze(before + count(queries, pool_ids) + 1, 1)
    valid = ops.logical_and(pool_ids >= 0, pool_ids < div(visible, kpool))
    ranks = ops.cumsum(to_int(valid), axis=1)
    columns = where(valid, ranks - 1, pool_topk)
    row = ops.broadcast_to(
        ops.unsqueeze(count(queries, pool_ids), 1), (queries, pool_topk)
    )
    packed = ops.broadcast_to(constant(0, pool_ids), (queries, pool_topk + 1))
    packed = ops.scatter_nd(packed, pool_ids, ops.stack([row, columns], -1))

    begin = ops.unsqueeze(packed[:, :pool_topk] * kpool, 2)
    members = begin + count(kpool, pool_ids)
    members = ops.reshape(members, (queries, pool_topk * kpool))
    after = ops.broadcast_to(constant(0, pool_ids), (queries, kpool - 1))
    members = ops.concat([members, after], axis=1)
    selected = ops.sum(to_int(valid), axis=1) * kpool
    column = ops.unsqueeze(count(pool_topk * kpool + kpool - 1, pool_ids), 0)
    newest = column - selected + div(visible, kpool) * kpool
    rest = where(newest < visible, newest, -1)
    return (ops.where(column < selected, members, rest),)


BUILDERS: dict[str, Callable[..., Sequence[TensorValue]]] = {
    cases.TAIL_UPDATE: tail_update,
    cases.COMPRESS: compress,
    cases.RAGGED_UPDATE: ragged_update,
    cases.SEED_TAIL: seed_tail,
    cases.EXPAND_TOPK: expand_topk,
}
