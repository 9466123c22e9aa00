"""Device graphs of launches: one launch after another, over rotating operands."""

from std.math import ceildiv

from copies import Copies, DTYPE
from kernels.launch import KernelCall, _kernel
from max.gpu.host import (
    DeviceContext,
    DeviceGraph,
    DeviceGraphBuilder,
    DeviceGraphNode,
)

comptime _EMPTY_THREADS = 128


trait Work:
    """What a provider does once per launch."""

    def record[
        scope: ImmOrigin
    ](
        self,
        mut builder: DeviceGraphBuilder[scope],
        copy: Int,
        var after: List[DeviceGraphNode[scope]],
    ) raises -> DeviceGraphNode[scope]:
        """Adds the work on one copy of the operands to a graph.

        Parameters:
            scope: Where the graph is being built.

        Args:
            builder: The graph.
            copy: The copy.
            after: What must have ended before.

        Returns:
            The node that ends last.
        """
        ...


struct OurWork[Call: KernelCall](Work):
    """A kernel of this package, launched as an op launches it."""

    var calls: List[Self.Call]
    """The call on each copy."""

    def __init__(out self, var calls: List[Self.Call]):
        self.calls = calls^

    def record[
        scope: ImmOrigin
    ](
        self,
        mut builder: DeviceGraphBuilder[scope],
        copy: Int,
        var after: List[DeviceGraphNode[scope]],
    ) raises -> DeviceGraphNode[scope]:
        return builder.add_function[_kernel[Self.Call]](
            self.calls[copy],
            grid_dim=ceildiv(
                self.calls[copy].threads(), Self.Call.BLOCK_THREADS
            ),
            block_dim=Self.Call.BLOCK_THREADS,
            dependencies=after^,
        )


def _nothing():
    pass


@fieldwise_init
struct EmptyLaunch(Work):
    """The yardstick of small steps: a kernel that does nothing."""

    def record[
        scope: ImmOrigin
    ](
        self,
        mut builder: DeviceGraphBuilder[scope],
        copy: Int,
        var after: List[DeviceGraphNode[scope]],
    ) raises -> DeviceGraphNode[scope]:
        return builder.add_function[_nothing](
            grid_dim=1, block_dim=_EMPTY_THREADS, dependencies=after^
        )


struct DeviceCopy(Work):
    """The yardstick of large steps: a copy that moves as many bytes."""

    var source: Copies[DTYPE]
    """What is copied."""
    var target: Copies[DTYPE]
    """Where to."""

    def __init__(out self, ctx: DeviceContext, bytes: Int, copies: Int) raises:
        """Takes memory for copies that read half of `bytes` and write half."""
        # Two bytes an element, and each is read and written.
        var elements = max(bytes // 4, 1)
        var zeros = List[Scalar[DTYPE]](length=elements, fill=0)
        self.source = Copies[DTYPE](ctx, zeros.copy(), copies)
        self.target = Copies[DTYPE](ctx, zeros^, copies)

    def record[
        scope: ImmOrigin
    ](
        self,
        mut builder: DeviceGraphBuilder[scope],
        copy: Int,
        var after: List[DeviceGraphNode[scope]],
    ) raises -> DeviceGraphNode[scope]:
        return builder.add_copy(
            self.target.part(copy),
            self.source.part(copy),
            dependencies=after^,
        )


def graph_of[
    W: Work
](
    ctx: DeviceContext, work: W, launches: Int, copies: Int
) raises -> DeviceGraph:
    """Chains launches, each on the next copy of the operands.

    Parameters:
        W: The provider's work.

    Args:
        ctx: The device.
        work: The work.
        launches: Launches in the graph.
        copies: Copies of the operands.

    Returns:
        The graph.
    """

    def build(mut builder: DeviceGraphBuilder) raises {imm}:
        var last = work.record(builder, 0, [])
        for launch in range(1, launches):
            last = work.record(builder, launch % copies, [last])

    return DeviceGraph.create(ctx, build)
