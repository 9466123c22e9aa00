"""Writes the GPU code of this package's kernels, as an op launches them.

Usage: `mojo run -I ROOT -D arch=sm_90a -D op= emit_ours.mojo DIRECTORY`, where
ROOT holds the package `kernels` and `op` may name the only op wanted. One file a
kernel: `OP.KPOOL.NEXT_N.DTYPE.asm`.
"""

from std.sys import argv
from std.sys.defines import get_defined_string

from kernels.compress import Compress
from kernels.copy_slots import CopySlots
from kernels.expand_topk import ExpandTopk
from kernels.launch import KernelCall, _kernel
from kernels.ragged_update import RaggedUpdate
from kernels.ring_close import RingClose
from kernels.seed_tail import SeedTail
from kernels.tail_update import TailUpdate
from max.gpu.host import get_gpu_target
from max.gpu.host.compile import _compile_code

comptime ARCH = get_defined_string["arch"]()
comptime ONLY = get_defined_string["op"]()
comptime HEAD_DIM = 128
comptime POOL_TOPK = 512


def emit[
    Call: KernelCall
](directory: String, name: StaticString, variant: String) raises:
    comptime if ONLY == "" or ONLY == Call.OP:
        var code = _compile_code[
            _kernel[Call], target=get_gpu_target[ARCH]()
        ]().asm
        var path = String(directory, "/", name, ".", variant, ".asm")
        with open(path, "w") as file:
            file.write(code)


def emit_ring_ops[
    dtype: DType, kpool: Int, next_n: Int
](directory: String) raises:
    """Emits every op on a ring that `next_n` tokens a step can be rejected from.
    """
    comptime ring_len = kpool - 1 + next_n
    var variant = String(kpool, ".", next_n, ".", dtype)
    emit[TailUpdate[dtype, HEAD_DIM, kpool, next_n, ring_len]](
        directory, "tail_update", variant
    )
    emit[SeedTail[dtype, HEAD_DIM, kpool, ring_len]](
        directory, "seed_tail", variant
    )
    emit[RingClose[dtype, HEAD_DIM, kpool, ring_len]](
        directory, "ring_close", variant
    )
    emit[RaggedUpdate[dtype, HEAD_DIM, kpool, ring_len]](
        directory, "ragged_update", variant
    )
    comptime slot_size = 2 * ring_len * HEAD_DIM
    emit[CopySlots[dtype, slot_size, False]](
        directory, "copy_slots_out", variant
    )
    emit[CopySlots[dtype, slot_size, True]](directory, "copy_slots_in", variant)


def emit_pool_ops[dtype: DType, kpool: Int](directory: String) raises:
    """Emits the op that knows no ring."""
    emit[Compress[dtype, HEAD_DIM, kpool]](
        directory, "compress", String(kpool, ".any.", dtype)
    )


def main() raises:
    var directory = String(argv()[1])
    comptime for kpool in [4, 16]:
        emit_ring_ops[DType.bfloat16, kpool, 1](directory)
        emit_ring_ops[DType.bfloat16, kpool, 4](directory)
        emit_ring_ops[DType.float32, kpool, 1](directory)
        emit_pool_ops[DType.bfloat16, kpool](directory)
        emit_pool_ops[DType.float32, kpool](directory)
        emit[ExpandTopk[kpool, POOL_TOPK, True]](
            directory, "expand_topk", String(kpool, ".any.int32")
        )
