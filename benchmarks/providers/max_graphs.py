"""MAX graphs of the ops: ours, out of MAX's own ops, and empty ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, Module, TensorType, TensorValue, ops
from mojo.run import subprocess_run_mojo

import kpool_graph
from kpool_graph import to_buffer, to_numpy

from .. import ROOT, cases
from ..cases import HEAD_DIM, POOL_TOPK, Case
from ..operands import Outcome, Problem
from ..rows import EMPTY, OURS
from . import stock_max
from .base import Prepared

NOOP_SOURCES = ROOT / "benchmarks" / "noop_kernels"
# Ops of a graph that has more than one: the cost of one more is the difference to a
# graph of one, divided by what it has more.
MANY = 17

HOST = DeviceRef.CPU()
_OURS = {
    cases.TAIL_UPDATE: kpool_graph.tail_update,
    cases.COMPRESS: kpool_graph.compress,
    cases.RAGGED_UPDATE: kpool_graph.ragged_update,
    cases.SEED_TAIL: kpool_graph.seed_tail,
    cases.EXPAND_TOPK: kpool_graph.expand_topk,
}


@dataclass(frozen=True)
class Key:
    """What tells one graph from another; batches and lengths do not.

    Attributes:
        provider: Whose ops.
        op: Which.
        dtype: Of the ring.
        kpool: Tokens per pool.
        next_n: Tokens a row, or 0.
        copies: How often the op stands in the graph.
    """

    provider: str
    op: str
    dtype: str
    kpool: int
    next_n: int
    copies: int

    @property
    def name(self) -> str:
        """The graph's name."""
        provider = self.provider.replace(" ", "_")
        sizes = f"k{self.kpool}_n{self.next_n}_x{self.copies}"
        return f"{provider}_{self.op}_{self.dtype}_{sizes}"


def key_of(provider: str, case: Case, copies: int = 1) -> Key:
    """Names the graph that a case runs on.

    Args:
        provider: `kpool_graph`, `max ops` or `empty`.
        case: The case.
        copies: How often the op stands in the graph.

    Returns:
        Its key.
    """
    return Key(provider, case.op, case.dtype, case.kpool, case.next_n, copies)


def graphs_of(case: Case, providers: Iterable[str]) -> list[Key]:
    """Lists the graphs that a case needs.

    Args:
        case: The case.
        providers: Those asked for.

    Returns:
        Their keys.
    """
    keys = []
    for provider in providers:
        if provider in (OURS, EMPTY, stock_max.NAME):
            keys.append(key_of(provider, case))
        if provider in (OURS, EMPTY) and case.in_graph:
            keys.append(key_of(provider, case, MANY))
    return keys


def compile_graphs(keys: Iterable[Key]) -> dict[Key, Model]:
    """Compiles graphs in one module, or finds them in MAX's cache.

    Args:
        keys: Which.

    Returns:
        The models.
    """
    module = Module()
    keys = sorted(set(keys), key=lambda key: key.name)
    if not keys:
        return {}
    kernels = {OURS: kpool_graph.kernels_path(), EMPTY: _noop_kernels()}
    for key in keys:
        with Graph(
            key.name,
            input_types=_input_types(key),
            custom_extensions=[
                kernels[name] for name in kernels if name == key.provider
            ],
            module=module,
        ) as graph:
            outputs: Sequence[Any] = ()
            for _ in range(key.copies):
                outputs = _build(key, graph.inputs)
            graph.output(*outputs)
    session = InferenceSession(devices=[CPU()])
    models = session.load_all(module, custom_extensions=list(kernels.values()))
    return {key: models[key.name] for key in keys}


def _noop_kernels() -> Path:
    """Compiles the ops that do nothing, once: MAX would do it for every graph."""
    digest = hashlib.sha256(kpool_graph.__version__.encode())
    digest.update((NOOP_SOURCES / "__init__.mojo").read_bytes())
    folder = ROOT / "build" / "benchmarks" / digest.hexdigest()[:16]
    library = folder / "noop_ops.mojoc"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess_run_mojo(
            ["precompile", str(NOOP_SOURCES), "-o", str(library)], check=True
        )
    return library


def _input_types(key: Key) -> list[BufferType | TensorType]:
    def ints(*shape: str | int) -> TensorType:
        return TensorType(DType.uint32, shape, HOST)

    tables = [ints("batch_plus_1"), ints("batch")]
    if key.op == cases.EXPAND_TOPK:
        return [TensorType(DType.int32, ("tokens", POOL_TOPK), HOST), *tables]
    dtype = DType[key.dtype]
    ape = TensorType(DType.float32, (key.kpool, HEAD_DIM), HOST)
    ring = BufferType(dtype, ("max_slots", 2, key.kpool, HEAD_DIM), HOST)
    if key.op == cases.TAIL_UPDATE:
        token = TensorType(dtype, ("batch", key.next_n, HEAD_DIM), HOST)
        positions = TensorType(DType.int32, ("batch", key.next_n), HOST)
        return [ring, token, token, ape, positions, ints("batch")]
    token = TensorType(dtype, ("tokens", HEAD_DIM), HOST)
    if key.op == cases.COMPRESS:
        return [token, token, ape, ints("batch_plus_1"), *tables]
    if key.op == cases.SEED_TAIL:
        return [ring, token, token, *tables, ints("batch")]
    return [ring, token, token, ape, *tables, ints("batch")]


def _build(key: Key, inputs: Sequence[Any]) -> Sequence[Any]:
    values = [
        value.buffer if isinstance(value.type, BufferType) else value.tensor
        for value in inputs
    ]
    if key.provider == EMPTY:
        return _nothing(key, values)
    builders = _OURS if key.provider == OURS else stock_max.BUILDERS
    outputs = builders[key.op](*values, kpool=key.kpool)
    if outputs is None:
        return ()
    return (outputs,) if isinstance(outputs, TensorValue) else outputs


def _nothing(key: Key, values: Sequence[Any]) -> Sequence[Any]:
    """An op that does nothing, with outputs like those of the op it stands for."""

    def noop(name: str, operands: Sequence[Any], *types: TensorType) -> Sequence[Any]:
        name = f"kpool_graph.noop.{name}"
        place = (
            ops.inplace_custom
            if isinstance(operands[0].type, BufferType)
            else ops.custom
        )
        return place(name, device=HOST, values=operands, out_types=types)

    def out(dtype: DType, *shape: Any) -> TensorType:
        return TensorType(dtype, shape, HOST)

    if key.op == cases.SEED_TAIL:
        return noop("stash", values[:3])
    if key.op == cases.EXPAND_TOPK:
        queries, topk = values[0].shape
        width = int(topk) * key.kpool + key.kpool - 1
        return noop("rows", values[:1], out(DType.int32, queries, width))
    dtype, tokens = DType[key.dtype], values[0 if key.op == cases.COMPRESS else 1]
    rows = tokens.shape[0]
    if key.op == cases.COMPRESS:
        return noop("rows", values[:1], out(dtype, rows // key.kpool, HEAD_DIM))
    operands = [*values[:5], values[-1]]
    if key.op == cases.TAIL_UPDATE:
        types = out(dtype, rows, 1, HEAD_DIM), out(DType.int32, rows, 1)
    else:
        pools = (rows + values[-1].shape[0] * (key.kpool - 1)) // key.kpool
        types = out(dtype, pools, HEAD_DIM), out(DType.int32, pools)
    return noop("close", operands, *types)


def preparer(
    provider: str, models: dict[Key, Model], copies: int = 1
) -> Callable[[Problem], Prepared]:
    """Looks for a case's graph when its turn comes.

    Args:
        provider: Whose ops.
        models: The compiled graphs.
        copies: How often the op stands in the graph.

    Returns:
        What prepares a problem.
    """
    return lambda problem: prepare(
        problem, models[key_of(provider, problem.case, copies)]
    )


def prepare(problem: Problem, model: Model) -> Prepared:
    """Copies the operands into device buffers.

    Args:
        problem: The case.
        model: Its graph.

    Returns:
        Its step: one execution, to its end.
    """
    dtype = DType[problem.case.dtype]
    buffers = {
        name: to_buffer(array, _dtype(name, array, dtype))
        for name, array in problem.operands.items()
    }
    operands = tuple(buffers.values())
    execute: Callable[..., list[Buffer]] = model.execute

    def step() -> list[Buffer]:
        return execute(*operands)

    def read(outputs: list[Buffer]) -> Outcome:
        outcome = Outcome()
        for output in outputs:
            if output.dtype == DType.int32:
                outcome.ints = to_numpy(output)
            else:
                outcome.pooled = to_numpy(output)
        if "tail" in buffers:
            outcome.tail = _storage(buffers["tail"])
        return outcome

    return Prepared(step, read)


def _dtype(name: str, array: np.ndarray, ring: DType) -> DType:
    return ring if name in ("tail", "k", "gate") else DType.from_numpy(array.dtype)


def _storage(buffer: Buffer) -> np.ndarray:
    if buffer.dtype == DType.bfloat16:
        buffer = buffer.view(DType.uint16, buffer.shape)
    return buffer.to_numpy().copy()
