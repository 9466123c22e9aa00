"""Times a kernel against a copy of the bytes that it moves, in alternation."""

from std.ffi import external_call
from std.time import perf_counter_ns

from kernels.launch import KernelCall, run_cpu, run_tasks

comptime ROUNDS = 41
# Long enough that reading the clock does not show.
comptime SAMPLE_NS = 50_000


@fieldwise_init
struct Setting(Copyable):
    """What the rows of one case have in common."""

    var name: String
    var dtype: DType
    var n: Int
    var kpool: Int
    var next_n: Int
    var bytes_moved: Int


trait Subject:
    """Something to time."""

    def run(mut self) raises:
        """Does it once."""
        ...


struct MemoryCopy(Subject):
    """The C library's copy of a block."""

    var source: List[UInt8]
    var target: List[UInt8]

    def __init__(out self, size: Int):
        self.source = List[UInt8](length=size, fill=1)
        self.target = List[UInt8](length=size, fill=2)

    def run(mut self) raises:
        _ = external_call["memcpy", Pointer[UInt8, MutUntrackedOrigin]](
            self.target.unsafe_ptr(), self.source.unsafe_ptr(), len(self.source)
        )


@fieldwise_init
struct OneThread[Call: KernelCall](Subject):
    """A whole call on the calling thread."""

    var call: Self.Call

    def run(mut self) raises:
        self.call.check()
        run_tasks(self.call, 0, self.call.tasks())


@fieldwise_init
struct AllThreads[Call: KernelCall](Subject):
    """A whole call as a graph on the CPU runs it."""

    var call: Self.Call

    def run(mut self) raises:
        run_cpu(self.call)


def time[T: Subject](mut subject: T, repeats: Int) raises -> Float64:
    """Measures nanoseconds a run."""
    var start = perf_counter_ns()
    for _ in range(repeats):
        subject.run()
    return Float64(perf_counter_ns() - start) / Float64(repeats)


def quantile(values: List[Float64], tenths: Int) -> Float64:
    var ordered = values.copy()
    sort(ordered)
    return ordered[(len(ordered) - 1) * tenths // 10]


def print_row(
    setting: Setting,
    provider: String,
    ns: List[Float64],
    copied_ns: List[Float64],
):
    var fields: List[String] = [
        setting.name,
        provider,
        String(setting.dtype),
        String(setting.n),
        String(setting.kpool),
        String(setting.next_n),
    ]
    var ratios = List[Float64]()
    for round in range(ROUNDS):
        ratios.append(ns[round] / copied_ns[round])
    for tenths in [5, 2, 8]:
        fields.append(String(quantile(ns, tenths)))
    fields.append(String(setting.bytes_moved))
    for tenths in [5, 2, 8]:
        fields.append(String(quantile(ratios, tenths)))
    print(",".join(fields))


def measure[Call: KernelCall](call: Call, setting: Setting) raises:
    """Prints a row for the copy, for one thread and for all of them."""
    # A copy reads as much as it writes.
    var memory = MemoryCopy(setting.bytes_moved // 2)
    var single = OneThread(call)
    var several = AllThreads(call)
    _ = time(memory, 10)
    var repeats = 1 + Int(SAMPLE_NS / max(time(memory, 10), 1))
    var memory_ns = List[Float64]()
    var single_ns = List[Float64]()
    var several_ns = List[Float64]()
    for _ in range(ROUNDS):
        memory_ns.append(time(memory, repeats))
        single_ns.append(time(single, repeats))
        several_ns.append(time(several, repeats))
    print_row(setting, "copy", memory_ns, memory_ns)
    print_row(setting, "kernel", single_ns, memory_ns)
    print_row(setting, "kernel_all_threads", several_ns, memory_ns)
