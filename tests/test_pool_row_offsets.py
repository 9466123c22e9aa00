"""pool_row_offsets: where compress puts each request's pools, summed in the graph."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cases import KPOOLS
from models import declare
from ragged_models import PoolRowOffsets

OFFSETS = {kpool: declare(PoolRowOffsets(kpool)) for kpool in KPOOLS}

every_kpool = pytest.mark.parametrize("kpool", KPOOLS)


def run(models, kpool, requests):
    """Runs the graph on requests of (cached tokens, new tokens)."""
    lengths, counts = np.array(requests, np.int64).reshape(-1, 2).T
    offsets = np.concatenate(([0], np.cumsum(counts)))
    (rows,) = models[OFFSETS[kpool]](
        lengths.astype(np.uint32), offsets.astype(np.uint32)
    )
    assert rows.dtype == np.uint32
    return rows.tolist()


def whole_pools(kpool, cached, count):
    """Counts pools in exact integers: those between the first and last boundary."""
    first, last = -(-cached // kpool), (cached + count) // kpool
    return max(last - first, 0)


def sums(kpool, requests):
    totals = [0]
    for cached, count in requests:
        totals.append(totals[-1] + whole_pools(kpool, cached, count))
    return totals


lengths = st.one_of(
    st.integers(0, 40),
    st.integers(2**20 - 20, 2**20 + 20),
    st.integers(2**24 - 20, 2**24 + 20),
    st.integers(2**31 - 20, 2**31 + 20),
    st.integers(2**32 - 20, 2**32 - 1),
)


@every_kpool
@given(requests=st.lists(st.tuples(lengths, st.integers(0, 70)), max_size=8))
def test_the_sums_are_those_of_exact_integers(models, kpool, requests):
    assert run(models, kpool, requests) == sums(kpool, requests)


@every_kpool
def test_every_alignment_and_count_is_summed(models, kpool):
    requests = [
        (cached, count)
        for cached in range(2 * kpool + 1)
        for count in range(3 * kpool + 1)
    ]
    assert run(models, kpool, requests) == sums(kpool, requests)


@every_kpool
def test_a_chunk_inside_one_pool_takes_no_row_and_gives_none_back(models, kpool):
    # ceil(cached / kpool) is above (cached + count) // kpool there.
    inside = [(1, max(kpool - 2, 0)), (0, kpool)]
    assert run(models, kpool, inside) == sums(kpool, inside)
    assert run(models, kpool, [(5 * kpool + kpool // 2, 0)] * 3) == [0] * 4


@every_kpool
def test_an_empty_batch_has_one_offset(models, kpool):
    assert run(models, kpool, []) == [0]


def test_offsets_that_do_not_start_at_zero_count_only_what_is_owned(models):
    (rows,) = models[OFFSETS[4]](
        np.array([0, 3], np.uint32), np.array([5, 14, 20], np.uint32)
    )
    assert rows.tolist() == [0, 2, 3]


def test_more_tokens_than_float32_counts_are_summed_exactly(models):
    requests = [(3, 2**24 + 1), (2**24 + 1, 2**24 + 3), (1, 2**26 + 7)]
    for kpool in KPOOLS:
        assert run(models, kpool, requests) == sums(kpool, requests)
