"""Prefill: compress, seed_tail and ragged_update, checked, then timed."""

from std.math import ceildiv

from chunks import Prefill
from in_tree_kernels import HEAD_DIM
from in_tree_work import InTreePrefill
from max.gpu.host import DeviceContext, DeviceGraph
from report import COPY, EMPTY, Entrant, IN_TREE, OURS, Report, Workload
from work import DeviceCopy, EmptyLaunch, graph_of

comptime _LAUNCHES = 24
comptime _BYTES = 2


def run_prefill[
    kpool: Int
](ctx: DeviceContext, mut report: Report, tokens: Int, requests: Int) raises:
    """Checks and times the three ops on one batch.

    Parameters:
        kpool: Tokens per pool.

    Args:
        ctx: The device.
        report: Where the times go.
        tokens: Tokens of the batch, at most.
        requests: Requests of the batch.

    Raises:
        Error: If a provider is wrong.
    """
    var batch = Prefill[kpool](ctx, tokens, requests)
    var launches = ceildiv(_LAUNCHES, batch.copies) * batch.copies
    var read = 2 * batch.tokens * HEAD_DIM * _BYTES
    var seeded = 0
    for request in range(requests):
        seeded += batch.count(request) % kpool
    var copied = 4 * seeded * HEAD_DIM * _BYTES
    var pooled = batch.pools() * HEAD_DIM * _BYTES
    comptime for op in range(3):
        comptime name = ["compress", "seed_tail", "ragged_update"][op]
        var load = Workload(
            name,
            "prefill",
            kpool,
            0,
            requests,
            batch.tokens,
            [read + pooled, copied, read + pooled + copied][op],
        )
        var ours: DeviceGraph
        comptime if op == 0:
            ours = graph_of(ctx, batch.compress(), launches, batch.copies)
        elif op == 1:
            ours = graph_of(ctx, batch.seed_tail(), launches, batch.copies)
        else:
            ours = graph_of(ctx, batch.ragged_update(), launches, batch.copies)
        comptime InTree = InTreePrefill[kpool, op != 1, op != 0]
        var entrants = List[Entrant]()
        entrants.append({OURS, ours^})
        entrants.append(
            {
                IN_TREE,
                graph_of(ctx, InTree(batch.in_tree()), launches, batch.copies),
            }
        )
        for provider in range(2):
            batch.reset(ctx)
            entrants[provider].graph.replay()
            ctx.synchronize()
            for copy in [0, batch.copies - 1]:
                var ragged = op == 2 and provider == 0
                comptime if op != 1:
                    batch.verify_pooled(copy, ragged, in_tree=provider == 1)
                comptime if op != 0:
                    batch.verify_tail(copy, ragged)
        var copy = DeviceCopy(ctx, load.bytes, batch.copies)
        entrants.append({COPY, graph_of(ctx, copy, launches, batch.copies)})
        entrants.append(
            {EMPTY, graph_of(ctx, EmptyLaunch(), launches, batch.copies)}
        )
        report.race(ctx, load, entrants, launches, batch.copies)
        _ = copy^
    # The graphs hold bare addresses.
    _ = batch^
