"""Graphs and checks of what a server does besides decoding: forks, refusals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from max.dtype import DType
from max.graph import BufferType, Graph, Module, TensorType

import kpool_graph
from asserts import assert_same_bits, message
from models import HOST


@dataclass(frozen=True)
class CopySlots:
    """A graph of one `copy_slots`, of a ring or of several stacked."""

    dtype: DType
    head_dim: int
    ring_len: int
    stacked: tuple[int | str, ...] = ()

    @property
    def name(self) -> str:
        axes = "".join(f"_{axis}" for axis in self.stacked)
        return f"copy_slots_{self.dtype.name}_h{self.head_dim}_r{self.ring_len}{axes}"

    def build(self, module: Module) -> None:
        shape = (*self.stacked, "max_slots", 2, self.ring_len, self.head_dim)
        types = [
            BufferType(self.dtype, shape, HOST),
            TensorType(DType.uint32, ("sources",), HOST),
            TensorType(DType.uint32, ("destinations",), HOST),
        ]
        with Graph(self.name, input_types=types, module=module) as graph:
            kpool_graph.copy_slots(*graph.inputs)
            graph.output()


def refused(call: Any, ring: Any, *operands: Any) -> str:
    """Requires an error that left the ring alone.

    Args:
        call: A compiled graph of one op of this package.
        ring: Its ring.
        *operands: Its other operands.

    Returns:
        The op's own line of the error.
    """
    before = ring.storage()
    with pytest.raises(ValueError) as error:
        call(ring, *operands)
    assert_same_bits(ring.storage(), before, "ring after the error")
    return message(error)
