"""Each token that closes a pool gets its key, however the batch is packed."""

from __future__ import annotations

import numpy as np
import pytest
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, Module, TensorType

from kpool_graph.serve import pooled_by_token

HEAD_DIM = 2
KPOOLS = (1, 3, 4)
# New tokens and cached tokens of each request.
BATCHES = {
    "decode": ([1, 1, 1, 1, 1], [0, 3, 4, 2, 11]),
    "prefill": ([9, 1, 4, 3, 12], [0, 0, 0, 0, 0]),
    "mixed chunks": ([5, 1, 13, 2, 8], [3, 7, 1, 0, 130]),
    "some without tokens": ([0, 4, 0, 0, 1, 0], [3, 3, 0, 8, 7, 2]),
    "one token": ([1], [0]),
    "no request": ([], []),
}


@pytest.fixture(scope="module")
def models():
    cpu = DeviceRef.CPU()
    module = Module()
    for kpool in KPOOLS:
        types = [
            TensorType(DType.float32, ("rows", HEAD_DIM), cpu),
            TensorType(DType.uint32, ("offsets",), cpu),
            TensorType(DType.uint32, ("batch",), cpu),
            TensorType(DType.float32, ("total_tokens", 1), cpu),
        ]
        with Graph(f"kpool{kpool}", input_types=types, module=module) as graph:
            pooled, offsets, cached, tokens = (each.tensor for each in graph.inputs)
            graph.output(
                pooled_by_token(
                    pooled,
                    offsets,
                    cached,
                    total_tokens=tokens.shape[0],
                    kpool=kpool,
                )
            )
    return InferenceSession(devices=[CPU()]).load_all(module)


@pytest.mark.parametrize("kpool", KPOOLS)
@pytest.mark.parametrize("batch", BATCHES)
def test_a_token_that_closes_a_pool_gets_its_key_and_no_other(models, batch, kpool):
    counts, cached = BATCHES[batch]
    offsets = np.cumsum([0, *counts])
    total = int(offsets[-1])
    rows = (total + len(counts) * (kpool - 1)) // kpool
    # Rows that no pool fills would show in a token: the op leaves them zero.
    pooled = np.full((rows, HEAD_DIM), 777, np.float32)
    wanted = np.zeros((total, HEAD_DIM), np.float32)
    for request, (count, before) in enumerate(zip(counts, cached, strict=True)):
        row = (offsets[request] + request * (kpool - 1)) // kpool
        for position in range(before, before + count):
            if position % kpool == kpool - 1:
                key = (request + 1, position + 1)
                pooled[row] = wanted[offsets[request] + position - before] = key
                row += 1
    (got,) = models[f"kpool{kpool}"].execute(
        pooled,
        offsets.astype(np.uint32),
        np.array(cached, np.uint32),
        np.zeros((total, 1), np.float32),
    )
    np.testing.assert_array_equal(got.to_numpy(), wanted)
