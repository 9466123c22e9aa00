"""Writes the GPU code of MAX's own k-pool kernels, the peers of this package's.

Usage: `mojo run -D arch=sm_90a emit_in_tree.mojo DIRECTORY`. One file a kernel:
`OP.KPOOL.NEXT_N.DTYPE.asm`.
"""

from std.sys import argv
from std.sys.defines import get_defined_string

from in_tree_kernels import compress, expand_topk, seed_tail, tail_update
from max.gpu.host import get_gpu_target
from max.gpu.host.compile import _compile_code

comptime TARGET = get_gpu_target[get_defined_string["arch"]()]()
comptime POOL_TOPK = 512


def write(name: String, code: StringSlice) raises:
    with open(String(argv()[1], "/", name, ".asm"), "w") as file:
        file.write(code)


def emit_tail_update[dtype: DType, kpool: Int, next_n: Int]() raises:
    write(
        String("tail_update.", kpool, ".", next_n, ".", dtype),
        _compile_code[tail_update[dtype, kpool, next_n], target=TARGET]().asm,
    )


def main() raises:
    comptime for kpool in [4, 16]:
        comptime for dtype in [DType.bfloat16, DType.float32]:
            emit_tail_update[dtype, kpool, 1]()
            write(
                String("seed_tail.", kpool, ".1.", dtype),
                _compile_code[seed_tail[dtype, kpool], target=TARGET]().asm,
            )
            write(
                String("compress.", kpool, ".any.", dtype),
                _compile_code[compress[dtype, kpool], target=TARGET]().asm,
            )
        emit_tail_update[DType.bfloat16, kpool, 4]()
        write(
            String("expand_topk.", kpool, ".any.int32"),
            _compile_code[expand_topk[kpool, POOL_TOPK], target=TARGET]().asm,
        )
