"""The ring: the only place that turns a position into an address."""

from layout import TensorLayout, TileTensor

from .tokens import TokenRows
from .vectors import WritePointer, prefetch_channels, store, writable

comptime KEY_PLANE = 0
"""Index of the keys on axis 1."""
comptime GATE_PLANE = 1
"""Index of the gate scores on axis 1."""
comptime PLANES = 2
"""Planes of a slot."""


def ring_len_of[LayoutType: TensorLayout, kpool: Int]() -> Int:
    """Reads the entries per slot off a ring's static shape.

    Parameters:
        LayoutType: Layout of `tail[max_slots, 2, ring_len, head_dim]`.
        kpool: Tokens per pool.

    Returns:
        `ring_len`. Compilation fails if it is not static, or below `kpool`.
    """
    comptime ring_len = LayoutType.static_shape[2]
    comptime assert (
        ring_len >= kpool
    ), "tail: ring_len must be static and at least kpool"
    return ring_len


def slot_size_of[LayoutType: TensorLayout, rank: Int]() -> Int:
    """Reads the elements per slot off a ring's static shape.

    Parameters:
        LayoutType: Layout of `tail[..., 2, ring_len, head_dim]`.
        rank: Axes of the layout.

    Returns:
        The slot's elements. Compilation fails if they are not static.
    """
    comptime ring_len = LayoutType.static_shape[rank - 2]
    comptime head_dim = LayoutType.static_shape[rank - 1]
    comptime assert (
        ring_len > 0 and head_dim > 0
    ), "tail: ring_len and head_dim must be static"
    return PLANES * ring_len * head_dim


struct TailRing[dtype: DType, head_dim: Int, ring_len: Int](
    TrivialRegisterPassable
):
    """A dense `tail[max_slots, 2, ring_len, head_dim]` and its addressing.

    Parameters:
        dtype: Element type of keys and gate scores.
        head_dim: Channels per key.
        ring_len: Entries per slot and plane, at least `kpool`.
    """

    # Mutable even where a kernel only reads: a GPU serves immutable pointers
    # from a cache that is not coherent with this kernel's own stores.
    var data: WritePointer[Self.dtype]
    """The first element of slot 0."""
    var max_slots: Int
    """Slots in the ring."""

    @inline(.always)
    def __init__(
        out self,
        tail: TileTensor[mut=True, Self.dtype, address_space=.GENERIC, ...],
    ):
        """Takes the ring's buffer.

        Args:
            tail: The buffer, dense.
        """
        self.data = writable(tail)
        self.max_slots = Int(tail.dim[0]())

    @inline(.always)
    def _index(self, position: Int) -> Int:
        return Int(UInt(position) % UInt(Self.ring_len))

    @inline(.always)
    def _at(
        self, slot: Int, plane: Int, index: Int
    ) -> WritePointer[Self.dtype]:
        # 64-bit: a ring may pass 2**31 elements.
        var row = (slot * PLANES + plane) * Self.ring_len + index
        return self.data.unsafe_offset(row * Self.head_dim)

    @inline(.always)
    def entry(
        self, slot: Int, plane: Int, position: Int
    ) -> WritePointer[Self.dtype]:
        """Finds one entry.

        Args:
            slot: The request's slot, below `max_slots`.
            plane: `KEY_PLANE` or `GATE_PLANE`.
            position: Absolute position of the token, not negative.

        Returns:
            The entry's first channel.
        """
        return self._at(slot, plane, self._index(position))

    @inline(.always)
    def prefetch[
        kpool: Int
    ](self, slot: Int, first_position: Int, last_position: Int):
        """Asks a CPU for the entries that some tokens will read or take.

        Requests' slots are scattered, so no hardware looks ahead to the next one.

        Parameters:
            kpool: Tokens per pool.

        Args:
            slot: The request's slot; any, existing or not.
            first_position: Position of the first token.
            last_position: Position after the last token.
        """
        var oldest = first_position // kpool * kpool
        if last_position < oldest + kpool:
            # No pool closes, and so none is read.
            oldest = first_position
        for position in range(
            oldest, min(last_position, oldest + Self.ring_len)
        ):
            prefetch_channels[Self.head_dim](
                self.entry(slot, KEY_PLANE, position)
            )
            prefetch_channels[Self.head_dim](
                self.entry(slot, GATE_PLANE, position)
            )

    @inline(.always)
    def stash[
        width: Int, channels: Int
    ](
        self,
        slot: Int,
        position: Int,
        tokens: TokenRows[Self.dtype, Self.head_dim],
        row: Int,
        first_channel: Int,
        count: Int = 1,
    ):
        """Writes `channels` channels of tokens' keys and gate scores.

        Parameters:
            width: Channels to copy at a time.
            channels: Channels to copy, a multiple of `width`.

        Args:
            slot: The request's slot.
            position: Absolute position of the first token.
            tokens: This call's tokens.
            row: The first token's row.
            first_channel: First channel to copy.
            count: Tokens, side by side.
        """
        var index = self._index(position)
        for token in range(row, row + count):
            var key = self._at(slot, KEY_PLANE, index)
            var score = self._at(slot, GATE_PLANE, index)
            for vector in range(channels // width):
                var channel = first_channel + vector * width
                store(key, channel, tokens.key[width](token, channel))
                store(score, channel, tokens.score[width](token, channel))
            # A division a token would cost a GPU more than the copy.
            index = index + 1 if index + 1 < Self.ring_len else 0
