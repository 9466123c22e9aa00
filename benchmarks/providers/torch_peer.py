"""The ops in PyTorch, eager and compiled.

torch.compile copies a buffer that it sees through a view, so the ring is passed flat,
`[slots * 2 * kpool, head_dim]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .. import cases
from ..cases import HEAD_DIM
from ..operands import Array, Outcome, Problem
from . import indices
from .base import Prepared
from .torch_decode import decode_step, put, softmax

Tensor = torch.Tensor


def prepare_eager(problem: Problem) -> Prepared:
    """Copies the operands.

    Args:
        problem: The case.

    Returns:
        Its step.
    """
    return _prepare(problem, compiled=False)


def prepare_compiled(problem: Problem) -> Prepared:
    """Copies the operands; the first step compiles.

    Args:
        problem: The case.

    Returns:
        Its step.
    """
    return _prepare(problem, compiled=True)


def _prepare(problem: Problem, compiled: bool) -> Prepared:
    torch.set_grad_enabled(False)
    case = problem.case
    given = {name: _tensor(array) for name, array in problem.operands.items()}
    ring_shape = problem.operands["tail"].shape if "tail" in given else ()
    if "tail" in given:
        given["flat"] = given.pop("tail").view(-1, HEAD_DIM)

    if case.op == cases.TAIL_UPDATE:
        step = decode_step(case.kpool, given, compiled)
    else:
        function = functools.partial(_FUNCTIONS[case.op], kpool=case.kpool)
        if compiled:
            torch._dynamo.reset()
            function = torch.compile(function, dynamic=False)
        step = functools.partial(function, **given)

    def read(outputs: tuple[Tensor | None, Tensor | None]) -> Outcome:
        pooled, ints = outputs
        return Outcome(
            None if pooled is None else pooled.float().numpy(),
            None if ints is None else ints.numpy(),
            _storage(given["flat"].view(ring_shape)) if ring_shape else None,
        )

    return Prepared(step, read)


def _tensor(array: Array) -> Tensor:
    if array.dtype == np.uint16:
        return torch.from_numpy(array.copy()).view(torch.bfloat16)
    if array.dtype.kind in "iu":
        return torch.from_numpy(array.astype(np.int64))
    return torch.from_numpy(array.copy())


def _storage(tensor: Tensor) -> Array:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy()
    return tensor.numpy()


def _compress(
    k: Tensor,
    gate: Tensor,
    ape: Tensor,
    input_row_offsets: Tensor,
    pool_row_offsets: Tensor,
    cache_lengths: Tensor,
    *,
    kpool: int,
) -> tuple[Tensor, None]:
    shape = (-1, kpool, HEAD_DIM)
    return softmax(k.view(shape), gate.view(shape), ape), None


def _ragged_update(
    flat: Tensor,
    k: Tensor,
    gate: Tensor,
    ape: Tensor,
    input_row_offsets: Tensor,
    cache_lengths: Tensor,
    slot_idx: Tensor,
    *,
    kpool: int,
) -> tuple[Tensor, Tensor]:
    tables = (input_row_offsets, cache_lengths, k.shape[0], kpool)
    pools = indices.ragged_pools(torch, *tables)
    held = slot_idx[pools.owner][:, None] * (2 * kpool) + torch.arange(kpool)
    keys, gates = k[pools.tokens], gate[pools.tokens]
    if torch.compiler.is_compiling():
        waiting = pools.waiting[:, :, None]
        keys = torch.where(waiting, flat[held], keys)
        gates = torch.where(waiting, flat[held + kpool], gates)
    else:
        keys[pools.waiting] = flat[held[pools.waiting]]
        gates[pools.waiting] = flat[held[pools.waiting] + kpool]
    pooled = softmax(keys, gates, ape)
    pooled = torch.where(pools.ids[:, None] >= 0, pooled, 0)
    _stash(flat, k, gate, slot_idx, indices.newest(torch, *tables), kpool)
    return pooled, pools.ids


def _seed_tail(
    flat: Tensor,
    k: Tensor,
    gate: Tensor,
    input_row_offsets: Tensor,
    cache_lengths: Tensor,
    slot_idx: Tensor,
    *,
    kpool: int,
) -> tuple[None, None]:
    tables = (input_row_offsets, cache_lengths, k.shape[0], kpool)
    _stash(flat, k, gate, slot_idx, indices.unfinished(torch, *tables), kpool)
    return None, None


def _stash(
    flat: Tensor,
    k: Tensor,
    gate: Tensor,
    slot_idx: Tensor,
    stash: indices.Stash,
    kpool: int,
) -> None:
    spare = flat.shape[0] // (2 * kpool) - 1
    slots = torch.where(stash.keeps, slot_idx[:, None], spare)
    entries = (slots * (2 * kpool) + stash.entries).view(-1)
    tokens = stash.tokens.view(-1)
    put(flat, entries, k[tokens], gate[tokens], kpool)


def _expand_topk(
    pool_ids: Tensor, input_row_offsets: Tensor, cache_lengths: Tensor, *, kpool: int
) -> tuple[None, Tensor]:
    selection = indices.select(torch, pool_ids, input_row_offsets, cache_lengths, kpool)
    queries, pool_topk = pool_ids.shape
    packed = torch.zeros((queries, pool_topk + 1), dtype=pool_ids.dtype)
    packed = packed.scatter(1, selection.rank, pool_ids)[:, :pool_topk]
    return None, indices.expand(torch, packed, selection, kpool)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    cases.COMPRESS: _compress,
    cases.RAGGED_UPDATE: _ragged_update,
    cases.SEED_TAIL: _seed_tail,
    cases.EXPAND_TOPK: _expand_topk,
}
