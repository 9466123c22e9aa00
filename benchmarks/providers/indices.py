"""Which tokens an op reads and writes, in array operations of any library.

`xp` is numpy, jax.numpy or torch: only functions that the three spell alike are used,
and shapes depend on shapes alone, so that jax.jit and torch.compile accept them. Row
tables are signed integer arrays; the ring is `[slots, 2, kpool, head_dim]`, and a
token's entry is `position % kpool`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any


class Pools(NamedTuple):
    """The pools that a step may close, `[rows]` or `[rows, kpool]` each.

    Attributes:
        owner: Request of each.
        ids: Pool id, -1 where nothing closes.
        tokens: Row of each member among the step's tokens, clipped into them.
        waiting: True for members that wait in the ring instead, at their own index:
            the ring is as long as a pool.
    """

    owner: Array
    ids: Array
    tokens: Array
    waiting: Array


def decode_pools(xp: Any, positions: Array, kpool: int) -> Pools:
    """Finds the pool that each row of a wide decode step ends.

    Args:
        xp: The library.
        positions: `[batch, next_n]`, no padding, `next_n` at most `kpool`.
        kpool: Tokens per pool.

    Returns:
        One candidate a row.
    """
    batch, next_n = positions.shape
    first = positions[:, 0]
    waits = first % kpool
    closes = kpool - 1 - waits < next_n
    token = xp.arange(kpool)[None, :] - waits[:, None]
    row = xp.arange(batch)
    return Pools(
        row,
        xp.where(closes, first // kpool, -1),
        row[:, None] * next_n + xp.clip(token, 0, next_n - 1),
        token < 0,
    )


def ragged_pools(xp: Any, first: Array, cached: Array, total: int, kpool: int) -> Pools:
    """Finds the pool of each output row of `ragged_update`.

    Args:
        xp: The library.
        first: `[batch + 1]`, first token row of each request.
        cached: `[batch]`, tokens before this step.
        total: Tokens of the step.
        kpool: Tokens per pool.

    Returns:
        One candidate an output row.
    """
    batch, spare = cached.shape[0], kpool - 1
    begin = (first[:-1] + xp.arange(batch) * spare) // kpool
    row = xp.arange((total + batch * spare) // kpool)
    owner = xp.searchsorted(begin, row, side="right") - 1
    start = cached[owner]
    pool = start // kpool + row - begin[owner]
    end = start + first[1:][owner] - first[:-1][owner]
    position = pool[:, None] * kpool + xp.arange(kpool)[None, :]
    token = first[:-1][owner][:, None] + position - start[:, None]
    return Pools(
        owner,
        xp.where((pool + 1) * kpool <= end, pool, -1),
        xp.clip(token, 0, total - 1),
        position < start[:, None],
    )


class Stash(NamedTuple):
    """The tokens that a ragged step leaves in the ring, `[batch, kpool]` each.

    Attributes:
        tokens: Row among the step's tokens, clipped into them.
        entries: Ring entry of each.
        keeps: False where there is no such token.
    """

    tokens: Array
    entries: Array
    keeps: Array


def newest(xp: Any, first: Array, cached: Array, total: int, kpool: int) -> Stash:
    """Finds what `ragged_update` stashes: each request's newest `kpool` tokens.

    Args:
        xp: The library.
        first: `[batch + 1]`, first token row of each request.
        cached: `[batch]`, tokens before this step.
        total: Tokens of the step.
        kpool: Tokens per pool, and entries of a slot.

    Returns:
        The tokens.
    """
    end = cached + first[1:] - first[:-1]
    position = end[:, None] - kpool + xp.arange(kpool)[None, :]
    return _stash(
        xp, position, position >= cached[:, None], first, cached, total, kpool
    )


def unfinished(xp: Any, first: Array, cached: Array, total: int, kpool: int) -> Stash:
    """Finds what `seed_tail` stashes: the tokens of each request's unfinished pool.

    Args:
        xp: The library.
        first: `[batch + 1]`, first token row of each request.
        cached: `[batch]`, tokens before this step.
        total: Tokens of the step.
        kpool: Tokens per pool, and entries of a slot.

    Returns:
        The tokens.
    """
    end = cached + first[1:] - first[:-1]
    position = (end // kpool * kpool)[:, None] + xp.arange(kpool)[None, :]
    keeps = (position >= cached[:, None]) & (position < end[:, None])
    return _stash(xp, position, keeps, first, cached, total, kpool)


def _stash(
    xp: Any,
    position: Array,
    keeps: Array,
    first: Array,
    cached: Array,
    total: int,
    kpool: int,
) -> Stash:
    token = first[:-1][:, None] + position - cached[:, None]
    return Stash(xp.clip(token, 0, total - 1), position % kpool, keeps)


class Selection(NamedTuple):
    """What `expand_topk` needs to know of each query.

    Attributes:
        valid: `[queries, pool_topk]`, pools that are complete for the query.
        rank: `[queries, pool_topk]`, place of each valid pool among them; `pool_topk`
            for the others.
        count: `[queries, 1]`, valid pools.
        visible: `[queries, 1]`, tokens the query sees.
    """

    valid: Array
    rank: Array
    count: Array
    visible: Array


def select(
    xp: Any, pool_ids: Array, first: Array, cached: Array, kpool: int
) -> Selection:
    """Ranks the pools that count.

    Args:
        xp: The library.
        pool_ids: `[queries, pool_topk]`.
        first: `[batch + 1]`, first query row of each request.
        cached: `[batch]`, tokens before this step.
        kpool: Tokens per pool.

    Returns:
        The selection.
    """
    queries, pool_topk = pool_ids.shape
    row = xp.arange(queries)
    owner = xp.searchsorted(first, row, side="right") - 1
    visible = (cached[owner] + row - first[owner] + 1)[:, None]
    valid = (pool_ids >= 0) & (pool_ids < visible // kpool)
    ranks = xp.cumsum(valid, 1)
    return Selection(
        valid, xp.where(valid, ranks - 1, pool_topk), ranks[:, -1:], visible
    )


def expand(xp: Any, packed: Array, selection: Selection, kpool: int) -> Array:
    """Expands packed pools to positions, with the query's newest ones after them.

    Args:
        xp: The library.
        packed: `[queries, pool_topk]` pool ids, the valid ones first.
        selection: What `select` found.
        kpool: Tokens per pool.

    Returns:
        `[queries, pool_topk * kpool + kpool - 1]` positions, then -1.
    """
    queries, pool_topk = packed.shape
    members = packed[:, :, None] * kpool + xp.arange(kpool)[None, None, :]
    count = selection.count * kpool
    column = xp.arange(pool_topk * kpool + kpool - 1)[None, :]
    newest = column - count + selection.visible // kpool * kpool
    rest = xp.where(newest < selection.visible, newest, -1)
    selected = xp.where(
        column[:, : pool_topk * kpool] < count,
        members.reshape(queries, pool_topk * kpool),
        rest[:, : pool_topk * kpool],
    )
    return xp.concatenate([selected, rest[:, pool_topk * kpool :]], 1)
