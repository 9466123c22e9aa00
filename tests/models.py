"""Compiled graphs for the tests: declared by test modules, compiled all at once.

A graph compile costs far more than one more op in it, so the session compiles
one module that holds every graph the collected tests declared.

Arrays are in storage form throughout: float32, float16, or uint16 that holds
bfloat16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType

import kpool_graph

Array = np.ndarray[Any, np.dtype[Any]]

HOST = DeviceRef.CPU()
STORAGE = {
    DType.float32: np.dtype(np.float32),
    DType.float16: np.dtype(np.float16),
    DType.bfloat16: np.dtype(np.uint16),
}


def bits(storage: Array) -> Array:
    """Views elements as unsigned integers, so that NaN equals itself."""
    return np.ascontiguousarray(storage).view(f"u{storage.dtype.itemsize}")


def to_buffer(storage: Array, dtype: DType) -> Buffer:
    """Copies a storage array bit for bit into a buffer of its dtype."""
    assert storage.dtype == STORAGE[dtype], (storage.dtype, dtype)
    return kpool_graph.to_buffer(storage, dtype)


def to_storage(buffer: Buffer) -> Array:
    """Copies a buffer bit for bit into a storage array."""
    if buffer.dtype == DType.bfloat16:
        buffer = buffer.view(DType.uint16, buffer.shape)
    return buffer.to_numpy().copy()


@dataclass(frozen=True)
class _Op:
    dtype: DType
    head_dim: int
    kpool: int

    @property
    def ring_type(self) -> BufferType:
        shape = ("max_slots", 2, self.ring_len, self.head_dim)
        return BufferType(self.dtype, shape, HOST)


@dataclass(frozen=True)
class SeedTail(_Op):
    """A graph of one `seed_tail`; every size that may vary per call is symbolic."""

    ring_len: int

    @property
    def name(self) -> str:
        sizes = f"h{self.head_dim}_k{self.kpool}_r{self.ring_len}"
        return f"seed_tail_{self.dtype.name}_{sizes}"

    @property
    def input_types(self) -> list[BufferType | TensorType]:
        tokens = TensorType(self.dtype, ("total_tokens", self.head_dim), HOST)
        requests = TensorType(DType.uint32, ("batch",), HOST)
        offsets = TensorType(DType.uint32, ("batch_plus_1",), HOST)
        return [self.ring_type, tokens, tokens, offsets, requests, requests]

    def build(self, module: Module) -> None:
        with Graph(self.name, input_types=self.input_types, module=module) as graph:
            kpool_graph.seed_tail(*graph.inputs, kpool=self.kpool)
            graph.output()


@dataclass(frozen=True)
class TailUpdate(_Op):
    """A graph of one `tail_update`, with a symbolic batch and max_slots."""

    next_n: int
    ring_len: int

    @property
    def name(self) -> str:
        sizes = f"h{self.head_dim}_k{self.kpool}_n{self.next_n}_r{self.ring_len}"
        return f"tail_update_{self.dtype.name}_{sizes}"

    @property
    def columns(self) -> int:
        return -(-self.next_n // self.kpool)

    @property
    def input_types(self) -> list[BufferType | TensorType]:
        tokens = TensorType(self.dtype, ("batch", self.next_n, self.head_dim), HOST)
        return [
            self.ring_type,
            tokens,
            tokens,
            TensorType(DType.float32, (self.kpool, self.head_dim), HOST),
            TensorType(DType.int32, ("batch", self.next_n), HOST),
            TensorType(DType.uint32, ("batch",), HOST),
        ]

    def build(self, module: Module) -> None:
        with Graph(self.name, input_types=self.input_types, module=module) as graph:
            graph.output(*kpool_graph.tail_update(*graph.inputs, kpool=self.kpool))


@dataclass(frozen=True)
class OwnGraph:
    """A graph that one test writes itself.

    Attributes:
        name: Graph name.
        body: Given the graph's inputs, builds the ops and returns the outputs.
        input_types: The graph's inputs.
    """

    name: str
    body: Callable[..., Sequence[Any]]
    input_types: tuple[BufferType | TensorType, ...]

    def build(self, module: Module) -> None:
        with Graph(self.name, input_types=self.input_types, module=module) as graph:
            graph.output(*self.body(*graph.inputs))


class Ring:
    """A ring in device memory whose bits a test can read."""

    def __init__(self, storage: Array, dtype: DType) -> None:
        self.dtype = dtype
        self.buffer = to_buffer(storage, dtype)

    def storage(self) -> Array:
        return to_storage(self.buffer)


class Call:
    """Runs one compiled graph on storage arrays and rings."""

    def __init__(self, declared: Any, model: Model) -> None:
        self.op = declared
        self.model = model

    def __call__(self, *operands: Ring | Buffer | Array) -> list[Array]:
        return [to_storage(out) for out in self.run(*map(self._argument, operands))]

    def run(self, *buffers: Buffer | Array) -> list[Buffer]:
        """Runs on buffers, and returns the outputs where MAX left them."""
        return list(self.model.execute(*buffers))

    def _argument(self, operand: Ring | Buffer | Array) -> Buffer | Array:
        if isinstance(operand, Ring):
            return operand.buffer
        if isinstance(operand, np.ndarray) and operand.dtype == np.uint16:
            return to_buffer(operand, DType.bfloat16)
        return operand


_declared: dict[str, Any] = {}


def declare(graph: Any) -> Any:
    """Asks for a graph in the session's module, at import of a test module.

    Args:
        graph: A `SeedTail`, `TailUpdate` or `OwnGraph`.

    Returns:
        `graph`, the key under which the `models` fixture has it.
    """
    assert _declared.setdefault(graph.name, graph) == graph, graph.name
    return graph


def compile_together(graphs: Sequence[Any]) -> dict[Any, Call]:
    """Compiles graphs in one module.

    Args:
        graphs: What to compile.

    Returns:
        A call for each.
    """
    module = Module()
    for graph in graphs:
        graph.build(module)
    loaded = InferenceSession(devices=[CPU()]).load_all(
        module, custom_extensions=[kpool_graph.kernels_path()]
    )
    return {graph: Call(graph, loaded[graph.name]) for graph in graphs}


def compile_declared() -> dict[Any, Call]:
    """Compiles every declared graph, in an order that repeats.

    Returns:
        A call for each.
    """
    return compile_together([_declared[name] for name in sorted(_declared)])
