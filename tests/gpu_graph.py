"""Compiles one graph of every op for a GPU that is not there.

Usage: python gpu_graph.py cuda|hip ARCH. Prints a line an op, then `compiled`.
"""

from __future__ import annotations

import os
import sys

from max.driver import (
    Accelerator,
    set_virtual_device_api,
    set_virtual_device_count,
    set_virtual_device_target_arch,
)
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, TensorValue, Type

from kpool_graph import (
    TailRing,
    compress,
    copy_slots,
    expand_topk,
    pool_row_offsets,
    ragged_update,
    ring_close,
    seed_tail,
    tail_update,
)

HEAD_DIM = 128
# (dtype, kpool, next_n, ring_len): the model's own, the widest, the odd ones.
VARIANTS = [
    (DType.bfloat16, 4, 1, 4),
    (DType.bfloat16, 4, 4, 7),
    (DType.bfloat16, 16, 4, 16),
    (DType.float16, 3, 7, 3),
    (DType.float32, 1, 2, 1),
]


def build() -> Graph:
    gpu = DeviceRef.GPU()
    uint32 = DType.uint32
    types: list[Type] = []
    for n, (dtype, kpool, next_n, ring_len) in enumerate(VARIANTS):
        ring = TailRing(64, kpool, HEAD_DIM, dtype, ring_len)
        batch, total = f"batch{n}", f"total_tokens{n}"
        types += [
            ring.buffer_type(gpu),
            TensorType(dtype, (total, HEAD_DIM), gpu),
            TensorType(uint32, (f"offsets{n}",), gpu),
            TensorType(uint32, (batch,), gpu),
            TensorType(uint32, (batch,), gpu),
            TensorType(dtype, (batch, next_n, HEAD_DIM), gpu),
            TensorType(DType.float32, (kpool, HEAD_DIM), gpu),
            TensorType(DType.int32, (batch, next_n), gpu),
            TensorType(DType.int32, (total, 16 // kpool), gpu),
        ]
    with Graph("every_op", input_types=types) as graph:
        outputs: list[TensorValue] = []
        for n, (dtype, kpool, next_n, ring_len) in enumerate(VARIANTS):
            width = len(types) // len(VARIANTS)
            tail, chunk, offsets, lengths, slots, step, ape, positions, ids = (
                graph.inputs[width * n : width * (n + 1)]
            )
            ragged = (tail.buffer, chunk, chunk, ape, offsets, lengths, slots)
            pool_offsets = pool_row_offsets(lengths, offsets, kpool)
            outputs += ring_close(*ragged, kpool=kpool)
            outputs.append(
                compress(chunk, chunk, ape, offsets, pool_offsets, lengths, kpool=kpool)
            )
            seed_tail(tail.buffer, chunk, chunk, offsets, lengths, slots, kpool=kpool)
            outputs += ragged_update(*ragged, kpool=kpool)
            outputs += tail_update(
                tail.buffer, step, step, ape, positions, slots, kpool=kpool
            )
            outputs.append(expand_topk(ids, offsets, lengths, kpool=kpool))
            copy_slots(tail.buffer, slots, slots)
            shared = f"{dtype.name} head_dim={HEAD_DIM} kpool={kpool} {ring_len=}"
            for op in ("ring_close", "compress", "seed_tail", "ragged_update"):
                print(f"mo.mla.kpool.{op}", shared)
            print("mo.mla.kpool.tail_update", shared, f"{next_n=}")
            print("mo.mla.kpool.copy_slots", shared)
            print("mo.mla.kpool.expand_topk", f"{kpool=} pool_topk={16 // kpool}")
        graph.output(*outputs)
    return graph


def main(api: str, arch: str) -> None:
    set_virtual_device_api(api)
    set_virtual_device_target_arch(arch)
    set_virtual_device_count(1)
    InferenceSession(devices=[Accelerator()]).load(build())
    print("compiled")
    # A virtual device aborts the process on a regular exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
