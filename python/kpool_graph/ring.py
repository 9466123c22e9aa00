"""The ring as a MAX graph sees it: its sizes, its type, its memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from max.driver import CPU, Buffer, Device
from max.dtype import DType
from max.graph import BufferType, DeviceRef

from ._validate import PLANES, RING_DTYPES, Problems
from .buffers import to_buffer


def min_ring_len(kpool: int, next_n: int, commits_at_least: int = 0) -> int:
    """Finds the shortest ring in which any rejection of a step needs no repair.

    A step appends positions `[p, p + next_n)` and commits the first `a` of them;
    decoding goes on at `q = p + a`. Until then the last rejected token, position
    `p + next_n - 1 = q + next_n - 1 - a`, may lie in an entry of the ring, and the
    oldest token still needed is the first live member, at the earliest
    `q - (kpool - 1)`. They are `kpool - 1 + next_n - 1 - a` positions apart, and
    two positions share an entry only if a multiple of `ring_len` parts them. So
    `ring_len >= kpool - 1 + next_n - a` keeps every live member: `kpool - 1 +
    next_n` if a step may commit nothing, `kpool + next_n - 2` if each commits at
    least one token. A pool needs `kpool` entries in any case, so the plain ring
    (`ring_len == kpool`) is safe for `next_n <= 2` of the second kind, and for
    `next_n <= 1` of the first.

    With `kpool == 1` no member waits in the ring and any ring is safe; the bound
    stays the same formula.

    Args:
        kpool: Tokens per pool.
        next_n: Tokens a step appends, drafts included.
        commits_at_least: Tokens of each step that are never rejected, 0 or more.

    Returns:
        Entries per slot, never below `kpool`.

    Raises:
        OperandError: If a size is not possible.
    """
    problems = Problems("min_ring_len")
    problems.require_at_least("kpool", kpool, 1)
    problems.require_at_least("next_n", next_n, 1)
    problems.require_at_least("commits_at_least", commits_at_least, 0)
    problems.raise_if_any()
    return max(kpool, kpool - 1 + next_n - commits_at_least)


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
        ring_len: Entries per slot, at least `kpool + speculative_tokens`, and just
            that if not given.
        speculative_tokens: Drafts per step. A step appends `1 + speculative_tokens`
            tokens (the last sampled one, then the drafts), and any of them, all
            included, may be rejected without repair:
            `min_ring_len(kpool, 1 + speculative_tokens)`. With 0 the ring is the
            plain one of `kpool` entries, which survives the rejection of one token.
        poison: Debug mode: a ring starts as NaN, and a `SlotPool` fills a slot with
            it when it is claimed, so that a read of what was never stashed shows in
            the output.

    Raises:
        OperandError: If a size or the dtype is not one of these.
    """

    max_slots: int
    kpool: int
    head_dim: int
    dtype: DType = DType.bfloat16
    ring_len: int = 0
    speculative_tokens: int = field(default=0, kw_only=True)
    poison: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        safe = self.kpool + self.speculative_tokens
        if self.ring_len == 0:
            object.__setattr__(self, "ring_len", safe)
        problems = Problems("TailRing")
        problems.require_at_least("max_slots", self.max_slots, 1)
        problems.require_at_least("kpool", self.kpool, 1)
        problems.require_at_least("head_dim", self.head_dim, 1)
        problems.require_at_least("speculative_tokens", self.speculative_tokens, 0)
        problems.require_ring_len(self.ring_len, self.kpool)
        if self.kpool <= self.ring_len < safe:
            problems.add(
                f"ring_len ({self.ring_len}) must be at least kpool +"
                f" speculative_tokens ({safe}), or be left out"
            )
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
        """Allocates a ring, zero-filled, or filled with NaN if `poison`.

        Keep the buffer and pass it to every execution: it is what the ops
        remember requests by. A slot needs no clearing between owners. Where something
        else allocates it, the fill must have ended before the first step: that of
        `Buffer.zeros` has after `device.synchronize()`.

        Args:
            device: Where the graph runs; the CPU if not given.

        Returns:
            The buffer.
        """
        if self.poison:
            return to_buffer(np.full(self.shape, np.nan), self.dtype, device)
        buffer = Buffer.zeros(self.shape, self.dtype, device or CPU())
        # The fill is queued, on the CPU too, and a graph does not wait for it: it would
        # wipe what the first step stashes.
        buffer.device.synchronize()
        return buffer

    def poison_slots(self, buffer: Buffer, slots: Iterable[int]) -> None:
        """Fills whole slots with NaN, on the device.

        A `SlotPool` of a ring with `poison=True` calls it for each slot it gives
        out; call it yourself where something else owns the slots.

        Args:
            buffer: `[max_slots, 2, ring_len, head_dim]`, or several stacked as
                `[..., max_slots, 2, ring_len, head_dim]`; updated in place.
            slots: Slots, each in every ring of the stack.

        Raises:
            OperandError: If the buffer is not this ring's, or a slot is outside it.
        """
        slots = list(slots)
        problems = Problems("poison_slots")
        if buffer.dtype != self.dtype or tuple(buffer.shape)[-4:] != self.shape:
            problems.add(
                f"buffer must be {self.dtype.name} {list(self.shape)}, or several"
                f" stacked, got {buffer.dtype.name} {list(buffer.shape)}"
            )
        for slot in slots:
            if not 0 <= slot < self.max_slots:
                problems.add(
                    f"slots must be below max_slots ({self.max_slots}), got {slot}"
                )
        problems.raise_if_any()

        size = math.prod(self.shape[1:])
        nan = to_buffer(np.full(size, np.nan), self.dtype, buffer.device)
        rows = math.prod(buffer.shape) // size
        flat = buffer.view(self.dtype, (rows, size))
        for slot in slots:
            for row in range(slot, rows, self.max_slots):
                flat[row, :].inplace_copy_from(nan)
        # The copies are queued, on the CPU too, where graphs do not wait for them.
        buffer.device.synchronize()
