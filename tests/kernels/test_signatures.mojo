"""Compiles the kernels for GPUs through the signatures Mojo users launch."""

from std.testing import TestSuite, assert_true

from kernels import (
    kpool_compress_kernel,
    kpool_expand_topk_kernel,
    kpool_ring_close_kernel,
    kpool_seed_tail_kernel,
    kpool_tail_update_kernel,
)
from layout import row_major
from max.gpu.host import get_gpu_target
from max.gpu.host.compile import _compile_code

comptime HEAD_DIM = 128
comptime RingLayout[kpool: Int] = type_of(row_major[8, 2, kpool, HEAD_DIM]())
comptime Layout1 = type_of(row_major(1))
comptime Layout2 = type_of(row_major(1, 1))
comptime Layout3 = type_of(row_major(1, 1, 1))


def check_entry(name: StaticString, asm: String) raises:
    """Requires the kernel's entry."""
    assert_true(name in asm, String("no entry named ", name))


def check_assembly[arch: StaticString](name: StaticString, asm: String) raises:
    """Requires the kernel's entry and 16-byte accesses to global memory."""
    check_entry(name, asm)
    comptime if arch == "gfx942":
        assert_true("global_load_dwordx4" in asm, String(name, ": loads"))
        assert_true("global_store_dwordx4" in asm, String(name, ": stores"))
    else:
        assert_true("ld.global.nc.v4.b32" in asm, String(name, ": loads"))
        assert_true("st.global.v4.b32" in asm, String(name, ": stores"))


def compile_tail_update[
    arch: StaticString, dtype: DType, kpool: Int, next_n: Int
]() raises:
    comptime kernel = kpool_tail_update_kernel[
        dtype,
        TailLayoutType=RingLayout[kpool],
        tail_origin=MutAnyOrigin,
        OutLayoutType=Layout3,
        out_origin=MutAnyOrigin,
        ClosedLayoutType=Layout2,
        closed_origin=MutAnyOrigin,
        KLayoutType=Layout3,
        k_origin=ImmutAnyOrigin,
        GateLayoutType=Layout3,
        gate_origin=ImmutAnyOrigin,
        ApeLayoutType=Layout2,
        ape_origin=ImmutAnyOrigin,
        PosLayoutType=Layout2,
        pos_origin=ImmutAnyOrigin,
        SlotLayoutType=Layout1,
        slot_origin=ImmutAnyOrigin,
        head_dim=HEAD_DIM,
        kpool=kpool,
        next_n=next_n,
    ]
    var asm = _compile_code[kernel, target=get_gpu_target[arch]()]().asm
    # Its accesses are narrow on purpose.
    check_entry("kpool_tail_update", String(asm))


def compile_seed_tail[arch: StaticString, dtype: DType, kpool: Int]() raises:
    comptime kernel = kpool_seed_tail_kernel[
        dtype,
        TailLayoutType=RingLayout[kpool],
        tail_origin=MutAnyOrigin,
        KLayoutType=Layout2,
        k_origin=ImmutAnyOrigin,
        GateLayoutType=Layout2,
        gate_origin=ImmutAnyOrigin,
        IROLayoutType=Layout1,
        iro_origin=ImmutAnyOrigin,
        CacheLenLayoutType=Layout1,
        cache_len_origin=ImmutAnyOrigin,
        SlotLayoutType=Layout1,
        slot_origin=ImmutAnyOrigin,
        head_dim=HEAD_DIM,
        kpool=kpool,
    ]
    var asm = _compile_code[kernel, target=get_gpu_target[arch]()]().asm
    check_assembly[arch]("kpool_seed_tail", String(asm))


def compile_compress[arch: StaticString, dtype: DType, kpool: Int]() raises:
    comptime kernel = kpool_compress_kernel[
        dtype,
        KLayoutType=Layout2,
        k_origin=ImmutAnyOrigin,
        GateLayoutType=Layout2,
        gate_origin=ImmutAnyOrigin,
        ApeLayoutType=Layout2,
        ape_origin=ImmutAnyOrigin,
        IROLayoutType=Layout1,
        iro_origin=ImmutAnyOrigin,
        PROLayoutType=Layout1,
        pro_origin=ImmutAnyOrigin,
        CacheLenLayoutType=Layout1,
        cache_len_origin=ImmutAnyOrigin,
        OutLayoutType=Layout2,
        out_origin=MutAnyOrigin,
        head_dim=HEAD_DIM,
        kpool=kpool,
    ]
    var asm = _compile_code[kernel, target=get_gpu_target[arch]()]().asm
    check_assembly[arch]("kpool_compress", String(asm))


def compile_ring_close[arch: StaticString, dtype: DType, kpool: Int]() raises:
    comptime kernel = kpool_ring_close_kernel[
        dtype,
        OutLayoutType=Layout2,
        out_origin=MutAnyOrigin,
        ClosedLayoutType=Layout1,
        closed_origin=MutAnyOrigin,
        TailLayoutType=RingLayout[kpool],
        tail_origin=MutAnyOrigin,
        KLayoutType=Layout2,
        k_origin=ImmutAnyOrigin,
        GateLayoutType=Layout2,
        gate_origin=ImmutAnyOrigin,
        ApeLayoutType=Layout2,
        ape_origin=ImmutAnyOrigin,
        IROLayoutType=Layout1,
        iro_origin=ImmutAnyOrigin,
        CacheLenLayoutType=Layout1,
        cache_len_origin=ImmutAnyOrigin,
        SlotLayoutType=Layout1,
        slot_origin=ImmutAnyOrigin,
        head_dim=HEAD_DIM,
        kpool=kpool,
    ]
    var asm = _compile_code[kernel, target=get_gpu_target[arch]()]().asm
    check_assembly[arch]("kpool_ring_close", String(asm))


def compile_expand_topk[arch: StaticString, kpool: Int]() raises:
    comptime kernel = kpool_expand_topk_kernel[
        OutLayoutType=Layout2,
        out_origin=MutAnyOrigin,
        IdsLayoutType=Layout2,
        ids_origin=ImmutAnyOrigin,
        IROLayoutType=Layout1,
        iro_origin=ImmutAnyOrigin,
        CacheLenLayoutType=Layout1,
        cache_len_origin=ImmutAnyOrigin,
        kpool=kpool,
        pool_topk=512,
    ]
    var asm = _compile_code[kernel, target=get_gpu_target[arch]()]().asm
    check_entry("kpool_expand_topk", String(asm))


def compile_all[arch: StaticString]() raises:
    compile_tail_update[arch, DType.bfloat16, 4, 1]()
    compile_tail_update[arch, DType.bfloat16, 4, 4]()
    compile_tail_update[arch, DType.float32, 16, 1]()
    compile_seed_tail[arch, DType.bfloat16, 4]()
    compile_seed_tail[arch, DType.float16, 8]()
    compile_compress[arch, DType.bfloat16, 4]()
    compile_compress[arch, DType.float32, 16]()
    compile_ring_close[arch, DType.bfloat16, 4]()
    compile_expand_topk[arch, 4]()


def test_kernels_compile_for_nvidia_with_16_byte_accesses() raises:
    compile_all["sm_90a"]()


def test_kernels_compile_for_amd_with_16_byte_accesses() raises:
    compile_all["gfx942"]()


def main() raises:
    TestSuite.discover_tests[__functions_in_module()]().run()
