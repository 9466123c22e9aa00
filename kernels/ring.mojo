"""The ring: the only place that turns a position into an address."""

from layout import TensorLayout, TileTensor

from .vectors import WritePointer, load, store, writable

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
    def offset(self, slot: Int, plane: Int, position: Int, channel: Int) -> Int:
        """Locates one channel of one entry, in elements from `data`.

        Args:
            slot: The request's slot, below `max_slots`.
            plane: `KEY_PLANE` or `GATE_PLANE`.
            position: Absolute position of the token, not negative.
            channel: First channel wanted.

        Returns:
            The element's offset. 64-bit: a ring may pass 2**31 elements.
        """
        var entry = Int(UInt(position) % UInt(Self.ring_len))
        var row = (slot * PLANES + plane) * Self.ring_len + entry
        return row * Self.head_dim + channel

    @inline(.always)
    def load[
        width: Int
    ](self, slot: Int, plane: Int, position: Int, channel: Int) -> SIMD[
        Self.dtype, width
    ]:
        """Reads `width` channels of one entry.

        Parameters:
            width: Channels to read.

        Args:
            slot: The request's slot.
            plane: `KEY_PLANE` or `GATE_PLANE`.
            position: Absolute position of the token.
            channel: First channel wanted.

        Returns:
            The channels.
        """
        return load[width](
            self.data, self.offset(slot, plane, position, channel)
        )

    @inline(.always)
    def stash[
        width: Int, //
    ](
        self,
        slot: Int,
        position: Int,
        channel: Int,
        key: SIMD[Self.dtype, width],
        gate: SIMD[Self.dtype, width],
    ):
        """Writes `width` channels of one token's key and gate score.

        Parameters:
            width: Channels to write.

        Args:
            slot: The request's slot.
            position: Absolute position of the token.
            channel: First channel to write.
            key: The token's key.
            gate: The token's gate score.
        """
        store(self.data, self.offset(slot, KEY_PLANE, position, channel), key)
        store(self.data, self.offset(slot, GATE_PLANE, position, channel), gate)
