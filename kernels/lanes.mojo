"""Stored channels as float32 lanes, in the order that is cheapest to pool.

A lane holds one channel. On a CPU two bfloat16 channels are one 32-bit word, and
become lanes by a shift and a mask: the even channels of a vector come first, then
the odd ones. Otherwise lanes are in the channels' order.
"""

from std.math import gcd
from std.memory import bitcast
from std.sys import is_gpu, simd_width_of

from .vectors import ReadPointer, gpu_vector_width, load


@fieldwise_init
struct Lanes(TrivialRegisterPassable):
    """How many channels become lanes at a time, and in which order."""

    var width: Int
    """Channels, a power of two."""
    var in_pairs: Bool
    """Whether the even channels' lanes come before the odd ones'."""


def cpu_lanes[dtype: DType, head_dim: Int]() -> Lanes:
    """Fills a CPU's registers: one of lanes, or two of pairs.

    Parameters:
        dtype: Element type of the ring.
        head_dim: Channels per key.

    Returns:
        A width that divides `head_dim`, and the order.
    """
    comptime LANES = simd_width_of[DType.float32]()
    comptime if dtype == DType.bfloat16:
        comptime WIDTH = gcd(head_dim, 2 * LANES)
        return Lanes(WIDTH, WIDTH > 1)
    else:
        return Lanes(gcd(head_dim, LANES), False)


def gpu_lanes[dtype: DType, head_dim: Int, kpool: Int]() -> Lanes:
    """Fills a GPU thread's registers.

    Parameters:
        dtype: Element type of the ring.
        head_dim: Channels per key.
        kpool: Tokens per pool.

    Returns:
        A width that divides `head_dim`, and the order.
    """
    return Lanes(gpu_vector_width[dtype, head_dim, kpool](), False)


@inline(.always)
def widen[
    dtype: DType, //, lanes: Lanes
](stored: SIMD[dtype, lanes.width]) -> SIMD[.float32, lanes.width]:
    """Turns stored channels into lanes.

    Parameters:
        dtype: Element type.
        lanes: Their number and order.

    Args:
        stored: The channels.

    Returns:
        Their lanes.
    """
    comptime if lanes.in_pairs:
        comptime HALF = lanes.width // 2
        var words = bitcast[DType.uint32, HALF](stored)
        var even = bitcast[DType.float32, HALF](words << 16)
        var odd = bitcast[DType.float32, HALF](words & 0xFFFF_0000)
        return rebind[SIMD[DType.float32, lanes.width]](even.join(odd))
    else:
        return stored.cast[DType.float32]()


@inline(.always)
def narrow[
    dtype: DType, lanes: Lanes, *, may_be_nan: Bool = True
](values: SIMD[.float32, lanes.width]) -> SIMD[dtype, lanes.width]:
    """Rounds lanes to nearest even, and turns them into channels to store.

    Parameters:
        dtype: Element type to store.
        lanes: Their number and order.
        may_be_nan: Whether a lane may be NaN.

    Args:
        values: The lanes.

    Returns:
        The channels.
    """
    comptime if dtype == DType.bfloat16 and not is_gpu():
        # x86's own conversion flushes subnormal numbers whatever the mode.
        var bits = bitcast[DType.uint32, lanes.width](values)
        var rounded = bits + 0x7FFF + ((bits >> 16) & 1)
        comptime if may_be_nan:
            # Rounding could carry a NaN's payload into its sign.
            rounded = values.eq(values).select(rounded, bits | 0x0040_0000)
        comptime if lanes.in_pairs:
            comptime HALF = lanes.width // 2
            var even = rounded.slice[HALF]()
            var odd = rounded.slice[HALF, offset=HALF]()
            return bitcast[dtype, lanes.width](
                (even >> 16) | (odd & 0xFFFF_0000)
            )
        else:
            return bitcast[dtype, lanes.width](
                (rounded >> 16).cast[DType.uint16]()
            )
    else:
        return values.cast[dtype]()


struct LaneTable[lanes: Lanes](Movable):
    """A float32 table in the order of the lanes that it meets.

    Parameters:
        lanes: Their number and order.
    """

    var copied: List[Float32]
    """The table in the lanes' order, where that is not the channels'."""
    var data: ReadPointer[DType.float32]
    """The table to read."""

    def __init__(out self, table: ReadPointer[DType.float32], count: Int):
        """Reorders a table, if need be.

        Args:
            table: The table. It must outlive this.
            count: Its elements, a multiple of the lanes' number.
        """
        self.copied = List[Float32]()
        self.data = table
        comptime if Self.lanes.in_pairs:
            self.copied.reserve(count)
            for first in range(0, count, Self.lanes.width):
                var pairs = load[Self.lanes.width](table, first).deinterleave()
                self.copied.extend(pairs[0])
                self.copied.extend(pairs[1])
            self.data = (
                self.copied.unsafe_ptr()
                .as_imm()
                .unsafe_origin_cast[ImmUntrackedOrigin]()
            )
