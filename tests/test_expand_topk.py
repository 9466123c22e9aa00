"""expand_topk against the oracle: selected pools to packed token positions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import declare
from ragged_asserts import run_expand_topk
from ragged_models import EXPAND_TOPKS, ExpandTopk, eighths

SMALL = declare(ExpandTopk(3, 4, True))
NO_TAIL = declare(ExpandTopk(2, 3, False))
GLM = declare(ExpandTopk(4, 512, True))
LAST_ID, FIRST_ID = 2**31 - 1, -(2**31)

every_geometry = pytest.mark.parametrize("op", EXPAND_TOPKS, ids=lambda op: op.name)


def tables(requests):
    """Lists row tables for requests of (cached tokens, new tokens)."""
    lengths, counts = np.array(requests, np.int64).reshape(-1, 2).T
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return offsets.astype(np.uint32), lengths.astype(np.uint32)


def draw_ids(rng, op, offsets, lengths):
    """Draws ids around what each query may select, and some far from it."""
    visible = np.repeat(lengths.astype(np.int64), np.diff(offsets)) + 1
    visible += np.arange(len(visible)) - np.repeat(offsets[:-1], np.diff(offsets))
    complete = visible[:, np.newaxis] // op.kpool
    shape = (len(visible), op.pool_topk)
    near = rng.integers(-2, np.maximum(complete, 1) + 3, shape)
    odd = rng.choice([-1, FIRST_ID, LAST_ID, *range(3)], shape)
    edge = complete - rng.integers(0, 2, shape)
    kind = rng.integers(0, 4, shape)
    ids = np.select([kind == 0, kind == 1], [odd, edge], near)
    return np.clip(ids, FIRST_ID, LAST_ID).astype(np.int32)


def assert_packed(selected):
    """Requires that no -1 stands before a position."""
    unused = selected == -1
    assert (selected >= -1).all()
    assert (unused[:, :-1] <= unused[:, 1:]).all()


@every_geometry
@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=6),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_ids_of_several_requests_match_the_oracle(models, op, requests, seed):
    offsets, lengths = tables(requests)
    ids = draw_ids(np.random.default_rng(seed), op, offsets, lengths)
    assert_packed(run_expand_topk(models[op], ids, offsets, lengths))


def test_positions_stand_in_selection_order_and_then_the_newest(models):
    # The query at position 10 sees 11 tokens: pools 0 to 2, and positions 9 and 10.
    selected = run_expand_topk(
        models[SMALL], np.array([[2, 0, 1, 2]], np.int32), *tables([(10, 1)])
    )
    assert selected.tolist() == [[6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize(
    ("ids", "positions"),
    [
        ([-1, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ([0, -1, 2, -1], [0, 1, 2, 6, 7, 8, 9, 10]),
        ([3, 1, 4, -5], [3, 4, 5, 9, 10]),
        ([LAST_ID, FIRST_ID, 3, 2], [6, 7, 8, 9, 10]),
        ([-1, -1, -1, -1], [9, 10]),
    ],
    ids=str,
)
def test_ids_that_are_negative_or_not_complete_are_dropped_and_the_rest_packed(
    models, ids, positions
):
    selected = run_expand_topk(
        models[SMALL], np.array([ids], np.int32), *tables([(10, 1)])
    )
    assert selected.tolist() == [positions + [-1] * (SMALL.columns - len(positions))]


def test_a_pool_is_selectable_from_its_last_member_on(models):
    # Five queries of one request at positions 4 to 8, each asking for pool 2.
    ids = np.full((5, 3), 2, np.int32)
    ids[:, 1:] = -1
    selected = run_expand_topk(models[NO_TAIL], ids, *tables([(4, 5)]))
    assert selected[:, :2].tolist() == [[-1, -1], [4, 5], [4, 5], [4, 5], [4, 5]]
    assert (selected[:, 2:] == -1).all()


def test_each_query_is_judged_by_its_own_requests_length(models):
    # The same ids for a request with 3 tokens, none, 12 and 6 tokens.
    requests = [(2, 1), (9, 0), (11, 1), (4, 2)]
    ids = np.tile(np.array([0, 1, 2, 3], np.int32), (4, 1))
    selected = run_expand_topk(models[SMALL], ids, *tables(requests))
    assert [[p for p in row if p >= 0] for row in selected.tolist()] == [
        [0, 1, 2],
        list(range(12)),
        [0, 1, 2, 3, 4],
        [0, 1, 2, 3, 4, 5],
    ]


def test_rows_that_no_request_owns_select_nothing(models):
    ids = np.zeros((9, SMALL.pool_topk), np.int32)
    offsets, lengths = np.array([2, 5, 5, 7], np.uint32), np.full(3, 20, np.uint32)
    selected = run_expand_topk(models[SMALL], ids, offsets, lengths)
    empty = (selected == -1).all(axis=1)
    assert empty.tolist() == [True, True] + [False] * 5 + [True, True]


@every_geometry
@pytest.mark.parametrize(
    "requests", [[], [(5, 0), (0, 0)]], ids=["empty_batch", "zero_tokens"]
)
def test_a_call_without_queries_selects_nothing(models, op, requests):
    ids = np.zeros((0, op.pool_topk), np.int32)
    selected = run_expand_topk(models[op], ids, *tables(requests))
    assert selected.shape == (0, op.columns)


@every_geometry
@pytest.mark.parametrize("visible", [2**20 + 1, 2**24 + 3, 2**31 - 5])
def test_positions_that_float32_would_lose_are_exact(models, op, visible):
    complete = visible // op.kpool
    ids = np.full((1, op.pool_topk), -1, np.int32)
    ids[0, :2] = complete - 1, complete
    selected = run_expand_topk(models[op], ids, *tables([(visible - 1, 1)]))
    newest = range(complete * op.kpool, visible) if op.always_select_tail else ()
    want = [*range((complete - 1) * op.kpool, complete * op.kpool), *newest]
    assert selected[0, : len(want)].tolist() == want
    assert (selected[0, len(want) :] == -1).all()


@every_geometry
def test_a_large_call_equals_its_parts(models, op):
    rng = np.random.default_rng(1)
    # Enough elements for several threads, and parts small enough for one.
    count = 150_000 // (3 * op.columns) + 8
    offsets, lengths = tables([(int(n), 3) for n in rng.integers(0, 2**12, count)])
    ids = draw_ids(rng, op, offsets, lengths)
    (selected,) = models[op](ids, offsets, lengths)
    for first, last in eighths(count):
        own = slice(offsets[first], offsets[last])
        (alone,) = models[op](
            ids[own], offsets[first : last + 1] - offsets[first], lengths[first:last]
        )
        np.testing.assert_array_equal(selected[own], alone)


def test_every_column_is_written_whatever_the_memory_held(models):
    rng = np.random.default_rng(2)
    for _ in range(3):
        offsets, lengths = tables([(4 * 512, 8)])
        full = np.tile(np.arange(512, dtype=np.int32), (8, 1))
        assert (models[GLM](full, offsets, lengths)[0][:, :2048] >= 0).all()
        run_expand_topk(
            models[GLM], rng.integers(-9, 9, full.shape, np.int32), *tables([(7, 8)])
        )
