"""Row tables of a ragged batch, in graph ops."""

from __future__ import annotations

from max.dtype import DType
from max.graph import Dim, TensorValue, ops

# The value of rows that belong to no request: negative whatever row is added.
_NOBODY = -(2**40)


def count(size: Dim, like: TensorValue) -> TensorValue:
    """Counts from 0 in int64, on the device of another tensor.

    Args:
        size: How far.
        like: Any tensor of the device.

    Returns:
        `[size]` int64.
    """
    return ops.range(0, size, out_dim=size, dtype=DType.int64, device=like.device)


def owners_of(first: TensorValue, rows: TensorValue) -> TensorValue:
    """Finds the request of each row.

    Args:
        first: `[batch + 1]` int64; request `r` has rows `[first[r], first[r + 1])`.
        rows: `[rows]` int64, row numbers.

    Returns:
        `[rows]` int64, `r + 1`; 0 and `batch + 1` for rows of no request.
    """
    begun = ops.unsqueeze(first, 0) <= ops.unsqueeze(rows, 1)
    return ops.squeeze(ops.sum(ops.cast(begun, DType.int64), axis=1), 1)


def spread(values: TensorValue, owners: TensorValue) -> TensorValue:
    """Gives each row the value of its request.

    Args:
        values: `[batch]` int64.
        owners: `[rows]` int64, as `owners_of` finds them.

    Returns:
        `[rows]` int64; far below 0 for rows of no request.
    """
    nobody = ops.constant([_NOBODY], DType.int64, values.device)
    return ops.gather(ops.concat([nobody, values, nobody]), owners, axis=0)
