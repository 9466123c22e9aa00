"""MAX's own k-pool kernels, bound to the layouts that this folder uses."""

from layout import TileTensor, row_major
from nn.attention.gpu.mla_index_kpool import (
    kpool_compress_kernel,
    kpool_expand_topk_kernel,
    kpool_seed_tail_kernel,
    kpool_tail_update_kernel,
)

comptime HEAD_DIM = 128
comptime Layout1 = type_of(row_major(1))
comptime Layout2 = type_of(row_major(1, 1))
comptime Layout3 = type_of(row_major(1, 1, 1))
comptime Layout4 = type_of(row_major(1, 1, 1, 1))
comptime Engine = TileTensor[DType.float32, Layout1, MutUntrackedOrigin].Engine

comptime tail_update[
    dtype: DType, kpool: Int, next_n: Int
] = kpool_tail_update_kernel[
    dtype,
    TailLayoutType=Layout4,
    tail_origin=MutUntrackedOrigin,
    OutLayoutType=Layout3,
    out_origin=MutUntrackedOrigin,
    ClosedLayoutType=Layout2,
    closed_origin=MutUntrackedOrigin,
    KLayoutType=Layout3,
    k_origin=ImmUntrackedOrigin,
    GateLayoutType=Layout3,
    gate_origin=ImmUntrackedOrigin,
    ApeLayoutType=Layout2,
    ape_origin=ImmUntrackedOrigin,
    PosLayoutType=Layout2,
    pos_origin=ImmUntrackedOrigin,
    SlotLayoutType=Layout1,
    slot_origin=ImmUntrackedOrigin,
    TailEngine=Engine,
    OutEngine=Engine,
    ClosedEngine=Engine,
    KEngine=Engine,
    GateEngine=Engine,
    ApeEngine=Engine,
    PosEngine=Engine,
    SlotEngine=Engine,
    head_dim=HEAD_DIM,
    kpool=kpool,
    next_n=next_n,
]

comptime seed_tail[dtype: DType, kpool: Int] = kpool_seed_tail_kernel[
    dtype,
    TailLayoutType=Layout4,
    tail_origin=MutUntrackedOrigin,
    KLayoutType=Layout2,
    k_origin=ImmUntrackedOrigin,
    GateLayoutType=Layout2,
    gate_origin=ImmUntrackedOrigin,
    IROLayoutType=Layout1,
    iro_origin=ImmUntrackedOrigin,
    CacheLenLayoutType=Layout1,
    SlotLayoutType=Layout1,
    slot_origin=ImmUntrackedOrigin,
    TailEngine=Engine,
    KEngine=Engine,
    GateEngine=Engine,
    IROEngine=Engine,
    CacheLenEngine=Engine,
    SlotEngine=Engine,
    head_dim=HEAD_DIM,
    kpool=kpool,
]

comptime compress[dtype: DType, kpool: Int] = kpool_compress_kernel[
    dtype,
    KLayoutType=Layout2,
    k_origin=ImmUntrackedOrigin,
    GateLayoutType=Layout2,
    gate_origin=ImmUntrackedOrigin,
    ApeLayoutType=Layout2,
    ape_origin=ImmUntrackedOrigin,
    IROLayoutType=Layout1,
    iro_origin=ImmUntrackedOrigin,
    PROLayoutType=Layout1,
    pro_origin=ImmUntrackedOrigin,
    CacheLenLayoutType=Layout1,
    OutLayoutType=Layout2,
    out_origin=MutUntrackedOrigin,
    KEngine=Engine,
    GateEngine=Engine,
    ApeEngine=Engine,
    IROEngine=Engine,
    PROEngine=Engine,
    CacheLenEngine=Engine,
    OutEngine=Engine,
    head_dim=HEAD_DIM,
    kpool=kpool,
]

comptime expand_topk[kpool: Int, pool_topk: Int] = kpool_expand_topk_kernel[
    OutLayoutType=Layout2,
    out_origin=MutUntrackedOrigin,
    PoolLayoutType=Layout2,
    pool_origin=ImmUntrackedOrigin,
    IROLayoutType=Layout1,
    iro_origin=ImmUntrackedOrigin,
    CacheLenLayoutType=Layout1,
    OutEngine=Engine,
    PoolEngine=Engine,
    IROEngine=Engine,
    CacheLenEngine=Engine,
    kpool=kpool,
    pool_topk=pool_topk,
    always_select_tail=True,
]
