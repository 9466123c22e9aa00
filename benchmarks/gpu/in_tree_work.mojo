"""MAX's own kernels as work of a device graph, launched as MAX launches them."""

from copies import DTYPE, Tile1, Tile2, Tile3, Tile4
from in_tree_kernels import HEAD_DIM, compress, seed_tail, tail_update
from max.gpu.host import DeviceGraphBuilder, DeviceGraphNode
from work import Work


@fieldwise_init
struct InTreeDecode(Copyable, Movable):
    """Operands of MAX's tail_update, one copy of them."""

    var tail: Tile4[DTYPE]
    var pooled: Tile3[DTYPE]
    var closed_pool: Tile2[DType.int32]
    var k: Tile3[DTYPE]
    var gate: Tile3[DTYPE]
    var ape: Tile2[DType.float32]
    var positions: Tile2[DType.int32]
    var slot_idx: Tile1[DType.uint32]
    var rows: Int


@fieldwise_init
struct InTreeTailUpdate[kpool: Int, next_n: Int](Work):
    """MAX's tail_update: a block a row, a thread a channel."""

    var calls: List[InTreeDecode]

    def record[
        scope: ImmOrigin
    ](
        self,
        mut builder: DeviceGraphBuilder[scope],
        copy: Int,
        var after: List[DeviceGraphNode[scope]],
    ) raises -> DeviceGraphNode[scope]:
        ref call = self.calls[copy]
        return builder.add_function[
            tail_update[DTYPE, Self.kpool, Self.next_n]
        ](
            call.tail,
            call.pooled,
            call.closed_pool,
            call.k.as_imm(),
            call.gate.as_imm(),
            call.ape.as_imm(),
            call.positions.as_imm(),
            call.slot_idx.as_imm(),
            Int32(call.rows),
            grid_dim=call.rows,
            block_dim=HEAD_DIM,
            dependencies=after^,
        )


@fieldwise_init
struct InTreeChunks(Copyable, Movable):
    """Operands of MAX's compress and seed_tail, one copy of them."""

    var tail: Tile4[DTYPE]
    var pooled: Tile2[DTYPE]
    var k: Tile2[DTYPE]
    var gate: Tile2[DTYPE]
    var ape: Tile2[DType.float32]
    var input_row_offsets: Tile1[DType.uint32]
    var pool_row_offsets: Tile1[DType.uint32]
    var cache_lengths: Tile1[DType.uint32]
    var slot_idx: Tile1[DType.uint32]
    var pools: Int
    var requests: Int


@fieldwise_init
struct InTreePrefill[kpool: Int, compresses: Bool, seeds: Bool](Work):
    """MAX's compress, its seed_tail, or both in turn."""

    var calls: List[InTreeChunks]

    def record[
        scope: ImmOrigin
    ](
        self,
        mut builder: DeviceGraphBuilder[scope],
        copy: Int,
        var after: List[DeviceGraphNode[scope]],
    ) raises -> DeviceGraphNode[scope]:
        ref call = self.calls[copy]
        comptime if Self.compresses:
            var node = builder.add_function[compress[DTYPE, Self.kpool]](
                call.pooled,
                call.k.as_imm(),
                call.gate.as_imm(),
                call.ape.as_imm(),
                call.input_row_offsets.as_imm(),
                call.pool_row_offsets.as_imm(),
                call.cache_lengths.as_imm(),
                grid_dim=call.pools,
                block_dim=HEAD_DIM,
                dependencies=after^,
            )
            comptime if not Self.seeds:
                return node
            after = [node]
        return builder.add_function[seed_tail[DTYPE, Self.kpool]](
            call.tail,
            call.k.as_imm(),
            call.gate.as_imm(),
            call.input_row_offsets.as_imm(),
            call.cache_lengths.as_imm(),
            call.slot_idx.as_imm(),
            Int32(call.requests),
            grid_dim=call.requests,
            block_dim=HEAD_DIM,
            dependencies=after^,
        )
