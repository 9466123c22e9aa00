"""Gathers a pool's members from where they are, and pools them."""

from .pooling import pool_members
from .ragged import Chunk
from .ring import GATE_PLANE, KEY_PLANE, TailRing
from .tokens import TokenRows
from .vectors import ReadPointer, load


@inline(.always)
def pool_from_rows[
    dtype: DType, head_dim: Int, //, width: Int, kpool: Int
](
    tokens: TokenRows[dtype, head_dim],
    ape: ReadPointer[DType.float32],
    first_row: Int,
    channel: Int,
) -> SIMD[dtype, width]:
    """Pools members that all arrive in this call, side by side.

    Parameters:
        dtype: Element type of keys and gate scores.
        head_dim: Channels per key.
        width: Channels to pool.
        kpool: Tokens per pool.

    Args:
        tokens: This call's tokens.
        ape: Within-pool position embedding `[kpool, head_dim]`.
        first_row: Row of the oldest member.
        channel: First channel.

    Returns:
        The pooled key's channels.
    """
    var keys = Array[SIMD[dtype, width], kpool](fill=0)
    var scores = Array[SIMD[dtype, width], kpool](fill=0)
    var embeddings = Array[SIMD[.float32, width], kpool](fill=0)
    comptime for member in range(kpool):
        keys[member] = tokens.key[width](first_row + member, channel)
        scores[member] = tokens.score[width](first_row + member, channel)
        embeddings[member] = load[width](ape, member * head_dim + channel)
    return pool_members(keys, scores, embeddings)


@inline(.always)
def pool_from_ring[
    dtype: DType, head_dim: Int, ring_len: Int, //, width: Int, kpool: Int
](
    tail: TailRing[dtype, head_dim, ring_len],
    slot: Int,
    tokens: TokenRows[dtype, head_dim],
    ape: ReadPointer[DType.float32],
    pool: Int,
    first_position: Int,
    rows: Array[Int, kpool],
    channel: Int,
) -> SIMD[dtype, width]:
    """Pools members of which the earlier ones came on earlier calls.

    What this call brings is read from its own rows, so the ring may be read
    before any of it is stashed, and must be: a stash may take a member's entry.

    Parameters:
        dtype: Element type of keys and gate scores.
        head_dim: Channels per key.
        ring_len: Entries per slot and plane.
        width: Channels to pool.
        kpool: Tokens per pool.

    Args:
        tail: The ring.
        slot: The request's slot.
        tokens: This call's tokens.
        ape: Within-pool position embedding `[kpool, head_dim]`.
        pool: Pool id.
        first_position: First position that this call brings.
        rows: The members' rows, oldest first; not read where the ring is.
        channel: First channel.

    Returns:
        The pooled key's channels.
    """
    var keys = Array[SIMD[dtype, width], kpool](fill=0)
    var scores = Array[SIMD[dtype, width], kpool](fill=0)
    var embeddings = Array[SIMD[.float32, width], kpool](fill=0)
    comptime for member in range(kpool):
        var position = pool * kpool + member
        if position < first_position:
            keys[member] = tail.load[width](slot, KEY_PLANE, position, channel)
            scores[member] = tail.load[width](
                slot, GATE_PLANE, position, channel
            )
        else:
            keys[member] = tokens.key[width](rows[member], channel)
            scores[member] = tokens.score[width](rows[member], channel)
        embeddings[member] = load[width](ape, member * head_dim + channel)
    return pool_members(keys, scores, embeddings)


@inline(.always)
def pool_pending[
    dtype: DType, head_dim: Int, ring_len: Int, //, width: Int, kpool: Int
](
    tail: TailRing[dtype, head_dim, ring_len],
    slot: Int,
    tokens: TokenRows[dtype, head_dim],
    ape: ReadPointer[DType.float32],
    chunk: Chunk,
    channel: Int,
) -> SIMD[dtype, width]:
    """Pools the first pool that a chunk completes, members in the ring included.

    Parameters:
        dtype: Element type of keys and gate scores.
        head_dim: Channels per key.
        ring_len: Entries per slot and plane.
        width: Channels to pool.
        kpool: Tokens per pool.

    Args:
        tail: The ring.
        slot: The request's slot.
        tokens: This call's tokens.
        ape: Within-pool position embedding `[kpool, head_dim]`.
        chunk: The request's chunk, which reaches the end of the pool.
        channel: First channel.

    Returns:
        The pooled key's channels.
    """
    var pool = chunk.first_position // kpool
    var rows = Array[Int, kpool](fill=0)
    comptime for member in range(kpool):
        rows[member] = chunk.row(pool * kpool + member)
    return pool_from_ring[width](
        tail,
        slot,
        tokens,
        ape,
        pool,
        chunk.first_position,
        rows,
        channel,
    )
