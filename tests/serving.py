"""Graphs and checks of what a server does besides decoding: ragged steps, forks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from max.dtype import DType
from max.graph import BufferType, Graph, Module, TensorType

import kpool_graph
from asserts import assert_same_bits
from models import HOST, SeedTail


@dataclass(frozen=True)
class RaggedUpdate(SeedTail):
    """A graph of one `ragged_update`; every size that may vary is symbolic."""

    @property
    def name(self) -> str:
        return super().name.replace("seed_tail", "ragged_update")

    @property
    def input_types(self) -> list[BufferType | TensorType]:
        ring, k, gate, *tables = super().input_types
        ape = TensorType(DType.float32, (self.kpool, self.head_dim), HOST)
        return [ring, k, gate, ape, *tables]

    def build(self, module: Module) -> None:
        with Graph(self.name, input_types=self.input_types, module=module) as graph:
            graph.output(*kpool_graph.ragged_update(*graph.inputs, kpool=self.kpool))


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
    return own_line(error.value)


def own_line(error: BaseException) -> str:
    """Takes the op's line out of what MAX raises around it."""
    ops = tuple(
        f"{op}: "
        for op in (
            "seed_tail",
            "tail_update",
            "ragged_update",
            "ring_close",
            "compress",
            "expand_topk",
            "copy_slots",
        )
    )
    lines = [line for line in str(error).splitlines() if line.startswith(ops)]
    assert len(lines) == 1, str(error)
    return lines[0]
