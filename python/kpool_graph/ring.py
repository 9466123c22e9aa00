"""The ring as a MAX graph sees it: its sizes, its type, its memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from max.driver import CPU, Buffer, Device
from max.dtype import DType
from max.graph import BufferType, DeviceRef

from ._validate import PLANES, RING_DTYPES, Problems


@dataclass(frozen=True)
class TailRing:
    """Describes `tail[max_slots, 2, ring_len, head_dim]`.

    Axis 1 holds keys at 0 and gate scores at 1. A request owns one slot; its
    token at position `pos` lives in entry `pos % ring_len`.

    Attributes:
        max_slots: Slots: the most requests alive at once.
        kpool: Tokens per pool.
        head_dim: Channels per key.
        dtype: float32, float16 or bfloat16.
        ring_len: Entries per slot, at least `kpool`, and `kpool` if not given.

    Raises:
        OperandError: If a size or the dtype is not one of these.
    """

    max_slots: int
    kpool: int
    head_dim: int
    dtype: DType = DType.bfloat16
    ring_len: int = 0

    def __post_init__(self) -> None:
        if self.ring_len == 0:
            object.__setattr__(self, "ring_len", self.kpool)
        problems = Problems("TailRing")
        problems.require_at_least("max_slots", self.max_slots, 1)
        problems.require_at_least("kpool", self.kpool, 1)
        problems.require_at_least("head_dim", self.head_dim, 1)
        problems.require_ring_len(self.ring_len, self.kpool)
        problems.require_dtype("dtype", self.dtype, RING_DTYPES)
        problems.raise_if_any()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The buffer's shape, `(max_slots, 2, ring_len, head_dim)`."""
        return (self.max_slots, PLANES, self.ring_len, self.head_dim)

    @property
    def nbytes(self) -> int:
        """The buffer's size in bytes."""
        return math.prod(self.shape) * self.dtype.size_in_bytes

    def buffer_type(self, device: DeviceRef | None = None) -> BufferType:
        """Returns the graph input type of the ring.

        Args:
            device: Where the graph runs; the CPU if not given.

        Returns:
            The type, for `Graph(input_types=...)`.
        """
        return BufferType(self.dtype, self.shape, device or DeviceRef.CPU())

    def allocate(self, device: Device | None = None) -> Buffer:
        """Allocates a ring, zero-filled.

        Keep the buffer and pass it to every execution: it is what the ops
        remember requests by. A slot needs no clearing between owners.

        Args:
            device: Where the graph runs; the CPU if not given.

        Returns:
            The buffer.
        """
        return Buffer.zeros(self.shape, self.dtype, device or CPU())
