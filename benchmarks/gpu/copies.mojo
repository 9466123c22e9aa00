"""Device memory of a case: the same operands several times over, far apart."""

from std.random import random_float64

from in_tree_kernels import Layout1, Layout2, Layout3, Layout4
from kernels.vectors import WritePointer
from layout import TileTensor, row_major
from max.gpu.host import DeviceBuffer, DeviceContext

comptime DTYPE = DType.bfloat16
comptime Tile1[dtype: DType] = TileTensor[dtype, Layout1, MutUntrackedOrigin]
comptime Tile2[dtype: DType] = TileTensor[dtype, Layout2, MutUntrackedOrigin]
comptime Tile3[dtype: DType] = TileTensor[dtype, Layout3, MutUntrackedOrigin]
comptime Tile4[dtype: DType] = TileTensor[dtype, Layout4, MutUntrackedOrigin]
# Several times the largest L2 cache.
comptime ROTATED_BYTES = 256 << 20
comptime MAX_COPIES = 256
# Copies start where a 16-byte access may.
comptime _ALIGNMENT = 128


def copies_of(bytes: Int) -> Int:
    """Counts the copies of a case's operands that no cache holds together."""
    return max(1, min(MAX_COPIES, ROTATED_BYTES // max(bytes, 1)))


def noise[dtype: DType](count: Int, scale: Float64) -> List[Scalar[dtype]]:
    var values = List[Scalar[dtype]](capacity=max(count, 1))
    for _ in range(count):
        values.append(((random_float64() - 0.5) * scale).cast[dtype]())
    return values^


struct Copies[dtype: DType](Movable):
    """The same values `copies` times in device memory.

    Parameters:
        dtype: Element type.
    """

    var values: List[Scalar[Self.dtype]]
    """What each copy starts as."""
    var stride: Int
    """Elements from one copy to the next."""
    var buffer: DeviceBuffer[Self.dtype]
    """The copies."""

    def __init__(
        out self,
        ctx: DeviceContext,
        var values: List[Scalar[Self.dtype]],
        copies: Int,
    ) raises:
        self.stride = (len(values) + _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT
        self.values = values^
        self.buffer = ctx.enqueue_create_buffer[Self.dtype](
            self.stride * copies
        )
        self.reset(ctx)

    def copies(self) -> Int:
        return len(self.buffer) // self.stride

    def reset(self, ctx: DeviceContext) raises:
        """Gives every copy its first values again."""
        with self.part(0).map_to_host() as host:
            for i in range(len(self.values)):
                host[i] = self.values[i]
        for copy in range(1, self.copies()):
            ctx.enqueue_copy(self.part(copy), self.part(0))
        ctx.synchronize()

    def part(self, copy: Int) raises -> DeviceBuffer[Self.dtype]:
        return self.buffer.create_sub_buffer[Self.dtype](
            copy * self.stride, self.stride
        )

    def read(self, copy: Int) raises -> List[Scalar[Self.dtype]]:
        """Brings one copy back to the host."""
        var values = List[Scalar[Self.dtype]](capacity=len(self.values))
        with self.part(copy).map_to_host() as host:
            for i in range(len(self.values)):
                values.append(host[i])
        return values^

    def data(
        self, copy: Int
    ) -> Pointer[Scalar[Self.dtype], MutUntrackedOrigin]:
        return (
            self.buffer.unsafe_ptr()
            .unsafe_offset(copy * self.stride)
            .unsafe_mut_cast[True]()
            .unsafe_origin_cast[MutUntrackedOrigin]()
        )

    def tile(self, copy: Int, a: Int) -> Tile1[Self.dtype]:
        return Tile1[Self.dtype](self.data(copy), row_major(a))

    def tile(self, copy: Int, a: Int, b: Int) -> Tile2[Self.dtype]:
        return Tile2[Self.dtype](self.data(copy), row_major(a, b))

    def tile(self, copy: Int, a: Int, b: Int, c: Int) -> Tile3[Self.dtype]:
        return Tile3[Self.dtype](self.data(copy), row_major(a, b, c))

    def tile(
        self, copy: Int, a: Int, b: Int, c: Int, d: Int
    ) -> Tile4[Self.dtype]:
        return Tile4[Self.dtype](self.data(copy), row_major(a, b, c, d))
