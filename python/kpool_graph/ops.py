"""Graph builders of the ring's ops: each validates, loads the kernels, emits one."""

from __future__ import annotations

from collections.abc import Sequence

from max.dtype import DType
from max.graph import BufferValue, Dim, TensorType, TensorValue, ops

from ._library import load_kernels
from ._validate import Problems


def _require_ragged(
    op: str,
    tail: BufferValue,
    k: TensorValue,
    gate: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    slot_idx: TensorValue,
    kpool: int,
    *ape: TensorValue,
) -> None:
    problems = Problems(op)
    problems.require_ring(tail, kpool)
    rows = ("total_tokens", "head_dim")
    problems.require_tensor("k", k, rows)
    problems.require_tensor("gate", gate, rows)
    for embedding in ape:
        problems.require_tensor("ape", embedding, ("kpool", "head_dim"), DType.float32)
    problems.require_offsets("input_row_offsets", input_row_offsets, cache_lengths)
    problems.require_tensor("cache_lengths", cache_lengths, ("batch",), DType.uint32)
    problems.require_tensor("slot_idx", slot_idx, ("batch",), DType.uint32)
    problems.raise_if_any()


def seed_tail(
    tail: BufferValue,
    k: TensorValue,
    gate: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    slot_idx: TensorValue,
    *,
    kpool: int,
) -> None:
    """Leaves each prefill chunk's trailing tokens in the ring.

    Request `r` brings `n = input_row_offsets[r+1] - input_row_offsets[r]` tokens
    at positions `[cache_lengths[r], cache_lengths[r] + n)`. Those from
    `(cache_lengths[r] + n) // kpool * kpool` on belong to a pool that is not
    complete yet; they are stashed, and nothing else is. A prefill cut into
    chunks ends with the ring that one prefill leaves.

    Call it after every reader of the ring in the same step: it overwrites
    entries. A step whose tokens may be rejected belongs to `tail_update`.

    Args:
        tail: `[max_slots, 2, ring_len, head_dim]`, keys at 0 and gate scores at
            1 of axis 1; updated in place. `ring_len` is at least `kpool`.
        k: `[total_tokens, head_dim]` keys, dtype of `tail`.
        gate: `[total_tokens, head_dim]` gate scores, dtype of `tail`.
        input_row_offsets: `[batch + 1]` uint32, first token row of each request.
        cache_lengths: `[batch]` uint32, tokens cached before this call.
        slot_idx: `[batch]` uint32, ring slot of each request.
        kpool: Tokens per pool.

    Raises:
        OperandError: If an operand's kind, dtype, rank, size or device is wrong.
        KernelBuildError: If the kernels cannot be compiled.

    When the graph runs on a CPU, offsets that decrease or pass the token count,
    a slot outside the ring, or one slot for two requests with tokens are errors
    raised before anything is written. On a GPU such a request is skipped.
    """
    tables = (input_row_offsets, cache_lengths, slot_idx)
    _require_ragged("seed_tail", tail, k, gate, *tables, kpool)
    load_kernels()
    ops.inplace_custom(
        "mo.mla.kpool.seed_tail",
        device=tail.device,
        values=[tail, k, gate, *tables],
        parameters={"head_dim": int(tail.shape[3]), "kpool": kpool},
    )


def tail_update(
    tail: BufferValue,
    k: TensorValue,
    gate: TensorValue,
    ape: TensorValue,
    positions: TensorValue,
    slot_idx: TensorValue,
    *,
    kpool: int,
) -> tuple[TensorValue, TensorValue]:
    """Stashes each decoded token and closes the pools that this completes.

    Row `r` appends the tokens whose `positions[r]` are not negative; they must be
    consecutive. Each is stashed at `position % ring_len` of slot `slot_idx[r]`.
    Each position with `position % kpool == kpool - 1` closes pool
    `position // kpool`: per channel, a softmax over `gate + ape` of the pool's
    `kpool` members weighs their keys (float32 arithmetic, rounded once to the
    ring's dtype).

    After a step whose tokens may be rejected, go on at the first rejected
    position. That is exact with `ring_len >= kpool - 1 + next_n`; with
    `ring_len == kpool` a rejected token may have overwritten a live member.

    Args:
        tail: `[max_slots, 2, ring_len, head_dim]`, keys at 0 and gate scores at
            1 of axis 1; updated in place. `ring_len` is at least `kpool`.
        k: `[batch, next_n, head_dim]` keys, dtype of `tail`.
        gate: `[batch, next_n, head_dim]` gate scores, dtype of `tail`.
        ape: `[kpool, head_dim]` float32, added to the gate scores by member.
        positions: `[batch, next_n]` int32, absolute position of each token;
            negative marks padding, which may stand anywhere.
        slot_idx: `[batch]` uint32, ring slot of each row. Not read on a row that
            is padding only.
        kpool: Tokens per pool.

    Returns:
        pooled: `[batch, ceil(next_n / kpool), head_dim]`, dtype of `tail`; the
            keys of the pools each row closed, in order, zero in unused columns.
        closed_pool: `[batch, ceil(next_n / kpool)]` int32; their pool ids, -1 in
            unused columns.

    Raises:
        OperandError: If an operand's kind, dtype, rank, size or device is wrong.
        KernelBuildError: If the kernels cannot be compiled.

    When the graph runs on a CPU, positions that are not consecutive, a slot
    outside the ring, or one slot for two rows with tokens are errors raised
    before anything is written. On a GPU such a row is skipped and closes nothing.
    """
    problems = Problems("tail_update")
    problems.require_ring(tail, kpool)
    tokens = ("batch", "next_n", "head_dim")
    problems.require_tensor("k", k, tokens)
    problems.require_tensor("gate", gate, tokens)
    problems.require_tensor("ape", ape, ("kpool", "head_dim"), DType.float32)
    problems.require_tensor("positions", positions, ("batch", "next_n"), DType.int32)
    problems.require_tensor("slot_idx", slot_idx, ("batch",), DType.uint32)
    next_n = problems.require_static("next_n", 1)
    problems.raise_if_any()

    load_kernels()
    columns = -(-next_n // kpool)
    batch, head_dim = k.shape[0], tail.shape[3]
    pooled, closed_pool = ops.inplace_custom(
        "mo.mla.kpool.tail_update",
        device=tail.device,
        values=[tail, k, gate, ape, positions, slot_idx],
        out_types=[
            TensorType(tail.dtype, (batch, columns, head_dim), tail.device),
            TensorType(DType.int32, (batch, columns), tail.device),
        ],
        parameters={
            "head_dim": int(head_dim),
            "kpool": kpool,
            "next_n": next_n,
        },
    )
    return pooled.tensor, closed_pool.tensor


def ring_close(
    tail: BufferValue,
    k: TensorValue,
    gate: TensorValue,
    ape: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    slot_idx: TensorValue,
    *,
    kpool: int,
) -> tuple[TensorValue, TensorValue]:
    """Closes the pool that each request had pending, if its chunk ends it.

    A request whose `cache_lengths[r]` is no multiple of `kpool` has a pool whose
    first members wait in the ring. If the chunk reaches its last member, the pool
    closes; at most one a request and call. In a ragged step call `ring_close`,
    then `compress`, then `seed_tail`, or `ragged_update` in place of the three.

    Args:
        tail: `[max_slots, 2, ring_len, head_dim]`, keys at 0 and gate scores at
            1 of axis 1; only read. `ring_len` is at least `kpool`.
        k: `[total_tokens, head_dim]` keys, dtype of `tail`.
        gate: `[total_tokens, head_dim]` gate scores, dtype of `tail`.
        ape: `[kpool, head_dim]` float32, added to the gate scores by member.
        input_row_offsets: `[batch + 1]` uint32, first token row of each request.
        cache_lengths: `[batch]` uint32, tokens cached before this call.
        slot_idx: `[batch]` uint32, ring slot of each request.
        kpool: Tokens per pool.

    Returns:
        pooled: `[batch, head_dim]`, dtype of `tail`; zero where nothing closed.
        closed_pool: `[batch]` int32, the pool's id, or -1.

    Raises:
        OperandError: If an operand's kind, dtype, rank, size or device is wrong.
        KernelBuildError: If the kernels cannot be compiled.

    When the graph runs on a CPU, offsets that decrease or pass the token count,
    a slot outside the ring, or one slot for two requests with tokens are errors
    raised before anything is written. On a GPU such a request is skipped.
    """
    tables = (input_row_offsets, cache_lengths, slot_idx)
    _require_ragged("ring_close", tail, k, gate, *tables, kpool, ape)
    rows = cache_lengths.shape[0]
    return _close_ragged("ring_close", [tail, k, gate, ape, *tables], rows, kpool)


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
) -> tuple[TensorValue, TensorValue]:
    """Does a whole ragged step: closes, compresses and stashes in one launch.

    For any mix of prefill chunks and decodes, each request on its own alignment.
    Each request's complete pools are pooled as `ring_close` and `compress` do; its
    newest `min(n, ring_len)` tokens are stashed as `tail_update` does, so with
    `ring_len >= kpool - 1 + next_n` a step may be rejected in part.

    Args:
        tail: `[max_slots, 2, ring_len, head_dim]`, keys at 0 and gate scores at
            1 of axis 1; updated in place. `ring_len` is at least `kpool`.
        k: `[total_tokens, head_dim]` keys, dtype of `tail`.
        gate: `[total_tokens, head_dim]` gate scores, dtype of `tail`.
        ape: `[kpool, head_dim]` float32, added to the gate scores by member.
        input_row_offsets: `[batch + 1]` uint32, first token row of each request.
        cache_lengths: `[batch]` uint32, tokens cached before this call.
        slot_idx: `[batch]` uint32, ring slot of each request.
        kpool: Tokens per pool.

    Returns:
        pooled: `[rows, head_dim]` with
            `rows = (total_tokens + batch * (kpool - 1)) // kpool`, dtype of
            `tail`. Request `r`'s pools stand in order from row
            `(input_row_offsets[r] + r * (kpool - 1)) // kpool` on; the rest is
            zero.
        closed_pool: `[rows]` int32, their pool ids; -1 in unused rows.

    Raises:
        OperandError: If an operand's kind, dtype, rank, size or device is wrong.
        KernelBuildError: If the kernels cannot be compiled.

    When the graph runs on a CPU, offsets that decrease or pass the token count,
    a slot outside the ring, or one slot for two requests with tokens are errors
    raised before anything is written. On a GPU such a request is skipped.
    """
    tables = (input_row_offsets, cache_lengths, slot_idx)
    _require_ragged("ragged_update", tail, k, gate, *tables, kpool, ape)
    rows = (k.shape[0] + cache_lengths.shape[0] * (kpool - 1)) // kpool
    return _close_ragged("ragged_update", [tail, k, gate, ape, *tables], rows, kpool)


def _close_ragged(
    op: str,
    values: Sequence[BufferValue | TensorValue],
    rows: Dim,
    kpool: int,
) -> tuple[TensorValue, TensorValue]:
    tail = values[0]
    head_dim = tail.shape[3]
    load_kernels()
    pooled, closed_pool = ops.inplace_custom(
        f"mo.mla.kpool.{op}",
        device=tail.device,
        values=values,
        out_types=[
            TensorType(tail.dtype, (rows, head_dim), tail.device),
            TensorType(DType.int32, (rows,), tail.device),
        ],
        parameters={"head_dim": int(head_dim), "kpool": kpool},
    )
    return pooled.tensor, closed_pool.tensor
