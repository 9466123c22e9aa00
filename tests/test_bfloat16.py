"""bfloat16 through NumPy and through device buffers, bit for bit."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from max.dtype import DType

import kpool_graph
from asserts import assert_same_bits
from kpool_graph import bfloat16
from models import to_storage

EVERY_PATTERN = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
# Regression case 30 names these.
NAMED = {
    "zero": (0.0, 0x0000),
    "minus_zero": (-0.0, 0x8000),
    "one": (1.0, 0x3F80),
    "largest": (float(np.ldexp(255.0, 120)), 0x7F7F),
    "smallest_subnormal": (float(np.ldexp(1.0, -133)), 0x0001),
    "infinity": (np.inf, 0x7F80),
    "minus_infinity": (-np.inf, 0xFF80),
    "nan": (np.nan, 0x7FC0),
}


def test_every_bit_pattern_survives_the_round_trip():
    assert_same_bits(bfloat16.encode(bfloat16.decode(EVERY_PATTERN)), EVERY_PATTERN)


@pytest.mark.parametrize("value", NAMED)
def test_case_30_named_values_have_their_known_bits(value):
    """Regression case 30: 0, -0, 1, max, smallest subnormal, inf, NaN."""
    number, pattern = NAMED[value]
    assert bfloat16.encode(number) == pattern
    decoded = bfloat16.decode(pattern)
    np.testing.assert_array_equal(decoded, np.float32(number))
    assert np.signbit(decoded) == np.signbit(number)


def test_case_30_every_bit_pattern_survives_a_device_buffer():
    """Regression case 30: through memory that MAX owns, as bits and as values."""
    buffer = kpool_graph.to_buffer(EVERY_PATTERN, DType.bfloat16)
    assert buffer.dtype == DType.bfloat16
    assert_same_bits(to_storage(buffer), EVERY_PATTERN)
    values = kpool_graph.to_numpy(buffer)
    assert values.dtype == np.float32
    again = kpool_graph.to_buffer(values, DType.bfloat16)
    assert_same_bits(to_storage(again), EVERY_PATTERN)


def test_case_30_no_machine_learning_framework_is_needed():
    """Regression case 30: the round trip where importing any of them fails."""
    script = (
        "import sys\n"
        "for name in ('torch', 'tensorflow', 'jax', 'ml_dtypes'):\n"
        "    sys.modules[name] = None\n"
        "import numpy as np, kpool_graph\n"
        "from max.dtype import DType\n"
        "bits = np.array([0, 0x8000, 0x3F80, 0x7F7F, 1, 0x7F80, 0x7FC1], np.uint16)\n"
        "buffer = kpool_graph.to_buffer(bits, DType.bfloat16)\n"
        "again = kpool_graph.bfloat16.encode(kpool_graph.to_numpy(buffer))\n"
        "assert (again == bits).all(), again\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_rounding_is_to_the_nearest_and_ties_go_to_even():
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    # Ties, and their neighbours on both sides.
    patterns[:30_000] &= 0xFFFF0000
    patterns[:10_000] |= 0x8000
    patterns[10_000:20_000] |= 0x7FFF
    patterns[20_000:30_000] |= 0x8001
    values = patterns.view(np.float32)
    values = values[np.isfinite(values)].astype(np.float64)

    below = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    above = below + np.uint16(1)
    # What stands past the largest finite number, for the purpose of rounding.
    limit = np.ldexp(1.0, 128)
    upper = bfloat16.decode(above).astype(np.float64)
    upper = np.where(np.isinf(upper), np.copysign(limit, values), upper)
    to_below = np.abs(values - bfloat16.decode(below))
    to_above = np.abs(upper - values)
    nearest = np.where(
        (to_below < to_above) | ((to_below == to_above) & (below % 2 == 0)),
        below,
        above,
    )
    assert_same_bits(bfloat16.encode(values.astype(np.float32)), nearest)


def test_a_nan_stays_a_nan_whatever_its_payload():
    payloads = np.array([0x7F800001, 0xFF80FFFF, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    encoded = bfloat16.encode(payloads.view(np.float32))
    assert np.isnan(bfloat16.decode(encoded)).all()
    assert np.signbit(bfloat16.decode(encoded)).tolist() == [False, True, False, True]


def test_numbers_are_rounded_and_bits_are_taken_as_they_are():
    numbers = kpool_graph.to_buffer([1.0, -2.5], DType.bfloat16)
    patterns = kpool_graph.to_buffer(np.array([1, 2], np.uint16), DType.bfloat16)
    assert to_storage(numbers).tolist() == [0x3F80, 0xC020]
    assert to_storage(patterns).tolist() == [1, 2]


@pytest.mark.parametrize(
    "dtype", [DType.float32, DType.float16, DType.bfloat16, DType.int32, DType.uint32]
)
def test_buffers_are_dense_copies_that_share_no_memory(dtype):
    array = np.arange(24).reshape(4, 6)
    array = array.astype(np.uint16 if dtype == DType.bfloat16 else dtype.to_numpy())
    view = array[::2, ::3]
    want = view.copy()
    buffer = kpool_graph.to_buffer(view, dtype)
    array[:] = 0
    assert buffer.is_contiguous
    assert_same_bits(to_storage(buffer), want)

    copy = kpool_graph.to_numpy(buffer)
    copy[:] = 0
    assert_same_bits(to_storage(buffer), want)
