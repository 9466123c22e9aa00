"""Graph builders of the ops that need no ring: whole pools, and selections."""

from __future__ import annotations

from max.dtype import DType
from max.graph import TensorType, TensorValue, ops

from ._library import load_kernels
from ._validate import Problems


def compress(
    k: TensorValue,
    gate: TensorValue,
    ape: TensorValue,
    input_row_offsets: TensorValue,
    pool_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    *,
    kpool: int,
) -> TensorValue:
    """Pools the tokens whose pools arrive whole in this call.

    A request's leading `-cache_lengths[r] % kpool` tokens belong to the pool it
    had pending and are skipped: `ring_close` has them. The whole pools that
    follow go to rows `pool_row_offsets[r]` on. The pooling is `tail_update`'s,
    bit for bit.

    Args:
        k: `[total_tokens, head_dim]` keys: float32, float16 or bfloat16.
        gate: `[total_tokens, head_dim]` gate scores, dtype of `k`.
        ape: `[kpool, head_dim]` float32, added to the gate scores by member.
        input_row_offsets: `[batch + 1]` uint32, first token row of each request.
        pool_row_offsets: `[batch + 1]` uint32, first output row of each request;
            see `kpool_graph.pool_row_offsets`.
        cache_lengths: `[batch]` uint32, tokens cached before this call.
        kpool: Tokens per pool.

    Returns:
        `[total_tokens // kpool, head_dim]` pooled keys, dtype of `k`; rows past
        the last pool are zero.

    Raises:
        OperandError: If an operand's kind, dtype, rank, size or device is wrong.
        KernelBuildError: If the kernels cannot be compiled.

    When the graph runs on a CPU, offsets that decrease or pass the token count, or
    pool row offsets that are not the sums of the pools completed, are errors
    raised before anything is written. On a GPU such rows become zero.
    """
    problems = Problems("compress")
    problems.require_keys(k, kpool)
    rows = ("total_tokens", "head_dim")
    problems.require_tensor("k", k, rows)
    problems.require_tensor("gate", gate, rows)
    problems.require_tensor("ape", ape, ("kpool", "head_dim"), DType.float32)
    problems.require_offsets("input_row_offsets", input_row_offsets, cache_lengths)
    problems.require_offsets("pool_row_offsets", pool_row_offsets, cache_lengths)
    problems.require_tensor("cache_lengths", cache_lengths, ("batch",), DType.uint32)
    head_dim = problems.require_static("head_dim", 1)
    problems.raise_if_any()

    load_kernels()
    return ops.custom(
        "mo.mla.kpool.compress",
        device=k.device,
        values=[
            k,
            gate,
            ape,
            input_row_offsets,
            pool_row_offsets,
            cache_lengths,
        ],
        out_types=[TensorType(k.dtype, (k.shape[0] // kpool, head_dim), k.device)],
        parameters={"head_dim": head_dim, "kpool": kpool},
    )[0].tensor


def pool_row_offsets(
    cache_lengths: TensorValue, input_row_offsets: TensorValue, kpool: int
) -> TensorValue:
    """Sums up the whole pools of each request, where `compress` puts them.

    Request `r` completes `(cache + n) // kpool - ceil(cache / kpool)` whole pools,
    or none if that is negative. 64-bit arithmetic: exact for every length.

    Args:
        cache_lengths: `[batch]` uint32, tokens cached before this call.
        input_row_offsets: `[batch + 1]` uint32, first token row of each request.
        kpool: Tokens per pool.

    Returns:
        `[batch + 1]` uint32, first output row of each request.

    Raises:
        OperandError: If an operand's kind, dtype, rank or device is wrong.
    """
    problems = Problems("pool_row_offsets")
    problems.require_at_least("kpool", kpool, 1)
    problems.require_tensor("cache_lengths", cache_lengths, ("batch",), DType.uint32)
    problems.require_offsets("input_row_offsets", input_row_offsets, cache_lengths)
    problems.raise_if_any()

    device = cache_lengths.device
    cached = ops.cast(cache_lengths, DType.int64)
    offsets = ops.cast(input_row_offsets, DType.int64)
    batch = cache_lengths.shape[0]
    size = ops.constant(kpool, DType.int64, device)
    zero = ops.constant(0, DType.int64, device)
    added = ops.rebind(offsets[1:] - offsets[:-1], (batch,))
    whole = (cached + added) // size - (cached + (size - 1)) // size
    ends = ops.cumsum(ops.max(whole, zero), axis=0)
    return ops.cast(ops.concat([ops.reshape(zero, (1,)), ends]), DType.uint32)


def expand_topk(
    pool_ids: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    *,
    kpool: int,
    always_select_tail: bool = True,
) -> TensorValue:
    """Expands each query's selected pools to the token positions they cover.

    A query at position `p` sees `p + 1` tokens, so `(p + 1) // kpool` pools are
    complete for it; an id that is negative or not below that selects nothing.

    Args:
        pool_ids: `[total_tokens, pool_topk]` int32, in selection order.
        input_row_offsets: `[batch + 1]` uint32, first token row of each request.
        cache_lengths: `[batch]` uint32, tokens cached before this call.
        kpool: Tokens per pool.
        always_select_tail: Whether the query's newest `(p + 1) % kpool` positions,
            which no complete pool covers, follow the selected ones.

    Returns:
        `[total_tokens, pool_topk * kpool]` int32 positions, `kpool - 1` columns
        more with `always_select_tail`. Packed: selected pools in selection order,
        then the newest positions, then -1.

    Raises:
        OperandError: If an operand's kind, dtype, rank, size or device is wrong.
        KernelBuildError: If the kernels cannot be compiled.

    When the graph runs on a CPU, offsets that decrease or pass the token count are
    errors raised before anything is written. On a GPU such rows select nothing.
    """
    problems = Problems("expand_topk")
    problems.require_at_least("kpool", kpool, 1)
    problems.require_tensor(
        "pool_ids", pool_ids, ("total_tokens", "pool_topk"), DType.int32
    )
    problems.require_offsets("input_row_offsets", input_row_offsets, cache_lengths)
    problems.require_tensor("cache_lengths", cache_lengths, ("batch",), DType.uint32)
    pool_topk = problems.require_static("pool_topk", 1)
    problems.raise_if_any()

    load_kernels()
    columns = pool_topk * kpool + (kpool - 1 if always_select_tail else 0)
    return ops.custom(
        "mo.mla.kpool.expand_topk",
        device=pool_ids.device,
        values=[pool_ids, input_row_offsets, cache_lengths],
        out_types=[
            TensorType(DType.int32, (pool_ids.shape[0], columns), pool_ids.device)
        ],
        parameters={
            "kpool": kpool,
            "pool_topk": pool_topk,
            "always_select_tail": always_select_tail,
        },
    )[0].tensor
