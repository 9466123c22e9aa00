"""The demo's two MAX graphs: from token ids to keys, gate scores and the ring."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, Module, TensorType, TensorValue, ops

from ._library import kernels_path
from .buffers import to_buffer, to_numpy
from .ops import seed_tail, tail_update
from .ring import TailRing

Array = npt.NDArray[Any]

HEAD_DIM = 128
KPOOL = 4
VOCABULARY = 4096
EMBEDDING = 64


class DemoModel:
    """A toy indexer layer with fixed weights, and the ring it keeps on a device.

    Both graphs embed token ids, project them to keys and gate scores in float32,
    round those to bfloat16, hand them to an op of this package and return them,
    so that an oracle can start from the very operands that the op saw.

    Attributes:
        ape: `[KPOOL, HEAD_DIM]` float32, the within-pool position embedding.
    """

    def __init__(self, device: Device, max_slots: int) -> None:
        """Compiles the graphs and allocates the ring.

        Args:
            device: Where the graphs run.
            max_slots: Slots in the ring.

        Raises:
            KernelBuildError: If the kernels cannot be compiled.
        """
        self._device = device
        ring = TailRing(max_slots, KPOOL, HEAD_DIM)
        self._tail = ring.allocate(device)

        random = np.random.default_rng(seed=0)
        self.ape: Array = random.normal(size=(KPOOL, HEAD_DIM)).astype(np.float32)
        self._ape = self._put(self.ape, DType.float32)
        # Keys come out near 1, and gate scores wide enough to tell members apart.
        unit = EMBEDDING**-0.5
        self._weights = [
            self._put(random.normal(scale=scale, size=shape), DType.float32)
            for scale, shape in (
                (1.0, (VOCABULARY, EMBEDDING)),
                (unit, (EMBEDDING, HEAD_DIM)),
                (2 * unit, (EMBEDDING, HEAD_DIM)),
            )
        ]

        module = Module()
        _build_prefill(module, ring, DeviceRef.from_device(device))
        _build_decode(module, ring, DeviceRef.from_device(device))
        self._models = InferenceSession(devices=[device]).load_all(
            module, custom_extensions=[kernels_path()]
        )

    def prefill(
        self,
        token_ids: Array,
        input_row_offsets: Array,
        cache_lengths: Array,
        slot_idx: Array,
    ) -> tuple[Array, Array]:
        """Runs prompt chunks of several requests; their tails stay in the ring.

        Args:
            token_ids: `[total_tokens]` int32, below `VOCABULARY`.
            input_row_offsets: `[batch + 1]`, first token of each request.
            cache_lengths: `[batch]`, tokens of each request before this call.
            slot_idx: `[batch]`, ring slot of each request.

        Returns:
            Keys and gate scores, `[total_tokens, HEAD_DIM]` float32 that hold
            bfloat16 values.
        """
        k, gate = self._models["prefill"].execute(
            self._tail,
            *self._weights,
            self._put(token_ids, DType.int32),
            self._put(input_row_offsets, DType.uint32),
            self._put(cache_lengths, DType.uint32),
            self._put(slot_idx, DType.uint32),
        )
        return to_numpy(k), to_numpy(gate)

    def decode(
        self, token_ids: Array, positions: Array, slot_idx: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Runs one token of each request, and closes the pools these complete.

        Args:
            token_ids: `[batch, 1]` int32, below `VOCABULARY`.
            positions: `[batch, 1]`, absolute; negative for a padded row.
            slot_idx: `[batch]`, ring slot of each request.

        Returns:
            pooled `[batch, 1, HEAD_DIM]` float32 that holds bfloat16 values,
            closed_pool `[batch, 1]` int32, and keys and gate scores
            `[batch, 1, HEAD_DIM]` like pooled.
        """
        pooled, closed_pool, k, gate = self._models["decode"].execute(
            self._tail,
            *self._weights,
            self._put(token_ids, DType.int32),
            self._ape,
            self._put(positions, DType.int32),
            self._put(slot_idx, DType.uint32),
        )
        return to_numpy(pooled), to_numpy(closed_pool), to_numpy(k), to_numpy(gate)

    def ring(self) -> Array:
        """Copies the ring from the device.

        Returns:
            `[max_slots, 2, KPOOL, HEAD_DIM]` float32 that holds bfloat16 values.
        """
        return to_numpy(self._tail)

    def _put(self, values: Array, dtype: DType) -> Buffer:
        return to_buffer(values, dtype, self._device)


def _weight_types(device: DeviceRef) -> list[TensorType]:
    return [
        TensorType(DType.float32, (VOCABULARY, EMBEDDING), device),
        TensorType(DType.float32, (EMBEDDING, HEAD_DIM), device),
        TensorType(DType.float32, (EMBEDDING, HEAD_DIM), device),
    ]


def _project(
    embedding: TensorValue,
    key_weight: TensorValue,
    gate_weight: TensorValue,
    token_ids: TensorValue,
) -> tuple[TensorValue, TensorValue]:
    tokens = ops.unsqueeze(ops.gather(embedding, token_ids, axis=0), -1)

    def project(weight: TensorValue) -> TensorValue:
        # Not a matmul: its kernel would dominate the time the graphs take to compile.
        product = ops.sum(tokens * weight, axis=-2)
        return ops.cast(ops.squeeze(product, -2), DType.bfloat16)

    return project(key_weight), project(gate_weight)


def _build_prefill(module: Module, ring: TailRing, device: DeviceRef) -> None:
    with Graph(
        "prefill",
        input_types=[
            ring.buffer_type(device),
            *_weight_types(device),
            TensorType(DType.int32, ("total_tokens",), device),
            TensorType(DType.uint32, ("offsets",), device),
            TensorType(DType.uint32, ("batch",), device),
            TensorType(DType.uint32, ("batch",), device),
        ],
        module=module,
    ) as graph:
        tail = graph.inputs[0].buffer
        *to_project, offsets, cache_lengths, slot_idx = (
            each.tensor for each in graph.inputs[1:]
        )
        k, gate = _project(*to_project)
        seed_tail(tail, k, gate, offsets, cache_lengths, slot_idx, kpool=KPOOL)
        graph.output(k, gate)


def _build_decode(module: Module, ring: TailRing, device: DeviceRef) -> None:
    with Graph(
        "decode",
        input_types=[
            ring.buffer_type(device),
            *_weight_types(device),
            TensorType(DType.int32, ("batch", 1), device),
            TensorType(DType.float32, (KPOOL, HEAD_DIM), device),
            TensorType(DType.int32, ("batch", 1), device),
            TensorType(DType.uint32, ("batch",), device),
        ],
        module=module,
    ) as graph:
        tail = graph.inputs[0].buffer
        *to_project, ape, positions, slot_idx = (
            each.tensor for each in graph.inputs[1:]
        )
        k, gate = _project(*to_project)
        pooled, closed_pool = tail_update(
            tail, k, gate, ape, positions, slot_idx, kpool=KPOOL
        )
        graph.output(pooled, closed_pool, k, gate)
