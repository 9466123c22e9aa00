"""KPoolIndexer: its paths against one NumPy reference, its weights, its errors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from max.dtype import DType

import kpool_graph
from indexers import (
    NEXT_N,
    PATHS,
    Indexer,
    Judge,
    Server,
    compile_indexers,
    to_buffers,
)
from kpool_graph import bfloat16
from kpool_graph.reference_indexer import pool_scores, select
from models import Array, to_storage

# Four graphs with matrix products take minutes to compile.
pytestmark = pytest.mark.slow

F32 = Indexer("f32")
BF16 = replace(
    F32, name="bf16", dtype=DType.bfloat16, always_select_tail=False, ring_len=4
)

# What two scores of order 1 may be apart and still change places. float32 sums lose
# 2.5e-6 a score and side; a channel of a key that rounding takes to the next bfloat16
# moves a score by some 2**-10.
EPSILON = {DType.float32: 1e-5, DType.bfloat16: 2.0**-9}
# A hundred scores spread over a range of 1.
MOST_NEAR_TIES = {DType.float32: 0.01, DType.bfloat16: 0.1}

TOKENS = (1, 3, 4, 40, 41, 107, 160)
SLOTS = (6, 0, 8, 3, 1, 5, 2)
MAX_SLOTS = 10
BOTH = pytest.mark.parametrize("indexer", [F32, BF16], ids=lambda each: each.name)


@pytest.fixture(scope="module")
def weights():
    """Values by weight name, of each geometry."""
    return {
        indexer: {
            name: kpool_graph.to_numpy(buffer)
            for name, buffer in to_buffers(
                indexer.random_weights(np.random.default_rng(0)), indexer
            ).items()
        }
        for indexer in (F32, BF16)
    }


@pytest.fixture(scope="module")
def models(weights):
    """The compiled paths of each geometry. Slow once."""
    return compile_indexers(
        {
            indexer: (to_buffers(weights[indexer], indexer), PATHS)
            for indexer in (F32, BF16)
        }
    )


def stored(indexer: Indexer, values: Array) -> Array:
    """Rounds values as the geometry's dtype does."""
    if indexer.dtype == DType.bfloat16:
        return bfloat16.decode(bfloat16.encode(values))
    return np.asarray(values, np.float32)


@dataclass
class Workload:
    """Requests, and the reference's scores of all their queries."""

    indexer: Indexer
    hidden: list[Array]
    q_resid: list[Array]
    scores: list[Array]

    def server(self, models) -> Server:
        return Server(
            self.indexer,
            models[self.indexer],
            self.hidden,
            self.q_resid,
            SLOTS[: len(self.hidden)],
            MAX_SLOTS,
        )

    def check(self, server: Server) -> None:
        """Requires every query of every request to select as the reference does."""
        indexer = self.indexer
        judge = Judge(indexer, EPSILON[indexer.dtype])
        for request, scores in enumerate(self.scores):
            want = select(
                scores,
                index_topk=indexer.index_topk,
                kpool=indexer.kpool,
                always_select_tail=indexer.always_select_tail,
            )
            for position, row in enumerate(want):
                judge.judge(
                    request,
                    position,
                    server.selected[request, position],
                    frozenset(row[row >= 0].tolist()),
                    scores[position][np.isfinite(scores[position])],
                )
        print(f"{judge.queries} queries, near-ties: {judge.near_ties}")
        assert judge.queries == len(server.selected)
        share = len(judge.near_ties) / max(judge.queries, 1)
        assert share <= MOST_NEAR_TIES[indexer.dtype]


def workload(indexer: Indexer, weights, seed: int, tokens=TOKENS) -> Workload:
    rng = np.random.default_rng(seed)

    def draw(size: int) -> list[Array]:
        return [stored(indexer, rng.standard_normal((count, size))) for count in tokens]

    made = Workload(indexer, draw(indexer.hidden_size), draw(indexer.q_lora_rank), [])
    score(made, weights)
    return made


def score(work: Workload, weights) -> None:
    """Lets the reference score the requests as they are now."""
    indexer = work.indexer
    work.scores = [
        pool_scores(
            hidden,
            q_resid,
            weights[indexer],
            kpool=indexer.kpool,
            stored=lambda values: stored(indexer, values),
        )
        for hidden, q_resid in zip(work.hidden, work.q_resid, strict=True)
    ]


def unfinished(server: Server) -> list[int]:
    return [request for request in range(len(server.done)) if server.left(request)]


def serve_mixed(server: Server, rng: np.random.Generator, paths) -> None:
    """Serves to the end in random calls, each through one of some paths."""
    while requests := unfinished(server):
        path = str(rng.choice(paths))
        batch = rng.permutation(requests)[: rng.integers(1, len(requests) + 1)]
        longest = NEXT_N if path.startswith("decode") else 30
        counts = [
            (request, min(int(rng.integers(longest + 1)), server.left(request)))
            for request in batch.tolist()
        ]
        if path.startswith("decode"):
            server.decode([*counts, (None, 0)], NEXT_N)
        else:
            server.ragged(dict(counts), path)


@BOTH
@pytest.mark.parametrize("path", ["ragged", "three_ops"])
def test_one_prefill_selects_as_the_reference(models, weights, indexer, path):
    work = workload(indexer, weights, 1)
    server = work.server(models)
    server.ragged(dict(enumerate(TOKENS)), path)
    work.check(server)


@BOTH
@pytest.mark.parametrize("path", PATHS)
def test_any_split_of_any_batch_selects_as_the_reference(
    models, weights, indexer, path
):
    work = workload(indexer, weights, 2)
    server = work.server(models)
    serve_mixed(server, np.random.default_rng(3), [path])
    work.check(server)


@BOTH
def test_the_paths_may_alternate(models, weights, indexer):
    work = workload(indexer, weights, 4)
    server = work.server(models)
    serve_mixed(server, np.random.default_rng(5), PATHS)
    work.check(server)


def test_a_slot_shows_its_next_owner_nothing_of_the_last(models, weights):
    first, second = (workload(F32, weights, seed) for seed in (6, 7))
    old, new = first.server(models), second.server(models)
    serve_mixed(old, np.random.default_rng(8), PATHS)
    new.tail, new.pooled_keys = old.tail, old.pooled_keys
    serve_mixed(new, np.random.default_rng(9), PATHS)
    second.check(new)


def test_rejected_tokens_leave_no_trace(models, weights):
    rng = np.random.default_rng(10)
    work = workload(F32, weights, 11, (50, 61, 72))
    server = work.server(models)
    server.ragged({0: 5, 1: 6, 2: 7})
    while requests := [each for each in unfinished(server) if server.left(each) > 2]:
        drafts = {}
        for request in requests:
            kept = int(rng.integers(1, NEXT_N + 1))
            span = slice(server.done[request] + kept, server.done[request] + NEXT_N)
            drafts[request] = span, work.hidden[request][span].copy()
            work.hidden[request][span] = 1000 * rng.standard_normal(F32.hidden_size)
        server.decode([(request, NEXT_N) for request in requests], NEXT_N)
        for request, (span, right) in drafts.items():
            work.hidden[request][span] = right
            server.take_back(request, span.start)
    serve_mixed(server, rng, PATHS)
    work.check(server)


def test_calls_without_tokens_change_nothing(models, weights):
    work = workload(F32, weights, 12)
    server = work.server(models)
    server.ragged(dict(enumerate(TOKENS[:-1])))
    before = state(server)
    for path in ("ragged", "three_ops"):
        server.ragged({}, path)
        server.ragged({5: 0, 6: 0, 2: 0}, path)
    server.decode([], NEXT_N)
    server.decode([(3, 0), (None, 0)], NEXT_N)
    assert state(server) == before


def state(server: Server) -> tuple[bytes, bytes]:
    return to_storage(server.tail).tobytes(), to_storage(server.pooled_keys).tobytes()


@pytest.mark.parametrize("path", ["ragged", "three_ops"])
def test_rows_of_no_request_select_nothing(models, weights, path):
    work = workload(F32, weights, 13, (9,))
    server = work.server(models)
    hidden = np.full((12, F32.hidden_size), np.nan, np.float32)
    q_resid = np.full((12, F32.q_lora_rank), np.nan, np.float32)
    hidden[:9], q_resid[:9] = work.hidden[0], work.q_resid[0]
    (selected,) = models[F32][path].execute(
        server.tail,
        server.pooled_keys,
        hidden,
        q_resid,
        np.array([0, 9], np.uint32),
        np.array([0], np.uint32),
        np.array(SLOTS[:1], np.uint32),
    )
    rows = selected.to_numpy()
    want = select(work.scores[0], index_topk=F32.index_topk, kpool=F32.kpool)
    assert [set(row) for row in rows[:9]] == [set(row) for row in want]
    assert (rows[9:] == -1).all()


@pytest.mark.parametrize("path", PATHS)
def test_pools_past_the_cache_are_neither_kept_nor_selected(models, weights, path):
    tokens = F32.max_pools * F32.kpool + 30
    work = workload(F32, weights, 14, (tokens,))
    server = work.server(models)
    server.ragged({0: tokens - 42})
    while server.left(0):
        if path.startswith("decode"):
            server.decode([(0, min(NEXT_N, server.left(0)))], NEXT_N)
        else:
            server.ragged({0: min(11, server.left(0))}, path)
    work.scores[0][:, F32.max_pools :] = -np.inf
    work.check(server)
    kept = ~np.isnan(to_storage(server.pooled_keys)).all(axis=2)
    assert kept.sum(axis=1).tolist() == [
        F32.max_pools * (slot == SLOTS[0]) for slot in range(MAX_SLOTS)
    ]


def test_a_token_that_is_not_finite_disturbs_no_other_pool(models, weights):
    work = workload(F32, weights, 15, (120,))
    broken, kpool = 21, F32.kpool
    work.hidden[0][broken] = np.inf
    with np.errstate(invalid="ignore"):
        score(work, weights)
    # The rectifier makes zero of NaN.
    work.scores[0][broken:, broken // kpool] = 0
    server = work.server(models)
    server.ragged({0: 120})
    want = select(work.scores[0], index_topk=F32.index_topk, kpool=kpool)
    for position in range(120):
        if position != broken:
            row = want[position]
            assert server.selected[0, position] == set(row[row >= 0].tolist())
    assert server.selected[0, broken] <= set(range(broken + 1))


@pytest.mark.parametrize("path", PATHS)
def test_positions_past_two_to_the_24_are_exact(models, path):
    rng = np.random.default_rng(16)

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    # float32 has no odd number here, and the pools lie past the cache.
    base = 2**24
    positions = np.arange(base + 2, base + 5)
    rows = (1, NEXT_N) if path.startswith("decode") else (NEXT_N,)
    tables = (
        [positions.astype(np.int32).reshape(rows)]
        if path.startswith("decode")
        else [np.array([0, NEXT_N], np.uint32), positions[:1].astype(np.uint32)]
    )
    tail, pooled_keys = (
        kpool_graph.to_buffer(draw(2, *shape, F32.head_dim), F32.dtype)
        for shape in ((2, F32.ring_len), (F32.max_pools,))
    )
    before = pooled_keys.to_numpy().copy()
    (selected,) = models[F32][path].execute(
        tail,
        pooled_keys,
        draw(*rows, F32.hidden_size),
        draw(*rows, F32.q_lora_rank),
        *tables,
        np.array([1], np.uint32),
    )
    np.testing.assert_array_equal(pooled_keys.to_numpy(), before)
    newest = ([base, base + 1, base + 2], [], [base + 4])
    for row, want in zip(selected.to_numpy().reshape(NEXT_N, -1), newest, strict=True):
        chosen = np.sort(row[: F32.index_topk]).reshape(-1, F32.kpool)
        first = chosen[:, 0] // F32.kpool * F32.kpool
        assert (chosen == first[:, None] + np.arange(F32.kpool)).all()
        assert chosen.min() >= 0 and chosen.max() < F32.max_pools * F32.kpool
        assert row[F32.index_topk :].tolist() == want + [-1] * (3 - len(want))


@pytest.mark.parametrize("path", PATHS)
def test_what_the_ops_refuse_changes_neither_buffer(models, weights, path):
    work = workload(F32, weights, 17)
    server = work.server(models)
    serve = {request: 7 for request in range(3, 7)}
    server.ragged(serve)
    before = state(server)
    for slots, message in (
        ((3, 1, 3), r"slot_idx\[2\] must differ"),
        ((3, 1, MAX_SLOTS), r"slot_idx\[2\] must be below"),
    ):
        server.slots = [0, 0, 0, *slots, 2]
        with pytest.raises(Exception, match=message):
            if path.startswith("decode"):
                server.decode([(request, 2) for request in (3, 4, 5)], NEXT_N)
            else:
                server.ragged(dict.fromkeys((3, 4, 5), 5), path)
        assert state(server) == before


def test_the_judge_lets_only_rounding_decide_a_near_tie():
    def judge(got: set[int]) -> Judge:
        judge = Judge(replace(F32, index_topk=8), 0.1)
        scores = np.array([1.0, 5.0, 1.05, 0.2])
        positions = [4 * pool + member for pool in got for member in range(4)]
        want = frozenset([*range(4, 12), 16])
        judge.judge(0, 16, frozenset([*positions, 16]), want, scores)
        return judge

    assert judge({1, 2}).near_ties == judge({1, 0}).near_ties == [(0, 16)]
    for wrong in ({0, 2}, {1, 3}, {1}, {0, 1, 2}):
        with pytest.raises(AssertionError, match="request 0, position 16"):
            judge(wrong)


def test_the_judge_takes_no_other_pool_where_scores_differ():
    judge = Judge(replace(F32, index_topk=4), 0.1)
    scores, want = np.array([1.0, 5.0]), frozenset(range(4, 8))
    judge.judge(0, 7, want, want, scores)
    assert not judge.near_ties
    with pytest.raises(AssertionError, match="request 0, position 7"):
        judge.judge(0, 7, frozenset(range(4)), want, scores)
