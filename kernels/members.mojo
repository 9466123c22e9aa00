"""Pools a pool's members from where they are."""

from std.math import gcd
from std.sys import is_gpu

from .lanes import Lanes, narrow, widen
from .pooling import (
    PoolGuard,
    mean_on_first,
    pool_lanes,
    pool_on_largest,
    weigh_on_first,
)
from .ragged import Chunk
from .ring import GATE_PLANE, KEY_PLANE, TailRing
from .tokens import TokenRows
from .vectors import ReadPointer, WritePointer, load, store

comptime _BLOCK = 128


trait PoolMembers:
    """The members of one pool, oldest first."""

    comptime dtype: DType
    """Element type of keys and gate scores."""
    comptime head_dim: Int
    """Channels per key."""
    comptime kpool: Int
    """Tokens per pool."""

    def key[
        width: Int
    ](self, member: Int, channel: Int) -> SIMD[Self.dtype, width]:
        """Reads `width` channels of a member's key.

        Parameters:
            width: Channels to read.

        Args:
            member: Index in the pool.
            channel: First channel.

        Returns:
            The channels.
        """
        ...

    def score[
        width: Int
    ](self, member: Int, channel: Int) -> SIMD[Self.dtype, width]:
        """Reads `width` channels of a member's gate scores.

        Parameters:
            width: Channels to read.

        Args:
            member: Index in the pool.
            channel: First channel.

        Returns:
            The channels.
        """
        ...


@fieldwise_init
struct WholePool[dtype_: DType, head_dim_: Int, kpool_: Int](PoolMembers):
    """Members that all arrive in this call, side by side.

    Parameters:
        dtype_: Element type of keys and gate scores.
        head_dim_: Channels per key.
        kpool_: Tokens per pool.
    """

    comptime dtype = Self.dtype_
    """Element type of keys and gate scores."""
    comptime head_dim = Self.head_dim_
    """Channels per key."""
    comptime kpool = Self.kpool_
    """Tokens per pool."""

    var tokens: TokenRows[Self.dtype, Self.head_dim]
    """This call's tokens."""
    var first_row: Int
    """Row of the oldest member."""

    @inline(.always)
    def key[
        width: Int
    ](self, member: Int, channel: Int) -> SIMD[Self.dtype, width]:
        """Reads `width` channels of a member's key.

        Parameters:
            width: Channels to read.

        Args:
            member: Index in the pool.
            channel: First channel.

        Returns:
            The channels.
        """
        return self.tokens.key[width](self.first_row + member, channel)

    @inline(.always)
    def score[
        width: Int
    ](self, member: Int, channel: Int) -> SIMD[Self.dtype, width]:
        """Reads `width` channels of a member's gate scores.

        Parameters:
            width: Channels to read.

        Args:
            member: Index in the pool.
            channel: First channel.

        Returns:
            The channels.
        """
        return self.tokens.score[width](self.first_row + member, channel)


struct PendingPool[dtype_: DType, head_dim_: Int, kpool_: Int](PoolMembers):
    """Members of which the earlier ones came on earlier calls.

    What this call brings is read from its own rows, so the ring may be read
    before any of it is stashed, and must be: a stash may take a member's entry.

    Parameters:
        dtype_: Element type of keys and gate scores.
        head_dim_: Channels per key.
        kpool_: Tokens per pool.
    """

    comptime dtype = Self.dtype_
    """Element type of keys and gate scores."""
    comptime head_dim = Self.head_dim_
    """Channels per key."""
    comptime kpool = Self.kpool_
    """Tokens per pool."""

    # Mutable because the ring is; see TailRing.
    var keys: Array[WritePointer[Self.dtype], Self.kpool]
    """Where each member's key is."""
    var scores: Array[WritePointer[Self.dtype], Self.kpool]
    """Where each member's gate scores are."""

    @inline(.always)
    def __init__[
        ring_len: Int, //, in_ring: Int
    ](
        out self,
        tail: TailRing[Self.dtype, Self.head_dim, ring_len],
        slot: Int,
        tokens: TokenRows[Self.dtype, Self.head_dim],
        pool: Int,
        first_position: Int,
        rows: Array[Int, Self.kpool],
    ):
        """Locates the members. The last one is this call's: it closes the pool.

        Parameters:
            ring_len: Entries per slot and plane.
            in_ring: How many of the oldest members are in the ring for certain.

        Args:
            tail: The ring.
            slot: The request's slot.
            tokens: This call's tokens.
            pool: Pool id.
            first_position: First position that this call brings.
            rows: The members' rows, oldest first; of no use where the ring is.
        """
        self.keys = Array[WritePointer[Self.dtype], Self.kpool](fill=tail.data)
        self.scores = Array[WritePointer[Self.dtype], Self.kpool](
            fill=tail.data
        )
        comptime for member in range(Self.kpool):
            var position = pool * Self.kpool + member
            # The constants spare a GPU a choice, and its mask, a member.
            if member < Self.kpool - 1 and (
                member < in_ring or position < first_position
            ):
                self.keys[member] = tail.entry(slot, KEY_PLANE, position)
                self.scores[member] = tail.entry(slot, GATE_PLANE, position)
            else:
                self.keys[member] = tokens.key_row(rows[member])
                self.scores[member] = tokens.score_row(rows[member])

    @inline(.always)
    def __init__[
        ring_len: Int, //
    ](
        out self,
        tail: TailRing[Self.dtype, Self.head_dim, ring_len],
        slot: Int,
        tokens: TokenRows[Self.dtype, Self.head_dim],
        chunk: Chunk,
    ):
        """Locates the members of the first pool that a chunk completes.

        Parameters:
            ring_len: Entries per slot and plane.

        Args:
            tail: The ring.
            slot: The request's slot.
            tokens: This call's tokens.
            chunk: The request's chunk, which reaches the end of the pool.
        """
        var pool = chunk.first_position // Self.kpool
        var rows = Array[Int, Self.kpool](fill=0)
        comptime for member in range(Self.kpool):
            rows[member] = chunk.row(pool * Self.kpool + member)
        self = Self.__init__[in_ring=1](
            tail, slot, tokens, pool, chunk.first_position, rows
        )

    @inline(.always)
    def key[
        width: Int
    ](self, member: Int, channel: Int) -> SIMD[Self.dtype, width]:
        """Reads `width` channels of a member's key.

        Parameters:
            width: Channels to read.

        Args:
            member: Index in the pool.
            channel: First channel.

        Returns:
            The channels.
        """
        return load[width](self.keys[member], channel)

    @inline(.always)
    def score[
        width: Int
    ](self, member: Int, channel: Int) -> SIMD[Self.dtype, width]:
        """Reads `width` channels of a member's gate scores.

        Parameters:
            width: Channels to read.

        Args:
            member: Index in the pool.
            channel: First channel.

        Returns:
            The channels.
        """
        return load[width](self.scores[member], channel)


@inline(.always)
def _widen_members[
    Members: PoolMembers, //, lanes: Lanes
](
    members: Members,
    ape: ReadPointer[DType.float32],
    channel: Int,
    mut keys: Array[SIMD[.float32, lanes.width], Members.kpool],
    mut logits: Array[SIMD[.float32, lanes.width], Members.kpool],
):
    comptime for m in range(Members.kpool):
        keys[m] = widen[lanes](members.key[lanes.width](m, channel))
        logits[m] = widen[lanes](members.score[lanes.width](m, channel)) + load[
            lanes.width
        ](ape, m * Members.head_dim + channel)


@inline(.always)
def pool_channels[
    Members: PoolMembers, //, lanes: Lanes, channels: Int
](
    members: Members,
    ape: ReadPointer[DType.float32],
    pooled: WritePointer[Members.dtype],
    row: Int,
    first_channel: Int,
):
    """Pools `channels` channels of one pool, and stores them.

    With one member the weight is 1 whatever the gate holds, so the key itself is
    stored, NaN payload and all.

    Parameters:
        Members: How the members are found.
        lanes: Channels to pool at a time, and their order.
        channels: Channels to pool, a multiple of the lanes.

    Args:
        members: The members.
        ape: Within-pool position embedding `[kpool, head_dim]`, in that order.
        pooled: Output `[rows, head_dim]`.
        row: Output row.
        first_channel: First channel.
    """
    comptime dtype = Members.dtype
    comptime WIDTH = lanes.width
    comptime Values = Array[SIMD[DType.float32, WIDTH], Members.kpool]
    var target = row * Members.head_dim
    comptime if Members.kpool == 1:
        for vector in range(channels // WIDTH):
            var channel = first_channel + vector * WIDTH
            store(pooled, target + channel, members.key[WIDTH](0, channel))
        return
    var keys = Values(fill=0)
    var weights = Values(fill=0)
    comptime if is_gpu():
        # An exponential is one instruction there, and a second way to pool would
        # cost registers.
        _widen_members[lanes](members, ape, first_channel, keys, weights)
        store(
            pooled,
            target + first_channel,
            narrow[dtype, lanes](pool_on_largest(keys, weights)),
        )
        return
    var guard = PoolGuard[WIDTH]()
    # In two passes: in one, each vector's steps make a chain so long that few
    # of them fit a CPU's window, and it waits.
    comptime BLOCK = gcd(channels, _BLOCK)
    var held = Array[SIMD[.float32, WIDTH], Members.kpool * BLOCK // WIDTH](
        uninitialized=True
    )
    for block in range(first_channel, first_channel + channels, BLOCK):
        for vector in range(BLOCK // WIDTH):
            var channel = block + vector * WIDTH
            _widen_members[lanes](members, ape, channel, keys, weights)
            weigh_on_first(weights, guard)
            comptime for m in range(1, Members.kpool):
                held[vector * Members.kpool + m] = weights[m]
        for vector in range(BLOCK // WIDTH):
            var channel = block + vector * WIDTH
            comptime for m in range(Members.kpool):
                keys[m] = widen[lanes](members.key[WIDTH](m, channel))
                comptime if m > 0:
                    weights[m] = held[vector * Members.kpool + m]
            store(
                pooled,
                target + channel,
                narrow[dtype, lanes, may_be_nan=False](
                    mean_on_first(keys, weights, guard)
                ),
            )
    if not guard.sound().reduce_and():
        _pool_again[lanes, channels](members, ape, pooled, row, first_channel)


# Out of the common path's way.
@inline(.never)
def _pool_again[
    Members: PoolMembers, //, lanes: Lanes, channels: Int
](
    members: Members,
    ape: ReadPointer[DType.float32],
    pooled: WritePointer[Members.dtype],
    row: Int,
    first_channel: Int,
):
    """Pools channels of which the first logit does not suit all as the anchor.
    """
    comptime WIDTH = lanes.width
    comptime Values = Array[SIMD[DType.float32, WIDTH], Members.kpool]
    var keys = Values(fill=0)
    var logits = Values(fill=0)
    for vector in range(channels // WIDTH):
        var channel = first_channel + vector * WIDTH
        _widen_members[lanes](members, ape, channel, keys, logits)
        store(
            pooled,
            row * Members.head_dim + channel,
            narrow[Members.dtype, lanes](pool_lanes(keys, logits)),
        )
