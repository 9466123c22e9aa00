"""Graphs of one op, for what its builder refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from max.graph import Graph

import kpool_graph
from kpool_graph import OperandError


def building(
    operands: Mapping[str, Mapping[str, Any]],
) -> tuple[Callable[..., Any], Callable[..., list[str]]]:
    """Makes what tries operands that are not right.

    Args:
        operands: The right types of each op's operands, by name and in order.

    Returns:
        `build(op, kpool=4, **changed)`, which builds a graph of the op with some
        operands of another type and returns what the builder does, and
        `refusal(op, ...)`, which requires an error and returns its lines, without
        the op's name.
    """

    def build(op: str, kpool: int = 4, **changed: Any) -> Any:
        types = {**operands[op], **changed}
        with Graph(op, input_types=list(types.values())) as graph:
            return getattr(kpool_graph, op)(*graph.inputs, kpool=kpool)

    def refusal(op: str, **changed: Any) -> list[str]:
        with pytest.raises(OperandError) as error:
            build(op, **changed)
        lines = str(error.value).splitlines()
        assert all(line.startswith(f"{op}: ") for line in lines)
        return [line.removeprefix(f"{op}: ") for line in lines]

    return build, refusal


def like(old: Any, **changed: Any) -> Any:
    """Copies a type with another dtype, shape or device.

    Args:
        old: The type.
        **changed: What is other.

    Returns:
        The copy.
    """
    parts = {"dtype": old.dtype, "shape": old.shape, "device": old.device}
    return type(old)(**{**parts, **changed})
