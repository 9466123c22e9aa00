"""What a serving graph needs besides the ops: the kernels, and pools at tokens."""

from __future__ import annotations

import dataclasses

from max.dtype import DType
from max.graph import Dim, TensorValue, ops
from max.pipelines.lib.graph_specs import GraphSpec

from .._library import kernels_path
from .._rows import count, owners_of, spread


def with_kernels(spec: GraphSpec) -> GraphSpec:
    """Hands our kernels to the compile of a pipeline's graph.

    Args:
        spec: A graph of a pipeline model's `graph_specs`.

    Returns:
        The same, with the kernels among its custom extensions.

    Raises:
        KernelBuildError: If the kernels cannot be compiled.
    """
    extensions = (*spec.custom_extensions, kernels_path())
    return dataclasses.replace(spec, custom_extensions=extensions)


def pooled_by_token(
    pooled: TensorValue,
    input_row_offsets: TensorValue,
    cache_lengths: TensorValue,
    *,
    total_tokens: Dim,
    kpool: int,
) -> TensorValue:
    """Gives each token that closes a pool the pool's key, and zeros to the others.

    So what a token gets depends on its own position alone, and not on how the requests
    were batched or their prompts were cut.

    Args:
        pooled: `[rows, head_dim]`, the first output of `ragged_update`.
        input_row_offsets: `[batch + 1]` uint32, the operand of the same call.
        cache_lengths: `[batch]` uint32, likewise.
        total_tokens: The size of axis 0 of its `k`.
        kpool: Tokens per pool.

    Returns:
        `[total_tokens, head_dim]`, dtype of `pooled`.
    """
    first = ops.cast(input_row_offsets, DType.int64)
    token = count(total_tokens, pooled)
    owners = owners_of(first, token)
    request = owners - 1
    begin = ops.gather(first, request, axis=0)
    before = spread(ops.cast(cache_lengths, DType.int64), owners)

    visible = before + token - begin + 1
    pools = ops.floor_div(visible, kpool)
    # Where ragged_update puts the request's pools, and which of them closed last.
    row = ops.floor_div(begin + request * (kpool - 1), kpool)
    row += pools - ops.floor_div(before, kpool) - 1
    # A token before the first close has none; it must not read outside.
    found = ops.gather(pooled, ops.max(row, 0), axis=0)
    closes = ops.unsqueeze(ops.equal(pools * kpool, visible), 1)
    return ops.where(closes, found, ops.constant(0, pooled.dtype, pooled.device))
