"""The ops in JAX, jitted, with a donated ring."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .. import cases
from ..cases import HEAD_DIM
from ..operands import Array, Outcome, Problem
from . import indices
from .base import Prepared

NAME = "jax"

JaxArray = Any


def prepare(problem: Problem) -> Prepared:
    """Copies the operands; the first step compiles.

    Args:
        problem: The case.

    Returns:
        Its step.
    """
    given = {name: _device(array) for name, array in problem.operands.items()}
    function = functools.partial(_FUNCTIONS[problem.case.op], kpool=problem.case.kpool)
    ring = "tail" in given
    compiled = jax.jit(function, donate_argnums=(0,) if ring else ())

    def step() -> tuple[JaxArray | None, JaxArray | None]:
        if ring:
            # A donated ring is gone: the next step owns the one that came back.
            given["tail"], *outputs = compiled(*given.values())
            jax.block_until_ready((given["tail"], *outputs))
        else:
            outputs = jax.block_until_ready(compiled(*given.values()))
        return outputs[0], outputs[1]

    def read(outputs: tuple[JaxArray | None, JaxArray | None]) -> Outcome:
        pooled, ints = outputs
        return Outcome(
            None if pooled is None else np.asarray(pooled, np.float32),
            None if ints is None else np.asarray(ints),
            _storage(given["tail"]) if ring else None,
        )

    return Prepared(step, read)


def _device(array: Array) -> JaxArray:
    if array.dtype == np.uint16:
        return jnp.array(array.view(ml_dtypes.bfloat16))
    return jnp.array(array.astype(np.int32) if array.dtype == np.uint32 else array)


def _storage(array: JaxArray) -> Array:
    host = np.asarray(array)
    return host.view(np.uint16) if host.dtype == ml_dtypes.bfloat16 else host


def _pool(keys: JaxArray, gates: JaxArray, ape: JaxArray) -> JaxArray:
    """Pools `[rows, kpool, head_dim]` members into `[rows, head_dim]`."""
    weights = jax.nn.softmax(gates.astype(jnp.float32) + ape, axis=1)
    pooled = (weights * keys.astype(jnp.float32)).sum(1)
    return pooled.astype(keys.dtype)


def _put(
    tail: JaxArray, slots: JaxArray, entries: JaxArray, k: JaxArray, gate: JaxArray
) -> JaxArray:
    # A slot past the ring is how a write is dropped.
    tail = tail.at[slots, 0, entries].set(k, mode="drop")
    return tail.at[slots, 1, entries].set(gate, mode="drop")


def _tail_update(
    tail: JaxArray,
    k: JaxArray,
    gate: JaxArray,
    ape: JaxArray,
    positions: JaxArray,
    slot_idx: JaxArray,
    *,
    kpool: int,
) -> tuple[JaxArray, JaxArray, JaxArray]:
    batch, next_n, _ = k.shape
    slots, entries = slot_idx[:, None], positions % kpool
    if next_n == 1:
        tail = _put(tail, slots, entries, k, gate)
        closes = entries[:, 0] == kpool - 1
        ids = jnp.where(closes, positions[:, 0] // kpool, -1)
    else:
        pools = indices.decode_pools(jnp, positions, kpool)
        ids = pools.ids

    def close(ring: JaxArray) -> JaxArray:
        held = ring[slot_idx]
        keys, gates = held[:, 0], held[:, 1]
        if next_n > 1:
            waiting = pools.waiting[:, :, None]
            keys = jnp.where(waiting, keys, k.reshape(-1, HEAD_DIM)[pools.tokens])
            gates = jnp.where(waiting, gates, gate.reshape(-1, HEAD_DIM)[pools.tokens])
        return jnp.where(ids[:, None] >= 0, _pool(keys, gates, ape), 0)

    def nothing(ring: JaxArray) -> JaxArray:
        return jnp.zeros((batch, HEAD_DIM), k.dtype)

    pooled = jax.lax.cond((ids >= 0).any(), close, nothing, tail)
    if next_n > 1:
        tail = _put(tail, slots, entries, k, gate)
    return tail, pooled[:, None], ids[:, None]


def _compress(
    k: JaxArray,
    gate: JaxArray,
    ape: JaxArray,
    input_row_offsets: JaxArray,
    pool_row_offsets: JaxArray,
    cache_lengths: JaxArray,
    *,
    kpool: int,
) -> tuple[JaxArray, None]:
    shape = (-1, kpool, HEAD_DIM)
    return _pool(k.reshape(shape), gate.reshape(shape), ape), None


def _ragged_update(
    tail: JaxArray,
    k: JaxArray,
    gate: JaxArray,
    ape: JaxArray,
    input_row_offsets: JaxArray,
    cache_lengths: JaxArray,
    slot_idx: JaxArray,
    *,
    kpool: int,
) -> tuple[JaxArray, JaxArray, JaxArray]:
    tables = (input_row_offsets, cache_lengths, k.shape[0], kpool)
    pools = indices.ragged_pools(jnp, *tables)
    held = tail[slot_idx[pools.owner]]
    waiting = pools.waiting[:, :, None]
    keys = jnp.where(waiting, held[:, 0], k[pools.tokens])
    gates = jnp.where(waiting, held[:, 1], gate[pools.tokens])
    pooled = jnp.where(pools.ids[:, None] >= 0, _pool(keys, gates, ape), 0)
    tail = _stash(tail, k, gate, slot_idx, indices.newest(jnp, *tables))
    return tail, pooled, pools.ids


def _seed_tail(
    tail: JaxArray,
    k: JaxArray,
    gate: JaxArray,
    input_row_offsets: JaxArray,
    cache_lengths: JaxArray,
    slot_idx: JaxArray,
    *,
    kpool: int,
) -> tuple[JaxArray, None, None]:
    tables = (input_row_offsets, cache_lengths, k.shape[0], kpool)
    stash = indices.unfinished(jnp, *tables)
    return _stash(tail, k, gate, slot_idx, stash), None, None


def _stash(
    tail: JaxArray,
    k: JaxArray,
    gate: JaxArray,
    slot_idx: JaxArray,
    stash: indices.Stash,
) -> JaxArray:
    slots = jnp.where(stash.keeps, slot_idx[:, None], tail.shape[0])
    return _put(tail, slots, stash.entries, k[stash.tokens], gate[stash.tokens])


def _expand_topk(
    pool_ids: JaxArray,
    input_row_offsets: JaxArray,
    cache_lengths: JaxArray,
    *,
    kpool: int,
) -> tuple[None, JaxArray]:
    selection = indices.select(jnp, pool_ids, input_row_offsets, cache_lengths, kpool)
    row = jnp.arange(pool_ids.shape[0])[:, None]
    packed = jnp.zeros_like(pool_ids).at[row, selection.rank].set(pool_ids, mode="drop")
    return None, indices.expand(jnp, packed, selection, kpool)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    cases.TAIL_UPDATE: _tail_update,
    cases.COMPRESS: _compress,
    cases.RAGGED_UPDATE: _ragged_update,
    cases.SEED_TAIL: _seed_tail,
    cases.EXPAND_TOPK: _expand_topk,
}
