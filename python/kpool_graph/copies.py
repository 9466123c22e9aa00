"""Graph builder of the op that moves whole slots."""

from __future__ import annotations

from max.dtype import DType
from max.graph import BufferValue, TensorValue, ops

from ._library import load_kernels
from ._validate import Problems


def copy_slots(
    tail: BufferValue, src_slots: TensorValue, dst_slots: TensorValue
) -> None:
    """Copies whole ring slots on the device: `tail[dst[i]] = tail[src[i]]`.

    As if every read came before every write, so slots may be copied in a chain or
    in a circle. For forks of a request, checkpoints of a prefix, or a move to
    another slot. Axes before the slots are flattened into them: in a ring stacked
    as `[layers, max_slots, 2, ring_len, head_dim]`, slot `s` of layer `l` is
    `l * max_slots + s`.

    Args:
        tail: `[max_slots, 2, ring_len, head_dim]`, or several stacked; updated in
            place.
        src_slots: `[pairs]` uint32, slots to copy from; one may occur twice.
        dst_slots: `[pairs]` uint32, slots to copy to, each at most once.

    Raises:
        OperandError: If an operand's kind, dtype, rank, size or device is wrong.
        KernelBuildError: If the kernels cannot be compiled.

    When the graph runs on a CPU, a slot outside the ring or a destination that
    occurs twice is an error raised before anything is written. On a GPU a pair
    with a slot outside the ring is skipped.
    """
    problems = Problems("copy_slots")
    problems.require_ring(tail)
    problems.require_tensor("src_slots", src_slots, ("pairs",), DType.uint32)
    problems.require_tensor("dst_slots", dst_slots, ("pairs",), DType.uint32)
    problems.raise_if_any()

    load_kernels()
    ops.inplace_custom(
        "mo.mla.kpool.copy_slots",
        device=tail.device,
        values=[tail, src_slots, dst_slots],
    )
