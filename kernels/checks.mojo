"""Run-time checks: the only place that words their errors."""

from extensibility import InputTensor, _MutableInputTensor as MutableInputTensor
from std.utils.index import IndexList

from .ring import PLANES

comptime _BITS_PER_WORD = 64


def check_shape[
    rank: Int, //
](
    op: StaticString,
    operand: StaticString,
    shape: IndexList[rank],
    wanted: IndexList[rank],
) raises:
    """Refuses an operand whose sizes contradict the other operands'.

    Parameters:
        rank: Axes of the operand.

    Args:
        op: Name of the op.
        operand: Name of the operand.
        shape: Its sizes.
        wanted: The sizes that the op's other operands call for.

    Raises:
        Error: Naming the first axis that differs.
    """
    for axis in range(rank):
        if shape[axis] != wanted[axis]:
            raise Error(
                op,
                ": ",
                operand,
                ".shape[",
                axis,
                "] must be ",
                wanted[axis],
                ", got ",
                shape[axis],
            )


def check_dense[
    rank: Int, //
](
    op: StaticString,
    operand: StaticString,
    shape: IndexList[rank],
    strides: IndexList[rank],
) raises:
    """Refuses a strided view: the kernels address operands as dense.

    Parameters:
        rank: Axes of the operand.

    Args:
        op: Name of the op.
        operand: Name of the operand.
        shape: Its sizes.
        strides: Its strides, in elements.

    Raises:
        Error: Naming the first axis whose stride skips or repeats elements.
    """
    var dense = 1
    comptime for i in range(rank):
        comptime axis = rank - 1 - i
        if shape[axis] > 1 and strides[axis] != dense:
            raise Error(
                op,
                ": ",
                operand,
                " must be dense: its stride along axis ",
                axis,
                " must be ",
                dense,
                ", got ",
                strides[axis],
            )
        dense *= shape[axis]


def check_slot(
    op: StaticString,
    operand: StaticString,
    row: Int,
    slot: Int,
    max_slots: Int,
) raises:
    """Refuses a slot outside the ring.

    Args:
        op: Name of the op.
        operand: Name of the operand that holds the slot.
        row: Its index there.
        slot: The slot.
        max_slots: Slots in the ring.

    Raises:
        Error: If the slot is outside the ring.
    """
    if slot >= max_slots:
        raise Error(
            op,
            ": ",
            operand,
            "[",
            row,
            "] must be below max_slots (",
            max_slots,
            "), got ",
            slot,
        )


def check_ring[
    head_dim: Int
](op: StaticString, tail: MutableInputTensor[rank=4, ...]) raises:
    """Refuses a ring whose sizes contradict the op's, or that is not dense.

    Parameters:
        head_dim: Channels per key.

    Args:
        op: Name of the op.
        tail: The ring `[max_slots, 2, ring_len, head_dim]`.

    Raises:
        Error: Naming the first axis that is wrong.
    """
    check_shape(
        op,
        "tail",
        tail.shape(),
        IndexList[4](tail.dim_size(0), PLANES, tail.dim_size(2), head_dim),
    )
    check_dense(op, "tail", tail.shape(), tail.strides())


def check_batch(
    op: StaticString,
    input_row_offsets: InputTensor[dtype=.uint32, rank=1, ...],
    cache_lengths: InputTensor[dtype=.uint32, rank=1, ...],
    batch: Int,
) raises:
    """Refuses the tables of a ragged batch if their sizes contradict the batch.

    Args:
        op: Name of the op.
        input_row_offsets: Token row offsets `[batch + 1]`.
        cache_lengths: Tokens cached before this call `[batch]`.
        batch: Requests in the batch.

    Raises:
        Error: Naming the table.
    """
    check_shape(
        op,
        "input_row_offsets",
        input_row_offsets.shape(),
        IndexList[1](batch + 1),
    )
    check_shape(op, "cache_lengths", cache_lengths.shape(), IndexList[1](batch))


struct SlotOwners(Movable):
    """Finds ring slots that a call must not touch: outside, or named twice."""

    var op: StaticString
    """Name of the op, for its errors."""
    var operand: StaticString
    """Name of the operand that holds the slots, for its errors."""
    var others: StaticString
    """What a slot must differ from, for its errors."""
    var max_slots: Int
    """Slots in the ring."""
    var taken: List[UInt64]
    """One bit a slot."""

    def __init__(
        out self,
        op: StaticString,
        operand: StaticString,
        others: StaticString,
        max_slots: Int,
    ):
        """Starts with no slot taken.

        Args:
            op: Name of the op, for its errors.
            operand: Name of the operand that holds the slots.
            others: What a slot must differ from.
            max_slots: Slots in the ring.
        """
        self.op = op
        self.operand = operand
        self.others = others
        self.max_slots = max_slots
        self.taken = List[UInt64](
            length=max_slots // _BITS_PER_WORD + 1, fill=0
        )

    @inline(.always)
    def claim(mut self, row: Int, slot: Int) raises:
        """Takes a slot for a row that will touch it.

        Args:
            row: Index of the row.
            slot: Its slot.

        Raises:
            Error: If the slot is outside the ring or an earlier row's.
        """
        if slot < self.max_slots:
            var word = self.taken.unsafe_ptr().unsafe_offset(
                slot // _BITS_PER_WORD
            )
            var bit = UInt64(1) << UInt64(slot % _BITS_PER_WORD)
            var held = word[]
            word[] = held | bit
            if not held & bit:
                return
        self.refuse(row, slot)

    @inline(.never)
    def refuse(self, row: Int, slot: Int) raises:
        """Says what is wrong with a slot that a row may not touch.

        Args:
            row: Index of the row.
            slot: Its slot.

        Raises:
            Error: Always.
        """
        check_slot(self.op, self.operand, row, slot, self.max_slots)
        raise Error(
            self.op,
            ": ",
            self.operand,
            "[",
            row,
            "] must differ from every other ",
            self.others,
            ", got ",
            slot,
            " a second time",
        )
