"""Vector loads and stores that are right for the target they compile for."""

from std.math import gcd
from std.sys import align_of, is_gpu, size_of
from std.sys.intrinsics import prefetch
from layout import TileTensor

comptime ReadPointer[dtype: DType] = Pointer[Scalar[dtype], ImmUntrackedOrigin]
"""Address of an operand that is only read.

Parameters:
    dtype: Element type.
"""
comptime WritePointer[dtype: DType] = Pointer[Scalar[dtype], MutUntrackedOrigin]
"""Address of an operand that is written.

Parameters:
    dtype: Element type.
"""

comptime VECTOR_BYTES = 16
"""Widest access of a GPU thread."""
comptime _GPU_POOL_REGISTERS = 64
comptime _CPU_COPY_BYTES = 128
comptime _CACHE_LINE = 64


def cpu_copy_width[dtype: DType, head_dim: Int]() -> Int:
    """Channels that a CPU copies at a time.

    Parameters:
        dtype: Element type of the ring.
        head_dim: Channels per key.

    Returns:
        A power of two that divides `head_dim`.
    """
    return gcd(head_dim, _CPU_COPY_BYTES // size_of[Scalar[dtype]]())


def gpu_vector_width[dtype: DType, head_dim: Int, kpool: Int]() -> Int:
    """Channels per GPU thread: one 16-byte access where it fits.

    The members of a pool sit in registers while it closes, so the vector is
    halved until `kpool` of them stay within 64 registers.

    Parameters:
        dtype: Element type of the ring.
        head_dim: Channels per key.
        kpool: Tokens per pool.

    Returns:
        A power of two that divides `head_dim`.
    """
    var width = gcd(head_dim, VECTOR_BYTES // size_of[Scalar[dtype]]())
    while width > 1 and kpool * width > _GPU_POOL_REGISTERS:
        width //= 2
    return width


@inline(.always)
def readable[
    dtype: DType, //
](
    tile: TileTensor[mut=False, dtype, address_space=.GENERIC, ...]
) -> ReadPointer[dtype]:
    """Takes the address of an operand that is only read.

    Parameters:
        dtype: Element type.

    Args:
        tile: The operand, dense. It must outlive the pointer.

    Returns:
        The address of its first element.
    """
    return tile.ptr.unsafe_origin_cast[ImmUntrackedOrigin]()


@inline(.always)
def writable[
    dtype: DType, //
](
    tile: TileTensor[mut=True, dtype, address_space=.GENERIC, ...]
) -> WritePointer[dtype]:
    """Takes the address of an operand that is written.

    Parameters:
        dtype: Element type.

    Args:
        tile: The operand, dense. It must outlive the pointer.

    Returns:
        The address of its first element.
    """
    return tile.ptr.unsafe_origin_cast[MutUntrackedOrigin]()


@inline(.always)
def _alignment[dtype: DType, width: Int]() -> Int:
    # A GPU splits a vector access into element accesses unless alignment is
    # promised. On a CPU the caller may pass any NumPy view.
    comptime if is_gpu():
        return min(width * size_of[Scalar[dtype]](), VECTOR_BYTES)
    else:
        return align_of[Scalar[dtype]]()


@inline(.always)
def load[
    dtype: DType, origin: Origin, //, width: Int
](data: Pointer[Scalar[dtype], origin], offset: Int) -> SIMD[dtype, width]:
    """Loads `width` consecutive elements.

    On a GPU the address must be a multiple of the vector's size, up to 16
    bytes. A float32 vector wider than that is read in 16-byte pieces.

    Parameters:
        dtype: Element type.
        origin: Origin of `data`.
        width: Elements to load, a power of two.

    Args:
        data: Base address.
        offset: First element, in elements from `data`.

    Returns:
        The elements.
    """
    comptime piece = VECTOR_BYTES // size_of[Scalar[dtype]]()
    comptime if is_gpu() and width > piece:
        var value = SIMD[dtype, width]()
        comptime for i in range(width // piece):
            value = value.insert[offset=i * piece](
                load[piece](data, offset + i * piece)
            )
        return value
    else:
        return data.unsafe_load[
            width=width, alignment=_alignment[dtype, width]()
        ](offset)


@inline(.always)
def store[
    dtype: DType, width: Int, //
](data: WritePointer[dtype], offset: Int, value: SIMD[dtype, width]):
    """Stores `width` consecutive elements; the address rule is `load`'s.

    Parameters:
        dtype: Element type.
        width: Elements to store, a power of two.

    Args:
        data: Base address.
        offset: First element, in elements from `data`.
        value: The elements.
    """
    data.unsafe_store[width=width, alignment=_alignment[dtype, width]()](
        offset, value
    )


@inline(.always)
def store_zero[
    dtype: DType, //, width: Int, channels: Int
](data: WritePointer[dtype], offset: Int):
    """Stores zeros; the address rule is `load`'s.

    Parameters:
        dtype: Element type.
        width: Elements to store at a time, a power of two.
        channels: Elements to store, a multiple of `width`.

    Args:
        data: Base address.
        offset: First element, in elements from `data`.
    """
    for vector in range(channels // width):
        store(data, offset + vector * width, SIMD[dtype, width](0))


@inline(.always)
def prefetch_channels[
    dtype: DType, mut: Bool, origin: Origin[mut=mut], //, channels: Int
](row: Pointer[Scalar[dtype], origin]):
    """Asks a CPU for memory before it is needed.

    Parameters:
        dtype: Element type.
        mut: Whether the memory is mutable.
        origin: Origin of the pointer.
        channels: Channels to ask for.

    Args:
        row: The first of them; any address, valid or not.
    """
    for channel in range(
        0, channels, max(_CACHE_LINE // size_of[Scalar[dtype]](), 1)
    ):
        prefetch(row.unsafe_offset(channel))
