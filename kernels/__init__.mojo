"""The k-pool tail ring: kernels that keep each request's unfinished pool.

A k-pooled indexer stores one key per `kpool` consecutive tokens of a request.
Pool `p` covers absolute positions `[p * kpool, (p + 1) * kpool)`. Tokens whose
pool is not complete yet wait in a ring that outlives the call:

    tail[max_slots, 2, ring_len, head_dim]

Plane 0 holds keys and plane 1 gate scores. A request owns one slot; its token
at position `pos` lives in entry `pos % ring_len` of both planes, and
`ring_len >= kpool`. The live entries of a request whose next position is `p`
are positions `[p - p % kpool, p)`. Nothing else in a slot is ever read for a
result, so a slot needs no clearing when it changes owner.

Ops, and the module that holds each one's body for CPU and GPU:

- `mo.mla.kpool.seed_tail` (`seed_tail`): a prefill chunk leaves its trailing
  tokens in the ring.
- `mo.mla.kpool.tail_update` (`tail_update`): a decode step stashes its tokens
  and closes the pools they fill.
- `mo.mla.kpool.ring_close` (`ring_close`): a chunk completes the pool that its
  request had pending.
- `mo.mla.kpool.compress` (`compress`): a chunk's own whole pools.
- `mo.mla.kpool.ragged_update` (`ragged_update`): the three above for any mix of
  chunks and decodes, in one launch.
- `mo.mla.kpool.expand_topk` (`expand_topk`): selected pools to token positions.
- `mo.mla.kpool.copy_slots` (`copy_slots`): whole slots to other slots.

`ring` is the only address arithmetic, `pooling` the only softmax, `ring_ops`,
`slot_ops` and `pool_ops` the registrations, `launch` what CPU and GPU launches
have in common.
"""

from .compress import kpool_compress_kernel
from .expand_topk import kpool_expand_topk_kernel
from .ring_close import kpool_ring_close_kernel
from .seed_tail import kpool_seed_tail_kernel
from .tail_update import kpool_tail_update_kernel
