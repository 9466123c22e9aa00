"""`mo.mla.kpool.copy_slots`: whole slots to other slots, every read first."""

from std.math import gcd
from std.sys import size_of
from layout import TileTensor

from .checks import SlotOwners, check_slot
from .launch import KernelCall, block_threads
from .vectors import (
    ReadPointer,
    VECTOR_BYTES,
    WritePointer,
    load,
    readable,
    store,
    writable,
)


struct CopySlots[dtype: DType, slot_size: Int, into_ring: Bool](KernelCall):
    """One of a call's two passes, and the body that CPU and GPU both run.

    The first pass copies sources to scratch memory and the second one scratch
    memory to destinations: slots may be copied in a chain or in a circle, and
    every source is read before any destination is written.

    Parameters:
        dtype: Element type of the ring.
        slot_size: Elements per slot.
        into_ring: Whether this is the second pass.
    """

    comptime OP: StaticString = "copy_slots"
    """The op's name."""
    comptime BLOCK_THREADS = block_threads[1]()
    """The most threads a GPU block may have."""
    comptime WIDTH = gcd(
        Self.slot_size, VECTOR_BYTES // size_of[Scalar[Self.dtype]]()
    )
    """Elements copied at a time."""
    comptime VECTORS = Self.slot_size // Self.WIDTH
    """Vectors per slot."""

    var tail: WritePointer[Self.dtype]
    """The ring `[max_slots, slot_size]`."""
    var scratch: WritePointer[Self.dtype]
    """Scratch memory `[pairs, slot_size]`."""
    var src_slots: ReadPointer[DType.uint32]
    """Slots to copy from `[pairs]`."""
    var dst_slots: ReadPointer[DType.uint32]
    """Slots to copy to `[pairs]`."""
    var max_slots: Int
    """Slots in the ring."""
    var pairs: Int
    """Slots to copy."""

    @inline(.always)
    def __init__(
        out self,
        tail: WritePointer[Self.dtype],
        scratch: WritePointer[Self.dtype],
        src_slots: TileTensor[mut=False, .uint32, address_space=.GENERIC, ...],
        dst_slots: TileTensor[mut=False, .uint32, address_space=.GENERIC, ...],
        max_slots: Int,
    ):
        """Takes the op's operands, all dense.

        Args:
            tail: The ring `[max_slots, slot_size]`.
            scratch: Scratch memory `[pairs, slot_size]`.
            src_slots: Slots to copy from `[pairs]`.
            dst_slots: Slots to copy to `[pairs]`.
            max_slots: Slots in the ring.
        """
        self.tail = tail
        self.scratch = scratch
        self.src_slots = readable(src_slots)
        self.dst_slots = readable(dst_slots)
        self.max_slots = max_slots
        self.pairs = Int(src_slots.dim[0]())

    @inline(.always)
    def copy_vector(self, pair: Int, vector: Int):
        """The body: one vector of one slot. A pair outside the ring is skipped.

        Args:
            pair: Index of the pair.
            vector: Index of the vector in the slot.
        """
        var src = Int(load[1](self.src_slots, pair))
        var dst = Int(load[1](self.dst_slots, pair))
        if src >= self.max_slots or dst >= self.max_slots:
            return
        var channel = vector * Self.WIDTH
        var held = pair * Self.slot_size + channel
        comptime if Self.into_ring:
            store(
                self.tail,
                dst * Self.slot_size + channel,
                load[Self.WIDTH](self.scratch, held),
            )
        else:
            store(
                self.scratch,
                held,
                load[Self.WIDTH](self.tail, src * Self.slot_size + channel),
            )

    def check(self) raises:
        """Refuses bad pairs before anything is written.

        Raises:
            Error: If a slot is outside the ring, or a destination occurs twice.
        """
        comptime if Self.into_ring:
            # The first pass has looked at them.
            return
        var owners = SlotOwners(
            Self.OP, "dst_slots", "destination", self.max_slots
        )
        for pair in range(self.pairs):
            check_slot(
                Self.OP,
                "src_slots",
                pair,
                Int(load[1](self.src_slots, pair)),
                self.max_slots,
            )
            owners.claim(pair, Int(load[1](self.dst_slots, pair)))

    def tasks(self) -> Int:
        """Counts the units that CPU threads share: pairs.

        Returns:
            Tasks.
        """
        return self.pairs

    def elements_per_task(self) -> Int:
        """Weighs one pair.

        Returns:
            Elements that it reads.
        """
        return Self.slot_size

    def run_tasks(self, first: Int, last: Int):
        """Copies some slots on the CPU.

        Args:
            first: First pair.
            last: Pair after the last one.
        """
        for pair in range(first, last):
            for vector in range(Self.VECTORS):
                self.copy_vector(pair, vector)

    def threads(self) -> Int:
        """Counts the GPU threads that leave none idle.

        Returns:
            Threads.
        """
        return self.pairs * Self.VECTORS

    def run_thread(self, thread: Int, threads: Int):
        """Does one GPU thread's share: every `threads`-th vector.

        Args:
            thread: Index of the thread in the grid.
            threads: Threads in the grid.
        """
        for item in range(thread, self.threads(), threads):
            self.copy_vector(item // Self.VECTORS, item % Self.VECTORS)
