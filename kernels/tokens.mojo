"""The tokens a call brings: their keys and gate scores."""

from layout import TileTensor

from .vectors import (
    ReadPointer,
    WritePointer,
    load,
    prefetch_channels,
    readable,
)

comptime PREFETCHED_POOLS = 2
"""How many pools ahead a CPU asks for tokens."""


struct TokenRows[dtype: DType, head_dim: Int](TrivialRegisterPassable):
    """Dense `k[rows, head_dim]` and `gate[rows, head_dim]`, one row a token.

    Parameters:
        dtype: Element type.
        head_dim: Channels per key.
    """

    var k: ReadPointer[Self.dtype]
    """The keys."""
    var gate: ReadPointer[Self.dtype]
    """The gate scores."""

    @inline(.always)
    def __init__(
        out self,
        k: TileTensor[mut=False, Self.dtype, address_space=.GENERIC, ...],
        gate: TileTensor[mut=False, Self.dtype, address_space=.GENERIC, ...],
    ):
        """Takes the operands, dense; leading axes count as one.

        Args:
            k: The keys.
            gate: The gate scores.
        """
        self.k = readable(k)
        self.gate = readable(gate)

    @inline(.always)
    def key[
        width: Int
    ](self, row: Int, channel: Int) -> SIMD[Self.dtype, width]:
        """Reads `width` channels of a token's key.

        Parameters:
            width: Channels to read.

        Args:
            row: The token's row.
            channel: First channel.

        Returns:
            The channels.
        """
        return load[width](self.k, row * Self.head_dim + channel)

    @inline(.always)
    def score[
        width: Int
    ](self, row: Int, channel: Int) -> SIMD[Self.dtype, width]:
        """Reads `width` channels of a token's gate scores.

        Parameters:
            width: Channels to read.

        Args:
            row: The token's row.
            channel: First channel.

        Returns:
            The channels.
        """
        return load[width](self.gate, row * Self.head_dim + channel)

    @inline(.always)
    def key_row(self, row: Int) -> WritePointer[Self.dtype]:
        """Finds a token's key, to be read beside entries of the ring.

        Args:
            row: The token's row.

        Returns:
            Its first channel; not to be written.
        """
        return (
            self.k.unsafe_offset(row * Self.head_dim)
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
        )

    @inline(.always)
    def score_row(self, row: Int) -> WritePointer[Self.dtype]:
        """Finds a token's gate scores, to be read beside entries of the ring.

        Args:
            row: The token's row.

        Returns:
            Its first channel; not to be written.
        """
        return (
            self.gate.unsafe_offset(row * Self.head_dim)
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
        )

    @inline(.always)
    def prefetch(self, first_row: Int, rows: Int):
        """Asks a CPU for tokens before they are needed.

        Args:
            first_row: Row of the first token; any, existing or not.
            rows: Tokens.
        """
        for row in range(first_row, first_row + rows):
            prefetch_channels[Self.head_dim](self.key_row(row))
            prefetch_channels[Self.head_dim](self.score_row(row))
