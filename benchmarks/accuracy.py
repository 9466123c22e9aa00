"""How far pooled keys are from the exact ones, as a share of what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Module, TensorType

import kpool_graph
from kpool_graph import bfloat16, reference, to_buffer

from .cases import HEAD_DIM

DTYPES = (DType.float32, DType.float16, DType.bfloat16)
KPOOLS = (4, 16)
# Standard deviations of the gate scores: alike, as in a model, and mostly one winner.
SCALES = (0.5, 2.0, 8.0)
POOLS = 8192


@dataclass(frozen=True)
class Accuracy:
    """The largest errors of one setting.

    Attributes:
        dtype: Of the keys.
        kpool: Tokens per pool.
        scale: Standard deviation of the gate scores.
        of_bound: Largest error over what the contract allows; at most 1.
        ulps: Largest error in units of the dtype's last place at the pool's largest
            key.
    """

    dtype: DType
    kpool: int
    scale: float
    of_bound: float
    ulps: float


def measure(seed: int = 0) -> Iterator[Accuracy]:
    """Pools random tokens, and compares with float64.

    Args:
        seed: Of the tokens.

    Yields:
        One result a setting.
    """
    rng = np.random.default_rng(seed)
    module = Module()
    for dtype in DTYPES:
        for kpool in KPOOLS:
            _build(module, dtype, kpool)
    session = InferenceSession(devices=[CPU()])
    models = session.load_all(module, custom_extensions=[kpool_graph.kernels_path()])
    for dtype in DTYPES:
        for kpool in KPOOLS:
            for scale in SCALES:
                yield _measure(models[_name(dtype, kpool)], dtype, kpool, scale, rng)


def _name(dtype: DType, kpool: int) -> str:
    return f"accuracy_{dtype.name}_k{kpool}"


def _build(module: Module, dtype: DType, kpool: int) -> None:
    cpu = DeviceRef.CPU()
    rows = TensorType(dtype, ("tokens", HEAD_DIM), cpu)
    types = [
        rows,
        rows,
        TensorType(DType.float32, (kpool, HEAD_DIM), cpu),
        TensorType(DType.uint32, ("offsets",), cpu),
        TensorType(DType.uint32, ("offsets",), cpu),
        TensorType(DType.uint32, ("requests",), cpu),
    ]
    with Graph(_name(dtype, kpool), input_types=types, module=module) as graph:
        operands = [each.tensor for each in graph.inputs]
        graph.output(kpool_graph.compress(*operands, kpool=kpool))


def _measure(
    model: Model, dtype: DType, kpool: int, scale: float, rng: np.random.Generator
) -> Accuracy:
    shape = (POOLS * kpool, HEAD_DIM)
    stored = [_store(rng.normal(0, size, shape), dtype) for size in (1.0, scale)]
    ape = rng.normal(0, 1, (kpool, HEAD_DIM)).astype(np.float32)
    (pooled,) = model.execute(
        *(to_buffer(each, dtype) for each in stored),
        ape,
        np.array([0, shape[0]], np.uint32),
        np.array([0, POOLS], np.uint32),
        np.zeros(1, np.uint32),
    )
    keys, gates = (
        each.reshape(POOLS, kpool, HEAD_DIM).swapaxes(0, 1) for each in stored
    )
    exact = reference.pool(keys, gates, ape[:, None])
    ulp = reference.ulp(exact, stored[0].dtype)
    error = np.abs(kpool_graph.to_numpy(pooled).astype(np.float64) - exact)
    bound = reference.pool_tolerance(keys, gates, ape[:, None], ulp)
    largest = np.abs(reference.values(keys)).max(axis=0)
    return Accuracy(
        dtype,
        kpool,
        scale,
        float((error / bound).max()),
        float((error / reference.ulp(largest, stored[0].dtype)).max()),
    )


def _store(values: np.ndarray, dtype: DType) -> np.ndarray:
    if dtype == DType.bfloat16:
        return bfloat16.encode(values)
    return values.astype(dtype.to_numpy())


def text() -> str:
    """Measures, and writes a table.

    Returns:
        The text, with a final newline.
    """
    lines = ["dtype     kpool  gate scale  of the bound  ulps of the largest key"]
    lines += [
        f"{each.dtype.name:<9} {each.kpool:5}  {each.scale:10g}"
        f"  {each.of_bound:12.2f}  {each.ulps:23.2f}"
        for each in measure()
    ]
    return "\n".join(lines) + "\n"
