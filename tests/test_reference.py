"""The oracle against numbers worked by hand, and the ruler that uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from max.dtype import DType

from asserts import assert_pooled, assert_same_bits, ulp
from cases import DTYPES, encode
from kpool_graph import reference

F32, F16, BF16 = DTYPES


def ramp(positions, head_dim=2):
    return np.repeat(np.array(positions, np.float32)[..., np.newaxis], head_dim, -1)


def test_equal_gates_give_the_mean():
    pooled = reference.pool(ramp(range(8, 12)), np.zeros((4, 2)), np.zeros((4, 2)))
    assert pooled.tolist() == [9.5, 9.5]


def test_weights_are_a_softmax_of_gate_plus_ape_for_each_channel():
    keys = np.array([[10, 10], [50, 50]], np.float32)
    # Weights 1:3 by the gate in channel 0, and 3:1 by ape in channel 1.
    gates = np.array([[0, 7], [np.log(3), 7]], np.float32)
    ape = np.array([[-2, np.log(3)], [-2, 0]], np.float32)
    np.testing.assert_allclose(reference.pool(keys, gates, ape), [40, 20], rtol=1e-7)


def test_gates_past_the_range_of_exp_do_not_overflow():
    gates = np.array([[1e30], [1e30], [-1e30]], np.float32)
    keys = np.array([[1], [3], [777]], np.float32)
    assert reference.pool(keys, gates, np.zeros((3, 1))).tolist() == [2]


def test_a_single_member_is_the_pool_whatever_its_gate():
    gates = np.array([[np.nan, np.inf, -np.inf]], np.float32)
    pooled = reference.pool(np.array([[1, 2, 3]], np.float32), gates, gates)
    assert pooled.tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_stored_elements_are_read_as_numbers(dtype):
    numbers = [0, -1.5, 96, np.inf]
    assert reference.values(encode(numbers, dtype)).tolist() == numbers


def test_every_bit_pattern_is_read_without_a_warning():
    patterns = np.arange(2**16, dtype=np.uint32)
    halves = patterns.astype(np.uint16)
    for storage in (halves, halves.view(np.float16), (patterns << 16).view(np.float32)):
        assert reference.values(storage).dtype == np.float64
    # A signalling NaN.
    assert np.isnan(reference.values(np.array([0x7F800001], np.uint32).view("f4")))


@pytest.mark.parametrize(
    ("start", "count", "entries"),
    [
        (0, 6, [4, 5, 777, 777]),
        (0, 8, [777, 777, 777, 777]),
        (0, 3, [0, 1, 2, 777]),
        (5, 2, [777, 5, 6, 777]),
        (5, 4, [8, 777, 777, 777]),
        (6, 0, [777, 777, 777, 777]),
    ],
)
def test_seed_tail_keeps_the_tokens_of_the_unfinished_pool(start, count, entries):
    tail = np.full((3, 2, 4, 2), 777, np.float32)
    k = ramp(range(start, start + count))
    gate = -k
    reference.seed_tail(tail, k, gate, [0, count], [start], [1], kpool=4)
    assert tail[1, 0, :, 1].tolist() == entries
    stored = [777 if entry == 777 else -entry for entry in entries]
    assert tail[1, 1, :, 1].tolist() == stored
    assert (tail[[0, 2]] == 777).all()


def test_tail_update_stashes_every_token_and_closes_pools_in_order():
    tail = np.full((2, 2, 4, 2), 777, np.float32)
    k = ramp([range(9)])
    pooled, closed = reference.tail_update(
        tail, k, k * 0, np.zeros((4, 2)), np.arange(9)[np.newaxis], [1], kpool=4
    )
    assert closed.tolist() == [[0, 1, -1]]
    assert pooled[0, :, 0].tolist() == [1.5, 5.5, 0]
    assert tail[1, 0, :, 0].tolist() == [8, 5, 6, 7]
    assert (tail[0] == 777).all()


def test_tail_update_reads_old_members_and_skips_padding():
    tail = np.full((1, 2, 6, 2), 777, np.float32)
    tail[0, 0, [4, 5]], tail[0, 1] = ramp([4, 5]), 0
    pooled, closed = reference.tail_update(
        tail,
        ramp([[1000, 6, 1000, 7]]),
        np.zeros((1, 4, 2), np.float32),
        np.zeros((4, 2)),
        np.array([[-1, 6, -5, 7]]),
        [0],
        kpool=4,
    )
    assert closed.tolist() == [[1]]
    assert pooled[0, 0].tolist() == [5.5, 5.5]
    assert tail[0, 0, :, 0].tolist() == [6, 7, 777, 777, 4, 5]


@pytest.mark.parametrize(
    ("dtype", "at_one", "smallest"),
    [(F32, -23, -149), (F16, -10, -24), (BF16, -7, -133)],
    ids=lambda each: each.name if isinstance(each, DType) else None,
)
def test_an_ulp_is_the_distance_to_the_next_number(dtype, at_one, smallest):
    values = np.array([1, 1.5, -1, 2, 0.5, 0, np.ldexp(1.0, smallest), 1e-300])
    exponents = [at_one, at_one, at_one, at_one + 1, at_one - 1] + [smallest] * 3
    assert ulp(values, dtype).tolist() == np.ldexp(1.0, exponents).tolist()


def test_the_bound_is_one_ulp_and_what_float32_costs():
    keys = np.array([[3], [-8]], np.float32)
    gates = np.array([[1], [-4]], np.float32)
    ape = np.array([[1], [-2]], np.float32)
    bound = reference.pool_tolerance(keys, gates, ape, np.array([0.5]))
    assert bound.tolist() == [0.5 + (2 + 8 + 2 * 6) * 2.0**-24 * 8]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_the_ruler_accepts_the_nearest_number_and_refuses_two_ulp_more(dtype):
    rng = np.random.default_rng(1)
    keys = encode(rng.uniform(1, 2, (4, 50)), dtype)
    gates = encode(rng.uniform(-1, 1, (4, 50)), dtype)
    ape = np.zeros((4, 50), np.float32)
    exact = reference.pool(keys, gates, ape)
    assert_pooled(encode(exact, dtype), keys, gates, ape, dtype, "nearest")
    ulps = 2 if dtype != F32 else 2 + (4 + 8 + 2) * 2
    off = exact.copy()
    off[17] += ulps * ulp(exact, dtype)[17]
    with pytest.raises(AssertionError, match=r"far: 1 of 50 .* first 17: got"):
        assert_pooled(encode(off, dtype), keys, gates, ape, dtype, "far")


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_the_ruler_refuses_what_is_not_finite(wrong):
    keys, zeros = ramp([1, 2]), np.zeros((2, 2), np.float32)
    got = np.array([1.5, wrong], np.float32)
    with pytest.raises(AssertionError, match="first 1: got"):
        assert_pooled(got, keys, zeros, zeros, F32, "pool")


def test_the_ruler_for_copies_sees_signs_and_payloads():
    for got, want in ((0.0, -0.0), (np.nan, -np.nan), (1.0, np.nextafter(1, 2))):
        with pytest.raises(AssertionError, match="1 of 1 elements differ"):
            assert_same_bits(np.array([got]), np.array([want]))
    assert_same_bits(np.array([np.nan]), np.array([np.nan]))


def test_the_oracle_runs_without_max():
    package = Path(reference.__file__).parent
    script = (
        "import sys, types\n"
        "sys.modules['max'] = sys.modules['mojo'] = None\n"
        "package = types.ModuleType('kpool_graph')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "sys.modules['kpool_graph'] = package\n"
        "from kpool_graph import reference\n"
        "import numpy as np\n"
        "keys = np.array([[1.0], [2.0]], np.float32)\n"
        "assert reference.pool(keys, 0 * keys, 0 * keys) == 1.5\n"
    )
    subprocess.run([sys.executable, "-c", script, str(package)], check=True)
