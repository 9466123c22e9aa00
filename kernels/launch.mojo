"""Runs an op's call on its target: CPU threads over tasks, or a GPU grid."""

from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import ceildiv
from std.runtime import parallelism_level
from std.utils.static_tuple import StaticTuple
from max.algorithm import sync_parallelize
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_dim,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.host import DeviceContext
from max.gpu.host.info import is_cpu, is_gpu

from .subnormals import GradualUnderflow

comptime _MIN_BLOCK_THREADS = 128
comptime _MAX_BLOCK_THREADS = 1024
# Below this many elements a CPU task costs more to start than it saves.
comptime _ELEMENTS_PER_TASK = 64 * 1024


trait KernelCall(DevicePassable, TrivialRegisterPassable):
    """One call of an op: its operands, and the body both targets run.

    Tasks of a call share no data that either of them writes, and neither do the
    threads of its grid, so both run in any order.
    """

    comptime OP: StaticString
    """The op's name, for errors and kernels."""
    comptime BLOCK_THREADS: Int
    """The most threads a GPU block may have."""
    comptime device_type: AnyType = Self
    """A call reaches a GPU as it is."""

    def check(self) raises:
        """Refuses bad operands before anything is written.

        Raises:
            Error: Naming the operand, the row and the value.
        """
        ...

    def tasks(self) -> Int:
        """Counts the units that CPU threads share.

        Returns:
            Tasks.
        """
        ...

    def elements_per_task(self) -> Int:
        """Weighs one task.

        Returns:
            Elements that it reads at most.
        """
        ...

    def run_tasks(self, first: Int, last: Int):
        """Does some units of work on the CPU.

        Args:
            first: First task.
            last: Task after the last one.
        """
        ...

    def threads(self) -> Int:
        """Counts the GPU threads that leave none idle.

        Returns:
            Threads.
        """
        ...

    def run_thread(self, thread: Int, threads: Int):
        """Does one GPU thread's share of the whole call.

        Args:
            thread: Index of the thread in the grid.
            threads: Threads in the grid, of which any number will do.
        """
        ...

    def _to_device_type[
        Encoder: DeviceTypeEncoder
    ](
        self,
        mut encoder: Encoder,
        target: Pointer[mut=True, T=NoneType, origin=_],
    ):
        target.unsafe_bitcast[Self]()[] = self

    @staticmethod
    def get_type_name() -> String:
        """Names the type, for errors about kernel arguments.

        Returns:
            The op's name.
        """
        return String(Self.OP)


def block_threads[head_dim: Int]() -> Int:
    """Sizes a GPU block for rows of `head_dim` channels.

    At least `head_dim`, so that a launch of one block a row and one thread a
    channel works too.

    Parameters:
        head_dim: Channels per key.

    Returns:
        Threads per block.
    """
    return min(max(head_dim, _MIN_BLOCK_THREADS), _MAX_BLOCK_THREADS)


def run_cpu[Call: KernelCall](call: Call) raises:
    """Checks a call, then runs its tasks, on several threads when that pays.

    Parameters:
        Call: The op's call.

    Args:
        call: The call.

    Raises:
        Error: What the call's `check` raises.
    """
    call.check()
    var tasks = call.tasks()
    var workers = min(
        tasks * call.elements_per_task() // _ELEMENTS_PER_TASK,
        parallelism_level(),
        tasks,
    )
    if workers <= 1:
        run_tasks(call, 0, tasks)
        return

    def work(worker: Int) {imm}:
        run_tasks(
            call, worker * tasks // workers, (worker + 1) * tasks // workers
        )

    sync_parallelize(work, workers)


def run_tasks[Call: KernelCall](call: Call, first: Int, last: Int):
    """Runs some of a call's tasks on the calling thread, unchecked.

    Parameters:
        Call: The op's call.

    Args:
        call: The call.
        first: First task.
        last: Task after the last one.
    """
    with GradualUnderflow():
        call.run_tasks(first, last)


@inline(.always)
def run_grid_thread[Call: KernelCall](call: Call):
    """Runs the calling GPU thread's share of a call.

    Parameters:
        Call: The op's call.

    Args:
        call: The call.
    """
    call.run_thread(
        Int(block_idx.x) * Int(block_dim.x) + Int(thread_idx.x),
        Int(grid_dim.x) * Int(block_dim.x),
    )


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](
        Int32(Call.BLOCK_THREADS)
    )
)
@__name(t"kpool_graph_{Call.OP}")
def _kernel[Call: KernelCall](call: Call):
    run_grid_thread(call)


def launch[
    Call: KernelCall, //, target: StaticString
](call: Call, ctx: DeviceContext) raises:
    """Runs a call on the device that `target` names.

    Parameters:
        Call: The op's call.
        target: Device the op runs on.

    Args:
        call: The call.
        ctx: Device context.

    Raises:
        Error: What the call's `check` raises, on a CPU.
    """
    comptime if is_cpu[target]():
        run_cpu(call)
    elif is_gpu[target]():
        var threads = call.threads()
        if threads > 0:
            ctx.enqueue_function[_kernel[Call]](
                call,
                grid_dim=ceildiv(threads, Call.BLOCK_THREADS),
                block_dim=Call.BLOCK_THREADS,
            )
    else:
        comptime assert False, "target must be a CPU or a GPU"
