"""Decode steps: which tokens each row of a batch brings, and where they belong."""

from layout import TileTensor

from .vectors import ReadPointer, load, readable


@fieldwise_init
struct DecodeStep(TrivialRegisterPassable):
    """What one batch row does in this call, read off its positions."""

    var slot: Int
    """Ring slot."""
    var first_token: Int
    """Index in the row of its first real token."""
    var first_position: Int
    """Absolute position of that token."""
    var count: Int
    """Real tokens."""
    var gapless: Bool
    """Whether the real tokens stand side by side in the row."""
    var misplaced_token: Int
    """Index of the first token that breaks the sequence, or -1."""

    @inline(.always)
    def is_sound(self, max_slots: Int) -> Bool:
        """Whether the row may touch the ring. A GPU skips a row that may not.

        Args:
            max_slots: Slots of the ring.

        Returns:
            True if the row has real tokens, a slot inside the ring, and
            consecutive positions.
        """
        return (
            self.count > 0
            and self.slot < max_slots
            and self.misplaced_token < 0
        )


struct DecodeRows[next_n: Int](TrivialRegisterPassable):
    """Dense `positions[rows, next_n]` and `slot_idx[rows]`.

    Parameters:
        next_n: Tokens appended per row.
    """

    var positions: ReadPointer[DType.int32]
    """Absolute positions; negative is padding."""
    var slot_idx: ReadPointer[DType.uint32]
    """Ring slots."""

    @inline(.always)
    def __init__(
        out self,
        positions: TileTensor[mut=False, .int32, address_space=.GENERIC, ...],
        slot_idx: TileTensor[mut=False, .uint32, address_space=.GENERIC, ...],
    ):
        """Takes the operands.

        Args:
            positions: Absolute positions `[rows, next_n]`.
            slot_idx: Ring slots `[rows]`.
        """
        self.positions = readable(positions)
        self.slot_idx = readable(slot_idx)

    @inline(.always)
    def position(self, row: Int, token: Int) -> Int:
        """Reads one position.

        Args:
            row: Batch row.
            token: Index of the token in the row.

        Returns:
            The position, negative for padding.
        """
        return Int(load[1](self.positions, row * Self.next_n + token))

    @inline(.always)
    def plan(self, row: Int) -> DecodeStep:
        """Reads a row's positions and slot.

        Args:
            row: Batch row.

        Returns:
            What the row does.
        """
        var step = DecodeStep(
            slot=Int(load[1](self.slot_idx, row)),
            first_token=0,
            first_position=0,
            count=0,
            gapless=True,
            misplaced_token=-1,
        )
        # Together, so that no read waits for what another one finds.
        var positions = Array[Int, Self.next_n](fill=0)
        comptime for token in range(Self.next_n):
            positions[token] = self.position(row, token)
        comptime for token in range(Self.next_n):
            var position = positions[token]
            if position >= 0:
                if step.count == 0:
                    step.first_token = token
                    step.first_position = position
                elif (
                    position != step.first_position + step.count
                    and step.misplaced_token < 0
                ):
                    step.misplaced_token = token
                step.gapless &= token == step.first_token + step.count
                step.count += 1
        return step
