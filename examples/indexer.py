"""Which spans of a text does a query select? KPoolIndexer on real text.

    python examples/indexer.py [WORD]

Prefills the texts beside this file in one ragged step, as three requests; then lets
each decode one more token, WORD, and prints the spans that it selects. The weights
are seeded, not trained: a word is a random vector, similar to itself and to no other.
So the spans that hold WORD must come first, and fillers follow where there are none.
"""

from __future__ import annotations

import re
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from max.driver import CPU
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import BufferType, DeviceRef, Graph, TensorType

import kpool_graph
from kpool_graph.nn import KPoolIndexer

Array = npt.NDArray[Any]

TEXTS = sorted((Path(__file__).parent / "texts").glob("*.txt"))
DEFAULT_WORD = "water"

HIDDEN_SIZE = 256
HEAD_DIM = 128
N_HEADS = 4
KPOOL = 4
INDEX_TOPK = 16
MAX_SLOTS = 3
MAX_POOLS = 256


def embed(words: list[str]) -> Array:
    """Gives each word a random vector of its own, and a constant last channel."""
    rows = np.ones((len(words), HIDDEN_SIZE), np.float32)
    for row, word in zip(rows, words, strict=True):
        random = np.random.default_rng(zlib.crc32(word.lower().encode()))
        row[:-1] = random.standard_normal(HIDDEN_SIZE - 1)
    return rows


def seeded_weights() -> dict[str, Array]:
    """Makes weights under which a query looks for its own word."""
    random = np.random.default_rng(0)
    key = random.normal(scale=HIDDEN_SIZE**-0.5, size=(HEAD_DIM, HIDDEN_SIZE))
    key[:, -1] = 0
    head_weights = np.zeros((N_HEADS, HIDDEN_SIZE))
    head_weights[:, -1] = 1
    weights = {
        "wq_b.weight": np.tile(key, (N_HEADS, 1)),
        "wk.weight": key,
        "k_norm.weight": np.ones(HEAD_DIM),
        "k_norm.bias": np.zeros(HEAD_DIM),
        "weights_proj.weight": head_weights,
        "index_kpool_compress_gate": np.zeros((HEAD_DIM, HIDDEN_SIZE)),
        "index_kpool_compress_ape": random.normal(scale=0.1, size=(KPOOL, HEAD_DIM)),
    }
    return {name: value.astype(np.float32) for name, value in weights.items()}


class Model:
    """The indexer, compiled, with the two buffers it keeps its requests in."""

    def __init__(self) -> None:
        indexer = KPoolIndexer(
            hidden_size=HIDDEN_SIZE,
            q_lora_rank=HIDDEN_SIZE,
            n_heads=N_HEADS,
            head_dim=HEAD_DIM,
            index_topk=INDEX_TOPK,
            kpool=KPOOL,
            dtype=DType.float32,
        )
        indexer.load_state_dict(seeded_weights())
        ring = kpool_graph.TailRing(MAX_SLOTS, KPOOL, HEAD_DIM, DType.float32)
        pools = (MAX_SLOTS, MAX_POOLS, HEAD_DIM)
        self._tail = ring.allocate()
        self._pooled_keys = kpool_graph.to_buffer(np.zeros(pools), DType.float32)

        host = DeviceRef.CPU()
        tokens = TensorType(DType.float32, ("total_tokens", HIDDEN_SIZE), host)
        requests = TensorType(DType.uint32, ("batch",), host)
        with Graph(
            "indexer",
            input_types=[
                ring.buffer_type(),
                BufferType(DType.float32, pools, host),
                tokens,
                tokens,
                TensorType(DType.uint32, ("batch_plus_1",), host),
                requests,
                requests,
            ],
        ) as graph:
            graph.output(indexer(*graph.inputs))
        self._model = InferenceSession(devices=[CPU()]).load(
            graph, weights_registry=indexer.state_dict()
        )

    def step(self, words: list[list[str]], cached: list[int]) -> list[Array]:
        """Takes new words of each request; request `r` owns slot `r`.

        Args:
            words: Those of each request.
            cached: Words of each request before this step.

        Returns:
            `[words, selection_width]` int32 of each request.
        """
        hidden = embed([word for request in words for word in request])
        offsets = np.cumsum([0, *map(len, words)])
        (selected,) = self._model.execute(
            self._tail,
            self._pooled_keys,
            hidden,
            # A trained model has a narrower residual here.
            hidden,
            offsets.astype(np.uint32),
            np.array(cached, np.uint32),
            np.arange(len(words), dtype=np.uint32),
        )
        return np.split(selected.to_numpy(), offsets[1:-1])


def spans(positions: Array) -> list[tuple[int, int]]:
    """Joins positions to spans `[start, end)`."""
    ordered = np.sort(positions)
    cuts = np.flatnonzero(np.diff(ordered) > 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(ordered, cuts)]


def main() -> None:
    word = sys.argv[1] if len(sys.argv) > 1 else DEFAULT_WORD
    texts = [path.read_text(encoding="utf-8") for path in TEXTS]
    matches = [list(re.finditer(r"\w+|[^\w\s]", text)) for text in texts]
    words = [[match.group() for match in request] for request in matches]

    print("Compiling the graph: some minutes at first, then seconds.", flush=True)
    model = Model()
    lengths = [len(request) for request in words]
    model.step(words, [0] * len(texts))
    selected = model.step([[word]] * len(texts), lengths)

    for path, text, request, (row,) in zip(
        TEXTS, texts, matches, selected, strict=True
    ):
        chosen = row[(row >= 0) & (row < len(request))]
        print(f'\n{path.name}, {len(request)} tokens: "{word}" selects')
        for start, end in spans(chosen):
            part = text[request[start].start() : request[end - 1].end()]
            print(f"  {start:3d}-{end - 1:<3d}  {' '.join(part.split())}")


if __name__ == "__main__":
    main()
