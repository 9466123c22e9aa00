"""Run-time checks: the only place that words their errors."""

from std.utils.index import IndexList

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


struct SlotOwners(Movable):
    """Finds ring slots that a batch must not touch: outside, or shared."""

    var op: StaticString
    """Name of the op, for its errors."""
    var max_slots: Int
    """Slots in the ring."""
    var taken: List[UInt64]
    """One bit a slot."""

    def __init__(out self, op: StaticString, max_slots: Int):
        """Starts with no slot taken.

        Args:
            op: Name of the op, for its errors.
            max_slots: Slots in the ring.
        """
        self.op = op
        self.max_slots = max_slots
        self.taken = List[UInt64](
            length=max_slots // _BITS_PER_WORD + 1, fill=0
        )

    def claim(mut self, row: Int, slot: Int) raises:
        """Takes a slot for a batch row that has real tokens.

        Args:
            row: Batch row.
            slot: Its slot.

        Raises:
            Error: If the slot is outside the ring or an earlier row's.
        """
        if slot >= self.max_slots:
            raise Error(
                self.op,
                ": slot_idx[",
                row,
                "] must be below max_slots (",
                self.max_slots,
                "), got ",
                slot,
            )
        var bit = UInt64(1) << UInt64(slot % _BITS_PER_WORD)
        if self.taken[slot // _BITS_PER_WORD] & bit:
            raise Error(
                self.op,
                ": slot_idx[",
                row,
                "] must differ from every other",
                " row's with real tokens, got ",
                slot,
                " a second time",
            )
        self.taken[slot // _BITS_PER_WORD] |= bit
