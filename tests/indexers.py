"""KPoolIndexer under test: its graphs, a server that runs them, and a judge.

Used by the tests against the NumPy reference and by those against transformers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import BufferType, DeviceRef, Graph, TensorType
from max.graph import Module as GraphModule
from max.nn.layer import Module

import kpool_graph
from kpool_graph.nn import KPoolIndexer
from models import Array

HOST = DeviceRef.CPU()
NEXT_N = 3


@dataclass(frozen=True)
class Indexer:
    """One geometry of the module.

    Attributes:
        name: Stands before the names of its graphs and weights.
    """

    name: str
    dtype: DType = DType.float32
    hidden_size: int = 64
    q_lora_rank: int = 32
    n_heads: int = 16
    head_dim: int = 32
    index_topk: int = 32
    kpool: int = 4
    always_select_tail: bool = True
    ring_len: int = 6
    max_pools: int = 104

    def module(self) -> KPoolIndexer:
        return KPoolIndexer(
            hidden_size=self.hidden_size,
            q_lora_rank=self.q_lora_rank,
            n_heads=self.n_heads,
            head_dim=self.head_dim,
            index_topk=self.index_topk,
            kpool=self.kpool,
            always_select_tail=self.always_select_tail,
            dtype=self.dtype,
        )

    def input_types(self, next_n: int | None) -> list[BufferType | TensorType]:
        """The graph inputs of `decode`, or of `__call__` if next_n is None."""
        rows = ("total_tokens",) if next_n is None else ("batch", next_n)
        tables = (
            [
                TensorType(DType.uint32, ("batch_plus_1",), HOST),
                TensorType(DType.uint32, ("batch",), HOST),
            ]
            if next_n is None
            else [TensorType(DType.int32, rows, HOST)]
        )
        ring = ("max_slots", 2, self.ring_len, self.head_dim)
        return [
            BufferType(self.dtype, ring, HOST),
            BufferType(self.dtype, ("max_slots", self.max_pools, self.head_dim), HOST),
            TensorType(self.dtype, (*rows, self.hidden_size), HOST),
            TensorType(self.dtype, (*rows, self.q_lora_rank), HOST),
            *tables,
            TensorType(DType.uint32, ("batch",), HOST),
        ]

    def random_weights(self, rng: np.random.Generator) -> dict[str, Array]:
        """Draws weights under which scores, gates and members all matter."""
        drawn = {
            name: rng.standard_normal([int(size) for size in weight.shape])
            for name, weight in self.module().raw_state_dict().items()
        }
        for name in ("wq_b.weight", "wk.weight", "weights_proj.weight"):
            drawn[name] *= drawn[name].shape[1] ** -0.5
        drawn["index_kpool_compress_gate"] *= 2 * self.hidden_size**-0.5
        drawn["k_norm.weight"] = 1 + drawn["k_norm.weight"] / 4
        return {name: value.astype(np.float32) for name, value in drawn.items()}


class _Named(Module):
    """Gives an indexer's weights a prefix, as a layer that owns one does."""

    def __init__(self, name: str, indexer: KPoolIndexer) -> None:
        super().__init__()
        setattr(self, name, indexer)

    def __call__(self) -> None:
        raise NotImplementedError


PATHS = ("ragged", "three_ops", f"decode{NEXT_N}")


def compile_indexers(
    wanted: Mapping[Indexer, tuple[Mapping[str, Buffer], Sequence[str]]],
) -> dict[Indexer, dict[str, Model]]:
    """Compiles graphs of several geometries together.

    Args:
        wanted: The weights of each and its paths: of `PATHS`, or `decode` and a
            next_n.

    Returns:
        The compiled graph of each path.
    """
    module = GraphModule()
    registry: dict[str, Buffer] = {}
    for indexer, (weights, paths) in wanted.items():
        prefixed = {f"{indexer.name}.{name}": each for name, each in weights.items()}
        registry |= prefixed
        for path in paths:
            instance = indexer.module()
            _Named(indexer.name, instance).load_state_dict(prefixed)
            next_n = int(path[6:]) if path.startswith("decode") else None
            with Graph(
                f"{indexer.name}_{path}",
                input_types=indexer.input_types(next_n),
                module=module,
            ) as graph:
                if next_n is None:
                    three_ops = path == "three_ops"
                    graph.output(instance(*graph.inputs, three_ops=three_ops))
                else:
                    graph.output(instance.decode(*graph.inputs))
    loaded = InferenceSession(devices=[CPU()]).load_all(
        module,
        custom_extensions=[kpool_graph.kernels_path()],
        weights_registry=registry,
    )
    return {
        indexer: {path: loaded[f"{indexer.name}_{path}"] for path in paths}
        for indexer, (_, paths) in wanted.items()
    }


def to_buffers(weights: Mapping[str, Array], indexer: Indexer) -> dict[str, Buffer]:
    """Casts weights to what the module declares."""
    return {
        name: kpool_graph.to_buffer(weights[name], declared.dtype)
        for name, declared in indexer.module().raw_state_dict().items()
    }


class Server:
    """Serves requests whose tokens are all known, and keeps what they selected.

    The ring and the pooled keys start as NaN: a read of what nobody wrote shows.

    Attributes:
        selected: The token positions selected by each (request, position) so far.
        slots: The slot of each request.
        done: Tokens of each request so far.
    """

    def __init__(
        self,
        indexer: Indexer,
        models: Mapping[str, Model],
        hidden: Sequence[Array],
        q_resid: Sequence[Array],
        slots: Sequence[int],
        max_slots: int,
    ) -> None:
        self.indexer, self._models = indexer, models
        self._hidden, self._q_resid, self.slots = hidden, q_resid, list(slots)
        self.done = [0] * len(hidden)
        self.selected: dict[tuple[int, int], frozenset[int]] = {}
        ring = (max_slots, 2, indexer.ring_len, indexer.head_dim)
        pools = (max_slots, indexer.max_pools, indexer.head_dim)
        self.tail = self._buffer(np.full(ring, np.nan))
        self.pooled_keys = self._buffer(np.full(pools, np.nan))

    def left(self, request: int) -> int:
        """Counts the tokens of a request that are still to come."""
        return len(self._hidden[request]) - self.done[request]

    def ragged(self, counts: Mapping[int, int], path: str = "ragged") -> None:
        """Takes a number of tokens of some requests, in that order, in one call."""
        spans = [
            (request, self.done[request], self.done[request] + count)
            for request, count in counts.items()
        ]
        offsets = np.concatenate(([0], np.cumsum(list(counts.values()), dtype=int)))
        selected = self._run(
            path,
            [self._hidden[request][start:end] for request, start, end in spans],
            [self._q_resid[request][start:end] for request, start, end in spans],
            (int(offsets[-1]),),
            offsets.astype(np.uint32),
            np.array([start for _, start, _ in spans], np.uint32),
            np.array([self.slots[request] for request, _, _ in spans], np.uint32),
        )
        rows = iter(selected)
        for request, start, end in spans:
            for position in range(start, end):
                self._keep(request, position, next(rows))
            self.done[request] = end

    def decode(self, counts: Sequence[tuple[int | None, int]], next_n: int) -> None:
        """Takes up to next_n tokens a row; a row of request None is all padding."""
        positions = np.full((len(counts), next_n), -1, np.int32)
        slots = np.full(len(counts), 2**32 - 1, np.uint32)
        hidden = np.full((len(counts), next_n, self.indexer.hidden_size), np.nan)
        q_resid = np.full((len(counts), next_n, self.indexer.q_lora_rank), np.nan)
        for row, (request, count) in enumerate(counts):
            if request is None:
                continue
            slots[row] = self.slots[request]
            # Padding stands before the tokens in odd rows and after them in even.
            at = next_n - count if row % 2 else 0
            span = slice(self.done[request], self.done[request] + count)
            positions[row, at : at + count] = range(span.start, span.stop)
            hidden[row, at : at + count] = self._hidden[request][span]
            q_resid[row, at : at + count] = self._q_resid[request][span]
            self.done[request] += count
        selected = self._run(
            f"decode{next_n}",
            hidden,
            q_resid,
            (len(counts), next_n),
            positions,
            slots,
        )
        for row, token in np.ndindex(*positions.shape):
            request, position = counts[row][0], int(positions[row, token])
            if position < 0:
                assert (selected[row, token] == -1).all(), "padding selects"
            else:
                assert request is not None
                self._keep(request, position, selected[row, token])

    def take_back(self, request: int, position: int) -> None:
        """Rejects a request's newest tokens, from a position on."""
        for rejected in range(position, self.done[request]):
            del self.selected[request, rejected]
        self.done[request] = position

    def _run(
        self,
        path: str,
        hidden: Sequence[Array] | Array,
        q_resid: Sequence[Array] | Array,
        rows: tuple[int, ...],
        *tables: Array,
    ) -> Array:
        indexer = self.indexer
        operands = [
            self._buffer(np.reshape(_joined(each), (*rows, size)))
            for each, size in (
                (hidden, indexer.hidden_size),
                (q_resid, indexer.q_lora_rank),
            )
        ]
        (selected,) = self._models[path].execute(
            self.tail, self.pooled_keys, *operands, *tables
        )
        return selected.to_numpy().copy()

    def _keep(self, request: int, position: int, row: Array) -> None:
        entries = row[row >= 0].tolist()
        assert row.tolist() == entries + [-1] * (len(row) - len(entries)), "not packed"
        assert len(set(entries)) == len(entries), "selected twice"
        self.selected[request, position] = frozenset(entries)

    def _buffer(self, values: Array) -> Buffer:
        return kpool_graph.to_buffer(values, self.indexer.dtype)


def _joined(parts: Sequence[Array] | Array) -> Array:
    if isinstance(parts, np.ndarray):
        return parts
    return np.concatenate(parts) if parts else np.zeros(0)


@dataclass
class Judge:
    """Compares selections, and counts those that rounding may decide.

    A query is a near-tie where its last selected and its first rejected pool score
    less than `epsilon` apart. Pools further than that from the boundary must be
    right there too, and so must the number of pools and the tail.

    Attributes:
        epsilon: In units of a score.
        queries: Queries judged.
        near_ties: Near-ties among them.
    """

    indexer: Indexer
    epsilon: float
    queries: int = 0
    near_ties: list[tuple[int, int]] = field(default_factory=list)

    def judge(
        self,
        request: int,
        position: int,
        got: frozenset[int],
        want: frozenset[int],
        scores: Array,
    ) -> None:
        """Requires one query's selection to be right.

        Args:
            request: The query's request.
            position: Its position.
            got: Token positions it selected.
            want: Those it should have.
            scores: `[pools]`, of its complete pools.
        """
        self.queries += 1
        where = f"request {request}, position {position}"
        count = min(self.indexer.index_topk // self.indexer.kpool, len(scores))
        best = np.sort(scores)[::-1]
        if count < len(scores) and best[count - 1] - best[count] < self.epsilon:
            self.near_ties.append((request, position))
            got_pools, want_pools = self._pools(got), self._pools(want)
            assert len(got_pools) == len(want_pools) == count, where
            sure = np.flatnonzero(scores >= best[count] + self.epsilon)
            may = np.flatnonzero(scores > best[count - 1] - self.epsilon)
            assert set(sure.tolist()) <= got_pools <= set(may.tolist()), where
            assert self._tail(got) == self._tail(want), where
            return
        assert got == want, (where, sorted(got - want), sorted(want - got))

    def _pools(self, selection: frozenset[int]) -> set[int]:
        """Names the whole pools in a selection."""
        kpool = self.indexer.kpool
        return {
            position // kpool
            for position in selection
            if set(range(position, position + kpool)) <= selection
            and position % kpool == 0
        }

    def _tail(self, selection: frozenset[int]) -> set[int]:
        """Takes what belongs to no whole pool."""
        kpool = self.indexer.kpool
        pools = self._pools(selection)
        return {position for position in selection if position // kpool not in pools}
