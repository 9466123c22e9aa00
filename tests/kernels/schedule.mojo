"""What the schedule tests share: random operands, and thread orders."""

from std.random import random_float64, shuffle
from std.testing import assert_equal, assert_false

from kernels.launch import KernelCall

comptime POISON = 777
comptime SPARE_SLOTS = 3
comptime ROUNDS = 6


def noise[dtype: DType](count: Int) -> List[Scalar[dtype]]:
    # List reports one without memory to the address sanitizer, which objects.
    var values = List[Scalar[dtype]](capacity=max(count, 1))
    for _ in range(count):
        values.append(((random_float64() - 0.5) * 8).cast[dtype]())
    return values^


def poisoned[dtype: DType](count: Int) -> List[Scalar[dtype]]:
    return List[Scalar[dtype]](length=count, fill=POISON)


def shuffled(count: Int) -> List[Int]:
    var order = List[Int](capacity=count)
    for i in range(count):
        order.append(i)
    shuffle(order)
    return order^


def distinct_slots(rows: Int) -> List[UInt32]:
    var slots = List[UInt32](capacity=rows)
    for slot in shuffled(rows + SPARE_SLOTS)[:rows]:
        slots.append(UInt32(slot))
    return slots^


def grids[Call: KernelCall](call: Call) -> List[Int]:
    """Thread counts: just enough, some idle, many idle, far too few."""
    var threads = call.threads()
    return [threads, threads + 37, 8 * threads, 5]


def run_threads[Call: KernelCall](call: Call, threads: Int):
    """Runs every thread of a grid, in shuffled order."""
    for thread in shuffled(threads):
        call.run_thread(thread, threads)


def assert_only_slot_changed[
    dtype: DType
](
    tail: List[Scalar[dtype]],
    initial: List[Scalar[dtype]],
    slot: Int,
    slot_size: Int,
) raises:
    var inside = 0
    for i in range(len(tail)):
        if tail[i] != initial[i]:
            assert_equal(i // slot_size, slot)
            inside += 1
    assert_false(inside == 0, "the sound row was skipped too")
