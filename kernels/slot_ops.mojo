"""Registers the op on whole slots: unpack, check sizes, dispatch."""

import extensibility
from extensibility import (
    InputTensor,
    _MutableInputTensor as MutableInputTensor,
)
from std.utils.index import IndexList
from max.gpu.host import DeviceContext

from .checks import check_dense, check_shape
from .copy_slots import CopySlots
from .launch import launch
from .ring import slot_size_of
from .vectors import writable


@extensibility.register("mo.mla.kpool.copy_slots")
struct MLAKPoolCopySlots:
    """Registers `mo.mla.kpool.copy_slots` with the graph compiler."""

    @staticmethod
    def execute[
        dtype: DType,
        rank: Int,
        //,
        target: StaticString,
    ](
        tail: MutableInputTensor[dtype=dtype, rank=rank, ...],
        src_slots: InputTensor[dtype=.uint32, rank=1, ...],
        dst_slots: InputTensor[dtype=.uint32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        """Copies whole slots, as if every read came before every write.

        Parameters:
            dtype: Element type of the ring.
            rank: Axes of the ring; those before the last three count as slots.
            target: Device the op runs on.

        Args:
            tail: The ring `[max_slots, 2, ring_len, head_dim]`, or several
                stacked; updated in place.
            src_slots: Slots to copy from `[pairs]`.
            dst_slots: Slots to copy to `[pairs]`, each at most once.
            ctx: Device context.

        Raises:
            Error: If sizes disagree or the ring is not dense; on a CPU also if
                a slot is outside the ring or a destination occurs twice.
                Nothing is written then.
        """
        comptime OP = "copy_slots"
        var pairs = src_slots.dim_size(0)
        check_shape(OP, "dst_slots", dst_slots.shape(), IndexList[1](pairs))
        check_dense(OP, "tail", tail.shape(), tail.strides())
        if pairs == 0:
            return
        var max_slots = 1
        for axis in range(rank - 3):
            max_slots *= tail.dim_size(axis)
        var ring = tail.to_tile_tensor[.int64]()
        comptime SLOT_SIZE = slot_size_of[ring.LayoutType, rank]()
        var scratch = ctx.enqueue_create_buffer[dtype](pairs * SLOT_SIZE)
        comptime for into_ring in [False, True]:
            launch[target](
                CopySlots[dtype, SLOT_SIZE, into_ring](
                    writable(ring),
                    scratch.unsafe_ptr().unsafe_origin_cast[
                        MutUntrackedOrigin
                    ](),
                    src_slots.to_tile_tensor[.int64]().as_imm(),
                    dst_slots.to_tile_tensor[.int64]().as_imm(),
                    max_slots,
                ),
                ctx,
            )
        _ = scratch^
