"""The ramp recipe: tokens whose pools can be worked out in the head.

The key of position p is p in every channel, gate and ape are 0, so pool q is exactly
`kpool * q + (kpool - 1) / 2`. A rejected draft's key is 1000, and a ring that
nothing touched is 777.
"""

from __future__ import annotations

import numpy as np

from cases import encode
from kpool_graph.reference import values
from models import Ring

UNTOUCHED = 777
DRAFT = 1000


def untouched(op, max_slots=9):
    shape = (max_slots, 2, op.ring_len, op.head_dim)
    return Ring(encode(np.full(shape, UNTOUCHED), op.dtype), op.dtype)


def ramp(op, keys):
    """Fills every channel of a token with its number."""
    keys = np.asarray(keys, np.float64)[..., np.newaxis]
    return encode(np.repeat(keys, op.head_dim, axis=-1), op.dtype)


def prefill(models, op, ring, slot, start, count):
    """Seeds one request's ramp tokens."""
    k = ramp(op, np.arange(start, start + count))
    models[op](
        ring,
        k,
        np.zeros_like(k),
        np.array([0, count], np.uint32),
        np.array([start], np.uint32),
        np.array([slot], np.uint32),
    )


def step(models, op, ring, positions, keys=None, slots=(0,)):
    """Decodes ramp tokens.

    Returns:
        The pools that closed, as (id, value) a row, and every channel agrees.
    """
    positions = np.array(positions, np.int32)
    k = ramp(op, np.maximum(positions, 0) if keys is None else keys)
    pooled, closed = models[op](
        ring,
        k,
        np.zeros_like(k),
        np.zeros((op.kpool, op.head_dim), np.float32),
        positions,
        np.array(slots, np.uint32),
    )
    assert (pooled == pooled[..., :1]).all()
    return [
        [
            (int(pool), float(value))
            for pool, value in zip(row, values(pooled[at, :, 0]), strict=True)
            if pool >= 0
        ]
        for at, row in enumerate(closed)
    ]
