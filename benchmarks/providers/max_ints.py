"""int32 arithmetic in MAX graphs, for row tables and indices."""

from __future__ import annotations

from max.dtype import DType
from max.graph import Dim, DimLike, TensorValue, ops

INT = DType.int32


def constant(value: int, like: TensorValue) -> TensorValue:
    """Makes a scalar on the device of another tensor."""
    return ops.constant(value, INT, like.device)


def to_int(table: TensorValue) -> TensorValue:
    """Converts a row table, or truth values to 0 and 1."""
    return ops.cast(table, INT)


def div(values: TensorValue, divisor: int) -> TensorValue:
    """Divides, rounding down."""
    return ops.cast(ops.floor_div(values, constant(divisor, values)), INT)


def mod(values: TensorValue, divisor: int) -> TensorValue:
    """Takes the remainder of a division."""
    return ops.mod(values, constant(divisor, values))


def where(
    condition: TensorValue, yes: TensorValue | int, no: TensorValue | int
) -> TensorValue:
    """Chooses by element."""
    yes = constant(yes, condition) if isinstance(yes, int) else yes
    no = constant(no, condition) if isinstance(no, int) else no
    return ops.where(condition, yes, no)


def clip(values: TensorValue, low: TensorValue, high: TensorValue) -> TensorValue:
    """Moves values into a range, both ends in it."""
    return ops.min(ops.max(values, low), high)


def count(size: DimLike, like: TensorValue) -> TensorValue:
    """Counts from 0, on the device of another tensor."""
    return ops.range(0, size, out_dim=size, dtype=INT, device=like.device)


def last(size: Dim, like: TensorValue) -> TensorValue:
    """Finds the last index of a dimension, on the device of another tensor."""
    return ops.cast(TensorValue(size), INT).to(like.device) - 1
