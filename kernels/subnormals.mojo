"""Gradual underflow on CPU threads, whose runtime may have switched it off.

MAX runs CPU kernels with subnormal numbers flushed to zero. A pooled key must
not depend on that: small keys would lose digits, and one kernel would give other
bits in a server than in a test.
"""

from std.sys import CompilationTarget, llvm_intrinsic

comptime _X86_FLUSH_BITS = UInt32(0x8040)
comptime _ARM_FLUSH_BITS = UInt64(0x0108_0000)


struct GradualUnderflow:
    """Keeps subnormal numbers on the calling thread while it is in scope."""

    var saved: UInt64
    """The thread's floating-point mode as it was."""

    def __init__(out self):
        """Does nothing until entered."""
        self.saved = 0

    def __enter__(mut self):
        """Saves the thread's mode and switches flushing off."""
        comptime if CompilationTarget.is_x86():
            var mode = Array[UInt32, 1](fill=0)
            llvm_intrinsic["llvm.x86.sse.stmxcsr", NoneType](mode.unsafe_ptr())
            self.saved = UInt64(mode[0])
            mode[0] &= ~_X86_FLUSH_BITS
            llvm_intrinsic["llvm.x86.sse.ldmxcsr", NoneType](mode.unsafe_ptr())
        else:
            self.saved = llvm_intrinsic["llvm.aarch64.get.fpcr", UInt64]()
            llvm_intrinsic["llvm.aarch64.set.fpcr", NoneType](
                self.saved & ~_ARM_FLUSH_BITS
            )

    def __exit__(mut self):
        """Restores the thread's mode."""
        comptime if CompilationTarget.is_x86():
            var mode = Array[UInt32, 1](fill=UInt32(self.saved))
            llvm_intrinsic["llvm.x86.sse.ldmxcsr", NoneType](mode.unsafe_ptr())
        else:
            llvm_intrinsic["llvm.aarch64.set.fpcr", NoneType](self.saved)
