"""A decode step in PyTorch: eager on gathered rows, compiled member by member."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ..cases import HEAD_DIM
from . import indices

Tensor = torch.Tensor


def softmax(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """Pools members.

    Args:
        keys: `[rows, kpool, head_dim]`.
        gates: `[rows, kpool, head_dim]` gate scores.
        ape: `[kpool, head_dim]` float32.

    Returns:
        `[rows, head_dim]`, dtype of the keys.
    """
    weights = torch.softmax(gates.float() + ape, 1)
    return (weights * keys.float()).sum(1).to(keys.dtype)


def decode_step(
    kpool: int, given: dict[str, Tensor], compiled: bool
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Makes the step of `tail_update`, for `next_n` up to `kpool`.

    Whether anything closes is found on the host, step by step, as one would: three
    steps of four have no pool to end.

    Args:
        kpool: Tokens per pool.
        given: The operands, the ring as `flat`.
        compiled: Whether to go through torch.compile.

    Returns:
        The step.
    """
    stash = functools.partial(_stash, kpool=kpool)
    close = functools.partial(_close_members if compiled else _close_rows, kpool=kpool)
    if compiled:
        torch._dynamo.reset()
        stash = torch.compile(stash, dynamic=False)
        close = torch.compile(close, dynamic=False)
    operands = dict(given)
    ape, positions = operands.pop("ape"), operands["positions"]

    def step() -> tuple[Tensor, Tensor]:
        if bool((_closed(positions, kpool) >= 0).any()):
            return close(ape=ape, **operands)
        return stash(**operands)

    return step


def _entries(positions: Tensor, slot_idx: Tensor, kpool: int) -> Tensor:
    return (slot_idx[:, None] * (2 * kpool) + positions % kpool).view(-1)


def put(flat: Tensor, entries: Tensor, k: Tensor, gate: Tensor, kpool: int) -> None:
    """Writes tokens into the flat ring.

    Args:
        flat: `[slots * 2 * kpool, head_dim]`, updated in place.
        entries: `[tokens]`, where each token's key goes.
        k: `[..., head_dim]` keys.
        gate: `[..., head_dim]` gate scores.
        kpool: Tokens per pool, and entries of a slot.
    """
    flat[entries] = k.reshape(-1, HEAD_DIM)
    flat[entries + kpool] = gate.reshape(-1, HEAD_DIM)


def _stash(
    flat: Tensor,
    k: Tensor,
    gate: Tensor,
    positions: Tensor,
    slot_idx: Tensor,
    *,
    kpool: int,
) -> tuple[Tensor, Tensor]:
    put(flat, _entries(positions, slot_idx, kpool), k, gate, kpool)
    batch = positions.shape[0]
    nothing = torch.full((batch, 1), -1)
    return torch.zeros((batch, 1, HEAD_DIM), dtype=k.dtype), nothing


def _closed(positions: Tensor, kpool: int) -> Tensor:
    first, last = positions[:, :1], positions[:, -1:]
    pool = first // kpool
    return torch.where((pool + 1) * kpool <= last + 1, pool, -1)


def _close_rows(
    flat: Tensor,
    k: Tensor,
    gate: Tensor,
    ape: Tensor,
    positions: Tensor,
    slot_idx: Tensor,
    *,
    kpool: int,
) -> tuple[Tensor, Tensor]:
    batch, next_n, _ = k.shape
    entries = _entries(positions, slot_idx, kpool)
    ids = _closed(positions, kpool)
    chosen = (ids[:, 0] >= 0).nonzero()[:, 0]
    rows = flat.view(-1, 2, kpool, HEAD_DIM)
    if next_n == 1:
        put(flat, entries, k, gate, kpool)
        slots = rows.index_select(0, slot_idx[chosen])
        keys, gates = slots[:, 0], slots[:, 1]
    else:
        slots = rows.index_select(0, slot_idx[chosen])
        pools = indices.decode_pools(torch, positions, kpool)
        tokens, waiting = pools.tokens[chosen], pools.waiting[chosen][:, :, None]
        keys = torch.where(waiting, slots[:, 0], k.view(-1, HEAD_DIM)[tokens])
        gates = torch.where(waiting, slots[:, 1], gate.view(-1, HEAD_DIM)[tokens])
        put(flat, entries, k, gate, kpool)
    pooled = softmax(keys, gates, ape)
    if len(chosen) == batch:
        return pooled[:, None], ids
    spread = torch.zeros((batch, 1, HEAD_DIM), dtype=k.dtype)
    spread[chosen, 0] = pooled
    return spread, ids


def _close_members(
    flat: Tensor,
    k: Tensor,
    gate: Tensor,
    ape: Tensor,
    positions: Tensor,
    slot_idx: Tensor,
    *,
    kpool: int,
) -> tuple[Tensor, Tensor]:
    """Member by member: the compiler fuses gathers and a softmax written out."""
    next_n = k.shape[1]
    entries, base = _entries(positions, slot_idx, kpool), slot_idx * (2 * kpool)
    ids = _closed(positions, kpool)
    if next_n == 1:
        put(flat, entries, k, gate, kpool)
        keys = [flat[base + member].float() for member in range(kpool)]
        gates = [flat[base + kpool + member].float() for member in range(kpool)]
    else:
        pools = indices.decode_pools(torch, positions, kpool)
        k_rows, gate_rows = k.view(-1, HEAD_DIM), gate.view(-1, HEAD_DIM)
        keys, gates = [], []
        for member in range(kpool):
            token, waits = pools.tokens[:, member], pools.waiting[:, member, None]
            held = flat[base + member], flat[base + kpool + member]
            keys.append(torch.where(waits, held[0], k_rows[token]).float())
            gates.append(torch.where(waits, held[1], gate_rows[token]).float())
    logits = [gates[member] + ape[member] for member in range(kpool)]
    largest = functools.reduce(torch.maximum, logits)
    weights = [torch.exp(logit - largest) for logit in logits]
    total = functools.reduce(torch.add, weights)
    weighted = [weight * key for weight, key in zip(weights, keys, strict=True)]
    pooled = (functools.reduce(torch.add, weighted) / total).to(k.dtype)
    pooled = torch.where(ids >= 0, pooled, 0)[:, None]
    if next_n > 1:
        put(flat, entries, k, gate, kpool)
    return pooled, ids
